"""Rotary positions: in every variant that compares queries with keys, against a product of complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import relative_error
from torch import Tensor

from effexport.models.attention_spec import QueryKeySpec
from effexport.models.encoder.module import module_from_spec
from effexport.models.layers import MultiHeadAttention, fused_operators, rotary_angles, rotate_pairs
from effexport.models.validation import SpecError
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.local import LocalSpec
from effexport.models.variants.local.layer import LocalAttention
from effexport.models.variants.nystrom import NystromSpec
from effexport.models.variants.softmax import SoftmaxSpec

# Angles of up to 1000 are float32: their sines are off by 6e-5 of a turn at most, in the channels that turn fastest.
ANGLES = 1e-4
FLOAT32 = 1e-5

SIZES: dict[str, Any] = {"dim": 32, "heads": 2, "seq_len": 64, "rotary": True}
SPECS = {
    "softmax": SoftmaxSpec(**SIZES),
    "causal softmax": SoftmaxSpec(**SIZES, causal=True),
    "linear": LinearSpec(**SIZES),
    "causal linear": LinearSpec(**SIZES, causal=True),
    "nystrom": NystromSpec(**SIZES, num_landmarks=8, conv_kernel_size=None),
    "local": LocalSpec(**SIZES, chunk_length=8),
}


def layer_of(spec: QueryKeySpec) -> MultiHeadAttention:
    if isinstance(spec, LocalSpec):
        torch.manual_seed(0)
        return LocalAttention(spec).eval()
    layer = module_from_spec(spec, 0)
    assert isinstance(layer, MultiHeadAttention)
    return layer


def turned(x: Tensor) -> Tensor:
    """x [batch, heads, seq, size], its channels 2i and 2i + 1 turned by position / 10000^(2i / size), in float64."""
    seq_len, size = x.shape[2:]
    speed = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(seq_len, dtype=torch.float64)[:, None] * speed
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:3], size // 2, 2).contiguous())
    return torch.view_as_real(pairs * torch.exp(1j * angles)).flatten(3)


def test_pairs_turn_as_complex_numbers_do() -> None:
    x = torch.randn(2, 3, 1000, 16, generator=torch.Generator().manual_seed(0))
    assert relative_error(rotate_pairs(x, *rotary_angles(1000, 16, x.device)), turned(x)) <= ANGLES


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_queries_and_keys_are_turned_before_the_formula(name: str) -> None:
    layer = layer_of(SPECS[name])
    x = 3 * torch.randn(2, 63, 32, generator=torch.Generator().manual_seed(1))
    keep = torch.ones(2, 63, dtype=torch.bool)
    keep[1, 40:] = False
    plain = layer_of(
        type(layer.spec)(**{k: v for k, v in layer.spec.to_dict().items() if k not in ("variant", "rotary")})
    )
    q, k, v = plain.project(x)
    expected = plain.mix((turned(q).float(), turned(k).float(), v), keep)
    with fused_operators(layer, enabled=False):
        given = layer.mix(layer.project(x), keep)
    kept = keep[:, None, :, None].expand_as(given)
    assert relative_error(given[kept], expected[kept]) <= FLOAT32
    assert relative_error(plain.mix((q, k, v), keep)[kept], expected[kept]) > 1e-2


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_only_distances_between_tokens_count_in_softmax_attention(causal: bool) -> None:
    layer = layer_of(SoftmaxSpec(**SIZES, causal=causal))
    x = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(1))
    later, keep = torch.cat([torch.zeros(1, 20, 32), x], dim=1), torch.arange(60)[None] >= 20
    assert relative_error(layer(later, keep)[:, 20:], layer(x)) <= FLOAT32


def test_a_step_that_does_not_know_its_position_is_not_offered() -> None:
    assert LinearSpec(causal=True).has_decode_step
    assert not LinearSpec(causal=True, rotary=True).has_decode_step


@pytest.mark.parametrize("spec", [SoftmaxSpec, LinearSpec, NystromSpec])
def test_heads_with_an_odd_number_of_channels_are_refused(spec: type[QueryKeySpec]) -> None:
    with pytest.raises(SpecError, match="a head has 5; use an even head_dim"):
        spec(head_dim=5, rotary=True)
