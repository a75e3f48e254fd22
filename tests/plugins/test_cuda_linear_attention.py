"""The CUDA kernels of effexport::EluLinearAttention, emulated."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
import torch
from cuda_kernels import ALL_BLOCKS, DTYPES, Emulated, assert_guard_is_intact, guarded
from torch.nn.functional import elu

# eps of the denominator
EPS = 1e-6


class EmulatedLinearAttention(Emulated):
    op = "linear_attention"

    def __init__(self, *options: str) -> None:
        super().__init__(*options)
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
        relu: bool = False,
        seed: int = 0,
        max_blocks: int = ALL_BLOCKS,
    ) -> np.ndarray:
        out, whole = guarded(v.shape, v.dtype)
        sizes = np.array([*q.shape, v.shape[-1], causal, relu], np.int64)
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


@pytest.fixture(scope="module")
def emulated_sm_75() -> EmulatedLinearAttention:
    """Without asynchronous copies, and without tensor cores for bfloat16."""
    return EmulatedLinearAttention("-DEFFEXPORT_EMULATED=750")


def attention_case(seq: int, dims: tuple[int, int], dtype: type = np.float32) -> tuple[np.ndarray, ...]:
    """q, k, v of two batches of two heads, and keep: the second batch is padded, with a hole."""
    generator = np.random.default_rng(seq + dims[0])
    q, k, v = (generator.standard_normal((2, 2, seq, dim)).astype(dtype) for dim in (dims[0], *dims))
    keep = np.ones((2, seq), bool)
    if seq > 4:
        keep[1, seq - seq // 3 :] = False
        keep[1, 1] = False
    return q, k, v, keep


def exact_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, keep: np.ndarray, *, causal: bool, relu: bool = False
) -> np.ndarray:
    """Σ_j φ(q_i)·φ(k_j) v_j / (Σ_j φ(q_i)·φ(k_j) + eps) over kept j, j ≤ i where causal, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    q, k = (np.maximum(x, 0) if relu else np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
    weights = q @ k.swapaxes(-1, -2) * keep[:, None, None, :]
    if causal:
        weights = np.tril(weights)
    return weights @ v / (weights.sum(axis=-1, keepdims=True) + EPS)


def attention_error(actual: np.ndarray, given: tuple[np.ndarray, ...], *, causal: bool, relu: bool = False) -> float:
    """Largest difference from the formula as a share of the largest value."""
    actual = actual.astype(np.float64)
    assert np.isfinite(actual).all()
    largest = np.abs(given[2].astype(np.float64)).max()
    return float(np.abs(actual - exact_attention(*given, causal=causal, relu=relu)).max() / largest)


# Outputs are means of values with positive weights, so nothing cancels; a sum has at most 512 terms in a row, with 6e-8
# of rounding each and of either sign.
ATTENTION_FP32 = 5e-6
# Half types round features of queries and of keys, S and z (or the weights of a block), and the result, once each.
ROUNDINGS = 4
DTYPE_ROUNDING = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}


@pytest.mark.requires("native")
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("seq", "dims"),
    # slices have 512 positions, or 256 where causal, or 64 where causal with more than 64 channels; tiles are 64 × 64
    [(1, (8, 8)), (63, (16, 24)), (65, (64, 64)), (130, (65, 40)), (300, (5, 3)), (70, (100, 136))],
)
def test_linear_attention_computes_the_formula(
    emulated: EmulatedLinearAttention, seq: int, dims: tuple[int, int], dtype: np.dtype, causal: bool, relu: bool
) -> None:
    given = attention_case(seq, dims, dtype)
    out = emulated.attention(*given, causal=causal, relu=relu)
    assert out.dtype == dtype
    limit = ATTENTION_FP32 + ROUNDINGS * DTYPE_ROUNDING[dtype.name]
    assert attention_error(out, given, causal=causal, relu=relu) <= limit


@pytest.mark.requires("native")
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_attention_computes_the_formula_on_the_oldest_gpus(
    emulated_sm_75: EmulatedLinearAttention, dtype: np.dtype, causal: bool, relu: bool
) -> None:
    given = attention_case(150, (40, 24), dtype)
    limit = ATTENTION_FP32 + ROUNDINGS * DTYPE_ROUNDING[dtype.name]
    assert (
        attention_error(emulated_sm_75.attention(*given, causal=causal, relu=relu), given, causal=causal, relu=relu)
        <= limit
    )


@pytest.mark.requires("native")
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_sums_several_slices(emulated: EmulatedLinearAttention, causal: bool, relu: bool) -> None:
    given = attention_case(1100, (8, 4))
    assert (
        attention_error(emulated.attention(*given, causal=causal, relu=relu), given, causal=causal, relu=relu)
        <= ATTENTION_FP32
    )


