"""The CUDA kernel of effexport::SequenceConv, emulated."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import ALL_BLOCKS, DTYPES, Emulated, assert_guard_is_intact, guarded

FLOAT32 = np.dtype(np.float32)
HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# Of one rounding of the result.
ROUNDING = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}


class EmulatedSequenceConv(Emulated):
    op = "sequence_conv"

    def __init__(self, *options: str) -> None:
        super().__init__(*options)
        for name in DTYPES.values():
            getattr(self.library, f"sequence_conv_{name}").argtypes = [ctypes.c_void_p] * 2

    def convolve(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        keep: np.ndarray,
        residual: np.ndarray,
        *,
        seed: int = 0,
        max_blocks: int = ALL_BLOCKS,
    ) -> np.ndarray:
        batch, heads, seq, channels = x.shape
        sizes = (ctypes.c_int64 * 5)(batch * heads, heads, seq, channels, weight.shape[2])
        out, whole = guarded(x.shape, x.dtype)
        arrays = [x, weight, keep, residual, out]
        assert all(array.flags.c_contiguous for array in arrays)
        pointers = (ctypes.c_void_p * 5)(*(array.ctypes.data for array in arrays))
        self.library.set_schedule(seed, max_blocks)
        assert getattr(self.library, f"sequence_conv_{DTYPES[x.dtype]}")(sizes, pointers) == 0
        assert_guard_is_intact(whole)
        return out


@pytest.fixture(scope="module")
def emulated() -> EmulatedSequenceConv:
    return EmulatedSequenceConv()


@pytest.fixture(scope="module")
def emulated_sm_75() -> EmulatedSequenceConv:
    """Without asynchronous copies, and without tensor cores for bfloat16."""
    return EmulatedSequenceConv("-DEFFEXPORT_EMULATED=750")


def make_inputs(seq: int, channels: int, taps: int, dtype: np.dtype = FLOAT32) -> list[np.ndarray]:
    """Two samples of two heads. A third of the tokens is hidden and holds NaN in x; the last sample has no other."""
    random = np.random.default_rng((seq, channels, taps))
    x, residual = random.standard_normal((2, 2, 2, seq, channels))
    weight = random.standard_normal((2, 1, taps, 1)) / taps**0.5
    keep = random.random((2, seq)) < 0.66
    keep[-1] = False
    x[np.broadcast_to(~keep[:, None, :, None], x.shape)] = np.nan
    return [x.astype(dtype), weight.astype(dtype), keep, residual.astype(dtype)]


def formula(inputs: list[np.ndarray], dtype: torch.dtype = torch.float64) -> np.ndarray:
    """The operator's definition through PyTorch's convolution, computed in one type throughout."""
    x, weight, residual = (torch.from_numpy(inputs[i].astype(np.float64)).to(dtype) for i in (0, 1, 3))
    kept = torch.where(torch.from_numpy(inputs[2])[:, None, :, None], x, 0)
    convolved = F.conv2d(kept, weight, padding=(weight.shape[2] // 2, 0), groups=weight.shape[0])
    return (residual + convolved).to(torch.float64).numpy()


def largest_error(out: np.ndarray, exact: np.ndarray) -> float:
    difference = np.abs(out.astype(np.float64) - exact)
    assert np.isfinite(difference).all()
    return float(difference.max())


# tokens, channels, taps: filters longer than the sequence; rows that are not multiples of 16 bytes; more than one block
# of tokens, of channels, and more than one window of rows
SIZES = [(1, 1, 1), (1, 16, 65), (63, 33, 3), (64, 64, 65), (130, 72, 63), (17, 8, 201), (70, 100, 129)]


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_computes_the_formula(
    emulated: EmulatedSequenceConv,
    emulated_sm_75: EmulatedSequenceConv,
    size: tuple[int, int, int],
    dtype: np.dtype,
) -> None:
    inputs = make_inputs(*size, dtype)
    exact = formula(inputs)
    # additions of one product per tap in float32, of either sign, with roundings of at most 6e-8 of the largest sum
    limit = (4e-6 + ROUNDING[dtype.name]) * np.abs(exact).max()
    for kernels in (emulated, emulated_sm_75):
        assert largest_error(kernels.convolve(*inputs), exact) <= limit


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", [(64, 64, 65), (130, 72, 33), (100, 24, 129)], ids=str)
def test_half_types_err_by_at_most_twice_the_error_of_pytorch_in_them(
    emulated: EmulatedSequenceConv, size: tuple[int, int, int], dtype: np.dtype
) -> None:
    inputs = make_inputs(*size, dtype)
    exact = formula(inputs)
    theirs = largest_error(formula(inputs, getattr(torch, dtype.name)), exact)
    assert largest_error(emulated.convolve(*inputs), exact) <= 2 * theirs


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("seed", "max_blocks"), [(1, 1), (2, 3), (1000, ALL_BLOCKS)])
def test_the_result_depends_neither_on_the_schedule_nor_on_the_grid(
    emulated: EmulatedSequenceConv, seed: int, max_blocks: int, dtype: np.dtype
) -> None:
    inputs = make_inputs(100, 72, 5, dtype)
    again = emulated.convolve(*inputs, seed=seed, max_blocks=max_blocks)
    np.testing.assert_array_equal(again, emulated.convolve(*inputs))


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_may_begin_at_any_element(emulated: EmulatedSequenceConv, dtype: np.dtype) -> None:
    inputs = make_inputs(65, 64, 9, dtype)
    shifted = []
    for array in inputs:
        whole = np.zeros(array.size + 1, array.dtype)
        whole[1:] = array.ravel()
        shifted.append(whole[1:].reshape(array.shape))
    np.testing.assert_array_equal(emulated.convolve(*shifted), emulated.convolve(*inputs))


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_reaches_its_channel_half_a_filter_and_30_tokens_around_it(
    emulated: EmulatedSequenceConv, dtype: np.dtype
) -> None:
    x, weight, keep, residual = make_inputs(200, 70, 9, dtype)
    keep[...] = True
    x[np.isnan(x)] = 0
    x[0, 1, 100, 66] = np.nan
    found = np.isnan(emulated.convolve(x, weight, keep, residual))
    assert found[0, 1, 96:105, 66].all()
    # a warp multiplies 16 tokens with whole slices of 16 rows
    found[0, 1, 96 - 30 : 105 + 30, 66] = False
    assert not found.any()


@pytest.mark.requires("native")
@pytest.mark.parametrize(
    "sizes",
    [(2**31, 1, 4, 8, 3), (1, 1, 2**31 - 1, 8, 3), (1, 1, 4, 8, 2**31 - 1), (2**30, 1, 4, 200, 3)],
)
def test_what_the_kernel_cannot_count_is_refused(emulated: EmulatedSequenceConv, sizes: tuple[int, ...]) -> None:
    assert emulated.library.sequence_conv_float32((ctypes.c_int64 * 5)(*sizes), (ctypes.c_void_p * 5)()) == 1
