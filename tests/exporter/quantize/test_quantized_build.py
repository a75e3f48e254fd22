"""Quantised builds: what is quantised, what the proof says of healthy and of damaged files, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantization_faults import faults, saved
from slow_cases import slow, soak, some_variants
from small_builds import built_artifact, calibrated_artifact
from small_specs import spec_of

import effexport
from effexport.artifact import Artifact, open_artifact
from effexport.base.errors import StageError, UserError
from effexport.models.variants import ATTENTION_SPECS
from effexport.proof.cases import load_reference
from effexport.proof.check import Kind
from effexport.proof.tolerances import ARITHMETIC
from effexport.tensorrt.spec import EngineSpec, default_profile

pytestmark = [pytest.mark.requires("torch", "onnx", "ort"), pytest.mark.usefixtures("kept_traces")]

SCHEMES: dict[str, dict[str, Any]] = {
    "dynamic": {"precision": "int8"},
    "static": {"precision": "int8", "quantization": "static"},
    "fp8": {"precision": "fp8"},
    "bf16": {"precision": "bf16", "bf16": "linear"},
}
SAMPLED = ("static", "fp8")
STATIC_IN_EVERY_RUN = (("nystrom", "static"),)
ENGINES_IN_EVERY_RUN = (("softmax", "int8"), ("lsh", "fp8"))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of the small encoders."""
    path = tmp_path_factory.mktemp("samples") / "tokens.npz"
    np.savez(path, input_ids=np.random.default_rng(0).integers(0, 258, (64, 64)))
    return path


def quantised(variant: str, scheme: str = "dynamic", **fields: Any) -> Artifact:
    spec = spec_of(variant, **SCHEMES[scheme], **fields)
    return open_artifact(calibrated_artifact(spec) if scheme in SAMPLED else built_artifact(spec))


# layers of products alone, a hash that stays float, and a convolution
@pytest.mark.parametrize("name", some_variants(fast=("linear", "lsh"), slowly=("aft-conv",)))
@pytest.mark.parametrize("scheme", ["dynamic", "bf16"])
def test_every_variant_computes_its_quantised_model(name: str, scheme: str) -> None:
    artifact = quantised(name, scheme)
    report = json.loads((artifact.path / "report.json").read_text())
    assert report["verdict"] == "passed"
    found = report["summary"]
    assert found[Kind.GIVEN_ROUNDINGS]["passed"] == len(load_reference(artifact.reference_path))
    assert found[Kind.GIVEN_ROUNDINGS]["limit"] == ARITHMETIC["fp32", "encoder"].value
    # the verdict on the arithmetic is at least as strict as 1e-3 of RMS
    assert found[Kind.OVERALL_ERROR]["worst"] <= 1e-5
    assert 0 < found[Kind.QUANTIZATION_LOSS]["worst"] < 0.2
    record = artifact.manifest.quantization
    assert record is not None
    assert {layer.layer for layer in record.layers} >= {"blocks.0.feed_forward.up", "blocks.0.attention.out"}
    assert all(product.reason for product in record.products)
    assert all(layer.loss is not None for layer in record.layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        pytest.param(name, scheme, marks=() if (name, scheme) in STATIC_IN_EVERY_RUN else pytest.mark.soak)
        for name in ("nystrom", "lsh", "softmax", "aft-conv")
        for scheme in ("static", "fp8")
    ],
)
def test_static_scales_of_every_kind_of_variant(name: str, scheme: str) -> None:
    artifact = quantised(name, scheme)
    assert artifact.manifest.parity.passed
    record = artifact.manifest.quantization
    assert record is not None
    assert (record.samples.source, record.samples.samples) == ("tokens.npz", 64)
    assert all(layer.input_scale is not None for layer in record.layers)


def test_the_hash_of_lsh_stays_float() -> None:
    record = quantised("lsh").manifest.quantization
    assert record is not None
    floats = {product.layer: product.reason for product in record.products if product.operator == "Linear"}
    assert "hash" in floats["blocks.0.attention.query_key"]
    assert record.layer("blocks.0.attention.query_key") is None


def test_verify_rebuilds_the_quantised_module() -> None:
    artifact = quantised("linear")
    report = effexport.verify(artifact.path, reference="torch")
    assert report.verdict == "passed"
    kinds = {check.kind for check in report.checks}
    assert {Kind.GIVEN_ROUNDINGS, Kind.QUANTIZED_RUN, Kind.QUANTIZATION_LOSS, Kind.QUANTIZED_PRODUCTS} <= kinds


