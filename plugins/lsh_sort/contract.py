"""The contract of LSHSort. Sizes of a case: rows, n, num_buckets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from effexport.plugins.contract import AtMost, Case, Contract, FasterThan, Limit, Output, Timed, generator
from effexport.plugins.gpu_work import Work, accesses, moved, parts
from effexport.plugins.lsh_sort import op


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """Random buckets. Kind "patterns": rows in one bucket, in descending order and alternating between the ends too."""
    rows, n, num_buckets = case.sizes
    shape = (rows, n)
    source = generator(case, device)
    buckets = torch.randint(num_buckets, shape, generator=source, dtype=torch.int32, device=device)
    if case.kind == "patterns":
        position = torch.arange(n, dtype=torch.int32, device=device)
        buckets[1::5] = 0
        buckets[2::5] = num_buckets - 1
        buckets[3::5] = (n - 1 - position) * num_buckets // max(n, 1)
        buckets[4::5] = (position + 1) % 2 * (num_buckets - 1)
    return {"buckets": buckets}


def outputs(case: Case) -> dict[str, Output]:
    rows, n, _ = case.sizes
    return {name: Output((rows, n), torch.int32) for name in ("order", "rank")}


def reference(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """PyTorch's stable sort."""
    order, rank = op.reference(inputs["buckets"], case.sizes[2])
    return {"order": order, "rank": rank}


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
    """Every block of a row counts all of it. Then the tokens of a tile are ranked, put in order and written."""
    rows, n, num_buckets = case.sizes
    tiles = parts(n, 8192)
    if num_buckets <= 1216:
        blocks, passes, radix = min(max(1, 128 // rows), tiles), 1, num_buckets
    else:
        blocks, passes, radix = 1, parts((num_buckets - 1).bit_length(), 10), 1024
    # ranking reads and writes a counter; places are read, staged and read, and two offsets with them
    tokens = accesses(rows * parts(n, 32) * (blocks + 2 + 4))
    # the counters of 16 warps are cleared, added up, and replaced
    counters = moved(rows * tiles * 16 * 2 * radix * 4)
    return (tokens + counters) * passes


def timed(rows: int, n: int, num_buckets: int, *goals: AtMost) -> Timed:
    faster = FasterThan("torch.sort", "a counting sort reads keys of a few bits; torch.sort treats them as 32")
    return Timed(case(rows, n, num_buckets), case(2, 100, num_buckets), (faster, *goals))


CONTRACT = Contract(
    inputs=inputs,
    outputs=outputs,
    exact=reference,
    limit=limit,
    baselines=baselines,
    work=work,
    small=tuple(
        case(5, n, num_buckets, "patterns")
        for n, num_buckets in ((1, 1), (63, 2), (100, 1217), (1000, 33), (257, 1025))
    ),
    checked=tuple(
        case(10, n, num_buckets, "patterns")
        for n in (1, 2, 63, 1000, 8193, 65536)
        for num_buckets in (1, 31, 32, 257, 1025, 1216, 1217, 4096)
    ),
    timed=(
        timed(32, 32768, 1025, AtMost(5, "counting and ranking wait for each other, and nothing hides the launch")),
        timed(16, 8192, 257),
        timed(256, 16384, 257),
    ),
    huge=(case(2049, 2**20, 257),),
)
