"""Longformer checkpoints as our modules (Beltagy et al., 2020, arXiv 2004.05150; transformers 4.57.1).

A BERT-like encoder whose tokens see those near them; global tokens see all and are seen by all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.checkpoints.bert import BLOCK_NAMES, BertModel, Embeddings, bert_weight_names, check_length
from effexport.models.checkpoints.longformer_spec import (
    GLOBAL_PROJECTIONS,
    RULES,
    BandedModelSpec,
    BandedSpec,
    LongformerSpec,
    too_many_global_tokens,
)
from effexport.models.contract import GLOBAL_MASK
from effexport.models.layers import MultiHeadAttention, merge_heads, split_heads
from effexport.models.validation import SpecError
from effexport.models.variants.sums import block_count
from effexport.plugins.banded_attention.op import Band, attend_in_band

# Tokens whose places are counted by one product; the sums of a block are exact in TF32, too.
BLOCK = 256
# Checkpoint names that may be present and mean nothing to a module: a buffer of old versions, an unused pooler, and
# heads of other tasks, which remain when the base is loaded from a head model.
IGNORED: tuple[str, ...] = (
    r"(longformer\.)?embeddings\.position_ids",
    r"(longformer\.)?pooler\..*",
    r"(lm_head|classifier|qa_outputs)\..*",
)


class Longformer(BertModel):
    """A BERT-like encoder on banded attention with global tokens. Any length up to `spec.max_seq_len`."""

    def __init__(self, spec: BandedModelSpec) -> None:
        super().__init__(spec, self.embeddings_of(spec), BandedAttentionLayer)
        self.spec = spec

    @staticmethod
    def embeddings_of(spec: BandedModelSpec) -> Embeddings:
        return CountedEmbeddings(spec)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        global_attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """int64 [batch, seq] each ([batch, choices, seq] for multiple-choice); attention_mask: 1 = keep;
        global_attention_mask: 1 = global, or all 0 for the tokens of the task's rule.

        token_type_ids: None for zeros. Returns what `spec.outputs` says, in this order. Raises SpecError for a sequence
        that is too long.
        """
        segments = () if token_type_ids is None else (token_type_ids,)
        return self.outputs(input_ids, attention_mask, global_attention_mask, *segments)

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        global_attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        spec, keep = self.spec, attention_mask != 0
        check_length(input_ids.shape[1], spec)
        hidden: Tensor = self.embeddings(input_ids, token_type_ids)
        is_global = global_tokens(spec, input_ids, keep, global_attention_mask)
        check_global_tokens(is_global, spec.global_tokens)
        rows = rows_for_globals(is_global, spec.global_tokens)
        for block in self.blocks:
            hidden = block(hidden, keep, is_global, *rows)
        return hidden


class CountedEmbeddings(Embeddings):
    """Embeddings whose positions count the tokens that are not `pad_token_id`, from the one behind it on."""

    IN_FLOAT: ClassVar[Mapping[str, str]] = {"": "sums of ones"}

    def __init__(self, spec: BandedModelSpec) -> None:
        super().__init__(spec)
        self.pad_token_id = spec.pad_token_id

    def positions(self, input_ids: Tensor) -> Tensor:
        counted = input_ids != self.pad_token_id
        vectors: Tensor = self.position(torch.where(counted, counts(counted), 0) + self.pad_token_id)
        return vectors


class BandedAttentionLayer(MultiHeadAttention):
    """Softmax attention of each token to those up to `reach` tokens away and to global tokens, which see all."""

    spec: BandedSpec

    def __init__(self, spec: BandedSpec) -> None:
        super().__init__(spec)
        for name in GLOBAL_PROJECTIONS:
            self.add_module(name, nn.Linear(spec.dim, spec.inner_dim))

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, keep: Tensor, is_global: Tensor, *rows: Tensor
    ) -> Tensor:
        """hidden_states [batch, seq, dim]; keep, is_global: boolean [batch, seq]. Returns [batch, seq, dim].

        rows: those of `rows_for_globals`, which a model finds once for all layers.
        As in transformers, padding sees nothing: its context is 0.
        """
        most = self.spec.global_tokens
        rows = rows or rows_for_globals(is_global, most)
        projected = self.project(hidden_states)
        far = self.project_bounded(hidden_states, *rows) if most else self.project_found(hidden_states, *rows)
        band = Band(1 / math.sqrt(self.spec.head_size), self.spec.reach, self.spec.reach, most_globals=most or 0)
        context = attend_in_band(projected, keep, band, fused=self.fused, is_global=is_global, of_globals=far)
        out: Tensor = self.out(merge_heads(torch.where(keep[:, None, :, None], context, 0.0)))
        return out

    def project_found(self, hidden_states: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The projections of global tokens, for as many tokens as a batch needs."""
        asking, answering = rows[:2], rows[2:]
        return (
            self.project_some("query_global", hidden_states, *asking),
            self.project_some("key_global", hidden_states, *answering),
            self.project_some("value_global", hidden_states, *answering),
        )

    def project_bounded(self, hidden_states: Tensor, places: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The projections of global tokens, in shapes that do not depend on values: queries for `slots_for_globals`,
        keys and values for all tokens."""
        batch, seq_len = hidden_states.shape[:2]
        asking = self.get_submodule("query_global")(hidden_states.flatten(0, 1).index_select(0, places))
        queries = asking.index_select(0, slots).unflatten(0, (batch, seq_len))
        answering = (self.get_submodule(name)(hidden_states) for name in GLOBAL_PROJECTIONS[1:])
        q, k, v = (split_heads(x, self.spec.heads) for x in (queries, *answering))
        return q, k, v

    def project_some(self, name: str, hidden_states: Tensor, tokens: Tensor, row_of_token: Tensor) -> Tensor:
        """A projection of some tokens, [batch, heads, seq, head_dim]; others have the row of the first one."""
        some = self.get_submodule(name)(hidden_states.index_select(1, tokens))
        return split_heads(some, self.spec.heads).index_select(2, row_of_token)


def rows_for_globals(is_global: Tensor, most: int | None) -> tuple[Tensor, ...]:
    """The rows of tokens that are global in a sample, and of all tokens if there are any; see `rows_of`.

    most: the most global tokens that a sample may have; with a number, see `slots_for_globals`."""
    if most is not None:
        return slots_for_globals(is_global, most)
    return *rows_of(is_global.any(dim=0)), *rows_of(is_global.any().expand(is_global.shape[1]))


def slots_for_globals(is_global: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The tokens of each sample to project, and the slot of each token, in shapes that do not depend on values.

    is_global: boolean [batch, seq]. Tokens are rows of the flat batch, int64 [batch · most]; slots are int64
    [batch · seq]. Slots that are left over hold the first token of the sample; a token that is not global has any slot.
    """
    batch, seq_len = is_global.shape
    position = torch.arange(seq_len, device=is_global.device).expand(batch, seq_len)
    rank = (counts(is_global) - 1).clamp(min=0)
    # one slot more takes all tokens that are not global
    place = torch.where(is_global, rank.clamp(max=most), most)
    chosen = torch.zeros_like(rank[:, :1]).expand(batch, most + 1).scatter(1, place, position)[:, :most]
    sample = torch.arange(batch, device=is_global.device).unsqueeze(1)
    return (chosen + sample * seq_len).flatten(), (rank.clamp(max=most - 1) + sample * most).flatten()


def rows_of(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of a batch to project, int64 [rows], and the row of each token, int64 [seq].

    wanted: boolean [seq]. The first token always has row 0, which is also the row of tokens that are not wanted.
    """
    position = torch.arange(wanted.shape[0], device=wanted.device)
    tokens = (wanted | (position == 0)).nonzero().squeeze(1)
    row = torch.arange(tokens.shape[0], device=wanted.device)
    return tokens, torch.zeros_like(position).index_copy(0, tokens, row)


def counts(counted: Tensor) -> Tensor:
    """The number of tokens that count, up to each one and with it: boolean [batch, seq] → int64 [batch, seq].

    Prefix sums as products with triangles of ones: some runtimes run CumSum step by step.
    """
    seq_len = counted.shape[1]
    blocks = block_count(seq_len, BLOCK)
    row = F.pad(counted.float(), (0, blocks * BLOCK - seq_len)).unflatten(1, (blocks, BLOCK))
    place, block = torch.arange(BLOCK, device=row.device), torch.arange(blocks, device=row.device)
    inside = row @ (place[:, None] <= place).float()
    before = inside[..., -1] @ (block[:, None] < block).float()
    sums: Tensor = inside + before.unsqueeze(-1)
    return sums.flatten(1)[:, :seq_len].long()


def global_tokens(spec: BandedModelSpec, input_ids: Tensor, keep: Tensor, global_attention_mask: Tensor) -> Tensor:
    """The tokens that are global: boolean [batch, seq]. Padding never is.

    input_ids, global_attention_mask int64 [batch, seq]; keep: boolean. A sequence that is given none has those of the
    task's rule.
    """
    given = (global_attention_mask != 0) & keep
    if spec.task not in RULES:
        return given
    position = torch.arange(input_ids.shape[1], device=input_ids.device)
    if spec.task == "sequence-classification":
        by_rule = (position == 0) & keep
    else:
        # of no separator: beyond the end
        is_separator = (input_ids == spec.sep_token_id) & keep
        first = torch.where(is_separator, position, input_ids.shape[1]).amin(dim=1, keepdim=True)
        of_task = position < first if spec.task == "question-answering" else position > first + 1
        by_rule = of_task & (first < input_ids.shape[1]) & keep
    return given | (by_rule & (given.long().amax(dim=1, keepdim=True) == 0))


def check_global_tokens(is_global: Tensor, most: int | None) -> None:
    """Raise SpecError for a sample with more global tokens than `most`, outside of an export."""
    if most is None or torch.compiler.is_exporting():
        return
    found = int(is_global.sum(dim=1).max()) if is_global.numel() else 0
    if found > most:
        raise SpecError(too_many_global_tokens(found, most))


def with_global_tokens(spec: BandedModelSpec, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of a case with all global tokens marked, as transformers takes them, where an input says which."""
    tokens = [inputs[name].flatten(0, -2) for name in ("input_ids", "attention_mask", GLOBAL_MASK)]
    is_global = global_tokens(spec, tokens[0], tokens[1] != 0, tokens[2])
    return {**inputs, GLOBAL_MASK: is_global.long().reshape(inputs[GLOBAL_MASK].shape)}


# our module → theirs, in the head of each task
HEAD_NAMES: dict[str, dict[str, str]] = {
    "base": {"head.dense": "pooler.dense"},
    "masked-lm": {"head.dense": "lm_head.dense", "head.norm": "lm_head.layer_norm"},
    "sequence-classification": {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"},
    "token-classification": {"head": "classifier"},
    "question-answering": {"head.out": "qa_outputs"},
    "multiple-choice": {"head.dense": "pooler.dense", "head.out": "classifier"},
}


def weight_names(spec: LongformerSpec) -> dict[str, tuple[str, ...]]:
    """As `bert_weight_names`, with the projections of global tokens."""
    head = {} if spec.task == "base" and not spec.pooler else HEAD_NAMES[spec.task]
    far = {f"attention.{name}": f"attention.self.{name}" for name in GLOBAL_PROJECTIONS}
    return bert_weight_names(spec, BLOCK_NAMES | far, head, "lm_head")
