"""The CUDA kernels of effexport::LSHAttention, emulated."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_kernels import ALL_BLOCKS, DTYPES, Emulated, assert_guard_is_intact, guarded
from lsh_attention_cases import CASES as ATTENTION_CASES
from lsh_attention_cases import CUDA_LIMITS, assert_close, assert_computes_the_formula, float64_attention
from lsh_attention_cases import HALVES as ATTENTION_HALVES
from lsh_attention_cases import Case as AttentionCase

from effexport.plugins.contract import Case
from effexport.plugins.lsh_attention.contract import formula
from effexport.plugins.lsh_attention.op import reference as attention_reference


class EmulatedLSHAttention(Emulated):
    op = "lsh_attention"

    def __init__(self, *options: str) -> None:
        super().__init__(*options)
        pointer = ctypes.c_void_p
        for name in DTYPES.values():
            getattr(self.library, f"lsh_attention_{name}").argtypes = [pointer] * 7
            getattr(self.library, f"lsh_attention_scratch_bytes_{name}").argtypes = [pointer]
            getattr(self.library, f"lsh_attention_scratch_bytes_{name}").restype = ctypes.c_size_t

    def attend(
        self, case: AttentionCase, arrays: dict[str, np.ndarray], *, seed: int = 0, max_blocks: int = ALL_BLOCKS
    ) -> np.ndarray:
        sizes = attention_sizes(case)
        out, whole = guarded(arrays["v"].shape, arrays["v"].dtype)
        dtype = DTYPES[out.dtype]
        scratch_bytes = getattr(self.library, f"lsh_attention_scratch_bytes_{dtype}")(sizes.ctypes.data)
        scratch, whole_scratch = guarded((scratch_bytes // 4,), np.dtype(np.float32))
        self.library.set_schedule(seed, max_blocks)
        function = getattr(self.library, f"lsh_attention_{dtype}")
        inputs = [arrays[name].ctypes.data for name in ("qk", "v", "order", "keep")]
        assert function(sizes.ctypes.data, *inputs, scratch.ctypes.data, out.ctypes.data) == 0
        assert_guard_is_intact(whole)
        assert_guard_is_intact(whole_scratch)
        return out


@pytest.fixture(scope="module")
def emulated() -> EmulatedLSHAttention:
    return EmulatedLSHAttention()


@pytest.fixture(scope="module")
def emulated_sm_75() -> EmulatedLSHAttention:
    """Without asynchronous copies, and without tensor cores for bfloat16."""
    return EmulatedLSHAttention("-DEFFEXPORT_EMULATED=750")


def attention_sizes(case: AttentionCase, **changes: int) -> np.ndarray:
    """What the kernel's `Problem` holds, in its order."""
    sizes = {
        "groups": case.batch * case.heads,
        **{name: getattr(case, name) for name in ("heads", "seq", "padded", "rounds", "head_dim", "value_dim")},
        **case.attributes,
    }
    return np.array(list((sizes | changes).values()), np.int64)


# a fiber per thread is slow: a ring of several hundred blocks is left to the CPU kernel
EMULATED_ATTENTION = {
    **{name: case for name, case in ATTENTION_CASES.items() if case.seq < 1000 and case.chunk_length > 1},
    "chunks of one": AttentionCase(seq=20, chunk_length=1, causal=True, rounded=True, rounds=3, heads=1),
    # several tiles of queries, of keys and of columns, none of them whole
    "chunks of 100": AttentionCase(seq=250, chunk_length=100, batch=1, heads=1, head_dim=40, value_dim=150),
    "queries in slices": AttentionCase(seq=90, chunk_length=70, batch=1, heads=1, head_dim=130, value_dim=70),
    **ATTENTION_HALVES,
    # rows that do not begin at multiples of 16 bytes, and of which not even pairs do
    "odd rows, float16": AttentionCase(seq=70, chunk_length=35, head_dim=9, value_dim=67, dtype="float16", heads=1),
}


@pytest.mark.requires("native")
def test_every_byte_that_is_not_0_is_true(emulated: EmulatedLSHAttention) -> None:
    case = AttentionCase(seq=63, chunk_length=8, padding=20, heads=1)
    arrays = case.arrays()
    expected = emulated.attend(case, arrays)
    bytes_of_true = np.random.default_rng(0).integers(1, 256, arrays["keep"].shape)
    arrays["keep"] = np.where(arrays["keep"], bytes_of_true, 0).astype(np.uint8).view(bool)
    assert np.array_equal(emulated.attend(case, arrays), expected)


