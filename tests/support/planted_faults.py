"""Faults that a wrong exporter makes, planted into healthy graphs: what the parity check has to catch.

Each fault finds its place by structure (operators, neighbours, weight names, the module a node came from), edits the
graph as the bug would, and says whether there was anything to edit. A fault that found nothing is never counted.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from small_specs import BUILT_VARIANTS

from effexport.artifact import Artifact
from effexport.base.spec import BuildSpec
from effexport.models.variants import ATTENTION_SPECS
from effexport.plugins.ops import OPS

VARIANTS = BUILT_VARIANTS
AFT = ("aft-full", "aft-simple", "aft-local", "aft-conv")
# How a model is built: (scope, fields of the spec). Most faults are planted into standard operators; fused_faults.py
# has those of fused ones.
CONFIGURATIONS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "attention": ("attention", {"fused": False}),
    "encoder": ("encoder", {"fused": False}),
    "causal": ("attention", {"causal": True, "fused": False}),
    "fp16": ("attention", {"precision": "fp16", "fused": False}),
    "fused": ("attention", {}),
    "fused causal": ("attention", {"causal": True}),
}
FAR = np.iinfo(np.int64).max
LOWEST = np.iinfo(np.int64).min


class Graph:
    """A model that is being edited. New nodes may go anywhere: `finished` sorts them."""

    def __init__(self, model: onnx.ModelProto, spec: BuildSpec) -> None:
        self.model, self.spec = model, spec
        self.graph = model.graph
        self._names = 0

    @property
    def opset(self) -> int:
        return next(entry.version for entry in self.model.opset_import if entry.domain in ("", "ai.onnx"))

    @property
    def attention(self) -> str:
        """Module path of the attention layer with a trailing dot; empty where the model is one layer."""
        return "" if self.spec.model.scope == "attention" else "blocks.0.attention."

    def nodes(self, *ops: str, module: str | None = None) -> list[onnx.NodeProto]:
        """Nodes of these operators, and of one module where its path below the attention layer or the root is given."""
        paths = None if module is None else (module, self.attention + module, f"blocks.0.{module}")
        return [node for node in self.graph.node if node.op_type in ops and (paths is None or module_of(node) in paths)]

    def producer(self, value: str) -> onnx.NodeProto | None:
        return next((node for node in self.graph.node if value in node.output), None)

    def comes_from(self, value: str, *ops: str) -> bool:
        node = self.producer(value)
        return node is not None and node.op_type in ops

    def readers(self, value: str, *ops: str) -> list[onnx.NodeProto]:
        return [node for node in self.graph.node if value in node.input and (not ops or node.op_type in ops)]

    def upstream(self, value: str, op: str) -> onnx.NodeProto:
        """The nearest node of an operator along first inputs."""
        node = self.producer(value)
        while node is not None and node.op_type != op:
            node = self.producer(node.input[0])
        assert node is not None, f"no {op} above {value}"
        return node

    def constant(self, value: str) -> np.ndarray | None:
        tensor = next((t for t in self.graph.initializer if t.name == value), None)
        return None if tensor is None else numpy_helper.to_array(tensor)

    def scalar(self, node: onnx.NodeProto, index: int) -> float | None:
        """The constant that a node reads, if it is a single float."""
        if index >= len(node.input):
            return None
        array = self.constant(node.input[index])
        return float(array.item()) if array is not None and array.size == 1 and array.dtype.kind == "f" else None

    def new_constant(self, array: np.ndarray) -> str:
        name = self.new_name()
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def new_name(self) -> str:
        self._names += 1
        return f"planted_{self._names}"

    def set_constant(self, node: onnx.NodeProto, index: int, array: Any) -> bool:
        """Give this reader of a constant another value of the same type; other readers keep theirs."""
        old = self.constant(node.input[index])
        assert old is not None
        node.input[index] = self.new_constant(np.asarray(array, dtype=old.dtype))
        return True

    def overwrite(self, name: str, array: np.ndarray) -> bool:
        """Change a constant for all who read it. False where nothing changes."""
        tensor = next(t for t in self.graph.initializer if t.name == name)
        old = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array, dtype=old.dtype), name))
        return not np.array_equal(old, numpy_helper.to_array(tensor))

    def add(self, op: str, inputs: list[str], out: str | None = None, **attributes: Any) -> str:
        out = out or self.new_name()
        self.graph.node.append(helper.make_node(op, inputs, [out], **attributes))
        return out

    def cut(self, value: str) -> str:
        """Rename what produces `value`: a new node may then make `value` out of the returned name."""
        node, raw = self.producer(value), self.new_name()
        assert node is not None
        node.output[list(node.output).index(value)] = raw
        return raw

    def bypass(self, node: onnx.NodeProto, index: int = 0) -> bool:
        """Let a node hand on one of its inputs."""
        value = node.output[0]
        self.cut(value)
        self.add("Identity", [node.input[index]], value)
        return True

    def finished(self) -> onnx.ModelProto:
        """The model with its nodes in an order in which they can run."""
        known = {tensor.name for tensor in self.graph.initializer} | {value.name for value in self.graph.input} | {""}
        waiting, ordered = list(self.graph.node), []
        while waiting:
            ready = [node for node in waiting if known.issuperset(node.input)]
            assert ready, f"planted a cycle, or a value that nothing makes: {waiting[0].input}"
            ordered += ready
            known.update(name for node in ready for name in node.output)
            done = {id(node) for node in ready}
            waiting = [node for node in waiting if id(node) not in done]
        del self.graph.node[:]
        self.graph.node.extend(ordered)
        return self.model


def module_of(node: onnx.NodeProto) -> str:
    return next((entry.value for entry in node.metadata_props if entry.key == "effexport.module"), "")


def attribute(node: onnx.NodeProto, name: str) -> Any:
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), None)


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def applied(edits: list[bool]) -> bool:
    """True if anything was edited. A list, so that every edit is made."""
    return any(edits)


Damage = Callable[[Graph], bool]


@dataclass(frozen=True)
class Fault:
    """A bug and where it can occur. damage: edits a graph, and returns False where there is nothing to edit.

    variants, configurations: where it applies, all combinations of the two. no_ops: variants in which the edit changes
    nothing by the mathematics, each with the reason. damage is None for the one fault that is in the files and not in
    the graph.
    """

    name: str
    description: str
    damage: Damage | None
    variants: tuple[str, ...] = VARIANTS
    configurations: tuple[str, ...] = ("attention", "encoder", "fp16")
    no_ops: Mapping[str, str] = field(default_factory=dict)

    def applies(self, variant: str, configuration: str) -> bool:
        spec = ATTENTION_SPECS[variant]
        # what is always causal is so in the other configurations
        if "causal" in configuration and (spec.why_not_causal or spec.why_always_causal):
            return False
        return variant in self.variants and configuration in self.configurations


def plant(fault: Fault, artifact: Artifact, folder: Path) -> Path | None:
    """The damaged copy of an artifact's model, in a folder of its own, or None where the fault does not apply."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    if fault.damage is None:
        with_data_of_another_build(artifact, path)
        return path
    graph = Graph(onnx.load(str(artifact.model_path)), artifact.spec)
    if not fault.damage(graph):
        return None
    onnx.save(graph.finished(), str(path))
    return path


