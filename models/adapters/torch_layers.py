"""Layers of PyTorch itself: `nn.MultiheadAttention` → softmax attention, and the transformer layers around it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapter, NotReplaceableError
from effexport.models.adapters.sdpa import zero_without_keys
from effexport.models.layers import MASKED_LOGIT, at_least_float32, merge_heads, split_heads
from effexport.models.variants.softmax import SoftmaxSpec
from effexport.models.variants.softmax.layer import SoftmaxAttention


class MultiheadAttention(nn.Module):
    """`nn.MultiheadAttention` in evaluation mode, on the layer `attention`.

    The fused operator computes calls without `attn_mask` whose `key_padding_mask` is boolean or None. Other masks are
    added to the logits, in plain operations. For a query that sees no key the attention is zero, as on one of PyTorch's
    paths; others return NaN.
    """

    # An encoder layer of PyTorch reads these before its fast path, which they rule out.
    in_proj_weight = in_proj_bias = bias_k = bias_v = None
    _qkv_same_embed_dim = False

    def __init__(self, attention: SoftmaxAttention, batch_first: bool) -> None:
        super().__init__()
        self.attention = attention
        self.batch_first = batch_first
        self.embed_dim, self.num_heads = attention.spec.dim, attention.spec.heads
        self.head_dim = attention.spec.head_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query [batch, queries, embed_dim]; key, value [batch, keys, embed_dim]; without `batch_first`, the first two
        axes change places; without a batch, the first is missing. Masks: True, or −inf, hides a key.

        key_padding_mask [batch, keys]; attn_mask [queries, keys] or [batch · heads, queries, keys]. is_causal says
        that `attn_mask` is causal, and changes nothing.
        Returns the output, like query, and the weights, [batch, queries, keys] or for each head, or None.
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal only describes attn_mask, which is missing; give a causal attn_mask")
        batched, heads, layer = query.dim() == 3, self.num_heads, self.attention
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = (split_heads(x, heads) for x in (layer.query(query), layer.key(key), layer.value(value)))

        bias = logit_bias(key_padding_mask, attn_mask, heads)
        fits_operator = attn_mask is None and (key_padding_mask is None or key_padding_mask.dtype == torch.bool)
        # an exported graph leaves out weights that nothing uses
        weights = attention_weights(q, k, bias) if need_weights or not fits_operator else None
        if fits_operator and key_padding_mask is None:
            context = layer.mix((q, k, v), torch.ones_like(key[:, :, 0], dtype=torch.bool))
        elif fits_operator:
            assert key_padding_mask is not None
            context = zero_without_keys(layer.mix((q, k, v), ~key_padding_mask), ~key_padding_mask)
        else:
            assert weights is not None
            context = weights.to(v.dtype) @ v
        out = layer.out(merge_heads(context))

        if weights is not None:
            weights = (weights.mean(dim=1) if average_attn_weights else weights).to(v.dtype)
        if not batched:
            out, weights = out.squeeze(0), None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, weights if need_weights else None


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √d + bias) in float32, or in float64 if q is: [batch, heads, queries, keys]. Zero where bias is −∞
    for all keys."""
    divisor = math.sqrt(math.sqrt(q.shape[-1]))
    logits = at_least_float32((q / divisor) @ (k / divisor).transpose(-1, -2))
    if bias is None:
        return torch.softmax(logits, dim=-1)
    # finite logits, so that a query that sees nothing gets no NaN, which the next layer would spread to all tokens
    weights = torch.softmax(logits + bias.clamp(min=MASKED_LOGIT), dim=-1)
    return weights * (bias.amax(dim=-1, keepdim=True) > -math.inf)


def logit_bias(key_padding_mask: Tensor | None, attn_mask: Tensor | None, heads: int) -> Tensor | None:
    """The sum of the masks of `MultiheadAttention.forward`, broadcastable to [batch, heads, queries, keys]."""
    parts = []
    if key_padding_mask is not None:
        parts.append(added_to_logits(key_padding_mask)[:, None, None, :])
    if attn_mask is not None:
        bias = added_to_logits(attn_mask)
        parts.append(bias if bias.dim() == 2 else torch.unflatten(bias, 0, (-1, heads)))
    if not parts:
        return None
    return sum(parts[1:], start=parts[0])


def added_to_logits(mask: Tensor) -> Tensor:
    """A mask as numbers to add: boolean masks are −inf where they are True."""
    if mask.dtype != torch.bool:
        return at_least_float32(mask)
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -math.inf)


class TransformerEncoderLayer(nn.Module):
    """`nn.TransformerEncoderLayer` in evaluation mode, with the parts of the original.

    Boolean masks reach the attention as they are: PyTorch's own layer makes numbers of them first. It also has a fast
    path that does not call its attention.
    """

    self_attn: nn.Module
    linear1: nn.Module
    linear2: nn.Module
    norm1: nn.Module
    norm2: nn.Module
    dropout: nn.Module
    dropout1: nn.Module
    dropout2: nn.Module

    def __init__(self, layer: Any) -> None:
        super().__init__()
        take_parts(self, layer)
        self.activation, self.norm_first = layer.activation, layer.norm_first

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """src and the result: the axes of `MultiheadAttention`; masks as there."""

        def attend(x: Tensor) -> Tensor:
            masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
            attended: Tensor = self.dropout1(self.self_attn(x, x, x, need_weights=False, **masks)[0])
            return attended

        def feed_forward(x: Tensor) -> Tensor:
            fed: Tensor = self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))
            return fed

        if self.norm_first:
            src = src + attend(self.norm1(src))
            return src + feed_forward(self.norm2(src))
        src = self.norm1(src + attend(src))
        normed: Tensor = self.norm2(src + feed_forward(src))
        return normed


