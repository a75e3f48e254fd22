"""Published Nyströmformer checkpoints: their config.json as a frozen spec, and what users have to know about them.

No torch here. Names and semantics are those of transformers 4.57.1 (`NystromformerConfig`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from effexport.models.attention_spec import AttentionSpec
from effexport.models.checkpoints.bert_spec import BertSpec, check_not_pruned
from effexport.models.checkpoints.spec import config_value
from effexport.models.validation import nearest_multiples, require, shown
from effexport.models.variants.nystrom import NystromSpec

# The position table starts with two rows that are never read.
FIRST_POSITION = 2


@dataclass(frozen=True, kw_only=True)
class NystromformerSpec(BertSpec):
    """A BERT-like encoder on Nyström attention; defaults are those of transformers' configuration.

    num_landmarks, segment_means_seq_len: equal, they select plain softmax attention for any length (as published for
    512 tokens, and by default); otherwise the landmarks are means over a sequence of exactly segment_means_seq_len
    tokens. conv_kernel_size: taps of the depth-wise convolution over v (None: no convolution).
    pinv_init: "global" divides by a maximum over the batch, as transformers does; "per_head" does so per matrix.
    """

    family: ClassVar[str] = "nystromformer"
    TASKS: ClassVar[Mapping[str, str]] = {
        "base": "NystromformerModel",
        "masked-lm": "NystromformerForMaskedLM",
        "sequence-classification": "NystromformerForSequenceClassification",
        "token-classification": "NystromformerForTokenClassification",
        "question-answering": "NystromformerForQuestionAnswering",
        "multiple-choice": "NystromformerForMultipleChoice",
    }
    OPTIONS: ClassVar[tuple[str, ...]] = ("task", "seq_len", "num_labels", "pinv_init")
    NOT_READ: ClassVar[tuple[str, ...]] = ("pinv_init", "conv_kernel_size", "pad_token_id")
    POSITIVE: ClassVar[tuple[str, ...]] = (*BertSpec.POSITIVE, "num_landmarks", "segment_means_seq_len")

    vocab_size: int = 30000
    pad_token_id: int = 1
    hidden_act: str = "gelu_new"
    max_position_embeddings: int = 510
    num_landmarks: int = 64
    segment_means_seq_len: int = 64
    conv_kernel_size: int | None = 65
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    pinv_init: Literal["global", "per_head"] = "global"

    def check(self) -> None:
        super().check()
        # where files of our own may say 0 for no convolution, config.json says null, and transformers fails on 0
        require(self.conv_kernel_size != 0, "conv_kernel_size is 0; expected an odd number, or null for no convolution")
        self.check_landmarks()

    def check_landmarks(self) -> None:
        """Raises SpecError for landmarks that transformers accepts when it loads, and cannot run or runs wrongly."""
        landmarks, segment = self.num_landmarks, self.segment_means_seq_len
        require(
            landmarks <= segment,
            f"num_landmarks is {landmarks}, more than segment_means_seq_len {segment}, which leaves no token for a "
            f"landmark; the two look swapped, as in a published config.json of the original authors: use num_landmarks "
            f"{segment} and segment_means_seq_len {landmarks}, the length that the model was trained with",
        )
        require(
            segment % landmarks == 0,
            f"segment_means_seq_len {segment} is not a multiple of num_landmarks {landmarks}, so transformers mixes "
            f"samples or fails; the nearest that work: {nearest_multiples(segment, landmarks)}",
        )
        require(
            landmarks == segment or self.max_position_embeddings >= segment,
            f"max_position_embeddings is {self.max_position_embeddings}, but landmarks need sequences of exactly "
            f"segment_means_seq_len {segment} tokens, so transformers cannot run this checkpoint at any length; "
            f"expected a segment_means_seq_len of at most {self.max_position_embeddings}",
        )

    @property
    def is_plain_softmax(self) -> bool:
        """True if transformers runs this configuration as softmax attention, without landmarks."""
        return self.num_landmarks == self.segment_means_seq_len

    @property
    def attention(self) -> NystromSpec:
        return NystromSpec(
            dim=self.hidden_size,
            heads=self.heads,
            seq_len=self.seq_len if self.is_plain_softmax else self.segment_means_seq_len,
            num_landmarks=self.num_landmarks,
            segment_means_seq_len=self.segment_means_seq_len,
            pinv_init=self.pinv_init,
            mask_landmarks=False,
            conv_kernel_size=self.conv_kernel_size,
        )

    @property
    def layer_specs(self) -> list[AttentionSpec]:
        return [self.attention] * self.num_hidden_layers

    @property
    def position_rows(self) -> int:
        return FIRST_POSITION + self.max_position_embeddings

    @property
    def head_act(self) -> str:
        return "relu" if self.task == "multiple-choice" else self.hidden_act

    @property
    def max_seq_len(self) -> int:
        if self.is_plain_softmax:
            return self.max_position_embeddings
        # shorter ones are padded inside the graph
        return min(self.segment_means_seq_len, self.max_position_embeddings)

    @property
    def why_not_as_published(self) -> str:
        if self.pinv_init != "per_head" or self.is_plain_softmax:
            return ""
        return (
            "pinv_init per_head scales each pseudo-inverse by itself; transformers scales by a maximum over the batch"
        )

    @property
    def transformers_len(self) -> int | None:
        """Our graph pads to it by itself."""
        return None if self.is_plain_softmax else self.segment_means_seq_len

    @classmethod
    def special_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """A model that never pads by itself may have no padding token; null stands for no convolution."""
        refuse_unsupported(config)
        landmarks, segment = (
            config.get(name, getattr(cls, name)) for name in ("num_landmarks", "segment_means_seq_len")
        )
        no_token = landmarks == segment and "pad_token_id" in config and config["pad_token_id"] is None
        return {
            "conv_kernel_size": config.get("conv_kernel_size", cls.conv_kernel_size),
            "pad_token_id": 0 if no_token else config_value(config, "pad_token_id", cls.pad_token_id),
        }

    def notes_on(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
        return softmax_notes(self) if self.is_plain_softmax else landmark_notes(self)


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raises SpecError for fields of config.json that select something other than what is built here."""
    require(
        not config_value(config, "inv_coeff_init_option", False),
        "config.json: inv_coeff_init_option is true, with which transformers cannot build the model; expected false, "
        "as in every model that transformers has trained; for the scale that it means, use pinv_init per_head",
    )
    kind = config.get("position_embedding_type", "absolute")
    require(
        kind == "absolute",
        f"config.json: position_embedding_type is {shown(kind)}, with which transformers adds no positions at all; "
        "expected 'absolute'; export a checkpoint with absolute positions",
    )
    require(
        not config_value(config, "is_decoder", False),
        "config.json: is_decoder is true, but landmarks average over the whole sequence, so there is no causal form; "
        "expected false",
    )
    check_not_pruned(config)