@pytest.mark.requires("native")
@pytest.mark.parametrize("name", EMULATED_ATTENTION)
def test_the_attention_computes_the_formula(emulated: EmulatedLSHAttention, name: str) -> None:
    case = EMULATED_ATTENTION[name]
    arrays = case.arrays()
    out = emulated.attend(case, arrays)
    assert_computes_the_formula(case, arrays, out, CUDA_LIMITS)
    if case.rounded:  # where the formula in float64 says nothing
        arguments = [torch.from_numpy(arrays[x].astype(np.float32)) for x in ("qk", "v")]
        arguments += [torch.from_numpy(arrays[x]) for x in ("order", "keep")]
        reference = attention_reference(*arguments, *(getattr(case, x) for x in case.attributes)).numpy()
        assert_close(out, reference, CUDA_LIMITS[case.dtype])


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", CUDA_LIMITS)
def test_older_gpus_compute_the_formula_too(emulated_sm_75: EmulatedLSHAttention, dtype: str) -> None:
    case = AttentionCase(seq=100, chunk_length=35, head_dim=40, value_dim=72, causal=True, heads=1, dtype=dtype)
    arrays = case.arrays()
    assert_computes_the_formula(case, arrays, emulated_sm_75.attend(case, arrays), CUDA_LIMITS)


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("seq", "chunk_length", "head_dim", "rounds"), [(200, 64, 64, 2), (60, 10, 24, 4), (90, 32, 128, 1)]
)
def test_half_precision_is_off_by_at_most_twice_what_the_formula_is(
    emulated: EmulatedLSHAttention, seq: int, chunk_length: int, head_dim: int, rounds: int, dtype: str
) -> None:
    """The formula in standard operators of PyTorch, whose products are in half precision."""
    case = AttentionCase(seq, chunk_length, head_dim=head_dim, value_dim=head_dim, rounds=rounds, heads=1, dtype=dtype)
    arrays = case.arrays()
    expected, _ = float64_attention(case, arrays)
    sizes = (case.batch, case.heads, seq, head_dim, head_dim, rounds, *case.attributes.values())
    tensors = [torch.from_numpy(arrays[x].astype(np.float32)).to(getattr(torch, dtype)) for x in ("qk", "v")]
    tensors += [torch.from_numpy(arrays[x]) for x in ("order", "keep")]
    theirs = formula(Case(sizes, dtype=dtype), *tensors).double().numpy()
    ours = emulated.attend(case, arrays).astype(np.float64)
    assert np.abs(ours - expected).max() <= 2 * np.abs(theirs - expected).max()


@pytest.mark.requires("native")
def test_the_attention_does_not_depend_on_schedule_grid_and_batch_mates(emulated: EmulatedLSHAttention) -> None:
    case = AttentionCase(seq=150, chunk_length=64, causal=True, circular=True, padding=20)
    arrays = case.arrays()
    together = emulated.attend(case, arrays)
    # blocks that take several chunks in turn
    for seed, max_blocks in [(1, ALL_BLOCKS), (2, 3), (3, 1)]:
        np.testing.assert_array_equal(emulated.attend(case, arrays, seed=seed, max_blocks=max_blocks), together)
    rows = case.heads * case.rounds
    for i in range(case.batch):
        alone = {name: arrays[name][i : i + 1] for name in ("qk", "v", "keep")}
        alone["order"] = arrays["order"][i * rows : (i + 1) * rows]
        np.testing.assert_array_equal(emulated.attend(replace(case, batch=1), alone), together[i : i + 1])


@pytest.mark.requires("native")
def test_tokens_that_do_not_exist_are_taken_for_padding(emulated: EmulatedLSHAttention) -> None:
    case = AttentionCase(seq=95, chunk_length=10)
    arrays = case.arrays()
    expected = emulated.attend(case, arrays)
    # the five of each row that stand for no token, last in the sort
    strange = np.where(arrays["order"] >= 95, np.array([-1, 2**31 - 1, -(2**31), 96, 100] * 20), arrays["order"])
    out = emulated.attend(case, {**arrays, "order": strange.astype(np.int32)})
    np.testing.assert_array_equal(out, expected)


@pytest.mark.requires("native")
def test_the_attention_passes_nan_on_to_those_that_see_it(emulated: EmulatedLSHAttention) -> None:
    case = AttentionCase(chunk_length=16, rounds=1)
    arrays = case.arrays()
    clean = emulated.attend(case, arrays)
    arrays["v"][0, 1, 40, 3] = np.nan
    out = emulated.attend(case, arrays)
    wrong = np.isnan(out)
    assert wrong[0, 1, :, 3].any()
    assert not wrong[..., :3].any()
    assert not wrong[1].any()
    np.testing.assert_array_equal(out[~wrong], clean[~wrong])
    arrays = case.arrays()
    arrays["qk"][0, 1, 40, 3] = np.nan
    assert np.isnan(emulated.attend(case, arrays)[0, 1, 40]).all()


@pytest.mark.requires("native")
@pytest.mark.parametrize("changes", [{"groups": 0}, {"seq": 0, "padded": 0}, {"value_dim": 0}])
def test_the_attention_accepts_empty_inputs(emulated: EmulatedLSHAttention, changes: dict[str, int]) -> None:
    sizes = attention_sizes(AttentionCase(), **changes)
    assert emulated.library.lsh_attention_float32(sizes.ctypes.data, *[None] * 6) == 0


@pytest.mark.requires("native")
@pytest.mark.parametrize(
    "changes",
    [
        {"groups": 2**31},
        {"seq": -1},
        {"chunk_length": 0},
        {"rounds": 0},
        {"rounds": 2**16, "padded": 2**15},
        {"chunks_before": 2**31 // 10},
    ],
)
def test_the_attention_refuses_what_its_kernel_cannot_count(
    emulated: EmulatedLSHAttention, changes: dict[str, int]
) -> None:
    sizes = attention_sizes(AttentionCase(), **changes)
    assert emulated.library.lsh_attention_float32(sizes.ctypes.data, *[None] * 6) == 1
    assert emulated.library.lsh_attention_scratch_bytes_float32(sizes.ctypes.data) == 0
