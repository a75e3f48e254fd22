"""Trained weights in exported files: the answers of PyTorch, and none of the usual limits loosened.

The weights beside this file were trained by scripts/train_proof.py; docs/trained.md has the results of larger ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import effexport
from scripts.train_proof import held_out_arrays
from scripts.training.experiments import EXPERIMENTS

WEIGHTS = Path(__file__).parent
TEXT = WEIGHTS.parents[1] / "README.md"
# Of bits per byte. fp16 rounds every value to 11 bits; over thousands of answers that evens out.
EQUAL_TO_4_DECIMALS, OF_FP16 = 5e-5, 1e-3


def build(name: str, folder: Path, other: str = "", precision: str = "fp32") -> Path:
    spec = EXPERIMENTS[name].spec(other, precision)
    effexport.build(spec, folder, weights=WEIGHTS / f"{name}.safetensors")
    return folder


@pytest.mark.slow
def test_a_model_trained_with_four_hash_rounds_duplicates_with_other_rounds_of_the_same_weights(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["duplication-64-lsh-4"]
    data = held_out_arrays(experiment.task(tmp_path), 100)
    accuracies = []
    for rounds in ("LSH-8", "LSH-4", "LSH-1"):
        artifact = build(experiment.name, tmp_path / rounds, rounds)
        weights = WEIGHTS / f"{experiment.name}.safetensors"
        found = effexport.evaluate(artifact, data, compare="torch", weights=weights)
        assert found.comparison is not None
        assert found.comparison.changes.count == 0  # identical rotations
        accuracies.append(found.figure("accuracy").value)
    eight, four, one = accuracies
    assert min(eight, four) >= 0.99
    assert one < 0.98


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param("tiny-lsh", "fp32", marks=pytest.mark.slow),
        pytest.param("tiny-lsh", "fp16", marks=pytest.mark.soak),
        *(
            pytest.param(name, precision, marks=pytest.mark.soak)
            for name in ("tiny-linear", "tiny-nystrom", "tiny-aft-conv")
            for precision in ("fp32", "fp16")
        ),
    ],
)
def test_a_trained_language_model_has_the_bits_per_byte_of_pytorch(name: str, precision: str, tmp_path: Path) -> None:
    artifact, weights = build(name, tmp_path / "built", precision=precision), WEIGHTS / f"{name}.safetensors"
    text = tmp_path / "text"
    text.write_bytes(TEXT.read_bytes()[: 16 * 512])
    found = effexport.evaluate(artifact, text, compare="torch", weights=weights)
    assert found.comparison is not None
    expected, differences = (
        {one.name: one.value for one in estimates}
        for estimates in (found.comparison.estimates, found.comparison.differences)
    )
    bits, difference = expected["loss"] / np.log(2), differences["loss"] / np.log(2)
    assert bits < 5  # without any knowledge: 8
    assert abs(difference) < (EQUAL_TO_4_DECIMALS if precision == "fp32" else OF_FP16 * bits)
    assert effexport.verify(artifact, weights=weights, data=text).verdict == "passed"
