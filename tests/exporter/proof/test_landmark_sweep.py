"""Nyström attention with many landmarks is proven: of correct graphs, rounding refuses none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import effexport
from effexport.models import attention_from_spec
from effexport.models.variants.nystrom import NystromSpec

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
# Where the error of the pseudo-inverse was largest: few tokens for each landmark.
SLOW = [(256, 0, True)]
SWEEP = [(m, seed, initial) for m in (64, 128, 200, 256, 384, 512) for seed in range(5) for initial in (True, False)]
CASES = [
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    *(pytest.param(*case, marks=pytest.mark.soak) for case in SWEEP if case not in SLOW),
]


@pytest.mark.parametrize(("landmarks", "seed", "initial"), CASES)
def test_a_layer_with_many_landmarks_is_proven(landmarks: int, seed: int, initial: bool, tmp_path: Path) -> None:
    """initial: the weights that PyTorch's layers begin with, at which attention is nearly uniform; else those that a
    build draws, at which it is sharper."""
    weights = None
    if initial:
        torch.manual_seed(seed)
        weights = tmp_path / "initial.safetensors"
        save_file(attention_from_spec(NystromSpec(num_landmarks=landmarks)).state_dict(), weights)
    result = effexport.build(
        variant="nystrom",
        scope="attention",
        num_landmarks=landmarks,
        seed=seed,
        weights=weights,
        output=tmp_path / "out",
    )
    assert result.report.verdict == "passed"
