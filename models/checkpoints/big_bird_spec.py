"""Published BigBird checkpoints: their config.json as a frozen spec, and what users have to know about them.

No torch here. Names and semantics are those of transformers 4.57.1 (`BigBirdConfig`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from effexport.models.attention_spec import AttentionSpec, QueryKeySpec
from effexport.models.checkpoints.bert_spec import BertSpec, check_not_pruned
from effexport.models.checkpoints.spec import config_value
from effexport.models.encoder.spec import POOLED
from effexport.models.shapes import Dims, Product, Shapes, linear, norm
from effexport.models.validation import require

# Classes of transformers with more than one head, or without a pooler.
PRETRAINING = "BigBirdForPreTraining"


@dataclass(frozen=True, kw_only=True, repr=False)
class BigBirdAttentionSpec(QueryKeySpec):
    """A layer of BigBird models, not a variant of its own.

    block_size: the blocks that tokens see: their own, its neighbours, the first and the last (None: they see all
    tokens). repeats: how often the keys of the first block count for queries that are not global. full_len: sequences
    of up to this many tokens see all tokens.
    """

    variant: ClassVar[str] = "big_bird"
    layer: ClassVar[str] = "checkpoints.big_bird.BigBirdAttention"

    block_size: int | None = 64
    repeats: int = 4
    full_len: int = 704

    def operators(self, fused: bool) -> tuple[str, ...]:
        if not fused:
            return ()
        return ("MaskedAttention",) if self.block_size is None else ("BandedAttention",)

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        """Of long sequences, without the queries of the first and the last block, which see all tokens."""
        is_full = self.block_size is None or seq_len <= self.full_len
        groups, keys = batch * self.heads, seq_len if is_full else min(seq_len, 5 * (self.block_size or 0))
        yield Product(groups, seq_len, self.head_size, keys)  # Q Kᵀ
        yield Product(groups, seq_len, keys, self.head_size)  # P V

    def weights(self) -> Shapes:
        """The output projection always has a bias."""
        return super().weights() | linear("out", self.inner_dim, self.dim)


@dataclass(frozen=True, kw_only=True)
class BigBirdSpec(BertSpec):
    """A BERT-like encoder on attention of blocks; defaults are those of transformers' configuration.

    attention_type: "original_full" is softmax attention at every length. use_bias: of queries, keys and values.
    rescale_embeddings: multiply the vectors of words by √hidden_size. sep_token_id: ends the question (None: no task
    that has one). pooler: whether the checkpoint has one, which not all classes of transformers save.
    """

    family: ClassVar[str] = "big_bird"
    TASKS: ClassVar[Mapping[str, str]] = {
        "base": "BigBirdModel",
        "masked-lm": "BigBirdForMaskedLM",
        "sequence-classification": "BigBirdForSequenceClassification",
        "token-classification": "BigBirdForTokenClassification",
        "question-answering": "BigBirdForQuestionAnswering",
        "multiple-choice": "BigBirdForMultipleChoice",
    }
    OPTIONS: ClassVar[tuple[str, ...]] = ("task", "seq_len", "num_labels")
    NOT_READ: ClassVar[tuple[str, ...]] = ("sep_token_id", "pooler")

    vocab_size: int = 50358
    pad_token_id: int = 0
    sep_token_id: int | None = 66
    hidden_act: str = "gelu_new"
    max_position_embeddings: int = 4096
    layer_norm_eps: float = 1e-12
    attention_type: Literal["block_sparse", "original_full"] = "block_sparse"
    use_bias: bool = True
    rescale_embeddings: bool = False
    block_size: int = 64
    num_random_blocks: int = 3
    tie_word_embeddings: bool = True
    pooler: bool = True

    def check(self) -> None:
        super().check()
        if self.attention_type == "block_sparse":
            for name in ("block_size", "num_random_blocks"):
                require(
                    getattr(self, name) >= 1,
                    f"{name} is {getattr(self, name)}, with which transformers cannot run long sequences; expected at "
                    "least 1, or attention_type original_full",
                )
        require(
            self.task != "question-answering" or (self.sep_token_id is not None and self.type_vocab_size > 1),
            f"sep_token_id is {self.sep_token_id} and type_vocab_size {self.type_vocab_size}; the task "
            "question-answering needs a token that ends the question, and two types of tokens; correct config.json",
        )

    @property
    def full_len(self) -> int:
        """Up to this many tokens, attention is full."""
        return (5 + 2 * self.num_random_blocks) * self.block_size

    @property
    def is_full(self) -> bool:
        """True if attention is full at every length that there are positions for."""
        return self.attention_type == "original_full" or self.max_seq_len <= self.full_len

    @property
    def layer_specs(self) -> list[AttentionSpec]:
        spec = BigBirdAttentionSpec(
            dim=self.hidden_size,
            heads=self.heads,
            seq_len=self.seq_len,
            bias=self.use_bias,
            block_size=None if self.is_full else self.block_size,
            repeats=1 + self.num_random_blocks,
            full_len=self.full_len,
        )
        return [spec] * self.num_hidden_layers

    @property
    def base_prefix(self) -> str:
        return "bert"

    @property
    def head_act(self) -> str:
        return "tanh" if self.task == "multiple-choice" else self.hidden_act

    @property
    def has_pooler(self) -> bool:
        return self.task == "base" and self.pooler

    @property
    def position_rows(self) -> int:
        return self.max_position_embeddings

    @property
    def max_seq_len(self) -> int:
        """Tokens that have a position. transformers needs positions for its padding to whole blocks too, so it accepts
        fewer if this is not a multiple of `block_size`."""
        return self.max_position_embeddings

    def head_weights(self) -> Shapes:
        if self.task != "question-answering":
            return super().head_weights()
        width, inner = self.hidden_size, self.intermediate_size
        feed_forward = linear("head.up", width, inner) | linear("head.down", inner, width)
        return feed_forward | norm("head.norm", width) | linear("head.out", width, 2)

    @property
    def inputs(self) -> dict[str, Dims]:
        """For answers, the types follow from the place of the first separator."""
        inputs = super().inputs
        if self.task == "question-answering":
            del inputs["token_type_ids"]
        return inputs

    @property
    def input_limits(self) -> dict[str, int]:
        return {name: limit for name, limit in super().input_limits.items() if name in self.inputs}

    @property
    def outputs(self) -> dict[str, Dims]:
        outputs = super().outputs
        return outputs | {POOLED: ("batch", self.hidden_size)} if self.has_pooler else outputs

    @property
    def element_types(self) -> dict[str, str]:
        """Half types do not hold what keeps an answer out of the question."""
        return dict.fromkeys(self.outputs, "float32") if self.task == "question-answering" else {}

    @property
    def why_not_invariant(self) -> str:
        if self.is_full:
            return ""
        return (
            f"the last block of {self.block_size} places is global, padding included, and up to {self.full_len} places "
            "attention is full, so the padded length is part of the input"
        )

    @property
    def why_padding_counts(self) -> str:
        """The content of padding does not: it is hidden from all tokens."""
        return ""

    @classmethod
    def special_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The pooler is what the class that saved the checkpoint has."""
        require(
            not config_value(config, "is_decoder", False),
            "config.json: is_decoder is true, and in blocks, tokens see later ones in transformers; expected false",
        )
        check_not_pruned(config)
        named = config.get("architectures")
        return {
            "sep_token_id": config.get("sep_token_id", cls.sep_token_id),
            "pooler": named != [cls.TASKS["question-answering"]],
        }

    @classmethod
    def task_from_config(cls, config: Mapping[str, Any]) -> str:
        return "masked-lm" if config.get("architectures") == [PRETRAINING] else super().task_from_config(config)

    def notes_on(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
        notes = []
        if self.attention_type == "block_sparse":
            notes.append(
                f"Up to (5 + 2 · num_random_blocks) · block_size = {self.full_len} tokens attention is full, as in "
                "transformers, where a model that has met such a sequence stays full; this file decides anew each time."
            )
        if not self.is_full:
            notes += [
                "There are no random blocks: outside of training, transformers takes the first block "
                f"{self.num_random_blocks} more times instead, so its keys count {self.num_random_blocks + 1} times, "
                "except for tokens of the first and the last block.",
                f"The last {self.block_size} places, of a length that is rounded up to whole blocks, are global, "
                "whether they hold tokens or padding: the amount of padding changes results. Pad as little as can be.",
            ]
        if self.task == "question-answering":
            notes.append(
                "As in transformers, logits of the question, up to the first sep_token_id "
                f"{self.sep_token_id}, are lowered by 1e6, and tokens after it are of type 1; logits are float32."
            )
        if config.get("architectures") == [PRETRAINING] and self.task == "masked-lm":
            notes.append("The checkpoint also has a head for next sentences, which is left out.")
        if self.task == "base" and not self.pooler:
            notes.append(f"The class that saved this checkpoint has no pooler, so there is no {POOLED}.")
        return notes
