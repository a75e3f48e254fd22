"""Lower bounds on the time of a call: amounts of work over the rates of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu.bounds import Rates, bound_of
from gpu.budget import GPUS

from effexport.plugins.contract import ACCESS_BYTES, Case, Work, attention_core, load_contract, product
from effexport.plugins.ops import CUDA_OPS

RATES = Rates(copied=1e12, tensor=1e14, fused=1e13, shared=1e13, cache_bytes=50e6)


def work_of(name: str, *sizes: int, numbers: tuple[float, ...] = (), dtype: str = "float16") -> Work:
    return load_contract(CUDA_OPS[name]).work(Case(sizes, numbers, dtype=dtype))


@pytest.mark.parametrize(
    ("work", "resource", "us"),
    [
        (Work(), "memory", 100),
        (Work(scratch=1e8), "memory", 200),
        (Work(scratch=1e8, again=(1e8, 4e7)), "memory", 250),  # of the first, the cache holds half; the second fits
        (Work(tensor=1.1e10), "tensor cores", 110),
        (Work(fused=1.1e9), "multiply-adds", 110),
        (Work(shared=1.1e9), "shared memory", 110),
    ],
)
def test_the_slowest_resource_bounds_a_call(work: Work, resource: str, us: float) -> None:
    bound = bound_of(work, 10**8, RATES)
    assert (bound.resource, bound.us) == (resource, pytest.approx(us))
    assert bound.moved == 1e8 + work.scratch + sum(work.again)


def test_clocks_and_multiprocessors_give_the_rates_of_float32_and_of_shared_memory() -> None:
    rates = Rates.of(copied=3e12, tensor=4e14, multiprocessors=132, clock_hz=1.98e9, cache_bytes=5e7)
    assert rates.fused == rates.shared == pytest.approx(33.45e12, rel=1e-3)


def test_a_tile_of_attention_takes_as_many_accesses_as_its_machine_code_says() -> None:
    # of a warp of 16 queries, for 64 keys: 32 ldmatrix of 512 bytes, 8 copies of 512 bytes, 16 loads of limits and 4
    # shuffles; of one of 32 queries that see all of them, as many but for twice the shuffles and no limits
    for fragments, others in ((1, 16 + 4), (2, 8)):
        once, twice = (
            attention_core(
                2, 1, tiles, 64, queries=64 * fragments, fragments=fragments, masked=tiles * (fragments == 1)
            )
            for tiles in (1, 2)
        )
        assert twice.shared - once.shared == 4 * (32 * 4 + 8 * 4 + others) * ACCESS_BYTES


@pytest.mark.parametrize("left", ["rows", "columns", "registers"])
@pytest.mark.parametrize("size", [2, 4])
def test_products_grow_with_all_of_their_sides(size: int, left: str) -> None:
    small = product(size, 16, 64, 64, left=left)
    assert (small.tensor + small.fused, small.tensor == 0) == (16 * 64 * 64, size == 4)
    for sides in ((32, 64, 64), (16, 64, 128)):
        assert product(size, *sides, left=left) == small * 2


def test_known_cases_have_known_bounds() -> None:
    attention = bound_of(
        work_of("MaskedAttention", 1, 8, 8192, 8192, 64, 64, numbers=(0.125,)), 33_562_624, GPUS["H200"]
    )
    assert (attention.resource, attention.us) == ("shared memory", pytest.approx(185, abs=1))
    # one launch; and of 192 heads, which do not occupy the GPU, keys and values twice, and states written, read,
    # replaced and read
    for batch, moved, us in ((32, 786_624_000, 183), (24, 0.75 * 1.633e9, 243)):
        work = work_of("EluLinearAttention", batch, 8, 6000, 64, 64, 1, 0, numbers=(1e-6,))
        causal = bound_of(work, batch * 24_582_000, GPUS["H200"])
        assert causal.moved == pytest.approx(moved, rel=2e-3)
        assert (causal.resource, causal.us) == ("memory", pytest.approx(us, abs=1))
    # negated projections are not computed
    hashed = work_of("LSHHash", 1, 8, 32768, 64, 4, 64, 2, 32, 32, dtype="float32")
    assert hashed.fused == 8 * 32768 * 64 * 4 * 32


@pytest.mark.parametrize("op", CUDA_OPS.values(), ids=lambda op: op.torch_name)
def test_twice_as_many_samples_are_twice_the_work(op) -> None:
    check = load_contract(op)
    for timed in check.timed:
        case = replace(timed.case, sizes=(128 * timed.case.sizes[0], *timed.case.sizes[1:]))
        twice = replace(case, sizes=(2 * case.sizes[0], *case.sizes[1:]))
        small, large = (check.work(each) for each in (case, twice))
        for name in ("fused", "tensor", "shared"):
            assert getattr(large, name) == pytest.approx(2 * getattr(small, name)), (timed.case.name, name)
        assert sum(small.again) <= sum(large.again)
        assert all(value >= 0 for value in (small.fused, small.tensor, small.shared, small.scratch, *small.again))
