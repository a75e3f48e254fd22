"""Code that casts, mixes types or asks for autocast, in a half-precision copy: it is as right as half precision can be.

The oracle is the same code in float32 on the same weights. It runs as it stands, before anything is rounded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.user.model import called_by_position
from effexport.models.user.modes import FloatTypes, OnePrecision

pytestmark = pytest.mark.requires("torch")

DIM = 16
# Share of the RMS that one product with a few dozen terms, and what follows it, is off where everything is rounded.
LIMITS = {torch.float16: 1e-2, torch.bfloat16: 8e-2}
Forward = Callable[["Layers", Tensor, Tensor], Tensor]


class Layers(nn.Module):
    """Layers for the code under test, `forward`."""

    def __init__(self, code: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.code = code
        self.linear, self.qkv = nn.Linear(DIM, DIM), nn.Linear(DIM, 3 * DIM)
        self.norm, self.lstm = nn.LayerNorm(DIM, eps=1e-12), nn.LSTM(DIM, DIM, batch_first=True)
        self.conv, self.batch_norm = nn.Conv1d(DIM, DIM, 3, padding=1), nn.BatchNorm1d(DIM)
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 4)
        self.register_buffer("frequencies", 10_000.0 ** (-torch.arange(0, DIM, 2).float() / DIM))
        self.register_buffer("hidden", torch.tensor(-1e9))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.code(self, x, mask)


def attention(m: Layers, x: Tensor, hide: Callable[[Tensor], Tensor]) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, dim=-1)
    return hide(q @ k.transpose(1, 2) / DIM**0.5).softmax(dim=-1) @ v


def turned(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def zeroed(x: Tensor) -> Tensor:
    """With zeros in the place of the first token."""
    return torch.cat((x[:, :1] * 0, x[:, 1:]), dim=1)


def mean_of_kept(m: Layers, x: Tensor, mask: Tensor) -> Tensor:
    kept = mask.unsqueeze(-1).expand(x.shape).float()
    return m.linear((x * kept).sum(1) / kept.sum(1).clamp(min=1e-9))


def rms_norm_by_hand(m: Layers, x: Tensor, mask: Tensor) -> Tensor:
    x = 500 * x
    return m.linear(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def layer_norm_in_float32(m: Layers, x: Tensor, mask: Tensor) -> Tensor:
    normed = F.layer_norm(x.float(), (DIM,), m.norm.weight.float(), m.norm.bias.float(), m.norm.eps).type_as(x)
    return m.linear(normed) + m.linear(m.norm(x.to(torch.float32)))


def region_without_autocast(m: Layers, x: Tensor, mask: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.linear(x.float() @ m.weight.float())


def sinusoids(m: Layers, x: Tensor, mask: Tensor) -> Tensor:
    steps = torch.arange(x.shape[1], dtype=torch.float32)[:, None]
    angles = steps * torch.exp(torch.arange(0, DIM, 2).float() * (-math.log(10_000.0) / DIM))
    return m.linear(x + torch.cat((angles.sin(), angles.cos()), dim=-1))


def rotary(m: Layers, x: Tensor, mask: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(x.shape[1]).type_as(m.frequencies), m.frequencies)
    return turned(m.linear(x), angles)


def kernel_features(m: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (3 * m.qkv(x)).chunk(3, dim=-1)
    q, k = q.exp(), k.exp()
    sums = torch.einsum("bnd,bd->bn", q, k.sum(1)) + 1e-6
    return torch.einsum("bnd,bde,bn->bne", q, torch.einsum("bnd,bne->bde", k, v), 1 / sums)


def fills_in_place(m: Layers, x: Tensor, mask: Tensor) -> Tensor:
    def hide(logits: Tensor) -> Tensor:
        logits.masked_fill_(~mask[:, None], -1e9)
        logits[:, 0, 1] = -1e30
        return logits

    return attention(m, x, hide)


def probabilities_near_one(m: Layers, x: Tensor, mask: Tensor) -> Tensor:
    p = (x > 0).to(x.dtype).clamp(1e-6, 1 - 1e-6)
    return torch.log(p / (1 - p)) + m.linear(x)


CODES: dict[str, Forward] = {
    "x.float()": lambda m, x, mask: m.linear(m.linear(x).float().relu()),
    "x.to(float32)": lambda m, x, mask: m.linear(x.to(torch.float32) * 2),
    "x.type(float)": lambda m, x, mask: m.linear(x.type(torch.float)).type_as(x),
    "x.double()": lambda m, x, mask: m.linear(m.linear(x).double().softmax(-1).float()),
    "x.half()": lambda m, x, mask: m.linear(m.linear(x).half().float()),
    "x.bfloat16()": lambda m, x, mask: m.linear(m.linear(x).bfloat16().to(x.dtype)),
    "float32 @ parameter": lambda m, x, mask: x.float() @ m.weight + x.float() @ m.linear.weight.t(),
    "mean of the kept tokens": mean_of_kept,
    "mask by einsum": lambda m, x, mask: m.linear(
        torch.einsum("bn,bnd->bd", mask.float(), x) / (mask.sum(1) + 1e-8)[:, None]
    ),
    "float32 constants": lambda m, x, mask: m.linear(
        x
        + torch.zeros(x.shape[1], 1)
        + torch.full((1,), 0.5) * torch.arange(x.shape[1], dtype=torch.float32)[:, None] / 1e3
    ),
    "the smallest number of its type": lambda m, x, mask: attention(
        m, x, lambda a: a.masked_fill(~mask[:, None], torch.finfo(a.dtype).min)
    ),
    "the smallest float32": lambda m, x, mask: attention(
        m, x, lambda a: torch.where(mask[:, None], a, torch.finfo(torch.float32).min)
    ),
    "-1e9 by masked_fill": lambda m, x, mask: attention(m, x, lambda a: a.masked_fill(~mask[:, None], -1e9)),
    "-10**9 by masked_fill": lambda m, x, mask: attention(m, x, lambda a: a.masked_fill(~mask[:, None], -(10**9))),
    "-1e9 in a buffer": lambda m, x, mask: attention(m, x, lambda a: torch.where(mask[:, None], a, m.hidden)),
    "-1e30 added": lambda m, x, mask: attention(m, x, lambda a: a + (~mask[:, None]).float() * -1e30),
    "-10000 added": lambda m, x, mask: attention(m, x, lambda a: a + (1 - mask[:, None].to(a.dtype)) * -10000),
    "-inf above the diagonal": lambda m, x, mask: attention(
        m, x, lambda a: a + torch.full(a.shape[1:], float("-inf")).triu(1)
    ),
    "product of boolean masks": lambda m, x, mask: attention(
        m, x, lambda a: a.masked_fill(~(mask[..., None] * mask[:, None]), -1e9)
    ),
    "fills in place": fills_in_place,
    "float mask of scaled_dot_product_attention": lambda m, x, mask: F.scaled_dot_product_attention(
        *(y[:, None] for y in m.qkv(x).chunk(3, -1)), attn_mask=(~mask).float()[:, None, None] * -1e9
    ),
    "sqrt(0 + 1e-12)": lambda m, x, mask: m.linear(x / torch.sqrt(zeroed(x).abs() + 1e-12).clamp(min=1)),
    "0 / (0 + 1e-8)": lambda m, x, mask: m.linear(zeroed(x) / (zeroed(x).norm(dim=-1, keepdim=True) + 1e-8)),
    "rsqrt(0 + 1e-8)": lambda m, x, mask: x * torch.rsqrt(zeroed(x).square().sum(-1, keepdim=True) + 1e-8) / 1e4,
    "normalize": lambda m, x, mask: m.linear(F.normalize(zeroed(x), dim=-1)),
    "cosine_similarity": lambda m, x, mask: F.cosine_similarity(zeroed(x), m.linear(x), dim=-1),
    "log(0 + 1e-10)": lambda m, x, mask: torch.log(zeroed(x).softmax(-1) * (x > 0) + 1e-10),
    "1 - 1e-6": probabilities_near_one,
    "softmax in float32": lambda m, x, mask: m.linear(x).softmax(-1, dtype=torch.float32) @ m.weight,
    "softmax in float32 and back": lambda m, x, mask: m.linear(
        F.softmax(m.linear(x), -1, dtype=torch.float32).to(x.dtype)
    ),
    "layer norm, eps 1e-12": lambda m, x, mask: m.norm(zeroed(x)) + m.linear(x),
    "layer norm in float32": layer_norm_in_float32,
    "rms_norm without eps": lambda m, x, mask: m.linear(F.rms_norm(0.02 * x, (DIM,))),
    "rms norm by hand of large numbers": rms_norm_by_hand,
    "batch norm": lambda m, x, mask: m.batch_norm(m.conv(x.float().transpose(1, 2))),
    "lstm of float32 with a float32 state": lambda m, x, mask: m.lstm(
        x.float(), (torch.zeros(1, 2, DIM), torch.zeros(1, 2, DIM))
    )[0],
    "region without autocast": region_without_autocast,
    "sinusoids": sinusoids,
    "rotary": rotary,
    "means of large numbers": lambda m, x, mask: m.linear((1e4 * x.abs()).sum(1, dtype=torch.float32) / 1e7),
    "exponentials": kernel_features,
    "gelu with a third power": lambda m, x, mask: 50 * x * (1 + torch.tanh(0.8 * (50 * x + 0.045 * (50 * x) ** 3))),
    "bmm after casts": lambda m, x, mask: torch.bmm(x.float() @ x.float().transpose(1, 2) / DIM, m.linear(x)),
    "setitem of another type": lambda m, x, mask: torch.zeros_like(x).index_copy_(
        1, torch.arange(4), m.linear(x)[:, :4].float()
    ),
}


def called(code: Forward) -> nn.Module:
    return called_by_position(Layers(code).eval(), ["x", "mask"], {})


def inputs(seq_len: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    kept = torch.arange(seq_len) < torch.tensor([[seq_len - 3], [seq_len]])
    # float16 and bfloat16 both hold numbers of eight bits
    return (torch.randn(2, seq_len, DIM, generator=generator) * 32).round() / 32, kept


def in_half(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    lower = copy.deepcopy(module)
    lower.to_half(dtype)  # type: ignore[operator]
    return lower


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max() / expected.double().square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", CODES)
def test_code_written_for_float32_is_right_in_half_precision(name: str, dtype: torch.dtype) -> None:
    module = called(CODES[name])
    x, mask = inputs()
    with torch.no_grad():
        (expected,) = module(x, mask)
        (actual,) = in_half(module, dtype)(x.to(dtype), mask)
    assert actual.dtype == dtype
    assert expected.isfinite().all()
    assert error(actual, expected) <= LIMITS[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_token_3000_is_turned_as_in_float32(dtype: torch.dtype) -> None:
    x, mask = inputs(3000)
    for code in (
        rotary,
        lambda m, x, mask: turned(m.linear(x), torch.arange(x.shape[1])[:, None].to(x.dtype) * m.frequencies),
    ):
        module = called(code)
        with torch.no_grad():
            (expected,) = module(x, mask)
            (actual,) = in_half(module, dtype)(x.to(dtype), mask)
        assert error(actual, expected) <= LIMITS[dtype]


def under_autocast(dtype: torch.dtype) -> Forward:
    def code(m: Layers, x: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            y = attention(m, x, lambda a: a.masked_fill(~mask[:, None], -1e4))
            with torch.autocast("cpu", enabled=False):
                y = m.linear(y.float())
            if torch.is_autocast_enabled("cpu"):
                y = y.to(torch.get_autocast_dtype("cpu"))
            return m.lstm(m.linear(y))[0]

    return code


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_autocast_has_no_effect_at_one_precision(dtype: torch.dtype) -> None:
    module = called(under_autocast(dtype))
    x, mask = inputs()
    with torch.no_grad(), OnePrecision(torch.float32), FloatTypes() as types:
        (once,) = module(x, mask)
    assert types.found == {torch.float32}
    with torch.no_grad(), OnePrecision(torch.float64), FloatTypes() as types:
        (exact,) = copy.deepcopy(module).double()(x.double(), mask)
    assert not types.found & {torch.float16, torch.bfloat16}
    assert error(once, exact) <= 1e-5  # float32 rounding
    with torch.no_grad():
        (rounded,) = module(x, mask)
        assert 1e-4 < error(rounded, exact) <= LIMITS[torch.bfloat16]  # the original's own
        (actual,) = in_half(module, torch.float16)(x.half(), mask)
    assert not torch.is_autocast_enabled("cpu")
    assert actual.dtype == torch.float16
    assert error(actual, exact) <= LIMITS[torch.float16]


def test_autocast_is_on_again_after_a_function_that_fails() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with OnePrecision(torch.float32), pytest.raises(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)
        assert torch.is_autocast_enabled("cpu")


def test_parameters_are_rounded_and_buffers_are_not_but_for_statistics() -> None:
    lower = in_half(called(CODES["batch norm"]), torch.float16)
    assert {x.dtype for x in lower.parameters()} == {torch.float16}
    types = {name.split(".")[-1]: x.dtype for name, x in lower.named_buffers() if x.is_floating_point()}
    assert types["frequencies"] == types["hidden"] == torch.float32
    assert types["running_mean"] == types["running_var"] == torch.float16


def test_large_indices_are_not_taken_for_large_numbers() -> None:
    x = torch.zeros(70_000, dtype=torch.float16)
    with OnePrecision(torch.float16):
        x[69_999] = 1
        x[69_998] = 1e9
        made = torch.full((70_000,), -1e9, dtype=torch.float16)
    assert x[69_999] == 1
    assert x[69_998] == torch.finfo(torch.float16).max
    assert made.shape == (70_000,)
    assert made[0] == torch.finfo(torch.float16).min
