"""The parity check of engines. Engines are built for real by TensorRT-RTX; since running one takes a GPU, ONNX Runtime
answers in its place, from the model that the engine was built from. What is tested is thus our side of the check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from fused_operators import FUSED

from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.export.onnx_graph import model_digest
from effexport.proof.candidate import spec_with_given_buckets
from effexport.proof.cases import load_reference
from effexport.proof.check import Kind, passed
from effexport.proof.verify import Verification, if_it_runs, verify_engine
from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import FeedLimits
from effexport.tensorrt.engine_from_onnx import engine_from_onnx
from effexport.tensorrt.runner import decoder_in_trt
from effexport.tensorrt.sidecar import check_model, check_runs_here, read_sidecar
from effexport.tensorrt.spec import EngineSpec, profiles_from_texts

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "rtx"), pytest.mark.usefixtures("kept_traces")]
Built = Callable[..., Artifact]


class StandIn(OrtRunner):
    """ONNX Runtime on the model beside or above the engine, within the profiles of its sidecar. damage: of outputs."""

    damage = 0.0
    engines: ClassVar[list[str]] = []

    def __init__(self, engine: Path, *, limits: FeedLimits | None = None, onnx_sha256: str | None = None) -> None:
        self.info = read_sidecar(engine)
        if onnx_sha256 is not None:
            check_model(engine, self.info, onnx_sha256)
        beside = engine.parent / "model.onnx"
        super().__init__(beside if beside.is_file() else self.model_of_artifact, RunOptions(implementation="body"))
        assert [t.name for t in self.inputs] == [t.name for t in self.info.inputs]
        assert [t.name for t in self.outputs] == [t.name for t in self.info.outputs]
        self.implementation = dict(self.info.implementation)
        StandIn.engines.append(engine.name)

    model_of_artifact = Path()

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        inside = [
            all(
                low <= size <= high
                for name, value in feeds.items()
                for low, size, high in zip(profile[name][0], value.shape, profile[name][2], strict=True)
            )
            for profile in self.info.profiles
        ]
        assert any(inside), f"{ {name: value.shape for name, value in feeds.items()} } is outside the profiles"
        return {name: self._damaged(value) for name, value in super().run(feeds).items()}

    def _damaged(self, value: Any) -> Any:
        if value.dtype.kind != "f":
            return value
        return (value + StandIn.damage * np.sqrt(np.mean(np.square(value)))).astype(value.dtype)


class InBuild(StandIn):
    """For an engine inside an artifact, which has a temporary name during its build."""

    def __init__(self, engine: Path, **options: Any) -> None:
        if engine.parent.name == "engine":
            StandIn.model_of_artifact = engine.parent.parent / "model.onnx"
        super().__init__(engine, **options)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    """As if this machine had a GPU."""
    module: Any = SimpleNamespace(TrtRunner=StandIn, decoder_in_trt=decoder_in_trt)
    monkeypatch.setitem(sys.modules, "effexport.tensorrt.runner", module)
    monkeypatch.setattr("effexport.tensorrt.engine_from_onnx.inspected", lambda api, info, *rest: info)
    monkeypatch.setattr(StandIn, "damage", 0.0)
    monkeypatch.setattr(StandIn, "engines", [])
    return StandIn


def engine_of(artifact: Artifact, folder: Path, *texts: str) -> Path:
    path = folder / "trt-rtx.engine"
    StandIn.model_of_artifact = artifact.model_path
    spec = EngineSpec(target="trt-rtx", profiles=profiles_from_texts(texts, artifact.spec))
    engine_from_onnx(artifact.model_path, spec, path, precision=artifact.spec.precision)
    return path


def verified(artifact: Artifact, engine: Path) -> Verification:
    cases = load_reference(artifact.reference_path)
    hashes = artifact.manifest.hash_values
    return verify_engine(engine, artifact.model_path, cases, artifact.spec, hashes)


def test_an_engine_passes_every_check_of_its_model(built: Built, stand_in: type[StandIn], tmp_path: Path) -> None:
    artifact = built("softmax", "encoder")
    checks = verified(artifact, engine_of(artifact, tmp_path)).checks
    assert {check.status for check in checks} == {"passed"}
    assert all(check.name.startswith("trt-rtx: ") for check in checks)
    assert {"trt-rtx: arithmetic", "trt-rtx: batch invariance"} <= {check.name for check in checks}


@pytest.mark.slow
def test_a_model_that_hashes_is_compared_with_identical_buckets_in_a_second_engine(
    built: Built, stand_in: type[StandIn], tmp_path: Path
) -> None:
    artifact = built("lsh", "encoder")
    checks = verified(artifact, engine_of(artifact, tmp_path)).checks
    assert stand_in.engines == ["trt-rtx.engine", "given.engine"]
    assert {check.status for check in checks} == {"passed"}
    names = {check.name for check in checks}
    assert {"trt-rtx: arithmetic with identical buckets", "trt-rtx: bucket agreement", "trt-rtx: free run"} <= names


def test_the_second_engine_takes_one_row_per_sample_head_and_round_in_whole_chunks(
    built: Built, stand_in: type[StandIn], tmp_path: Path
) -> None:
    artifact = built("lsh", "encoder")
    info = read_sidecar(engine_of(artifact, tmp_path, "batch=1:2:3,seq=1:50:64"))
    (profile,) = spec_with_given_buckets(info, artifact.spec, ["x"]).profiles
    # 2 heads, 2 rounds, chunks of 16
    assert str(profile) == "batch=1:2:3,seq=1:50:64,rows of x=4:8:12,padded of x=16:64:64"


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_a_reformer_with_chunks_of_two_sizes_gets_its_second_engine_too(
    cli: Callable[..., Any], stand_in: type[StandIn], tmp_path: Path
) -> None:
    import torch
    from transformers import ReformerConfig, ReformerModel

    torch.manual_seed(0)
    config = ReformerConfig(
        attn_layers=["lsh", "local"],
        hidden_size=32,
        num_attention_heads=2,
        attention_head_size=16,
        feed_forward_size=32,
        axial_pos_shape=(8, 16),
        axial_pos_embds_dim=(16, 16),
        num_buckets=8,
        num_hashes=2,
        lsh_attn_chunk_length=16,
        local_attn_chunk_length=32,
        is_decoder=False,
        vocab_size=50,
        max_position_embeddings=128,
        hash_seed=0,
    )
    ReformerModel(config).save_pretrained(tmp_path / "checkpoint")
    sys.modules["effexport.tensorrt.runner"].TrtRunner = InBuild  # type: ignore[attr-defined]
    engine = ("--target", "trt-rtx", "--verbose")
    result = cli("build", "--checkpoint", tmp_path / "checkpoint", *engine, "-o", tmp_path / "out")
    assert result.code == 0, result.err
    assert "trt-rtx: arithmetic with identical buckets" in result.out
    assert stand_in.engines == ["trt-rtx.engine", "given.engine"]


def test_an_engine_that_computes_something_else_fails(built: Built, stand_in: type[StandIn], tmp_path: Path) -> None:
    artifact = built("softmax", "encoder")
    engine = engine_of(artifact, tmp_path)
    stand_in.damage = 1e-3
    checks = verified(artifact, engine).checks
    assert not passed(checks)
    failed = {check.name for check in checks if check.status == "failed"}
    assert failed == {"trt-rtx: arithmetic", "trt-rtx: overall error"}


def test_cases_outside_the_profiles_are_said_and_the_others_are_run(
    built: Built, stand_in: type[StandIn], tmp_path: Path
) -> None:
    artifact = built("linear", "encoder")
    checks = verified(artifact, engine_of(artifact, tmp_path, "batch=3,seq=1:64:64")).checks
    ran = {check.case for check in checks if check.status == "passed"}
    assert {str(label) for label in ran} == {"padded batch: 3 × 64, padded"}
    outside = {check.case for check in checks if check.status == "not run" and check.name == "trt-rtx: shapes"}
    assert outside == {case.label for case in load_reference(artifact.reference_path)} - ran
    (invariance,) = [check for check in checks if check.name == "trt-rtx: batch invariance"]
    assert invariance.reason == "sample 0 on its own is outside the shapes that the model was built for"


def test_an_engine_of_another_model_is_refused(built: Built, stand_in: type[StandIn], tmp_path: Path) -> None:
    engine = engine_of(built("softmax", "encoder"), tmp_path)
    with pytest.raises(UserError, match=r"was built from another model\.onnx"):
        verified(built("linear", "encoder"), engine)


def test_a_build_without_a_gpu_says_that_the_engine_was_not_run(built: Built, tmp_path: Path) -> None:
    artifact = built("softmax", "encoder")
    engine = engine_of(artifact, tmp_path)
    (check,) = if_it_runs(Kind.PARITY, "trt-rtx", lambda: verified(artifact, engine)).checks
    assert (check.name, check.status) == ("trt-rtx: parity", "not run")
    assert "effexport verify ARTIFACT --runtime trt-rtx" in check.reason


def test_a_build_on_a_gpu_that_the_engine_is_not_for_says_so_and_goes_on(
    built: Built, stand_in: type[StandIn], tmp_path: Path
) -> None:
    artifact = built("softmax", "encoder")
    engine = engine_of(artifact, tmp_path)

    class OfAnotherGpu(StandIn):
        def __init__(self, engine: Path, **options: Any) -> None:
            check_runs_here(engine, replace(read_sidecar(engine), compute_capabilities=(89,)), "1.7.1.116", 90)

    sys.modules["effexport.tensorrt.runner"].TrtRunner = OfAnotherGpu  # type: ignore[attr-defined]
    (check,) = if_it_runs(Kind.PARITY, "trt-rtx", lambda: verified(artifact, engine)).checks
    assert check.status == "not run"
    assert "not run: it was built for SM 89, and this GPU is SM 90" in check.reason
    assert str(tmp_path) not in check.reason


def test_verify_on_the_command_line_runs_the_engine(
    cli: Callable[..., Any], stand_in: type[StandIn], tmp_path: Path
) -> None:
    small = ("--dim", "32", "--heads", "2", "--layers", "1", "--seq-len", "64")
    sys.modules["effexport.tensorrt.runner"].TrtRunner = InBuild  # type: ignore[attr-defined]
    built = cli("build", "--variant", "nystrom", *small, "--target", "trt-rtx", "--verbose", "-o", tmp_path / "out")
    assert built.code == 0, built.err
    assert "trt-rtx: arithmetic" in built.out
    verified = cli("verify", tmp_path / "out", "--runtime", "trt-rtx", "--json")
    assert verified.code == 0, verified.err
    answer = verified.json
    assert answer["passed"]
    assert answer["runtime"] == "trt-rtx"
    assert answer["implementation"] == dict.fromkeys(FUSED["nystrom"], "body")
    assert answer["model"].endswith("engine/trt-rtx.engine")


def test_the_digest_of_a_model_covers_its_external_weights(built: Built, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(built("softmax", "encoder", external_data=True).path, copy)
    before = model_digest(copy / "model.onnx")
    weights = bytearray((copy / "model.onnx.data").read_bytes())
    weights[100] ^= 1
    (copy / "model.onnx.data").write_bytes(weights)
    assert model_digest(copy / "model.onnx") != before
