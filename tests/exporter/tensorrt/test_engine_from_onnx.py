"""Engines, built for real by TensorRT-RTX, which needs no GPU for that. None is run here: see docs/tensorrt.md."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest
from fake_tensorrt import written_engine
from slow_cases import some_variants

from effexport.artifact import Artifact
from effexport.base.dtypes import TensorInfo
from effexport.base.errors import DiskError, EffexportError, StageError, UserError
from effexport.base.spec import BuildSpec
from effexport.export.onnx_from_module import onnx_from_module
from effexport.models.encoder.module import module_from_spec
from effexport.tensorrt.bindings import BuildLog, check_version, import_api
from effexport.tensorrt.engine_from_onnx import engine_from_onnx
from effexport.tensorrt.sidecar import EngineInfo, check_engine_file, check_model, check_runs_here, read_sidecar
from effexport.tensorrt.spec import EngineSpec, Profile, Range, profiles_from_texts

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "rtx")
Built = Callable[..., Artifact]
Specs = Callable[..., BuildSpec]
# one fixed batch of short sequences, and a range up to the longest
PROFILES = ("batch=1,seq=1:128:1024", "batch=1:2:4,seq=128:4096:16384")
TINY = Profile({"n": Range(1, 2, 4)})


def tiny(text: str, opset: int = 20, domains: str = "") -> onnx.ModelProto:
    """A graph in ONNX's own text form, without header."""
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}{domains}]> {text}')


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., EngineInfo]:
    """(model or its path, **fields of EngineSpec) → the engine's info; the engine is tmp_path / "out" / "x.engine"."""

    def run(model: onnx.ModelProto | Path, *, precision: str = "fp32", **fields: Any) -> EngineInfo:
        path = model
        if isinstance(model, onnx.ModelProto):
            path = tmp_path / "model.onnx"
            onnx.save(model, path)
        spec = EngineSpec(**{"target": "trt-rtx", "profiles": (TINY,), **fields})
        return engine_from_onnx(path, spec, tmp_path / "out" / "x.engine", precision=precision)

    return run


def nothing_was_written(folder: Path) -> bool:
    return not list(folder.glob("out/*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_scope", "precision"),
    [
        # an encoder has all nodes of its attention, and half precision adds casts and ops kept in float32
        ("encoder", "fp16"),
        pytest.param("attention", "fp32", marks=pytest.mark.soak),
        pytest.param("attention", "fp16", marks=pytest.mark.soak),
        pytest.param("encoder", "fp32", marks=pytest.mark.soak),
    ],
)
# one of each kind of graph: softmax and the other AFTs have parts of these
@pytest.mark.parametrize("name", some_variants(slowly=("lsh", "aft-conv", "window", "gated-delta")))
def test_every_variant_becomes_an_engine_at_16384_tokens_with_two_dynamic_profiles(
    small_spec: Specs, tmp_path: Path, name: str, model_scope: str, precision: str
) -> None:
    # chunks of 16 would mean 1024 of them, and a minute of compilation for nothing that 64 does not show
    chunk = {"chunk_length": 64} if name == "lsh" else {}
    spec = small_spec(name, model_scope, seq_len=16384, precision=precision, **chunk)
    model = tmp_path / "model.onnx"
    onnx_from_module(module_from_spec(spec.model, spec.seed), spec, model)
    engine = tmp_path / "trt-rtx.engine"
    profiles = profiles_from_texts(PROFILES, spec)
    info = engine_from_onnx(model, EngineSpec(target="trt-rtx", profiles=profiles), engine, precision=precision)

    assert read_sidecar(engine) == info
    check_engine_file(engine, info)
    assert (info.inputs, info.outputs) == (spec.inputs, spec.outputs)
    first = info.inputs[0].name
    assert [[shape[:2] for shape in profile[first]] for profile in info.profiles] == [
        [(1, 1), (1, 128), (1, 1024)],
        [(1, 128), (2, 4096), (4, 16384)],
    ]
    assert info.implementation == dict.fromkeys(spec.custom_ops, "body")
    # every variant has at least two projections and what lies between them
    assert info.tensors_compared >= 20


