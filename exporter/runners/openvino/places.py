"""Keeps places of tokens exact where a runtime computes in bfloat16, which has every integer only up to 256."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from effexport.base.errors import UserError
from effexport.export.onnx_graph import value_types
from effexport.plugins.function_body import LARGEST_FILL

if TYPE_CHECKING:
    import onnx

# ONNX has them for integers too, and they make integers of integers.
EXACT = (
    *("Add", "Cast", "Concat", "Expand", "Gather", "Identity", "MatMul", "Mul", "Pad", "ReduceSum", "Reshape"),
    *("Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"),
)
# Behind the last of these, OpenVINO computes in float32 whatever an output is made of.
ROUNDED = ("Attention", "Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN", "Resize")
PERIODIC = ("Cos", "Sin")
FLOATS = ("float64", "float32", "float16", "bfloat16")
INDICES = ("int32", "int64")


def keep_places(model: onnx.ModelProto) -> None:
    """Let indices, sizes and angles of positions be computed without bfloat16. The model has no functions.

    Function bodies count tokens in float32, by sums and by products with triangles of ones. These become sums and
    products of int32, which OpenVINO does not round. Other numbers that become indices, and sines and cosines of
    positions, become outputs that nobody reads.
    Raises UserError for an index, and for an angle of positions, that is made of products in bfloat16.
    """
    Places(model).keep()


class Places:
    """The graph of a model, and the values of int32 that stand for floating-point ones."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph, self.types = model.graph, value_types(model)
        self.producers = {output: node for node in self.graph.node for output in node.output}
        self.constants = {tensor.name: tensor for tensor in self.graph.initializer}
        nodes = (node for node in self.graph.node if node.op_type == "Constant")
        self.constants |= {node.output[0]: node.attribute[0].t for node in nodes if node.attribute[0].name == "value"}
        # by the value that they stand for: a name, "" if there is none, and the node that computes it
        self.integers: dict[str, str] = {}
        self.nodes: dict[str, onnx.NodeProto] = {}

    def keep(self) -> None:
        for node in self.graph.node:
            if node.op_type == "Cast" and self.is_float(node.input[0]) and self.dtype(node.output[0]) in INDICES:
                if integer := self.integer(node.input[0]):
                    node.input[0] = integer
                else:
                    self.compute_in_float32(node)
            elif node.op_type in PERIODIC and self.is_of_positions(node):
                self.compute_in_float32(node)
        ordered = [each for node in self.graph.node for each in (node, self.nodes.get(node.output[0])) if each]
        del self.graph.node[:]
        self.graph.node.extend(ordered)

    def dtype(self, name: str) -> str:
        return self.types[name][0] if name in self.types else ""

    def is_float(self, name: str) -> bool:
        return self.dtype(name) in FLOATS

    def integer(self, name: str) -> str:
        """The value of int32 that equals a floating-point one; "" if there is none."""
        if name not in self.integers:
            new = f"{name}__int32"
            made = self.made_constant(name, new) if name in self.constants else self.made_node(name, new)
            self.integers[name] = new if made else ""
        return self.integers[name]

    def made_constant(self, name: str, new: str) -> bool:
        import onnx

        if self.constants[name].data_location == onnx.TensorProto.EXTERNAL:
            return False
        values = onnx.numpy_helper.to_array(self.constants[name])
        if not (np.abs(values) <= LARGEST_FILL).all() or (values % 1).any():
            return False
        self.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.int32), new))
        return True

    def made_node(self, name: str, new: str) -> bool:
        import onnx

        node = self.producers.get(name)
        if node is None or node.op_type not in EXACT:
            return False
        inputs = [self.integer(given) if self.is_float(given) else given for given in node.input]
        if any(given and not integer for given, integer in zip(node.input, inputs, strict=True)):
            return False
        made = onnx.NodeProto()
        made.CopyFrom(node)
        made.name, made.input[:], made.output[:] = new, inputs, [new]
        for attribute in made.attribute:
            if attribute.name == "to":
                attribute.i = onnx.TensorProto.INT32
        self.nodes[name] = made
        return True

    def compute_in_float32(self, node: onnx.NodeProto) -> None:
        """Make the result an output. Raises UserError if that is not enough."""
        import onnx

        for above in self.floats_above(node):
            if above.op_type == "MatMul" and self.is_outer(above):
                above.op_type = "Mul"  # the same product
            if above.op_type in ROUNDED:
                raise UserError(
                    f"--precision-hint bf16 does not apply to this model: {node.name or node.output[0]} computes an "
                    f"index or an angle of numbers that {above.name or above.op_type} rounds to bfloat16; leave it out"
                )
        name = node.output[0]
        if name not in [output.name for output in self.graph.output]:
            dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype(name)))
            self.graph.output.append(onnx.helper.make_tensor_value_info(name, dtype, None))

    def is_outer(self, product: onnx.NodeProto) -> bool:
        left, right = (self.types[name][1] if name in self.types else () for name in product.input)
        return len(left) > 1 and len(right) > 1 and (left[-1] == 1 or right[-2] == 1)

    def is_of_positions(self, node: onnx.NodeProto) -> bool:
        """True for numbers that depend on places in ranges of integers, and on no input and no embedding."""
        above = list(self.floats_above(node))
        inputs = {name for each in above for name in each.input if self.is_float(name)}
        made_of_others = inputs.intersection(tensor.name for tensor in self.graph.input)
        made_of_places = any(
            each.op_type == "Range" or (each.op_type == "Cast" and not self.is_float(each.input[0])) for each in above
        )
        return made_of_places and not made_of_others and all(each.op_type != "Gather" for each in above)

    def floats_above(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """The nodes that compute the floating-point numbers of which a node is made."""
        waiting, seen = list(node.input), set[str]()
        while waiting:
            name = waiting.pop()
            if name in self.producers and name not in seen and self.is_float(name):
                seen.add(name)
                yield self.producers[name]
                waiting += self.producers[name].input