def half_formula(q: np.ndarray, k: np.ndarray, v: np.ndarray, keep: np.ndarray, *, causal: bool) -> np.ndarray:
    """The formula as PyTorch computes it when all of it is in the type of the inputs."""
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[q.dtype.name]
    q, k, v = (torch.from_numpy(x.astype(np.float32)).to(dtype) for x in (q, k, v))
    q, k = elu(q) + 1, (elu(k) + 1) * torch.from_numpy(keep)[:, None, :, None]
    if causal:
        weights = (q @ k.mT).tril()
        out = weights @ v / (weights.sum(dim=-1, keepdim=True) + EPS)
    else:
        out = q @ (k.mT @ v) / (q @ k.sum(dim=2)[..., None] + EPS)
    return out.double().numpy()


@pytest.mark.requires("native")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("seq", "dims"), [(64, (64, 64)), (150, (32, 32)), (300, (8, 16))])
def test_linear_attention_is_at_most_twice_as_inexact_as_the_formula_in_half_precision(
    emulated: EmulatedLinearAttention, seq: int, dims: tuple[int, int], dtype: type, causal: bool
) -> None:
    given = attention_case(seq, dims, dtype)
    exact = exact_attention(*given, causal=causal)
    kernel = np.abs(emulated.attention(*given, causal=causal).astype(np.float64) - exact)
    formula = np.abs(half_formula(*given, causal=causal) - exact)
    assert kernel.max() <= 2 * formula.max()
    assert np.square(kernel).mean() <= 4 * np.square(formula).mean()


@pytest.mark.requires("native")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(0, -16), (-13, -12), (-16, 0), (200, 200)])
def test_features_beyond_the_range_of_float16_keep_their_digits(
    emulated: EmulatedLinearAttention, queries: int, keys: int, causal: bool
) -> None:
    """exp(-16) is 1e-7, the smallest float16 6e-8; sums over 200 · 200 · 64 and of values times 6000 exceed 65504."""
    q, k, v, keep = attention_case(150, (64, 8))
    given = tuple((x + change).astype(np.float16) for x, change in ((q, queries), (k, keys), (100 * v, 0)))
    limit = ATTENTION_FP32 + ROUNDINGS * DTYPE_ROUNDING["float16"]
    out = emulated.attention(*given, keep, causal=causal)
    assert attention_error(out, (*given, keep), causal=causal) <= limit


@pytest.mark.requires("native")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("first", "last"), [(-12, 0), (0, -12), (-4, 12)])
def test_features_that_grow_or_shrink_from_tile_to_tile_keep_their_digits(
    emulated: EmulatedLinearAttention, first: int, last: int, causal: bool
) -> None:
    """By up to a million, so that in float16 sums change their exponent; an early tile counts in its own outputs."""
    for sizes in ((300, (8, 8)), (130, (70, 8))):
        q, k, v, keep = attention_case(*sizes, np.float16)
        k = (k + np.linspace(first, last, sizes[0])[:, None]).astype(np.float16)
        limit = ATTENTION_FP32 + ROUNDINGS * DTYPE_ROUNDING["float16"]
        out = emulated.attention(q, k, v, keep, causal=causal)
        assert attention_error(out, (q, k, v, keep), causal=causal) <= limit


# In a tile: the first and the last row and channel, those of every warp and of the last value of a chunk.
@pytest.mark.requires("native")
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("token", "channel"), [(0, 0), (15, 40), (63, 63), (64, 31), (149, 7)])
def test_a_feature_far_above_all_others_counts_wherever_it_stands(
    emulated: EmulatedLinearAttention, token: int, channel: int, causal: bool, relu: bool
) -> None:
    """In float16 the largest of a tile chooses its exponent; one that was missed would become infinite."""
    q, k, v, keep = attention_case(150, (64, 8), np.float16)
    q[:, :, token, channel] = k[:, :, token, channel] = 1000
    keep[:, token] = True
    limit = ATTENTION_FP32 + ROUNDINGS * DTYPE_ROUNDING["float16"]
    for values in (v, v / 1000):  # the sums of values are the largest of a state, or those of features
        out = emulated.attention(q, k, values, keep, causal=causal, relu=relu)
        assert attention_error(out, (q, k, values, keep), causal=causal, relu=relu) <= limit


