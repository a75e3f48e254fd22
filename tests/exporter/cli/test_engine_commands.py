"""Engines on the command line: build, inspect, run and verify, with the errors of a machine without a GPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_tensorrt import FakeCuda
from fused_operators import FUSED
from onnx_in_fake_tensorrt import fake_tensorrt

import effexport
from effexport.artifact import Artifact, open_artifact
from effexport.base.errors import UserError
from effexport.base.formatting import listed
from effexport.models.variants import WITH_STATE
from effexport.plugins.building.ptx import PtxTarget
from effexport.tensorrt.sidecar import read_sidecar, write_sidecar

# one worker, so that every engine is built once
pytestmark = [
    pytest.mark.requires("torch", "onnx", "ort", "rtx"),
    pytest.mark.xdist_group("engine commands"),
    pytest.mark.usefixtures("kept_traces"),
]
SMALL = ("--dim", "32", "--heads", "2", "--layers", "1", "--seq-len", "64")


@pytest.fixture(scope="module")
def with_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with a TensorRT-RTX engine, built by the command line."""
    from effexport.cli.main import main

    path = tmp_path_factory.mktemp("engines") / "nystrom"
    with pytest.raises(SystemExit) as stop:
        main(["build", "--variant", "nystrom", *SMALL, "--target", "trt-rtx", "-o", str(path)])
    assert stop.value.code == 0
    return path


def test_a_build_puts_the_engine_into_the_artifact_and_says_that_it_was_not_run(with_engine: Path) -> None:
    artifact = open_artifact(with_engine)
    (entry,) = artifact.manifest.engines
    assert entry.file == "engine/trt-rtx.engine"
    assert entry.implementation == dict.fromkeys(FUSED["nystrom"], "body")
    assert {"engine/trt-rtx.engine", "engine/trt-rtx.json"} <= artifact.manifest.files.keys()
    assert artifact.engine_path("trt-rtx").stat().st_size == entry.bytes
    report = json.loads((with_engine / "report.json").read_text())
    assert report["verdict"] == "passed"
    assert report["engines"] == [json.loads(msgspec.json.encode(entry))]
    (check,) = [check for check in report["checks"] if check["name"] == "trt-rtx: parity"]
    assert check["status"] == "not run"
    assert "the engine was built and not run" in check["reason"]
    page = (with_engine / "report.html").read_text()
    assert "TensorRT engines" in page
    assert "input_ids 1 × 1 to 4 × 64, tuned for 1 × 64" in page


