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
