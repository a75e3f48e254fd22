"""linear-attention-transformer: its attention layer, the feed-forward network that works chunk by chunk, and axial
positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapter, NotReplaceableError, weight_alone
from effexport.models.layers import MultiHeadAttention, merge_heads, rotate_pairs, split_heads
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.linear.layer import LinearAttention
from effexport.models.variants.local import LocalSpec
from effexport.models.variants.local.layer import LocalAttention

PACKAGE = "linear_attention_transformer.linear_attention_transformer"
# The default of the causal function, which has no attribute of the layer.
MIN_DENOMINATOR = 1e-3


class GlobalAndLocalAttention(nn.Module):
    """Layers of ours whose results add up: one has the heads with linear attention, one the local heads.

    The softmax of the keys over the sequence is their normalizer; the causal form divides by the sum of e^k instead.
    """

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        local_heads, heads = layer.local_attn_heads, layer.heads
        self.receives_context = layer.receives_context
        parts: list[MultiHeadAttention] = []
        # the first layer of a model stands for the model in reports, so linear attention comes first
        if local_heads < heads:
            parts.append(with_heads(LinearAttention(linear_spec(layer, seq_len)), layer, local_heads, heads))
        if local_heads:
            parts.append(with_heads(LocalAttention(local_spec(layer, seq_len)), layer, 0, local_heads))
        for part in parts[1:]:
            part.out.register_parameter("bias", None)  # the first part has it
        self.parts = nn.ModuleList(parts)

    def forward(
        self,
        x: Tensor,
        input_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        pos_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """x [batch, seq, dim] → the same shape; masks boolean, True = keep; pos_emb [1, seq, head_dim]: the sines
        of head_dim / 2 angles, then their cosines."""
        if self.receives_context:
            assert context is not None, "this layer attends to a context; give one"
            source, mask = context, context_mask
        else:
            source, mask = x, input_mask
        first, *rest = (self.part(layer, x, source, mask, pos_emb) for layer in self.parts)
        return sum(rest, start=first)

    def part(self, layer: Any, x: Tensor, source: Tensor, mask: Tensor | None, pos_emb: Tensor | None) -> Tensor:
        """The contribution of some of the heads to the result."""
        heads = layer.spec.heads
        q = split_heads(layer.query(x), heads)
        k, v = split_heads(layer.key(source), heads), split_heads(layer.value(source), heads)
        if pos_emb is not None and not self.receives_context:
            sines, cosines = pos_emb[0].chunk(2, dim=-1)
            q, k = rotate_pairs(q, sines, cosines), rotate_pairs(k, sines, cosines)
        part: Tensor = layer.out(merge_heads(layer.mix((q, k, v), layer.keep(source, mask))))
        return part


def linear_spec(layer: Any, seq_len: int) -> LinearSpec:
    """The spec of the heads with linear attention."""
    common: dict[str, Any] = {
        "dim": layer.to_q.in_features,
        "heads": layer.heads - layer.local_attn_heads,
        "head_dim": layer.d_heads,
        "seq_len": seq_len,
        "feature_map": "softmax",
    }
    function = layer.global_attn_fn
    name = getattr(function.func if isinstance(function, partial) else function, "__name__", "")
    if name == "linear_attn":
        return LinearSpec(**common, normalizer=False)
    if name != "causal_linear_attn":
        raise NotReplaceableError(f"its attention function was replaced by {name or function}")
    if layer.receives_context:
        raise NotReplaceableError("a causal layer attends to a context")
    blindspot = max(function.keywords["bucket_size"], 1)
    return LinearSpec(
        **common,
        causal=True,
        eps=0.0,
        min_denominator=MIN_DENOMINATOR,
        blindspot=blindspot,
        chunk_length=-(-LinearSpec.chunk_length // blindspot) * blindspot,
    )


def local_spec(layer: Any, seq_len: int) -> LocalSpec:
    """The spec of the local heads: windows that see their neighbours."""
    if layer.receives_context:
        raise NotReplaceableError("local heads attend to a context, whose length may be another")
    local = layer.local_attn
    return LocalSpec(
        dim=layer.to_q.in_features,
        heads=layer.local_attn_heads,
        head_dim=layer.d_heads,
        seq_len=seq_len,
        causal=local.causal,
        bias=True,
        chunk_length=local.window_size,
        num_chunks_before=local.look_backward,
        num_chunks_after=local.look_forward,
    )


def with_heads(ours: MultiHeadAttention, layer: Any, first: int, end: int) -> MultiHeadAttention:
    """Ours with the weights of the heads from `first` to before `end`, and with the bias of the output."""
    rows = slice(first * layer.d_heads, end * layer.d_heads)
    for projection, theirs in ((ours.query, "to_q"), (ours.key, "to_k"), (ours.value, "to_v")):
        projection.weight = nn.Parameter(weight_alone(layer, theirs)[rows].clone())
        projection.register_parameter("bias", None)  # theirs have none
    ours.out.weight = nn.Parameter(layer.to_out.weight.detach()[:, rows].clone())
    ours.out.bias = nn.Parameter(layer.to_out.bias.detach().clone())
    return ours


class WholeSequence(nn.Module):
    """`Chunk` without chunks: every token passes through a feed-forward network by itself, so the result is the same,
    and the number of chunks does not depend on the length."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        if type(layer.fn).__name__ != "FeedForward":
            raise NotReplaceableError(f"its function is a {type(layer.fn).__name__}, which may mix tokens")
        self.fn = layer.fn

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        result: Tensor = self.fn(x, **kwargs)
        return result


class PositionTable(nn.Module):
    """`AxialPositionalEmbedding` as the table of all its positions, whose size tells how many tokens a model takes."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        weight = layer.weights[0]
        with torch.no_grad():
            table = layer(weight.new_zeros(1, layer.max_seq_len, layer.dim))
        self.table = nn.Parameter(table[0].clone())

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] → the positions of these tokens, of the same shape and dtype."""
        return self.table[: x.shape[1]].to(x).expand(x.shape[0], -1, -1)


ADAPTER = Adapter(
    package="linear-attention-transformer",
    tested=("0.19.1",),
    projections=("to_q", "to_k", "to_v", "to_out"),
    replacements={
        f"{PACKAGE}.SelfAttention": GlobalAndLocalAttention,
        f"{PACKAGE}.Chunk": WholeSequence,
        "axial_positional_embedding.axial_positional_embedding.AxialPositionalEmbedding": PositionTable,
    },
)
