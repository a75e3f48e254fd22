"""The CUDA kernels of effexport::AFTSimpleAttention, emulated."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from cuda_kernels import ALL_BLOCKS, DTYPES, Emulated, assert_guard_is_intact, guarded


class EmulatedAFTSimple(Emulated):
    op = "aft_simple_attention"

    def __init__(self) -> None:
        super().__init__()
        pointer = ctypes.c_void_p
        self.library.aft_simple_scratch_bytes.argtypes = [pointer]
        self.library.aft_simple_scratch_bytes.restype = ctypes.c_size_t
        for name in DTYPES.values():
            getattr(self.library, f"aft_simple_{name}").argtypes = [pointer] * 4

    def aft_simple(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        keep: np.ndarray,
        *,
        seed: int = 0,
        max_blocks: int = ALL_BLOCKS,
    ) -> np.ndarray:
        batch, heads, seq, channels = q.shape
        sizes = (ctypes.c_int64 * 4)(batch * heads, heads, seq, channels)
        out, whole = guarded(q.shape, q.dtype)
        scratch_bytes = self.library.aft_simple_scratch_bytes(sizes)
        scratch, whole_scratch = guarded((scratch_bytes // 4,), np.dtype(np.float32))
        self.library.set_schedule(seed, max_blocks)
        arrays = [np.ascontiguousarray(x) for x in (q, k, v, keep)]
        pointers = (ctypes.c_void_p * 4)(*(x.ctypes.data for x in arrays))
        function = getattr(self.library, f"aft_simple_{DTYPES[q.dtype]}")
        assert function(pointers, sizes, scratch.ctypes.data, out.ctypes.data) == 0
        assert_guard_is_intact(whole)
        assert_guard_is_intact(whole_scratch)
        return out


@pytest.fixture(scope="module")
def emulated() -> EmulatedAFTSimple:
    return EmulatedAFTSimple()


def aft_inputs(shape: tuple[int, int, int, int], dtype: type = np.float32) -> tuple[np.ndarray, ...]:
    """Random inputs with keys far apart; a third of the tokens is padding that holds NaN."""
    batch, _, seq, _ = shape
    random = np.random.default_rng(shape[2] * 1000 + shape[3])
    keep = random.random((batch, seq)) < 0.66
    hidden = ~keep[:, None, :, None]
    q, k, v = (scale * random.standard_normal(shape) for scale in (3, 30, 1))
    return (q.astype(dtype), np.where(hidden, np.nan, k).astype(dtype), np.where(hidden, np.nan, v).astype(dtype), keep)


def exact_aft(q: np.ndarray, k: np.ndarray, v: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """σ(q) Σ softmax(k) v over the visible tokens, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    visible = np.broadcast_to(keep[:, None, :, None], k.shape)
    top = np.where(visible, k, -1e30).max(axis=2, keepdims=True)
    weight = np.where(visible, np.exp(k - top), 0)
    n, d = (x.sum(axis=2, keepdims=True) for x in (weight * np.where(visible, v, 0), weight))
    return n / np.where(d > 0, d, 1) / (1 + np.exp(-q))


@pytest.mark.requires("native")
@pytest.mark.parametrize(("dtype", "rounding"), [(np.float32, 0.0), (np.float16, 2**-11), (ml_dtypes.bfloat16, 2**-8)])
@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (2, 1, 63, 63), (2, 3, 100, 33), (2, 1, 600, 100), (1, 2, 257, 32)])
def test_aft_simple_computes_the_formula(
    emulated: EmulatedAFTSimple, shape: tuple[int, int, int, int], dtype: type, rounding: float
) -> None:
    inputs = aft_inputs(shape, dtype)
    # up to 32 rows per thread, 8 threads and 3 slices are added up one after another: 43 roundings of 6e-8
    assert_aft(emulated.aft_simple(*inputs), inputs, rounding + 4e-6)


def assert_aft(out: np.ndarray, inputs: tuple[np.ndarray, ...], limit: float) -> None:
    """Within a share of the largest |v|, which no average exceeds."""
    assert out.dtype == inputs[0].dtype
    difference = np.abs(out.astype(np.float64) - exact_aft(*inputs))
    assert np.isfinite(difference).all()
    values = inputs[2].astype(np.float64)
    assert difference.max() <= limit * np.abs(values[np.isfinite(values)]).max(initial=1e-30)


# Slices have 256 tokens; of a slice, eight groups of threads take every eighth token each, four at a time.
@pytest.mark.requires("native")
@pytest.mark.parametrize("token", [0, 7, 24, 255, 256, 300, 512, 599])
def test_a_key_far_above_all_others_counts_wherever_it_stands(emulated: EmulatedAFTSimple, token: int) -> None:
    """By 120: its e^x is infinite unless its own maximum is taken off."""
    q, k, v, keep = aft_inputs((1, 1, 600, 3))
    k /= 30
    k[:, :, token], v[:, :, token], keep[:, token] = 128, 2, True
    assert_aft(emulated.aft_simple(q, k, v, keep), (q, k, v, keep), 4e-6)


@pytest.mark.requires("native")
@pytest.mark.parametrize(("seed", "max_blocks"), [(1, 1), (2, 3), (100, ALL_BLOCKS), (201, ALL_BLOCKS)])
def test_aft_simple_depends_neither_on_the_schedule_nor_on_the_grid(
    emulated: EmulatedAFTSimple, seed: int, max_blocks: int
) -> None:
    inputs = aft_inputs((2, 2, 600, 70))
    again = emulated.aft_simple(*inputs, seed=seed, max_blocks=max_blocks)
    np.testing.assert_array_equal(again, emulated.aft_simple(*inputs))


@pytest.mark.requires("native")
def test_aft_simple_of_a_sample_without_visible_tokens_is_zero(emulated: EmulatedAFTSimple) -> None:
    q, k, v, keep = aft_inputs((2, 1, 300, 40))
    keep[1] = False
    out = emulated.aft_simple(q, k, v, keep)
    assert (out[1] == 0).all()
    assert (out[0] != 0).all()


@pytest.mark.requires("native")
def test_aft_simple_spreads_nan_over_its_channel_and_no_further(emulated: EmulatedAFTSimple) -> None:
    q, k, v, keep = aft_inputs((2, 1, 300, 40))
    keep[...] = True
    k, v = np.nan_to_num(k), np.nan_to_num(v)
    k[1, 0, 299, 7] = v[0, 0, 0, 3] = q[0, 0, 5, 9] = np.nan
    expected = np.zeros(q.shape, bool)
    expected[1, 0, :, 7] = expected[0, 0, :, 3] = expected[0, 0, 5, 9] = True
    np.testing.assert_array_equal(np.isnan(emulated.aft_simple(q, k, v, keep)), expected)


@pytest.mark.requires("native")
@pytest.mark.parametrize(
    ("sizes", "error"),
    [((0, 1, 4, 8), 0), ((2, 1, 0, 8), 0), ((2, 1, 4, 0), 0), ((2**31, 1, 4, 8), 1), ((1, 1, 2**31, 8), 1)],
)
def test_aft_simple_accepts_empty_inputs_and_refuses_what_it_cannot_count(
    emulated: EmulatedAFTSimple, sizes: tuple[int, ...], error: int
) -> None:
    pointers = (ctypes.c_void_p * 4)()
    assert emulated.library.aft_simple_float32(pointers, (ctypes.c_int64 * 4)(*sizes), None, None) == error
