"""Published Longformer checkpoints: their config.json as a frozen spec, and what users have to know about them.

No torch here. Names and semantics are those of transformers 4.57.1 (`LongformerConfig`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from effexport.models.attention_spec import QueryKeySpec
from effexport.models.checkpoints.bert_spec import BertSpec, check_not_pruned
from effexport.models.checkpoints.spec import config_value
from effexport.models.contract import GLOBAL_MASK, load
from effexport.models.encoder.spec import POOLED
from effexport.models.shapes import Dims, Product, Shapes, linear
from effexport.models.validation import as_written, check_size, nearest_multiples, require, shown

# The tokens that are global in each task, for input that says nothing of them; no others have any.
RULES: dict[str, str] = {
    "sequence-classification": "the first token is",
    "question-answering": "the tokens before the first separator are",
    "multiple-choice": "the tokens behind the first two separators of each choice are",
}
GLOBAL_PROJECTIONS = ("query_global", "key_global", "value_global")
SEPARATED = ("question-answering", "multiple-choice")
# Of the tokens in the proof, those that the model treats otherwise; of those that may be global, those that are not.
SHARE_OF_SPECIAL, SHARE_OF_LOCAL = 1 / 32, 0.995


@dataclass(frozen=True, kw_only=True, repr=False)
class BandedSpec(QueryKeySpec):
    """A layer of Longformer models, not a variant of its own: each token sees `reach` tokens on each side, and global
    tokens, which see all by projections of their own."""

    variant: ClassVar[str] = "longformer"
    layer: ClassVar[str] = "checkpoints.longformer.BandedAttentionLayer"
    formula: ClassVar[str] = "softmax(QKᵀ/√d + band) V"
    cost: ClassVar[str] = "n·s·d"
    is_length_free: ClassVar[bool] = True
    why_not_causal: ClassVar[str] = "transformers has none of Longformer's"

    reach: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.reach >= 0, f"reach is {self.reach}; expected 0 or more")

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("BandedAttention",) if fused else ()

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        """Without global tokens, whose number belongs to the input."""
        groups, keys = batch * self.heads, min(seq_len, 2 * self.reach + 1)
        yield Product(groups, seq_len, self.head_size, keys)  # Q Kᵀ
        yield Product(groups, seq_len, keys, self.head_size)  # P V

    def largest_intermediate(self, batch: int, seq_len: int) -> int:
        return batch * self.heads * seq_len * min(seq_len, 2 * self.reach + 1)

    def weights(self) -> Shapes:
        shapes = super().weights()
        for name in GLOBAL_PROJECTIONS:
            shapes |= linear(name, self.dim, self.inner_dim, bias=self.bias)
        return shapes


@dataclass(frozen=True, kw_only=True)
class BandedModelSpec(BertSpec):
    """A BERT-like encoder on banded attention.

    attention_window: tokens that each token sees beside itself, half of them on each side; one number, or one for each
    layer. sep_token_id: ends the question (None: no task that has one).
    """

    DEFAULT_SEQ_LEN_LIMIT: ClassVar[int] = 4096

    attention_window: int | tuple[int, ...] = 512
    sep_token_id: int | None = None

    def check(self) -> None:
        super().check()
        self.check_windows()

    def check_windows(self) -> None:
        window, layers = self.attention_window, self.num_hidden_layers
        given = shown(as_written(window))
        windows = window if isinstance(window, tuple) else (window,)
        require(
            windows != () and all(type(one) is int for one in windows),
            f"attention_window is {given}; expected an even number, or a list of one for each layer",
        )
        require(
            not isinstance(window, tuple) or len(window) == layers,
            f"attention_window is a list of {len(windows)}; expected {layers}, one for each layer; correct config.json",
        )
        for one in windows:
            require(one >= 1, f"attention_window is {given}; expected positive even numbers; correct config.json")
            check_size("attention_window", one)
            require(
                one % 2 == 0,
                f"attention_window is {given}; half of it lies on each side of a token, so it must be even; the "
                f"nearest that work: {nearest_multiples(one, 2)}",
            )

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer."""
        window = self.attention_window
        return window if isinstance(window, tuple) else (window,) * self.num_hidden_layers

    @property
    def layer_specs(self) -> list[BandedSpec]:  # type: ignore[override]
        """A band that is wider than any sequence is cut, so that nothing is padded to it."""
        longest = max(1, self.max_seq_len)
        fields: dict[str, Any] = {"dim": self.hidden_size, "heads": self.heads, "seq_len": self.seq_len}
        specs = {window: BandedSpec(**fields, reach=min(window // 2, longest - 1)) for window in set(self.windows)}
        return [specs[window] for window in self.windows]

    @property
    def input_limits(self) -> dict[str, int]:
        limits = {**super().input_limits, GLOBAL_MASK: 2}
        return {name: limits[name] for name in self.inputs if name in limits}

    @property
    def why_not_invariant(self) -> str:
        """Padding is hidden from all tokens, and no sample sees another."""
        return ""

    def inputs_of_transformers(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = load("checkpoints.longformer.with_global_tokens")(self, inputs)
        return found

    def window_notes(self, options: Mapping[str, Any]) -> list[str]:
        """On lengths."""
        notes = []
        if any(max(self.windows) % window for window in self.windows):
            notes.append(
                f"attention_window is {as_written(self.attention_window)}: transformers pads to a multiple of "
                f"{max(self.windows)}, and fails where that is no multiple of the others; here, every length works."
            )
        if "seq_len" not in options and self.seq_len < self.max_seq_len:
            notes.append(
                f"seq_len is {self.seq_len}, the default limit; there are positions for {self.max_seq_len} tokens: "
                "choose seq_len near the length in use."
            )
        return notes


def window_of(config: Mapping[str, Any]) -> Any:
    """The attention_window of a config.json, with a tuple in the place of a list."""
    window = config.get("attention_window", BandedModelSpec.attention_window)
    return tuple(window) if isinstance(window, list) else window


@dataclass(frozen=True, kw_only=True)
class LongformerSpec(BandedModelSpec):
    """Longformer; defaults are those of transformers' configuration.

    pooler: whether the checkpoint has one, which not all classes of transformers save.
    """

    family: ClassVar[str] = "longformer"
    TASKS: ClassVar[Mapping[str, str]] = {
        "base": "LongformerModel",
        "masked-lm": "LongformerForMaskedLM",
        "sequence-classification": "LongformerForSequenceClassification",
        "token-classification": "LongformerForTokenClassification",
        "question-answering": "LongformerForQuestionAnswering",
        "multiple-choice": "LongformerForMultipleChoice",
    }
    OPTIONS: ClassVar[tuple[str, ...]] = ("task", "seq_len", "num_labels")
    NOT_READ: ClassVar[tuple[str, ...]] = ("attention_window", "sep_token_id", "pooler")
    UNNAMED_TASK: ClassVar[str | None] = "base"

    vocab_size: int = 30522
    pad_token_id: int = 1
    sep_token_id: int | None = 2
    layer_norm_eps: float = 1e-12
    tie_word_embeddings: bool = True
    pooler: bool = True

    def check(self) -> None:
        super().check()
        require(
            self.max_seq_len >= 1,
            f"max_position_embeddings is {self.max_position_embeddings}, and positions begin at pad_token_id + 1 = "
            f"{self.pad_token_id + 1}, so no token has one; correct config.json",
        )
        require(
            self.task not in SEPARATED or self.sep_token_id is not None,
            f"sep_token_id is null; the task {self.task} needs it, because {RULES.get(self.task)} global; correct "
            "config.json",
        )
        require(
            self.task != "question-answering" or self.num_labels == 2,
            f"num_labels is {self.num_labels}; the task question-answering has 2: the start and the end",
        )

    @property
    def head_act(self) -> str:
        return "gelu" if self.task == "masked-lm" else "tanh"

    @property
    def position_rows(self) -> int:
        return self.max_position_embeddings

    @property
    def max_seq_len(self) -> int:
        """Positions count from pad_token_id + 1, and the row of pad_token_id is that of padding."""
        return self.max_position_embeddings - self.pad_token_id - 1

    @property
    def inputs(self) -> dict[str, Dims]:
        """A model that knows one kind of segment does not ask for it."""
        dims = super().inputs
        segments = {"token_type_ids": dims["input_ids"]} if self.type_vocab_size > 1 else {}
        return {**{name: dims[name] for name in ("input_ids", "attention_mask")}, GLOBAL_MASK: dims["input_ids"]} | (
            segments
        )

    @property
    def drawn_shares(self) -> dict[str, dict[int, float]]:
        special = {self.pad_token_id, *([] if self.sep_token_id is None else [self.sep_token_id])}
        tokens = {token: SHARE_OF_SPECIAL for token in sorted(special) if 0 <= token < self.vocab_size}
        return {"input_ids": tokens, GLOBAL_MASK: {0: SHARE_OF_LOCAL}}

    @property
    def outputs(self) -> dict[str, Dims]:
        outputs = super().outputs
        return outputs | {POOLED: ("batch", self.hidden_size)} if self.has_pooler else outputs

    @property
    def has_pooler(self) -> bool:
        return self.task == "base" and self.pooler

    @classmethod
    def special_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The pooler is what the class that saved the checkpoint has."""
        require(
            not config_value(config, "is_decoder", False),
            "config.json: is_decoder is true, with which transformers hides all tokens but the first; expected false",
        )
        check_not_pruned(config)
        named = config.get("architectures")
        saved = named[0] if isinstance(named, list) and named else cls.TASKS["base"]
        return {
            "attention_window": window_of(config),
            "sep_token_id": config.get("sep_token_id", cls.sep_token_id),
            "pooler": saved in (cls.TASKS["base"], cls.TASKS["multiple-choice"]),
        }

    def notes_on(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
        rule = RULES.get(self.task)
        given = f"Tokens are global where {GLOBAL_MASK} is 1"
        notes = [
            f"{given}; where a sequence has none, {rule}, as in transformers without this input."
            if rule
            else f"{given}; without this input, none are."
        ]
        if self.task in SEPARATED:
            notes.append(
                "transformers takes sequences with exactly three separators only; here, the first one counts, and a "
                "sequence without one has no global tokens."
            )
        notes.append(
            f"Positions count the tokens that are not pad_token_id {self.pad_token_id}, wherever padding is, as in "
            "transformers."
        )
        notes += self.window_notes(options)
        if self.task == "base" and not self.pooler:
            notes.append(f"The class that saved this checkpoint has no pooler, so there is no {POOLED}.")
        return notes
