"""Timed candidates, one per case: their inputs are bound beforehand, so a call computes and copies nothing else.

Before it is timed, a candidate must compute the result of PyTorch on these inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.base.dtypes import TensorInfo, numpy_dtype
from effexport.base.errors import RuntimeUnsupportedError, StageError, is_out_of_memory
from effexport.base.runtimes import DEFAULT_RUNTIME, RUNTIMES
from effexport.bench.grid import Agreement, BenchCase
from effexport.export.onnx_graph import GraphSignature
from effexport.models.size_formula import shape_of
from effexport.plugins.ops import DOMAIN, OPS
from effexport.runners.runner import FeedLimits, Runner

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effexport.base.dtypes import Array
    from effexport.base.spec import BuildSpec
    from effexport.proof.cases import Case
    from effexport.proof.check import Check
    from effexport.proof.module_runs import Answer
    from effexport.quantize.record import Quantization

    OpenGiven = Callable[[Sequence[str]], tuple[Runner | None, dict[str, str]]]

INPUT_SEED = 20_240_101
OUTPUT = "context"


def module_from_case(case: BenchCase) -> nn.Module:
    """The module to time: the layer or encoder, or for the scope "core" the attention in it.

    Float32, in evaluation mode, not fused; the weights are drawn from a seed.
    """
    from effexport.export.module_source import module_from_seed
    from effexport.models.layers import AttentionCore, AttentionLayer

    module = module_from_seed(case.spec)
    if case.scope != "core":
        return module
    assert isinstance(module, AttentionLayer)
    return AttentionCore(module).eval()


def signature_of_case(case: BenchCase) -> GraphSignature:
    """Inputs and outputs of what is timed, in the order of the module's arguments.

    They are found without the module, so that measuring memory need not load PyTorch.
    """
    spec = spec_of_file(case)
    if case.scope != "core":
        return GraphSignature(spec.inputs, spec.outputs, spec.custom_ops)
    heads, channels = spec.attention.projected

    def tensor(name: str, width: int) -> TensorInfo:
        return TensorInfo(name, spec.dtype, ("batch", heads, spec.model.fixed_seq_len or "seq", width))

    inputs, output = tuple(map(tensor, channels, channels.values())), tensor(OUTPUT, channels["v"])
    return GraphSignature(inputs, (output,), spec.custom_ops)


def inputs_of_case(case: BenchCase) -> dict[str, Array]:
    """The inputs of every candidate of a size: the same normal numbers or random tokens, and a mask of ones."""
    from effexport.proof.inputs import random_inputs

    rng, sizes = np.random.default_rng(INPUT_SEED), {"batch": case.batch, "seq": case.seq_len}
    inputs = signature_of_case(case).inputs
    if case.scope != "core":
        drawn = random_inputs(case.spec, rng, case.batch, case.seq_len, None)
    else:
        drawn = {one.name: rng.standard_normal(shape_of(one.dims, sizes), dtype=np.float32) for one in inputs}
    return {one.name: drawn[one.name].astype(numpy_dtype(one.dtype), copy=False) for one in inputs}


def spec_of_file(case: BenchCase) -> BuildSpec:
    """The spec of what a runtime runs. As in a build, bfloat16 on a CPU is that of linear layers, if the model has any;
    PyTorch and plain exports compute all of it."""
    runtime = RUNTIMES[case.runtime]
    is_whole = case.scope == "core" or runtime.graph != "ours" or runtime.device != "cpu"
    return case.spec.decided(has_engines=is_whole)


def onnx_from_case(case: BenchCase, path: Path) -> None:
    """Export the model of a case with our operators and their bodies to `path`; batch and length stay free.

    Raises StageError when the exporter fails or the graph does not have the expected signature.
    """
    from effexport.export.onnx_from_module import GraphFile, at_precision, onnx_from_module, write_graph

    spec, module = spec_of_file(case), module_from_case(case)
    if case.scope != "core":
        onnx_from_module(module, spec, path, quantization=bfloat16_layers(module, case) if spec.is_quantized else None)
        return
    write_graph(
        at_precision(module, spec.precision), example_of_case(case), signature_of_case(case), GraphFile(path, spec)
    )


def bfloat16_layers(module: nn.Module, case: BenchCase) -> Quantization:
    """The linear layers that a build computes in bfloat16."""
    from effexport.proof.quantized import run_with_buckets
    from effexport.quantize.calibration import prepared
    from effexport.quantize.record import Samples

    spec = spec_of_file(case)  # the sample only shows which layers are called
    sample = replace(case, batch=1, seq_len=min(case.seq_len, 64), model_seq_len=spec.model.seq_len)
    origin = Samples(source="", sha256="", samples=1)
    return prepared(module, spec, [inputs_of_case(sample)], origin, lambda m, x: run_with_buckets(m, spec, x))[1]


def example_of_case(case: BenchCase) -> tuple[torch.Tensor, ...]:
    """Small inputs for tracing, of the sizes at which a build traces its model.

    One token less than the longest: a length that equals the number of learned positions would become a constant.
    """
    import torch

    model = case.model
    sizes = dict(model.trace_sizes)
    if model.max_seq_len is not None:
        sizes["seq"] = max(1, min(sizes["seq"], model.max_seq_len - 1))
    return tuple(
        torch.zeros(shape_of(tensor.dims, sizes), dtype=getattr(torch, tensor.dtype))
        for tensor in signature_of_case(case).inputs
    )


STAGE = "plain export"


def naive_onnx_from_case(case: BenchCase, path: Path) -> None:
    """Export the formulas as PyTorch runs them to `path`: only standard operators, with dynamic batch and length.

    Raises StageError when the exporter fails, or an operator of ours has no form for it.
    """
    import torch

    from effexport.base.quiet import quiet
    from effexport.export.failures import reason_of
    from effexport.export.onnx_from_module import at_precision

    spec, signature = case.spec, signature_of_case(case)
    with quiet(streams=True):
        try:
            program = plain_program(at_precision(module_from_case(case), spec.precision), case)
            ours = (node.target for node in program.graph.nodes if getattr(node.target, "namespace", "") == DOMAIN)
            if left := sorted({target.name() for target in ours}):
                loops = f"{', '.join(left)} computes token by token, which torch.onnx cannot trace at a free length"
                raise StageError(STAGE, loops)
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=spec.opset,
                input_names=[tensor.name for tensor in signature.inputs],
                output_names=[tensor.name for tensor in signature.outputs],
                verbose=False,
            )
        except StageError:
            raise
        except Exception as error:  # the exporter has no common base class for its errors
            raise StageError(STAGE, f"torch.onnx could not export the module: {reason_of(error)}") from error
    assert exported is not None
    exported.save(path)


def plain_program(module: nn.Module, case: BenchCase) -> torch.export.ExportedProgram:
    """The traced module, with our operators replaced by the PyTorch code of their references."""
    import torch

    from effexport.export.user_program import free_axes
    from effexport.models.layers import fused_operators

    shapes = free_axes(module, signature_of_case(case).inputs, lambda axis: torch.export.Dim.DYNAMIC)
    with torch.no_grad(), fused_operators(module, False):
        program = torch.export.export(module, example_of_case(case), dynamic_shapes=shapes, strict=False)
        table: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions().items())
        table.update(reference_of_operator())
        plain: torch.export.ExportedProgram = program.run_decompositions(table)
        return plain


def reference_of_operator() -> dict[Any, Callable[..., Any]]:
    """Torch operator → its reference, for each of our operators."""
    import torch

    references: dict[Any, Callable[..., Any]] = {}
    for op in OPS.values():
        module = op.load()  # which declares the operator
        reference = getattr(module, "exportable_reference", module.reference)
        if reference is None:
            continue
        overload = getattr(torch.ops.effexport, op.torch_name).default
        # a traced call leaves out arguments that have their default
        defaults = {argument.name: argument.default_value for argument in overload._schema.arguments}
        references[overload] = partial(with_defaults, reference, defaults)
    return references


def with_defaults(function: Callable[..., Any], defaults: Mapping[str, Any], *given: Any, **named: Any) -> Any:
    """Call the function, with defaults for arguments that are left out at the end."""
    return function(*given, **dict([*defaults.items()][len(given) :]) | named)


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


# Messages of compilers and runtimes are long; their beginning names the cause.
LONGEST_MESSAGE = 300


class TorchCandidate:
    """A module in eager PyTorch, or compiled."""

    def __init__(self, case: BenchCase) -> None:
        import torch

        from effexport.export.onnx_from_module import at_precision

        runtime = RUNTIMES[case.runtime]
        module = at_precision(module_from_case(case), case.precision).to(runtime.device)
        self.implementation: dict[str, str] = {}
        # the lengths of a benchmark are known, so each is compiled separately
        self._call: Any = torch.compile(module, dynamic=False) if runtime.compiled else module
        self._case = case
        self._device = runtime.device
        self._given: tuple[torch.Tensor, ...] = ()
        self._result: torch.Tensor | None = None

    def bind(self, feeds: Mapping[str, Array]) -> None:
        from effexport.proof.module_runs import arguments

        # copies, like the bound inputs of other runtimes; of floats these are copies already
        inputs = arguments(self._call, signature_of_case(self._case), feeds)
        self._given = tuple(x.to(self._device, copy=not x.is_floating_point()) for x in inputs)

    def run(self) -> None:
        import torch

        with torch.inference_mode():
            self._result = self._call(*self._given)
            synchronize(self._device)

    def outputs(self) -> dict[str, Array]:
        assert self._result is not None
        (tensor,) = signature_of_case(self._case).outputs
        value = self._result.detach().cpu()
        # numpy reads no bfloat16 of PyTorch; converting through float32 is exact
        return {tensor.name: value.float().numpy().astype(numpy_dtype(str(value.dtype).removeprefix("torch.")))}

    def with_buckets(self, feeds: Mapping[str, Array], buckets: Mapping[str, Array]) -> None:
        return None

    def release(self) -> None:
        """Free inputs and outputs."""
        self._given, self._result = (), None

    def close(self) -> None:
        self.release()
        self._call = None


class RunnerCandidate:
    """A runner of any runtime. open_given: opens its model with the buckets of some hashes as inputs."""

    def __init__(self, runner: Any, open_given: OpenGiven = lambda hashes: (None, {})) -> None:
        self._runner = runner
        self._open_given = open_given
        self._bound: Any = None
        self.implementation: dict[str, str] = dict(runner.implementation)

    def bind(self, feeds: Mapping[str, Array]) -> None:
        self._bound = self._runner.bind(feeds)

    def run(self) -> None:
        self._bound.run()

    def outputs(self) -> dict[str, Array]:
        return dict(self._bound.outputs())

    def with_buckets(
        self, feeds: Mapping[str, Array], buckets: Mapping[str, Array]
    ) -> tuple[dict[str, Array], dict[str, Array]] | None:
        from effexport.proof.candidate import OpenedCandidate

        runner, values = self._open_given(tuple(buckets))
        if runner is None:
            return None
        with runner:
            return OpenedCandidate(runner, runner, values).run_with_given(feeds, buckets)

    def close(self) -> None:
        self._bound = None
        self._runner.close()


# A loaded model. bind: put inputs in place, once, before the first run. run: one call, finished when it returns.
# outputs: those of the last call, by name, on the host. implementation: per custom operator, what runs it.
# with_buckets: for a model that hashes, the outputs with these buckets, and the buckets that it would have chosen; None
# if its buckets cannot be set.
Candidate = TorchCandidate | RunnerCandidate


def candidate_from_case(case: BenchCase, model: Path | None, *, threads: int, memory_arena: bool = True) -> Candidate:
    """model: the ONNX file or engine, where the runtime reads one. memory_arena: see RunOptions.

    Raises EffexportError for a model that does not load.
    """
    runtime = RUNTIMES[case.runtime]
    if not runtime.graph:
        return TorchCandidate(case)
    assert model is not None
    if runtime.engine:
        from effexport.tensorrt.runner import TrtRunner

        return RunnerCandidate(TrtRunner(model))
    from effexport.proof.candidate import opened_with_given
    from effexport.runners.artifact_runner import model_opener
    from effexport.runners.options import RunOptions

    options = RunOptions(
        # a runtime of `bench` alone is ONNX Runtime in another form
        runtime=runtime.name if runtime.folder else DEFAULT_RUNTIME,
        implementation=runtime.implementation,
        threads=threads,
        memory_arena=memory_arena or runtime.device != "cpu",
    )
    open_model, limits = model_opener(options), FeedLimits()
    runner = open_model(model, limits, None)
    return RunnerCandidate(runner, lambda hashes: opened_with_given(model, hashes, limits, open_model))


def engine_from_case(case: BenchCase, model: Path, output: Path) -> None:
    """A TensorRT engine for the one size of a case. Raises what `engine_from_onnx` raises."""
    from effexport.tensorrt.engine_from_onnx import engine_from_onnx
    from effexport.tensorrt.spec import EngineSpec, Profile, parse_profile

    profile = Profile(parse_profile(f"batch={case.batch},seq={case.seq_len}"))
    spec = EngineSpec(target=case.runtime, profiles=(profile,))
    engine_from_onnx(model, spec, output, precision=case.spec.precision)


def is_limit_of_machine(error: BaseException) -> bool:
    """True if an error is not a failure of the model: there is too little memory, or the runtime has no kernel for an
    element type, such as bfloat16 on a CPU."""
    is_beyond_runtime = isinstance(error, RuntimeUnsupportedError) and "NOT_IMPLEMENTED" in str(error)
    return is_beyond_runtime or is_out_of_memory(error)


def short(error: BaseException | str) -> str:
    """The beginning of a message, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} …"