def softmax_notes(spec: NystromformerSpec) -> list[str]:
    notes = [
        f"This configuration is plain softmax attention, not Nyström: num_landmarks and segment_means_seq_len are both "
        f"{spec.num_landmarks}, and transformers then uses no landmarks. Time and memory grow with the square of the "
        f"length; sequences of 1 to {spec.max_seq_len} tokens work."
    ]
    if spec.conv_kernel_size is not None:
        notes.append(
            "Padding changes results although it is masked: as published, the convolution over the values is not "
            f"masked and carries padding up to {spec.conv_kernel_size // 2} tokens into a sequence."
        )
    return notes


def landmark_notes(spec: NystromformerSpec) -> list[str]:
    segment = spec.segment_means_seq_len
    reach = "" if spec.conv_kernel_size is None else ", and through the convolution over the values"
    if spec.pinv_init == "global":
        scale = (
            "As published, the start value of the pseudo-inverse is scaled by a maximum over the whole batch, so the "
            "result of a sample depends on the rest of the batch; use pinv_init per_head to make samples independent."
        )
    else:
        scale = (
            "pinv_init per_head scales the start value of the pseudo-inverse per matrix, so samples are independent "
            "of each other; transformers scales by a maximum over the whole batch, so its results differ."
        )
    return [
        f"Landmarks need exactly segment_means_seq_len = {segment} tokens. Shorter sequences are padded to {segment} "
        f"inside the graph and the outputs cropped, which equals transformers on input padded to {segment}; longer "
        "ones are refused, where transformers may mix the samples of a batch.",
        scale,
        "Padding changes results although it is masked: as published, the landmarks average over padding too, which "
        f"reaches every token{reach}. The tokens in padded places matter: pad with pad_token_id {spec.pad_token_id}.",
        "transformers cannot run this model in fp16 or bf16 (its identity matrix is float32); here the landmarks, the "
        "softmaxes and the pseudo-inverse stay float32, so lower precisions work and are judged against float32.",
        "Compared with transformers 4.57.1: version 5.23 fails on this model with any masked token.",
    ]
