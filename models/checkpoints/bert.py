"""BERT-like encoders (post-norm) around the attention of a family, with the head of one task, and the names of their
weights in checkpoints of transformers 4.57.1."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.checkpoints.bert_spec import HIDDEN_ACTS, BertSpec
from effexport.models.layers import AttentionLayer, LayerNorm
from effexport.models.validation import SpecError

# Values of HIDDEN_ACTS → function.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class BertModel(nn.Module):
    """Embeddings → post-norm blocks → head. A family defines `forward` and `encode`, which take the same inputs.

    encode: inputs with tokens [batch, seq] → last hidden states [batch, seq, hidden_size].
    """

    encode: Callable[..., Tensor]

    def __init__(self, spec: BertSpec, embeddings: Embeddings, layer: Callable[..., AttentionLayer]) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.blocks = nn.ModuleList(Block(spec, layer(attention)) for attention in spec.layer_specs)
        self.head = head_from_spec(spec, self.embeddings.word)

    def outputs(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The outputs of the task: those of the head on `encode`. Tokens are [batch, choices, seq] if it is multiple
        choice."""
        shape = inputs[0].shape
        if len(shape) == 2:
            outputs: Tensor | tuple[Tensor, ...] = self.head(self.encode(*inputs))
            return outputs
        logits: Tensor = self.head(self.encode(*(values.flatten(0, 1) for values in inputs)))
        return logits.reshape(shape[0], shape[1])


class Embeddings(nn.Module):
    """LN(scale · word + token type + position). A family defines `positions`."""

    def __init__(self, spec: BertSpec, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.word = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.position = nn.Embedding(spec.position_rows, spec.hidden_size)
        self.token_type = nn.Embedding(spec.type_vocab_size, spec.hidden_size) if spec.type_vocab_size else None
        self.norm = LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)

    def positions(self, input_ids: Tensor) -> Tensor:
        """The vector of each token's position: int64 [batch, seq] → [seq or batch, seq, hidden_size]."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """int64 [batch, seq] twice → [batch, seq, hidden_size]. token_type_ids: None for zeros."""
        positions = self.positions(input_ids)
        tokens = self.word(input_ids) if self.scale == 1 else self.scale * self.word(input_ids)
        if self.token_type is not None:
            segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            tokens = tokens + self.token_type(segments)
        normed: Tensor = self.norm(tokens + positions)
        return normed


class NumberedEmbeddings(Embeddings):
    """Embeddings whose positions count all tokens, padding included. first: the row of the first one."""

    def __init__(self, spec: BertSpec, first: int, scale: float = 1.0) -> None:
        super().__init__(spec, scale)
        self.first = first

    def positions(self, input_ids: Tensor) -> Tensor:
        return self.position.weight[self.first : self.first + input_ids.shape[1]]


class Block(nn.Module):
    """h = LN(x + A x), y = LN(h + W2 · act(W1 · h))."""

    def __init__(self, spec: BertSpec, attention: AttentionLayer) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)
        self.up = nn.Linear(spec.hidden_size, spec.intermediate_size)
        self.activation = ACTIVATIONS[HIDDEN_ACTS[spec.hidden_act]]
        self.down = nn.Linear(spec.intermediate_size, spec.hidden_size)
        self.feed_forward_norm = LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)

    def forward(self, x: Tensor, *masks: Tensor) -> Tensor:
        """x [batch, seq, hidden_size] → the same shape. masks: the other arguments of the attention."""
        x = self.attention_norm(x + self.attention(x, *masks))
        normed: Tensor = self.feed_forward_norm(x + self.down(self.activation(self.up(x))))
        return normed


class MaskedLMHead(nn.Module):
    """[batch, seq, hidden_size] → logits [batch, seq, vocab_size]. Tied, the decoder is the table of words itself."""

    def __init__(self, spec: BertSpec, word_embedding: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(spec.hidden_size, spec.hidden_size)
        self.activation = ACTIVATIONS[HIDDEN_ACTS[spec.head_act]]
        self.norm = LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)
        self.decoder = nn.Linear(spec.hidden_size, spec.vocab_size)
        if spec.tie_word_embeddings:
            self.decoder.weight = word_embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.norm(self.activation(self.dense(hidden))))
        return logits


class FirstTokenHead(nn.Module):
    """[batch, seq, hidden_size] → [batch, outputs], from the first token of each sequence."""

    def __init__(self, hidden_size: int, outputs: int, activation: str) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.activation = ACTIVATIONS[activation]
        self.out = nn.Linear(hidden_size, outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.out(self.activation(self.dense(hidden[:, 0])))
        return logits


class QuestionAnsweringHead(nn.Module):
    """[batch, seq, hidden_size] → start and end logits, each [batch, seq]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.out = nn.Linear(hidden_size, 2)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.out(hidden)
        return logits[..., 0], logits[..., 1]


