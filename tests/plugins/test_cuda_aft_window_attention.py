"""The CUDA kernels of effexport::AFTWindowAttention, emulated."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from aft_window_inputs import Sizes, error, made_inputs
from cuda_kernels import ALL_BLOCKS, DTYPES, Emulated, assert_guard_is_intact, guarded

pytestmark = pytest.mark.requires("native")

# Sums of up to 32 keys, of blocks and of products, one addition of 6e-8 after another, and 2⁻²² for each 2^x.
FLOAT32 = 5e-6
CASES = [
    Sizes(2, 1, 1, 1, taps=1),
    Sizes(1, 2, 70, 33, taps=11, shared=True),
    Sizes(1, 1, 130, 40, taps=63, positions=150),
    Sizes(1, 1, 300, 5, taps=7, positions=300),
    Sizes(1, 2, 65, 8, taps=201, positions=1, shared=True),
]


class EmulatedAFTWindow(Emulated):
    op = "aft_window_attention"

    def __init__(self) -> None:
        super().__init__()
        self.library.aft_window_scratch_bytes.argtypes = [ctypes.c_void_p]
        self.library.aft_window_scratch_bytes.restype = ctypes.c_size_t
        for name in DTYPES.values():
            getattr(self.library, f"aft_window_{name}").argtypes = [ctypes.c_void_p] * 4

    def attend(
        self, inputs: dict[str, np.ndarray], causal: bool, *, seed: int = 0, max_blocks: int = ALL_BLOCKS
    ) -> np.ndarray:
        arrays = [np.ascontiguousarray(x) for x in inputs.values()]
        batch, heads, seq, channels = arrays[0].shape
        sizes = (ctypes.c_int64 * 9)(
            batch * heads, heads, seq, channels, arrays[1].shape[3], *arrays[4].shape, int(causal)
        )
        out, whole = guarded(arrays[0].shape, arrays[0].dtype)
        scratch_bytes = self.library.aft_window_scratch_bytes(sizes)
        scratch, whole_scratch = guarded((scratch_bytes // 4,), np.dtype(np.float32))
        self.library.set_schedule(seed, max_blocks)
        pointers = (ctypes.c_void_p * 5)(*(x.ctypes.data for x in arrays))
        function = getattr(self.library, f"aft_window_{DTYPES[arrays[0].dtype]}")
        assert function(pointers, sizes, scratch.ctypes.data, out.ctypes.data) == 0
        assert_guard_is_intact(whole)
        assert_guard_is_intact(whole_scratch)
        return out


@pytest.fixture(scope="module")
def emulated() -> EmulatedAFTWindow:
    return EmulatedAFTWindow()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", CASES)
def test_the_kernels_compute_the_formula(emulated: EmulatedAFTWindow, sizes: Sizes, causal: bool) -> None:
    inputs = made_inputs(sizes)
    assert error(emulated.attend(inputs, causal), inputs, causal) <= FLOAT32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "rounding"), [(np.float16, 2**-11), (ml_dtypes.bfloat16, 2**-8)])
def test_half_precision_is_rounded_only_at_the_end(
    emulated: EmulatedAFTWindow, dtype: type, rounding: float, causal: bool
) -> None:
    inputs = made_inputs(Sizes(1, 2, 100, 20, taps=9, shared=True), dtype)
    assert error(emulated.attend(inputs, causal), inputs, causal) <= rounding + FLOAT32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seed", "max_blocks"), [(0, 1), (100, 3), (200, ALL_BLOCKS)])
def test_results_depend_neither_on_the_schedule_nor_on_the_grid(
    emulated: EmulatedAFTWindow, seed: int, max_blocks: int, causal: bool
) -> None:
    inputs = made_inputs(Sizes(1, 2, 140, 35, taps=11, shared=True))
    again = emulated.attend(inputs, causal, seed=seed, max_blocks=max_blocks)
    np.testing.assert_array_equal(again, emulated.attend(inputs, causal))


@pytest.mark.parametrize("causal", [False, True])
def test_keys_far_apart_and_a_strongly_negative_bias_keep_every_weight(
    emulated: EmulatedAFTWindow, causal: bool
) -> None:
    inputs = made_inputs(Sizes(1, 1, 100, 3, taps=9), bias_scale=0.5)
    inputs["k"][:, :, 5] = 60
    inputs["v"][:, :, 5] = 2
    inputs["keep"][:, 5] = True
    inputs["bias"][...] -= 30
    # logits of 60 have a spacing of 4e-6
    assert error(emulated.attend(inputs, causal), inputs, causal) <= 3e-5


# The first and the last of a block of 32, one between, and those of the row.
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("token", [0, 31, 32, 77, 159, 199])
def test_a_key_far_above_all_others_counts_wherever_it_stands(
    emulated: EmulatedAFTWindow, token: int, causal: bool
) -> None:
    """By 120: its e^x is infinite unless its own maximum is taken off, of which every block of tokens has one."""
    inputs = made_inputs(Sizes(1, 1, 200, 3, taps=9), key_scale=1, bias_scale=1)
    inputs["k"][:, :, token] = 128
    inputs["v"][:, :, token] = 2
    inputs["keep"][:, token] = True
    # in base 2, logits of 185 have a spacing of 1.5e-5, and their weights that of ln 2 times as much
    assert error(emulated.attend(inputs, causal), inputs, causal) <= 2e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("taps", [1, 101])
def test_a_bias_far_above_all_others_counts(emulated: EmulatedAFTWindow, taps: int, causal: bool) -> None:
    inputs = made_inputs(Sizes(1, 1, 130, 3, taps=taps), key_scale=1, bias_scale=1)
    # that of the query itself: where the largest bias belongs to no key, the contract leaves results open
    inputs["bias"][..., taps - 1 if causal else taps // 2] = 128
    inputs["keep"][...] = True
    inputs["k"], inputs["v"] = (np.nan_to_num(inputs[x], nan=1, posinf=1, neginf=1) for x in "kv")
    assert error(emulated.attend(inputs, causal), inputs, causal) <= 2e-5


def test_later_tokens_never_change_earlier_results(emulated: EmulatedAFTWindow) -> None:
    inputs = made_inputs(Sizes(1, 1, 150, 4, taps=40))
    inputs["keep"][...] = True
    inputs["k"], inputs["v"] = (np.nan_to_num(inputs[x], posinf=1, neginf=1) for x in "kv")
    before = emulated.attend(inputs, True)
    for token, key in ((77, 1e30), (78, np.inf), (79, np.nan)):
        inputs["k"][:, :, token] = key
    after = emulated.attend(inputs, True)
    np.testing.assert_array_equal(after[:, :, :77], before[:, :, :77])
    assert np.isnan(after[:, :, 79:]).all()


def test_a_sample_without_visible_tokens_is_zero_and_nan_stays_in_its_channel(emulated: EmulatedAFTWindow) -> None:
    inputs = made_inputs(Sizes(2, 1, 80, 6, taps=5))
    inputs["keep"][1] = False
    inputs["v"][0, 0, 0, 3] = inputs["q"][0, 0, 7, 5] = np.nan
    out = emulated.attend(inputs, False)
    assert (out[1] == 0).all()
    expected = np.zeros(out.shape, bool)
    expected[0, 0, :, 3] = expected[0, 0, 7, 5] = True
    np.testing.assert_array_equal(np.isnan(out), expected)


@pytest.mark.parametrize(
    ("sizes", "status"),
    [
        ((0, 1, 4, 8, 8, 1, 1, 3, 0), 0),
        ((1, 1, 0, 8, 8, 1, 1, 3, 0), 0),
        ((2**31, 1, 4, 8, 8, 1, 1, 3, 0), 1),
        ((1, 1, 2**31 - 4, 8, 8, 1, 1, 3, 1), 1),
    ],
)
def test_empty_inputs_are_accepted_and_what_cannot_be_counted_is_refused(
    emulated: EmulatedAFTWindow, sizes: tuple[int, ...], status: int
) -> None:
    assert (
        emulated.library.aft_window_float32((ctypes.c_void_p * 5)(), (ctypes.c_int64 * 9)(*sizes), None, None) == status
    )
