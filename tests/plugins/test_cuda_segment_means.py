"""The CUDA kernel of effexport::SegmentMeans, emulated."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
import torch
from cuda_kernels import ALL_BLOCKS, DTYPES, Emulated, assert_guard_is_intact, guarded

FLOAT32 = np.dtype(np.float32)
HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# Of one rounding of the result.
ROUNDING = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}


class EmulatedSegmentMeans(Emulated):
    op = "segment_means"

    def __init__(self) -> None:
        super().__init__()
        for name in DTYPES.values():
            getattr(self.library, f"segment_means_{name}").argtypes = [ctypes.c_void_p] * 2

    def means(
        self, x: np.ndarray, keep: np.ndarray, segments: int, *, seed: int = 0, max_blocks: int = ALL_BLOCKS
    ) -> np.ndarray:
        batch, heads, seq, channels = x.shape
        sizes = (ctypes.c_int64 * 5)(batch * heads, heads, seq, channels, segments)
        means, whole = guarded((batch, heads, segments, channels), x.dtype)
        assert x.flags.c_contiguous
        assert keep.flags.c_contiguous
        pointers = (ctypes.c_void_p * 3)(*(array.ctypes.data for array in (x, keep, means)))
        self.library.set_schedule(seed, max_blocks)
        assert getattr(self.library, f"segment_means_{DTYPES[x.dtype]}")(sizes, pointers) == 0
        assert_guard_is_intact(whole)
        return means


@pytest.fixture(scope="module")
def emulated() -> EmulatedSegmentMeans:
    return EmulatedSegmentMeans()


def make_inputs(seq: int, channels: int, dtype: np.dtype = FLOAT32) -> tuple[np.ndarray, np.ndarray]:
    """x and keep of three samples of two heads. Hidden tokens hold NaN: a third of all, the last fifth of the second
    sample, all of the third."""
    random = np.random.default_rng((seq, channels))
    x = random.standard_normal((3, 2, seq, channels))
    keep = random.random((3, seq)) < 0.66
    keep[1, seq - seq // 5 :] = False
    keep[2] = False
    x[np.broadcast_to(~keep[:, None, :, None], x.shape)] = np.nan
    return x.astype(dtype), keep


def formula(x: np.ndarray, keep: np.ndarray, segments: int, dtype: torch.dtype = torch.float64) -> np.ndarray:
    """The operator's definition, in one type throughout."""
    result = np.zeros((*x.shape[:2], segments, x.shape[3]))
    values = torch.from_numpy(x.astype(np.float64)).to(dtype)
    for sample, kept in enumerate(keep):
        length = int(kept.nonzero()[0][-1]) + 1 if kept.any() else 0
        segment = -(-length // segments)
        for j in range(segments):
            tokens = [t for t in range(j * segment, min((j + 1) * segment, length)) if kept[t]]
            if tokens:
                result[sample, :, j] = values[sample][:, tokens].mean(dim=1).to(torch.float64).numpy()
    return result


def largest_error(means: np.ndarray, exact: np.ndarray) -> float:
    difference = np.abs(means.astype(np.float64) - exact)
    assert np.isfinite(difference).all()
    return float(difference.max(initial=0))


# tokens, channels, segments: no tokens; more segments than tokens; rows that are not multiples of 16 bytes; more than
# one block of channels; masks that are searched in more than one step
SIZES = [(0, 5, 3), (1, 1, 1), (1, 16, 9), (5, 15, 3), (63, 64, 16), (300, 100, 7), (4500, 3, 2)]


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_computes_the_formula(
    emulated: EmulatedSegmentMeans, size: tuple[int, int, int], dtype: np.dtype
) -> None:
    seq, channels, segments = size
    inputs = make_inputs(seq, channels, dtype)
    exact = formula(*inputs, segments)
    # a thread adds up at most 282 values, of either sign, and then 16 such sums are added up: roundings of 6e-8 each,
    # of sums that the division makes smaller; and one rounding of the result
    limit = 1e-6 + ROUNDING[dtype.name] * np.abs(exact).max(initial=0)
    assert largest_error(emulated.means(*inputs, segments), exact) <= limit


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", [(63, 64, 4), (300, 24, 7)], ids=str)
def test_half_types_err_by_at_most_twice_the_error_of_pytorch_in_them(
    emulated: EmulatedSegmentMeans, size: tuple[int, int, int], dtype: np.dtype
) -> None:
    seq, channels, segments = size
    inputs = make_inputs(seq, channels, dtype)
    exact = formula(*inputs, segments)
    theirs = largest_error(formula(*inputs, segments, getattr(torch, dtype.name)), exact)
    assert largest_error(emulated.means(*inputs, segments), exact) <= 2 * theirs


@pytest.mark.requires("native")
def test_the_length_of_a_sample_is_found_behind_any_padding(emulated: EmulatedSegmentMeans) -> None:
    """Segments of the same length and with the same tokens have the same means, in the same bits."""
    x, _ = make_inputs(6000, 4)
    x = np.where(np.isnan(x), 0.5, x).astype(np.float32)
    # a step of the search covers 2048 tokens, and a thread of it 16
    for length in (1, 15, 16, 17, 1904, 1905, 3952, 3953, 5999, 6000):
        keep = np.zeros((3, 6000), bool)
        keep[:, length - 1] = True
        means = emulated.means(x, keep, 3)
        segment = -(-length // 3)
        expected = np.zeros_like(means)
        expected[:, :, (length - 1) // segment] = x[:, :, length - 1]
        np.testing.assert_array_equal(means, expected, str(length))


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("seed", "max_blocks"), [(1, 1), (2, 3), (1000, ALL_BLOCKS)])
def test_the_result_depends_neither_on_the_schedule_nor_on_the_grid(
    emulated: EmulatedSegmentMeans, seed: int, max_blocks: int, dtype: np.dtype
) -> None:
    inputs = make_inputs(300, 72, dtype)
    again = emulated.means(*inputs, 7, seed=seed, max_blocks=max_blocks)
    np.testing.assert_array_equal(again, emulated.means(*inputs, 7))


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_may_begin_at_any_element(emulated: EmulatedSegmentMeans, dtype: np.dtype) -> None:
    x, keep = make_inputs(64, 64, dtype)
    shifted = []
    for array in (x, keep):
        whole = np.zeros(array.size + 1, array.dtype)
        whole[1:] = array.ravel()
        shifted.append(whole[1:].reshape(array.shape))
    np.testing.assert_array_equal(emulated.means(shifted[0], shifted[1], 5), emulated.means(x, keep, 5))


@pytest.mark.requires("native")
def test_nan_reaches_its_channel_of_its_segment_and_no_further(emulated: EmulatedSegmentMeans) -> None:
    x, keep = make_inputs(100, 70)
    x[np.isnan(x)] = 0
    keep[...] = True
    x[0, 1, 60, 66] = np.nan
    found = np.isnan(emulated.means(x, keep, 4))
    expected = np.zeros_like(found)
    expected[0, 1, 2, 66] = True
    np.testing.assert_array_equal(found, expected)


@pytest.mark.requires("native")
@pytest.mark.parametrize(
    "sizes", [(2**31, 1, 4, 8, 3), (1, 1, 2**31 - 1, 8, 3), (1, 1, 4, 8, 2**31), (2**30, 1, 4, 8, 2)]
)
def test_what_the_kernel_cannot_count_is_refused(emulated: EmulatedSegmentMeans, sizes: tuple[int, ...]) -> None:
    assert emulated.library.segment_means_float32((ctypes.c_int64 * 5)(*sizes), (ctypes.c_void_p * 3)()) == 1
