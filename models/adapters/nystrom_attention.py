"""nystrom-attention: its attention layer is ours with `convention="nystrom-attention"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapter, NotExportableError, NotReplaceableError, weight_alone
from effexport.models.variants.nystrom import NystromSpec
from effexport.models.variants.nystrom.layer import NystromAttention

# An eps that float32 loses in a sum with a count of tokens.
LARGEST_EPS = torch.finfo(torch.float32).eps / 2


class Replacement(nn.Module):
    """Ours in the place of `NystromAttention`, with its arguments."""

    def __init__(self, layer: NystromAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        return_attn: bool = False,
        return_attn_matrices: bool = False,
    ) -> Tensor:
        """x [batch, seq, dim]; mask: boolean [batch, seq]. Returns [batch, seq, dim]."""
        if return_attn or return_attn_matrices:
            raise NotExportableError(
                "NystromAttention was called with return_attn, but fused operators do not form these matrices; "
                "leave it out"
            )
        result: Tensor = self.layer(x, mask)
        return result


def nystrom_attention(layer: Any, seq_len: int) -> nn.Module:
    """`nystrom_attention.NystromAttention`: one projection for q, k and v, without bias, and one with a bias after."""
    inner_dim, dim = layer.to_qkv.out_features // 3, layer.to_qkv.in_features
    taps = layer.res_conv.kernel_size[0] if layer.residual else None
    if taps is not None and taps % 2 == 0:
        raise NotReplaceableError(f"its convolution has {taps} taps, and the result is one token longer than its input")
    if layer.eps > LARGEST_EPS:
        raise NotReplaceableError(f"its eps {layer.eps} makes the landmarks of masked segments smaller")
    if any(type(part) is not nn.Dropout for part in layer.to_out[1:]):
        raise NotReplaceableError("its to_out has parts other than a linear layer and dropout")
    spec = NystromSpec(
        dim=dim,
        heads=layer.heads,
        head_dim=inner_dim // layer.heads,
        seq_len=seq_len,
        num_landmarks=layer.num_landmarks,
        pinv_iterations=layer.pinv_iterations,
        pinv_init="global",
        conv_kernel_size=taps,
        convention="nystrom-attention",
    )
    ours = NystromAttention(spec).to(layer.to_qkv.weight)
    with torch.no_grad():
        weights = weight_alone(layer, "to_qkv").chunk(3)
        for projection, weight in zip((ours.query, ours.key, ours.value), weights, strict=True):
            projection.weight.copy_(weight)
            projection.bias.zero_()
        ours.out.load_state_dict(layer.to_out[0].state_dict())
        if ours.conv is not None:
            ours.conv.load_state_dict(layer.res_conv.state_dict())
    return Replacement(ours)


ADAPTER = Adapter(
    package="nystrom-attention",
    tested=("0.0.14",),
    replacements={"nystrom_attention.nystrom_attention.NystromAttention": nystrom_attention},
    projections=("to_qkv", "to_out.0"),
)
