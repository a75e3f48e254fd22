"""local-attention: softmax attention of windows to themselves and their neighbours, as a function of q, k and v."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapter, NotReplaceableError
from effexport.models.checkpoints.modernbert import rotate_halves
from effexport.models.layers import CallsOperators
from effexport.plugins.banded_attention.op import Band, attend_in_band

# Positions whose product with as many steps of a turn is exact in float32.
PAGE = 4096


class BandedFunction(CallsOperators):
    """out_i = softmax over the keys j near i of (scale · q_i·k_j + bias[j − i]) · v_j, as one operator."""

    variant = "banded"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, band: Band, bias: Tensor | None = None) -> Tensor:
        """q, k [batch, heads, seq, head_dim], v [batch, heads, seq, value_dim] → as v. keep: boolean [batch, seq].
        bias [heads, offsets]: see `banded_attention`."""
        return attend_in_band((q, k, v), keep, band, fused=self.fused, bias=bias)


class WindowedAttention(nn.Module):
    """LocalAttention at any length. Queries see whole windows, or exactly as many tokens as windows have.

    Positions count from the first token; in the original, from the first key of each window. Rotations are relative, so
    both give the same logits. A window that looks forward turns its queries by as many more positions.
    """

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        if layer.shared_qk:
            raise NotReplaceableError("with shared_qk, a token sees itself only if it sees no other")
        if layer.rel_pos is not None and layer.use_xpos:
            raise NotReplaceableError("with use_xpos, queries and keys grow and shrink with their positions")
        self.window_size: int = layer.window_size
        before, after = (self.window_size * windows for windows in (layer.look_backward, layer.look_forward))
        block = 1 if layer.exact_windowsize else self.window_size
        self.scale: float | None = layer.scale
        self.band = Band(1.0, before, after, block, bool(layer.causal))
        self.fills_windows: bool = layer.autopad and not layer.causal
        self.frequencies = None if layer.rel_pos is None else layer.rel_pos.inv_freq.float().tolist()
        self.attention = BandedFunction()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        input_mask: Tensor | None = None,
        attn_bias: Tensor | None = None,
        window_size: int | None = None,
    ) -> Tensor:
        """q, k, v [batch, heads, seq, head_dim] or [batch · heads, seq, head_dim] → as v. mask, input_mask: boolean
        [batch, seq], True = keep."""
        if attn_bias is not None or window_size is not None:
            name = "window_size" if attn_bias is None else "attn_bias"
            raise NotReplaceableError(f"it is called with {name}, which no operator takes")
        keep = input_mask if mask is None else mask
        shape = v.shape
        q, k, v = (by_sample(x, keep) for x in (q, k, v))
        if self.frequencies is not None:
            q, k = self.turned(q, self.band.right), self.turned(k, 0)
        return self.mix(q, k, v, keep).reshape(shape)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """The attention itself: q, k, v [batch, heads, seq, head_dim] → as v."""
        position = torch.arange(q.shape[2], device=q.device)
        fills = keep is None and self.fills_windows
        if fills:
            q, k, v = (self.filled(x) for x in (q, k, v))
        seen = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device) if keep is None else keep
        band = self.band._replace(scale=q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        context: Tensor = self.attention(q, k, v, seen, band)
        # by index: a slice of symbolic length is traced as the lesser of two lengths
        return context.index_select(2, position) if fills else context

    def turned(self, x: Tensor, ahead: int) -> Tensor:
        """x [batch, heads, seq, head_dim], rotated by its positions and `ahead` more."""
        assert self.frequencies is not None
        return rotate_halves(x, angles_at(torch.arange(x.shape[2], device=x.device) + ahead, self.frequencies))

    def filled(self, x: Tensor) -> Tensor:
        """x with zeros up to whole windows. Without a mask the original lets tokens see them."""
        missing = (x.shape[2] + self.window_size - 1) // self.window_size * self.window_size - x.shape[2]
        return F.pad(x, (0, 0, 0, missing))


def angles_at(position: Tensor, frequencies: Sequence[float]) -> Tensor:
    """position · frequency modulo a turn: int64 [seq] → float32 [seq, frequencies], within 1e-6 at every position.

    A float32 product would be off by 2⁻²⁴ of the whole angle, which grows with the position. Here, each half of a
    position is multiplied by 12 bits of a frequency, which is exact, and by the rest, which is small.
    """
    turns = torch.zeros(1, device=position.device)
    for half, positions in ((position // PAGE, PAGE), (position % PAGE, 1)):
        steps = [frequency * positions / (2 * math.pi) % 1.0 for frequency in frequencies]
        coarse = [math.floor(step * PAGE) / PAGE for step in steps]
        fine = [step - rounded for step, rounded in zip(steps, coarse, strict=True)]
        places = half.float().unsqueeze(-1)
        whole = places * torch.tensor(coarse, device=position.device)
        turns = turns + (whole - whole.floor()) + places * torch.tensor(fine, device=position.device)
    return 2 * math.pi * (turns - turns.floor())


def by_sample(x: Tensor, keep: Tensor | None) -> Tensor:
    """[batch, heads, seq, head_dim] of x that may have batch and heads in one axis. keep [batch, seq]."""
    if x.dim() == 4:
        return x
    return x.unsqueeze(1) if keep is None else x.reshape(keep.shape[0], -1, *x.shape[-2:])


ADAPTER = Adapter(
    package="local-attention",
    tested=("1.11",),
    replacements={"local_attention.local_attention.LocalAttention": WindowedAttention},
)