class TransformerEncoder(nn.Module):
    """`nn.TransformerEncoder` without nested tensors, and without a branch on the values of its mask.

    Of batches whose padding is at the end of every sample, PyTorch computes the kept tokens alone, and gives zeros for
    the others, before the last norm. So does this.
    """

    layers: nn.ModuleList

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        take_parts(self, encoder)
        self.norm, self.num_layers = encoder.norm, encoder.num_layers
        self.zeros_padding = bool(getattr(encoder, "use_nested_tensor", False))

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, bool(is_causal))
        if self.zeros_padding and mask is None and src_key_padding_mask is not None and src.dim() == 3:
            keep = src_key_padding_mask.logical_not()
            positions = torch.arange(1, keep.shape[1] + 1, device=keep.device)
            # as many tokens as the place of the last one: none is missing before it
            missing = (keep * positions).amax(dim=1) - keep.sum(dim=1)
            at_the_end = missing.amax(dim=0) == 0
            src = torch.where((keep | ~at_the_end).unsqueeze(-1), src, 0.0)
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(nn.Module):
    """`nn.TransformerDecoder` without a look at the values of its mask."""

    layers: nn.ModuleList

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        take_parts(self, decoder)
        self.norm, self.num_layers = decoder.norm, decoder.num_layers

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        for layer in self.layers:
            tgt = layer(tgt, memory, *masks, bool(tgt_is_causal), memory_is_causal)
        return tgt if self.norm is None else self.norm(tgt)


def take_parts(module: nn.Module, original: nn.Module) -> None:
    """Give a module the children of another one, under the same names."""
    for name, child in original.named_children():
        module.add_module(name, child)


def multihead_attention(layer: nn.MultiheadAttention, seq_len: int) -> MultiheadAttention:
    """Our layer with the weights of PyTorch's, for sequences of `seq_len` tokens."""
    if not layer._qkv_same_embed_dim:
        raise NotReplaceableError("kdim and vdim differ from embed_dim")
    if layer.bias_k is not None or layer.bias_v is not None:
        raise NotReplaceableError("add_bias_kv=True adds a learned token to the keys")
    if layer.add_zero_attn:
        raise NotReplaceableError("add_zero_attn=True adds a token of zeros to the keys")
    bias = layer.in_proj_bias is not None
    if bias != (layer.out_proj.bias is not None):
        raise NotReplaceableError("only one of its in_proj and out_proj has a bias")
    attention = SoftmaxAttention(SoftmaxSpec(dim=layer.embed_dim, heads=layer.num_heads, seq_len=seq_len, bias=bias))
    attention = attention.to(layer.out_proj.weight)
    projections = (attention.query, attention.key, attention.value)
    with torch.no_grad():
        for ours, weight in zip(projections, layer.in_proj_weight.chunk(3), strict=True):
            ours.weight.copy_(weight)
        attention.out.weight.copy_(layer.out_proj.weight)
        if bias:
            for ours, values in zip(projections, layer.in_proj_bias.chunk(3), strict=True):
                ours.bias.copy_(values)
            attention.out.bias.copy_(layer.out_proj.bias)
    return MultiheadAttention(attention, layer.batch_first)


def read_by(layer: Any) -> tuple[str, ...]:
    """The linear layers whose weights a layer reads without a call, by name; see `Adapter`."""
    if isinstance(layer, nn.MultiheadAttention):
        return ("out_proj",)
    if not isinstance(layer, nn.TransformerEncoderLayer) or not isinstance(layer.self_attn, nn.MultiheadAttention):
        return ()
    # the conditions of PyTorch's fast path that do not depend on its inputs
    attention, same_eps = layer.self_attn, layer.norm1.eps == layer.norm2.eps
    plain = attention._qkv_same_embed_dim and attention.in_proj_bias is not None and attention.num_heads % 2 == 0
    fast = attention.batch_first and plain and bool(layer.activation_relu_or_gelu) and same_eps
    return ("linear1", "linear2") if fast else ()


ADAPTER = Adapter(
    package="torch",
    tested=("2.13",),
    replacements={
        "torch.nn.modules.activation.MultiheadAttention": multihead_attention,
        "torch.nn.modules.transformer.TransformerEncoderLayer": lambda layer, seq_len: TransformerEncoderLayer(layer),
        "torch.nn.modules.transformer.TransformerEncoder": lambda encoder, seq_len: TransformerEncoder(encoder),
        "torch.nn.modules.transformer.TransformerDecoder": lambda decoder, seq_len: TransformerDecoder(decoder),
    },
    reads=read_by,
)