def with_data_of_another_build(artifact: Artifact, path: Path) -> None:
    """The graph of one build beside the weights of another, which differs in its seed."""
    from small_builds import exported

    other = path.parent / "other" / path.name
    other.parent.mkdir()
    foreign_model = exported(dataclasses.replace(artifact.spec, seed=artifact.spec.seed + 1))
    for source, target in ((artifact.model_path, path), (foreign_model, other)):
        model = onnx.load(str(source))
        onnx.save(model, str(target), save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    own, foreign = path.with_name("model.onnx.data"), other.with_name("model.onnx.data")
    assert own.stat().st_size == foreign.stat().st_size
    shutil.copy(foreign, own)


# Nyströmformer


def pinv_iteration_dropped(graph: Graph) -> bool:
    for node in (nodes := graph.nodes("IterativePinv")):
        set_attribute(node, "iterations", attribute(node, "iterations") - 1)
        body = OPS["IterativePinv"].load().onnx_function_body([node], graph.opset)
        kept = [function for function in graph.model.functions if function.name != body.name]
        del graph.model.functions[:]
        graph.model.functions.extend([*kept, body])
    return bool(nodes)


def pinv_scale_over(axis: int, graph: Graph) -> bool:
    """The start value is divided by one maximum for all matrices along an axis of [batch, heads, 1]."""
    for node in (nodes := graph.nodes("IterativePinv")):
        value = graph.upstream(node.input[1], "ReduceMax").output[0]
        raw = graph.cut(value)
        largest = graph.add("ReduceMax", [raw, graph.new_constant(np.array([axis]))], keepdims=1)
        graph.add("Expand", [largest, graph.add("Shape", [raw])], value)
    return bool(nodes)


def landmark_matrix_transposed(graph: Graph) -> bool:
    for node in (nodes := graph.nodes("IterativePinv")):
        node.input[0] = graph.add("Transpose", [node.input[0]], perm=[0, 2, 1])
    return bool(nodes)


def segments_rounded_down(graph: Graph) -> bool:
    """floor(n / m) tokens per landmark instead of ceil, (n + m − 1) / m: the last tokens are in no landmark."""
    if graph.spec.attention.variant != "nystrom":
        return False
    landmarks = graph.spec.attention.num_landmarks  # type: ignore[attr-defined]
    for node in graph.nodes("Add"):
        array = graph.constant(node.input[1])
        is_rounding = array is not None and array.size == 1 and array.item() == landmarks
        if is_rounding and graph.comes_from(node.input[0], "ReduceMax"):
            return graph.set_constant(node, 1, 1)
    return False


def padding_in_landmarks(graph: Graph) -> bool:
    for node in graph.nodes("And"):
        owned_and_kept = graph.comes_from(node.input[0], "Equal") and graph.comes_from(node.input[1], "Unsqueeze")
        if owned_and_kept and graph.spec.attention.variant == "nystrom":
            return graph.bypass(node)
    return False


def padding_in_convolution(graph: Graph) -> bool:
    return any(graph.bypass(graph.upstream(node.input[0], "Where"), 1) for node in graph.nodes("Conv"))


def convolution_flipped(graph: Graph) -> bool:
    if graph.spec.attention.variant == "aft-conv":
        # the exporter folds the filter into e^w of every query and key of a window
        for node in graph.nodes("MatMul"):
            array = graph.constant(node.input[0])
            if array is not None and array.ndim == 4:
                return graph.overwrite(node.input[0], array[:, :, ::-1, ::-1])
        return False
    for node in graph.nodes("Conv"):
        return graph.overwrite(node.input[1], graph.constant(node.input[1])[:, :, ::-1])  # type: ignore[index]
    return False


def convolution_lost(graph: Graph) -> bool:
    for node in graph.nodes("Conv"):
        return any(graph.bypass(add) for add in graph.readers(node.output[0], "Add"))
    return False


# Softmax and what has logits


def scale_changed(power: float, graph: Graph) -> bool:
    """q, k or both are divided by a power of the usual divisor: 0 loses the scale, 2 applies it twice."""
    if graph.spec.attention.variant not in (*SOFTMAXES, "lsh"):
        return False
    divisions = [(node, graph.scalar(node, 1)) for node in graph.nodes("Div")]
    return applied([graph.set_constant(node, 1, by**power) for node, by in divisions if by is not None])


def softmax_over_queries(graph: Graph) -> bool:
    """The last two axes of the logits exchanged: each key shares itself out among the queries."""
    return applied(
        [set_attribute(node, "axis", 2) is None for node in graph.nodes("Softmax") if rank_of_softmax(node) == 4]
    )


def rank_of_softmax(node: onnx.NodeProto) -> int:
    """4 for attention weights [batch, heads, queries, keys]; 3 for the weights of hash rounds."""
    return 3 if attribute(node, "axis") == 1 else 4


def weak_mask(graph: Graph) -> bool:
    """Hidden logits become −3 instead of the lowest number: padding is only unlikely."""
    found = False
    for node in graph.nodes("Where"):
        constant = graph.scalar(node, 2)
        if graph.spec.attention.variant in (*SOFTMAXES, "lsh") and constant is not None and constant < -1e8:
            found = graph.set_constant(node, 2, -3)
    return found


# Masks


def mask_nodes(graph: Graph) -> Iterator[onnx.NodeProto]:
    return (node for node in graph.nodes("Equal") if node.input[0] == "attention_mask")


def mask_ignored(graph: Graph) -> bool:
    return applied([graph.set_constant(node, 1, -1) for node in mask_nodes(graph)])


def mask_inverted(graph: Graph) -> bool:
    return applied([graph.bypass(graph.readers(node.output[0], "Not")[0]) for node in mask_nodes(graph)])


def mask_before_feature_map(graph: Graph) -> bool:
    """φ(mask · k) instead of mask · φ(k): φ(0) is 1, so padding counts as a token."""
    for mul in graph.nodes("Mul"):
        mapped, mask = graph.producer(mul.input[0]), mul.input[1]
        if mapped is None or mapped.op_type != "Where" or not graph.comes_from(mask, "Where", "Cast"):
            continue
        greater = graph.producer(mapped.input[0])
        if greater is None or greater.op_type != "Greater":
            continue
        key = greater.input[0]
        masked = graph.add("Mul", [key, mask])
        for reader in graph.readers(key, "Greater", "Add", "Min"):
            reader.input[0] = masked
        return graph.bypass(mul)
    return False


def later_token_seen(graph: Graph) -> bool:
    """Queries see one position too many, in every triangle of the graph."""
    found = False
    for tensor in list(graph.graph.initializer):
        array = numpy_helper.to_array(tensor)
        flat = array.squeeze(-1) if array.ndim == 3 and array.shape[-1] == 1 else array
        square = flat.ndim == 2 and flat.shape[0] == flat.shape[1] > 1
        if square and np.array_equal(flat, np.tri(len(flat), dtype=flat.dtype)):
            found = graph.overwrite(tensor.name, np.tri(len(flat), k=1).astype(array.dtype).reshape(array.shape))
    if found:
        return True
    for node in graph.nodes("GreaterOrEqual"):
        one = graph.add("CastLike", [graph.new_constant(np.array(1)), node.input[0]])
        node.input[0] = graph.add("Add", [node.input[0], one])
        found = True
    return found


# Linear attention


def feature_map_of_relu(graph: Graph) -> bool:
    """φ(x) = max(x, 0) + 1 where x > 0 and 0 elsewhere: the exponential half is lost."""
    found = False
    for node in graph.nodes("Where"):
        if graph.comes_from(node.input[0], "Greater") and graph.comes_from(node.input[2], "Exp"):
            node.input[2] = graph.add("Sub", [node.input[2], node.input[2]])
            found = True
    return found


def denominator_lost(graph: Graph) -> bool:
    """The sums are not divided by the sum of their weights."""
    if graph.spec.attention.variant not in ("linear", *AFT):
        return False
    last = [node for node in graph.nodes("Div") if graph.constant(node.input[1]) is None][-1]
    return graph.bypass(last)


def eps_lost(graph: Graph) -> bool:
    """The small number that keeps a denominator or a root away from zero."""
    found = False
    for node in graph.nodes("Add"):
        constant = graph.scalar(node, 1)
        if constant is not None and 0 < constant < 1e-4:
            found = graph.set_constant(node, 1, 0)
    return found


def previous_block_lost(graph: Graph) -> bool:
    """Causal sums start one block too early: the block right before a query is in neither of the two sums."""
    for node in graph.nodes("And"):
        ge = graph.producer(node.input[0])
        if ge is not None and ge.op_type == "GreaterOrEqual" and graph.comes_from(node.input[1], "Not"):
            ge.input[0] = graph.add("Sub", [ge.input[0], graph.new_constant(np.array(2))])
            return True
    return False


# Reformer


def order_and_rank(graph: Graph) -> tuple[onnx.NodeProto, str, str] | None:
    nodes = graph.nodes("LSHSort")
    return (nodes[0], *nodes[0].output) if nodes else None


def sliced(graph: Graph, value: str, start: int, end: int, out: str | None = None, axis: int = 1, step: int = 1) -> str:
    constants = [graph.new_constant(np.array([number], dtype=np.int64)) for number in (start, end, axis, step)]
    return graph.add("Slice", [value, *constants], out)


def length_of(graph: Graph, value: str) -> str:
    """The second dimension, int32 [1]."""
    return graph.add("Cast", [graph.add("Shape", [value], start=1, end=2)], to=TensorProto.INT32)


def chunks_shifted(graph: Graph) -> bool:
    """Chunks begin one token late in the sorted list."""
    if not (found := order_and_rank(graph)):
        return False
    _, order, rank = found
    raw = graph.cut(order)
    graph.add("Concat", [sliced(graph, raw, -1, FAR), sliced(graph, raw, 0, -1)], order, axis=1)
    raw_rank = graph.cut(rank)
    later = graph.add("Add", [raw_rank, graph.new_constant(np.array([1], dtype=np.int32))])
    graph.add("Mod", [later, length_of(graph, raw_rank)], rank)
    return True


def sort_unstable(graph: Graph) -> bool:
    """Tokens of a bucket in descending order of position: sorted, but not stably."""
    if not (found := order_and_rank(graph)):
        return False
    node, order, rank = found
    node.input[0] = sliced(graph, node.input[0], -1, LOWEST, step=-1)
    raw, raw_rank = graph.cut(order), graph.cut(rank)
    last = graph.add("Sub", [length_of(graph, raw), graph.new_constant(np.array([1], dtype=np.int32))])
    graph.add("Sub", [last, raw], order)
    sliced(graph, raw_rank, -1, LOWEST, rank, step=-1)
    return True


def rank_is_order(graph: Graph) -> bool:
    if not (found := order_and_rank(graph)):
        return False
    _, order, rank = found
    graph.cut(rank)
    graph.add("Identity", [order], rank)
    return True


def window_concats(graph: Graph) -> list[onnx.NodeProto]:
    """The nodes where a chunk's neighbours are filled in beyond the ends: [fill, chunks] along the axis of chunks."""
    return [
        node
        for node in graph.nodes("Concat")
        if attribute(node, "axis") == 2 and len(node.input) == 2 and graph.comes_from(node.input[0], "Expand")
    ]


def look_around_direction(graph: Graph) -> bool:
    """Each chunk sees the one after it instead of the one before it."""
    for node in (nodes := window_concats(graph)):
        node.input[0], node.input[1] = node.input[1], node.input[0]
    return bool(nodes)


def look_around_wraps(graph: Graph) -> bool:
    """The first chunk sees the last one, where it should see nothing."""
    for node in (nodes := window_concats(graph)):
        node.input[0] = sliced(graph, node.input[1], -1, FAR, axis=2)
    return bool(nodes)


def self_mask_missing(graph: Graph) -> bool:
    return applied([graph.bypass(n, 2) for n in graph.nodes("Where") if graph.scalar(n, 1) == np.float32(-1e5)])


def rotation_sign(graph: Graph) -> bool:
    name = weight(graph, "hash")
    return name is not None and graph.overwrite(name, -graph.constant(name))  # type: ignore[operator]


def rotations_shuffled(graph: Graph) -> bool:
    """Two of the random directions exchanged: the same buckets by other numbers."""
    name = weight(graph, "hash")
    if name is None:
        return False
    array = graph.constant(name).copy()  # type: ignore[union-attr]
    array[:, [0, 1]] = array[:, [1, 0]]
    return graph.overwrite(name, array)


def padding_hashed(graph: Graph) -> bool:
    """Padding gets an ordinary bucket instead of the one behind all others."""
    return applied([graph.bypass(node, 1) for node in graph.nodes("Where", module="hash")])


def rounds_by_mean(graph: Graph) -> bool:
    for node in graph.nodes("Softmax"):
        if rank_of_softmax(node) == 3:
            node.input[0] = graph.add("Sub", [node.input[0], node.input[0]])
            return True
    return False


def rounds_by_maximum(graph: Graph) -> bool:
    """Rounds weighted by their largest logit instead of the log-sum-exp."""
    return applied([graph.bypass(node) for node in graph.nodes("Add") if graph.comes_from(node.input[1], "Log")])


# AFT


def stabiliser_lost(graph: Graph) -> bool:
    """e^k instead of e^(k − max k): the same quotient, until a key exceeds 88."""
    if graph.spec.attention.variant not in ("aft-full", "aft-simple"):
        return False
    found = False
    for node in graph.nodes("Exp"):
        sub = graph.producer(node.input[0])
        if sub is not None and sub.op_type == "Sub" and graph.comes_from(sub.input[1], "Clip"):
            found = graph.bypass(sub)
    return found


def far_blocks_overlap(graph: Graph) -> bool:
    """Blocks at the edge of the window are summed twice: as near ones, and among the far ones."""
    for node in graph.nodes("Greater"):
        if graph.comes_from(node.input[0], "Abs"):
            return graph.set_constant(node, 1, graph.constant(node.input[1]) - 1)  # type: ignore[operator]
    return False


def gate_is_tanh(graph: Graph) -> bool:
    found = False
    for node in graph.nodes("Sigmoid"):
        node.op_type = "Tanh"
        found = True
    return found


def position_factors(graph: Graph) -> list[str]:
    """The learned position biases: one matrix of aft-full; of aft-local, the factors of the queries and the keys."""
    arrays = {t.name: numpy_helper.to_array(t) for t in graph.graph.initializer}
    if graph.spec.attention.variant == "aft-full":
        size = graph.spec.model.seq_len
        return [n for n, a in arrays.items() if a.shape == (size, size) and graph.readers(n, "Slice")]
    if graph.spec.attention.variant == "aft-local":
        pairs = [n for n, a in arrays.items() if a.ndim == 3 and a.dtype.kind == "f"]
        return sorted(pairs, key=lambda name: bool(graph.readers(name, "Concat")))
    return []


def position_bias_transposed(graph: Graph) -> bool:
    names = position_factors(graph)
    arrays = [graph.constant(name) for name in names]
    if len(names) == 1:
        return graph.overwrite(names[0], arrays[0].T)  # type: ignore[union-attr]
    return applied([graph.overwrite(name, array) for name, array in zip(names, reversed(arrays), strict=True)])  # type: ignore[arg-type]


def position_bias_shifted(graph: Graph) -> bool:
    """Queries get the biases of the position after theirs."""
    if not (names := position_factors(graph)):
        return False
    array = graph.constant(names[0])
    assert array is not None
    rows = array.reshape(-1, array.shape[-1])
    return graph.overwrite(names[0], np.roll(rows, -1, axis=0).reshape(array.shape))


# Weights


def weight(graph: Graph, layer: str) -> str | None:
    """The constant of the product of a linear layer, [in, out], or of a hash, whose rotations are the left factor."""
    products = graph.nodes("MatMul", "LSHHash", module=layer)
    factors = [name for node in products for name in reversed(node.input)]
    return next((name for name in factors if graph.constant(name) is not None), None)


def first_weight(graph: Graph, *layers: str) -> str | None:
    return next((name for layer in layers if (name := weight(graph, layer)) is not None), None)


def bias_lost(layer: str, graph: Graph) -> bool:
    adds = [node for node in graph.nodes("Add", module=layer) if node.input[1].endswith(f"{layer}.bias")]
    return applied([graph.bypass(node) for node in adds])


def weight_changed(layers: tuple[str, ...], change: Callable[[np.ndarray], np.ndarray], graph: Graph) -> bool:
    name = first_weight(graph, *layers)
    return name is not None and graph.overwrite(name, change(graph.constant(name)))  # type: ignore[arg-type]


def element_lost(array: np.ndarray) -> np.ndarray:
    """The largest element becomes zero."""
    changed = array.copy()
    changed.flat[int(np.abs(array).argmax())] = 0
    return changed


def heads_swapped(graph: Graph) -> bool:
    """The values of the first head go to the second, and so on."""
    attention = graph.spec.attention
    name = weight(graph, "value")
    if name is None or not (attention.has_heads or graph.spec.attention.variant == "aft-conv"):
        return False
    array = graph.constant(name)
    assert array is not None
    size = array.shape[1] // attention.heads
    bias = graph.attention + "value.bias"
    if (values := graph.constant(bias)) is not None:
        graph.overwrite(bias, np.roll(values, size))
    return graph.overwrite(name, np.roll(array, size, axis=1))


def heads_merged_untransposed(graph: Graph) -> bool:
    """[batch, heads, seq, head_dim] is reshaped to [batch, seq, dim] as it lies in memory."""
    if not (graph.spec.attention.has_heads or graph.spec.attention.variant == "aft-conv"):
        return False
    for node in graph.nodes("Transpose")[::-1]:
        if attribute(node, "perm") == [0, 2, 1, 3] and graph.readers(node.output[0], "Reshape"):
            return graph.bypass(node)
    return False


def key_and_value_exchanged(graph: Graph) -> bool:
    names = weight(graph, "key"), weight(graph, "value")
    if names[0] is None or names[1] is None:
        return False
    key, value = (graph.constant(name) for name in names)
    if key.shape != value.shape:  # type: ignore[union-attr]
        return False
    return graph.overwrite(names[0], value) and graph.overwrite(names[1], key)  # type: ignore[arg-type]


def weights_through_float16(graph: Graph) -> bool:
    """Every weight of a linear layer was rounded to float16 on its way."""
    names = [n.input[1] for n in graph.nodes("MatMul") if module_of(n).split(".")[-1] not in ("", "hash")]
    arrays = {name: graph.constant(name) for name in names}
    return applied([graph.overwrite(n, a.astype(np.float16)) for n, a in arrays.items() if a is not None])


# The encoder around the layer


def table_shifted(name: str, graph: Graph) -> bool:
    array = graph.constant(f"{name}.weight")
    return array is not None and graph.overwrite(f"{name}.weight", np.roll(array, -1, axis=0))


def layer_norm_eps_lost(graph: Graph) -> bool:
    nodes = graph.nodes("LayerNormalization")
    for node in nodes:
        set_attribute(node, "epsilon", 1e-12)
    return bool(nodes)


def layer_norm_affine_lost(graph: Graph) -> bool:
    return applied([graph.set_constant(n, 1, np.ones_like(graph.constant(n.input[1]))) for n in norms(graph)[:1]])


def norms(graph: Graph) -> list[onnx.NodeProto]:
    return graph.nodes("LayerNormalization")


def final_norm_lost(graph: Graph) -> bool:
    return applied([graph.bypass(node) for node in graph.nodes("LayerNormalization", module="final_norm")])


def gelu_kind(graph: Graph) -> bool:
    """The tanh approximation instead of the exact function, or the other way round."""
    for node in (nodes := graph.nodes("Gelu")):
        set_attribute(node, "approximate", "tanh" if attribute(node, "approximate") == b"none" else "none")
    return bool(nodes)


def residual_lost(graph: Graph) -> bool:
    """The block hands on what attention adds, without what it is added to."""
    adds = [node for node in graph.nodes("Add", module="blocks.0") if module_of(node) == "blocks.0"]
    return graph.bypass(adds[0], 1) if adds else False


# Types, shapes and runs


def float32_ops_lost(graph: Graph) -> bool:
    """All of a float16 model in float16, as a converter without a list of exceptions makes it."""
    largest = np.finfo(np.float16).max
    casts = [n for n in graph.nodes("Cast") if attribute(n, "to") == TensorProto.FLOAT]
    if graph.spec.precision != "fp16" or not casts:
        return False
    for node in casts:
        set_attribute(node, "to", TensorProto.FLOAT16)
    for tensor in list(graph.graph.initializer):
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            half = np.clip(array, -largest, largest).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    for node in graph.nodes("ConstantOfShape"):
        value = attribute(node, "value")  # float32 zero where there is none
        if value is None or value.data_type == TensorProto.FLOAT:
            array = np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value)
            set_attribute(node, "value", numpy_helper.from_array(array.astype(np.float16), "value"))
    del graph.graph.value_info[:]
    return True


