"""The first value inside a graph that differs from PyTorch's: values compared in the order of the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.artifact import Artifact
from effexport.base.dtypes import Array
from effexport.base.errors import RuntimeFailedError, RuntimeUnsupportedError, StageError, Unavailable
from effexport.base.runtimes import TENSORRT
from effexport.base.spec import BuildSpec
from effexport.export.onnx_graph import GraphSignature, load_graph, module_of_node
from effexport.models.sources import ModelSource
from effexport.plugins.building.library import known_ops
from effexport.plugins.ops import BUCKETS
from effexport.proof.candidate import GIVEN_SUFFIX, given_values, with_given_values
from effexport.proof.cases import Case
from effexport.proof.check import Suspect, Trace, TracedValue
from effexport.proof.module_runs import tensor_from_array
from effexport.proof.rebuilt_module import model_of_artifact
from effexport.proof.tolerances import bucket_flip_limit, case_limit, magnitude, value_error
from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import FeedLimits, limits_from_spec

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir
    import torch
    from torch import nn
    from torch.export import ExportedProgram

# In low precision both sides round: PyTorch as far as its own run shows, the candidate up to three times as far. Its
# worst element was up to 1.9 times as far as PyTorch's in all cases of 15 float16 models.
ROUNDING_FACTOR = 4.0
# Half a unit in the last place of float32, relative: how far any number is from the one that it was rounded to.
FLOAT32_ROUNDING = 2.0**-24
# What they make has the elements of their operands, and so the same errors.
MOVES = ("Concat", "Expand", "Gather", "Identity", "Pad", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
# No rounding makes an error as large as the values themselves acceptable.
LARGEST_LIMIT = 1.0


class ValueLimits:
    """Takes values beside PyTorch's and keeps their errors and limits.

    The limit of a float value is that of the outputs. It is raised where PyTorch's own rounding moves the value
    further: an exponential makes 3 % of the 0.03 by which float16 rounds a logit of 60, and the inverse of a matrix
    that is nearly singular moves by more than float32's limit. And it is raised where operands hold no more: the
    difference of two exponents of 62 is off by what float32 left of them, and its exponential by as much again.
    """

    def __init__(
        self, spec: BuildSpec, case: Case, may_flip: Collection[str], nodes: Mapping[str, onnx.NodeProto] | None = None
    ) -> None:
        """nodes: that make the values, by name of the value."""
        self._spec, self._may_flip, self._nodes = spec, may_flip, nodes or {}
        self._limit = case_limit(spec, case.own_error, case.spread).value
        self.results: dict[str, tuple[float, float]] = {}
        self._largest: dict[str, float] = {}
        self._allowed: dict[str, float] = {}

    def __call__(self, name: str, actual: Array, expected: Array, exact: Array | None) -> None:
        """exact: what PyTorch computes in a wider type, None where that is not known."""
        if expected.dtype.kind in "biu":
            flips = bucket_flip_limit(self._spec, expected.size).value if name in self._may_flip else 0.0
            limit = flips / max(1, expected.size)
        else:
            rounding = 0.0 if exact is None else value_error(expected, exact)
            largest, scale = magnitude(expected)
            inherited = self._inherited(name, largest) / scale if scale else 0.0
            limit = max(self._limit, min(max(ROUNDING_FACTOR * rounding, inherited), LARGEST_LIMIT))
            self._largest[name], self._allowed[name] = largest, limit * scale
        self.results[name] = (value_error(actual, expected), limit)

    def _inherited(self, name: str, largest: float) -> float:
        """The absolute error of a sum, an exponential or a copy that the rounding of its operands allows."""
        node = self._nodes.get(name)
        operands = [] if node is None else [operand for operand in node.input if operand in self._largest]
        if node is not None and node.op_type in ("Add", "Sub"):
            return ROUNDING_FACTOR * FLOAT32_ROUNDING * sum(self._largest[operand] for operand in operands)
        if node is not None and node.op_type == "Exp" and operands:
            return self._allowed[operands[0]] * largest
        if node is not None and node.op_type in MOVES:
            return max((self._allowed[operand] for operand in operands), default=0.0)
        return 0.0


class TracedFile:
    """A model whose graph runs as it is written: without optimisations, so that every value has its own.

    What one run needs is given back after it. Raises what `OrtRunner` raises.
    """

    def __init__(self, path: Path, settings: RunOptions, limits: FeedLimits) -> None:
        self.path = path
        self._settings = dataclasses.replace(settings, memory_arena=False)
        self._limits = limits

    def run(
        self, names: Sequence[str], inputs: Mapping[str, Array], hashes: Sequence[str], buckets: Mapping[str, Array]
    ) -> dict[str, Array]:
        """The named values, bfloat16 as float32.

        hashes: values that hold buckets, whose readers get those of `buckets` instead, as in `with_given_values`.
        """
        model, folder = self._model(names, hashes), self.path.parent.resolve()
        with OrtRunner(model, self._settings, limits=self._limits, external_folder=folder, optimized=False) as runner:
            results = runner.run({**inputs, **buckets})
        return {name: x.astype(np.float32) if x.dtype.name == "bfloat16" else x for name, x in results.items()}

    def _model(self, names: Sequence[str], hashes: Sequence[str]) -> bytes:
        """The serialised model with these values as its only outputs: what they do not need is not run."""
        import onnx

        model = load_graph(self.path)
        if hashes:
            model = onnx.ModelProto.FromString(with_given_values(self.path, hashes))
        del model.graph.output[:]
        # ONNX Runtime finds the types out
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        serialised: bytes = model.SerializeToString()
        return serialised


# Intermediate values of one run of the model: more values take more runs, not more memory.
BATCH_BYTES = 256 * 2**20


def trace_if_possible(
    model: Path, artifact: Artifact, source: ModelSource | None, case: Case, settings: RunOptions
) -> Trace | Unavailable:
    """As `trace_if_it_runs`, with the module made again from the seed or from `source`, if it can be."""
    if settings.row.provider == TENSORRT:
        return Unavailable("TensorRT keeps no intermediate values; trace the file with --runtime ort")
    again = model_of_artifact(artifact, source)
    if isinstance(again, Unavailable):
        return again
    return trace_if_it_runs(model, artifact.model_path, again.module, artifact.spec, case, settings)


def trace_if_it_runs(
    model: Path, exported: Path, module: nn.Module, spec: BuildSpec, case: Case, settings: RunOptions
) -> Trace | Unavailable:
    """As `trace_from_model`, if the module can be exported again and the model runs."""
    if spec.is_quantized:
        return Unavailable("the layers of a quantised model are compared where they round, and are not traced")
    try:
        return trace_from_model(model, exported, TracedModule(module, spec), case, settings)
    except (StageError, RuntimeUnsupportedError, RuntimeFailedError) as error:
        return Unavailable(f"{str(error).splitlines()[0]}")


def trace_from_model(
    model: Path, exported: Path, traced: TracedModule, case: Case, settings: RunOptions | None = None
) -> Trace:
    """Compare the intermediate values of a model file in ONNX Runtime with those of PyTorch on the inputs of `case`.

    exported: the model file as effexport exported it.
    model: the same file, or one that a tool has made from it.

    The graph runs as it is written, without the optimisations that would fuse values away; the settings say how custom
    operators run. If the model hashes, both sides go on with PyTorch's buckets. The values of one run take BATCH_BYTES
    at most, or one value if that is larger.
    Raises RuntimeUnsupportedError and RuntimeFailedError if the model does not run.
    """
    spec = traced.spec
    pairable = same_origins(traced.origins, load_graph(exported), spec.custom_ops)
    proto = load_graph(model)
    nodes = [(node, value) for node in proto.graph.node for value in node.output if value]
    paired = {value: node for node, value in nodes if value in pairable}
    file = TracedFile(model, settings or RunOptions(), limits_from_spec(spec))
    judge = ValueLimits(spec, case, traced.may_flip, paired)
    compare(traced, file, list(paired), case, judge, exact=traced.is_rounded)
    if not traced.is_rounded:
        # a second look, at PyTorch's own rounding, for what float32 may have made of an ill-conditioned value
        compare(traced, file, [n for n, (error, limit) in judge.results.items() if not error <= limit], case, judge)
    values = tuple(
        TracedValue(name, pairable[name].module, node.op_type, *judge.results[name]) for name, node in paired.items()
    )
    trace = Trace(str(model), case.label, values, len(pairable), len(nodes) - len(paired))
    if trace.first_divergence is None:
        return trace
    suspects = suspects_of(trace.first_divergence.name, proto, paired.keys())
    return Trace(trace.model, trace.case, values, trace.pairable, trace.not_paired, suspects)


def same_origins(
    origins: Mapping[str, NodeOrigin], model: onnx.ModelProto, custom_ops: Collection[str]
) -> dict[str, NodeOrigin]:
    """The values that the artifact's own model makes as this export does.

    custom_ops: those in the file; where others were, the body of the operator makes its outputs.
    Names are numbered by the exporter: another release of PyTorch may give them to other values.
    """
    inlined = set(known_ops()) - set(custom_ops)
    made = {value: (node.op_type, module_of_node(node)) for node in model.graph.node for value in node.output}
    return {
        value: origin
        for value, origin in origins.items()
        # the file keeps a path for every node that has one, and the exporter's word for those that have none
        if value in made
        and (made[value][0] == origin.op_type or origin.op_type in inlined)
        and origin.module in (made[value][1], "")
    }


def compare(
    traced: TracedModule, file: TracedFile, names: Sequence[str], case: Case, judge: ValueLimits, *, exact: bool = True
) -> None:
    """Judge every value. The module and the model run once per batch of values, and exactly once more if need be."""
    if not names:
        return
    sizes: dict[str, int] = {}
    buckets: dict[str, Array] = {}

    def measure(name: str, array: Array) -> None:
        sizes[name] = array.nbytes
        if name in traced.hashes:
            buckets[name] = np.ascontiguousarray(array)

    traced.run(case.inputs, measure)
    # none if the file does not show the buckets of every layer: then it goes on with its own
    sources = given_values(file.path, traced.hashes)
    given = {value + GIVEN_SUFFIX: buckets[name] for name, value in sources.items()}
    for batch in batches(names, sizes):
        actual = file.run(batch, case.inputs, list(sources.values()), given)
        compare_batch(traced, case, actual, buckets, judge, exact=exact)


def compare_batch(
    traced: TracedModule,
    case: Case,
    actual: dict[str, Array],
    buckets: Mapping[str, Array],
    judge: ValueLimits,
    *,
    exact: bool,
) -> None:
    """Judge the values of one run, `actual`, which is emptied: each goes as soon as it is judged."""
    if not exact:
        traced.run(case.inputs, lambda n, expected: judge(n, actual.pop(n), expected, None) if n in actual else None)
        return
    rounded: dict[str, Array] = {}
    traced.run(case.inputs, lambda name, array: rounded.update({name: array}) if name in actual else None)
    traced.run(
        case.inputs,
        lambda n, wide: judge(n, actual.pop(n), rounded.pop(n), wide) if n in actual else None,
        buckets=buckets,
        exact=True,
    )


def batches(names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names in their order, in groups of at most BATCH_BYTES."""
    batch: list[str] = []
    total = 0
    for name in names:
        if batch and total + sizes[name] > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += sizes[name]
    if batch:
        yield batch


