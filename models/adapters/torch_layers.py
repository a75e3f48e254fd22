"""PyTorch itself: `nn.MultiheadAttention`, the transformer layers around it, and `F.scaled_dot_product_attention`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from effexport.models.adapters.adapter import Adapter, NotReplaceableError
from effexport.models.layers import MASKED_LOGIT, at_least_float32, merge_heads, split_heads
from effexport.models.user.modes import storage, writes, written_out
from effexport.models.user.size_arithmetic import ATTENTION
from effexport.models.variants.softmax import SoftmaxSpec
from effexport.models.variants.softmax.layer import SoftmaxAttention
from effexport.plugins.masked_attention.op import hides_when_added, masked_attention


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


TO_BOOL = {Tensor.to, Tensor.bool}
ELEMENTWISE = TO_BOOL | {
    *(Tensor.float, Tensor.half, Tensor.type_as, Tensor.contiguous, Tensor.clone, Tensor.sub, torch.sub),
    *(
        Tensor.__rsub__,
        torch.rsub,
        Tensor.mul,
        torch.mul,
        Tensor.eq,
        torch.eq,
        Tensor.ne,
        torch.ne,
        Tensor.gt,
        torch.gt,
    ),
    *(Tensor.logical_not, torch.logical_not, Tensor.__invert__, Tensor.bitwise_not, torch.bitwise_not),
    *(Tensor.logical_and, torch.logical_and, Tensor.__and__, Tensor.bitwise_and, torch.bitwise_and),
    *(Tensor.masked_fill, torch.masked_fill),
}


@dataclass
class AttentionCalls:
    """Counts of calls that became the operator, and of calls that stayed as they were."""

    turned: int = 0
    kept: int = 0


@contextmanager
def attention_calls_as_operators(turns: bool = True) -> Iterator[AttentionCalls]:
    """Turn calls of `F.scaled_dot_product_attention` that the operator can express, for the length of a `with` block.

    These are calls that are not causal, without a mask or with one that hides the same keys from all queries and heads
    of a sample: a boolean mask [batch, 1, 1, keys], or one that PyTorch operations made of it, as the BERT family of
    transformers 4 and 5 does. Other calls with a mask are written out; the rest stay PyTorch's. Works while
    torch.export traces (strict=False). turns: False to turn none.
    """
    calls = AttentionCalls()
    with _MaskFollower(calls, turns):
        yield calls


@dataclass
class _Rows:
    """A mask whose rows are alike. mask: [batch, 1 or heads, queries, keys]; row: the same as [batch, 1, 1, keys].

    nonzero_of: the mask of which this one says where it is not 0. hidden: boolean, like row: the mask is `low`, a large
    negative number, where it is True, and 0 elsewhere.
    """

    mask: Tensor
    row: Tensor
    nonzero_of: Tensor | None = None
    hidden: Tensor | None = None
    low: float = -math.inf


class _MaskFollower(TorchFunctionMode):
    """Turns calls, and follows masks from the moment when they are expanded to all queries."""

    def __init__(self, calls: AttentionCalls, turns: bool) -> None:
        super().__init__()
        self.calls, self.turns = calls, turns
        # a mask is kept with its entry, so that its id stays its own
        self.known: dict[int, _Rows] = {}
        self.positions: dict[int, Tensor] = {}  # tensors without negative numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is ATTENTION:
            return self.attention(*args, **kwargs)
        result = func(*args, **kwargs)
        if writes(func, kwargs):
            self.forget(kwargs.get("out", args[0] if args else None))
        elif isinstance(result, Tensor):
            if is_position(func, args, kwargs, self.positions):
                self.positions[id(result)] = result
            elif result.dim() == 4:
                self.follow(func, result, args, kwargs)
        return result

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The arguments of F.scaled_dot_product_attention."""
        groups = [x.shape[:2] for x in (query, key, value) if x.dim() == 4]
        alike = len(groups) == 3 and groups[0] == groups[1] == groups[2]
        plain = self.turns and dropout_p == 0 and not is_causal and alike
        keep = self.visible_keys(key, attn_mask) if plain else None
        if keep is None:
            self.calls.kept += 1
            if dropout_p == 0 and (attn_mask is not None or len(groups) < 3):
                return written_out(query, key, value, attn_mask, is_causal, scale, enable_gqa)
            rest: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **rest)
        self.calls.turned += 1
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        turned: Tensor = masked_attention(query, key, value, keep, factor)
        known = self.known.get(id(attn_mask))
        if attn_mask is None or (known is not None and known.low > -math.inf):
            return turned  # like PyTorch, the average of all values if there is no visible key
        return zero_without_keys(turned, keep)

    def visible_keys(self, key: Tensor, mask: Tensor | None) -> Tensor | None:
        """Boolean [batch, keys], or None if the operator cannot express the mask."""
        if mask is None:
            return torch.ones_like(key[:, 0, :, 0], dtype=torch.bool)
        if mask.dim() != 4:
            return None
        known = self.known.get(id(mask)) or _Rows(mask, mask)
        if known.hidden is not None:
            keep = ~known.hidden[:, 0, 0]
        elif is_one_row(known.row) and mask.dtype == torch.bool:
            keep = known.row[:, 0, 0]
        else:
            return None
        # one mask may stand for the whole batch, or one value for all keys
        return keep.expand(key.shape[0], key.shape[2])

    def follow(self, func: Any, result: Tensor, args: Any, kwargs: Any) -> None:
        """Note what is known of the result of a PyTorch function."""
        if func is Tensor.expand and (id(args[0]) in self.known or is_one_row(args[0])):
            entry = self.known.get(id(args[0])) or _Rows(args[0], args[0])
            self.known[id(result)] = _Rows(result, entry.row, hidden=entry.hidden, low=entry.low)
            return
        if func is Tensor.ge and id(args[0]) in self.positions and type(args[1]) is int and args[1] == 0:
            # how transformers 5 begins a mask that is not causal
            true = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=result.device)
            self.known[id(result)] = _Rows(result, true)
            return
        masks = [x for x in args if isinstance(x, Tensor) and x.dim() > 0]
        entries = [self.known.get(id(x)) for x in masks]
        if func not in ELEMENTWISE or not any(entries) or any(isinstance(x, Tensor) for x in kwargs.values()):
            return
        rows = [x if entry is None else entry.row for x, entry in zip(masks, entries, strict=True)]
        if not all(is_one_row(row) for row in rows):
            return
        small = {id(x): row for x, row in zip(masks, rows, strict=True)}
        made = _Rows(result, func(*(small.get(id(x), x) for x in args), **kwargs))
        if func in TO_BOOL and result.dtype == torch.bool:
            made.nonzero_of = args[0]
        hides = entries[1] if func in (Tensor.masked_fill, torch.masked_fill) and len(entries) == 2 else None
        low = args[2] if hides is not None and hides.nonzero_of is args[0] and result.is_floating_point() else None
        if hides is not None and isinstance(low, float) and hides_when_added(low, result.dtype):
            made.hidden, made.low = hides.row, low
        self.known[id(result)] = made

    def forget(self, written: Any) -> None:
        """Drop what is known of masks and positions in memory that has been written to."""
        if not isinstance(written, Tensor):
            return
        memory = storage(written)
        self.known = {
            key: rows for key, rows in self.known.items() if memory not in map(storage, (rows.mask, rows.row))
        }
        self.positions = {key: x for key, x in self.positions.items() if storage(x) != memory}


def zero_without_keys(context: Tensor, keep: Tensor) -> Tensor:
    """Zeros for the samples without any visible key, as PyTorch has them; our operator has the average of all values.

    context [batch, heads, queries, head_dim]; keep boolean [batch, keys].
    """
    return context * keep.to(context.dtype).amax(dim=1)[:, None, None, None]


def is_position(func: Any, args: Any, kwargs: Any, positions: Mapping[int, Tensor]) -> bool:
    """True if a PyTorch function returns numbers from 0 on: positions of tokens. positions: known ones, by id."""
    if func is torch.arange:
        return len(args) == 1 and not kwargs.keys() & {"start", "step"}
    if func in (Tensor.add, torch.add):
        return id(args[0]) in positions and type(args[1]) is int and args[1] >= 0 and not kwargs
    return func is Tensor.__getitem__ and id(args[0]) in positions


def is_one_row(mask: Tensor) -> bool:
    """True if a mask has the shape [batch, 1, 1, keys], and no 1 is the present size of a free axis."""
    return mask.dim() == 4 and all(isinstance(size, int) and size == 1 for size in mask.shape[1:3])
