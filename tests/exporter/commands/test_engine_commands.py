"""Engines on the command line: build, inspect, run and verify, with the errors of a machine without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import effexport
from effexport.artifact import Artifact, open_artifact
from effexport.errors import UserError

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "rtx")
SMALL = ("--dim", "32", "--heads", "2", "--layers", "1", "--seq-len", "64")


@pytest.fixture(scope="module")
def with_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with a TensorRT-RTX engine, built by the command line."""
    from effexport.cli import main

    path = tmp_path_factory.mktemp("engines") / "nystrom"
    with pytest.raises(SystemExit) as stop:
        main(["build", "--variant", "nystrom", *SMALL, "--target", "trt-rtx", "-o", str(path)])
    assert stop.value.code == 0
    return path


def test_a_build_puts_the_engine_into_the_artifact_and_says_that_it_was_not_run(with_engine: Path) -> None:
    artifact = open_artifact(with_engine)
    (entry,) = artifact.manifest.engines
    assert entry.file == "engine/trt-rtx.engine"
    assert entry.implementation == dict.fromkeys(
        ("IterativePinv", "MaskedAttention", "SegmentMeans", "SequenceConv"), "body"
    )
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
    import shutil

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
    for words in ("TensorRT-RTX", "SM 80 and later", "IterativePinv is a body", "MATRIX_MULTIPLY", "compared with the"):
        assert words in result.out
    described = cli("inspect", engine, "--json").json["engine"]
    assert described["target"] == "trt-rtx"
    assert len(described["layers"]) > 100
    assert "engine/trt-rtx.engine" in cli("inspect", with_engine).out


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
        (("--target", "trt-rtx", "--workspace", "4T"), "expected bytes"),
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
    arguments = ("--target", "trt-rtx", "--workspace", "1K")
    message = cli("build", "--variant", "softmax", *SMALL, *arguments, "-o", tmp_path / "out").error(1)
    assert "fits into the workspace" in message
    assert list(tmp_path.iterdir()) == []


def test_runtime_and_implementation_that_contradict_each_other_are_refused(
    cli: Callable[..., Any], built: Callable[..., Artifact], with_engine: Path
) -> None:
    message = cli("verify", with_engine, "--runtime", "trt-rtx", "--implementation", "body").error(2)
    assert "was decided when the engine was built" in message
    model = built("softmax", "encoder").model_path
    message = cli("verify", with_engine, "--runtime", "trt-rtx", "--model", model).error(2)
    assert "--model names an ONNX file" in message
    with pytest.raises(UserError, match="settings and runtime were both given"):
        effexport.load(with_engine, effexport.OrtSettings(), runtime="ort")  # type: ignore[call-overload]
