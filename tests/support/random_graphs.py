"""Random graphs of custom operators with standard ones between them, as models have them, from a seed."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.helper
from emulated_plugins import NUMPY_TYPES

from effexport.plugins.banded_attention.op import offsets
from effexport.plugins.contract import load_contract
from effexport.plugins.ops import CUDA_OPS, DOMAIN, FLOAT_TYPES, OPS, OPSET_VERSION, PLUGIN_NAMESPACE
from effexport.plugins.signature import Parameter

OPSET = 20
# A batch, a sequence, or a number.
Dim = str | int


@dataclass(frozen=True)
class Value:
    """A tensor of a graph. dims: names are keys of the graph's `sizes`."""

    name: str
    dtype: str
    dims: tuple[Dim, ...]


@dataclass
class RandomGraph:
    """A graph under construction, and inputs for it. sizes: of the dimensions that have names.

    attributes: those of every operator's nodes, which share one function body and hence must agree.
    """

    random: random.Random
    numbers: np.random.Generator
    sizes: dict[str, int]
    attributes: dict[str, dict[str, Any]]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: dict[Value, np.ndarray] = field(default_factory=dict)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def shape(self, dims: Sequence[Dim]) -> tuple[int, ...]:
        return tuple(self.sizes[dim] if isinstance(dim, str) else dim for dim in dims)

    def input(self, array: np.ndarray, dtype: str, *dims: Dim) -> Value:
        value = Value(f"input{len(self.inputs)}", dtype, dims)
        self.inputs[value] = array.reshape(self.shape(dims)).astype(NUMPY_TYPES[dtype])
        return value

    def normal(self, dtype: str, *dims: Dim) -> Value:
        return self.input(self.numbers.standard_normal(self.shape(dims)), dtype, *dims)

    def keep(self, *dims: Dim) -> Value:
        """A tenth of the tokens is hidden, and the end of the last sample; all of it in a few graphs of several."""
        keep = self.numbers.random(self.shape(dims)) < 0.9
        batch, seq = keep.shape
        keep[-1, seq - seq // 4 if batch == 1 or self.random.random() < 0.9 else 0 :] = False
        return self.input(keep, "bool", *dims)

    def constant(self, array: np.ndarray, dtype: str) -> Value:
        name = f"constant{len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(array.astype(NUMPY_TYPES.get(dtype, dtype)), name))
        return Value(name, dtype, array.shape)

    def weight(self, dtype: str, *shape: int) -> Value:
        """Normal numbers that keep the size of what they multiply. The dimension before the last is summed up."""
        return self.constant(self.numbers.standard_normal(shape) / shape[-2] ** 0.5, dtype)

    def node(self, op_type: str, *inputs: Value | None, like: Value | None = None, **attributes: Any) -> Value:
        """The output of a standard operator. like: what has its type and dimensions, by default the first input."""
        like = like or inputs[0]
        assert like is not None
        value = Value(f"value{len(self.values)}", like.dtype, like.dims)
        self.values.append(value)
        names = [x.name if x else "" for x in inputs]
        self.nodes.append(onnx.helper.make_node(op_type, names, [value.name], **attributes))
        return value

    def custom(self, op: str, *inputs: Value, sizes: dict[str, Dim] | None = None, **attributes: Any) -> list[Value]:
        """The outputs of a custom operator, which are outputs of the graph too.

        sizes: dimensions of outputs that no input and no attribute has.
        """
        signature = OPS[op].load().SIGNATURE
        attributes = {**self.attributes[op], **attributes}
        known: dict[str, Dim] = {**attributes, **(sizes or {})}
        for parameter, value in zip(signature.inputs, inputs, strict=True):
            known.update(zip(parameter.dims.split(), value.dims, strict=True))
        outputs = []
        for parameter in signature.outputs:
            dtype = inputs[0].dtype if parameter.dtype == "T" else parameter.dtype
            value = Value(f"value{len(self.values)}", dtype, tuple(known[dim] for dim in parameter.dims.split()))
            self.values.append(value)
            outputs.append(value)
        self.outputs += outputs
        names = [[x.name for x in values] for values in (inputs, outputs)]
        attributes[PLUGIN_NAMESPACE] = DOMAIN
        self.nodes.append(onnx.helper.make_node(op, *names, domain=DOMAIN, **attributes))
        return outputs

    def cast(self, x: Value, dtype: str) -> Value:
        to = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(NUMPY_TYPES[dtype]))
        return self.node("Cast", x, like=Value("", dtype, x.dims), to=to)

    def reshaped(self, x: Value, to: Sequence[int], dims: tuple[Dim, ...]) -> Value:
        """x with other dimensions. to: as Reshape takes them; 0 copies one, and −1 is computed."""
        return self.node("Reshape", x, self.constant(np.array(to), "int64"), like=Value("", x.dtype, dims))

    def size(self, size: int) -> str:
        """A name for a dimension of this size."""
        name = f"size{len(self.sizes)}"
        self.sizes[name] = size
        return name

    def width(self) -> int:
        """A number of channels."""
        return self.random.randint(1, 64)

    def values_of(self, x: Value) -> Value:
        """x with another number of channels."""
        return self.projected(x, self.width())

    def projected(self, x: Value, width: int) -> Value:
        """x [..., channels] with another number of channels."""
        weight = self.weight(x.dtype, int(x.dims[-1]), width)
        return self.node("MatMul", x, weight, like=Value("", x.dtype, (*x.dims[:-1], width)))

    def transposed(self, x: Value, *perm: int) -> Value:
        return self.node("Transpose", x, like=Value("", x.dtype, tuple(x.dims[i] for i in perm)), perm=perm)

    def with_heads(self, x: Value) -> Value:
        """Some heads of x [batch, seq, channels]: [batch, heads, seq, channels / heads]."""
        batch, seq, channels = x.dims
        count = self.random.choice([count for count in range(1, 7) if int(channels) % count == 0])
        each = int(channels) // count
        return self.transposed(self.reshaped(x, [0, 0, count, each], (batch, seq, count, each)), 0, 2, 1, 3)

    def without_heads(self, x: Value) -> Value:
        batch, heads, seq, each = x.dims
        channels = int(heads) * int(each)
        return self.reshaped(self.transposed(x, 0, 2, 1, 3), [0, 0, channels], (batch, seq, channels))

    def normalised(self, x: Value) -> Value:
        """LayerNormalization, in float32 as exporters have it."""
        ones = self.constant(np.ones(int(x.dims[-1])), "float32")
        return self.cast(self.node("LayerNormalization", self.cast(x, "float32"), ones), x.dtype)

    def model(self, dynamic: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        """The graph with its function bodies, and its inputs. dynamic: dimensions with names are not numbers."""

        def info(value: Value) -> onnx.ValueInfoProto:
            dims = value.dims if dynamic else self.shape(value.dims)
            return onnx.helper.make_tensor_value_info(
                value.name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(NUMPY_TYPES[value.dtype])), dims
            )

        between = [info(value) for value in self.values if value not in self.outputs]
        sides = [list(map(info, values)) for values in (self.inputs, self.outputs)]
        graph = onnx.helper.make_graph(self.nodes, "graph", *sides, self.constants, value_info=between)
        used = {node.op_type for node in self.nodes if node.domain == DOMAIN}
        bodies = [
            OPS[op].load().onnx_function_body([node for node in self.nodes if node.op_type == op], OPSET) for op in used
        ]
        opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, OPSET_VERSION)]
        model = onnx.helper.make_model(graph, opset_imports=opsets, functions=bodies, ir_version=10)
        return model, {value.name: array for value, array in self.inputs.items()}


