"""Decoders of encoder-decoders, post-norm as that of BART (Lewis et al., 2019, arXiv 1910.13461), and the graphs that
read a source once and decode token by token. Axes are (batch, heads, tokens, head_dim)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from effexport.models.checkpoints.bert import ACTIVATIONS
from effexport.models.checkpoints.bert_spec import HIDDEN_ACTS
from effexport.models.checkpoints.led_spec import LEDSpec
from effexport.models.layers import LayerNorm, causal_mask, masked_softmax, merge_heads, split_heads

KeysAndValues = tuple[Tensor, Tensor]


class DecoderAttention(nn.Module):
    """Softmax attention to keys and values that are given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def keys_and_values(self, hidden: Tensor) -> KeysAndValues:
        """[batch, tokens, width] → two tensors [batch, heads, tokens, head_dim]."""
        return split_heads(self.key(hidden), self.heads), split_heads(self.value(hidden), self.heads)

    def forward(self, hidden: Tensor, seen: KeysAndValues, visible: Tensor | None) -> Tensor:
        """hidden [batch, tokens, width] → the same shape. visible: boolean, broadcastable to [batch, 1, tokens, keys],
        or None for all."""
        keys, values = seen
        q = split_heads(self.query(hidden), self.heads) / math.sqrt(keys.shape[-1])
        weights = masked_softmax(q @ keys.transpose(-1, -2), visible).to(values.dtype)
        projected: Tensor = self.out(merge_heads(weights @ values))
        return projected


class DecoderBlock(nn.Module):
    """h = LN(x + A x), c = LN(h + C(h, source)), y = LN(c + W2 · act(W1 · c))."""

    def __init__(self, spec: LEDSpec) -> None:
        super().__init__()
        width = spec.hidden_size
        self.attention = DecoderAttention(width, spec.decoder_heads)
        self.attention_norm = LayerNorm(width, eps=spec.layer_norm_eps)
        self.cross_attention = DecoderAttention(width, spec.decoder_heads)
        self.cross_attention_norm = LayerNorm(width, eps=spec.layer_norm_eps)
        self.up = nn.Linear(width, spec.decoder_intermediate_size)
        self.activation = ACTIVATIONS[HIDDEN_ACTS[spec.hidden_act]]
        self.down = nn.Linear(spec.decoder_intermediate_size, width)
        self.feed_forward_norm = LayerNorm(width, eps=spec.layer_norm_eps)

    def forward(
        self, x: Tensor, own: KeysAndValues, visible: Tensor | None, memory: KeysAndValues, keep: Tensor
    ) -> Tensor:
        """x [batch, tokens, width] → the same shape. own: of all tokens up to these. keep: boolean [batch, 1, 1, seq],
        which tokens of the source are seen."""
        x = self.attention_norm(x + self.attention(x, own, visible))
        x = self.cross_attention_norm(x + self.cross_attention(x, memory, keep))
        normed: Tensor = self.feed_forward_norm(x + self.down(self.activation(self.up(x))))
        return normed


class Decoder(nn.Module):
    """Embedded tokens + learned positions → blocks that see all earlier tokens and the source."""

    def __init__(self, spec: LEDSpec) -> None:
        super().__init__()
        self.position = nn.Embedding(spec.max_target_len, spec.hidden_size)
        self.norm = LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)
        self.blocks: Sequence[DecoderBlock] = nn.ModuleList(  # type: ignore[assignment]
            DecoderBlock(spec) for _ in range(spec.decoder_layers)
        )

    def memory(self, source: Tensor) -> list[KeysAndValues]:
        """Hidden states of the encoder [batch, seq, width] → keys and values for each block."""
        return [block.cross_attention.keys_and_values(source) for block in self.blocks]

    def forward(self, tokens: Tensor, memory: Sequence[KeysAndValues], keep: Tensor) -> Tensor:
        """Embedded tokens [batch, target, width] → hidden states, each of which sees the tokens up to itself."""
        target = tokens.shape[1]
        x: Tensor = self.norm(tokens + self.position.weight[:target])
        visible = causal_mask(target, tokens.device)
        for block, source in zip(self.blocks, memory, strict=True):
            x = block(x, block.attention.keys_and_values(x), visible, source, keep)
        return x

    def step(
        self, token: Tensor, memory: Sequence[KeysAndValues], keep: Tensor, cache: Sequence[KeysAndValues]
    ) -> tuple[Tensor, list[KeysAndValues]]:
        """The next token, embedded, [batch, 1, width]: what `forward` returns for it, and the cache with it.

        cache: keys and values of the tokens before it, for each block.
        """
        past = cache[0][0].shape[2]
        x, grown = self.norm(token + self.position.weight[past : past + 1]), []
        for block, source, before in zip(self.blocks, memory, cache, strict=True):
            own = block.attention.keys_and_values(x)
            keys, values = (torch.cat(pair, dim=2) for pair in zip(before, own, strict=True))
            grown.append((keys, values))
            x = block(x, grown[-1], None, source, keep)
        return x, grown


class EncoderDecoder(Protocol):
    """A model with a memory of its source, as the graphs below need it."""

    def memory(self, *source: Tensor) -> list[KeysAndValues]: ...

    def step(
        self, token: Tensor, mask: Tensor, memory: Sequence[KeysAndValues], cache: Sequence[KeysAndValues]
    ) -> tuple[Tensor, list[KeysAndValues]]: ...


class SourceEncoder(nn.Module):
    """The inputs of the encoder → the memory, as a flat tuple of keys and values."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, *source: Tensor) -> tuple[Tensor, ...]:
        return flat(self.model.memory(*source))


class TargetStep(nn.Module):
    """One token at a time."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """A token int64 [batch, 1], the mask of the source int64 [batch, seq], memory and cache → logits of the token,
        and the next cache."""
        token, mask, *state = inputs
        pairs = list(zip(state[::2], state[1::2], strict=True))
        layers = len(pairs) // 2
        logits, cache = self.model.step(token, mask, pairs[:layers], pairs[layers:])
        return (logits, *flat(cache))


def flat(pairs: Sequence[KeysAndValues]) -> tuple[Tensor, ...]:
    return tuple(tensor for pair in pairs for tensor in pair)
