"""Reformer with the weights of transformers (Kitaev et al., 2020, arXiv 2001.04451)."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.checkpoints.bert import both
from effexport.models.checkpoints.reformer_spec import ReformerSpec
from effexport.models.encoder.module import ReversibleBlock
from effexport.models.encoder.spec import EncoderSpec
from effexport.models.layers import AttentionLayer, LayerNorm, keep_from_mask, take_rows
from effexport.models.validation import SpecError
from effexport.models.variants.local.layer import LocalAttention
from effexport.models.variants.lsh import LSHSpec
from effexport.models.variants.lsh.layer import LSHAttention

# Names that may be in a checkpoint and mean nothing here: constants, and heads of other tasks.
IGNORED: tuple[str, ...] = (
    r".*\.(self_)?mask_value_float(16|32)",
    r"lm_head\..*",
    r"classifier\..*",
    r"qa_outputs\..*",
)


class Reformer(nn.Module):
    """Embedding + positions → reversible blocks on two streams → LN of both, concatenated → the head of the task.

    Any number of tokens up to `spec.max_seq_len`. Padding to whole chunks happens inside, and is cut off again.
    """

    def __init__(self, spec: ReformerSpec) -> None:
        super().__init__()
        width = 2 * spec.hidden_size
        self.spec = spec
        self.token_embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.position_embedding = AxialPositions(spec) if spec.axial_pos_embds else LearnedPositions(spec)
        self.blocks = nn.ModuleList(block_of_layer(spec, layer) for layer in range(spec.layers))
        self.final_norm = LayerNorm(width, eps=spec.layer_norm_eps)
        if spec.task in ("lm-head", "masked-lm"):
            self.lm_head = nn.Linear(width, spec.vocab_size)
        elif spec.task == "sequence-classification":
            self.classifier_dense = nn.Linear(width, spec.hidden_size)
            self.classifier_out = nn.Linear(spec.hidden_size, spec.num_labels)
        elif spec.task == "question-answering":
            self.qa_outputs = nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """input_ids int64 [batch, seq]; attention_mask [batch, seq], 1 = keep.

        Returns what `spec.outputs` names, in its order. Rows of padding hold no meaning.
        Raises SpecError for a sequence longer than the positions.
        """
        return self.head(self.encode(input_ids, attention_mask))

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """As `forward`, to last hidden states [batch, seq, 2 · hidden]; of the first token only, if the head reads no
        other."""
        seq_len = input_ids.shape[1]
        if not torch.compiler.is_exporting() and seq_len > self.spec.max_seq_len:
            raise SpecError(f"the sequence has {seq_len} tokens; expected at most {self.spec.max_seq_len}")
        hidden = self.token_embedding(input_ids) + self.position_embedding(seq_len)
        # Zeros stand for the padding token: nothing attends to padding, so its content does not matter.
        multiple = self.spec.pad_multiple
        pad = (seq_len + multiple - 1) // multiple * multiple - seq_len
        hidden, keep = F.pad(hidden, (0, 0, 0, pad)), F.pad(attention_mask != 0, (0, pad))
        streams = self.run_blocks(hidden, keep, seq_len)
        kept_len = 1 if self.spec.task == "sequence-classification" else seq_len
        # by index: a slice of symbolic length is traced as the lesser of two lengths, and only for lengths that are, or
        # are not, a multiple of the chunks like the example
        hidden = torch.cat(streams, dim=-1).index_select(1, torch.arange(kept_len, device=hidden.device))
        normed: Tensor = self.final_norm(hidden)
        return normed

    def run_blocks(self, hidden: Tensor, keep: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        """hidden [batch, padded seq, hidden]; keep boolean [batch, padded seq]; seq_len without padding."""
        streams = (hidden, hidden)
        only_itself = self.only_itself(keep, seq_len) if self.spec.mask_constants == "hf" else None
        for block in self.blocks:
            assert isinstance(block, ReversibleBlock)
            attend = functools.partial(block.attention, attention_mask=keep)
            if isinstance(block.attention, ReformerLSHAttention):
                attend = functools.partial(attend, only_itself=only_itself)
            streams = block.mix(*streams, attend)
        return streams

    def only_itself(self, keep: Tensor, seq_len: int) -> Tensor:
        """Boolean [batch, padded seq]: the token that sees none but itself, in sequences of one LSH chunk.

        transformers runs those as plain attention, where that token gets exactly its own value. The rounding of
        chunked attention, which `mask_constants="hf"` reproduces, would give it 0.998 or so of it.
        """
        position = torch.arange(keep.shape[1], device=keep.device)
        is_short = torch.arange(seq_len, device=keep.device)[-1:] < self.spec.plain_lsh_len
        first = torch.where(keep, position, keep.shape[1]).amin(dim=1, keepdim=True)
        alone = keep & (position == first) & is_short
        return alone if self.spec.is_decoder else alone & (keep.sum(dim=1, keepdim=True) == 1)

    def head(self, hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """last_hidden_state [batch, seq, 2 · hidden] → the outputs of the task."""
        task = self.spec.task
        if task == "base":
            return hidden
        if task == "sequence-classification":
            pooled = torch.tanh(self.classifier_dense(hidden[:, 0]))
            label_logits: Tensor = self.classifier_out(pooled)
            return label_logits
        if task == "question-answering":
            start, end = self.qa_outputs(hidden).unbind(dim=-1)
            return start, end
        logits: Tensor = self.lm_head(hidden)
        return logits


class ReformerLSHAttention(LSHAttention):
    """LSH attention that is exact in sequences of one chunk too, see `Reformer.only_itself`."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, only_itself: Tensor | None = None
    ) -> Tensor:
        """only_itself: boolean [batch, seq], at most one token of each sample; its context is its own value."""
        context = self.attend(hidden_states, keep_from_mask(hidden_states, attention_mask))
        if only_itself is not None:
            # one token of each sample, so it costs little to compute its value again
            row = only_itself.to(torch.int32).argmax(dim=1)
            row = row + hidden_states.shape[1] * torch.arange(hidden_states.shape[0], device=row.device)
            value = self.value(take_rows(hidden_states.flatten(0, 1), row)).unsqueeze(1)
            context = torch.where(only_itself.unsqueeze(-1), value, context)
        projected: Tensor = self.out(context)
        return projected