def attributes_of(source: random.Random) -> dict[str, dict[str, Any]]:
    """As in a case of each contract; those that hash and attend have the same chunks."""
    drawn = {}
    for op in CUDA_OPS:
        contract = load_contract(CUDA_OPS[op])
        drawn[op] = contract.attributes(source.choice([*contract.small, *contract.cases]))
    factors = [2 * source.randint(1, 8) for _ in range(source.randint(1, 3))]
    drawn["LSHHash"] = {"bucket_factors": factors, "chunk_length": source.randint(1, 20)}
    drawn["LSHAttention"]["chunk_length"] = drawn["LSHHash"]["chunk_length"]
    drawn["LSHSort"] = {}  # its body serves any number of buckets
    return drawn


def iterative_pinv(g: RandomGraph, x: Value, keep: Value) -> Value:
    """x · Z, where Z inverts I + softmax(xᵀ x): matrices of channels. The identity keeps them well conditioned."""
    x = g.projected(x, g.width())
    batch, heads, _, m = x.dims
    square = Value("", x.dtype, (batch, heads, m, m))
    products = g.node("MatMul", g.transposed(x, 0, 1, 3, 2), x, like=square)
    scaled = g.node("Mul", products, g.constant(np.array(1 / g.sizes["seq"]), x.dtype))
    a = g.node("Add", g.node("Softmax", scaled), g.constant(np.eye(m), x.dtype))
    g.sizes["matrices"] = math.prod(g.shape((batch, heads)))
    matrices = g.reshaped(a, [-1, m, m], ("matrices", m, m))
    columns = g.node(
        "ReduceSum", matrices, g.constant(np.array([1]), "int64"), like=Value("", x.dtype, ("matrices", 1, m))
    )
    largest = g.node(
        "ReduceMax", columns, g.constant(np.array([2]), "int64"), like=Value("", x.dtype, ("matrices", 1, 1))
    )
    scale = g.node("Mul", largest, g.constant(np.array(2.0), x.dtype))  # to which each row adds up
    (inverse,) = g.custom("IterativePinv", matrices, scale)
    return g.node("MatMul", x, g.reshaped(inverse, [-1, heads, m, m], square.dims), like=x)


