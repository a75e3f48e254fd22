"""BERT-like encoders of checkpoints, whatever their attention: fields of config.json, and shapes of weights.

No torch here. Names and semantics are those of transformers 4.57.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from effexport.models.checkpoints.spec import PublishedSpec
from effexport.models.shapes import Dims, Shapes, linear, norm, within
from effexport.models.validation import check_layers, did_you_mean, require, shown

# hidden_act in config.json → the function; transformers has several names for the same one
HIDDEN_ACTS: dict[str, str] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@dataclass(frozen=True, kw_only=True)
class BertSpec(PublishedSpec):
    """Embeddings, post-norm blocks and the head of one task. type_vocab_size is 0 for a model without segments.

    A family also defines `position_rows` and `tie_word_embeddings`: whether the decoder of masked-lm is the table of
    words.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {"heads": "num_attention_heads"}
    POSITIVE: ClassVar[tuple[str, ...]] = (
        "hidden_size",
        "num_hidden_layers",
        "heads",
        "intermediate_size",
        "max_position_embeddings",
        "type_vocab_size",
    )

    hidden_size: int = 768
    num_hidden_layers: int = 12
    heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2

    if TYPE_CHECKING:

        @property
        def tie_word_embeddings(self) -> bool:
            """A field of every family, whose place differs."""

    def check(self) -> None:
        check_layers(self.given_name("num_hidden_layers"), self.num_hidden_layers)
        require(
            self.hidden_act in HIDDEN_ACTS,
            f"{self.given_name('hidden_act')} is {shown(self.hidden_act)}{did_you_mean(self.hidden_act, HIDDEN_ACTS)} "
            f"Supported: {', '.join(HIDDEN_ACTS)}",
        )
        width, heads = self.given_name("hidden_size"), self.given_name("heads")
        require(
            self.hidden_size % self.heads == 0,
            f"{width} {self.hidden_size} cannot be split into {self.heads} heads of equal size, so transformers "
            f"cannot run this checkpoint either; correct {width} or {heads} in config.json",
        )

    @property
    def position_rows(self) -> int:
        """Rows of the table of positions."""
        raise NotImplementedError

    @property
    def base_prefix(self) -> str:
        """Models with a head save the encoder under this name."""
        return self.family

    @property
    def has_pooler(self) -> bool:
        """True if the head also returns a vector for each sequence, that of its first token."""
        return False

    @property
    def head_act(self) -> str:
        """The activation in the head of the task."""
        return self.hidden_act

    @property
    def output_width(self) -> int:
        return self.hidden_size

    def weights(self) -> Shapes:
        width = self.hidden_size
        shapes: Shapes = {
            "embeddings.word.weight": (self.vocab_size, width),
            "embeddings.position.weight": (self.position_rows, width),
            **norm("embeddings.norm", width),
        }
        if self.type_vocab_size:
            shapes["embeddings.token_type.weight"] = (self.type_vocab_size, width)
        block = {
            **norm("attention_norm", width),
            **linear("up", width, self.intermediate_size),
            **linear("down", self.intermediate_size, width),
            **norm("feed_forward_norm", width),
        }
        attention = self.attention.weights()
        for layer in range(self.num_hidden_layers):
            shapes |= within(f"blocks.{layer}", within("attention", attention) | block)
        return shapes | self.head_weights()

    def head_weights(self) -> Shapes:
        """Those of the head; of a tied decoder, without its table."""
        width = self.hidden_size
        if self.task == "masked-lm":
            shapes = linear("head.dense", width, width) | norm("head.norm", width)
            shapes |= linear("head.decoder", width, self.vocab_size)
            if self.tie_word_embeddings:
                del shapes["head.decoder.weight"]
            return shapes
        if self.task in ("sequence-classification", "multiple-choice"):
            labels = self.num_labels if self.task == "sequence-classification" else 1
            return linear("head.dense", width, width) | linear("head.out", width, labels)
        if self.task == "token-classification":
            return linear("head", width, self.num_labels)
        if self.task == "question-answering":
            return linear("head.out", width, 2)
        return linear("head.dense", width, width) if self.has_pooler else {}

    @property
    def inputs(self) -> dict[str, Dims]:
        dims = ("batch", "choices", "seq") if self.task == "multiple-choice" else ("batch", "seq")
        return {"input_ids": dims, "attention_mask": dims, "token_type_ids": dims}

    @property
    def input_limits(self) -> dict[str, int]:
        return {"input_ids": self.vocab_size, "token_type_ids": self.type_vocab_size}


def check_not_pruned(config: Mapping[str, Any]) -> None:
    """Raise SpecError for a config.json that removes heads."""
    pruned = config.get("pruned_heads")
    require(
        not pruned,
        f"config.json: pruned_heads is {shown(pruned)}, so layers differ in width; expected none; "
        "export the checkpoint from before the pruning",
    )
