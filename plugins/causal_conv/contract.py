"""The contract of CausalConv."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.plugins.causal_conv import SIGNATURE
from effexport.plugins.contract import Case, Contract, FasterThan, Limit, Timed, Work, in_all_types, parts, token_mask


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """A tenth of the tokens and the last quarter of the last sample are hidden: NaN in x.

    Kind "no token": all of the last sample is hidden. "visible": no token is. "padded": one third of the tokens, before
    the others in the first sample and after them in the last one. "few": all but the first and the last token. "large":
    values of about 100, at which SiLU has reached its limits.
    """
    batch, seq, channels, taps, _ = case.sizes
    source = case.generator(device)
    x, past = case.normal(source, batch, seq, channels), case.normal(source, batch, taps - 1, channels)
    weight, bias = case.normal(source, channels, taps) / taps**0.5, case.normal(source, channels)
    keep = token_mask(source, batch, seq)
    if case.kind == "no token":
        keep[-1] = False
    elif case.kind == "visible":
        keep[:] = True
    elif case.kind == "padded":
        keep[:] = True
        keep[:1, : seq // 3] = False
        keep[-1:, seq - seq // 3 :] = False
    elif case.kind == "few":
        keep[:, 1:-1] = False
        keep[:, [0, -1]] = True
    elif case.kind == "large":
        x *= 100
    x.masked_fill_(~keep[..., None], torch.nan)
    return {"x": x, "weight": weight, "bias": bias, "past": past, "keep": keep}


def exact(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The kept tokens of each sample are sorted to its front, behind `past`, and convolved in float64."""
    _, seq, _, taps, silu = case.sizes
    x, weight, bias, past, keep = inputs.values()
    front = (~keep).long().argsort(dim=1, stable=True)[..., None].expand(x.shape)
    rows = torch.cat([past.double(), x.double().gather(1, front)], dim=1)
    sums = bias.double()
    for tap in range(taps):
        sums = sums + weight[:, tap].double() * rows[:, tap : tap + seq]
    results = sums * torch.sigmoid(sums) if silu else sums
    y = torch.zeros_like(results).scatter(1, front, results)
    last = keep.sum(dim=1)[:, None, None] + torch.arange(taps - 1, device=x.device)[:, None]
    present = rows.gather(1, last.expand(past.shape))
    return {"y": torch.where(keep[..., None], y, 0.0), "present": present}


def limit(case: Case) -> Limit:
    reason = (
        "up to 42 additions in float32: roundings of at most 6e-8 of the largest value, of either sign, which add up "
        "like a random walk to 4e-7, and an exponential within 2e-7; and one rounding of the result"
    )
    return Limit(1e-6 + case.rounding, reason)


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """PyTorch's counterpart where no token is hidden: a depth-wise convolution of channels before tokens."""
    x, weight, bias, past, _ = inputs.values()
    _, _, channels, _, silu = case.sizes

    def convolution() -> Tensor:
        rows = torch.cat([past, x], dim=1).transpose(1, 2)
        sums = F.conv1d(rows, weight[:, None], bias, groups=channels)
        return (F.silu(sums) if silu else sums).transpose(1, 2).contiguous()

    return {"conv1d": convolution}


def work(case: Case) -> Work:
    """A multiply-add for each tap. Tokens that two blocks read are in the second cache."""
    batch, seq, channels, taps, _ = case.sizes
    return Work(fused=float(batch * seq * taps) * parts(channels, 128) * 128)


def activated(*cases: Case) -> tuple[Case, ...]:
    """With SiLU and without, in all types."""
    return in_all_types(*(Case((*case.sizes, silu), case.numbers, case.kind) for case in cases for silu in (0, 1)))


def timed(dtype: str) -> Timed:
    large, small = (Case((*shape, 4, 1), (), "visible", dtype) for shape in ((4, 4096, 8192), (1, 20, 64)))
    return Timed(large, small, (FasterThan("conv1d", "one pass over x in the place of four"),))


# No samples, which ONNX Runtime refuses in the body; no channels. No tokens.
NOTHING = ((0, 5, 8, 4), (2, 5, 0, 4))
NO_TOKENS = (2, 0, 8, 4)

CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="batch seq channels taps silu",
    derived={"before": lambda known: int(known["taps"]) - 1},
    inputs=inputs,
    exact=exact,
    limit=limit,
    small=(
        *activated(Case((2, 1, 1, 2)), Case((1, 1, 8, 4)), Case((2, 10, 20, 33)), Case((2, 63, 33, 3))),
        *activated(Case((2, 40, 5, 4), kind="padded")),
    ),
    # the CPU kernel has units of 128 tokens and 256 channels, the CUDA kernel blocks of 32 tokens and 128 channels
    cases=activated(
        Case((3, 1, 16, 4), kind="no token"),
        Case((3, 130, 24, 4)),
        Case((3, 70, 9, 4), kind="few"),
        Case((3, 99, 33, 2), kind="padded"),
        Case((3, 20, 7, 1)),
        Case((2, 33, 40, 5), kind="large"),
        Case((3, 64, 130, 41), kind="no token"),
        Case((2, 70, 20, 4), kind="visible"),
    ),
    larger=activated(
        Case((3, 1000, 24, 4)),
        Case((2, 300, 600, 3), kind="padded"),
        Case((2, 700, 8, 4), kind="few"),
        Case((1, 1, 1000, 4), kind="visible"),
    ),
    empty=tuple(Case((*shape, silu)) for shape in (*NOTHING, NO_TOKENS, (2, 0, 8, 1)) for silu in (0, 1)),
    body_refuses=tuple(Case((*NOTHING[0], silu)) for silu in (0, 1)),
    unlaunched=tuple(Case((*shape, silu)) for shape in NOTHING for silu in (0, 1)),
    shared=("weight", "bias"),
    hidden={"x": (torch.nan, torch.inf, 1e30)},
    wrong_attributes=(({"silu": 2}, "silu is 2"), ({"silu": 1.0}, "attribute silu has another type")),
    wrong_sizes=({"weight": (20, 0)}, {"past": (2, 4, 20)}),
    uncountable=(
        (2**31, 1, 1, 4, 0),
        (1, 2**31 - 1, 1, 4, 0),
        (1, 1, 2**31 - 1, 4, 0),
        (1, 1, 1, 2**31, 0),
        (2**16, 2**20, 2**10, 4, 0),
    ),
    baselines=baselines,
    work=work,
    raced=activated(Case((2, 70, 130, 4)), Case((2, 40, 130, 6))),
    checked=activated(
        Case((2, 1000, 24, 4)),
        Case((3, 333, 8192, 4), kind="padded"),
        Case((64, 1, 8192, 4), kind="visible"),
        Case((3, 700, 130, 9), kind="few"),
    ),
    timed=(timed("float16"), timed("float32")),
    # x and y: 1000 · 3000 · 1000 elements each
    compared=20,
    huge=(Case((1000, 3000, 1000, 4, 1), dtype="float16"),),
)
