"""The contract of LSHHash."""

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
    Timed,
    Work,
    accesses,
    in_all_types,
    moved,
    parts,
    token_mask,
)
from effexport.plugins.lsh_hash import SIGNATURE, op


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """Integers, which float32 multiplies and adds up exactly, but neither TF32 nor half precision.

    Some tokens are hidden and hold NaN, some are zero. Two directions of a round are equal, and one is their opposite.
    Kind "no token": all of the last sample is hidden.
    """
    batch, heads, seq, head_dim, rounds, *_ = case.sizes
    source = case.generator(device)

    def integers(highest: int, *shape: int) -> Tensor:
        return torch.randint(-highest, highest + 1, shape, generator=source, device=device, dtype=torch.int32)

    rotations = integers(8191, heads, head_dim, rounds, sum(factors(case)) // 2).float()
    rotations[..., -1] = rotations[..., 0]
    rotations[..., rotations.shape[3] // 2] = -rotations[..., 0]
    keep = token_mask(source, batch, seq)
    if case.kind == "no token":
        keep[-1] = False
    qk = integers(min(15, 2**24 // (8191 * max(head_dim, 1))), batch, heads, seq, head_dim).to(case.torch_dtype)
    qk[:, :, ::17] = 0
    return {"qk": qk.masked_fill_(~keep[:, None, :, None], torch.nan), "rotations": rotations, "keep": keep}


def factors(case: Case) -> tuple[int, ...]:
    return case.sizes[7:]


def reference(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Factor by factor, the first of the largest projections, in float64; hidden tokens and padding come last."""
    qk, rotations, keep = inputs.values()
    seq, chunk_length = case.sizes[2], case.sizes[5]
    projected = torch.einsum("bhnd,hdrw->bhrnw", qk.double().nan_to_num(), rotations.double())
    stride, first, own = 1, 0, torch.zeros_like(projected[..., 0], dtype=torch.int64)
    for factor in factors(case):
        part = projected[..., first : first + factor // 2]
        own += stride * torch.cat([part, -part], dim=-1).argmax(dim=-1)
        stride, first = stride * factor, first + factor // 2
    buckets = own.new_full((*own.shape[:3], op.padded_length(seq, chunk_length)), stride)
    buckets[..., :seq] = torch.where(keep[:, None, None], own, stride)
    return {"buckets": buckets.flatten(0, 2).int()}


def intermediate(case: Case) -> int:
    """The projections on all directions."""
    _, heads, seq, _, rounds, *_ = case.sizes
    return heads * seq * rounds * sum(factors(case))


def limit(case: Case) -> Limit:
    return Limit(0.0, "projections of these integers are exact in float32, so each bucket has one right answer")


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """PyTorch without the operator, in float32 throughout."""
    qk, rotations, keep = inputs.values()
    return {"PyTorch": lambda: op.reference(qk, rotations, keep, factors(case), case.sizes[5])}


def case(*sizes: int, factors: tuple[int, ...], dtype: str = "float32", kind: str = "random") -> Case:
    return Case((*sizes, len(factors), *factors), dtype=dtype, kind=kind)


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
    signature=SIGNATURE,
    sizes="batch heads seq head_dim rounds chunk_length bucket_factors",
    derived={
        "rows": lambda sizes: sizes["batch"] * sizes["heads"] * sizes["rounds"],
        "padded": lambda sizes: op.padded_length(sizes["seq"], sizes["chunk_length"]),
    },
    inputs=inputs,
    exact=reference,
    limit=limit,
    baselines=baselines,
    work=work,
    raced=in_all_types(case(3, 1, 63, 33, 2, 16, factors=(4, 70))),
    small=in_all_types(
        case(1, 1, 1, 1, 1, 1, factors=(2,)),
        case(2, 2, 63, 33, 3, 16, factors=(4, 6)),
        case(1, 2, 130, 8, 2, 64, factors=(70,)),
    ),
    # blocks of tokens and tiles of directions that are full and not; padding that is longer than a block
    cases=in_all_types(
        case(3, 2, 63, 16, 2, 64, factors=(8,), kind="no token"),
        case(1, 1, 129, 64, 4, 7, factors=(32, 2)),
        case(2, 2, 150, 40, 2, 64, factors=(4, 34), kind="no token"),
        case(2, 1, 5, 20, 2, 300, factors=(2, 4, 6)),
        case(3, 2, 65, 33, 3, 7, factors=(4, 6)),
    ),
    larger=in_all_types(
        case(3, 2, 64, 64, 4, 16, factors=(16, 32)),
        case(3, 2, 100, 5, 1, 64, factors=(70,), kind="no token"),
        case(3, 2, 1000, 8, 2, 64, factors=(10,), kind="no token"),
    ),
    empty=tuple(case(*sizes, 3, 8, factors=(4,)) for sizes in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0))),
    body_refuses=tuple(case(*sizes, 3, 8, factors=(4,)) for sizes in ((0, 2, 3, 4), (2, 2, 3, 0))),
    unlaunched=tuple(case(*sizes, 3, 8, factors=(4,)) for sizes in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4))),
    hidden={"qk": (torch.nan, torch.inf, 1e30)},
    wrong_attributes=(
        ({"bucket_factors": (3, 7), "chunk_length": 7}, r"bucket_factors is \[3, 7\]"),
        ({"bucket_factors": (0, 10), "chunk_length": 7}, "bucket_factors is "),
        ({"bucket_factors": (2,) * 31, "chunk_length": 7}, r"bucket_factors is \[2, "),
        ({"bucket_factors": (4, 6), "chunk_length": 0}, "chunk_length is 0"),
        ({"bucket_factors": (4, 4), "chunk_length": 7}, "(rotations has shape|bucket_factors is)"),
    ),
    uncountable=tuple(
        (*sizes, 4, 2, 16, 1, 4)
        for sizes in ((2**31, 1, 1), (1, 1, 2**31), (2**20, 2**11, 1), (2**31, 2**31, 2**31 - 200))
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
