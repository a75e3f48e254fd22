"""The CUDA kernel of effexport::LSHHash, emulated."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from cuda_kernels import ALL_BLOCKS, DTYPES, Emulated, assert_guard_is_intact, guarded

from effexport.plugins.contract import Case, load_contract
from effexport.plugins.lsh_hash import op
from effexport.plugins.ops import FLOAT_TYPES, OPS

CHECK = load_contract(OPS["LSHHash"])
NUMBERS = {name: number for number, name in enumerate(FLOAT_TYPES)}


class EmulatedHash(Emulated):
    op = "lsh_hash"

    def hash(self, case: Case, arrays: list[np.ndarray], *, seed: int = 0, max_blocks: int = ALL_BLOCKS) -> np.ndarray:
        (output,) = CHECK.outputs(case).values()
        buckets, whole = guarded(output.shape, np.dtype(np.int32))
        self.library.set_schedule(seed, max_blocks)
        pointers = (ctypes.c_void_p * 4)(*(array.ctypes.data for array in (*arrays, buckets)))
        sizes = np.array(case.sizes, np.int64)
        assert self.library.lsh_hash(NUMBERS[case.dtype], pointers, ctypes.c_void_p(sizes.ctypes.data)) == 0
        assert_guard_is_intact(whole)
        return buckets


@pytest.fixture(scope="module")
def emulated() -> EmulatedHash:
    return EmulatedHash()


def case_of(*sizes: int, factors: tuple[int, ...], dtype: str = "float32") -> Case:
    return Case((*sizes, len(factors), *factors), dtype=dtype)


def arrays_of(case: Case, offset: int = 0) -> list[np.ndarray]:
    """The inputs of a case, each this many elements beyond a multiple of 64 bytes."""
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    found = []
    for tensor in CHECK.inputs(case, "cpu").values():
        dtype = dtypes.get(str(tensor.dtype).removeprefix("torch."))
        array = tensor.float().numpy().astype(dtype) if dtype else tensor.numpy()
        whole = np.zeros(array.size + 128, array.dtype)
        start = -whole.ctypes.data % 64 // array.itemsize + offset
        whole[start : start + array.size] = array.ravel()
        found.append(whole[start : start + array.size])
    return found


def expected_of(case: Case) -> np.ndarray:
    return CHECK.exact(case, CHECK.inputs(case, "cpu"))["buckets"].numpy()


# batch, heads, seq, head_dim, rounds, chunk_length: one of each; odd sizes; more directions than a tile, more channels
# than a slice and more tokens than a block; padding that is longer than a block
SIZES = [
    ((1, 1, 1, 1, 1, 1), (2,)),
    ((2, 2, 63, 33, 3, 16), (4, 6)),
    ((1, 2, 130, 8, 2, 64), (70,)),
    ((1, 1, 129, 64, 4, 7), (32, 2)),
    ((2, 1, 5, 20, 2, 300), (2, 4, 6)),
]


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(("sizes", "factors"), SIZES)
def test_buckets_are_those_of_the_formula(
    emulated: EmulatedHash, sizes: tuple[int, ...], factors: tuple[int, ...], dtype: str
) -> None:
    case = case_of(*sizes, factors=factors, dtype=dtype)
    np.testing.assert_array_equal(emulated.hash(case, arrays_of(case)), expected_of(case))


@pytest.mark.requires("native")
@pytest.mark.parametrize("offset", [1, 4, 7])
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_arrays_may_begin_anywhere(emulated: EmulatedHash, dtype: str, offset: int) -> None:
    case = case_of(1, 2, 70, 24, 2, 16, factors=(8,), dtype=dtype)
    np.testing.assert_array_equal(emulated.hash(case, arrays_of(case, offset)), expected_of(case))


@pytest.mark.requires("native")
@pytest.mark.parametrize("seed", [100, 201])
@pytest.mark.parametrize("max_blocks", [2, ALL_BLOCKS])
def test_neither_the_schedule_nor_the_grid_changes_a_bucket(emulated: EmulatedHash, seed: int, max_blocks: int) -> None:
    case = case_of(2, 2, 150, 40, 2, 64, factors=(4, 34))
    found = emulated.hash(case, arrays_of(case), seed=seed, max_blocks=max_blocks)
    np.testing.assert_array_equal(found, expected_of(case))


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_projections_are_sums_in_float32(emulated: EmulatedHash, dtype: str) -> None:
    """Of ordinary numbers, too: a bucket differs from that of float64 only if two projections nearly tie."""
    case = case_of(1, 2, 128, 64, 4, 64, factors=(16, 16), dtype=dtype)
    source = torch.Generator().manual_seed(0)
    rotations = torch.randn(2, 64, 4, 16, generator=source)
    qk = torch.randn(1, 2, 128, 64, generator=source).to(case.torch_dtype)
    keep = torch.ones(1, 128, dtype=torch.bool)
    given = qk.view(torch.int16).numpy() if dtype == "bfloat16" else qk.numpy()
    found = emulated.hash(case, [given, rotations.numpy(), keep.numpy()])
    expected = op.reference(qk.double(), rotations, keep, (16, 16), 64).numpy()
    # a sum of 64 products of about 1 is off by about 1e-6, and one gap of 8000 is as narrow as that
    assert (found != expected).sum() <= 1


@pytest.mark.requires("native")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_changes_the_buckets_of_its_own_token_alone(emulated: EmulatedHash, value: float) -> None:
    case = case_of(1, 1, 20, 8, 2, 16, factors=(4, 6))
    arrays = arrays_of(case)
    arrays[2][:] = True
    arrays[0] = np.nan_to_num(arrays[0])
    healthy = emulated.hash(case, arrays)
    arrays[0][3 * 8] = value
    found = emulated.hash(case, arrays)
    assert {*np.argwhere(found != healthy)[:, 1]} <= {3}
    assert found.min() >= 0
    assert found[:, 3].max() < 24


@pytest.mark.requires("native")
@pytest.mark.parametrize("sizes", [(2**31, 1, 1), (1, 1, 2**31), (2**20, 2**11, 1), (2**31, 2**31, 2**31 - 200)])
def test_sizes_that_the_kernel_cannot_count_are_refused(emulated: EmulatedHash, sizes: tuple[int, int, int]) -> None:
    whole = np.array([*sizes, 4, 2, 16, 1, 4], np.int64)
    pointers = (ctypes.c_void_p * 4)(None, None, None, None)
    assert emulated.library.lsh_hash(0, pointers, ctypes.c_void_p(whole.ctypes.data)) == 1