def test_an_engine_is_covered_by_the_hashes_of_the_artifact(with_engine: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(with_engine, copy)
    engine = copy / "engine" / "trt-rtx.engine"
    engine.write_bytes(engine.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"engine/trt-rtx\.engine has \d+ bytes"):
        open_artifact(copy)


def test_inspect_describes_an_engine_and_an_artifact_with_one(cli: Callable[..., Any], with_engine: Path) -> None:
    engine = with_engine / "engine" / "trt-rtx.engine"
    result = cli("inspect", engine)
    assert result.code == 0
    why = "IterativePinv is a body: TensorRT-RTX has no plugins"
    for words in ("TensorRT-RTX", "SM 80 and later", why, "MATRIX_MULTIPLY", "compared with the"):
        assert words in " ".join(result.out.split())
    assert "plugins=" not in result.out
    described = cli("inspect", engine, "--json").json["engine"]
    assert described["target"] == "trt-rtx"
    assert len(described["layers"]) > 100
    assert "engine/trt-rtx.engine" in cli("inspect", with_engine).out


def test_inspect_says_what_the_plugins_of_an_engine_need(
    cli: Callable[..., Any], with_engine: Path, tmp_path: Path
) -> None:
    engine = Path(shutil.copy(with_engine / "engine" / "trt-rtx.engine", tmp_path / "trt.engine"))
    info = read_sidecar(with_engine / "engine" / "trt-rtx.engine")
    assert info.ptx is None
    assert "plugins need" not in cli("inspect", with_engine / "engine" / "trt-rtx.engine").out
    write_sidecar(engine, replace(info, target="trt", ptx=PtxTarget(80, "9.0", "13.0")))
    assert "SM 80 or later, and a driver of CUDA 13.0 or later (PTX 9.0)" in cli("inspect", engine).out
    assert "IterativePinv is a body, see the note" in cli("inspect", engine).out
    write_sidecar(engine, replace(info, target="trt", options={**info.options, "plugins": "never"}))
    assert "IterativePinv is a body: built with --plugins never" in " ".join(cli("inspect", engine).out.split())
    write_sidecar(engine, replace(info, target="trt", ptx=PtxTarget(80, "9.0", "13.0")))
    described = cli("inspect", engine, "--json").json["engine"]
    assert described["ptx"] == {"architecture": 80, "isa": "9.0", "driver": "13.0"}


def test_an_engine_without_a_gpu_is_one_clear_error(cli: Callable[..., Any], with_engine: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("some text")
    for arguments in (("run", with_engine, "--text", text), ("verify", with_engine)):
        message = cli(*arguments, "--runtime", "trt-rtx").error(2)
        assert "GPU" in message
        assert "building trt-rtx engines does not" in message
    with pytest.raises(UserError, match="GPU"):
        effexport.load(with_engine, runtime="trt-rtx")


def test_a_target_that_the_artifact_lacks_is_named(cli: Callable[..., Any], with_engine: Path) -> None:
    message = cli("verify", with_engine, "--runtime", "trt").error(2)
    assert "has no trt engine, only trt-rtx" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "tensorrt"), "unknown --target 'tensorrt'; did you mean 'trt'?"),
        (("--target", "trt"), "TensorRT is not installed; add it with: pip install 'effexport[tensorrt]'"),
        (("--target", "trt-rtx", "--profile", "seq=1:64:65"), "positions for 64 tokens"),
        (("--target", "trt-rtx", "--profile", "64"), "expected dimension=min:opt:max"),
        (("--profile", "seq=64"), "--profile: only for engines, and none was requested"),
    ],
)
def test_bad_requests_fail_with_status_2_before_anything_is_written(
    cli: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    message = cli("build", "--variant", "softmax", *SMALL, *arguments, "-o", tmp_path / "out").error(2)
    assert words in message
    assert list(tmp_path.iterdir()) == []


def test_a_failed_engine_takes_the_whole_artifact_with_it(cli: Callable[..., Any], tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text('[engine]\nworkspace = "1K"')
    arguments = ("--target", "trt-rtx", "--spec", spec)
    message = cli("build", "--variant", "softmax", *SMALL, *arguments, "-o", tmp_path / "out").error(1)
    assert "fits into the workspace" in message
    assert list(tmp_path.iterdir()) == [spec]


def test_runtime_and_implementation_that_contradict_each_other_are_refused(
    cli: Callable[..., Any], built: Callable[..., Artifact], with_engine: Path
) -> None:
    message = cli("verify", with_engine, "--runtime", "trt-rtx", "--implementation", "body").error(2)
    assert "was decided when the engine was built" in message
    model = built("softmax", "encoder").model_path
    message = cli("verify", with_engine, "--runtime", "trt-rtx", "--model", model).error(2)
    assert "--model names an ONNX file" in message
    with pytest.raises(UserError, match="settings and runtime were both given"):
        effexport.load(with_engine, effexport.RunOptions(), runtime="ort")  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def that_decodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal artifact with TensorRT-RTX engines, built by the command line with two profiles."""
    from effexport.cli.main import main

    path = tmp_path_factory.mktemp("engines") / "linear"
    profiles = ("--profile", "batch=1:2:2,seq=1:8:16", "--profile", "batch=1:2:2,seq=16:32:64")
    with pytest.raises(SystemExit) as stop:
        main(["build", "--variant", "linear", "--causal", *SMALL, "--target", "trt-rtx", *profiles, "-o", str(path)])
    assert stop.value.code == 0
    return path


@pytest.mark.slow
def test_a_causal_model_has_engines_of_its_decode_step_and_its_prefill_too(
    cli: Callable[..., Any], that_decodes: Path, tmp_path: Path
) -> None:
    artifact = open_artifact(that_decodes)
    files = ["engine/trt-rtx.engine", "engine/trt-rtx.decode_step.engine", "engine/trt-rtx.prefill.engine"]
    assert [entry.file for entry in artifact.manifest.engines] == files
    assert {*files, *(name.replace(".engine", ".json") for name in files)} <= artifact.manifest.files.keys()
    # a length does not matter for single tokens, so both profiles are one
    assert [len(entry.profiles) for entry in artifact.manifest.engines] == [2, 1, 2]
    assert artifact.manifest.engines[1].profiles[0]["input_ids"] == ((1, 1), (2, 1), (2, 1))
    shown = cli("inspect", that_decodes).out
    assert all(name in shown for name in files)
    engine = cli("inspect", that_decodes / files[1]).out
    assert "from" in engine
    assert "decode_step.onnx with sha256" in engine
    report = effexport.report(that_decodes)
    assert {check.name for check in report.checks if check.status == "not run" and check.target} == {
        "trt-rtx: parity",
        "trt-rtx: decode step",
    }
    page = (that_decodes / "report.html").read_text()
    assert page.count("--target trt-rtx") == 1
    assert all(name in page for name in files)


@pytest.mark.slow
def test_decoding_with_engines_without_a_gpu_or_without_engines_is_one_clear_error(
    that_decodes: Path, with_engine: Path, built: Callable[..., Artifact], tmp_path: Path
) -> None:
    causal = built("linear", "encoder", causal=True).path
    for path, runtime, message in (
        (that_decodes, "trt-rtx", "needs an NVIDIA GPU and its driver"),
        (that_decodes, "trt", "has no trt engine, only trt-rtx; build one with"),
        (causal, "trt-rtx", "has no trt-rtx engine, nor any other; build one with"),
        (causal, "openvino", "runtime openvino does not decode token by token; expected one of: ort, "),
        (causal, "rtx", "unknown runtime 'rtx'"),
        (with_engine, "trt-rtx", f"has no decode step; only causal models of {listed(WITH_STATE)} have one"),
    ):
        with pytest.raises(UserError, match=message):
            effexport.load_decoder(path, runtime=runtime)
    with pytest.raises(UserError, match="settings and runtime were both given"):
        effexport.load_decoder(causal, effexport.RunOptions(), runtime="ort")
    with effexport.load_decoder(causal, runtime="ort") as decoder:
        decoder.step({"input_ids": [[1]]})


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, that_decodes: Path) -> list[FakeCuda]:
    """As if this machine had a GPU on which ONNX Runtime answers for TensorRT: the GPUs that were opened."""
    opened: list[FakeCuda] = []

    def import_api(target: str) -> Any:
        api = fake_tensorrt(that_decodes)
        opened.append(api.cuda)
        return api

    monkeypatch.setattr("effexport.tensorrt.execution.import_api", import_api)
    monkeypatch.setattr("effexport.tensorrt.execution.open_cuda", lambda extra: opened[-1])
    return opened


@pytest.mark.slow
def test_verify_proves_the_engines_of_the_decode_step_and_the_prefill(
    cli: Callable[..., Any], that_decodes: Path, fake_gpu: list[FakeCuda]
) -> None:
    result = cli("verify", that_decodes, "--runtime", "trt-rtx", "--json")
    assert result.code == 0, result.err
    summary = result.json["summary"]
    assert summary["trt-rtx: arithmetic"]["passed"] >= 1
    for name in ("decode step", "prefill state"):
        assert (summary[f"trt-rtx: {name}"]["passed"], summary[f"trt-rtx: {name}"]["failed"]) == (1, 0)
    # the case of three samples is outside the profiles
    assert summary["trt-rtx: prefill"]["passed"] >= 2
    assert summary["trt-rtx: shapes"]["not run"] >= 1
    for cuda in fake_gpu:
        cuda.assert_nothing_left()


@pytest.mark.slow
def test_verify_says_that_an_artifact_of_an_older_release_has_no_engine_of_its_decode_step(
    cli: Callable[..., Any],
    that_decodes: Path,
    fake_gpu: list[FakeCuda],
    rewrite_manifest: Callable[..., None],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "old"
    shutil.copytree(that_decodes, folder)
    for path in [*folder.glob("engine/*.decode_step.*"), *folder.glob("engine/*.prefill.*")]:
        path.unlink()
    engines = json.loads((folder / "manifest.json").read_text())["engines"]
    rewrite_manifest(folder, engines=engines[:1])
    result = cli("verify", folder, "--runtime", "trt-rtx", "--json")
    assert result.code == 0, result.err
    (check,) = [check for check in result.json["checks"] if check["name"] == "trt-rtx: decode step"]
    assert (check["status"], "no trt-rtx engine of its decode step" in check["reason"]) == ("not run", True)
    with pytest.raises(UserError, match=r"no trt-rtx engine of decode_step\.onnx, because an older effexport built it"):
        effexport.load_decoder(folder, runtime="trt-rtx")