def reference_of_case(case: BenchCase, feeds: Mapping[str, Array]) -> Case:
    """The answers of the float32 module to the inputs that will be timed, as a case of the proof.

    Raises StageError if the module does not give the same answer twice.
    """
    from effexport.export.onnx_from_module import at_precision
    from effexport.proof.cases import Case
    from effexport.proof.float64 import warm_up
    from effexport.proof.module_runs import RepeatedRuns, other_rotations
    from effexport.proof.tolerances import rms_change

    spec, module = case.spec, module_from_case(case)
    mask = np.ones((case.batch, case.seq_len), dtype=np.int64)
    golden = Case("timed inputs", {**feeds, "attention_mask": mask}, {})
    runs = RepeatedRuns("PyTorch")

    def repeated(other: nn.Module) -> Answer:
        return runs.answer(golden.label, lambda: answer(other, case, feeds))

    def noise(other: nn.Module) -> float:
        return rms_change(golden, repeated(other)["outputs"])

    warm_up()
    golden = golden.with_parts(repeated(module))
    if not spec.attention.is_hashed:
        return golden
    with other_rotations(module):
        seed_noise = noise(module)
    precision_noise = 0.0 if case.precision == "fp32" else noise(at_precision(module, case.precision))
    return replace(golden, seed_noise=seed_noise, precision_noise=precision_noise)


