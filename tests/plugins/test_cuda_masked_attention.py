"""The CUDA kernels of effexport::MaskedAttention, and the attention core in native/attention.h, emulated."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
import torch
from cuda_kernels import ALL_BLOCKS, DTYPES, Emulated, assert_guard_is_intact, guarded

from effexport.plugins.masked_attention import op

SCALE = 0.37
HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


class EmulatedMaskedAttention(Emulated):
    op = "masked_attention"

    def __init__(self, *options: str) -> None:
        super().__init__(*options)
        self.library.masked_attention_partial_floats.argtypes = [ctypes.c_void_p]
        self.library.masked_attention_partial_floats.restype = ctypes.c_int64
        for name in DTYPES.values():
            function = getattr(self.library, f"masked_attention_{name}")
            function.argtypes = [ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p]

    def attend(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        keep: np.ndarray,
        *,
        scale: float = SCALE,
        seed: int = 0,
        max_blocks: int = ALL_BLOCKS,
    ) -> np.ndarray:
        batch, heads, n, d = q.shape
        sizes = (ctypes.c_int64 * 6)(batch * heads, heads, n, k.shape[2], d, v.shape[3])
        out, whole = guarded((batch, heads, n, v.shape[3]), q.dtype)
        floats = self.library.masked_attention_partial_floats(sizes)
        partials, whole_partials = guarded((floats,), np.dtype(np.float32))
        arrays = [*(np.ascontiguousarray(x) for x in (q, k, v, keep)), out, partials]
        pointers = (ctypes.c_void_p * 6)(*(x.ctypes.data for x in arrays))
        self.library.set_schedule(seed, max_blocks)
        assert getattr(self.library, f"masked_attention_{DTYPES[q.dtype]}")(sizes, scale, pointers) == 0
        assert_guard_is_intact(whole)
        assert_guard_is_intact(whole_partials)
        return out


@pytest.fixture(scope="module")
def emulated() -> EmulatedMaskedAttention:
    return EmulatedMaskedAttention()


@pytest.fixture(scope="module")
def emulated_sm_75() -> EmulatedMaskedAttention:
    """Without asynchronous copies, and without tensor cores for bfloat16."""
    return EmulatedMaskedAttention("-DEFFEXPORT_EMULATED=750")


def make_inputs(n: int, m: int, d: int, e: int, dtype: type = np.float32, samples: int = 2) -> tuple[np.ndarray, ...]:
    """Two heads of random values; a third of the keys are hidden, and in the last of several samples all of them."""
    random = np.random.default_rng(1000 * n + m)
    q, k, v = (random.standard_normal((samples, 2, *shape)).astype(dtype) for shape in ((n, d), (m, d), (m, e)))
    keep = random.random((samples, m)) < 0.66
    if samples > 1:
        keep[-1] = False
    return q, k, v, keep


def formula(*inputs: np.ndarray, scale: float = SCALE, dtype: torch.dtype = torch.float64) -> np.ndarray:
    """The operator's definition, computed in one type throughout; the softmax is in float32 at least."""
    q, k, v = (torch.from_numpy(x.astype(np.float64)).to(dtype) for x in inputs[:3])
    logits = ((q * scale) @ k.transpose(-1, -2)).to(torch.promote_types(dtype, torch.float32))
    hidden = ~torch.from_numpy(inputs[3])[:, None, None, :]
    weights = torch.softmax(logits.masked_fill(hidden, op.HIDDEN_LOGIT), dim=-1).to(dtype)
    return (weights @ v).to(torch.float64).numpy()


def largest_error(out: np.ndarray, exact: np.ndarray) -> float:
    difference = np.abs(out.astype(np.float64) - exact)
    assert np.isfinite(difference).all()
    return float(difference.max(initial=0))