@pytest.mark.slow
def test_an_engine_of_the_usual_size_keeps_its_ops_in_float32(built: Built, build: Callable[..., EngineInfo]) -> None:
    artifact = built("nystrom", "encoder", precision="fp16")
    info = build(artifact.model_path, profiles=profiles_from_texts([], artifact.spec), precision="fp16")
    dtype_of = {t["name"]: t["dtype"] for layer in info.layers for t in layer["outputs"]}
    iteration = [dtype for name, dtype in dtype_of.items() if name.startswith("PMiddle")]
    assert iteration == ["float32"] * 6
    assert "float16" in dtype_of.values()


def test_the_same_model_with_a_lowered_op_is_another_engine_and_a_wrong_one_is_refused(
    built: Built, build: Callable[..., EngineInfo], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    artifact = built("nystrom", "encoder", precision="fp16")
    profiles = profiles_from_texts([], artifact.spec)
    from effexport.tensorrt import engine_from_onnx as module

    honest = module.layers_of_network

    def lowered(definition: Any) -> list[dict[str, Any]]:
        """As a parser would report that took a float32 normalisation for a half one."""
        layers = list(honest(definition))
        next(layer for layer in layers if layer["type"] == "NORMALIZATION")["outputs"][0]["dtype"] = "float16"
        return layers

    monkeypatch.setattr(module, "layers_of_network", lowered)
    with pytest.raises(StageError, match=r"(?s)the precision of 1 of \d+ .* is float16; the model says float32"):
        build(artifact.model_path, profiles=profiles, precision="fp16")
    assert nothing_was_written(tmp_path)


def test_an_fp16_request_for_a_float32_model_is_refused(
    built: Built, build: Callable[..., EngineInfo], tmp_path: Path
) -> None:
    artifact = built("softmax", "encoder")
    with pytest.raises(StageError, match="fp16 was asked for, and no matrix product of the engine is float16"):
        build(artifact.model_path, profiles=profiles_from_texts([], artifact.spec), precision="fp16")
    assert nothing_was_written(tmp_path)


def test_external_weights_are_found_beside_the_model(
    built: Built, build: Callable[..., EngineInfo], tmp_path: Path
) -> None:
    artifact = built("softmax", "encoder")
    outside = tmp_path / "outside.onnx"
    onnx.save(onnx.load(artifact.model_path), outside, save_as_external_data=True, location="weights", size_threshold=0)
    assert (tmp_path / "weights").is_file()
    profiles = profiles_from_texts([], artifact.spec)
    sizes = [build(path, profiles=profiles).engine_bytes for path in (artifact.model_path, outside)]
    # the same network with the same weights; names of files may differ
    assert abs(sizes[0] - sizes[1]) < 4096


@pytest.mark.slow
def test_options_reach_the_builder(built: Built, build: Callable[..., EngineInfo]) -> None:
    artifact = built("linear", "encoder", fused=False)
    profiles = profiles_from_texts([], artifact.spec)
    plain = build(artifact.model_path, profiles=profiles)
    targeted = build(artifact.model_path, profiles=profiles, compute_capabilities=(86, 120), optimization_level=0)
    assert targeted.compute_capabilities == (86, 120)
    assert targeted.options["optimization_level"] == 0
    assert targeted.built_for == "SM 86, SM 120"
    # kernels for two kinds of GPU take more room than portable ones
    assert targeted.engine_bytes != plain.engine_bytes


def test_progress_ends_near_one_and_names_phases(built: Built, tmp_path: Path) -> None:
    artifact = built("linear", "encoder")
    seen: list[tuple[str, float]] = []
    spec = EngineSpec(target="trt-rtx", profiles=profiles_from_texts([], artifact.spec))
    engine_from_onnx(
        artifact.model_path,
        spec,
        tmp_path / "x.engine",
        on_progress=lambda phase, share: seen.append((phase, share)),
    )
    assert len({phase for phase, _ in seen}) > 1
    assert all(0 <= share <= 1 for _, share in seen)


def test_an_interrupt_ends_the_build_and_leaves_nothing(built: Built, tmp_path: Path) -> None:
    artifact = built("linear", "encoder")
    spec = EngineSpec(target="trt-rtx", profiles=profiles_from_texts([], artifact.spec))

    def interrupt(phase: str, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine_from_onnx(artifact.model_path, spec, tmp_path / "out" / "x.engine", on_progress=interrupt)
    assert nothing_was_written(tmp_path)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            tiny(
                "g (float[n, 8192] x) => (float[n, 8192] v, int64[n, 8192] i) "
                "{ k = Constant <value_ints = [8192]> () v, i = TopK (x, k) }"
            ),
            ["TopK", "3840"],
        ),
        (tiny("g (float[n, 4] x) => (float[n, 4] y) { y = Relu (x) }", opset=27), ["opset", "27", "9 to 25"]),
        (tiny("g (double[n, 4] x) => (double[n, 4] y) { y = Relu (x) }"), ["double", "cast it to float"]),
        (
            tiny("g (float[n, 4] x) => (float[n, 4] y) { y = foo.Bar (x) }", domains=', "foo" : 1'),
            ["Bar"],
        ),
        (tiny("g (float[n, 4, 4] x) => (float[n] y) { y = Det (x) }"), ["Det", "does not import"]),
        (tiny("g (bool[n] x) => (int64[1, m] y) { y = NonZero (x) }"), ["NonZero", "this TensorRT does not have"]),
        (
            tiny("g (float[n, 4] x, float[k, 4] w) => (float[n, 4] y) { y = MatMul (x, w) }"),
            ["mismatching dimensions"],
        ),
    ],
    ids=[
        "TopK of 8192",
        "opset 27",
        "float64",
        "unknown operator",
        "unsupported operator",
        "NonZero",
        "shapes that do not fit",
    ],
)
def test_a_model_that_tensorrt_cannot_take_is_refused_with_the_node_and_the_reason(
    build: Callable[..., EngineInfo], tmp_path: Path, model: onnx.ModelProto, words: list[str]
) -> None:
    profile = Profile({"n": Range(1, 2, 4), "k": Range(5, 5, 5)})
    with pytest.raises(EffexportError) as failure:
        build(model, profiles=(profile,))
    for word in words:
        assert word in str(failure.value)
    for cpp in ("/_src/", ".cpp", "Error Code", "IBuilder"):
        assert cpp not in str(failure.value)
    assert nothing_was_written(tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workspace_bytes": 1024}, "fits into the workspace; raise the limit, workspace in"),
        ({"compute_capabilities": (75,)}, "cannot be built for SM 75: FP32 GEMM is not supported"),
    ],
)
def test_a_build_that_tensorrt_gives_up_says_why_and_writes_nothing(
    built: Built, build: Callable[..., EngineInfo], tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    artifact = built("softmax", "encoder")
    with pytest.raises(StageError, match=words):
        build(artifact.model_path, profiles=profiles_from_texts([], artifact.spec), **fields)
    assert nothing_was_written(tmp_path)


def test_a_build_beside_a_living_engine_has_its_own_messages_and_none_about_loggers(
    built: Built, build: Callable[..., EngineInfo]
) -> None:
    """TensorRT warns about a second logger while it holds a lock: with garbage in Python, it hung there."""
    artifact = built("softmax", "encoder")
    api = import_api("trt-rtx")
    log = BuildLog(api)
    living = api.Builder(log.logger), api.Runtime(log.logger)
    with pytest.raises(StageError, match="cannot be built for SM 75: FP32 GEMM is not supported"):
        build(artifact.model_path, profiles=profiles_from_texts([], artifact.spec), compute_capabilities=(75,))
    assert log.errors
    assert not [message for message in log.warnings if "logger" in message]
    del living


def test_an_engine_that_cannot_be_written_leaves_the_old_one_and_its_sidecar(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = built("softmax", "encoder")
    output = tmp_path / "x.engine"
    spec = EngineSpec(target="trt-rtx", profiles=profiles_from_texts([], artifact.spec))
    old = engine_from_onnx(artifact.model_path, spec, output)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DiskError, match=r"cannot write .*x\.engine: the disk is full"):
        engine_from_onnx(artifact.model_path, replace(spec, optimization_level=0), output)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert read_sidecar(output) == old


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A file that no TensorRT loads, with a sidecar: enough for all that is looked at before."""
    path = tmp_path / "x.engine"
    written_engine(
        path,
        target="trt-rtx",
        tensorrt_version="1.7.1.116",
        compute_capabilities=(),
        inputs=(TensorInfo("x", "float32", ("n",)),),
        outputs=(TensorInfo("y", "float32", ("n",)),),
        profiles=({"x": ((1,), (2,), (4,))},),
    )
    return path


def test_an_engine_moves_with_its_sidecar_and_not_without(engine: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "y.engine"
    elsewhere.parent.mkdir()
    shutil.copy(engine, elsewhere)
    with pytest.raises(UserError, match=r"has no y\.json beside it"):
        read_sidecar(elsewhere)
    shutil.copy(engine.with_suffix(".json"), elsewhere.with_suffix(".json"))
    check_engine_file(elsewhere, read_sidecar(elsewhere))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format_version": 1}', '{"format_version": 1, "target": 3}'])
def test_a_damaged_sidecar_is_one_clear_error(engine: Path, text: str) -> None:
    engine.with_suffix(".json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json is damaged: .*; build the engine again"):
        read_sidecar(engine)


def test_a_sidecar_of_a_newer_effexport_says_so(engine: Path) -> None:
    engine.with_suffix(".json").write_text('{"format_version": 99}')
    with pytest.raises(UserError, match="format version 99, of a newer effexport"):
        read_sidecar(engine)


def test_a_damaged_engine_is_refused(engine: Path) -> None:
    info = read_sidecar(engine)
    contents = bytearray(engine.read_bytes())
    contents[len(contents) // 2] ^= 1
    engine.write_bytes(contents)
    with pytest.raises(UserError, match="does not match the checksum in its sidecar"):
        check_engine_file(engine, info)
    engine.write_bytes(contents[:-1])
    with pytest.raises(UserError, match="is damaged: it has"):
        check_engine_file(engine, info)


def test_an_engine_of_another_model_release_or_gpu_is_refused(engine: Path) -> None:
    info = read_sidecar(engine)
    digest = hashlib.sha256(b"another model").hexdigest()
    with pytest.raises(UserError, match=r"was built from another model\.onnx"):
        check_model(engine, info, digest)
    check_runs_here(engine, info, info.tensorrt_version, 80)
    check_runs_here(engine, info, info.tensorrt_version, 120)
    with pytest.raises(UserError, match=r"built with TensorRT-RTX .*, and 1.9.0.1 is installed; expected the same"):
        check_runs_here(engine, info, "1.9.0.1", 89)
    with pytest.raises(UserError, match="built for SM 80 and later, and this GPU is SM 75"):
        check_runs_here(engine, info, info.tensorrt_version, 75)
    own = replace(info, target="trt", compute_capabilities=(90,))
    with pytest.raises(UserError, match="built for SM 90, and this GPU is SM 80"):
        check_runs_here(engine, own, info.tensorrt_version, 80)
    check_runs_here(engine, replace(own, hardware_compatibility="ampere+"), info.tensorrt_version, 80)
    portable = replace(own, tensorrt_version="10.13.0.35", version_compatible=True)
    check_runs_here(engine, portable, "11.4.0.106", 90)
    with pytest.raises(UserError, match="expected the same release or a later one"):
        check_runs_here(engine, replace(portable, tensorrt_version="11.4.0.106"), "10.16.1.11", 90)


def test_a_tensorrt_that_is_too_old_is_refused() -> None:
    check_version("trt", "10.13.0.35")
    with pytest.raises(UserError, match=r"TensorRT 10\.9\.0\.34 is installed; expected 10\.13 or later: pip install"):
        check_version("trt", "10.9.0.34")
