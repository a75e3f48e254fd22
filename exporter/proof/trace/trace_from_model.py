"""Where does a model file leave its PyTorch module? Intermediate values compared in the order of the graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import RuntimeFailedError, RuntimeUnsupportedError, StageError, Unavailable
from effexport.export.onnx_graph import load_graph
from effexport.export.quantized_products import module_of_node
from effexport.models.sources import ModelSource
from effexport.plugins.known_ops import known_ops
from effexport.proof.given_values import GIVEN_SUFFIX, given_values
from effexport.proof.references.rebuilt_module import model_of_artifact
from effexport.proof.trace.trace import Suspect, Trace, TracedValue
from effexport.proof.trace.traced_file import TracedFile
from effexport.proof.trace.traced_module import Origin, TracedModule
from effexport.proof.trace.value_limits import ValueLimits
from effexport.runners.feeds import limits_from_spec
from effexport.runners.ort.settings import OrtSettings
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from effexport.artifact import Artifact
    from effexport.dtypes import Array
    from effexport.proof.cases import Case

# Intermediate values of one run of the model: more values take more runs, not more memory.
BATCH_BYTES = 256 * 2**20


def trace_if_possible(
    model: Path, artifact: Artifact, source: ModelSource | None, case: Case, settings: OrtSettings
) -> Trace | Unavailable:
    """As `trace_if_it_runs`, with the module made again from the seed or from `source`, if it can be."""
    if settings.provider == "tensorrt":
        return Unavailable("TensorRT keeps no intermediate values; trace the file with --runtime ort")
    again = model_of_artifact(artifact, source)
    if isinstance(again, Unavailable):
        return again
    return trace_if_it_runs(model, artifact.model_path, again.module, artifact.spec, case, settings)


def trace_if_it_runs(
    model: Path, exported: Path, module: nn.Module, spec: BuildSpec, case: Case, settings: OrtSettings
) -> Trace | Unavailable:
    """As `trace_from_model`, if the module can be exported again and the model runs."""
    if spec.is_quantized:
        return Unavailable("the layers of a quantised model are compared where they round, and are not traced")
    try:
        return trace_from_model(model, exported, TracedModule(module, spec), case, settings)
    except (StageError, RuntimeUnsupportedError, RuntimeFailedError) as error:
        return Unavailable(f"{str(error).splitlines()[0]}")


def trace_from_model(
    model: Path, exported: Path, traced: TracedModule, case: Case, settings: OrtSettings | None = None
) -> Trace:
    """Compare the intermediate values of a model file in ONNX Runtime with those of PyTorch on the inputs of `case`.

    exported: the model file as effexport exported it. model: the same file, or one that a tool has made from it.
    The graph runs as it is written, without the optimisations that would fuse values away; the settings say how custom
    operators run. Where the model hashes, both sides go on with PyTorch's buckets. The values of one run take
    BATCH_BYTES at most, or one value if that is larger.
    Raises RuntimeUnsupportedError and RuntimeFailedError if the model does not run.
    """
    spec = traced.spec
    pairable = same_origins(traced.origins, load_graph(exported), spec.custom_ops)
    proto = load_graph(model)
    nodes = [(node, value) for node in proto.graph.node for value in node.output if value]
    paired = {value: node for node, value in nodes if value in pairable}
    file = TracedFile(model, settings or OrtSettings(), limits_from_spec(spec))
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
    origins: Mapping[str, Origin], model: onnx.ModelProto, custom_ops: Collection[str]
) -> dict[str, Origin]:
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
