"""The written graph against onnxruntime's own quantiser, and the formulas of the ONNX specification."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from small_builds import built_artifact, calibrated_artifact
from small_specs import spec_of

from effexport.artifact import open_artifact
from effexport.quantize.rounding import numbers_of

pytestmark = pytest.mark.requires("torch", "onnx", "ort")


def weights_of(path: Path) -> dict[str, np.ndarray]:
    model = onnx.load(str(path))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def test_weights_are_quantised_as_by_onnxruntime(tmp_path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    ours = weights_of(open_artifact(built_artifact(spec_of("linear", precision="int8"))).model_path)
    plain = open_artifact(built_artifact(spec_of("linear"))).model_path
    quantize_dynamic(
        plain,
        tmp_path / "theirs.onnx",
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True, "WeightSymmetric": True},
    )
    theirs = weights_of(tmp_path / "theirs.onnx")
    names = [name.removesuffix(".int8") for name in ours if name.endswith(".int8")]
    assert len(names) == 6
    for name in names:
        scale = theirs[f"{name}_scale"]
        assert np.allclose(ours[f"{name}.scale"], scale, rtol=1e-6), "one scale for each channel"
        steps = np.abs(ours[f"{name}.int8"].astype(int) - theirs[f"{name}_quantized"])
        # a scale that is off by one rounding moves a tie
        assert steps.max() <= 1
        assert np.count_nonzero(steps) <= 2


def test_names_and_types_of_the_graph_stay() -> None:
    plain, ours = (
        onnx.load(str(open_artifact(built_artifact(spec_of("linear", **fields))).model_path)).graph
        for fields in ({}, {"precision": "int8"})
    )
    assert [str(value) for value in plain.input] == [str(value) for value in ours.input]
    assert [str(value) for value in plain.output] == [str(value) for value in ours.output]
    kinds = [node.op_type for node in ours.node]
    assert kinds.count("QuantizedLinear") == 6
    assert not {"MatMul", "Add", "Gelu"} & {node.op_type for node in ours.node if "feed_forward" in node.name}
    assert kinds.count("Identity") == 4, "query, key and value share one named input"


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_static_graphs_hold_symmetric_pairs(precision: str) -> None:
    fields = {"quantization": "static"} if precision == "int8" else {}  # the default of fp8
    artifact = open_artifact(calibrated_artifact(spec_of("linear", precision=precision, **fields)))
    weights = weights_of(artifact.model_path)
    zeros = [array for name, array in weights.items() if name.endswith(("zeros", "zero_point"))]
    assert zeros
    assert all((array.astype(np.float32) == 0).all() for array in zeros), "TensorRT reads symmetric pairs only"
    model = onnx.load(str(artifact.model_path)).graph
    nodes = {node.output[0]: node for node in model.node}
    products = [node for node in model.node if node.op_type == "MatMul"]
    assert len(products) == 6
    for product in products:
        assert [nodes[name].op_type for name in product.input] == ["DequantizeLinear"] * 2
    record = artifact.manifest.quantization
    assert record is not None
    layer = record.layer("blocks.0.feed_forward.down")
    assert layer is not None
    scale = weights[f"{layer.layer}.unrounded.scale"]
    assert float(scale) == layer.input_scale


def test_codes_stand_for_the_weights() -> None:
    ours = weights_of(open_artifact(built_artifact(spec_of("linear", precision="int8"))).model_path)
    plain = weights_of(open_artifact(built_artifact(spec_of("linear"))).model_path)
    for name in [name.removesuffix(".int8") for name in ours if name.endswith(".int8")]:
        back = numbers_of(ours[f"{name}.int8"], "int8", ours[f"{name}.scale"])
        # at most half a step away
        assert (np.abs(back - plain[name]) <= 0.5001 * ours[f"{name}.scale"]).all()