# n, m, d, e: below and above one tile of queries, keys, channels and columns; rows that are no multiples of 16 bytes;
# few queries of many keys, which are cut into slices
SIZES = [(1, 1, 1, 1), (5, 63, 3, 17), (70, 130, 64, 64), (17, 65, 100, 136), (3, 600, 64, 64), (20, 9, 0, 6)]


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernels_compute_the_formula(
    emulated: EmulatedMaskedAttention,
    emulated_sm_75: EmulatedMaskedAttention,
    size: tuple[int, int, int, int],
    dtype: np.dtype,
) -> None:
    inputs = make_inputs(*size, dtype)
    exact = formula(*inputs)
    # the contract: 2e-5 for values of about 1, which here are up to 4; half types round their weights and results once
    rounding = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}[dtype.name]
    limit = (2e-5 + 2 * rounding) * np.abs(inputs[2].astype(np.float64)).max()
    for kernels in (emulated, emulated_sm_75):
        assert largest_error(kernels.attend(*inputs), exact) <= limit


# Of 600 keys, slices of 256; of 130, tiles of 32 or 64; of 8500, more slices than a warp has lanes.
PEAKS = [
    *(((3, 600, 64, 64), keys) for keys in (slice(0, 10), slice(300, 310), slice(590, 600))),
    *(((70, 130, 16, 8), keys) for keys in (slice(0, 2), slice(64, 66), slice(128, 130))),
    *(((1, 8500, 4, 4), keys) for keys in (slice(0, 10), slice(4000, 4010), slice(8490, 8500))),
]


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "keys"), PEAKS, ids=str)
def test_logits_far_above_all_others_count_wherever_their_keys_are(
    emulated: EmulatedMaskedAttention, size: tuple[int, int, int, int], keys: slice, dtype: np.dtype
) -> None:
    """By 128: their e^x is infinite unless their own maximum is taken off. Products are exact in all types."""
    q, k, v, keep = make_inputs(*size, dtype, samples=1)
    q[..., 0], k[..., 0] = 16, 0
    k[:, :, keys] = 0
    k[:, :, keys, 0] = 16
    keep[:, keys.start] = True
    rounding = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}[dtype.name]
    limit = (2e-5 + 2 * rounding) * np.abs(v.astype(np.float64)).max()
    assert largest_error(emulated.attend(q, k, v, keep, scale=0.5), formula(q, k, v, keep, scale=0.5)) <= limit


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", [(64, 64, 64, 64), (16, 500, 64, 32), (40, 200, 96, 64)], ids=str)
def test_half_types_err_at_most_twice_as_much_as_the_formula_in_half_precision(
    emulated: EmulatedMaskedAttention, size: tuple[int, int, int, int], dtype: np.dtype
) -> None:
    inputs = make_inputs(*size, dtype)
    exact = formula(*inputs, scale=0.125)
    plain = formula(*inputs, scale=0.125, dtype=getattr(torch, dtype.name))
    out = emulated.attend(*inputs, scale=0.125)
    assert largest_error(out, exact) <= 2 * largest_error(plain, exact)
    # both round to the nearest number once, which is most of the error; on average it is smaller
    assert np.abs(out.astype(np.float64) - exact).mean() <= 2 * np.abs(plain - exact).mean()


@pytest.mark.requires("native")
def test_results_depend_neither_on_the_schedule_nor_on_the_grid_nor_on_other_samples(
    emulated: EmulatedMaskedAttention,
) -> None:
    for size, dtype in (((70, 100, 72, 70), np.float16), ((3, 600, 8, 8), np.float32)):
        inputs = make_inputs(*size, dtype)
        together = emulated.attend(*inputs)
        # blocks that take several jobs in turn
        for seed, max_blocks in [(1, ALL_BLOCKS), (2, 3), (3, 1)]:
            np.testing.assert_array_equal(emulated.attend(*inputs, seed=seed, max_blocks=max_blocks), together)
        for i in range(2):
            np.testing.assert_array_equal(emulated.attend(*(x[i : i + 1] for x in inputs)), together[i : i + 1])


@pytest.mark.requires("native")
def test_few_queries_of_many_keys_are_cut_along_their_keys(emulated: EmulatedMaskedAttention) -> None:
    emulated.attend(*make_inputs(64, 1100, 8, 8))
    slices = 5  # of 4 · 64 keys
    assert emulated.launch(before_last=1)[0] == 4 * slices
    assert emulated.launch()[0] == 4 * 64 // 8, "a warp for each row of results, of at most 32 columns"
    emulated.attend(*make_inputs(65, 300, 8, 8))
    assert emulated.launch()[0] == 4 * 2