class LearnedPositions(nn.Module):
    """A vector for every position."""

    def __init__(self, spec: ReformerSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(spec.max_position_embeddings, spec.hidden_size))

    def forward(self, seq_len: int) -> Tensor:
        """[seq, hidden]."""
        return self.weight[:seq_len]


class AxialPositions(nn.Module):
    """Position p as its digits in the base (n0, n1, …): a vector for every value of each digit, concatenated.

    weights: one for each axis i, [1, …, n_i, …, 1, d_i], as transformers shapes them.
    """

    def __init__(self, spec: ReformerSpec) -> None:
        super().__init__()
        shape = spec.axial_pos_shape
        self.shape = shape
        ends = [[1] * i + [n] + [1] * (len(shape) - i - 1) for i, n in enumerate(shape)]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(*axes, dim)) for axes, dim in zip(ends, spec.axial_pos_embds_dim, strict=True)
        )

    def forward(self, seq_len: int) -> Tensor:
        """[seq, hidden]."""
        position = torch.arange(seq_len, device=self.weights[0].device)
        parts = []
        for axis, weight in enumerate(self.weights):
            digit = position // math.prod(self.shape[axis + 1 :])
            # the first digit is left to overflow: a position beyond all of them has no row, which runtimes report
            digit = digit % self.shape[axis] if axis else digit
            parts.append(take_rows(weight.flatten(0, -2), digit))
        return torch.cat(parts, dim=-1)


def block_of_layer(spec: ReformerSpec, layer: int) -> ReversibleBlock:
    attention_spec = spec.attention_of_layer(layer)
    if isinstance(attention_spec, LSHSpec):
        attention: AttentionLayer = ReformerLSHAttention(attention_spec)
    else:
        attention = LocalAttention(attention_spec)
    block_spec = EncoderSpec(
        attention=attention_spec,
        ff_dim=spec.feed_forward_size,
        activation=spec.hidden_act,
        block="reversible",
        layer_norm_eps=spec.layer_norm_eps,
    )
    return ReversibleBlock(block_spec, attention)


def weight_names(spec: ReformerSpec) -> dict[str, tuple[str, ...]]:
    """Name in our state_dict → the names it may have in a checkpoint, the first one present wins.

    The rotations of LSH layers are in no checkpoint.
    """
    names = {"token_embedding.weight": "embeddings.word_embeddings.weight"}
    positions = "embeddings.position_embeddings"
    if spec.axial_pos_embds:
        for axis in range(len(spec.axial_pos_shape)):
            names[f"position_embedding.weights.{axis}"] = f"{positions}.weights.{axis}"
    else:
        names["position_embedding.weight"] = f"{positions}.embedding.weight"
    for layer, kind in enumerate(spec.layer_kinds):
        names |= block_weight_names(layer, kind)
    names |= both("final_norm", "encoder.layer_norm")
    # with the prefix in models with a head, without it in the base model
    body = {ours: (f"reformer.{theirs}", theirs) for ours, theirs in names.items()}
    return body | head_weight_names(spec.task)


def block_weight_names(layer: int, kind: str) -> dict[str, str]:
    ours, theirs = f"blocks.{layer}", f"encoder.layers.{layer}"
    projections = ("query_key", "value") if kind == "lsh" else ("query", "key", "value")
    return {
        **both(f"{ours}.attention_norm", f"{theirs}.attention.layer_norm"),
        **{
            f"{ours}.attention.{name}.weight": f"{theirs}.attention.self_attention.{name}.weight"
            for name in projections
        },
        f"{ours}.attention.out.weight": f"{theirs}.attention.output.dense.weight",
        **both(f"{ours}.feed_forward_norm", f"{theirs}.feed_forward.layer_norm"),
        **both(f"{ours}.feed_forward.up", f"{theirs}.feed_forward.dense.dense"),
        **both(f"{ours}.feed_forward.down", f"{theirs}.feed_forward.output.dense"),
    }


def head_weight_names(task: str) -> dict[str, tuple[str, ...]]:
    if task in ("lm-head", "masked-lm"):
        return {"lm_head.weight": ("lm_head.decoder.weight",), "lm_head.bias": ("lm_head.bias", "lm_head.decoder.bias")}
    heads = {
        "sequence-classification": both("classifier_dense", "classifier.dense")
        | both("classifier_out", "classifier.out_proj"),
        "question-answering": both("qa_outputs", "qa_outputs"),
    }
    return {ours: (theirs,) for ours, theirs in heads.get(task, {}).items()}
