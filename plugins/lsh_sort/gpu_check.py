"""What scripts/gpu checks and times of LSHSort. Sizes of a case: rows, n, num_buckets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from effexport.plugins.gpu_check import (
    AtMost,
    Case,
    FasterThan,
    GpuCheck,
    Limit,
    Output,
    Timed,
    Work,
    generator,
)
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


def flops(case: Case) -> float:
    return 0.0


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """torch.sort, and with the inverse permutation, which is what the operator returns."""
    (buckets,) = inputs.values()
    return {
        "torch.sort": lambda: torch.sort(buckets, dim=-1, stable=True),
        "torch.sort and inverse": lambda: op.reference(buckets, case.sizes[2]),
    }


def case(rows: int, n: int, num_buckets: int, kind: str = "random") -> Case:
    return Case((rows, n, num_buckets), kind=kind, dtype="int32")


def work(case: Case) -> dict[str, Work]:
    """In one pass: twelve ballots rank 32 tokens; before that, every block of a row counts all of its tokens."""
    rows, n, _ = case.sizes
    tiles = -(-n // 8192)
    blocks = min(max(1, 128 // rows), tiles)
    amounts = {"VOTE": rows * n / 32 * 12, "ATOMS": rows * blocks * n / 32, "STG": rows * n / 32 * 2}
    return {"effexport_lsh_sort": Work(amounts, (1, 1), loaded=rows * (blocks + 1) * n * 4)}


def timed(rows: int, n: int, num_buckets: int, *goals: AtMost) -> Timed:
    faster = FasterThan("torch.sort", "a counting sort reads keys of a few bits; torch.sort treats them as 32")
    return Timed(case(rows, n, num_buckets), case(2, 100, num_buckets), (faster, *goals))


CHECK = GpuCheck(
    inputs=inputs,
    outputs=outputs,
    reference=reference,
    limit=limit,
    flops=flops,
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
        timed(32, 32768, 1025, AtMost(15, "13 MB in 3 µs, and the rest to count and rank")),
        timed(16, 8192, 257),
        timed(256, 16384, 257),
    ),
    huge=(case(2049, 2**20, 257),),
)
