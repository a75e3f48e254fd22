"""Faults that exporters and converters make, for ONNX files of anyone.

planted_faults.py has the faults of graphs that effexport makes; these here find their place by operators, constants and
inputs alone. Each is planted into one place: the middle one of those where it can occur.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from onnx import TensorProto
from planted_faults import FAR, Damage, Graph, applied, attribute, set_attribute, sliced

from effexport.base.dtypes import Array
from effexport.base.spec import BuildSpec

LINEAR = ("MatMul", "Gemm", "FusedMatMul")
NORMS = (
    "LayerNormalization",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "BatchNormalization",
    "InstanceNormalization",
)
REVERSED = {"Less": "Greater", "LessOrEqual": "GreaterOrEqual"}
STRICT = {"LessOrEqual": "Less", "GreaterOrEqual": "Greater", "Less": "LessOrEqual", "Greater": "GreaterOrEqual"}


@dataclass(frozen=True)
class FileFault:
    """A bug. damage: edits a graph, and returns False where there is nothing to edit."""

    name: str
    description: str
    damage: Damage


def opened(path: Path) -> Graph:
    """A file as a graph to edit, with constants of nodes among its weights."""
    model = onnx.load(str(path))
    graph = Graph(model, cast(BuildSpec, None))  # which only faults of our own graphs ask for
    for node in [node for node in graph.nodes("Constant") if attribute(node, "value") is not None]:
        tensor = attribute(node, "value")
        tensor.name = node.output[0]
        model.graph.initializer.append(tensor)
        model.graph.node.remove(node)
    return graph


def middle(places: Sequence[Any]) -> Any:
    return places[len(places) // 2] if places else None


# Constants


def arrays(g: Graph, *ops: str, ndim: int | None = None, index: int | None = None, least: int = 2) -> list[str]:
    """Names of float constants that nodes of these operators read, or any. index: of the input; None for all.
    least: elements."""
    found = {}
    for node in g.graph.node:
        if ops and node.op_type not in ops:
            continue
        for place, name in enumerate(node.input):
            array = g.constant(name) if index in (None, place) else None
            is_float = array is not None and array.dtype == np.float32 and array.size >= least
            if is_float and ndim in (None, array.ndim):  # type: ignore[union-attr]
                found[name] = True
    return list(found)


def matrices(g: Graph) -> list[str]:
    """Weights of two axes, without tables."""
    tables = set(arrays(g, "Gather", index=0))
    return [name for name in arrays(g, ndim=2, least=16) if name not in tables]


def biases(g: Graph) -> list[str]:
    added = [*arrays(g, "Add", ndim=1), *arrays(g, "Gemm", "Conv", ndim=1, index=2)]
    return [name for name in added if np.any(g.constant(name))]


def tables(g: Graph) -> list[str]:
    return arrays(g, "Gather", ndim=2, index=0)


def filters(g: Graph) -> list[str]:
    return arrays(g, "Conv", index=1)


def gains(g: Graph) -> list[str]:
    return [name for op in NORMS for name in arrays(g, op, index=2 if op.startswith("Skip") else 1)]


def shifts(g: Graph) -> list[str]:
    return [name for op in NORMS for name in arrays(g, op, index=3 if op.startswith("Skip") else 2)]


Finder = Callable[[Graph], list[str]]
Change = Callable[[Array], Array]


def changed(find: Finder, change: Change, g: Graph) -> bool:
    """Change one of the constants in place."""
    names = [name for name in find(g) if not np.array_equal(change(g.constant(name)), g.constant(name))]  # type: ignore[arg-type]
    return bool(names) and g.overwrite(middle(names), change(g.constant(middle(names))))  # type: ignore[arg-type]


def all_changed(find: Finder, change: Change, g: Graph) -> bool:
    return applied([g.overwrite(name, change(g.constant(name))) for name in find(g)])  # type: ignore[arg-type]


def square(g: Graph) -> list[str]:
    return [name for name in matrices(g) if len(set(g.constant(name).shape)) == 1]  # type: ignore[union-attr]


def pair(find: Finder, g: Graph) -> tuple[str, str] | None:
    """Two constants of one shape and different numbers."""
    names = find(g)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            a, b = g.constant(first), g.constant(second)
            if a.shape == b.shape and not np.array_equal(a, b):  # type: ignore[union-attr, arg-type]
                return first, second
    return None


def exchanged(find: Finder, g: Graph) -> bool:
    if not (names := pair(find, g)):
        return False
    a, b = (g.constant(name) for name in names)
    return g.overwrite(names[0], b) and g.overwrite(names[1], a)  # type: ignore[arg-type]


def used_twice(find: Finder, g: Graph) -> bool:
    names = pair(find, g)
    return names is not None and g.overwrite(names[1], g.constant(names[0]))  # type: ignore[arg-type]


def element_lost(array: Array) -> Array:
    result = array.copy()
    result.flat[int(np.abs(array).argmax())] = 0
    return result


def largest_table(g: Graph) -> list[str]:
    return sorted(tables(g), key=lambda name: g.constant(name).size)[-1:]  # type: ignore[union-attr]


def row_lost(array: Array) -> Array:
    result = array.copy()
    result[len(array) // 2] = 0
    return result


def to_8_bits(array: Array) -> Array:
    step = np.abs(array).max() / 127
    return np.round(array / step) * step


def to_bfloat16(array: Array) -> Array:
    return (np.ascontiguousarray(array).view(np.uint32) & 0xFFFF0000).view(np.float32)


def halves_exchanged(array: Array) -> Array:
    return np.roll(array, array.shape[-1] // 2, axis=-1)


# Single numbers


def scalars(g: Graph, *ops: str, of: Callable[[float], bool] = lambda value: True) -> list[tuple[onnx.NodeProto, int]]:
    """Nodes and the places of their constant floats, of which all elements are one number."""
    found = []
    for node in g.nodes(*ops):
        for index, name in enumerate(node.input):
            array = g.constant(name)
            is_one = array is not None and array.size and array.dtype.kind == "f" and len(np.unique(array)) == 1
            if is_one and of(float(array.flat[0])):  # type: ignore[union-attr]
                found.append((node, index))
    return found


def number_changed(
    ops: Sequence[str], change: Callable[[Array], Any], of: Callable[[float], bool], g: Graph, *, every: bool = False
) -> bool:
    places = scalars(g, *ops, of=of)
    for node, index in places if every else [middle(places)] if places else []:
        array = g.constant(node.input[index])
        g.set_constant(node, index, np.broadcast_to(change(array), array.shape))  # type: ignore[union-attr, arg-type]
    return bool(places)


def scale_changed(change: Change, g: Graph) -> bool:
    """Change a constant factor or divisor."""
    return number_changed(("Mul", "Div"), change, lambda value: value not in (0, 1) and abs(value) < 1e4, g)


def integer_changed(ops: Sequence[str], index: int, change: int, g: Graph) -> bool:
    """Add to a constant integer that a node reads."""
    places = [node for node in g.nodes(*ops) if len(node.input) > index and is_integer(g.constant(node.input[index]))]
    if not places:
        return False
    node = middle(places)
    return g.set_constant(node, index, g.constant(node.input[index]) + change)


def is_integer(array: Array | None) -> bool:
    return array is not None and array.dtype.kind == "i" and array.size == 1 and abs(int(array.flat[0])) < 1000


# Nodes


def replaced(ops: dict[str, str], g: Graph, *, keep: bool = True, every: bool = False, **attributes: Any) -> bool:
    """Another operator in the place of one. keep: its attributes."""
    places = g.nodes(*ops)
    for node in places if every else [middle(places)] if places else []:
        node.op_type = ops[node.op_type]
        if not keep:
            del node.attribute[:]
        for name, value in attributes.items():
            set_attribute(node, name, value)
    return bool(places)


def with_attribute(ops: Sequence[str], name: str, change: Callable[[Any], Any], g: Graph) -> bool:
    """Change an attribute of a node; None stands for an attribute that is not there, and for nothing to change."""
    found = [(node, attribute(node, name)) for node in g.nodes(*ops)]
    places = [(node, change(old)) for node, old in found if change(old) not in (None, old)]
    for node, value in [middle(places)] if places else []:
        set_attribute(node, name, value)
    return bool(places)


def bypassed(ops: Sequence[str], g: Graph, index: int = 0) -> bool:
    places = [node for node in g.nodes(*ops) if len(node.input) > index]
    return bool(places) and g.bypass(middle(places), index)


def computed(g: Graph, *ops: str) -> list[onnx.NodeProto]:
    """Nodes of which no input is a constant or a shape, and that compute floats as far as can be seen."""
    made = {name: node for node in g.graph.node for name in node.output}
    sizes = ("Shape", "Size", "Cast", "Gather", "Range", "Unsqueeze", "Squeeze")

    def is_float(name: str) -> bool:
        return name in made and made[name].op_type not in sizes and g.constant(name) is None

    return [node for node in g.nodes(*ops) if len(node.input) == 2 and all(map(is_float, node.input))]


def residual_lost(index: int, g: Graph) -> bool:
    places = computed(g, "Add")
    if places:
        return g.bypass(middle(places), index)
    for node in g.nodes("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
        node.input[index] = g.add("Sub", [node.input[index]] * 2)
        return True
    return False


def computed_replaced(ops: dict[str, str], g: Graph) -> bool:
    places = computed(g, *ops)
    for node in [middle(places)] if places else []:
        node.op_type = ops[node.op_type]
    return bool(places)


def inputs_exchanged(ops: Sequence[str], g: Graph, *, is_computed: bool = True, every: bool = False) -> bool:
    places = computed(g, *ops) if is_computed else [node for node in g.nodes(*ops) if len(node.input) >= 2]
    for node in places if every else [middle(places)] if places else []:
        node.input[0], node.input[1] = node.input[1], node.input[0]
    return bool(places)


def branches_exchanged(g: Graph) -> bool:
    places = g.nodes("Where")
    for node in [middle(places)] if places else []:
        node.input[1], node.input[2] = node.input[2], node.input[1]
    return bool(places)


def outputs_exchanged(g: Graph) -> bool:
    places = [node for node in g.nodes("Split") if len(node.output) >= 2]
    for node in [middle(places)] if places else []:
        node.output[0], node.output[1] = node.output[1], node.output[0]
    return bool(places)


def slices_exchanged(g: Graph) -> bool:
    """Two slices of one value, of which each takes the place of the other."""
    by_value: dict[str, list[onnx.NodeProto]] = {}
    for node in g.nodes("Slice"):
        by_value.setdefault(node.input[0], []).append(node)
    for first, second, *_ in (nodes for nodes in by_value.values() if len(nodes) > 1):
        if feeds(first, second, g) or feeds(second, first, g):
            continue
        first.output[0], second.output[0] = second.output[0], first.output[0]
        return True
    return False


def feeds(node: onnx.NodeProto, other: onnx.NodeProto, g: Graph) -> bool:
    """True if the result of a node reaches another, through any others."""
    seen: set[str] = set()
    waiting = list(node.output)
    while waiting:
        for reader in g.readers(waiting.pop()):
            if reader is other:
                return True
            waiting += set(reader.output) - seen
            seen.update(reader.output)
    return False


def followed(value: str, g: Graph, op: str, *more: str, **attributes: Any) -> bool:
    """Let another node change a value."""
    raw = g.cut(value)
    g.add(op, [raw, *more], value, **attributes)
    return True


def after(ops: Sequence[str], then: str, g: Graph, **attributes: Any) -> bool:
    places = g.nodes(*ops)
    return bool(places) and followed(middle(places).output[0], g, then, **attributes)


def heads_untransposed(g: Graph) -> bool:
    """The result of all heads is reshaped as it lies in memory."""
    for node in g.nodes("Transpose")[::-1]:
        if attribute(node, "perm") == [0, 2, 1, 3] and g.readers(node.output[0], "Reshape"):
            return g.bypass(node)
    return False


def wrong_axis(ops: Sequence[str], g: Graph) -> bool:
    """A reduction over the axis before the last one instead of the last."""
    for node in g.nodes(*ops)[::-1]:
        axes = attribute(node, "axes")
        if axes is not None:
            set_attribute(node, "axes", [-2])
            return True
        if len(node.input) > 1 and (old := g.constant(node.input[1])) is not None:
            return g.set_constant(node, 1, np.full_like(old, -2))
    return False


def gates_exchanged(g: Graph) -> bool:
    """The second and the third gate of a recurrence, as another framework orders them."""
    for node in g.nodes("LSTM", "GRU"):
        array = g.constant(node.input[1])
        if array is not None:
            parts = np.split(array, 4 if node.op_type == "LSTM" else 3, axis=1)
            parts[1], parts[2] = parts[2], parts[1]
            return g.overwrite(node.input[1], np.concatenate(parts, axis=1))
    return False


def directions_exchanged(g: Graph) -> bool:
    for node in g.nodes("LSTM", "GRU"):
        array = g.constant(node.input[2])
        if array is not None and len(array) == 2:
            return g.overwrite(node.input[2], array[::-1])
    return False


# Inputs and outputs


def input_changed(words: Sequence[str], change: Callable[[Graph, str], str], g: Graph) -> bool:
    """Let all readers of the inputs with such names read something else. change: the name of what they read."""
    weights = {tensor.name for tensor in g.graph.initializer}
    names = [v.name for v in g.graph.input if v.name not in weights and any(word in v.name for word in words)]
    for name in names:
        readers = g.readers(name)
        other = change(g, name)
        for node in readers:
            node.input[:] = [other if one == name else one for one in node.input]
    return bool(names)


def all_ones(g: Graph, name: str) -> str:
    return g.add("CastLike", [g.add("Equal", [name, name]), name])


def all_zeros(g: Graph, name: str) -> str:
    return g.add("Sub", [name, name])


def inverted(g: Graph, name: str) -> str:
    return g.add("Sub", [all_ones(g, name), name])


def one_later(g: Graph, name: str) -> str:
    return g.add("Concat", [sliced(g, name, -1, FAR), sliced(g, name, 0, -1)], axis=1)


def of_first_sample(g: Graph, name: str) -> str:
    return g.add("Expand", [sliced(g, name, 0, 1, axis=0), g.add("Shape", [name])])


def one_less(g: Graph, name: str) -> str:
    one = g.add("CastLike", [g.new_constant(np.array(1)), name])
    return g.add("Max", [g.add("Sub", [name, one]), all_zeros(g, name)])


MASKS, INDICES, STATES = ("mask",), ("input_ids", "tokens"), ("past",)


def float_output(g: Graph) -> onnx.ValueInfoProto:
    return next(one for one in g.graph.output if one.type.tensor_type.elem_type == TensorProto.FLOAT)


def output_followed(op: str, g: Graph, constant: float | None = None, **attributes: Any) -> bool:
    more = [] if constant is None else [g.new_constant(np.array(constant, np.float32))]
    return followed(float_output(g).name, g, op, *more, **attributes)


def output_type_changed(g: Graph) -> bool:
    output = float_output(g)
    output.type.tensor_type.elem_type = TensorProto.DOUBLE
    return followed(output.name, g, "Cast", to=TensorProto.DOUBLE)


def output_turned(g: Graph) -> bool:
    """The last two axes of an output exchanged."""
    output = float_output(g)
    dims = output.type.tensor_type.shape.dim
    order = [*range(len(dims) - 2), len(dims) - 1, len(dims) - 2]
    swapped = [dims[axis].SerializeToString() for axis in order]
    for dim, data in zip(dims, swapped, strict=True):
        dim.ParseFromString(data)
    return followed(output.name, g, "Transpose", perm=order)


def output_shifted(axis: int, g: Graph) -> bool:
    """Every answer stands one place later."""
    output = float_output(g)
    if len(output.type.tensor_type.shape.dim) <= axis:
        return False
    raw = g.cut(output.name)
    g.add("Concat", [sliced(g, raw, -1, FAR, axis=axis), sliced(g, raw, 0, -1, axis=axis)], output.name, axis=axis)
    return True


def batch_mates_mixed(g: Graph) -> bool:
    """A hundredth of the first sample leaks into every other."""
    output = float_output(g)
    raw = g.cut(output.name)
    share = g.add("Mul", [g.add("Sub", [sliced(g, raw, 0, 1, axis=0), raw]), g.new_constant(np.float32(1e-2))])
    g.add("Add", [raw, share], output.name)
    return True


def noise_left(scale: float, g: Graph) -> bool:
    output = float_output(g)
    raw = g.cut(output.name)
    g.add("Add", [raw, g.add("RandomNormalLike", [raw], scale=scale)], output.name)
    return True


def results_exchanged(g: Graph) -> bool:
    """Two outputs of one type under each other's name."""
    if len(g.graph.output) < 2:
        return False
    first, second = g.graph.output[0].name, g.graph.output[1].name
    for name in (first, second):
        raw = g.cut(name)
        for node in g.readers(name):
            node.input[:] = [raw if one == name else one for one in node.input]
        g.add("Identity", [raw], f"{name} kept")
    g.add("Identity", [f"{second} kept"], first)
    g.add("Identity", [f"{first} kept"], second)
    return True