def dtype_changed(graph: Graph) -> bool:
    (output,) = graph.graph.output
    raw = graph.cut(output.name)
    to = TensorProto.FLOAT16 if graph.spec.precision == "fp32" else TensorProto.FLOAT
    graph.add("Cast", [raw], output.name, to=to)
    output.type.tensor_type.elem_type = to
    return True


def tokens_shifted(graph: Graph) -> bool:
    """The answer of each token stands at the one after it."""
    (output,) = graph.graph.output
    raw = graph.cut(output.name)
    graph.add("Concat", [sliced(graph, raw, -1, FAR), sliced(graph, raw, 0, -1)], output.name, axis=1)
    return True


def batch_mates_mixed(graph: Graph) -> bool:
    """A thousandth of the mean over the batch leaks into every sample, as from statistics over the wrong axis."""
    (output,) = graph.graph.output
    raw = graph.cut(output.name)
    mean = graph.add("ReduceMean", [raw, graph.new_constant(np.array([0]))], keepdims=1)
    share = graph.add("CastLike", [graph.new_constant(np.array(1e-3, np.float32)), raw])
    difference = graph.add("Mul", [graph.add("Sub", [mean, raw]), share])
    graph.add("Add", [raw, difference], output.name)
    return True


def randomness_left(graph: Graph) -> bool:
    """Noise of training, small enough for every tolerance."""
    (output,) = graph.graph.output
    raw = graph.cut(output.name)
    noise = graph.add("RandomNormalLike", [raw], scale=1e-6 if graph.spec.precision == "fp32" else 2e-3)
    graph.add("Add", [raw, noise], output.name)
    return True


