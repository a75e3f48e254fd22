"""The CUDA kernel of effexport::LSHSort, emulated."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from bucket_patterns import bucket_rows
from cuda_kernels import ALL_BLOCKS, Emulated, assert_guard_is_intact, guarded

from effexport.plugins.lsh_sort.op import reference as sort_reference


class EmulatedSort(Emulated):
    op = "lsh_sort"

    def __init__(self) -> None:
        super().__init__()
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self.library.lsh_sort.argtypes = [pointer, integer, integer, integer, pointer, pointer]
        self.library.lsh_sort_rank_bytes.argtypes = [integer, integer, integer]
        self.library.lsh_sort_rank_bytes.restype = ctypes.c_size_t

    def sort(
        self,
        buckets: np.ndarray,
        num_buckets: int,
        *,
        seed: int = 0,
        max_blocks: int = ALL_BLOCKS,
        inverse: bool = True,
    ) -> tuple[np.ndarray, np.ndarray]:
        """order and rank. Without `inverse`, the kernel is given no rank, and it stays −1."""
        buckets = np.ascontiguousarray(buckets, np.int32)
        order, whole_order = guarded(buckets.shape, buckets.dtype)
        rank, whole_rank = guarded(buckets.shape, buckets.dtype)
        self.library.set_schedule(seed, max_blocks)
        pointers = (order.ctypes.data, rank.ctypes.data if inverse else None)
        error = self.library.lsh_sort(buckets.ctypes.data, *buckets.shape, num_buckets, *pointers)
        assert error == 0
        assert_guard_is_intact(whole_order)
        assert_guard_is_intact(whole_rank)
        return order, rank


@pytest.fixture(scope="module")
def emulated() -> EmulatedSort:
    return EmulatedSort()


@pytest.mark.requires("native")
def test_libraries_of_one_process_count_their_own_launches(emulated: EmulatedSort, tmp_path: Path) -> None:
    other = ctypes.CDLL(shutil.copy(emulated.library._name, tmp_path / "other.so"))
    emulated.sort(np.zeros((5, 1)), 1)
    result = np.zeros((3, 1), np.int32)
    address = ctypes.c_void_p(result.ctypes.data)
    other.lsh_sort(address, ctypes.c_int64(3), ctypes.c_int64(1), ctypes.c_int64(1), address, None)
    assert emulated.launch()[0] == 5


LENGTHS = [1, 2, 63, 100, 1000, 4096]
# small ones; what LSH layers use; the largest single pass and one more; two digits
BUCKETS = [1, 2, 31, 32, 33, 65, 257, 1025, 1216, 1217, 4096, 65537]
TILE = 8192
INT32_MAX = 2**31 - 1


def assert_sorted(buckets: np.ndarray, num_buckets: int, order: np.ndarray, rank: np.ndarray) -> None:
    """Exactly the reference's order and rank, of the buckets moved into range."""
    expected = sort_reference(torch.from_numpy(buckets.clip(0, num_buckets - 1)), num_buckets)
    np.testing.assert_array_equal(order, expected[0].numpy())
    np.testing.assert_array_equal(rank, expected[1].numpy())


@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [*BUCKETS, INT32_MAX])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_sort_equals_the_reference(emulated: EmulatedSort, length: int, num_buckets: int) -> None:
    buckets = bucket_rows(length, num_buckets)
    assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets))


@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [5, 33, 1025, 1217, INT32_MAX])
@pytest.mark.parametrize("seed", range(1, 5))
def test_the_sort_does_not_depend_on_the_schedule(emulated: EmulatedSort, seed: int, num_buckets: int) -> None:
    buckets = bucket_rows(1500, num_buckets)
    assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets, seed=100 * seed))


@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [4, 1217])
def test_a_block_sorts_one_row_after_another(emulated: EmulatedSort, num_buckets: int) -> None:
    buckets = bucket_rows(200, num_buckets)
    assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets, max_blocks=2))


