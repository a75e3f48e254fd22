"""pytorch-fast-transformers: its attention layer around linear, causal and softmax attention, and its encoder."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapter, NotReplaceableError
from effexport.models.layers import MultiHeadAttention, fused_operators, merge_heads, split_heads
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.linear.layer import ELEMENTWISE, LinearAttention
from effexport.models.variants.softmax import SoftmaxSpec
from effexport.models.variants.softmax.layer import SoftmaxAttention, softmax_attention

ATTENTION = "fast_transformers.attention"


class AttentionLayer(nn.Module):
    """The projections around an attention, on the layer `attention` of ours.

    Masks are the package's objects: `attn_mask.bool_matrix` is [queries, keys], `key_lengths.bool_matrix` is
    [batch, keys], True = keep. Widths of keys and values may differ, though the spec has only that of keys.
    """

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        name = type(layer.inner_attention).__name__
        if name not in ATTENTIONS:
            raise NotReplaceableError(f"its attention is of the class {name}")
        keys = layer.query_projection.out_features // layer.n_heads
        common = {"dim": layer.query_projection.in_features, "heads": layer.n_heads, "head_dim": keys}
        self.attention: MultiHeadAttention = ATTENTIONS[name](layer.inner_attention, common | {"seq_len": seq_len})
        for ours in ("query", "key", "value", "out"):
            setattr(self.attention, ours, copy.deepcopy(getattr(layer, f"{ours}_projection")))
        # ours scales logits by 1/√d
        temperature = getattr(layer.inner_attention, "softmax_temp", None)
        self.scale = temperature * math.sqrt(keys) if temperature else 1.0

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Any, query_lengths: Any, key_lengths: Any
    ) -> Tensor:
        """queries [batch, queries, dim]; keys, values [batch, keys, their width] → the shape of queries."""
        layer, heads = self.attention, self.attention.spec.heads
        q, k = split_heads(layer.query(queries), heads), split_heads(layer.key(keys), heads)
        v = split_heads(layer.value(values), heads)
        keep = key_lengths.bool_matrix
        if isinstance(layer, SoftmaxAttention):
            q = q if self.scale == 1 else q * self.scale
            context = masked_context(layer, q, k, v, attn_mask, keep)
        else:
            check_mask(attn_mask, layer.spec.causal)
            # the operator needs as many queries as keys
            with fused_operators(layer, layer.fused and queries is keys):
                context = layer.mix((q, k, v), keep)
        out: Tensor = layer.out(merge_heads(context))
        return out


def masked_context(layer: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, keep: Tensor) -> Tensor:
    """Softmax attention with any mask; the operator knows those that hide keys from all queries of a sample."""
    if getattr(attn_mask, "_all_ones", None) is True:  # the property may compute it, which a trace cannot
        return layer.mix((q, k, v), keep)
    return softmax_attention(q, k, v, keep[:, None, None, :] & attn_mask.bool_matrix)


def check_mask(attn_mask: Any, causal: bool) -> None:
    """Refuse, as the original does, another mask than the one of the formula; a trace has no values to look at."""
    if torch.compiler.is_compiling():
        return
    if not (attn_mask.lower_triangular if causal else attn_mask.all_ones):
        needed = "a lower triangular" if causal else "no"
        raise RuntimeError(f"linear attention takes {needed} attn_mask when it is {'' if causal else 'not '}causal")


def linear(inner: Any, common: dict[str, Any], causal: bool = False) -> MultiHeadAttention:
    """Ours for `LinearAttention`."""
    name: Any = feature_map_name(inner.feature_map)
    return LinearAttention(LinearSpec(**common, causal=causal, eps=inner.eps, feature_map=name))


def causal_linear(inner: Any, common: dict[str, Any]) -> MultiHeadAttention:
    """Ours for `CausalLinearAttention`."""
    return linear(inner, common, causal=True)


def full(inner: Any, common: dict[str, Any]) -> MultiHeadAttention:
    """Ours for `FullAttention`, which learns from the mask of each call whether it is causal."""
    return SoftmaxAttention(SoftmaxSpec(**common))


# By name alone: a part of another package is noticed, or its answers are compared.
ATTENTIONS: dict[str, Callable[[Any, dict[str, Any]], MultiHeadAttention]] = {
    "LinearAttention": linear,
    "CausalLinearAttention": causal_linear,
    "FullAttention": full,
}


@torch.no_grad()
def feature_map_name(feature_map: Any) -> str:
    """The name of our feature map that has the values of this one, found by trying: the default is a lambda."""
    if type(feature_map).__name__ != "ActivationFunctionFeatureMap":
        raise NotReplaceableError(f"its feature map is {type(feature_map).__name__}")
    x = torch.linspace(-60, 60, 120 * feature_map.query_dims, dtype=torch.float64).unflatten(
        0, (-1, feature_map.query_dims)
    )
    values = feature_map(x)
    for name, formula in ELEMENTWISE.items():
        # the sum elu(x) + 1 rounds to 1e-16
        if values.shape == x.shape and torch.allclose(values, formula(x), rtol=1e-12, atol=1e-15):
            return name
    raise NotReplaceableError(f"its feature map is none of {', '.join(ELEMENTWISE)} of each channel")


class AllOnes:
    """A mask of the package that hides nothing: boolean [rows, keys]."""

    _all_ones = all_ones = True
    lower_triangular = False

    def __init__(self, bool_matrix: Tensor) -> None:
        self.bool_matrix = bool_matrix

    @property
    def float_matrix(self) -> Tensor:
        return self.bool_matrix.float()

    @property
    def additive_matrix(self) -> Tensor:
        return torch.zeros_like(self.bool_matrix, dtype=torch.float32)


class Keeping(AllOnes):
    """A mask of the package that hides where it is False."""

    _all_ones = all_ones = False
    lower_triangular = True

    @property
    def additive_matrix(self) -> Tensor:
        return torch.log(self.float_matrix)


def mask_or_all_ones(x: Tensor, attn_mask: Any, length_mask: Any) -> tuple[Any, Any]:
    """The two masks of an encoder. The package's own objects cannot be made for a length that is free."""
    batch, seq_len, _ = x.shape
    if attn_mask is None:
        attn_mask = AllOnes(x.new_ones(seq_len, seq_len, dtype=torch.bool))
    if length_mask is None:
        length_mask = AllOnes(x.new_ones(batch, seq_len, dtype=torch.bool))
    return attn_mask, length_mask


