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


def undeclared_products(path: Path, record: Quantization) -> tuple[list[str], int]:
    """Products of a written file that are neither quantised where the record says so, nor declared to stay float; and
    how many products there are. A file whose nodes have lost their modules has no products that can be told apart."""
    model = load_graph(path)
    makers = {name: node for node in model.graph.node for name in node.output}
    # by layer: where functions are inlined, the products of a body stand for its operator
    declared = {product.layer for product in record.products}
    quantized = {layer.layer for layer in record.layers}
    wrong, count = [], 0
    for node in model.graph.node:
        owner = next((entry.value for entry in node.metadata_props if entry.key == MODULE_KEY), "")
        kind = "quantised" if is_quantized(node, makers) else "float"
        if node.domain != DOMAIN and node.op_type not in (*PRODUCTS, "MatMulInteger"):
            continue
        count += 1
        if kind == "quantised" and owner not in quantized:
            wrong.append(f"{node.op_type} of {owner or 'the model'} is quantised and should be float")
        elif kind == "float" and owner in quantized:
            wrong.append(f"{node.op_type} of {owner} is float and should be quantised")
        elif kind == "float" and owner not in declared:
            wrong.append(f"{node.op_type} of {owner or 'the model'} is float, and nothing declares it so")
    tables = {table.layer for table in record.embeddings}
    wrong += [
        f"the table of {owner} is quantised and should be float"
        for owner, node in integer_tables(model)
        if owner not in tables
    ]
    return wrong, count


def is_quantized(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto]) -> bool:
    if node.op_type == "MatMulInteger":
        return True
    return node.op_type == "MatMul" and all(
        name in makers and makers[name].op_type == "DequantizeLinear" for name in node.input[:2]
    )


def integer_tables(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.NodeProto]]:
    """Nodes that look up rows of int8, and the paths of their modules."""
    import onnx

    int8 = {tensor.name for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.INT8}
    dequantized = {
        node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in int8
    }
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] in int8 | dequantized:
            yield next((entry.value for entry in node.metadata_props if entry.key == MODULE_KEY), ""), node
