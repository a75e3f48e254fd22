"""Writes quantised products into a graph: bfloat16, int8 with a scale for each token, or Q/DQ pairs with static scales.

The first two are operators of ours, which also compute what follows a product. ONNX Runtime's own quantiser has one
scale for all tokens of a batch, so that a token's result would depend on the others. Q/DQ pairs are what TensorRT
reads: symmetric, with a zero point of 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from effexport.base.dtypes import Array, numpy_dtype
from effexport.base.errors import StageError
from effexport.plugins.activations import ACTIVATIONS
from effexport.plugins.building.library import known_ops
from effexport.plugins.ops import DOMAIN, MODULE_KEY, OPSET_VERSION, PLUGIN_NAMESPACE, Op
from effexport.plugins.packed_linear import OP as PACKED_LINEAR
from effexport.plugins.quantized_linear import OP as QUANTIZED_LINEAR
from effexport.quantize.record import PRODUCTS, FloatProduct, Quantization, rounded_name, unrounded_name
from effexport.quantize.rounding import LARGEST_CODE, codes_of

STAGE = "quantization"


def quantize_graph(model: ir.Model, record: Quantization, paths: Mapping[ir.Node, str]) -> tuple[str, ...]:
    """Replace the products of the record's layers by quantised ones, and tables of its embeddings by int8 tables.

    paths: of the module of each node. Names and types of all outputs stay. Returns the values that are rounded, in the
    order of the graph. Raises StageError if a layer of the record has no product with constant weights in the graph.
    """
    rewrite = QuantizedRewrite(model, record)
    tables = {table.layer for table in record.embeddings}
    calls: Counter[str] = Counter()
    for node in list(model.graph):
        path = paths.get(node, "")
        if node.op_type in ("MatMul", "Gemm") and node.domain == "" and (layer := record.layer(path)) is not None:
            if constant_of(node.inputs[1]) is None:
                continue
            name = unrounded_name(path, calls[path])
            result = rounded_name(path, calls[path]) if layer.rounds_output else ""
            calls[path] += 1
            rewrite.product(node, name, layer.input_scale, result)
        elif node.op_type == "Gather" and path in tables and constant_of(node.inputs[0]) is not None:
            rewrite.table(node)
            calls[path] += 1
    missing = [layer.layer for layer in (*record.layers, *record.embeddings) if not calls[layer.layer]]
    if missing:
        remedy = " ".join(f"--keep-float {path}" for path in missing)
        raise StageError(
            STAGE,
            f"the graph has no product with constant weights of {' and of '.join(missing)}; build with {remedy}",
        )
    RemoveUnusedNodesPass()(model)
    return tuple(rewrite.unrounded)


def constant_of(value: ir.Value | None) -> Array | None:
    """The numbers of a float32 matrix that is an initializer, or the transpose of one, as torch.onnx leaves it where
    large weights are read more than once; None for anything else."""
    if value is not None and (node := value.producer()) is not None and node.op_type == "Transpose":
        given = constant_of(node.inputs[0])
        return None if given is None or node.attributes.get_ints("perm", (1, 0)) != (1, 0) else given.T
    if value is None or value.const_value is None or value.producer() is not None:
        return None
    if len(value.const_value.shape) != 2 or value.const_value.dtype.name != "FLOAT":
        return None
    return value.const_value.numpy()


class QuantizedRewrite:
    """Writes quantised products into one graph, each rounded input and each constant once."""

    def __init__(self, model: ir.Model, record: Quantization) -> None:
        self.graph = model.graph
        self.record = record
        self.unrounded: list[str] = []
        # by the input and its static scale: two layers may read one input, and one of them others, too
        self._inputs: dict[tuple[ir.Value, float | None], ir.Value] = {}
        self._constants: dict[str, ir.Value] = {}
        self._before: ir.Node | None = None
        self._metadata: dict[str, str] = {}

    def product(self, node: ir.Node, name: str, scale: float | None, result: str) -> None:
        """Replace one MatMul or Gemm. name: of its input before it is rounded. result: of its rounded result, or ""."""
        self._before, self._metadata = node, dict(node.metadata_props)
        weight, x = constant_of(node.inputs[1]), node.inputs[0]
        assert weight is not None
        assert x is not None
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if node.op_type == "Gemm":
            weight = self.plain_weight(node, weight)
        own = node.inputs[1].name  # type: ignore[union-attr]
        dims = node.outputs[0].shape
        if scale is None:
            self.operator_product(node, x, weight, f"{own}", name, bias, result)
            return
        product = self.static_product(x, weight, f"{own}", name, scale, dims)
        if bias is not None:
            product = self.add("Add", [product, bias], dims)
        self.replace(node, product)

    def plain_weight(self, gemm: ir.Node, weight: Array) -> Array:
        """The weight of a Gemm as that of a MatMul, [in, out]."""
        options = {name: attribute.value for name, attribute in gemm.attributes.items()}
        if options.get("alpha", 1.0) != 1.0 or options.get("beta", 1.0) != 1.0 or options.get("transA", 0):
            raise StageError(STAGE, f"{gemm.name} scales or transposes; expected a plain linear layer")
        return weight.T if options.get("transB", 0) else weight

    def operator_product(
        self, node: ir.Node, x: ir.Value, weight: Array, own: str, name: str, bias: ir.Value | None, result: str
    ) -> None:
        """Replace a product, and what follows it as far as the operator computes that, by one PackedLinear or
        QuantizedLinear."""
        if bias is not None and not is_vector(bias, weight.shape[1]):
            bias = self.vector(bias, weight.shape[1])
        tail = Tail(node, bias, weight.shape[1], ends_at_bias=bool(result))
        self._before = tail.last
        if (x, None) not in self._inputs:
            self._before = node  # another layer that reads it may come before the end of this one's tail
            self._inputs[x, None] = self.named(x, name)
            self._before = tail.last
        given, dims = self._inputs[x, None], tail.last.outputs[0].shape
        nothing = np.full(weight.shape[1], -0.0, np.float32)  # what may be added to −0
        op, factor = self.stored_weight(weight, own)
        inputs = [
            self.as_tokens(given, weight.shape[0]),
            *factor,
            tail.bias or self.constant(f"effexport.no_bias.{len(nothing)}", nothing),
            tail.residual or self.constant(f"effexport.no_residual.{len(nothing)}", nothing[None, None]),
        ]
        whole = dims if dims is not None and len(dims) == 3 else None
        # each attribute, also 0: a shared body reads it of each node
        options = {"activation": tail.activation, "round_output": int(bool(result)), PLUGIN_NAMESPACE: DOMAIN}
        product = self.add(op.onnx_name, inputs, whole, attributes=options, domain=DOMAIN)
        product.producer().name = node.name  # type: ignore[union-attr]
        self.graph.opset_imports.setdefault(DOMAIN, OPSET_VERSION)
        product = self.from_tokens(product, given, dims, weight.shape[1])
        if result:  # what replaces a node gets its name
            product = self.add("Identity", [self.named(product, result)], dims)
        self.replace_all([node, *tail.nodes], product)

    def vector(self, bias: ir.Value, width: int) -> ir.Value:
        """The bias of a Gemm with one number for each column. Raises StageError for one that has other axes, too."""
        numbers = None if bias.const_value is None else bias.const_value.numpy()
        if numbers is None or numbers.size not in (1, width) or numbers.shape[-1:] not in ((), (1,), (width,)):
            raise StageError(
                STAGE,
                f"{bias.name} is added to a product of {width} columns and is not a bias of as many numbers; leave the "
                "layer float with --keep-float",
            )
        whole = np.broadcast_to(numbers.reshape(-1), (width,)).astype(np.float32)
        return self.constant(f"{bias.name}.of_columns", np.ascontiguousarray(whole))

    def stored_weight(self, weight: Array, own: str) -> tuple[Op, list[ir.Value]]:
        """The operator of a product, and what it takes for a weight."""
        if self.record.precision == "bf16":
            return PACKED_LINEAR, [self.constant(f"{own}.bf16", weight.astype(numpy_dtype("bfloat16")))]
        scale = weight_scales(weight, "int8")
        codes = self.constant(f"{own}.int8", codes_of(weight, "int8", scale))
        return QUANTIZED_LINEAR, [codes, self.constant(f"{own}.scale", scale)]

    def as_tokens(self, x: ir.Value, width: int) -> ir.Value:
        """x with the three axes that the operators take."""
        if x.shape is not None and len(x.shape) == 3:
            return x
        one_sample = self.constant(f"effexport.one_sample.{width}", np.array([1, -1, width], np.int64))
        return self.add("Reshape", [x, one_sample], None)

    def from_tokens(self, y: ir.Value, x: ir.Value, dims: Any, width: int) -> ir.Value:
        """y with the axes of x, all but the last one."""
        if x.shape is not None and len(x.shape) == 3:
            return y
        shape = self.add("Shape", [x], None, ir.DataType.INT64, {"start": 0, "end": -1})
        last = self.constant(f"effexport.width.{width}", np.array([width], np.int64))
        whole = self.add("Concat", [shape, last], None, ir.DataType.INT64, {"axis": 0})
        return self.add("Reshape", [y, whole], dims, attributes={"allowzero": 1})

    def static_product(self, x: ir.Value, weight: Array, own: str, name: str, scale: float, dims: Any) -> ir.Value:
        precision = self.record.precision
        weight_scale = weight_scales(weight, precision)
        stored = self.constant(f"{own}.{precision}", stored_codes(weight, precision, weight_scale))
        zeros = self.constant(f"{own}.zeros", stored_codes(np.zeros_like(weight_scale), precision, 1.0))
        scales = self.constant(f"{own}.scale", weight_scale)
        factor = self.add("DequantizeLinear", [stored, scales, zeros], list(weight.shape), attributes={"axis": 1})
        if (x, scale) not in self._inputs:
            if precision == "fp8":
                x = self.with_plain_bounds(x)
            before = self.named(x, name)
            step = self.constant(f"{name}.scale", np.array(scale, dtype=np.float32))
            zero = self.constant("zero_point", stored_codes(np.zeros((), np.float32), precision, 1.0))
            codes = self.add("QuantizeLinear", [before, step, zero], x.shape, zero.dtype)
            self._inputs[x, scale] = self.add("DequantizeLinear", [codes, step, zero], x.shape)
        return self.add("MatMul", [self._inputs[x, scale], factor], dims)

    def with_plain_bounds(self, x: ir.Value) -> ir.Value:
        """x, made by Max and Min if it was made by Relu or Clip: before a QuantizeLinear to float8, onnxruntime removes
        a Relu as if the codes had no sign, and refuses a Clip (1.31)."""
        maker = x.producer()
        if maker is None or maker.op_type not in ("Relu", "Clip"):
            return x
        zero = [self.constant("zero", np.array(0, dtype=np.float32))]
        bounds: list[Any] = zero if maker.op_type == "Relu" else list(maker.inputs[1:])
        made = maker.inputs[0]
        nodes = []
        for op, bound in zip(("Max", "Min"), bounds, strict=False):
            if bound is not None:
                node = ir.node(op, [made, bound], name=f"{maker.name}/{op}")
                node.metadata_props.update(maker.metadata_props)
                made = node.outputs[0]
                made.type, made.shape = x.type, x.shape
                nodes.append(node)
        if not nodes or made is None:
            return x
        ir.convenience.replace_nodes_and_values(self.graph, maker, [maker], nodes, maker.outputs, [made])
        return made

    def table(self, node: ir.Node) -> None:
        """Replace the table of an embedding by int8 rows, which are scaled after they are looked up."""
        self._before, self._metadata = node, dict(node.metadata_props)
        weight = constant_of(node.inputs[0])
        assert weight is not None
        own, indices, dims = node.inputs[0].name, node.inputs[1], node.outputs[0].shape  # type: ignore[union-attr]
        scale = weight_scales(weight.T, "int8")[:, None]
        stored = self.constant(f"{own}.int8", codes_of(weight, "int8", scale))
        row = None if dims is None else ir.Shape([*dims[:-1], 1])
        codes = self.add("Gather", [stored, indices], dims, ir.DataType.INT8)
        number = self.add("Cast", [codes], dims, attributes={"to": int(ir.DataType.FLOAT)})
        scales = self.add("Gather", [self.constant(f"{own}.scale", scale), indices], row)
        self.replace(node, self.add("Mul", [number, scales], dims))

    def named(self, x: ir.Value, name: str) -> ir.Value:
        """x under a name of its own, at which the proof can prescribe and read it."""
        value = self.add("Identity", [x], x.shape)
        value.name = name
        self.unrounded.append(name)
        return value

    def add(
        self,
        op: str,
        inputs: list[Any],
        shape: Any,
        dtype: Any = None,
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> ir.Value:
        """A node before the product that is being replaced; its output, float32 unless dtype says otherwise."""
        node = ir.node(op, inputs, attributes or {}, domain=domain)
        node.metadata_props.update(self._metadata)
        value = node.outputs[0]
        value.type = ir.TensorType(ir.DataType.FLOAT if dtype is None else dtype)
        value.shape = shape if shape is None or isinstance(shape, ir.Shape) else ir.Shape(shape)
        assert self._before is not None
        self.graph.insert_before(self._before, node)
        return value

    def constant(self, name: str, numbers: Array) -> ir.Value:
        """An initializer, written once, under a name that a graph of a user does not have."""
        name = name if "." in name else f"effexport.{name}"
        if name not in self._constants:
            tensor = ir.tensor(numbers, name=name)
            value = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(numbers.shape), const_value=tensor
            )
            self.graph.register_initializer(value)
            self._constants[name] = value
        return self._constants[name]

    def replace(self, node: ir.Node, product: ir.Value) -> None:
        last = product.producer()
        assert last is not None
        last.name = node.name
        self.replace_all([node], product)

    def replace_all(self, nodes: Sequence[ir.Node], product: ir.Value) -> None:
        """Replace a node and those that follow it by what `product` comes from."""
        last = nodes[-1]
        ir.convenience.replace_nodes_and_values(self.graph, last, list(nodes), [], last.outputs, [product])


class Tail:
    """The nodes after a product that the operators compute as well: bias, activation and residual, in this order.

    nodes: those after the product, in order. last: the last of them, or the product. bias, residual: None without them.
    activation: an index into ACTIVATIONS. ends_at_bias: the rest is left to the graph.
    """

    def __init__(self, product: ir.Node, bias: ir.Value | None, width: int, ends_at_bias: bool = False) -> None:
        self.bias, self.residual, self.activation = bias, None, 0
        self.nodes: list[ir.Node] = []
        self.last = product
        added = self.only_reader("Add")
        if bias is None and added is not None and is_vector(other := self.other_input(added), width):
            self.bias = other
            self.take(added)
        if ends_at_bias:
            return
        self.take_activation()
        added, made = self.only_reader("Add"), self.last.outputs[0]
        if added is None or made.shape is None or len(made.shape) != 3:
            return
        other = self.other_input(added)
        if other is not None and other.const_value is None and same_known_shape(other.shape, made.shape):
            self.residual = other
            self.take(added)

    def take(self, node: ir.Node) -> None:
        self.nodes.append(node)
        self.last = node

    def take_activation(self) -> None:
        if (node := self.only_reader("Gelu")) is not None:
            kind = node.attributes.get("approximate")
            self.activation = ACTIVATIONS.index("gelu_tanh" if kind is not None and kind.value == "tanh" else "gelu")
            self.take(node)
        elif (node := self.only_reader("Relu")) is not None:
            self.activation = ACTIVATIONS.index("relu")
            self.take(node)
        elif nodes := self.silu():
            self.activation = ACTIVATIONS.index("silu")
            self.nodes += nodes
            self.last = nodes[-1]

    def silu(self) -> list[ir.Node]:
        """The nodes of x · sigmoid (x), where x is what was made so far."""
        made = self.last.outputs[0]
        readers = sorted((use.node for use in made.uses()), key=lambda node: node.op_type)
        if made.is_graph_output() or [node.op_type for node in readers] != ["Mul", "Sigmoid"]:
            return []
        product, share = readers
        is_whole = len(share.outputs[0].uses()) == 1 and set(product.inputs) == {made, share.outputs[0]}
        return [share, product] if is_whole and not share.outputs[0].is_graph_output() else []

    def only_reader(self, op: str) -> ir.Node | None:
        """The node of a type that alone reads what was made so far."""
        made = self.last.outputs[0]
        readers = [use.node for use in made.uses()]
        fits = len(readers) == 1 and (readers[0].domain, readers[0].op_type) == ("", op)
        fits = fits and readers[0].graph is self.last.graph  # not in a branch
        return readers[0] if fits and not made.is_graph_output() else None

    def other_input(self, node: ir.Node) -> ir.Value | None:
        return next((x for x in node.inputs if x is not self.last.outputs[0]), None)


def same_known_shape(one: ir.Shape | None, other: ir.Shape) -> bool:
    """True for equal sizes, all of which are known or have names."""
    if one is None or len(one) != len(other) or any(dim in (None, ir.SymbolicDim(None)) for dim in one):
        return False
    return all(a == b for a, b in zip(one, other, strict=True))


def is_vector(value: ir.Value | None, width: int) -> bool:
    """True for an initializer of so many float32 numbers, without other axes."""
    tensor = None if value is None else value.const_value
    return tensor is not None and tuple(tensor.shape) == (width,) and tensor.dtype == ir.DataType.FLOAT


def weight_scales(weight: Array, precision: str) -> Array:
    """One scale for each column of a weight [in, out], float32 [out]."""
    scales = np.abs(weight).max(axis=0) / np.float32(LARGEST_CODE[precision])
    found: Array = np.where(scales < np.finfo(np.float32).tiny, 1, scales).astype(np.float32)
    return found


def stored_codes(x: Array, precision: str, scale: Array | float) -> Array:
    """Codes with the element type that the file has."""
    codes = codes_of(x, precision, scale)
    if precision == "int8":
        return codes
    import ml_dtypes

    return codes.view(ml_dtypes.float8_e4m3fn)


def float_products(model: ir.Model, reason_of: Callable[[str], str]) -> tuple[FloatProduct, ...]:
    """Every product of a finished graph that is not quantised, with the reason that its operator or layer declares.

    reason_of: for the path of a module, why its own products stay float.
    """
    ops = known_ops()
    found: dict[FloatProduct, None] = {}
    for node in model.graph:
        path = node.metadata_props.get(MODULE_KEY, "")
        if node.domain == DOMAIN and ops[node.op_type].linear:
            continue
        if node.domain == DOMAIN:
            product = FloatProduct(layer=path, operator=node.op_type, reason=ops[node.op_type].in_float)
        elif node.domain == "" and node.op_type in PRODUCTS and not reads_codes(node):
            product = FloatProduct(layer=path, operator=node.op_type, reason=reason_of(path))
        else:
            continue
        found[product] = None
    return tuple(found)


def reads_codes(node: ir.Node) -> bool:
    """True if both factors of a product come from codes, or from bfloat16 by a cast, as in the body of PackedLinear."""

    def is_rounded(x: ir.Value | None) -> bool:
        maker = None if x is None else x.producer()
        if maker is None:
            return False
        given = maker.inputs[0]
        return maker.op_type == "DequantizeLinear" or (
            maker.op_type == "Cast" and given is not None and given.dtype == ir.DataType.BFLOAT16
        )

    return all(map(is_rounded, node.inputs[:2]))
