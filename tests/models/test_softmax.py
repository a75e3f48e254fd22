"""Softmax attention beyond test_variants.py: samples that see nothing, and large logits."""

from __future__ import annotations

import pytest
import torch
from comparison import all_kept, tokens

from effexport.models.encoder.module import module_from_spec
from effexport.models.variants.softmax import SoftmaxSpec
from effexport.models.variants.softmax.layer import SoftmaxAttention, softmax_attention


def softmax(seed: int = 0, **fields: object) -> SoftmaxAttention:
    module = module_from_spec(SoftmaxSpec(**({"dim": 32, "heads": 4} | fields)), seed)
    assert isinstance(module, SoftmaxAttention)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@torch.no_grad()
def test_a_fully_masked_sample_averages_over_its_values(dtype: torch.dtype) -> None:
    layer, x = softmax().to(dtype), tokens(2, 63, 32).to(dtype)
    keep = all_kept(x)
    keep[1] = False
    actual = layer.attend(x, keep)[1]
    mean = layer.value(x[1]).double().mean(dim=0).expand(63, 32)
    # 63 products and the weights 1/63 rounded to the dtype
    torch.testing.assert_close(actual.double(), mean, rtol=0, atol=4 * torch.finfo(dtype).eps)


@torch.no_grad()
def test_large_half_precision_logits_do_not_overflow() -> None:
    # q·k is 230400, beyond the 65504 of fp16; q·k / √64 is 28800, within it
    q = torch.full((1, 1, 4, 64), 60.0, dtype=torch.float16)
    v = tokens(1, 1, 4, 64).half()
    actual = softmax_attention(q, q, v, torch.ones(1, 1, 1, 4, dtype=torch.bool))
    assert torch.isfinite(actual).all()
    # equal logits: the mean, rounded to fp16
    torch.testing.assert_close(actual, v.mean(dim=2, keepdim=True).expand_as(v), rtol=0, atol=2e-3)
