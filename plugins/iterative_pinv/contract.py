"""The contract of IterativePinv."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from effexport.plugins.contract import (
    ROWS,
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
)
from effexport.plugins.iterative_pinv import SIGNATURE

# softmax rows are as in Nyströmformer; the other kinds have many singular values at or near zero
KINDS = ("softmax", "nearly equal rows", "one large column", "zero")


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """A [count, m, m] and scale [count, 1, 1], the largest column sum of each matrix."""
    count, m, _ = case.sizes
    logits = torch.randn(count, m, m, generator=case.generator(device), device=device)
    a = torch.softmax(logits.mul_(2), dim=-1)
    if case.kind == "nearly equal rows":
        a = 1 / m + 1e-6 * a
    elif case.kind == "equal rows":
        a.fill_(1 / m)
    elif case.kind == "identity":
        a = torch.eye(m, device=device).repeat(count, 1, 1)
    elif case.kind == "one large column":
        a = torch.zeros_like(a).index_fill_(2, torch.tensor([0], device=device), 1.0)
    elif case.kind == "zero":
        a.zero_()
    smallest = torch.finfo(torch.float16).tiny  # a divisor that exists in all types
    scale = a.sum(dim=1).amax(dim=-1).clamp(min=smallest).reshape(-1, 1, 1)
    return {"A": a.to(case.torch_dtype), "scale": scale.to(case.torch_dtype)}


def reference(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Z0 = Aᵀ / scale, then Z ← Z/4 (13 I − P (15 I − P (7 I − P))) with P = A Z, in float64."""
    _, m, iterations = case.sizes
    a, scale = (x.double() for x in inputs.values())
    seven, fifteen, thirteen = (factor * torch.eye(m, dtype=a.dtype, device=a.device) for factor in (7, 15, 13))
    z = a.mT / scale
    for _ in range(iterations):
        p = torch.bmm(a, z)
        z = torch.bmm(z, thirteen - torch.bmm(p, fifteen - torch.bmm(p, seven - p))) / 4
    return {"Z": z}


def limit(case: Case) -> Limit:
    value = 3e-4 if case.sizes[1] <= 64 else 1e-3
    reason = "the contract's limit: roundings near singular values of zero grow by 13/4 a step"
    if case.kind == "softmax":
        value, reason = 1e-5, "products as exact as float32's of at most 128 terms, whose roundings later steps shrink"
    return Limit(value + case.rounding, f"{reason}; and one rounding of the result")


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """Four batched products a step, which also subtract from the identity, in float32."""
    _, m, iterations = case.sizes
    a, scale = (x.float() for x in inputs.values())
    seven, fifteen, thirteen = (factor * torch.eye(m, device=a.device)[None] for factor in (7, 15, 13))

    def products() -> Tensor:
        z = a.mT / scale
        for _ in range(iterations):
            p = a @ z
            inner = torch.baddbmm(fifteen, p, seven - p, alpha=-1)
            outer = torch.baddbmm(thirteen, p, inner, alpha=-1)
            z = torch.baddbmm(z, z, outer, beta=0, alpha=0.25)
        return z

    return {"products": products}


def work(case: Case) -> Work:
    """Four products a step. Up to m = 128 each is three products of halves, of a whole side of 32, 64, 96 or 128, whose
    factors lie in shared memory; larger matrices are multiplied by way of scratch memory, panel by panel of 64 × 64."""
    count, m, iterations = case.sizes
    if m > 128:
        side = parts(m, 8) * 8
        products = 4.0 * count * iterations * side**3
        # four matrices of each block
        return Work(fused=products, scratch=16.0 * min(count, 256) * side**2)
    side = parts(m, 32) * 32
    warps = side // ROWS * 2
    # by every warp, as halves: 16 rows of the left factor and half of the right one; and two scales for every 16 terms
    multiply = Work(tensor=3.0 * side**3)
    multiply += moved(warps * 2 * 2 * (ROWS * side + side**2 / 2)) + accesses(warps * 2 * side / ROWS)
    # A, P, X twice, and Z as right and as left factor
    stored = moved(2 * 2 * side**2) + accesses(warps)
    return (multiply * 4 + stored * 6) * (count * iterations)


def timed(count: int, m: int, *goals: AtMost | FasterThan) -> Timed:
    """In float32, in which layers call it."""
    return Timed(Case((count, m, 6), kind="softmax"), Case((2, 8, 6), kind="softmax"), goals)


FUSED = FasterThan("products", "one launch that keeps everything in shared memory, instead of 24 products", times=5)


CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="N m iterations",
    inputs=inputs,
    exact=reference,
    limit=limit,
    baselines=baselines,
    work=work,
    raced=(
        *in_all_types(*(Case((3, m, steps), kind="softmax") for m, steps in ((24, 2), (40, 1)))),
        *(Case((3, m, 1), kind="softmax") for m in (70, 129)),
    ),
    small=in_all_types(
        *(Case((2, m, 6), kind=kind) for m in (1, 31) for kind in KINDS),
        *(Case((2, m, 1), kind="softmax") for m in (65, 129)),
    ),
    cases=(
        # around the sides of tiles, of 16 and of 32; above 64 and above 128 other kernels compute
        *(Case((2, m, 6), kind="softmax") for m in (7, 8, 9, 15, 16, 32, 33, 48)),
        *in_all_types(*(Case((2, m, 6), kind="softmax") for m in (2, 63, 64))),
        *(Case((3, 17, iterations), kind="softmax") for iterations in range(1, 9)),
        *(Case((1, m, 1), kind="softmax") for m in (31, 64, 65, 96, 97, 129)),
        *(Case((1, m, 6), kind=kind) for m in (31, 64, 65) for kind in ("equal rows", "identity")),
        *in_all_types(*(Case((1, m, 6), kind=kind) for m in (65, 128) for kind in ("softmax", "nearly equal rows"))),
    ),
    larger=(
        Case((70, 17, 1), kind="softmax"),
        *in_all_types(*(Case((count, m, 6), kind="softmax") for count, m in ((70, 63), (2, 100), (2, 128)))),
    ),
    empty=(Case((0, 8, 6), kind="softmax"),),
    torch_halves=False,
    wrong_attributes=(
        ({"iterations": 0}, "iterations is 0"),
        ({"iterations": "6"}, "attribute iterations has another type"),
    ),
    uncountable=((2**31, 4, 6), (1, 46337, 6), (1, 4, 0), (1, 4, 2**31), (-1, 4, 6)),
    # shared memory serves m up to 64, 96 or 128, depending on the GPU, and scratch memory more
    checked=in_all_types(
        *(Case((5, m, 6), kind=kind) for m in (2, 63, 64, 96, 100, 128, 130) for kind in KINDS),
        Case((768, 64, 1), kind="softmax"),
        Case((768, 64, 6), kind="softmax"),
    ),
    timed=(
        timed(
            96,
            64,
            FUSED,
            AtMost(5.5, "24 products in a row: each waits for the one before, and most of the GPU has one block each"),
        ),
        timed(768, 64, FUSED),
        timed(96, 128, FasterThan("products", "a kernel must not be slower than the body that it replaces")),
    ),
    # a and z: 524,416 · 64 · 64 elements each
    huge=(Case((524_416, 64, 6), kind="softmax", dtype="float16"),),
    intermediate=lambda case: case.sizes[1] ** 2,
)
