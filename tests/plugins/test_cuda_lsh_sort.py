"""The CUDA kernel of effexport::LSHSort, emulated."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from bucket_patterns import bucket_rows
from cuda_kernels import ALL_BLOCKS, Emulated, assert_guard_is_intact, guarded

from effexport.plugins.lsh_sort import trt as trt_sort
from effexport.plugins.lsh_sort.op import reference as sort_reference


class EmulatedSort(Emulated):
    op = "lsh_sort"

    def __init__(self) -> None:
        super().__init__()
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self.library.lsh_sort.argtypes = [pointer, integer, integer, integer, pointer, pointer]

    def sort(
        self, buckets: np.ndarray, num_buckets: int, *, seed: int = 0, max_blocks: int = ALL_BLOCKS
    ) -> tuple[np.ndarray, np.ndarray]:
        buckets = np.ascontiguousarray(buckets, np.int32)
        order, whole_order = guarded(buckets.shape, buckets.dtype)
        rank, whole_rank = guarded(buckets.shape, buckets.dtype)
        self.library.set_schedule(seed, max_blocks)
        pointers = (order.ctypes.data, rank.ctypes.data)
        error = self.library.lsh_sort(buckets.ctypes.data, *buckets.shape, num_buckets, *pointers)
        assert error == 0
        assert_guard_is_intact(whole_order)
        assert_guard_is_intact(whole_rank)
        return order, rank


@pytest.fixture(scope="module")
def emulated() -> EmulatedSort:
    return EmulatedSort()


LENGTHS = [1, 2, 63, 100, 1000, 4096]
# one less, equal to and one more than a digit; the largest single pass and one more; two digits; what LSH layers use
BUCKETS = [1, 2, 31, 32, 33, 65, 257, 352, 353, 1025, 4096, 65537]
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
@pytest.mark.parametrize("num_buckets", [5, 33, 352, 1025, INT32_MAX])
@pytest.mark.parametrize("seed", range(1, 5))
def test_the_sort_does_not_depend_on_the_schedule(emulated: EmulatedSort, seed: int, num_buckets: int) -> None:
    buckets = bucket_rows(1500, num_buckets)
    assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets, seed=100 * seed))


@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [4, 353])
def test_a_block_sorts_one_row_after_another(emulated: EmulatedSort, num_buckets: int) -> None:
    buckets = bucket_rows(200, num_buckets)
    assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets, max_blocks=2))


@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [1, 7, 352, 353, 4096, INT32_MAX])
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


@pytest.mark.soak
@pytest.mark.requires("native")
@pytest.mark.parametrize("num_buckets", [*BUCKETS, INT32_MAX])
def test_long_rows_are_sorted(emulated: EmulatedSort, num_buckets: int) -> None:
    buckets = bucket_rows(65536, num_buckets)
    assert_sorted(buckets, num_buckets, *emulated.sort(buckets, num_buckets, seed=num_buckets))


@pytest.mark.requires("native")
def test_the_tensorrt_plugin_launches_the_sort_as_its_source_does(emulated: EmulatedSort) -> None:
    for num_buckets in [*BUCKETS, 256, 32768, 32769, 1 << 24, (1 << 24) + 1, INT32_MAX]:
        emulated.sort(np.zeros((2, 1)), num_buckets, max_blocks=1)
        assert emulated.launch() == [2, trt_sort.BLOCK_THREADS, trt_sort.shared_bytes(num_buckets)]