@pytest.mark.parametrize("scheme", ["dynamic", slow("bf16")])
def test_a_decoder_is_quantised_too(scheme: str) -> None:
    artifact = quantised("linear", scheme, causal=True)
    report = json.loads((artifact.path / "report.json").read_text())
    assert report["summary"][Kind.DECODE_STEP]["passed"] == 1
    whole, step = ((artifact.path / name).stat().st_size for name in ("model.onnx", "decode_step.onnx"))
    assert step < 1.5 * whole


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *(("lsh", "dynamic"), ("linear", "bf16"), ("softmax", "static"), ("aft-simple", "fp8")),
        *(slow(("softmax", "bf16")), slow(("softmax", "dynamic")), soak(("linear", "dynamic")), soak(("lsh", "bf16"))),
    ],
)
def test_every_planted_fault_is_caught(name: str, scheme: str, tmp_path: Path) -> None:
    artifact = quantised(name, scheme)
    caught: dict[str, bool] = {}
    for fault, model in faults(artifact, tmp_path):
        report = effexport.verify(artifact.path, model=saved(model, tmp_path / "faulty.onnx"), reference="golden")
        caught[fault] = report.verdict == "failed"
    assert len(caught) >= 3
    assert all(caught.values()), caught


def test_smoothing_keeps_the_bits_of_the_float_model(tokens: Path, tmp_path: Path) -> None:
    artifact = effexport.build(
        spec_of("linear", precision="int8", smooth=0.5), tmp_path / "smooth", calibration=tokens
    ).artifact
    record = artifact.manifest.quantization
    assert record is not None
    assert {item.norm for item in record.smoothing} == {"blocks.0.attention_norm", "blocks.0.feed_forward_norm"}
    assert effexport.verify(artifact.path, reference="torch").verdict == "passed"


def test_the_residual_of_post_norm_forbids_smoothing(tokens: Path, tmp_path: Path) -> None:
    artifact = effexport.build(
        spec_of("linear", precision="int8", smooth=0.5, block="post-norm"), tmp_path / "post", calibration=tokens
    ).artifact
    assert artifact.manifest.quantization is not None
    assert artifact.manifest.quantization.smoothing == ()


def test_the_search_puts_the_worst_layers_back(tokens: Path, tmp_path: Path) -> None:
    free = quantised("lsh").manifest.quantization
    assert free is not None
    assert free.loss is not None
    limit = 0.6 * free.loss.rms_error
    build = effexport.build(spec_of("lsh", precision="int8", max_loss=limit), tmp_path / "searched", calibration=tokens)
    record = build.artifact.manifest.quantization
    assert record is not None
    assert record.search_put_back
    worst = max(free.layers, key=lambda layer: layer.loss or 0.0)
    assert worst.layer in record.search_put_back
    limited = [check for check in build.report.checks if check.limit == limit]
    assert [(check.kind, check.status) for check in limited] == [(Kind.QUANTIZATION_LOSS, "passed")]


def test_a_model_that_is_too_sensitive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="max_loss 1e-06 leaves no layer to quantise"):
        effexport.build(spec_of("linear", precision="int8", max_loss=1e-6), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_task_is_judged(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    spec = spec_of("linear", precision="int8", lm_head=True, causal=True)
    result = effexport.build(spec, tmp_path / "lm", calibration=text, evaluate=text)
    record = result.report.quantization
    assert record is not None
    assert {"loss", "accuracy"} <= {figure.name for figure in record.task}
    (check,) = [check for check in result.report.checks if check.kind == Kind.TASK_LOSS]
    assert check.value is not None
    assert abs(check.value) < 0.05


def test_embeddings_only_when_asked(tmp_path: Path) -> None:
    plain = quantised("linear")
    result = effexport.build(spec_of("linear", precision="int8", quantize_embeddings=True), tmp_path / "tables")
    record = result.artifact.manifest.quantization
    assert plain.manifest.quantization is not None
    assert plain.manifest.quantization.embeddings == ()
    assert record is not None
    assert [table.layer for table in record.embeddings] == ["token_embedding"]
    assert result.artifact.model_path.stat().st_size < plain.model_path.stat().st_size


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"precision": "int8", "quantization": "static"}, 'calibration is missing.*use quantization="dynamic"'),
        ({"precision": "fp8"}, "calibration is missing"),
        ({"precision": "fp8", "quantization": "dynamic"}, "fp8 has static scales"),
        ({"precision": "fp8", "opset": 18}, "expected at least 19"),
        ({"precision": "fp16", "smooth": 0.5}, 'applies to precision="int8" and fp8 only'),
        ({"precision": "bf16", "smooth": 0.5}, 'applies to precision="int8" and fp8 only'),
        ({"precision": "bf16", "quantization": "dynamic"}, 'applies to precision="int8" and fp8 only'),
        ({"precision": "bf16", "bf16": "graph", "max_loss": 0.1}, "this is bf16 of the whole graph"),
        ({"precision": "fp32", "bf16": "linear"}, 'applies to precision="bf16" only; this is fp32'),
        ({"precision": "bf16", "bf16": "linear", "targets": ("trt-rtx",)}, "has bfloat16 in the whole graph"),
        ({"precision": "int8", "smooth": 2.0}, "expected a number between 0 and 1"),
        ({"precision": "int8", "max_loss": -1.0}, "expected a positive number"),
        ({"precision": "int8", "keep_float": ("blocks.7",)}, "keep_float names 'blocks.7'"),
    ],
)
def test_options_that_cannot_work(fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        effexport.build(variant="linear", dim=32, heads=2, seq_len=64, layers=1, output=tmp_path / "x", **fields)
    assert not (tmp_path / "x").exists()


def test_an_engine_needs_static_scales_and_a_gpu_that_has_the_precision(tokens: Path) -> None:
    from effexport.pipeline.quantization import QuantizationData

    int8, fp8 = (spec_of("linear", precision=precision) for precision in ("int8", "fp8"))
    engine = EngineSpec(target="trt-rtx", profiles=(default_profile(int8),), compute_capabilities=(80,))
    with pytest.raises(UserError, match="reads static scales only"):
        QuantizationData().check(int8, [engine])
    with pytest.raises(UserError, match=r"compute capability 8\.9"):
        QuantizationData(tokens).check(fp8, [engine])


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"pixels": np.zeros((64, 8), np.float32)}, "expected the inputs of this model"),
        ({"input_ids": np.zeros((63, 8), np.int64)}, "has 63 samples; expected at least 64"),
        ({"input_ids": np.full((64, 8), 9999, np.int64)}, "row 0 of"),
        ({"input_ids": np.zeros((64, 8), np.int64), "attention_mask": np.ones((3, 8), np.int64)}, "different numbers"),
    ],
)
def test_calibration_that_does_not_fit(arrays: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.npz"
    np.savez(path, **arrays)
    with pytest.raises(UserError, match=sentence):
        effexport.build(spec_of("linear", precision="int8"), tmp_path / "x", calibration=path)
    assert not (tmp_path / "x").exists()


def test_texts_and_lines_are_samples(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(70)))
    result = effexport.build(
        spec_of("linear", precision="int8", quantization="static"), tmp_path / "a", calibration=lines
    )
    assert result.report.quantization is not None
    assert result.report.quantization.samples.samples == 70
    lines.write_text('{"text": 3}\n')
    with pytest.raises(UserError, match=r"line 1 of .* has no text"):
        effexport.build(spec_of("linear", precision="int8"), tmp_path / "b", calibration=lines)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(UserError, match="expected at least 64"):
        effexport.build(spec_of("linear", precision="int8"), tmp_path / "c", calibration=short)


