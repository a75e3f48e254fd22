"""BigBird checkpoints as our modules (Zaheer et al., 2020, arXiv 2007.14062; transformers 4.57.1).

A BERT-like encoder on blocks of tokens: each token sees its own block, both neighbours, the first and the last; tokens
of the first and the last block see all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from effexport.models.checkpoints.bert import (
    ACTIVATIONS,
    BLOCK_NAMES,
    BertModel,
    NumberedEmbeddings,
    bert_weight_names,
    check_length,
)
from effexport.models.checkpoints.bert_spec import HIDDEN_ACTS
from effexport.models.checkpoints.big_bird_spec import BigBirdAttentionSpec, BigBirdSpec
from effexport.models.layers import LayerNorm, MultiHeadAttention, at_least_float32
from effexport.models.variants.softmax.layer import softmax_attention
from effexport.plugins.banded_attention.op import Band, attend_in_band
from effexport.plugins.masked_attention.op import masked_attention

# Checkpoint names that may be present and mean nothing to a module: buffers of old versions, an unused pooler, and
# heads of other tasks, which remain when the base is loaded from a head model.
IGNORED: tuple[str, ...] = (
    r"(bert\.)?embeddings\.(position_ids|token_type_ids)",
    r"(bert\.)?pooler\..*",
    r"(cls|classifier|qa_classifier)\..*",
)
# Subtracted from the logits of a question.
QUESTION_PENALTY = 1e6


class BigBird(BertModel):
    """A BERT-like encoder on attention of blocks. Any length up to `spec.max_seq_len`, without padding inside."""

    def __init__(self, spec: BigBirdSpec) -> None:
        scale = spec.hidden_size**0.5 if spec.rescale_embeddings else 1.0
        super().__init__(spec, NumberedEmbeddings(spec, 0, scale), BigBirdAttention)
        self.spec = spec
        if spec.task == "question-answering":
            self.head = AnswerHead(spec)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """int64 [batch, seq] each ([batch, choices, seq] for multiple-choice); attention_mask: 1 = keep.

        token_type_ids: left out for question-answering. Returns what `spec.outputs` says, in this order. Raises
        SpecError for a sequence that is too long.
        """
        if token_type_ids is not None:
            return self.outputs(input_ids, attention_mask, token_type_ids)
        is_question = self.is_question(input_ids)
        logits = at_least_float32(self.head(self.encode(input_ids, attention_mask, (~is_question).long())))
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        lowered = torch.where(is_question & (position > 0), QUESTION_PENALTY, 0.0).to(logits.dtype)
        return (logits - lowered.unsqueeze(-1)).unbind(dim=-1)

    def encode(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        check_length(input_ids.shape[1], self.spec)
        hidden: Tensor = self.embeddings(input_ids, token_type_ids)
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        return hidden

    def is_question(self, input_ids: Tensor) -> Tensor:
        """The tokens up to the first separator, or the first token: int64 [batch, seq] → boolean [batch, seq]."""
        length, separator = input_ids.shape[1], self.spec.sep_token_id
        assert separator is not None
        position = torch.arange(length, device=input_ids.device)
        ends = torch.where(input_ids.eq(separator), position, length).amin(dim=1, keepdim=True)
        return position <= torch.where(ends < length, ends, 0)


class BigBirdAttention(MultiHeadAttention):
    """Softmax attention of blocks, or over all tokens.

    In short sequences every token is global. The keys of the first block count `repeats` times for queries that are
    not global, which is log(repeats) in their logits: a channel more in queries and keys.
    """

    spec: BigBirdAttentionSpec

    def __init__(self, spec: BigBirdAttentionSpec) -> None:
        super().__init__(spec)
        self.out = nn.Linear(spec.inner_dim, spec.dim)

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        q, k, v = projected
        if self.spec.block_size is not None:
            return self.mix_blocks(q, k, v, keep, self.spec.block_size)
        if self.fused:
            context: Tensor = masked_attention(q, k, v, keep, 1 / math.sqrt(self.spec.head_size))
            return context
        return softmax_attention(q, k, v, keep[:, None, None, :])

    def mix_blocks(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, size: int) -> Tensor:
        scale = 1 / math.sqrt(self.spec.head_size)
        position = torch.arange(keep.shape[1], device=keep.device)
        last = position[-1:]
        is_short = last < self.spec.full_len
        is_first = position < size
        is_global = is_short | is_first | (position >= last - last % size)
        query, key = (~is_global).to(q.dtype) / scale, math.log(self.spec.repeats) * is_first.to(k.dtype)
        q, k = (torch.cat((x, one[:, None].expand(*x.shape[:3], 1)), dim=-1) for x, one in ((q, query), (k, key)))
        band = Band(scale, size, size, size, most_globals=2 * size, all_up_to=self.spec.full_len)
        context = attend_in_band((q, k, v), keep, band, fused=self.fused, is_global=is_global.expand(*keep.shape))
        # as in transformers, where padding of long sequences has a context of zeros
        return torch.where((keep | is_short)[:, None, :, None], context, 0.0)


class AnswerHead(nn.Module):
    """h = LN(x + W2 · act(W1 · x)), logits of start and end = W3 · h: [batch, seq, hidden_size] → [batch, seq, 2]."""

    def __init__(self, spec: BigBirdSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden_size, spec.intermediate_size)
        self.activation = ACTIVATIONS[HIDDEN_ACTS[spec.hidden_act]]
        self.down = nn.Linear(spec.intermediate_size, spec.hidden_size)
        self.norm = LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)
        self.out = nn.Linear(spec.hidden_size, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(hidden + self.down(self.activation(self.up(hidden)))))
        return logits


# our module → theirs, in the head of each task
HEAD_NAMES: dict[str, dict[str, str]] = {
    "base": {"head.dense": "pooler"},
    "masked-lm": {
        "head.dense": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
    },
    "sequence-classification": {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"},
    "token-classification": {"head": "classifier"},
    "question-answering": {
        "head.up": "qa_classifier.intermediate.dense",
        "head.down": "qa_classifier.output.dense",
        "head.norm": "qa_classifier.output.LayerNorm",
        "head.out": "qa_classifier.qa_outputs",
    },
    "multiple-choice": {"head.dense": "pooler", "head.out": "classifier"},
}


def weight_names(spec: BigBirdSpec) -> dict[str, tuple[str, ...]]:
    """As `bert_weight_names`; queries, keys and values may have no biases."""
    head = {} if spec.task == "base" and not spec.pooler else HEAD_NAMES[spec.task]
    names, weights = bert_weight_names(spec, BLOCK_NAMES, head, "cls.predictions"), spec.weights()
    return {name: theirs for name, theirs in names.items() if name in weights or name == "head.decoder.weight"}
