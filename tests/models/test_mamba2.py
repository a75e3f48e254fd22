"""Mamba-2 beside transformers' layer with the same weights."""

from __future__ import annotations

import pytest
import torch

from effexport.models.encoder.module import module_from_spec
from effexport.models.variants.mamba2 import Mamba2Spec
from effexport.models.variants.mamba2.layer import Mamba2


@pytest.mark.requires("transformers")
@torch.no_grad()
def test_the_layer_is_that_of_transformers_and_of_the_authors_code_in_several_groups() -> None:
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    x = torch.randn(2, 63, 32, generator=torch.Generator().manual_seed(0))
    for groups in (1, 2):
        spec = Mamba2Spec(dim=32, heads=4, head_dim=8, value_dim=16, groups=groups, bias=False)
        layer = module_from_spec(spec, 0)
        assert isinstance(layer, Mamba2)
        config = Mamba2Config(
            hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=groups, conv_kernel=4, chunk_size=16
        )
        original = Mamba2Mixer(config, 0)
        if groups > 1:  # Mamba2Mixer normalises all groups as one, unlike the authors' code and Zamba2
            original.norm = Zamba2RMSNormGated(64, 64 // groups, config.layer_norm_epsilon)
        ours = layer.state_dict()
        # x, B and C
        taps, bias = (
            torch.cat([y[16 * groups :], y[8 * groups : 16 * groups], y[: 8 * groups]])
            for y in (layer.taps, layer.taps_bias)
        )
        names = ("gate", "value", "key", "query", "dt")
        original.load_state_dict(
            {
                "in_proj.weight": torch.cat([ours[f"{name}.weight"] for name in names]),
                "conv1d.weight": taps.unsqueeze(1),
                "conv1d.bias": bias,
                "dt_bias": layer.dt_bias,
                "A_log": layer.a_log,
                "D": layer.skip,
                "norm.weight": layer.norm.weight,
                "out_proj.weight": layer.out.weight,
            }
        )
        # both are float32, with sums in other orders: 1.4e-6 was measured, of results near 1
        torch.testing.assert_close(layer(x), original.torch_forward(x), rtol=0, atol=1e-5)