def length_baked_in(graph: Graph) -> bool:
    """The length of the example became a constant."""
    found = False
    for node in graph.nodes("Shape"):
        if (attribute(node, "start"), attribute(node, "end")) == (1, 2) and node.input[0] in INPUTS:
            value = node.output[0]
            graph.cut(value)
            graph.add("Identity", [graph.new_constant(np.array([graph.spec.model.seq_len]))], value)
            found = True
    return found


INPUTS = ("input_ids", "hidden_states", "attention_mask")
KEY_BIAS_OF_SOFTMAX = "it adds the same number to all logits of a query, and softmax does not see it"
KEY_BIAS_OF_AFT = "it multiplies the numerator and the denominator of a channel by the same factor"
SQUARE = ("query", "query_key")
FP32 = ("attention", "encoder", "fused")
ENCODER = ("encoder",)


def fault(
    name: str, description: str, damage: Damage | None, *, at: tuple[str, ...] = VARIANTS, **fields: Any
) -> Fault:
    return Fault(name, description, damage, at, **fields)


def scaled_by_a_thousandth(layer: str, at: tuple[str, ...] = VARIANTS, **fields: Any) -> Fault:
    return fault(
        f"{layer} weight × 1.001",
        f"the weight of {layer} is a thousandth too large",
        partial(weight_changed, (layer,), lambda array: array * array.dtype.type(1.001)),
        at=at,
        **fields,
    )


