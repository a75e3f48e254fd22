"""The behaviour of published checkpoints exports too, and its reports say what it gives up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import effexport
from effexport.base.errors import UserError
from effexport.base.spec import build_spec_from_options
from effexport.pipeline.build import artifact_from_spec

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
SMALL = {"dim": 32, "heads": 2, "seq_len": 64}
NYSTROM = {
    "variant": "nystrom",
    "segment_means_seq_len": 64,
    "mask_landmarks": False,
    "pinv_init": "global",
    "conv_kernel_size": 5,
}
FAITHFUL: dict[str, dict[str, Any]] = {
    "nystrom": NYSTROM | {"num_landmarks": 8},
    "nystrom that is softmax": NYSTROM | {"num_landmarks": 64},
    "nystrom of nystrom-attention": {"variant": "nystrom", "num_landmarks": 24, "convention": "nystrom-attention"},
    "nystrom of xformers": {"variant": "nystrom", "num_landmarks": 24, "convention": "xformers"},
    "lsh encoder": {"variant": "lsh", "chunk_length": 16, "circular": True, "mask_constants": "hf"},
    "lsh decoder": {
        "variant": "lsh",
        "chunk_length": 16,
        "circular": True,
        "mask_constants": "hf",
        "causal": True,
        "num_hashes": 3,
        "num_buckets": (2, 4),
    },
    "lsh of reformer-pytorch": {
        "variant": "lsh",
        "chunk_length": 16,
        "circular": True,
        "mask_constants": "hf",
        "self_logit": -5e4,
        "scaled_keys": True,
        "buckets_by_length": True,
        "rotations_per_head": False,
        "pad_bucket": "hashed",
        "attend_across_buckets": False,
        "allow_duplicates": False,
        "rotary": True,
    },
}


# one of each family and package; every field of the others has a test of its layer in tests/models
FAST = ("nystrom", "nystrom of nystrom-attention", "lsh decoder")


@pytest.mark.parametrize("around", ["attention", pytest.param("encoder", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in FAST else pytest.mark.soak)
        for name, options in FAITHFUL.items()
    ],
)
def test_a_faithful_spec_builds_and_says_that_batch_invariance_does_not_hold(
    options: dict[str, Any], around: str, tmp_path: Path
) -> None:
    spec = build_spec_from_options(SMALL | options | {"scope": around}, None)
    _, report = artifact_from_spec(spec, tmp_path / "artifact")
    assert report.verdict == "passed"
    invariance = [check for check in report.checks if check.name == "batch invariance"]
    assert invariance
    assert {check.status for check in invariance} == {"not run"}
    assert {check.reason for check in invariance} == {spec.model.why_not_invariant} != {""}


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "linear", "causal": True},
        pytest.param({"variant": "softmax"}, marks=pytest.mark.soak),
        pytest.param({"variant": "nystrom", "num_landmarks": 8}, marks=pytest.mark.soak),
        pytest.param({"variant": "lsh", "chunk_length": 16}, marks=pytest.mark.slow),
    ],
    ids=lambda options: options["variant"],
)
def test_rotary_positions_are_exported_with_the_same_operators(options: dict[str, Any], tmp_path: Path) -> None:
    spec = build_spec_from_options(SMALL | options | {"rotary": True, "scope": "attention"}, None)
    _, report = artifact_from_spec(spec, tmp_path / "artifact")
    assert report.verdict == "passed"
    assert spec.model.custom_ops(fused=True)
    assert not (tmp_path / "artifact" / "decode_step.onnx").exists()


def test_a_global_scale_with_masked_landmarks_accepts_any_length(tmp_path: Path) -> None:
    options = {"variant": "nystrom", "num_landmarks": 8, "pinv_init": "global", "scope": "attention"}
    _, report = artifact_from_spec(build_spec_from_options(SMALL | options, None), tmp_path / "artifact")
    assert report.verdict == "passed"
    assert len({check.case for check in report.checks}) >= 4


def test_a_model_tied_to_one_length_refuses_another(tmp_path: Path) -> None:
    spec = build_spec_from_options(SMALL | FAITHFUL["nystrom"] | {"scope": "attention"}, None)
    artifact_from_spec(spec, tmp_path / "artifact")
    with (
        effexport.load(tmp_path / "artifact") as runner,
        pytest.raises(UserError, match=r"is float32 \[1, 63, 32\]; expected hidden_states float32 \[batch, 64, 32\]"),
    ):
        runner.run({"hidden_states": np.zeros((1, 63, 32), np.float32)})