def test_a_build_without_samples_says_so() -> None:
    artifact = quantised("linear")
    assert any("no --calibration was given" in note for note in artifact.manifest.notes)
    # this process stands on the plainest processor
    assert any("no int8 dot products" in note for note in artifact.manifest.notes)


def test_refit_quantises_the_new_weights_and_refuses_static_scales(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from effexport.export.module_source import module_from_seed

    artifact = quantised("linear")
    weights = tmp_path / "other.safetensors"
    save_file(module_from_seed(spec_of("linear", seed=5)).state_dict(), str(weights))
    result = effexport.refit(artifact.path, weights=weights, output=tmp_path / "refitted")
    assert result.report.verdict == "passed"
    static = quantised("linear", "static")
    with pytest.raises(UserError, match="build it again"):
        effexport.refit(static.path, weights=weights, output=tmp_path / "y")


def test_a_stripped_file_is_still_judged_by_its_free_run(tmp_path: Path) -> None:
    """A tool that renames values hides the roundings; the free run and the signature remain."""
    import onnx

    artifact = quantised("linear")
    model = onnx.load(str(artifact.model_path))
    for node in model.graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if "unrounded" in name:
                    names[place] = name.replace(".unrounded", ".x")
    del model.graph.value_info[:]
    onnx.save(model, str(tmp_path / "renamed.onnx"))
    report = effexport.verify(artifact.path, model=tmp_path / "renamed.onnx", reference="golden")
    assert report.verdict == "passed"
    assert {check.status for check in report.checks if check.kind == Kind.QUANTIZED_RUN} == {"passed"}
    assert {check.outcome for check in report.checks if check.kind == Kind.GIVEN_ROUNDINGS} == {"not applicable"}


@pytest.mark.slow
@pytest.mark.requires("rtx")
@pytest.mark.parametrize(
    ("name", "precision"),
    [  # the kinds that are quantised otherwise, one precision each; the soak run builds all
        pytest.param(name, precision, marks=() if (name, precision) in ENGINES_IN_EVERY_RUN else pytest.mark.soak)
        for name in ATTENTION_SPECS
        for precision in ("int8", "fp8")
    ],
)
def test_engines_have_the_codes_of_the_graph(name: str, precision: str, tokens: Path, tmp_path: Path) -> None:
    from effexport.tensorrt.sidecar import CODES, count_dtypes, read_sidecar

    spec = spec_of(name, precision=precision, quantization="static")
    artifact = effexport.build(spec, tmp_path / "a", calibration=tokens, targets=["trt-rtx"]).artifact
    info = read_sidecar(artifact.engine_path("trt-rtx"))
    assert info.precision == precision
    assert count_dtypes(info.layers)[CODES[precision]] >= 6
    assert info.tensors_compared > 20