@pytest.mark.requires("native")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(2.0**-14, 2.0**-14), (2.0**-14, 2.0**6), (2.0**8, 2.0**8)])
def test_rectified_features_of_any_magnitude_keep_their_digits(
    emulated: EmulatedLinearAttention, queries: float, keys: float, causal: bool
) -> None:
    """Sums over products of the smallest numbers of float16 with all their digits, and beyond the largest."""
    q, k, v, keep = attention_case(150, (64, 8))
    given = tuple(x.astype(np.float16) for x in (queries * q, keys * k, v))
    limit = ATTENTION_FP32 + ROUNDINGS * DTYPE_ROUNDING["float16"]
    out = emulated.attention(*given, keep, causal=causal, relu=True)
    assert attention_error(out, (*given, keep), causal=causal, relu=True) <= limit


@pytest.mark.requires("native")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(8, 8), (65, 40), (140, 5)])
def test_rectified_features_may_all_be_zero(
    emulated: EmulatedLinearAttention, dims: tuple[int, int], causal: bool
) -> None:
    """Those of a query, of a tile of keys or of a channel, between rows of other magnitudes."""
    q, k, v, keep = attention_case(200, dims)
    choices = np.random.default_rng(0)
    for x in (q, k):
        x[..., choices.random(dims[0]) < 0.5] = -1
        x[:, :, choices.random(200) < 0.3] = 0
        x *= 2.0 ** choices.integers(-12, 8, size=(2, 2, 200, 1))
    k[:, :, 64:128] = 0
    given = (*(x.astype(np.float16) for x in (q, k, v)), keep)
    limit = ATTENTION_FP32 + ROUNDINGS * DTYPE_ROUNDING["float16"]
    out = emulated.attention(*given, causal=causal, relu=True)
    assert attention_error(out, given, causal=causal, relu=True) <= limit


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_do_not_begin_at_multiples_of_16_bytes_change_nothing(
    emulated: EmulatedLinearAttention, dtype: np.dtype
) -> None:
    given = attention_case(70, (16, 16), dtype)

    def moved(x: np.ndarray) -> np.ndarray:
        whole = np.zeros(x.size + 1, x.dtype)
        whole[1:] = x.ravel()
        return whole[1:].reshape(x.shape)

    for causal in (False, True):
        expected = emulated.attention(*given, causal=causal)
        out = emulated.attention(*(moved(x) for x in given), causal=causal)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.requires("native")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_linear_attention_does_not_depend_on_the_schedule_or_batch_mates(
    emulated: EmulatedLinearAttention, dtype: type, causal: bool
) -> None:
    given = attention_case(150, (12, 70), dtype)
    together = emulated.attention(*given, causal=causal)
    for seed, max_blocks in [(1, ALL_BLOCKS), (2, 2), (3, 1)]:
        again = emulated.attention(*given, causal=causal, seed=seed, max_blocks=max_blocks)
        np.testing.assert_array_equal(again, together)
    for i in range(2):
        alone = emulated.attention(*(x[i : i + 1] for x in given), causal=causal)
        np.testing.assert_array_equal(alone, together[i : i + 1])


@pytest.mark.requires("native")
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_masked_keys_have_no_influence_on_linear_attention(
    emulated: EmulatedLinearAttention, dtype: type, causal: bool, relu: bool
) -> None:
    q, k, v, keep = attention_case(100, (8, 8), dtype)
    before = emulated.attention(q, k, v, keep, causal=causal, relu=relu)
    huge = np.finfo(dtype).max / 4
    for array, hidden in ((k, huge), (v, -huge)):
        np.copyto(array, dtype(hidden), where=~keep[:, None, :, None])
    np.testing.assert_array_equal(emulated.attention(q, k, v, keep, causal=causal, relu=relu), before)
    nothing = np.zeros_like(keep)
    assert (emulated.attention(q, k, v, nothing, causal=causal, relu=relu) == 0).all()


@pytest.mark.requires("native")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(0, 2, 5, 4, 4), (2, 0, 5, 4, 4), (2, 2, 0, 4, 4), (2, 2, 5, 4, 0)])
def test_linear_attention_accepts_empty_inputs(
    emulated: EmulatedLinearAttention, sizes: tuple[int, ...], causal: bool
) -> None:
    given = np.array([*sizes, causal, 0], np.int64)
    nothing = [None] * 4
    assert emulated.library.linear_attention_float32(*nothing, given.ctypes.data, EPS, None, None) == 0


@pytest.mark.requires("native")
@pytest.mark.parametrize(
    "sizes",
    [(2**31, 1, 1, 1, 1), (2**16, 2**16, 1, 1, 1), (1, 1, 2**31, 1, 1), (1, 1, 1, 2**17, 2**17), (-1, 1, 1, 1, 1)],
)
def test_linear_attention_refuses_what_its_kernels_cannot_count(
    emulated: EmulatedLinearAttention, sizes: tuple[int, ...]
) -> None:
    given = np.array([*sizes, 0, 0], np.int64)
    assert emulated.library.linear_attention_float32(*[None] * 4, given.ctypes.data, EPS, None, None) == 1
