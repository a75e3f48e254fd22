"""The CUDA kernels of effexport::EluLinearAttention, emulated."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from cuda_kernels import ALL_BLOCKS, DTYPES, Emulated, assert_guard_is_intact, guarded

# eps of the denominator
EPS = 1e-6


class EmulatedLinearAttention(Emulated):
    op = "linear_attention"

    def __init__(self) -> None:
        super().__init__()
        pointer = ctypes.c_void_p
        self.library.linear_attention_scratch_bytes.argtypes = [pointer]
        self.library.linear_attention_scratch_bytes.restype = ctypes.c_size_t
        for name in DTYPES.values():
            function = getattr(self.library, f"linear_attention_{name}")
            function.argtypes = [pointer, pointer, pointer, pointer, pointer, ctypes.c_float, pointer, pointer]

    def attention(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        keep: np.ndarray,
        *,
        causal: bool,
        seed: int = 0,
        max_blocks: int = ALL_BLOCKS,
    ) -> np.ndarray:
        out, whole = guarded(v.shape, v.dtype)
        sizes = np.array([*q.shape, v.shape[-1], causal], np.int64)
        scratch_bytes = self.library.linear_attention_scratch_bytes(sizes.ctypes.data)
        scratch, whole_scratch = guarded((scratch_bytes // 4,), np.dtype(np.float32))
        self.library.set_schedule(seed, max_blocks)
        function = getattr(self.library, f"linear_attention_{DTYPES[v.dtype]}")
        inputs = [np.ascontiguousarray(x) for x in (q, k, v, keep)]
        pointers = [x.ctypes.data for x in (*inputs, sizes)]
        assert function(*pointers, EPS, scratch.ctypes.data, out.ctypes.data) == 0
        assert_guard_is_intact(whole)
        assert_guard_is_intact(whole_scratch)
        return out


@pytest.fixture(scope="module")
def emulated() -> EmulatedLinearAttention:
    return EmulatedLinearAttention()


def attention_case(seq: int, dims: tuple[int, int], dtype: type = np.float32) -> tuple[np.ndarray, ...]:
    """q, k, v of two batches of two heads, and keep: the second batch is padded, with a hole."""
    generator = np.random.default_rng(seq + dims[0])
    q, k, v = (generator.standard_normal((2, 2, seq, dim)).astype(dtype) for dim in (dims[0], *dims))
    keep = np.ones((2, seq), bool)
    if seq > 4:
        keep[1, seq - seq // 3 :] = False
        keep[1, 1] = False
    return q, k, v, keep


def exact_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, keep: np.ndarray, *, causal: bool) -> np.ndarray:
    """Σ_j φ(q_i)·φ(k_j) v_j / (Σ_j φ(q_i)·φ(k_j) + eps) over kept j, j ≤ i where causal, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    q, k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
    weights = q @ k.swapaxes(-1, -2) * keep[:, None, None, :]
    if causal:
        weights = np.tril(weights)
    return weights @ v / (weights.sum(axis=-1, keepdims=True) + EPS)


def attention_error(actual: np.ndarray, given: tuple[np.ndarray, ...], *, causal: bool) -> float:
    """Largest difference from the formula as a share of the largest value."""
    actual = actual.astype(np.float64)
    assert np.isfinite(actual).all()
    largest = np.abs(given[2].astype(np.float64)).max()
    return float(np.abs(actual - exact_attention(*given, causal=causal)).max() / largest)


# Outputs are means of values with positive weights, so nothing cancels; a sum has at most 512 terms in a row, with 6e-8
# of rounding each and of either sign.
ATTENTION_FP32 = 5e-6


@pytest.mark.requires("native")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seq", "dims"),
    # a slice has 512 positions, a block 64; tiles are 64 × 64 × 32
    [(1, (8, 8)), (63, (16, 24)), (64, (64, 64)), (130, (65, 40)), (600, (5, 3)), (1100, (8, 4)), (70, (128, 128))],
)
def test_linear_attention_computes_the_formula(
    emulated: EmulatedLinearAttention, seq: int, dims: tuple[int, int], causal: bool
) -> None:
    given = attention_case(seq, dims)
    assert attention_error(emulated.attention(*given, causal=causal), given, causal=causal) <= ATTENTION_FP32


@pytest.mark.requires("native")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "rounding"), [(np.float16, 2**-11), (ml_dtypes.bfloat16, 2**-8)])
def test_linear_attention_in_half_precision_is_rounded_only_at_the_end(
    emulated: EmulatedLinearAttention, dtype: type, rounding: float, causal: bool
) -> None:
    given = attention_case(200, (24, 16), dtype)
    out = emulated.attention(*given, causal=causal)
    assert out.dtype == np.dtype(dtype)
    assert attention_error(out, given, causal=causal) <= rounding + ATTENTION_FP32


@pytest.mark.requires("native")
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_does_not_depend_on_the_schedule_or_batch_mates(
    emulated: EmulatedLinearAttention, causal: bool
) -> None:
    given = attention_case(150, (12, 70))
    together = emulated.attention(*given, causal=causal)
    for seed, max_blocks in [(1, ALL_BLOCKS), (2, 2), (3, 1)]:
        again = emulated.attention(*given, causal=causal, seed=seed, max_blocks=max_blocks)
        np.testing.assert_array_equal(again, together)
    for i in range(2):
        alone = emulated.attention(*(x[i : i + 1] for x in given), causal=causal)
        np.testing.assert_array_equal(alone, together[i : i + 1])


@pytest.mark.requires("native")
@pytest.mark.parametrize("causal", [False, True])
def test_masked_keys_have_no_influence_on_linear_attention(emulated: EmulatedLinearAttention, causal: bool) -> None:
    q, k, v, keep = attention_case(100, (8, 8))
    before = emulated.attention(q, k, v, keep, causal=causal)
    for array, huge in ((k, 1e30), (v, -1e30)):
        np.copyto(array, np.float32(huge), where=~keep[:, None, :, None])
    np.testing.assert_array_equal(emulated.attention(q, k, v, keep, causal=causal), before)
    nothing = np.zeros_like(keep)
    assert (emulated.attention(q, k, v, nothing, causal=causal) == 0).all()


@pytest.mark.requires("native")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(0, 2, 5, 4, 4), (2, 0, 5, 4, 4), (2, 2, 0, 4, 4), (2, 2, 5, 4, 0)])
def test_linear_attention_accepts_empty_inputs(
    emulated: EmulatedLinearAttention, sizes: tuple[int, ...], causal: bool
) -> None:
    given = np.array([*sizes, causal], np.int64)
    nothing = [None] * 4
    assert emulated.library.linear_attention_float32(*nothing, given.ctypes.data, EPS, None, None) == 0


@pytest.mark.requires("native")
@pytest.mark.parametrize(
    "sizes",
    [(2**31, 1, 1, 1, 1), (2**16, 2**16, 1, 1, 1), (1, 1, 2**31, 1, 1), (1, 1, 1, 2**16, 2**16), (-1, 1, 1, 1, 1)],
)
def test_linear_attention_refuses_what_its_kernels_cannot_count(
    emulated: EmulatedLinearAttention, sizes: tuple[int, ...]
) -> None:
    given = np.array([*sizes, 0], np.int64)
    assert emulated.library.linear_attention_float32(*[None] * 4, given.ctypes.data, EPS, None, None) == 1
