"""Local attention against a loop over queries, against transformers, and its rule for padding."""

from __future__ import annotations

import random

import pytest
import torch
from comparison import all_kept, tokens
from torch import Tensor, nn

from effexport.models.variants.local.contract import visible_keys
from effexport.models.variants.local.layer import LocalAttention
from effexport.models.variants.local.spec import LocalSpec


def local(seed: int = 0, **fields: object) -> LocalAttention:
    """`local` is not a variant, so its weights are drawn here, as in module_from_spec."""
    layer = LocalAttention(LocalSpec(**({"dim": 32, "heads": 2, "chunk_length": 8} | fields))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            gain = 2 if name.startswith(("query", "key")) else 1
            parameter.copy_(gain * layer.spec.dim**-0.5 * torch.randn(parameter.shape, generator=generator))
    return layer


def rows_with_a_key(spec: LocalSpec, keep: Tensor) -> Tensor:
    return torch.tensor([[bool(visible_keys(spec, t, row)) for t in range(len(row))] for row in keep.tolist()])


def random_transformers_case(seed: int) -> tuple[LocalAttention, Tensor, Tensor | None]:
    """A layer in its published form with torch's usual initialisation, an input and often a mask."""
    draw = random.Random(seed)
    heads, chunk = draw.choice([1, 2, 3]), draw.choice([4, 8, 16])
    before, after = draw.choice([(1, 0), (0, 0), (1, 1), (2, 0), (0, 1)])
    # within one chunk any length, otherwise whole chunks and no chunk twice in a window
    seq_len = draw.randint(1, chunk) if seed % 5 == 0 else chunk * draw.randint(max(2, 1 + before + after), 9)
    spec = LocalSpec(
        dim=draw.choice([8, 24, 32]),
        heads=heads,
        head_dim=draw.choice([4, 8, 16]),
        seq_len=seq_len,
        chunk_length=chunk,
        num_chunks_before=before,
        num_chunks_after=after,
        causal=draw.random() < 0.5,
        circular=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = LocalAttention(spec).eval()
    x = tokens(draw.choice([1, 2]), seq_len, spec.dim, seed=seed)
    mask = None
    if draw.random() < 0.5:
        mask = torch.ones(x.shape[:2], dtype=torch.int64)
        for row in mask:
            row[draw.randint(1, seq_len) :] = 0
    return layer, x, mask


def transformers_attention(layer: LocalAttention) -> nn.Module:
    """transformers' layer with the weights of ours."""
    from transformers.models.reformer.configuration_reformer import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LocalSelfAttention

    spec = layer.spec
    config = ReformerConfig(
        hidden_size=spec.dim,
        num_attention_heads=spec.heads,
        attention_head_size=spec.head_size,
        local_attn_chunk_length=spec.chunk_length,
        local_num_chunks_before=spec.num_chunks_before,
        local_num_chunks_after=spec.num_chunks_after,
        is_decoder=spec.causal,
    )
    oracle = LocalSelfAttention(config, layer_idx=0).eval()
    oracle.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("out.")})
    return oracle


@pytest.mark.requires("transformers")
@pytest.mark.parametrize("seed", range(30))
@torch.no_grad()
def test_the_published_form_equals_transformers(seed: int) -> None:
    layer, x, mask = random_transformers_case(seed)
    keep = all_kept(x) if mask is None else mask.bool()
    expected = transformers_attention(layer)(x, attention_mask=mask).hidden_states
    actual = layer.attend(x, keep)
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    # rows without any key: transformers' exp(x - logsumexp) is inexact at -1e9 and its weights do not add up
    # to one
    rows = rows_with_a_key(layer.spec, keep)
    assert rows.any()
    # values of order one, a few roundings of 6e-8 in another order
    assert float((actual - expected)[rows].abs().max()) <= 1e-6


@torch.no_grad()
def test_circular_chunks_leak_from_end_to_start_and_the_default_does_not() -> None:
    x = tokens(1, 64, 32)
    changed = x.clone()
    changed[:, 60:] += 1
    for circular in (False, True):
        layer = local(circular=circular)
        assert torch.equal(layer(changed)[:, :8], layer(x)[:, :8]) is not circular
