"""Gated linear attention in the parallel form of its paper."""

from __future__ import annotations

import torch

from effexport.models.encoder.module import module_from_spec
from effexport.models.variants.gla import GLASpec
from effexport.models.variants.gla.layer import GatedLinearAttention


@torch.no_grad()
def test_the_layer_is_the_parallel_form_of_the_paper() -> None:
    """((Q ⊙ B)(K / B)ᵀ ⊙ M) V, B the products of decays from the start: section 4.1 of arXiv 2312.06635."""
    layer = module_from_spec(GLASpec(dim=32, heads=4, value_dim=12), 0)
    assert isinstance(layer, GatedLinearAttention)
    x = torch.randn(2, 100, 32, generator=torch.Generator().manual_seed(0))
    given = layer(x)
    layer, x = layer.double(), x.double()
    projected = [linear(x) for linear in (layer.query, layer.key, layer.value, layer.gate)]
    projected.append(layer.decay_up(layer.decay_down(x)))
    q, k, v, g, logits = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in projected)
    products = (torch.sigmoid(logits) ** (1 / 16)).cumprod(dim=2)
    read = ((q * products) @ (k / products).transpose(-1, -2)).tril() @ v / 8**0.5
    normed = torch.nn.functional.rms_norm(read, (12,), layer.norm.weight, eps=1e-5) * g * torch.sigmoid(g)
    # float32: 1.8e-6 was measured, of results near 1
    torch.testing.assert_close(given.double(), layer.out(normed.transpose(1, 2).flatten(2)), rtol=0, atol=1e-5)
