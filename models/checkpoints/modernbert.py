"""ModernBERT with the weights of transformers (Warner et al., 2024, arXiv 2412.13663)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from effexport.models.checkpoints.bert import ACTIVATIONS
from effexport.models.checkpoints.bert_spec import HIDDEN_ACTS
from effexport.models.checkpoints.modernbert_spec import ModernBertAttentionSpec, ModernBertSpec
from effexport.models.encoder.module import pool
from effexport.models.layers import AttentionLayer, LayerNorm, at_least_float32, split_heads
from effexport.models.validation import SpecError
from effexport.models.variants.softmax.layer import softmax_attention
from effexport.plugins.banded_attention.op import Band, attend_in_band
from effexport.plugins.masked_attention.op import masked_attention

# Head models save the encoder under this prefix, base models without it.
BASE_PREFIX = "model."
# Heads of other tasks, which remain when the base is loaded from a head model.
IGNORED: tuple[str, ...] = (r"(head|decoder|classifier)\..*",)


class ModernBert(nn.Module):
    """LN of embeddings → pre-norm blocks → LN → head. Positions are in the attention."""

    def __init__(self, spec: ModernBertSpec) -> None:
        super().__init__()
        self.spec = spec
        self.token_embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.embedding_norm = norm_from_spec(spec)
        self.blocks = nn.ModuleList(PreNormBlock(spec, layer) for layer in range(spec.layers))
        self.final_norm = norm_from_spec(spec)
        self.head = nn.Identity() if spec.task == "base" else PredictionHead(spec, self.token_embedding)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor | tuple[Tensor, ...]:
        """int64 [batch, seq] twice ([batch, choices, seq] for multiple-choice); attention_mask: 1 = keep.

        Returns what `spec.outputs` says, in this order. Raises SpecError for a sequence that is too long.
        """
        task = self.spec.task
        if task == "multiple-choice":
            mask = attention_mask.flatten(0, 1)
            pooled = self.pooled(self.encode(input_ids.flatten(0, 1), mask), mask)
            return torch.reshape(self.head(pooled), (input_ids.shape[0], input_ids.shape[1]))
        hidden = self.encode(input_ids, attention_mask)
        if task == "sequence-classification":
            hidden = self.pooled(hidden, attention_mask)
        outputs: Tensor = self.head(hidden)
        return outputs.unbind(dim=-1) if task == "question-answering" else outputs

    def pooled(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """The vector that stands for a sequence: [batch, seq, hidden_size], [batch, seq] → [batch, hidden_size]."""
        if self.spec.classifier_pooling == "mean":
            return pool(at_least_float32(hidden), attention_mask != 0, "mean").to(hidden.dtype)
        return first_kept(hidden, attention_mask) if self.spec.task == "multiple-choice" else hidden[:, 0]

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """int64 [batch, seq] twice → last hidden states [batch, seq, hidden_size]."""
        seq_len = input_ids.shape[1]
        if not torch.compiler.is_exporting() and seq_len > self.spec.max_seq_len:
            raise SpecError(f"the sequence has {seq_len} tokens; expected at most {self.spec.max_seq_len}")
        hidden = self.embedding_norm(self.token_embedding(input_ids))
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        normed: Tensor = self.final_norm(hidden)
        return normed


class PreNormBlock(nn.Module):
    """h = x + A(LN x), y = h + F(LN h); the first block has no normalisation before A."""

    def __init__(self, spec: ModernBertSpec, layer: int) -> None:
        super().__init__()
        self.attention_norm = norm_from_spec(spec) if layer else nn.Identity()
        self.attention = ModernBertAttention(spec.layer_specs[layer])
        self.feed_forward_norm = norm_from_spec(spec)
        self.feed_forward = GatedFeedForward(spec)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), attention_mask)
        mixed: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return mixed


class ModernBertAttention(AttentionLayer):
    """out = softmax(Q Kᵀ / √d) V with rotated Q and K, over all keys or, in a window, those near the query."""

    spec: ModernBertAttentionSpec

    def __init__(self, spec: ModernBertAttentionSpec) -> None:
        super().__init__(spec, spec.inner_dim)
        self.qkv = nn.Linear(spec.dim, 3 * spec.inner_dim, bias=spec.bias)
        # numbers as transformers computes them, not to be computed again elsewhere: at position 8191, the rounding of a
        # frequency is an error of 5e-4
        exponents = torch.arange(0, spec.head_size, 2).float() / spec.head_size
        self.frequencies = (1.0 / spec.rope_theta**exponents).tolist()

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated query and key, and value, each [batch, heads, seq, head_dim]."""
        return self.project_at(hidden_states, torch.arange(hidden_states.shape[1], device=hidden_states.device))

    def project_at(self, hidden_states: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `project`, for positions int64 [seq] or [batch, 1, seq]."""
        q, k, v = (split_heads(x, self.spec.heads) for x in self.qkv(hidden_states).chunk(3, dim=-1))
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=hidden_states.device)
        angles = position.float().unsqueeze(-1) * frequencies
        return rotate_halves(q, angles), rotate_halves(k, angles), v

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        q, k, v = projected
        window, scale = self.spec.window, 1 / math.sqrt(self.spec.head_size)
        if window is not None:
            return attend_in_band((q, k, v), keep, Band(scale, window, window), fused=self.fused)
        if self.fused:
            context: Tensor = masked_attention(q, k, v, keep, scale)
            return context
        return softmax_attention(q, k, v, keep[:, None, None, :])


class GatedFeedForward(nn.Module):
    """W2 · (act(a) · b), where a and b are the halves of W1 · x."""

    def __init__(self, spec: ModernBertSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        self.activation = ACTIVATIONS[HIDDEN_ACTS[spec.hidden_activation]]
        self.down = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.up(x).chunk(2, dim=-1)
        down: Tensor = self.down(self.activation(x) * gate)
        return down


class PredictionHead(nn.Module):
    """[…, hidden_size] → W2 · LN(act(W1 · x)) […, outputs]. Tied, W2 of masked-lm is the table of words itself."""

    def __init__(self, spec: ModernBertSpec, word_embedding: nn.Embedding) -> None:
        super().__init__()
        has_bias = spec.decoder_bias or spec.task != "masked-lm"
        self.dense = nn.Linear(spec.hidden_size, spec.hidden_size, bias=spec.classifier_bias)
        self.activation = ACTIVATIONS[HIDDEN_ACTS[spec.classifier_activation]]
        self.norm = norm_from_spec(spec)
        self.out = nn.Linear(spec.hidden_size, spec.head_outputs, bias=has_bias)
        if spec.task == "masked-lm" and spec.tie_word_embeddings:
            self.out.weight = word_embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(self.activation(self.dense(hidden))))
        return logits


def norm_from_spec(spec: ModernBertSpec) -> LayerNorm:
    return LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps, bias=spec.norm_bias)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate channel c of x [batch, heads, seq, size] with channel c + size / 2 by angles […, seq, size / 2]."""
    first, second = x.chunk(2, dim=-1)
    sines, cosines = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def first_kept(hidden: Tensor, mask: Tensor) -> Tensor:
    """The hidden states [batch, seq, channels] of the first token that is kept, [batch, channels]."""
    row = (mask != 0).to(torch.int32).argmax(dim=1)
    return hidden.gather(1, row[:, None, None].expand(-1, -1, hidden.shape[-1])).squeeze(1)


BLOCK_NAMES: dict[str, str] = {
    "attention_norm": "attn_norm",
    "attention.qkv": "attn.Wqkv",
    "attention.out": "attn.Wo",
    "feed_forward_norm": "mlp_norm",
    "feed_forward.up": "mlp.Wi",
    "feed_forward.down": "mlp.Wo",
}
ENCODER_NAMES: dict[str, str] = {
    "token_embedding": "embeddings.tok_embeddings",
    "embedding_norm": "embeddings.norm",
    "final_norm": "final_norm",
}


def weight_names(spec: ModernBertSpec) -> dict[str, tuple[str, ...]]:
    """Name in our state_dict → names that it may have in a checkpoint; the first one present is the one to take."""
    modules: dict[str, tuple[str, ...]] = {}
    for layer in range(spec.layers):
        encoder = {f"blocks.{layer}.{ours}": f"layers.{layer}.{theirs}" for ours, theirs in BLOCK_NAMES.items()}
        modules |= {ours: (BASE_PREFIX + theirs, theirs) for ours, theirs in encoder.items()}
    modules |= {ours: (BASE_PREFIX + theirs, theirs) for ours, theirs in ENCODER_NAMES.items()}
    out = "decoder" if spec.task == "masked-lm" else "classifier"
    modules |= {"head.dense": ("head.dense",), "head.norm": ("head.norm",), "head.out": (out,)}
    names: dict[str, tuple[str, ...]] = {}
    for name in spec.weights():
        module, _, leaf = name.rpartition(".")
        names[name] = tuple(f"{theirs}.{leaf}" for theirs in modules[module])
    if spec.task == "masked-lm" and spec.tie_word_embeddings:
        # transformers overwrites a tied decoder with the table of words, whatever the file says
        names["head.out.weight"] = (*names["token_embedding.weight"], "decoder.weight")
    return names
