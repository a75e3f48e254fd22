"""Codes and scales: numpy, which the proof stores, and PyTorch, which is the reference, give the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from effexport.quantize.rounding import codes_of, numbers_of, rounded_rows, steps_apart

pytestmark = pytest.mark.requires("torch")


def numbers(seed: int = 0) -> np.ndarray:
    """Rows of several magnitudes, with zeros, ties and a row of zeros."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((40, 3, 64)) * 10.0 ** rng.integers(-30, 20, (40, 3, 1))).astype(np.float32)
    x[0] = 0
    x[1, 0] = np.arange(64) - 31.5
    return x


def test_rows_are_rounded_as_in_pytorch() -> None:
    import torch
    from torch import nn

    from effexport.quantize.modules import RoundedLinear

    x = numbers()
    codes, scales = rounded_rows(x)
    layer = RoundedLinear(nn.Linear(64, 16), None, "int8")
    assert np.array_equal(numbers_of(codes, "int8", scales), layer.rounded(torch.from_numpy(x)).numpy())
    assert np.abs(codes[2:].astype(int)).max(axis=-1).min() == 127


@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16"])
def test_static_codes_are_those_of_pytorch(precision: str) -> None:
    import torch

    from effexport.quantize.modules import rounded

    x = np.concatenate([np.linspace(-3, 3, 4001), [0.5, 1.5, 2.5, -0.5, 1e-9, 500, -500]]).astype(np.float32)
    scale = np.float32(1 if precision == "bf16" else 0.02)
    expected = rounded(torch.from_numpy(x), torch.tensor(scale), precision).numpy()
    assert np.array_equal(numbers_of(codes_of(x, precision, scale), precision, scale), expected)


def test_what_was_rounded_once_is_rounded_to_itself() -> None:
    codes, scales = rounded_rows(numbers())
    again, _ = rounded_rows(numbers_of(codes, "int8", scales))
    assert np.array_equal(again, codes)


def test_neighbouring_codes_are_one_step_apart() -> None:
    import ml_dtypes

    assert steps_apart(np.array([-1, 5], np.int8), np.array([0, 7], np.int8), "int8").tolist() == [1, 2]
    finite = np.arange(256, dtype=np.uint8)
    finite = finite[np.isfinite(finite.view(ml_dtypes.float8_e4m3fn).astype(np.float32))]
    in_order = finite[np.argsort(finite.view(ml_dtypes.float8_e4m3fn).astype(np.float32), kind="stable")]
    steps = steps_apart(in_order[1:], in_order[:-1], "fp8")
    assert set(steps.tolist()) == {0, 1}  # 0 between the two zeros
    assert np.count_nonzero(steps == 0) == 1


def test_steps_of_bfloat16_count_beside_the_errors_of_sums() -> None:
    """Numbers of about 1: one step is 2^-8 to 2^-7 of them, and what sums may be apart is 3e-5."""

    def steps(*pairs: tuple[float, float]) -> list[int]:
        ours, theirs = (codes_of(np.array(x, np.float32), "bf16", 1) for x in zip(*pairs, (1.0, 1.0), strict=True))
        found: list[int] = steps_apart(ours, theirs, "bf16")[:-1].tolist()
        return found

    assert steps((1, 1), (1, 1 + 2**-7), (1 + 2**-7, 1), (1, 1 - 2**-8), (1.9921875, 2)) == [0, 1, 1, 1, 1]
    assert steps((1, 1 + 2**-6), (1, 1 - 2**-7), (-1, 1)) == [2, 1, 256]
    assert steps((5e-6, -5e-6), (0, 1e-6), (0, 0)) == [0, 0, 0]
    assert steps((1e-3, -1e-3))[0] > 1
    assert steps((0, 1e-3), (1, 0)) != [0, 0]