class PoolerHead(nn.Module):
    """[batch, seq, hidden_size] → the same, and a vector of the first token of each sequence [batch, hidden_size]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, torch.tanh(self.dense(hidden[:, 0]))


def head_from_spec(spec: BertSpec, word_embedding: nn.Embedding) -> nn.Module:
    if spec.task == "masked-lm":
        return MaskedLMHead(spec, word_embedding)
    if spec.task in ("sequence-classification", "multiple-choice"):
        # one number per choice
        outputs = spec.num_labels if spec.task == "sequence-classification" else 1
        return FirstTokenHead(spec.hidden_size, outputs, HIDDEN_ACTS[spec.head_act])
    if spec.task == "token-classification":
        return nn.Linear(spec.hidden_size, spec.num_labels)
    if spec.task == "question-answering":
        return QuestionAnsweringHead(spec.hidden_size)
    return PoolerHead(spec.hidden_size) if spec.has_pooler else nn.Identity()


def check_length(seq_len: int, spec: BertSpec) -> None:
    """Raise SpecError for a sequence that is longer than the positions."""
    if not torch.compiler.is_exporting() and seq_len > spec.max_seq_len:
        raise SpecError(f"the sequence has {seq_len} tokens; expected at most {spec.max_seq_len}")


# our module → theirs, in each block and in the embeddings
BLOCK_NAMES: dict[str, str] = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
EMBEDDING_NAMES: dict[str, str] = {
    "embeddings.word.weight": "embeddings.word_embeddings.weight",
    "embeddings.position.weight": "embeddings.position_embeddings.weight",
    "embeddings.token_type.weight": "embeddings.token_type_embeddings.weight",
    "embeddings.norm.weight": "embeddings.LayerNorm.weight",
    "embeddings.norm.bias": "embeddings.LayerNorm.bias",
}


def bert_weight_names(
    spec: BertSpec, blocks: Mapping[str, str], head: Mapping[str, str], masked_lm: str
) -> dict[str, tuple[str, ...]]:
    """Name in our state_dict → names that it may have in a checkpoint; the first one present is the one to take.

    blocks, head: our modules → theirs, in each block and of the head of the task. masked_lm: their module with the
    decoder of masked-lm. Models with a head save the encoder, and its pooler, under `base_prefix`.
    """
    names = encoder_names(spec, EMBEDDING_NAMES, "encoder.layer", blocks)
    for ours, theirs in head.items():
        inside = theirs.startswith("pooler")
        accepted = [both(ours, prefix + theirs) for prefix in ((f"{spec.base_prefix}.", "") if inside else ("",))]
        names |= {name: tuple(one[name] for one in accepted) for name in accepted[0]}
    if spec.task == "masked-lm":
        decoder = f"{masked_lm}.decoder"
        # transformers overwrites a tied decoder with the table of words, whatever the file says
        words = names["embeddings.word.weight"] if spec.tie_word_embeddings else ()
        names["head.decoder.weight"] = (*words, f"{decoder}.weight")
        names["head.decoder.bias"] = (f"{masked_lm}.bias", f"{decoder}.bias")
    return names


def encoder_names(
    spec: BertSpec, embeddings: Mapping[str, str], layers: str, blocks: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Of embeddings and blocks, see `bert_weight_names`. layers: their list of blocks."""
    names = dict(embeddings)
    for layer in range(spec.layers):
        for ours, theirs in blocks.items():
            names |= both(f"blocks.{layer}.{ours}", f"{layers}.{layer}.{theirs}")
    return {ours: (f"{spec.base_prefix}.{name}", name) for ours, name in names.items()}


def both(ours: str, theirs: str) -> dict[str, str]:
    """Weight and bias of a layer."""
    return {f"{ours}.{leaf}": f"{theirs}.{leaf}" for leaf in ("weight", "bias")}
