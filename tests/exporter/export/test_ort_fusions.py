"""Fusions of ONNX Runtime's optimizer around an encoder's attention: one kernel per normalisation and activation.

The fusions of level 2 look for the same nodes on the CPU and on CUDA, and here the CPU provider stands in. It has no
float16 Gelu, which it takes apart, so in half precision the test looks for the nodes that the fusions start from; the
CUDA provider has that kernel. Before opset 20, which has Gelu, the graph has a formula, in the form that ONNX Runtime
fuses (exporter/export/torch_onnx.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto
from slow_cases import soak
from small_builds import exported
from small_specs import spec_of

from effexport.artifact import Artifact
from effexport.export.onnx_graph import all_nodes

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]
# What an activation would be taken apart into; no attention variant has them.
PARTS = ("Erf", "Tanh")
FUSED = ("LayerNormalization", "SkipLayerNormalization", "Gelu", "BiasGelu", "FastGelu")


def optimized(model: Path, folder: Path) -> Counter[str]:
    """Counts of operators in ONNX Runtime's optimized graph, without the kernels of the fused operators."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


def fused_nodes(counts: Counter[str]) -> dict[str, int]:
    assert not any(counts[part] for part in PARTS), counts
    return {name: counts[name] for name in FUSED if counts[name]}


def test_an_encoder_has_one_kernel_per_normalisation_and_activation(built: Built, variant: str, tmp_path: Path) -> None:
    # of the sums before its three normalisations, ONNX Runtime fuses the one that nothing else reads
    expected = {"LayerNormalization": 2, "SkipLayerNormalization": 1, "BiasGelu": 1}
    assert fused_nodes(optimized(built(variant).model_path, tmp_path)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"block": "post-norm"}, {"SkipLayerNormalization": 2, "BiasGelu": 1}),
        ({"block": "reversible"}, {"LayerNormalization": 3, "BiasGelu": 1}),
        ({"activation": "gelu_new"}, {"LayerNormalization": 2, "SkipLayerNormalization": 1, "FastGelu": 1}),
        (
            {"opset": 18, "activation": "gelu_new"},
            {"LayerNormalization": 2, "SkipLayerNormalization": 1, "FastGelu": 1},
        ),
        *map(
            soak,
            [
                ({"opset": opset}, {"LayerNormalization": 2, "SkipLayerNormalization": 1, "BiasGelu": 1})
                for opset in (18, 19, 24)
            ],
        ),
    ],
    ids=str,
)
def test_so_has_every_kind_of_encoder(fields: dict[str, Any], expected: dict[str, int], tmp_path: Path) -> None:
    assert fused_nodes(optimized(exported(spec_of("softmax", **fields)), tmp_path)) == expected


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_half_types_export_a_gelu_after_its_bias_and_whole_normalisations_in_float32(precision: str) -> None:
    """A float32 normalisation between casts is not fused with the sum before it. That is meant: the fused kernel of
    CUDA adds up squares in the type of its inputs, where they overflow or cancel."""
    spec = spec_of("softmax", precision=precision)
    model = onnx.shape_inference.infer_shapes(onnx.load(exported(spec)))
    nodes = list(all_nodes(model))
    producers = {output: node for node in nodes for output in node.output}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    types |= {name: tensor.data_type for name, tensor in constants.items()}

    (gelu,) = (node for node in nodes if node.op_type == "Gelu")
    add = producers[gelu.input[0]]
    assert add.op_type == "Add"
    assert [constants[name].dims for name in add.input if name in constants] == [[spec.model.ff_size]]
    expected = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[precision]
    assert types[gelu.output[0]] == expected

    norms = [node for node in nodes if node.op_type == "LayerNormalization"]
    assert len(norms) == 3
    assert {types[norm.output[0]] for norm in norms} == {TensorProto.FLOAT}