def size_baked_in(axis: int, g: Graph) -> bool:
    """The size of the example became a constant of the first value of the graph that has that axis."""
    for value in g.graph.input:
        dims = value.type.tensor_type.shape.dim
        if len(dims) > axis and dims[axis].dim_param and g.readers(value.name):
            size = {0: 2, 1: 16}[axis]
            shape = g.add("Shape", [value.name])
            fixed = [sliced(g, shape, 0, axis, axis=0)] if axis else []
            fixed += [g.new_constant(np.array([size])), sliced(g, shape, axis + 1, FAR, axis=0)]
            readers = [node for node in g.readers(value.name) if node.op_type != "Shape"]
            other = g.add("Reshape", [value.name, g.add("Concat", fixed, axis=0)])
            for node in readers:
                node.input[:] = [other if name == value.name else name for name in node.input]
            return bool(readers)
    return False


def through(to: int, g: Graph) -> bool:
    """A value between two layers takes a detour through another type."""
    places = [*computed(g, "Add"), *g.nodes(*LINEAR)]
    if not places:
        return False
    value = middle(places).output[0]
    raw = g.cut(value)
    g.add("Cast", [g.add("Cast", [raw], to=to)], value, to=TensorProto.FLOAT)
    return True


def fault(name: str, description: str, damage: Callable[..., bool], *given: Any, **options: Any) -> FileFault:
    return FileFault(name, description, partial(damage, *given, **options))


