"""Nyströmformer checkpoints as our modules (Xiong et al., 2021, arXiv 2102.03902; transformers 4.57.1).

A BERT encoder (post-norm) whose attention is `NystromAttention` in its published form, with the head of one task.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.checkpoints.nystromformer_spec import FIRST_POSITION, HIDDEN_ACTS, NystromformerSpec
from effexport.models.layers import LayerNorm
from effexport.models.validation import SpecError
from effexport.models.variants.nystrom.layer import NystromAttention

# Values of HIDDEN_ACTS → function.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
# Head models save the encoder under this prefix, base models without it.
BASE_PREFIX = "nystromformer."
# Checkpoint names that may be present and mean nothing to a module: buffers of old versions, an unused pooler, and
# heads of other tasks, which remain when the base is loaded from a head model.
IGNORED: tuple[str, ...] = (
    r"(nystromformer\.)?embeddings\.(position_ids|token_type_ids)",
    r"(nystromformer\.)?pooler\..*",
    r"(cls|classifier|pre_classifier|qa_outputs)\..*",
)


class Nystromformer(nn.Module):
    """Embeddings → post-norm blocks → head.

    With landmarks, sequences are padded to `segment_means_seq_len` and outputs cropped: what transformers computes
    from input that is padded to this length.
    """

    def __init__(self, spec: NystromformerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embeddings = Embeddings(spec)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.head = head_from_spec(spec, self.embeddings.word)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor | tuple[Tensor, ...]:
        """int64 [batch, seq] three times ([batch, choices, seq] for multiple-choice); attention_mask: 1 = keep.

        Returns what `spec.outputs` says, in this order. Raises SpecError for a sequence that is too long.
        """
        tokens = (input_ids, attention_mask, token_type_ids)
        if self.spec.task != "multiple-choice":
            outputs: Tensor | tuple[Tensor, ...] = self.head(self.encode(*tokens))
            return outputs
        logits: Tensor = self.head(self.encode(*(values.flatten(0, 1) for values in tokens)))
        return logits.reshape(input_ids.shape[0], input_ids.shape[1])

    def encode(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """int64 [batch, seq] three times → last hidden states [batch, seq, hidden_size]."""
        spec, seq_len = self.spec, input_ids.shape[1]
        if not torch.compiler.is_exporting() and seq_len > spec.max_seq_len:
            raise SpecError(f"the sequence has {seq_len} tokens; expected at most {spec.max_seq_len}")
        if not spec.is_plain_softmax:
            length = spec.segment_means_seq_len
            input_ids = pad_to(input_ids, length, spec.pad_token_id)
            attention_mask = pad_to(attention_mask, length, 0)
            token_type_ids = pad_to(token_type_ids, length, 0)
        hidden: Tensor = self.embeddings(input_ids, token_type_ids)
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        return hidden if spec.is_plain_softmax else first_rows(hidden, seq_len)


class Embeddings(nn.Module):
    """LN(word + token type + position), without any scaling."""

    def __init__(self, spec: NystromformerSpec) -> None:
        super().__init__()
        self.word = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.position = nn.Embedding(FIRST_POSITION + spec.max_position_embeddings, spec.hidden_size)
        self.token_type = nn.Embedding(spec.type_vocab_size, spec.hidden_size)
        self.norm = LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """int64 [batch, seq] twice → [batch, seq, hidden_size]."""
        positions = self.position.weight[FIRST_POSITION : FIRST_POSITION + input_ids.shape[1]]
        normed: Tensor = self.norm(self.word(input_ids) + self.token_type(token_type_ids) + positions)
        return normed


class Block(nn.Module):
    """h = LN(x + A x), y = LN(h + W2 · act(W1 · h))."""

    def __init__(self, spec: NystromformerSpec) -> None:
        super().__init__()
        self.attention = NystromAttention(spec.attention)
        self.attention_norm = LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)
        self.up = nn.Linear(spec.hidden_size, spec.intermediate_size)
        self.activation = ACTIVATIONS[HIDDEN_ACTS[spec.hidden_act]]
        self.down = nn.Linear(spec.intermediate_size, spec.hidden_size)
        self.feed_forward_norm = LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, attention_mask))
        normed: Tensor = self.feed_forward_norm(x + self.down(self.activation(self.up(x))))
        return normed


class MaskedLMHead(nn.Module):
    """[batch, seq, hidden_size] → logits [batch, seq, vocab_size]. Tied, the decoder is the table of words itself."""

    def __init__(self, spec: NystromformerSpec, word_embedding: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(spec.hidden_size, spec.hidden_size)
        self.activation = ACTIVATIONS[HIDDEN_ACTS[spec.hidden_act]]
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


def head_from_spec(spec: NystromformerSpec, word_embedding: nn.Embedding) -> nn.Module:
    if spec.task == "masked-lm":
        return MaskedLMHead(spec, word_embedding)
    if spec.task == "sequence-classification":
        return FirstTokenHead(spec.hidden_size, spec.num_labels, HIDDEN_ACTS[spec.hidden_act])
    if spec.task == "multiple-choice":
        # one number per choice; its activation does not follow the configuration
        return FirstTokenHead(spec.hidden_size, 1, "relu")
    if spec.task == "token-classification":
        return nn.Linear(spec.hidden_size, spec.num_labels)
    if spec.task == "question-answering":
        return QuestionAnsweringHead(spec.hidden_size)
    return nn.Identity()


def pad_to(values: Tensor, length: int, fill: int) -> Tensor:
    """[batch, seq] → [batch, length], with `fill` after the end.

    More than is missing is added, and the first `length` kept. torch.export takes sizes of 0 and 1 for constants, so
    the added part has 2 tokens at least and seq stays symbolic whatever length it traces with. One token too many in
    `values` makes that size −1, which runtimes refuse; a negative pad would crop it in silence.
    """
    batch, seq_len = values.shape
    added = values.new_full((batch, 3 * (length - seq_len) + 2), fill)
    return first_rows(torch.cat([values, added], dim=1), length)


def first_rows(x: Tensor, count: int) -> Tensor:
    """[batch, seq, …] → [batch, count, …]. A slice would tell torch.export that count is seq where they are equal."""
    return x.index_select(1, torch.arange(count, device=x.device))


# our module → theirs, in each block, in the embeddings and in the head of each task
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
HEAD_NAMES: dict[str, dict[str, str]] = {
    "base": {},
    "masked-lm": {
        "head.dense": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
    },
    "sequence-classification": {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"},
    "token-classification": {"head": "classifier"},
    "question-answering": {"head.out": "qa_outputs"},
    "multiple-choice": {"head.dense": "pre_classifier", "head.out": "classifier"},
}


def weight_names(spec: NystromformerSpec) -> dict[str, tuple[str, ...]]:
    """Name in our state_dict → names that it may have in a checkpoint; the first one present is the one to take."""
    encoder = dict(EMBEDDING_NAMES)
    for layer in range(spec.layers):
        theirs = f"encoder.layer.{layer}"
        for ours, name in BLOCK_NAMES.items():
            encoder |= {f"blocks.{layer}.{ours}.{leaf}": f"{theirs}.{name}.{leaf}" for leaf in ("weight", "bias")}
        if spec.conv_kernel_size is not None:
            encoder[f"blocks.{layer}.attention.conv.weight"] = f"{theirs}.attention.self.conv.weight"
    names: dict[str, tuple[str, ...]] = {ours: (BASE_PREFIX + name, name) for ours, name in encoder.items()}
    for ours, name in HEAD_NAMES[spec.task].items():
        names |= {f"{ours}.{leaf}": (f"{name}.{leaf}",) for leaf in ("weight", "bias")}
    if spec.task == "masked-lm":
        decoder = "cls.predictions.decoder.weight"
        # transformers overwrites a tied decoder with the table of words, whatever the file says
        names["head.decoder.weight"] = (
            (*names["embeddings.word.weight"], decoder) if spec.tie_word_embeddings else (decoder,)
        )
        names["head.decoder.bias"] = ("cls.predictions.bias", "cls.predictions.decoder.bias")
    return names
