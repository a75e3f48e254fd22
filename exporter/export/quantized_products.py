"""Checks a written file: every product is quantised where the record says so, or declared to stay float."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.export.onnx_graph import load_graph
from effexport.export.quantized_graph import MODULE_KEY, PRODUCTS
from effexport.plugins.ops import DOMAIN
from effexport.quantize.record import Quantization

if TYPE_CHECKING:
    import onnx


def undeclared_products(path: Path, record: Quantization) -> list[str] | None:
    """Products of a written file that are neither quantised where the record says so, nor declared to stay float; None
    if no product says any more which module it came from."""
    model = load_graph(path)
    products = [
        node for node in model.graph.node if node.domain == DOMAIN or node.op_type in (*PRODUCTS, "MatMulInteger")
    ]
    if products and not any(map(module_of_node, products)):
        return None
    makers = {name: node for node in model.graph.node for name in node.output}
    # by layer: where functions are inlined, the products of a body stand for its operator
    declared = {product.layer for product in record.products}
    quantized = {layer.layer for layer in record.layers}
    wrong = []
    for node in products:
        owner = module_of_node(node)
        kind = "quantised" if is_quantized(node, makers) else "float"
        if kind == "quantised" and owner not in quantized:
            wrong.append(f"{node.op_type} of {owner or 'the model'} is quantised and should be float")
        elif kind == "float" and owner in quantized:
            wrong.append(f"{node.op_type} of {owner} is float and should be quantised")
        elif kind == "float" and owner not in declared:
            wrong.append(f"{node.op_type} of {owner or 'the model'} is float, and nothing declares it so")
    tables = {table.layer for table in record.embeddings}
    wrong += [
        f"the table of {owner} is quantised and should be float"
        for owner in map(module_of_node, integer_tables(model))
        if owner not in tables
    ]
    return wrong


def is_quantized(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto]) -> bool:
    if node.op_type == "MatMulInteger":
        return True
    return node.op_type == "MatMul" and all(
        name in makers and makers[name].op_type == "DequantizeLinear" for name in node.input[:2]
    )


def integer_tables(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Nodes that look up rows of int8."""
    import onnx

    int8 = {tensor.name for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.INT8}
    dequantized = {
        node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in int8
    }
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] in int8 | dequantized:
            yield node


def module_of_node(node: onnx.NodeProto) -> str:
    """The path of the module that a node came from; "" for the root, and where the file does not say."""
    return next((entry.value for entry in node.metadata_props if entry.key == MODULE_KEY), "")
