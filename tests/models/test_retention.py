"""Retention in the parallel form of its paper."""

from __future__ import annotations

import torch

from effexport.models.encoder.module import module_from_spec
from effexport.models.variants.retention import RetentionSpec
from effexport.models.variants.retention.layer import Retention


@torch.no_grad()
def test_the_layer_is_the_parallel_form_of_the_paper_and_its_normalisations_change_nothing() -> None:
    """(Q Kᵀ ⊙ D) V, D_nm = γ^(n − m), with the normalisations of section 2.1: eq. 5 and 8 of arXiv 2307.08621."""
    layer = module_from_spec(RetentionSpec(dim=32, heads=4, value_dim=12, norm_eps=1e-12), 0)
    assert isinstance(layer, Retention)
    x = torch.randn(2, 100, 32, generator=torch.Generator().manual_seed(0))
    given = layer(x)
    layer, x = layer.double(), x.double()
    q, k, v = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (layer.query, layer.key, layer.value))
    position = torch.arange(100)
    distance = position[:, None] - position
    gamma = (1 - torch.exp2(-5.0 - torch.arange(4).double()))[:, None, None]
    decays = torch.where(distance >= 0, gamma ** distance.clamp(min=0), 0.0)
    decays = decays / decays.sum(dim=-1, keepdim=True).sqrt()
    retained = q @ k.transpose(-1, -2) / 8**0.5 * decays
    retained = retained / retained.sum(dim=-1, keepdim=True).abs().clamp(min=1)
    read = (retained @ v).transpose(1, 2).flatten(0, 1).flatten(1)
    normed = torch.nn.functional.group_norm(read, 4, layer.norm.weight, layer.norm.bias, eps=1e-12)
    gated = normed.unflatten(0, (2, 100)) * torch.nn.functional.silu(layer.gate(x))
    # float32: 1.8e-6 was measured, of results near 1
    torch.testing.assert_close(given.double(), layer.out(gated), rtol=0, atol=1e-5)
