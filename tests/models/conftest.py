"""Fixtures of the AFT tests: the four variants with their biases, and the slow reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.layers import AttentionLayer
from effexport.models.variants.aft.layer import AFTPositionLayer, bias_full, gated_sums
from effexport.models.variants.aft_conv import AFTConvSpec
from effexport.models.variants.aft_conv.layer import AFTConvAttention, bias_conv
from effexport.models.variants.aft_full import AFTFullSpec
from effexport.models.variants.aft_full.layer import AFTFullAttention
from effexport.models.variants.aft_local import AFTLocalSpec
from effexport.models.variants.aft_local.layer import AFTLocalAttention, bias_local
from effexport.models.variants.aft_simple import AFTSimpleSpec
from effexport.models.variants.aft_simple.layer import AFTSimpleAttention, bias_simple

DIM = 8


@dataclass(frozen=True)
class AFTVariant:
    """The parts of an AFT variant that tests need.

    build(causal=..., seq_len=..., ...) → a layer with random biases; bias(layer, seq_len) → its w, float64
    [heads, seq, seq], written from the formula.
    """

    build: Callable[..., AttentionLayer]
    bias: Callable[[AttentionLayer, int], Tensor]


def build_simple(causal: bool, seq_len: int = 256) -> AFTSimpleAttention:
    return AFTSimpleAttention(AFTSimpleSpec(dim=DIM, causal=causal, seq_len=seq_len))


def with_biases(layer: AFTPositionLayer, std: float) -> AFTPositionLayer:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("position_"):
                parameter.normal_(std=std)
    return layer


def build_full(causal: bool, seq_len: int = 256, std: float = 0.5, **fields: Any) -> AFTFullAttention:
    fields = {"position_dim": 4, **fields}
    return with_biases(AFTFullAttention(AFTFullSpec(dim=DIM, causal=causal, seq_len=seq_len, **fields)), std)


def build_local(causal: bool, seq_len: int = 256, std: float = 0.5, **fields: Any) -> AFTLocalAttention:
    fields = {"position_dim": 4, "window": 12, **fields}
    return with_biases(AFTLocalAttention(AFTLocalSpec(dim=DIM, causal=causal, seq_len=seq_len, **fields)), std)


def build_conv(causal: bool, seq_len: int = 256, kernel_size: int = 11, heads: int = 2) -> AFTConvAttention:
    spec = AFTConvSpec(dim=DIM, heads=heads, causal=causal, seq_len=seq_len, kernel_size=kernel_size)
    layer = AFTConvAttention(spec)
    with torch.no_grad():
        layer.gamma.normal_(std=2)
        layer.beta.normal_(std=2)
    return layer


def with_full_bias(build: Callable[..., AttentionLayer]) -> Callable[..., AttentionLayer]:
    """The same with a w that is learned as it is, with entries of order one."""
    return lambda causal, seq_len=256, **fields: build(causal, seq_len, 1.0, position_bias="full", **fields)


AFT_VARIANTS = {
    "aft-simple": AFTVariant(build_simple, bias_simple),
    "aft-full": AFTVariant(build_full, bias_full),
    "aft-full with a full bias": AFTVariant(with_full_bias(build_full), bias_full),
    "aft-local": AFTVariant(build_local, bias_local),
    "aft-local with a full bias": AFTVariant(with_full_bias(build_local), bias_local),
    "aft-conv": AFTVariant(build_conv, bias_conv),
}


@pytest.fixture(params=AFT_VARIANTS)
def aft(request: pytest.FixtureRequest) -> AFTVariant:
    """Each variant in turn."""
    return AFT_VARIANTS[request.param]


@pytest.fixture
def aft_simple() -> AFTVariant:
    return AFT_VARIANTS["aft-simple"]


@pytest.fixture
def aft_full() -> AFTVariant:
    return AFT_VARIANTS["aft-full"]


@pytest.fixture
def aft_local() -> AFTVariant:
    return AFT_VARIANTS["aft-local"]


@pytest.fixture
def aft_conv() -> AFTVariant:
    return AFT_VARIANTS["aft-conv"]


@pytest.fixture
def aft_reference() -> Callable[[AttentionLayer, Tensor, Tensor, Tensor], Tensor]:
    """(layer, x, keep [batch, seq], w [heads, seq, seq]) → float64 [batch, seq, dim], by the formula."""

    def reference(layer: AttentionLayer, x: Tensor, keep: Tensor, w: Tensor) -> Tensor:
        bias = None if layer.out.bias is None else layer.out.bias.double()
        return F.linear(gated_sums(layer, x, keep, w), layer.out.weight.double(), bias)

    return reference


@pytest.fixture
def aft_key_gap() -> Callable[[AttentionLayer, Tensor, int, float], Tensor]:
    """(layer, x, position, gap) → x whose keys are about `gap` larger at `position`, in each channel.

    The last input channel carries the gap: it is added to every key and is 0 elsewhere.
    """

    @torch.no_grad()
    def with_gap(layer: AttentionLayer, x: Tensor, position: int, gap: float) -> Tensor:
        layer.key.weight[:, -1] = 1.0
        x = x.clone()
        x[..., -1] = 0.0
        x[:, position, -1] = gap
        return x

    return with_gap