def answer(module: nn.Module, case: BenchCase, feeds: Mapping[str, Array]) -> Answer:
    """The parts of a module's answer, tokens first; one sample at a time, to save memory."""
    from effexport.proof.module_runs import recorded_run

    given = ({name: x[i : i + 1] for name, x in feeds.items()} for i in range(case.batch))
    samples = [recorded_run(module, signature_of_case(case), inputs) for inputs in given]
    parts = {
        part: {name: np.concatenate([sample[part][name] for sample in samples]) for name in arrays}
        for part, arrays in samples[0].items()
    }
    return parts | {"outputs": tokens_first(case, parts["outputs"])}


def tokens_first(case: BenchCase, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """[batch, heads, seq, channels] → [batch, seq, heads · channels], so that errors are judged token by token."""
    if case.scope != "core":
        return dict(outputs)
    return {name: x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1) for name, x in outputs.items()}


def agreement(candidate: Candidate, case: BenchCase, golden: Case) -> Agreement:
    """Compare the outputs of the candidate's last call. Names, types and shapes first, then NaN, then the numbers."""
    outputs = candidate.outputs()
    sizes = {"batch": case.batch, "seq": case.seq_len}
    expected = {tensor.name: (tensor.dtype, shape_of(tensor.dims, sizes)) for tensor in signature_of_case(case).outputs}
    actual = {name: (array.dtype.name, array.shape) for name, array in outputs.items()}
    if actual != expected:
        problem = f"outputs are {actual}; expected {expected}"
        return Agreement(passed=False, metric="names, dtypes, shapes", value=None, limit=None, detail=problem)
    checks = list(judged_checks(candidate, case, golden, tokens_first(case, outputs)))
    # the first failure, or the check with the most informative number: the first after finiteness
    shown = next((check for check in checks if check.status != "passed"), checks[1])
    return Agreement(
        passed=shown.status == "passed",
        metric=shown.metric,
        value=shown.value if shown.value is None or math.isfinite(shown.value) else None,
        limit=shown.limit,
        detail="; ".join(part for part in (shown.name, shown.reason, shown.detail) if part),
    )


def judged_checks(candidate: Candidate, case: BenchCase, golden: Case, outputs: Mapping[str, Array]) -> Iterator[Check]:
    """The checks of `effexport verify` that apply to a single answer.

    A model that hashes runs again with the buckets of the reference, so that small faults show. If its buckets cannot
    be set, only the free run is judged, with a wider limit: one bucket that rounding flips shifts chunk boundaries, and
    changes a third of all tokens a little.
    """
    from effexport.proof.check import Kind
    from effexport.proof.checks.arithmetic import check_finite, check_free_run, check_given_buckets, check_numbers

    spec = case.spec
    yield check_finite(golden.label, outputs)
    if not spec.attention.is_hashed:
        yield from check_numbers(golden, outputs, spec, Kind.ARITHMETIC)
        return
    feeds = {tensor.name: golden.inputs[tensor.name] for tensor in signature_of_case(case).inputs}
    given = candidate.with_buckets(feeds, golden.buckets)
    if given is not None:
        yield from check_given_buckets(golden, tokens_first(case, given[0]), given[1], spec)
    yield check_free_run(golden, outputs, spec)