class TransformerEncoderLayer(nn.Module):
    """Attention and feed-forward network with norms after them, on the parts of the original."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        self.attention = layer.attention
        self.linear1, self.linear2 = layer.linear1, layer.linear2
        self.norm1, self.norm2 = layer.norm1, layer.norm2
        self.activation = layer.activation

    def forward(self, x: Tensor, attn_mask: Any = None, length_mask: Any = None) -> Tensor:
        """x [batch, seq, dim] → the same shape."""
        attn_mask, lengths = mask_or_all_ones(x, attn_mask, length_mask)
        x = x + self.attention(x, x, x, attn_mask=attn_mask, query_lengths=lengths, key_lengths=lengths)
        x = self.norm1(x)
        normed: Tensor = self.norm2(x + self.linear2(self.activation(self.linear1(x))))
        return normed


class TransformerEncoder(nn.Module):
    """The layers one after the other, and a last norm if there is one."""

    def __init__(self, encoder: Any, seq_len: int) -> None:
        super().__init__()
        self.layers = encoder.layers
        self.norm = encoder.norm

    def forward(self, x: Tensor, attn_mask: Any = None, length_mask: Any = None) -> Tensor:
        """x [batch, seq, dim] → the same shape."""
        attn_mask, length_mask = mask_or_all_ones(x, attn_mask, length_mask)
        for layer in self.layers:
            x = layer(x, attn_mask=attn_mask, length_mask=length_mask)
        return x if self.norm is None else self.norm(x)


ADAPTER = Adapter(
    package="pytorch-fast-transformers",
    tested=("0.4",),
    projections=("query_projection", "key_projection", "value_projection", "out_projection"),
    replacements={
        f"{ATTENTION}.attention_layer.AttentionLayer": AttentionLayer,
        "fast_transformers.transformers.TransformerEncoderLayer": TransformerEncoderLayer,
        "fast_transformers.transformers.TransformerEncoder": TransformerEncoder,
    },
)