def lost_bias(layer: str, at: tuple[str, ...], **fields: Any) -> Fault:
    return fault(f"{layer} bias lost", f"{layer} has no bias", partial(bias_lost, layer), at=at, **fields)


HEADS = ("softmax", "linear", "nystrom", "lsh", "window", "aft-conv")
BIASED = tuple(variant for variant in VARIANTS if variant != "lsh")
SOFTMAXES = ("softmax", "nystrom", "window")

FAULTS: tuple[Fault, ...] = (
    fault("pinv iteration dropped", "one step of the iteration less", pinv_iteration_dropped, at=("nystrom",)),
    fault("pinv scale over the batch", "one maximum for all samples", partial(pinv_scale_over, 0), at=("nystrom",)),
    fault("pinv scale over the heads", "one maximum for all heads", partial(pinv_scale_over, 1), at=("nystrom",)),
    fault("landmark matrix transposed", "Z(Aᵀ) instead of Z(A)", landmark_matrix_transposed, at=("nystrom",)),
    fault(
        "segments rounded down", "floor(n / m) tokens per landmark, not ceil", segments_rounded_down, at=("nystrom",)
    ),
    fault("padding in landmarks", "landmarks average over padding too", padding_in_landmarks, at=("nystrom",)),
    fault("padding in convolution", "values of padding are not zeroed", padding_in_convolution, at=("nystrom",)),
    fault("convolution flipped", "the filter runs backwards", convolution_flipped, at=("nystrom", "aft-conv")),
    fault("convolution lost", "its term is not added", convolution_lost, at=("nystrom",)),
    fault("scale lost", "logits without 1/√d", partial(scale_changed, 0), at=(*SOFTMAXES, "lsh")),
    fault("scale doubled", "1/√d applied twice", partial(scale_changed, 2), at=(*SOFTMAXES, "lsh")),
    fault("softmax over queries", "softmax along the wrong axis", softmax_over_queries, at=SOFTMAXES),
    fault("weak mask", "hidden logits are −3", weak_mask, at=(*SOFTMAXES, "lsh")),
    fault("mask ignored", "all tokens are kept", mask_ignored),
    fault("mask inverted", "padding is kept, tokens are hidden", mask_inverted),
    fault("mask before the feature map", "φ(mask · k) instead of mask · φ(k)", mask_before_feature_map, at=("linear",)),
    fault(
        "causal leak",
        "queries see one later position",
        later_token_seen,
        at=VARIANTS,
        configurations=("causal",),
    ),
    fault("feature map lost its negative half", "φ is 0 below 0", feature_map_of_relu, at=("linear",)),
    fault("denominator lost", "sums are not normalised", denominator_lost, at=("linear", *AFT)),
    fault(
        "eps lost",
        "eps of a denominator or a root is 0",
        eps_lost,
        at=("linear", "lsh", "gated-delta"),
        # behind the norms of an encoder no input brings a denominator near eps: the change is less than one rounding
        configurations=("attention",),
    ),
    fault(
        "previous block lost",
        "causal sums start a block too early",
        previous_block_lost,
        at=("linear",),
        configurations=("causal",),
    ),
    fault("chunk off by one", "chunks begin one sorted token late", chunks_shifted, at=("lsh",)),
    fault("unstable sort", "descending positions in a bucket", sort_unstable, at=("lsh",)),
    fault("wrong rank", "the order instead of its inverse", rank_is_order, at=("lsh",)),
    fault("look-around direction", "the chunk after, not before", look_around_direction, at=("lsh",)),
    fault("look-around wraps", "the first chunk sees the last", look_around_wraps, at=("lsh",)),
    fault("self-mask missing", "a token prefers itself", self_mask_missing, at=("lsh",)),
    fault("rotation sign", "rotations negated", rotation_sign, at=("lsh",)),
    fault("rotations shuffled", "two rotations exchanged", rotations_shuffled, at=("lsh",)),
    fault("padding hashed", "padding has no bucket of its own", padding_hashed, at=("lsh",)),
    fault("rounds by mean", "all hash rounds weigh the same", rounds_by_mean, at=("lsh",)),
    fault("rounds by maximum", "rounds weighted by their largest logit", rounds_by_maximum, at=("lsh",)),
    fault(
        "stabiliser lost",
        "e^k without subtracting the largest key",
        stabiliser_lost,
        at=("aft-full", "aft-simple"),
        # behind the norms of an encoder no input makes a key large enough for exp to overflow: the formulas are equal
        configurations=("attention", "fp16"),
    ),
    fault(
        "far blocks overlap",
        "the window's last block is counted twice",
        far_blocks_overlap,
        at=("aft-local", "aft-conv"),
    ),
    fault("gate is tanh", "tanh instead of the logistic function", gate_is_tanh, at=(*AFT, "gated-delta")),
    fault(
        "position bias transposed",
        "w(t', t) instead of w(t, t')",
        position_bias_transposed,
        at=("aft-full", "aft-local"),
    ),
    fault("position bias shifted", "biases of the position after", position_bias_shifted, at=("aft-full", "aft-local")),
    lost_bias("query", BIASED),
    lost_bias(
        "key",
        BIASED,
        configurations=FP32,
        no_ops={**dict.fromkeys(SOFTMAXES, KEY_BIAS_OF_SOFTMAX), **dict.fromkeys(AFT, KEY_BIAS_OF_AFT)},
    ),
    lost_bias("value", BIASED),
    lost_bias("out", BIASED),
    lost_bias("feed_forward.up", VARIANTS, configurations=ENCODER),
    lost_bias("feed_forward.down", VARIANTS, configurations=ENCODER),
    fault("weight transposed", "of the query projection", partial(weight_changed, SQUARE, np.transpose)),
    fault(
        "weight element lost",
        "the largest of the value projection is 0",
        partial(weight_changed, ("value",), element_lost),
    ),
    fault("heads swapped", "values go to the wrong head", heads_swapped, at=(*HEADS, "gated-delta")),
    fault("heads merged untransposed", "heads and positions in the wrong order", heads_merged_untransposed, at=HEADS),
    fault(
        "key and value exchanged",
        "two weights under each other's name",
        key_and_value_exchanged,
        at=tuple(v for v in BIASED if v != "aft-conv"),
    ),
    scaled_by_a_thousandth("query", BIASED, configurations=FP32),
    scaled_by_a_thousandth("key", BIASED, configurations=FP32),
    scaled_by_a_thousandth("query_key", ("lsh",), configurations=FP32),
    scaled_by_a_thousandth("value", configurations=FP32),
    scaled_by_a_thousandth("out", configurations=FP32),
    scaled_by_a_thousandth("feed_forward.up", configurations=ENCODER),
    scaled_by_a_thousandth("feed_forward.down", configurations=ENCODER),
    fault(
        "rotations × 1.001",
        "rotations a thousandth too long",
        partial(weight_changed, ("hash",), lambda a: a * np.float32(1.001)),
        at=("lsh",),
        configurations=FP32,
        no_ops={"lsh": "a bucket depends on the direction of a vector only"},
    ),
    fault(
        "weights through float16",
        "float32 weights were rounded to float16",
        weights_through_float16,
        configurations=FP32,
    ),
    fault(
        "positions shifted",
        "position table one row off",
        partial(table_shifted, "position_embedding"),
        configurations=ENCODER,
    ),
    fault(
        "tokens renumbered",
        "token table one row off",
        partial(table_shifted, "token_embedding"),
        configurations=ENCODER,
    ),
    fault(
        "LayerNorm eps",
        "1e-12 instead of 1e-5",
        layer_norm_eps_lost,
        configurations=ENCODER,
    ),
    fault("LayerNorm gain lost", "the gain of the first norm is 1", layer_norm_affine_lost, configurations=ENCODER),
    fault("final norm lost", "the last norm is missing", final_norm_lost, configurations=ENCODER),
    fault("GELU kind", "tanh approximation instead of the exact function", gelu_kind, configurations=ENCODER),
    fault("residual lost", "attention without its residual", residual_lost, configurations=ENCODER),
    fault(
        "ops kept in float32 lost",
        "sums, softmax and exponentials in float16",
        float32_ops_lost,
        configurations=("fp16",),
    ),
    fault("dtype changed", "the output has another element type", dtype_changed),
    fault("tokens shifted", "answers stand one token late", tokens_shifted),
    fault("batch mates mixed", "a thousandth of the batch mean leaks in", batch_mates_mixed, configurations=FP32),
    fault("randomness left in", "the answer changes from run to run", randomness_left),
    fault("length baked in", "the example's length is a constant", length_baked_in),
    fault("data of another build", "the weights file of another seed", None, configurations=("attention",)),
)
