"""What is timed: the module of a case, its inputs, its ONNX file, and one object per case that runs it.

Inputs are bound beforehand, so that a call computes and copies nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.bench.grid import spec_from_case
from effexport.bench.results import Case
from effexport.dtypes import TensorInfo, numpy_dtype
from effexport.errors import EffexportError, RuntimeUnsupportedError, StageError
from effexport.export.onnx_graph import GraphSignature
from effexport.models.size_formula import shape_of
from effexport.plugins.ops import DOMAIN, OPS
from effexport.runners.feeds import FeedLimits
from effexport.runtimes import CUDA, DEFAULT_RUNTIME, RUNTIMES, Runtime

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effexport.dtypes import Array
    from effexport.proof.candidate import OpenedCandidate as Bucketed
    from effexport.runners.artifact_runner import OpenModel

    OpenGiven = Callable[[Sequence[str]], AbstractContextManager[Bucketed] | None]

INPUT_SEED = 20_240_101
OUTPUT = "context"


def module_from_case(case: Case) -> nn.Module:
    """The module to time: the layer or encoder, or for the scope "core" the attention in it.

    Float32, in evaluation mode, not fused; the weights are drawn from a seed.
    """
    from effexport.export.module_source import module_from_seed
    from effexport.models.layers import AttentionCore, AttentionLayer

    module = module_from_seed(spec_from_case(case))
    if case.scope != "core":
        return module
    assert isinstance(module, AttentionLayer)
    return AttentionCore(module).eval()


def signature_of_case(case: Case) -> GraphSignature:
    """Inputs and outputs of what is timed, in the order of the module's arguments.

    They are found without the module, so that measuring memory need not load PyTorch.
    """
    spec = spec_from_case(case)
    if case.scope != "core":
        return GraphSignature(spec.inputs, spec.outputs, spec.custom_ops)
    heads, channels = spec.attention.projected

    def tensor(name: str, width: int) -> TensorInfo:
        return TensorInfo(name, spec.dtype, ("batch", heads, spec.model.fixed_seq_len or "seq", width))

    inputs, output = tuple(map(tensor, channels, channels.values())), tensor(OUTPUT, channels["v"])
    return GraphSignature(inputs, (output,), spec.custom_ops)


def inputs_of_case(case: Case) -> dict[str, Array]:
    """The inputs of every candidate of a size: normal numbers or random tokens, and a mask of ones."""
    spec, rng = spec_from_case(case), np.random.default_rng(INPUT_SEED)
    sizes = {"batch": case.batch, "seq": case.seq_len}
    arrays: dict[str, Array] = {}
    for tensor in signature_of_case(case).inputs:
        shape = shape_of(tensor.dims, sizes)
        if tensor.name == "attention_mask":
            arrays[tensor.name] = np.ones(shape, dtype=np.int64)
        elif tensor.dtype == "int64":
            arrays[tensor.name] = rng.integers(0, spec.model.input_limits[tensor.name], shape, dtype=np.int64)
        else:
            arrays[tensor.name] = rng.standard_normal(shape, dtype=np.float32).astype(
                numpy_dtype(tensor.dtype), copy=False
            )
    return arrays


def tensors_from_arrays(case: Case, arrays: Mapping[str, Array], device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """The inputs as PyTorch takes them, at the precision of the case."""
    import torch

    tensors = []
    for tensor in signature_of_case(case).inputs:
        array = arrays[tensor.name]
        # PyTorch does not know numpy's bfloat16; converting through float32 is exact
        value = torch.from_numpy(array if array.dtype == np.int64 else array.astype(np.float32, copy=False))
        tensors.append(value.to(device=device, dtype=getattr(torch, tensor.dtype)))
    return tuple(tensors)


def onnx_from_case(case: Case, path: Path) -> None:
    """Export the model of a case with our operators and their bodies to `path`; batch and length stay free.

    Raises StageError when the exporter fails or the graph does not have the expected signature.
    """
    from effexport.export.onnx_from_module import at_precision, onnx_from_module, write_graph

    spec, module = spec_from_case(case), module_from_case(case)
    if case.scope != "core":
        onnx_from_module(module, spec, path)
        return
    write_graph(at_precision(module, spec.precision), example_of_case(case), signature_of_case(case), spec, path)


def example_of_case(case: Case) -> tuple[torch.Tensor, ...]:
    """Small inputs for tracing, of the sizes of `example_inputs`.

    One token less than the longest: a length that equals the number of learned positions would become a constant.
    """
    import torch

    from effexport.export.onnx_from_module import example_inputs

    spec = spec_from_case(case)
    batch, seq_len = example_inputs(spec)[0].shape[:2]
    if spec.model.max_seq_len is not None:
        seq_len = max(1, min(seq_len, spec.model.max_seq_len - 1))
    sizes = {"batch": batch, "seq": seq_len}
    return tuple(
        torch.zeros(shape_of(tensor.dims, sizes), dtype=getattr(torch, tensor.dtype))
        for tensor in signature_of_case(case).inputs
    )


STAGE = "plain export"


def naive_onnx_from_case(case: Case, path: Path) -> None:
    """Export the formulas as PyTorch runs them to `path`: only standard operators, with dynamic batch and length.

    Raises StageError when the exporter fails, or one of our operators is left.
    """
    import torch

    from effexport.export.onnx_from_module import at_precision
    from effexport.quiet import quiet

    spec, signature = spec_from_case(case), signature_of_case(case)
    with quiet(streams=True):
        try:
            program = plain_program(at_precision(module_from_case(case), spec.precision), case)
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=spec.opset,
                input_names=[tensor.name for tensor in signature.inputs],
                output_names=[tensor.name for tensor in signature.outputs],
                verbose=False,
            )
        except Exception as error:  # the exporter has no common base class for its errors
            cause = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise StageError(STAGE, f"torch.onnx could not export the module: {cause[0]}") from error
    assert exported is not None
    left = sorted({node.op_type for node in exported.model.graph.all_nodes() if node.domain == DOMAIN})
    if left:
        raise StageError(STAGE, f"our operators are left in the graph: {', '.join(left)}")
    exported.save(path)


def plain_program(module: nn.Module, case: Case) -> torch.export.ExportedProgram:
    """The traced module, with our operators replaced by the PyTorch code of their references."""
    import torch

    from effexport.export.user_program import takes_star_args
    from effexport.models.layers import fused_operators

    dynamic: Any = tuple(
        {i: torch.export.Dim.DYNAMIC for i, dim in enumerate(tensor.dims) if isinstance(dim, str)}
        for tensor in signature_of_case(case).inputs
    )
    shapes = (dynamic,) if takes_star_args(module) else dynamic
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
        overload = getattr(torch.ops.effexport, op.torch_name).default
        # a traced call leaves out arguments that have their default
        defaults = {argument.name: argument.default_value for argument in overload._schema.arguments}
        references[overload] = with_defaults(reference, defaults)
    return references


def with_defaults(function: Callable[..., Any], defaults: dict[str, Any]) -> Callable[..., Any]:
    """The function, with defaults for arguments that are left out at the end."""
    names = list(defaults)

    def call(*given: Any, **named: Any) -> Any:
        return function(*given, **{name: defaults[name] for name in names[len(given) :]} | named)

    return call


# Messages of compilers and runtimes are long; their beginning names the cause.
LONGEST_MESSAGE = 300


class NotRunnableError(Exception):
    """A case cannot run on this machine; the message says why. This is not a failure of the model."""


class TorchCandidate:
    """A module in eager PyTorch, or compiled. Raises NotRunnableError if torch.compile finds no compiler."""

    def __init__(self, case: Case, *, compiled: bool = False, device: str = "cpu") -> None:
        import torch

        from effexport.environment import has_compiler
        from effexport.export.onnx_from_module import at_precision

        module = at_precision(module_from_case(case), case.precision).to(device)
        self.implementation: dict[str, str] = {}
        self._call: Any = module
        if compiled:
            if not has_compiler():
                raise NotRunnableError("torch.compile needs a C++ compiler, and this machine has none")
            # the lengths of a benchmark are known, so each is compiled separately
            self._call = torch.compile(module, dynamic=False)
        self._case = case
        self._device = device
        self._given: tuple[torch.Tensor, ...] = ()
        self._result: torch.Tensor | None = None

    def bind(self, feeds: Mapping[str, Array]) -> None:
        # copies, like the bound inputs of other runtimes
        self._given = tuple(x.clone() for x in tensors_from_arrays(self._case, feeds, self._device))

    def run(self) -> None:
        import torch

        with torch.inference_mode():
            self._result = self._call(*self._given)
            synchronize(self._device)

    def outputs(self) -> dict[str, Array]:
        assert self._result is not None
        (tensor,) = signature_of_case(self._case).outputs
        return {tensor.name: array_from_tensor(self._result)}

    def with_buckets(self, feeds: Mapping[str, Array], buckets: Mapping[str, Array]) -> None:
        return None

    def release(self) -> None:
        """Free inputs and outputs."""
        self._given, self._result = (), None

    def close(self) -> None:
        self.release()
        self._call = None


class RunnerCandidate:
    """A runner of any runtime. open_given: see `with_buckets_as_inputs`."""

    def __init__(self, runner: Any, open_given: OpenGiven | None = None) -> None:
        self._runner = runner
        self._open_given = open_given
        self._bound: Any = None
        self.implementation: dict[str, str] = dict(runner.implementation)

    def bind(self, feeds: Mapping[str, Array]) -> None:
        self._bound = self._runner.bind(feeds)

    def run(self) -> None:
        self._bound.run()

    def outputs(self) -> dict[str, Array]:
        outputs: dict[str, Array] = self._bound.outputs()
        return outputs

    def with_buckets(
        self, feeds: Mapping[str, Array], buckets: Mapping[str, Array]
    ) -> tuple[dict[str, Array], dict[str, Array]] | None:
        given = self._open_given and self._open_given(tuple(buckets))
        if not given:
            return None
        with given as candidate:
            return candidate.run_with_given(feeds, buckets)

    def close(self) -> None:
        self._bound = None
        self._runner.close()


# A loaded model. bind: put inputs in place, once, before the first run. run: one call, finished when it returns.
# outputs: those of the last call, by name, on the host. implementation: per custom operator, what runs it.
# with_buckets: for a model that hashes, the outputs with these buckets, and the buckets that it would have chosen; None
# if its buckets cannot be set.
Candidate = TorchCandidate | RunnerCandidate


def candidate_from_case(case: Case, model: Path | None, *, threads: int, memory_arena: bool = True) -> Candidate:
    """model: the ONNX file or engine, where the runtime reads one. memory_arena: see RunOptions.

    Raises NotRunnableError for what this machine cannot run, and EffexportError for a model that does not load.
    """
    runtime = RUNTIMES[case.runtime]
    if not runtime.graph:
        return TorchCandidate(case, compiled=runtime.compiled, device=runtime.device)
    assert model is not None
    if runtime.engine:
        from effexport.tensorrt.runner import TrtRunner

        return RunnerCandidate(TrtRunner(model))
    open_model = model_opener(case, threads, memory_arena)
    runner = open_model(model, FeedLimits(), None)
    return RunnerCandidate(runner, lambda hashes: with_buckets_as_inputs(model, hashes, open_model))


def model_opener(case: Case, threads: int, memory_arena: bool) -> OpenModel:
    """What opens ONNX files with the runtime of a case."""
    from effexport.runners.artifact_runner import runner_module
    from effexport.runners.options import RunOptions

    runtime = RUNTIMES[case.runtime]
    options = RunOptions(
        runtime=runtime.name,
        implementation=runtime.implementation,
        threads=threads,
        memory_arena=memory_arena or runtime.device != "cpu",
    )
    # a runtime of `bench` alone has no folder: it is ONNX Runtime in another form
    module = runner_module(runtime if runtime.folder else RUNTIMES[DEFAULT_RUNTIME])
    opener: OpenModel = partial(module.open_model, options)
    return opener


def with_buckets_as_inputs(
    model: Path, hashes: Sequence[str], open_model: OpenModel
) -> AbstractContextManager[Bucketed] | None:
    """The same model opened again, with the buckets of its hashes as inputs; None if they cannot be found.

    hashes: names of the bucket values, as the reference has them.
    """
    from effexport.proof.candidate import OpenedCandidate as BucketedCandidate
    from effexport.proof.candidate import given_values, with_given_values

    values = given_values(model, hashes)
    if not values:
        return None

    @contextmanager
    def opened() -> Iterator[Bucketed]:
        with open_model(
            with_given_values(model, list(values.values())), FeedLimits(), model.parent.resolve()
        ) as runner:
            yield BucketedCandidate(runner, runner, values)

    return opened()


def reason_not_here(runtime: str) -> str | None:
    """Why this machine cannot run a runtime; None if it can."""
    row = RUNTIMES[runtime]
    if row.device == "cpu":
        return None if row.package.version else f"{row.package.module} is not installed: {row.package.remedy}"
    if not row.graph:
        import torch

        if not torch.cuda.is_available():
            return "PyTorch sees no NVIDIA GPU here"
        without_triton = row.compiled and importlib.util.find_spec("triton") is None
        return "torch.compile needs Triton on a GPU: pip install triton" if without_triton else None
    from effexport.tensorrt.cuda import open_cuda

    try:
        open_cuda(row.package.extra).close()
    except EffexportError as error:
        return f"needs an NVIDIA GPU: {short(error).partition(';')[0]}"
    return reason_without_runtime(row)


def reason_without_runtime(runtime: Runtime) -> str | None:
    """Why a runtime that needs a GPU is not usable; None if it is installed."""
    try:
        if runtime.engine:
            from effexport.tensorrt.bindings import import_api

            import_api(runtime.name)
        else:
            from effexport.runners.ort import import_onnxruntime
            from effexport.runners.ort.providers import is_cuda_plugin

            ort = import_onnxruntime()
            plugged = runtime.provider == CUDA and is_cuda_plugin(ort)
            if runtime.provider not in ort.get_available_providers() and not plugged:
                return f"this onnxruntime is built without CUDA: {runtime.package.remedy}"
    except EffexportError as error:
        return short(error)
    return None


def engine_from_case(case: Case, model: Path, output: Path) -> None:
    """A TensorRT engine for the one size of a case. Raises what `engine_from_onnx` raises."""
    from effexport.tensorrt.cuda import current_compute_capability
    from effexport.tensorrt.engine_from_onnx import engine_from_onnx
    from effexport.tensorrt.spec import EngineSpec, Profile, Range

    sizes = {"batch": case.batch, "seq": case.seq_len}
    profile = Profile({name: Range(size, size, size) for name, size in sizes.items()})
    spec = EngineSpec(target=case.runtime, profiles=(profile,))
    engine_from_onnx(model, spec, output, current_compute_capability, precision=spec_from_case(case).precision)


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        cuda: Any = torch.cuda
        cuda.synchronize()


def array_from_tensor(tensor: torch.Tensor) -> Array:
    """On the host, in the element type that the runners use."""
    value = tensor.detach().cpu()
    if str(value.dtype) == "torch.bfloat16":
        return np.asarray(value.float().numpy()).astype(numpy_dtype("bfloat16"))
    return np.asarray(value.numpy())


def is_beyond_runtime(error: BaseException) -> bool:
    """Whether the runtime has no kernel for an element type, such as bfloat16 on a CPU: not a failure of the model."""
    return isinstance(error, RuntimeUnsupportedError) and "NOT_IMPLEMENTED" in str(error)


def short(error: BaseException) -> str:
    """The beginning of a message, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} …"