def suspects_of(name: str, model: onnx.ModelProto, agreeing: Collection[str]) -> tuple[Suspect, ...]:
    """The node of a value and the nodes of unpaired values that it is computed from, in the order of the graph."""
    maker = {value: node for node in model.graph.node for value in node.output if value}
    weights = {tensor.name for tensor in model.graph.initializer}
    found: set[str] = set()
    waiting = [name]
    while waiting:
        value = waiting.pop()
        if value in found or value not in maker or (value in agreeing and value != name):
            continue
        found.add(value)
        waiting.extend(maker[value].input)
    return tuple(
        Suspect(value, node.op_type, module_of_node(node), tuple(i for i in node.input if i in weights))
        for value, node in maker.items()
        if value in found
    )


# Where the exporter puts what belongs to no module, such as the arithmetic on sizes.
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
# PyTorch's program was traced with one memory layout; with another, where these fail, their counterpart copies.
_COPYING = {"view": "reshape", "_unsafe_view": "reshape"}


@dataclass(frozen=True)
class NodeOrigin:
    """The maker of a graph value: the operator, and the path of the module it came from, "" for the root."""

    op_type: str
    module: str


class TracedModule:
    """`module`, float32 and in evaluation mode, at the precision of the spec.

    It is exported as `onnx_from_module` does: the operations of PyTorch's program have the names of the graph values
    that they became. Steps that the exporter put inside one operation have no counterpart.
    origins: per graph value that PyTorch computes, what makes it.
    hashes: graph values that hold buckets.
    may_flip: integers and booleans that come from comparing float numbers, which rounding may decide either way.
    Raises StageError where the exporter fails, or if PyTorch has no kernel for a step.
    """

    def __init__(self, module: nn.Module, spec: BuildSpec) -> None:
        from effexport.export.onnx_from_module import (
            at_precision,
            example_inputs,
            mark_custom_nodes,
            program_from_module,
        )

        signature = GraphSignature(spec.inputs, spec.outputs, spec.custom_ops)
        exported = program_from_module(at_precision(module, spec.arithmetic), example_inputs(spec), signature, spec)
        program = exported.exported_program
        assert program is not None
        mark_custom_nodes(exported.model)
        made = origins_of_model(exported.model)
        # operation of the program → graph value
        # indices in the order of their scores may differ where these are tied: the scores tell
        compared = made.keys() - set(spec.ranked_outputs)
        self._values = {op: value for op, value in graph_names(program, spec, made).items() if value in compared}
        self._program, self.spec = program, spec
        self.origins = {value: made[value] for value in self._values.values()}
        self.hashes = tuple(value for value in self.origins if is_of_buckets(value))
        self.may_flip = self._may_flip()

    @property
    def is_rounded(self) -> bool:
        """True for a precision below float32, where rounding differs most."""
        return self.spec.arithmetic != "fp32"

    def run(
        self,
        inputs: Mapping[str, Array],
        visit: Callable[[str, Array], None],
        *,
        buckets: Mapping[str, Array] | None = None,
        exact: bool = False,
    ) -> None:
        """Give every value to `visit` as soon as it is there, by its name in the graph, and keep none.

        inputs: as of the graph. Values are in the types of PyTorch, bfloat16 as float32.
        buckets: per value of `hashes`, what the rest of the module goes on with.
        exact: in a wider type: float32 for lower precisions, float64 for float32.
        """
        import torch

        names, low = self._values, getattr(torch, self.spec.dtype)
        wide = torch.float64 if low == torch.float32 else torch.float32

        class Visitor(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                result = super().run_node(n)
                if exact and isinstance(result, torch.Tensor) and result.dtype == low:
                    result = result.to(wide)  # what was made without a source, such as zeros
                value = names.get(n.name)
                if value is None or not isinstance(result, torch.Tensor | int | float | bool):
                    return result
                visit(value, array_from_result(result))
                return torch.from_numpy(buckets[value]) if buckets and value in buckets else result

            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                name = getattr(target, "__name__", "").split(".")[0]
                if exact:
                    args = tuple(wide if arg is low else arg for arg in args)
                    kwargs = {key: wide if value is low else value for key, value in kwargs.items()}
                try:
                    return super().call_function(getattr(torch, _COPYING.get(name, ""), target), args, kwargs)
                except NotImplementedError as error:  # many functions have no kernel for half precision on a CPU
                    raise StageError("trace", f"PyTorch does not compute it step by step: {error}") from error

        with torch.inference_mode():
            Visitor(self._program.graph_module).run(*self._arguments(inputs, wide if exact else low))

    def _arguments(self, inputs: Mapping[str, Array], dtype: torch.dtype) -> list[Any]:
        """Weights, constants and inputs in the order of the program's arguments, in `dtype` if they are of that of the
        spec."""
        import torch

        low = getattr(torch, self.spec.dtype)
        given = iter(self.spec.inputs)
        arguments = []
        for argument in self._program.graph_signature.input_specs:
            if argument.target is None:
                tensor = tensor_from_array(inputs[next(given).name])
                # rounded first, so that both see the same numbers
                arguments.append(tensor.to(low).to(dtype) if tensor.is_floating_point() else tensor)
            else:
                weights = self._program.state_dict
                source = weights if argument.target in weights else self._program.constants
                tensor = source[argument.target]
                arguments.append(tensor.to(dtype) if tensor.dtype == low else tensor)
        return arguments

    def _may_flip(self) -> frozenset[str]:
        import torch

        def is_float(node: torch.fx.Node) -> bool:
            value = node.meta.get("val")
            return isinstance(value, torch.Tensor) and value.is_floating_point()

        found: set[str] = set()
        for node in self._program.graph.nodes:
            # buckets are given to what follows them
            from_flips = any(
                i.name in found and self._values.get(i.name) not in self.hashes for i in node.all_input_nodes
            )
            if not is_float(node) and (from_flips or any(map(is_float, node.all_input_nodes))):
                found.add(node.name)
        return frozenset(self._values[name] for name in found if name in self._values)


def graph_names(program: ExportedProgram, spec: BuildSpec, made: Mapping[str, NodeOrigin]) -> dict[str, str]:
    """Operation of the program → its value in the graph: the same name, but for outputs and buckets."""
    import torch

    from effexport.export.onnx_from_module import inner_name

    names = {
        node.name: str(inner_name(node.name, (*spec.inputs, *spec.outputs)))
        for node in program.graph.nodes
        if node.op == "call_function"
    }
    owners = iter([value for value, origin in made.items() if is_of_buckets(value)])
    for node in program.graph.nodes:
        if node.target is torch.ops.effexport.lsh_sort.default:
            names[node.args[0].name] = next(owners)
    names |= dict(zip(program.graph_signature.user_outputs, (tensor.name for tensor in spec.outputs), strict=True))
    return names


def origins_of_model(model: ir.Model) -> dict[str, NodeOrigin]:
    """The maker of each value of a graph that the exporter has just made."""
    from effexport.export.onnx_from_module import module_path

    origins = {}
    for node in model.graph:
        path = module_path(node)
        for value in node.outputs:
            if value.name:
                origins[value.name] = NodeOrigin(node.op_type, "" if path == _NO_MODULE else path)
    return origins


def is_of_buckets(value: str) -> bool:
    """True for a graph value that holds the buckets of a hash."""
    return value.rpartition(".")[2] == BUCKETS


def array_from_result(result: torch.Tensor | float) -> Array:
    import torch

    if not isinstance(result, torch.Tensor):
        return np.asarray(result)
    array: Array = (result.float() if result.dtype == torch.bfloat16 else result).numpy()
    return array