@pytest.mark.requires("native")
def test_rows_that_are_no_multiples_of_16_bytes_or_begin_elsewhere_give_the_same(
    emulated: EmulatedMaskedAttention,
) -> None:
    q, k, v, keep = make_inputs(20, 70, 64, 64, np.float16)
    moved = [np.frombuffer(b"\0\0" + x.tobytes(), np.float16)[1:].reshape(x.shape) for x in (q, k, v)]
    assert all(x.ctypes.data % 16 == 2 for x in moved)
    np.testing.assert_array_equal(emulated.attend(*moved, keep), emulated.attend(q, k, v, keep))


@pytest.mark.requires("native")
@pytest.mark.parametrize("keys", [100, 700])
def test_a_sample_without_a_visible_key_averages_over_all(emulated: EmulatedMaskedAttention, keys: int) -> None:
    q, k, v, keep = make_inputs(3, keys, 8, 8)
    out = emulated.attend(1e4 * q, k, v, keep)
    # sums of up to 700 values of about 1
    np.testing.assert_allclose(out[1], np.broadcast_to(v[1].mean(axis=1, keepdims=True), out[1].shape), atol=1e-6)


@pytest.mark.requires("native")
@pytest.mark.parametrize("scale", [SCALE, -SCALE, 0.0, 1e30])
def test_any_finite_scale_gives_the_formula(emulated: EmulatedMaskedAttention, scale: float) -> None:
    inputs = make_inputs(5, 70, 16, 8)
    exact = formula(*inputs, scale=scale)
    assert largest_error(emulated.attend(*inputs, scale=scale), exact) <= 2e-5 * np.abs(inputs[2]).max()


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_nan_reaches_the_rows_that_see_it_and_no_others(emulated: EmulatedMaskedAttention, dtype: type) -> None:
    q, k, v, keep = make_inputs(20, 150, 16, 8, dtype)
    keep[0, :2] = True, False
    clean = emulated.attend(q, k, v, keep)
    hidden = k.copy()
    hidden[0, 0, 1] = hidden[1, 1, 7] = np.nan
    np.testing.assert_array_equal(emulated.attend(q, hidden, v, keep), clean)
    for array, place in ((q, (0, 1, 4, 3)), (k, (0, 1, 0, 3)), (v, (0, 1, 0, 3))):
        wrong = array.copy()
        wrong[place] = np.nan
        out = emulated.attend(*(wrong if x is array else x for x in (q, k, v)), keep)
        expected = np.zeros(out.shape, bool)
        expected[{id(q): np.s_[0, 1, 4], id(k): np.s_[0, 1], id(v): np.s_[0, 1, :, 3]}[id(array)]] = True
        np.testing.assert_array_equal(np.isnan(out), expected)
        np.testing.assert_array_equal(out[~expected], clean[~expected])


@pytest.mark.requires("native")
def test_without_keys_the_result_is_zero(emulated: EmulatedMaskedAttention) -> None:
    out = emulated.attend(*make_inputs(4, 0, 8, 6, np.float16))
    assert (out == 0).all()
    assert emulated.launch()[2] == 0


@pytest.mark.requires("native")
@pytest.mark.parametrize(
    "sizes",
    [
        *(tuple(2**31 if i == place else 1 for i in range(6)) for place in range(6)),
        (2**16, 1, 2**15, 1, 1, 1),  # queries of all groups
        (1, 1, 2**30, 1, 1, 2**14),  # blocks
        (2**31 - 1,) * 6,
    ],
)
def test_sizes_that_int32_cannot_count_are_refused(emulated: EmulatedMaskedAttention, sizes: tuple[int, ...]) -> None:
    arguments = (ctypes.c_int64 * 6)(*sizes), 1.0, (ctypes.c_void_p * 6)()
    assert emulated.library.masked_attention_float32(*arguments) == 1
