"""The contract of LSHHash. Sizes of a case: batch, heads, seq, head_dim, rounds, chunk_length, how
many bucket factors, and the factors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from effexport.plugins.contract import (
    AtMost,
    Case,
    Contract,
    FasterThan,
    Limit,
    Output,
    Timed,
    generator,
    in_all_types,
    token_mask,
)
from effexport.plugins.gpu_work import Work, accesses, moved, parts
from effexport.plugins.lsh_hash import op


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """Integers, which float32 multiplies and adds up exactly, but neither TF32 nor half precision.

    Some tokens are hidden and hold NaN, some are zero. Two directions of a round are equal, and one is their opposite.
    """
    batch, heads, seq, head_dim, rounds, *_ = case.sizes
    source = generator(case, device)

    def integers(highest: int, *shape: int) -> Tensor:
        return torch.randint(-highest, highest + 1, shape, generator=source, device=device, dtype=torch.int32)

    rotations = integers(8191, heads, head_dim, rounds, sum(factors(case)) // 2).float()
    rotations[..., -1] = rotations[..., 0]
    rotations[..., rotations.shape[3] // 2] = -rotations[..., 0]
    keep = token_mask(source, batch, seq)
    qk = integers(min(15, 2**24 // (8191 * head_dim)), batch, heads, seq, head_dim).to(case.torch_dtype)
    qk[:, :, ::17] = 0
    return {"qk": qk.masked_fill_(~keep[:, None, :, None], torch.nan), "rotations": rotations, "keep": keep}


def factors(case: Case) -> tuple[int, ...]:
    return case.sizes[7:]


def outputs(case: Case) -> dict[str, Output]:
    batch, heads, seq, _, rounds, chunk_length, *_ = case.sizes
    return {"buckets": Output((batch * heads * rounds, op.padded_length(seq, chunk_length)), torch.int32)}


def reference(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The operator's definition in float64."""
    qk, rotations, keep = inputs.values()
    return {"buckets": op.reference(qk.double().nan_to_num(), rotations.double(), keep, factors(case), case.sizes[5])}


def intermediate(case: Case) -> int:
    """The projections on all directions."""
    _, heads, seq, _, rounds, *_ = case.sizes
    return heads * seq * rounds * sum(factors(case))


def limit(case: Case) -> Limit:
    return Limit(0.0, "projections of these integers are exact in float32, so each bucket has one right answer")


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """What PyTorch does without the operator, in float32 throughout."""
    qk, rotations, keep = inputs.values()
    return {"PyTorch": lambda: op.reference(qk, rotations, keep, factors(case), case.sizes[5])}


def case(*sizes: int, factors: tuple[int, ...], dtype: str = "float32") -> Case:
    return Case((*sizes, len(factors), *factors), dtype=dtype)


def work(case: Case) -> Work:
    """A block has 128 tokens and 64 directions at a time, half as many as buckets, and 8 × 8 of them for each thread;
    projections go to shared memory, where one thread for each token reads them."""
    batch, heads, seq, head_dim, rounds, chunk_length, *_ = case.sizes
    blocks = batch * heads * parts(op.padded_length(seq, chunk_length), 128)
    tiles = parts(rounds * sum(factors(case)) // 2, 64)
    depth = parts(head_dim, 4) * 4
    # for each channel four times 16 bytes of a thread, of which a warp has 256 of tokens and 32 of directions
    channel = moved(4 * (128 + 64)) + accesses(4 * (2 * 2 + 2 * 1))
    return (channel * depth + Work(fused=128.0 * 64 * depth) + moved(2 * 4 * 128 * 64)) * (blocks * tiles)


def timed(dtype: str, goal: AtMost) -> Timed:
    faster = FasterThan("PyTorch", "projections need not be stored, negated and read again")
    return Timed(
        case(1, 8, 32768, 64, 4, 64, factors=(32, 32), dtype=dtype),
        case(1, 2, 100, 16, 2, 16, factors=(4, 6), dtype=dtype),
        (goal, faster),
    )


CONTRACT = Contract(
    inputs=inputs,
    outputs=outputs,
    exact=reference,
    limit=limit,
    baselines=baselines,
    work=work,
    small=in_all_types(
        case(1, 1, 1, 1, 1, 1, factors=(2,)),
        case(2, 2, 63, 33, 3, 16, factors=(4, 6)),
        case(1, 2, 130, 8, 2, 64, factors=(70,)),
    ),
    checked=in_all_types(
        case(2, 3, 1000, 100, 3, 7, factors=(2, 4, 6)),
        case(1, 2, 257, 65, 1, 64, factors=(1024,)),
        case(2, 8, 8192, 64, 4, 64, factors=(16, 16)),
    ),
    timed=(
        timed("float16", AtMost(1.7, "a search follows the products")),
        timed("float32", AtMost(1.7, "as for float16")),
    ),
    # buckets: 64 · 8 · 64 · 65600 elements
    huge=(case(64, 8, 65600, 8, 64, 64, factors=(2,), dtype="float16"),),
    intermediate=intermediate,
    shared=("rotations",),
)
