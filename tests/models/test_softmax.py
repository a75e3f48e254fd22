"""Softmax attention, the baseline of the other variants, against torch and transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from comparison import all_kept, relative_error, tokens
from torch import Tensor

from effexport.models.encoder.module import module_from_spec
from effexport.models.variants.softmax.contract import projected
from effexport.models.variants.softmax.layer import SoftmaxAttention, softmax_attention
from effexport.models.variants.softmax.spec import SoftmaxSpec

# Error of a logit in fp32 as a fraction of the largest Σ|q_i k_i| / √d: q and k are sums of 32 products, and so off by
# about √32 · 2^-25 = 1.7e-7 of what they sum; both errors are the logit's. Measured 2.2e-7 over 1000 tokens.
LOGIT_ROUNDING = 4e-7
# Of the values and of their weighted sum, were the weights exact: three units in the last place of the largest value,
# which is about ten times the RMS.
SUM_ROUNDING = 2e-6


def softmax(seed: int = 0, **fields: object) -> SoftmaxAttention:
    module = module_from_spec(SoftmaxSpec(**({"dim": 32, "heads": 4} | fields)), seed)
    assert isinstance(module, SoftmaxAttention)
    return module


def rounding(layer: SoftmaxAttention, x: Tensor, keep: Tensor) -> float:
    """A bound on the error of the output in fp32, as `relative_error` counts it.

    The softmax turns errors δ_s of the logits into Σ p_s δ_s (v_s − out) of the output, to first order: at most the
    largest δ times Σ p_s |v_s − out|.
    """
    q, k, v = projected(layer, x)
    scale = layer.spec.head_size**0.5
    visible = keep[:, None, None, :].expand(-1, 1, x.shape[1], -1)
    visible = visible.tril() if layer.spec.causal else visible
    weights = torch.softmax((q @ k.mT / scale).masked_fill(~visible, -torch.inf), dim=-1)
    out = weights @ v
    # a channel at a time: all at once would be [batch, heads, seq, seq, head_dim]
    spread = max(
        (weights * (v[..., i].unsqueeze(-2) - out[..., i].unsqueeze(-1)).abs()).sum(dim=-1).max()
        for i in range(v.shape[-1])
    )
    largest = (q.abs() @ k.abs().mT).amax() / scale
    return float(LOGIT_ROUNDING * largest * spread / out.square().mean().sqrt()) + SUM_ROUNDING


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seq_len", [1, 63, 64, 100, 1000])
@torch.no_grad()
def test_the_module_equals_the_attention_of_torch(seq_len: int, masked: bool, causal: bool) -> None:
    layer, x = softmax(causal=causal), tokens(2, seq_len, 32)
    keep = all_kept(x)
    if masked:
        keep[0, max(1, seq_len // 2) :] = False
        keep[1, 1:seq_len:3] = False
    visible = keep[:, None, None, :].expand(2, 1, seq_len, seq_len)
    if causal:
        visible = visible.tril()
    expected = F.scaled_dot_product_attention(*projected(layer, x), attn_mask=visible)
    expected = expected.transpose(1, 2).flatten(-2)
    assert relative_error(layer.attend(x, keep), expected) <= rounding(layer, x, keep)


@pytest.mark.requires("transformers")
@pytest.mark.parametrize("kernel_size", [1, 3, 33])
@pytest.mark.parametrize("seq_len", [1, 16, 63])
@torch.no_grad()
def test_with_a_convolution_it_equals_the_softmax_branch_of_transformers(seq_len: int, kernel_size: int) -> None:
    from transformers.models.nystromformer.configuration_nystromformer import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    layer, x = softmax(conv_kernel_size=kernel_size), tokens(2, seq_len, 32)
    config = NystromformerConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_landmarks=8,
        segment_means_seq_len=8,
        conv_kernel_size=kernel_size,
    )
    oracle = NystromformerSelfAttention(config).eval().double()
    oracle.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("out.")})
    (expected,) = oracle(x.double())
    # the convolution rounds far less than the logits do
    assert relative_error(layer.attend(x, all_kept(x)), expected) <= rounding(layer, x, all_kept(x))


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
