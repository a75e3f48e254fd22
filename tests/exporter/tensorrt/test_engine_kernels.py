"""Fusions of TensorRT-RTX, read from its own log without a GPU. These tests back docs/tensorrt.md on fusion, and the
choice to keep attention in the form of function bodies: a release that changes it shows here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest
from attention_models import PRECISIONS, SIZES, inputs, our_attention
from slow_cases import slow_after

from effexport.artifact import Artifact
from effexport.base.errors import StageError
from effexport.tensorrt.engine_from_onnx import engine_from_onnx
from effexport.tensorrt.sidecar import FUSED, REASON_DIMS, REASON_FLOAT32, SEPARATE, EngineInfo, kernels_from_log
from effexport.tensorrt.spec import EngineSpec, profiles_from_texts

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "rtx")
Engine = Callable[..., EngineInfo]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """(model, dtype) → the engine's info."""

    def build(model: onnx.ModelProto, dtype: str) -> EngineInfo:
        path = tmp_path / "model.onnx"
        onnx.save(model, path)
        spec = EngineSpec(target="trt-rtx", profiles=(SIZES,))
        return engine_from_onnx(path, spec, tmp_path / "x.engine", precision=PRECISIONS[dtype])

    return build


def standard_attention(dtype: str, d: int, e: int | None = None, attributes: str = "") -> onnx.ModelProto:
    """The operator of opset 23 with a boolean mask."""
    given, result = inputs(dtype, d, e or d)
    return onnx.parser.parse_model(
        f'<ir_version: 11, opset_import: ["" : 23]> g ({given}) => ({result} out) {{'
        f"axes = Constant <value = int64[2] {{1, 2}}> () "
        f"mask = Unsqueeze (keep, axes) out = Attention <scale = 0.125 {attributes}> (q, k, v, mask) }}"
    )


def fused_kernels(info: EngineInfo) -> list[str]:
    return [kernel["name"] for kernel in info.kernels if "mha" in kernel["name"]]


CASES: list[tuple[str, int, int, str]] = [
    ("float16", 64, 64, FUSED),
    ("float32", 64, 64, f"{SEPARATE}: {REASON_FLOAT32}"),
    ("bfloat16", 64, 64, FUSED),
    *[("float16", d, d, FUSED) for d in (16, 20, 128, 256)],
    *[("float16", d, e, f"{SEPARATE}: {REASON_DIMS}") for d, e in ((8, 8), (264, 264), (64, 32))],
]


@pytest.mark.parametrize(("dtype", "d", "e", "expected"), slow_after(2, CASES))
def test_the_body_of_masked_attention_is_one_kernel_in_half_precision(
    engine: Engine, dtype: str, d: int, e: int, expected: str
) -> None:
    info = engine(our_attention(dtype, d, e), dtype)
    assert dict(info.attention) == {"out": expected}
    assert len(fused_kernels(info)) == (expected == FUSED)


@pytest.mark.slow
def test_the_standard_operator_is_the_same_kernel_after_more_others_and_cannot_be_built_elsewhere(
    engine: Engine,
) -> None:
    body, standard = (
        engine(our_attention("float16", 64), "float16"),
        engine(standard_attention("float16", 64), "float16"),
    )
    assert len(fused_kernels(body)) == len(fused_kernels(standard)) == 1
    assert len(standard.kernels) > len(body.kernels)
    for dtype, d in (("float32", 64), ("float16", 8), ("float16", 264)):
        with pytest.raises(StageError, match=r"no kernel for all of the operator Attention"):
            engine(standard_attention(dtype, d), dtype)
    with pytest.raises(StageError, match="softmax precision is not supported"):
        engine(standard_attention("float16", 64, attributes=", softmax_precision = 1"), "float16")
    with pytest.raises(StageError, match="must have the same head dimension"):
        engine(standard_attention("float16", 64, 32), "float16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "causal", "count"), [("softmax", False, 1), ("softmax", True, 1), ("nystrom", False, 2)]
)
def test_the_attention_of_an_exported_model_in_half_precision_is_fused(
    built: Callable[..., Artifact], cli: Callable[..., Any], tmp_path: Path, name: str, causal: bool, count: int
) -> None:
    artifact = built(name, "encoder", precision="fp16", **({"causal": True} if causal else {}))
    spec = EngineSpec(target="trt-rtx", profiles=profiles_from_texts((), artifact.spec))
    path = tmp_path / "trt-rtx.engine"
    info = engine_from_onnx(artifact.model_path, spec, path, precision="fp16")
    assert list(info.attention.values()).count(FUSED) == count
    shown = cli("inspect", path).out
    assert f"{len(info.kernels)} as the builder lists them" in shown
    assert FUSED in shown


def test_the_list_of_kernels_is_read_from_the_log() -> None:
    text = (
        "Layers:\n"
        "Name: shapes, LayerType: shape_call, Inputs: [], TacticName: , StreamId: 0, Metadata: \n"
        "Name: {a b}, LayerType: kgen, Inputs: [ { Name: x }], Metadata: [ONNX Layer: p][ONNX Layer: q]\n"
        "Bindings:\nx\n"
    )
    assert kernels_from_log([text]) == (
        {"name": "shapes", "type": "shape_call", "nodes": []},
        {"name": "{a b}", "type": "kgen", "nodes": ["p", "q"]},
    )
    assert kernels_from_log([]) == ()