@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [1, 7, 1216, 1217, 4096, INT32_MAX])
def test_buckets_out_of_range_are_taken_for_the_nearest_in_range(emulated: EmulatedSort, num_buckets: int) -> None:
    generator = np.random.default_rng(0)
    buckets = generator.integers(-(2**31), 2**31, (2, 300)).astype(np.int32)
    buckets[:, ::3] = generator.integers(0, num_buckets, (2, 100))
    buckets[:, ::5] = [[-1], [num_buckets if num_buckets < INT32_MAX else -2]]
    assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets))


@pytest.mark.requires("native")
@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (0, 0)])
def test_the_sort_accepts_empty_inputs(emulated: EmulatedSort, shape: tuple[int, int]) -> None:
    assert emulated.library.lsh_sort(None, *shape, 4, None, None) == 0


@pytest.mark.requires("native")
@pytest.mark.parametrize("arguments", [(2**31, 1, 4), (1, 2**31, 4), (1, 1, 0), (1, 1, 2**31), (-1, 1, 4)])
def test_the_sort_refuses_what_its_kernel_cannot_count(emulated: EmulatedSort, arguments: tuple[int, int, int]) -> None:
    assert emulated.library.lsh_sort(None, *arguments, None, None) == 1


@pytest.mark.requires("native")
@pytest.mark.parametrize("length", [TILE - 1, TILE, TILE + 1, 3 * TILE + 77])
@pytest.mark.parametrize("num_buckets", [3, 1025])
def test_blocks_share_long_rows(emulated: EmulatedSort, num_buckets: int, length: int) -> None:
    buckets = bucket_rows(length, num_buckets)[[0, 3]]
    for max_blocks in (ALL_BLOCKS, 3):
        assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets, max_blocks=max_blocks, seed=length))
        assert emulated.launch()[0] == 2 * -(-length // TILE)


@pytest.mark.slow
@pytest.mark.requires("native")
def test_many_rows_have_a_block_each_which_takes_their_tiles_in_turn(emulated: EmulatedSort) -> None:
    buckets = np.random.default_rng(0).integers(0, 9, (65, TILE + 1)).astype(np.int32)
    order, rank = emulated.sort(buckets, 9, max_blocks=1)
    assert emulated.launch()[0] == 65
    assert_sorted(buckets, 9, order, rank)


@pytest.mark.requires("native")
@pytest.mark.parametrize("length", [1000, TILE + 1])
def test_rank_is_written_only_if_wanted(emulated: EmulatedSort, length: int) -> None:
    buckets = bucket_rows(length, 33)
    order, rank = emulated.sort(buckets, 33, inverse=False)
    np.testing.assert_array_equal(order, sort_reference(torch.from_numpy(buckets), 33)[0].numpy())
    assert (rank == -1).all()
    # several passes keep the unfinished order in it
    assert emulated.library.lsh_sort_rank_bytes(6, length, 1216) == 0
    assert emulated.library.lsh_sort_rank_bytes(6, length, 1217) == 4 * 6 * length
    assert emulated.library.lsh_sort(buckets.ctypes.data, 6, length, 1217, order.ctypes.data, None) == 1


@pytest.mark.requires("native")
def test_rows_at_odd_addresses_are_sorted(emulated: EmulatedSort) -> None:
    buckets = np.empty(2 * 1000 + 1, np.int32)[1:].reshape(2, 1000)
    buckets[:] = bucket_rows(1000, 33)[:2]
    assert buckets.ctypes.data % 16 != 0
    assert_sorted(buckets, 33, *emulated.sort(buckets, 33))


@pytest.mark.soak
@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [*BUCKETS, INT32_MAX])
def test_long_rows_are_sorted(emulated: EmulatedSort, num_buckets: int) -> None:
    buckets = bucket_rows(65536, num_buckets)
    assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets, seed=num_buckets))
