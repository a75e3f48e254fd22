"""The contract of LSHSort."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from effexport.plugins.contract import AtMost, Case, Contract, FasterThan, Limit, Timed, Work, accesses, moved, parts
from effexport.plugins.lsh_sort import SIGNATURE, op


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """Random buckets. Kind "patterns": rows in one bucket, descending, alternating between the ends, nearly sorted."""
    rows, n, num_buckets = case.sizes
    buckets = torch.randint(num_buckets, (rows, n), generator=case.generator(device), dtype=torch.int32, device=device)
    if case.kind == "patterns":
        position = torch.arange(n, dtype=torch.int32, device=device)
        buckets[1::6] = 0
        buckets[2::6] = num_buckets - 1
        buckets[3::6] = (n - 1 - position).long() * num_buckets // max(n, 1)
        buckets[4::6] = (position + 1) % 2 * (num_buckets - 1)
        buckets[5::6] = buckets[5::6].sort(dim=1).values.roll(1, dims=1)
    return {"buckets": buckets}


def reference(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A sort of buckets and places together, and its inverse."""
    buckets = inputs["buckets"].long()
    order = (buckets * buckets.shape[1] + torch.arange(buckets.shape[1], device=buckets.device)).argsort(dim=1)
    return {"order": order.int(), "rank": order.argsort(dim=1).int()}


def limit(case: Case) -> Limit:
    return Limit(0.0, "the result has exactly one right answer")


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """torch.sort, and with the inverse permutation, which is what the operator returns."""
    (buckets,) = inputs.values()
    return {
        "torch.sort": lambda: torch.sort(buckets, dim=-1, stable=True),
        "torch.sort and inverse": lambda: op.reference(buckets, case.sizes[2]),
    }


def case(rows: int, n: int, num_buckets: int, kind: str = "random") -> Case:
    return Case((rows, n, num_buckets), kind=kind, dtype="int32")


def work(case: Case) -> Work:
    """A row is counted by each of its blocks, or once before if that is much less; tiles are ranked and written."""
    rows, n, num_buckets = case.sizes
    tiles = parts(n, 8192)
    if num_buckets <= 1216:
        blocks, passes, radix = min(max(1, 128 // rows), tiles), 1, num_buckets
    else:
        blocks, passes, radix = 1, parts((num_buckets - 1).bit_length(), 10), 1024
    counted_first = tiles - tiles // blocks >= 5
    # ranking reads and writes a counter; places are read, staged and read, and two offsets with them
    tokens = accesses(rows * parts(n, 32) * ((1 if counted_first else blocks) + 2 + 4))
    # the counters of 16 warps are cleared, added up, and replaced
    counters = moved(rows * tiles * 16 * 2 * radix * 4)
    counts = 4.0 * rows * blocks * radix * counted_first
    return (tokens + counters) * passes + Work(scratch=counts, again=(4.0 * rows * n + counts,) * counted_first)


def timed(rows: int, n: int, num_buckets: int, *goals: AtMost) -> Timed:
    faster = FasterThan("torch.sort", "a counting sort reads keys of a few bits; torch.sort treats them as 32")
    return Timed(case(rows, n, num_buckets), case(2, 100, num_buckets), (faster, *goals))


CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="N n num_buckets",
    inputs=inputs,
    exact=reference,
    limit=limit,
    baselines=baselines,
    work=work,
    raced=(case(3, 70, 1217, "patterns"), case(3, 1000, 33, "patterns"), case(1, 8200, 5), case(1, 5 * 8192 + 1, 700)),
    small=tuple(
        case(1 if n > 5 * 8192 else 6, n, num_buckets, "patterns")
        for n, num_buckets in ((1, 1), (63, 2), (100, 1217), (1000, 33), (5 * 8192 + 1, 700), (257, 1025))
    ),
    # what LSH layers use; one less, equal to and one more than a digit and a block of the body, and than one pass
    cases=tuple(
        case(6, n, num_buckets, "patterns")
        for n, num_buckets in (
            *((2, 1), (63, 2), (100, 31), (127, 32), (128, 33), (129, 65), (300, 1024), (1000, 257)),
            *((1500, 5), (1500, 1025), (1000, 1216), (1500, 1217), (4096, 4096), (63, 65537)),
            *((1000, 2**20), (1000, 2**20 + 1), (40_963, 1216), (1500, 2**31 - 1)),
        )
    ),
    larger=(case(130, 257, 33), *(case(6, 65536, num_buckets, "patterns") for num_buckets in (2, 33, 4096))),
    empty=(case(0, 7, 4), case(3, 0, 4), case(0, 0, 4)),
    body_refuses=(case(0, 7, 4), case(3, 0, 4), case(0, 0, 4)),
    per_node=("num_buckets",),
    wrong_attributes=(
        ({"num_buckets": 0}, "num_buckets is 0"),
        ({"num_buckets": 2**31}, "num_buckets is 2147483648"),
        ({"num_buckets": 2.5}, "attribute num_buckets has another type"),
        ({}, "attribute num_buckets is missing"),
    ),
    uncountable=((2**31, 1, 4), (1, 2**31, 4), (1, 1, 0), (1, 1, 2**31), (-1, 1, 4)),
    checked=tuple(
        case(10, n, num_buckets, "patterns")
        for n in (1, 2, 63, 1000, 8193, 65536, 131_073)
        for num_buckets in (1, 31, 32, 257, 1025, 1216, 1217, 4096)
    ),
    timed=(
        timed(32, 32768, 1025, AtMost(5, "counting and ranking wait for each other, and nothing hides the launch")),
        timed(16, 8192, 257),
        timed(256, 16384, 257),
        timed(8, 65536, 1025),
    ),
    huge=(case(2049, 2**20, 257),),
)