ATTENTIONS = ("GroupQueryAttention", "MultiHeadAttention", "Attention")
REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax")
ANY, SMALL = (lambda value: True), (lambda value: 0 < value < 1e-3)

FILE_FAULTS: tuple[FileFault, ...] = (
    fault("weight transposed", "a square matrix", changed, square, np.transpose),
    fault("weight × 1.001", "a matrix is a thousandth too large", changed, matrices, lambda a: a * 1.001),
    fault("weight negated", "a matrix has the other sign", changed, matrices, np.negative),
    fault("weight element lost", "the largest of a matrix is 0", changed, matrices, element_lost),
    fault("weight row lost", "one row of a matrix is 0", changed, matrices, row_lost),
    fault("weight rows shifted", "each row stands one later", changed, matrices, lambda a: np.roll(a, 1, axis=0)),
    fault("weight columns reversed", "the last column first", changed, matrices, lambda a: a[:, ::-1]),
    fault("weight halves exchanged", "heads in another order", changed, matrices, halves_exchanged),
    fault("weight in float16", "one matrix was rounded", changed, matrices, lambda a: a.astype(np.float16)),
    fault("weights in float16", "all matrices were rounded", all_changed, matrices, lambda a: a.astype(np.float16)),
    fault("weights in bfloat16", "all matrices were rounded", all_changed, matrices, to_bfloat16),
    fault("weight in 8 bits", "one matrix was rounded", changed, matrices, to_8_bits),
    fault("weights exchanged", "two matrices of one shape", exchanged, matrices),
    fault("weight used twice", "two layers have one matrix", used_twice, matrices),
    fault("table one row off", "tokens renumbered", changed, tables, lambda a: np.roll(a, -1, axis=0)),
    fault("table row lost", "one row of a table is 0", changed, largest_table, row_lost),
    fault("table halves exchanged", "channels in another order", changed, tables, halves_exchanged),
    fault("table in float16", "a table was rounded", changed, tables, lambda a: a.astype(np.float16)),
    fault("tables exchanged", "two of one shape", exchanged, tables),
    fault("bias lost", "one bias is 0", changed, biases, np.zeros_like),
    fault("biases lost", "all are 0", all_changed, biases, np.zeros_like),
    fault("bias × 1.01", "one bias is a hundredth too large", changed, biases, lambda a: a * 1.01),
    fault("bias negated", "one bias has the other sign", changed, biases, np.negative),
    fault("bias shifted", "one bias stands one channel later", changed, biases, lambda a: np.roll(a, 1)),
    fault("biases exchanged", "two of one shape", exchanged, biases),
    fault("filter backwards", "a convolution", changed, filters, lambda a: a[..., ::-1]),
    fault("filter channels shifted", "a convolution", changed, filters, lambda a: np.roll(a, 1, axis=0)),
    fault("filter × 1.001", "a convolution", changed, filters, lambda a: a * 1.001),
    fault(
        "padding on one side",
        "a convolution is one place off",
        with_attribute,
        ("Conv",),
        "pads",
        lambda pads: [0, *pads[1:-1], pads[-1] + pads[0]] if pads and pads[0] == pads[-1] > 0 else None,
    ),
    fault("maximum became mean", "of a pooling window", replaced, {"MaxPool": "AveragePool"}),
    fault("mean became maximum", "of all places", replaced, {"GlobalAveragePool": "GlobalMaxPool"}),
    fault("alpha of Gemm", "1.001", with_attribute, ("Gemm",), "alpha", lambda value: 1.001 * (value or 1.0)),
    fault("beta of Gemm", "0: without a bias", with_attribute, ("Gemm",), "beta", lambda value: 0.0),
    fault("scale × 1.01", "a constant factor", scale_changed, lambda a: a * 1.01),
    fault("scale lost", "a constant factor is 1", scale_changed, np.ones_like),
    fault("scale twice", "a constant factor is squared", scale_changed, np.square),
    fault(
        "sum without its constant", "0", number_changed, ("Add", "Sub"), np.zeros_like, lambda v: 1e-3 < abs(v) < 1e4
    ),
    fault("eps lost", "a small summand is 0", number_changed, ("Add",), np.zeros_like, SMALL),
    fault("eps too large", "a small summand is 0.01", number_changed, ("Add",), lambda a: 0.01 + 0 * a, SMALL),
    fault("power + 1", "an exponent", number_changed, ("Pow",), lambda a: a + 1, ANY),
    fault(
        "mask too weak",
        "hidden scores are −3",
        number_changed,
        ("Where", "Mul", "Add"),
        lambda a: -3 + 0 * a,
        lambda value: value < -1e4,
        every=True,
    ),
    fault(
        "mask of the other sign",
        "hidden scores are large",
        number_changed,
        ("Where", "Mul"),
        np.negative,
        lambda value: value < -1e4,
        every=True,
    ),
    fault(
        "bound halved", "of Clip, Min or Max", number_changed, ("Clip", "Min", "Max"), lambda a: a / 2, lambda v: v != 0
    ),
    fault("selected the next", "a constant index", integer_changed, ("Gather",), 1, 1),
    fault("slice starts later", "by one", integer_changed, ("Slice",), 1, 1),
    fault("slice ends earlier", "by one", integer_changed, ("Slice",), 2, -1),
    fault("range starts later", "by one", integer_changed, ("Range",), 0, 1),
    fault("integers off by one", "a constant summand", integer_changed, ("Add", "Sub"), 1, 1),
    fault("concatenated in reverse", "two parts", inputs_exchanged, ("Concat",)),
    fault("parts exchanged", "of a split", outputs_exchanged),
    fault("slices exchanged", "of one value", slices_exchanged),
    fault("heads not merged", "their transposition is lost", heads_untransposed),
    fault(
        "epsilon of a norm 1e-12",
        "instead of a larger one",
        with_attribute,
        NORMS,
        "epsilon",
        lambda value: 1e-12 if value > 1e-9 else None,
    ),
    fault("epsilon of a norm 0.01", "instead of a smaller one", with_attribute, NORMS, "epsilon", lambda value: 1e-2),
    fault("gain lost", "of a norm", changed, gains, np.ones_like),
    fault("shift lost", "of a norm", changed, shifts, np.zeros_like),
    fault("gains exchanged", "of two norms", exchanged, gains),
    fault("norm lost", "its input goes on", bypassed, NORMS),
    fault("mask ignored", "everything is kept", input_changed, MASKS, all_ones),
    fault("mask inverted", "the hidden is kept", input_changed, MASKS, inverted),
    fault("mask shifted", "by one token", input_changed, MASKS, one_later),
    fault("mask of the first sample", "for all", input_changed, MASKS, of_first_sample),
    fault("and became or", "of two masks", replaced, {"And": "Or"}),
    fault("branches exchanged", "of Where", branches_exchanged),
    fault("comparison off by one", "≤ instead of <", replaced, STRICT),
    fault("comparison reversed", "> instead of <", replaced, REVERSED | {b: a for a, b in REVERSED.items()}),
    fault("not lost", "a negation", bypassed, ("Not",)),
    fault("not added", "to a comparison", after, ("Equal", "LessOrEqual", "GreaterOrEqual", "Less"), "Not"),
    fault(
        "softmax over queries",
        "the wrong axis",
        with_attribute,
        ("Softmax",),
        "axis",
        lambda value: -2,
    ),
    fault("softmax not normalised", "a sigmoid", replaced, {"Softmax": "Sigmoid"}, keep=False),
    fault("logarithm lost", "of a softmax", replaced, {"LogSoftmax": "Softmax"}),
    fault("factors exchanged", "of a product", inputs_exchanged, LINEAR),
    fault("residual lost", "a sum is its first part", residual_lost, 0),
    fault("branch lost", "a sum is its second part", residual_lost, 1),
    fault("sum became difference", "of two values", computed_replaced, {"Add": "Sub"}),
    fault("product became sum", "of two values", computed_replaced, {"Mul": "Add"}),
    fault("difference reversed", "b − a", inputs_exchanged, ("Sub",), is_computed=False),
    fault("quotient reversed", "b / a", inputs_exchanged, ("Div",)),
    fault("rotation lost", "of fused attention", with_attribute, ATTENTIONS, "do_rotary", lambda v: 0 if v else None),
    fault(
        "rotation interleaved",
        "of fused attention",
        with_attribute,
        ATTENTIONS,
        "rotary_interleaved",
        lambda value: None if value is None else 1 - value,
    ),
    fault(
        "scale of fused attention", "× 1.1", with_attribute, ATTENTIONS, "scale", lambda value: 1.1 * (value or 0.35)
    ),
    fault("window of fused attention", "4 tokens", with_attribute, ATTENTIONS, "local_window_size", lambda value: 4),
    fault("GELU approximated", "by tanh", with_attribute, ("Gelu",), "approximate", lambda value: "tanh"),
    fault("erf became tanh", "in GELU", replaced, {"Erf": "Tanh"}),
    fault("ReLU leaks", "below 0", replaced, {"Relu": "LeakyRelu"}),
    fault("tanh became a sigmoid", "an activation", replaced, {"Tanh": "Sigmoid"}),
    fault("sigmoid became hard", "an activation", replaced, {"Sigmoid": "HardSigmoid"}),
    fault("sine and cosine exchanged", "of positions", replaced, {"Sin": "Cos", "Cos": "Sin"}, every=True),
    fault("root lost", "a square root", bypassed, ("Sqrt",)),
    fault("alpha of ELU", "1.1", with_attribute, ("Elu",), "alpha", lambda value: 1.1),
    fault("hard swish became a sigmoid", "an activation", replaced, {"HardSwish": "Sigmoid"}),
    fault("mean became sum", "a reduction", replaced, {"ReduceMean": "ReduceSum"}),
    fault("sum became maximum", "a reduction", replaced, {"ReduceSum": "ReduceMax"}),
    fault("reduced over the wrong axis", "the last but one", wrong_axis, REDUCTIONS),
    fault("cumulative sum excludes", "its own element", with_attribute, ("CumSum",), "exclusive", lambda value: 1),
    fault("cumulative sum backwards", "from the end", with_attribute, ("CumSum",), "reverse", lambda value: 1),
    fault("smallest chosen", "not the largest", with_attribute, ("TopK",), "largest", lambda value: 0),
    fault("gates exchanged", "of a recurrence", gates_exchanged),
    fault("directions exchanged", "of a recurrence", directions_exchanged),
    fault("value through float16", "in the middle", through, TensorProto.FLOAT16),
    fault("value through integers", "in the middle", through, TensorProto.INT32),
    fault("output of another type", "float64", output_type_changed),
    fault("output turned", "its last two axes", output_turned),
    fault("samples shifted", "each answer is that of another sample", output_shifted, 0),
    fault("tokens shifted", "answers stand one token late", output_shifted, 1),
    fault("output × 1.001", "a thousandth too large", output_followed, "Mul", constant=1.001),
    fault("output + 0.01", "a constant is added", output_followed, "Add", constant=0.01),
    fault("outputs exchanged", "two under each other's name", results_exchanged),
    fault("batch mates mixed", "a hundredth of the first sample leaks", batch_mates_mixed),
    fault("noise left in", "1e-6", noise_left, 1e-6),
    fault("batch baked in", "the size of the example", size_baked_in, 0),
    fault("length baked in", "the size of the example", size_baked_in, 1),
    fault("tokens off by one", "ids are one smaller", input_changed, INDICES, one_less),
    fault("cache ignored", "the past is 0", input_changed, STATES, all_zeros),
    fault("not a number", "the square root of an output", output_followed, "Sqrt"),
)


def planted(damage: Damage, graph: Graph, path: Path) -> Path | None:
    """The damaged file, or None where there is nothing to damage."""
    if not damage(graph):
        return None
    onnx.save(graph.finished(), str(path))
    return path
