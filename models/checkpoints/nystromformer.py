"""Nyströmformer checkpoints as our modules (Xiong et al., 2021, arXiv 2102.03902; transformers 4.57.1).

A BERT encoder (post-norm) whose attention is `NystromAttention` in its published form, with the head of one task.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effexport.models.checkpoints.bert import (
    BLOCK_NAMES,
    BertModel,
    NumberedEmbeddings,
    bert_weight_names,
    check_length,
)
from effexport.models.checkpoints.nystromformer_spec import FIRST_POSITION, NystromformerSpec
from effexport.models.variants.nystrom.layer import NystromAttention

# Checkpoint names that may be present and mean nothing to a module: buffers of old versions, an unused pooler, and
# heads of other tasks, which remain when the base is loaded from a head model.
IGNORED: tuple[str, ...] = (
    r"(nystromformer\.)?embeddings\.(position_ids|token_type_ids)",
    r"(nystromformer\.)?pooler\..*",
    r"(cls|classifier|pre_classifier|qa_outputs)\..*",
)


class Nystromformer(BertModel):
    """A BERT-like encoder on Nyström attention.

    With landmarks, sequences are padded to `segment_means_seq_len` and outputs cropped: what transformers computes
    from input that is padded to this length.
    """

    def __init__(self, spec: NystromformerSpec) -> None:
        super().__init__(spec, NumberedEmbeddings(spec, FIRST_POSITION), NystromAttention)
        self.spec = spec

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor | tuple[Tensor, ...]:
        """int64 [batch, seq] three times ([batch, choices, seq] for multiple-choice); attention_mask: 1 = keep.

        Returns what `spec.outputs` says, in this order. Raises SpecError for a sequence that is too long.
        """
        return self.outputs(input_ids, attention_mask, token_type_ids)

    def encode(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        spec, seq_len = self.spec, input_ids.shape[1]
        check_length(seq_len, spec)
        if not spec.is_plain_softmax:
            length = spec.segment_means_seq_len
            input_ids = pad_to(input_ids, length, spec.pad_token_id)
            attention_mask = pad_to(attention_mask, length, 0)
            token_type_ids = pad_to(token_type_ids, length, 0)
        hidden: Tensor = self.embeddings(input_ids, token_type_ids)
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        return hidden if spec.is_plain_softmax else first_rows(hidden, seq_len)


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


# our module → theirs, in the head of each task
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
    """As `bert_weight_names`, with the filters of the convolutions."""
    names = bert_weight_names(spec, BLOCK_NAMES, HEAD_NAMES[spec.task], "cls.predictions")
    if spec.conv_kernel_size is not None:
        for layer in range(spec.layers):
            theirs = f"encoder.layer.{layer}.attention.self.conv.weight"
            names[f"blocks.{layer}.attention.conv.weight"] = (f"{spec.family}.{theirs}", theirs)
    return names