def lsh_sort(g: RandomGraph, x: Value, keep: Value) -> Value:
    """Sorts integers of its own; x is returned."""
    num_buckets = g.random.choice([1, 2, 65, 353, 1216, 1217, 3000])
    dims = (g.size(g.random.randint(1, 5)), g.size(g.random.randint(1, 600)))
    buckets = g.input(g.numbers.integers(num_buckets, size=g.shape(dims)), "int32", *dims)
    order, _ = g.custom("LSHSort", buckets, num_buckets=num_buckets)
    g.outputs.append(g.node("GatherElements", buckets, order, axis=1))
    return x


def order_and_rank(g: RandomGraph, x: Value, keep: Value) -> list[Value]:
    """The tokens sorted by buckets of vectors of integers, whose projections are exact: no bucket is a near-tie.

    Between input and hash, the vectors change their type and the order of their dimensions.
    """
    batch, heads, seq, _ = x.dims
    width, factors = g.width(), g.attributes["LSHHash"]["bucket_factors"]
    integers = g.numbers.integers(-15, 16, size=g.shape((batch, seq, heads, width)))
    vectors = g.transposed(g.cast(g.input(integers, "float32", batch, seq, heads, width), x.dtype), 0, 2, 1, 3)
    rounds, chunk_length = g.random.randint(1, 3), g.attributes["LSHHash"]["chunk_length"]
    rotations = g.constant(g.numbers.integers(-255, 256, size=(heads, width, rounds, sum(factors) // 2)), "float32")
    rows = g.size(math.prod(g.shape((batch, heads, rounds))))
    padded = g.size(-(-g.sizes[seq] // chunk_length) * chunk_length)
    (buckets,) = g.custom("LSHHash", vectors, rotations, keep, sizes={"rows": rows, "padded": padded})
    return g.custom("LSHSort", buckets, num_buckets=math.prod(factors) + 1)


def lsh_hash(g: RandomGraph, x: Value, keep: Value) -> Value:
    """Hashes and sorts vectors of its own; x is returned."""
    order_and_rank(g, x, keep)
    return x


def lsh_attention(g: RandomGraph, x: Value, keep: Value) -> Value:
    (out,) = g.custom("LSHAttention", g.projected(x, g.width()), g.values_of(x), *order_and_rank(g, x, keep), keep)
    return out


def aft_window_attention(g: RandomGraph, x: Value, keep: Value) -> Value:
    _, heads, seq, _ = x.dims
    channels, reach = g.width(), g.random.randint(0, 20)
    taps = reach + 1 if g.attributes["AFTWindowAttention"]["causal"] else 2 * reach + 1
    q, k, v = (g.projected(x, width) for width in (channels, g.random.choice([1, channels]), channels))
    positions = g.random.choice([1, g.sizes[seq] + g.random.randint(0, 9)])
    bias = g.constant(g.numbers.standard_normal((g.random.choice([1, heads]), positions, taps)), "float32")
    (out,) = g.custom("AFTWindowAttention", q, k, v, keep, bias)
    return out


def masked_attention(g: RandomGraph, x: Value, keep: Value) -> Value:
    """Of the tokens, or of another sequence."""
    memory, visible, width = x, keep, g.width()
    if g.random.random() < 0.5:
        other = g.size(g.random.randint(1, 300))
        memory = g.normal(x.dtype, x.dims[0], x.dims[1], other, g.width())
        visible = g.keep(x.dims[0], other)
    (out,) = g.custom(
        "MaskedAttention", g.projected(x, width), g.projected(memory, width), g.values_of(memory), visible
    )
    return out


def sequence_conv(g: RandomGraph, x: Value, keep: Value) -> Value:
    taps = 1 + 2 * g.random.randint(0, 30)
    weight = g.constant(g.numbers.standard_normal((x.dims[1], 1, taps, 1)) / taps**0.5, x.dtype)
    (out,) = g.custom("SequenceConv", x, weight, keep, g.projected(x, int(x.dims[3])))
    return out


def banded_attention(g: RandomGraph, x: Value, keep: Value) -> Value:
    """Global tokens have projections of their own; at most as many are global as the node says."""
    batch, heads, seq, _ = x.dims
    attributes = g.attributes["BandedAttention"]
    d, e = g.width(), g.width()
    projections = [g.projected(x, width) for width in (d, d, e, d, d, e)]
    is_global = np.zeros(g.shape((batch, seq)), bool)
    is_global[:, :: max(g.sizes["seq"] // 3, 1)] = attributes["most_globals"] == 0
    count = offsets(*(attributes[name] for name in ("left", "right", "block")))
    bias = g.constant(g.numbers.standard_normal((int(heads), count)), x.dtype)
    (out,) = g.custom("BandedAttention", *projections, keep, g.input(is_global, "bool", batch, seq), bias)
    return out


def linear_recurrence(g: RandomGraph, x: Value, keep: Value) -> Value:
    """Short keys, decays between -1 and 0 and a beta between 0 and 1; the mask is not read."""
    key_dim, value_dim = g.width(), g.width()
    tokens = g.transposed(x, 0, 2, 1, 3)
    batch, _, heads, _ = tokens.dims

    def sigmoid(width: int) -> Value:
        return g.node("Sigmoid", g.cast(g.projected(tokens, width), "float32"))

    decay = g.node("Neg", sigmoid(key_dim if g.attributes["LinearRecurrence"]["per_channel"] else 1))
    out, _ = g.custom(
        "LinearRecurrence",
        g.projected(tokens, key_dim),
        g.node("Softmax", g.projected(tokens, key_dim)),
        g.projected(tokens, value_dim),
        g.normal("float32", batch, heads, key_dim, value_dim),
        g.cast(decay, x.dtype),
        g.cast(sigmoid(1), x.dtype),
    )
    return g.transposed(out, 0, 2, 1, 3)


def causal_conv(g: RandomGraph, x: Value, keep: Value) -> Value:
    """Over the channels of all heads."""
    batch, heads, seq, width = x.dims
    rows, taps = g.without_heads(x), g.random.randint(2, 6)
    channels = int(rows.dims[2])
    weight = g.constant(g.numbers.standard_normal((channels, taps)) / taps**0.5, x.dtype)
    bias = g.constant(g.numbers.standard_normal(channels), x.dtype)
    y, _ = g.custom("CausalConv", rows, weight, bias, g.normal(x.dtype, batch, taps - 1, channels), keep)
    return g.transposed(g.reshaped(y, [0, 0, int(heads), int(width)], (batch, seq, heads, width)), 0, 2, 1, 3)


def by_signature(op: str, g: RandomGraph, x: Value, keep: Value) -> Value:
    """Each input is the mask, or a projection of x, with a number of channels for each name. x is returned if the
    operator returns something of another shape."""
    signature = OPS[op].load().SIGNATURE
    widths: dict[str, int] = {}

    def given(parameter: Parameter) -> Value:
        dims = parameter.dims.split()
        if parameter.name == "keep":
            return keep
        assert dims[:3] == ["batch", "heads", "seq"], f"{op} needs a row in STEPS"
        return g.projected(x, widths.setdefault(dims[3], g.width()))

    (out,) = g.custom(op, *map(given, signature.inputs))
    return out if out.dims[:3] == x.dims[:3] else x


# What makes x [batch, heads, seq, channels] of such a tensor, with nodes of an operator and with others: for operators
# that take more than projections of it and a mask.
STEPS: dict[str, Callable[[RandomGraph, Value, Value], Value]] = {
    "IterativePinv": iterative_pinv,
    "LSHSort": lsh_sort,
    "LSHAttention": lsh_attention,
    "MaskedAttention": masked_attention,
    "SequenceConv": sequence_conv,
    "LSHHash": lsh_hash,
    "AFTWindowAttention": aft_window_attention,
    "BandedAttention": banded_attention,
    "LinearRecurrence": linear_recurrence,
    "CausalConv": causal_conv,
}


def step_of(op: str) -> Callable[[RandomGraph, Value, Value], Value]:
    return STEPS.get(op) or functools.partial(by_signature, op)


LARGEST_SEQ = 200


def random_graph(seed: int) -> RandomGraph:
    """A chain of two to five steps, of one to three operators, each with a residual connection and a normalisation.

    Operator number `seed` is among them. Heads, channels and the element type change between steps.
    """
    source = random.Random(seed)
    sizes = {"batch": source.randint(1, 2), "seq": source.randint(1, LARGEST_SEQ)}
    g = RandomGraph(source, np.random.default_rng(seed), sizes, attributes_of(source))
    names = list(CUDA_OPS)
    first = names[seed % len(names)]
    choices = [first, *source.sample(names, source.randint(0, 2))]
    steps = [first, *source.choices(choices, k=source.randint(1, 4))]
    types = ["float32"] if source.random() < 0.5 else source.sample(FLOAT_TYPES, source.randint(1, 3))
    x, keep = g.normal(types[0], "batch", "seq", source.randint(8, 128)), g.keep("batch", "seq")
    for step in steps:
        x = g.cast(x, source.choice(types))
        heads = g.with_heads(x)
        added = g.projected(step_of(step)(g, heads, keep), int(heads.dims[3]))
        x = g.normalised(g.node("Add", x, g.without_heads(added)))
        g.outputs.append(x)
    return g
