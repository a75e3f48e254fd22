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
# Remedies for sequences with more tokens of a rule than a model was built for.
SHORTER = {"question-answering": "shorten the question", "multiple-choice": "shorten the choices"}
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
    global_tokens: int | None = None

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
    layer. sep_token_id: ends the question (None: no task that has one). global_tokens: the most global tokens that a
    sequence may have; the graph then has no shape that depends on values (None: any number).
    """

    DEFAULT_SEQ_LEN_LIMIT: ClassVar[int] = 4096

    attention_window: int | tuple[int, ...] = 512
    sep_token_id: int | None = None
    global_tokens: int | None = None

    def check(self) -> None:
        super().check()
        self.check_windows()
        require(
            self.global_tokens is None or self.global_tokens >= 1,
            f"global_tokens is {self.global_tokens}; expected the most global tokens of a sequence, at least 1",
        )

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
        fields |= {"global_tokens": self.global_tokens}
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

    @property
    def share_of_local(self) -> float:
        """The share of tokens that the proof does not mark. Long sequences reach a limit, unless a rule waits for those
        without any mark."""
        if self.global_tokens is None or self.task in RULES:
            return SHARE_OF_LOCAL
        return min(SHARE_OF_LOCAL, max(0, 1 - 4 * self.global_tokens / self.seq_len))

    @property
    def shapes_of_values(self) -> str:
        if self.global_tokens is not None:
            return ""
        return "any number of tokens may be global; say how many a sequence may have at most: --global-tokens N"

    def why_refused(self, feeds: Mapping[str, Any]) -> str:
        if self.global_tokens is None:
            return ""
        found = int(globals_of_feeds(self, feeds).sum(axis=-1).max())
        if found <= self.global_tokens:
            return ""
        given = int(((feeds[GLOBAL_MASK] != 0) & (feeds["attention_mask"] != 0)).sum(axis=-1).max())
        return too_many_global_tokens(found, self.global_tokens, self.task if given < found else "")

    def within_limits(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sequences with too many global tokens keep the first ones, whether an input or a rule says which."""
        if self.global_tokens is None:
            return inputs
        is_global = globals_of_feeds(self, inputs)
        rank = is_global.cumsum(axis=-1)
        first = is_global & (rank <= self.global_tokens)
        marks = inputs[GLOBAL_MASK].copy()
        is_beyond = rank[..., -1] > self.global_tokens
        marks[is_beyond] = first[is_beyond]
        return {**inputs, GLOBAL_MASK: marks}

    def inputs_of_transformers(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = load("checkpoints.longformer.with_global_tokens")(self, inputs)
        return found

    def to_dict(self) -> dict[str, Any]:
        """As of other models; a limit that was not asked for is left out."""
        values = super().to_dict()
        if self.global_tokens is None:
            del values["global_tokens"]
        return values

    def window_notes(self, options: Mapping[str, Any]) -> list[str]:
        """On lengths, and on the number of global tokens."""
        notes = []
        if self.global_tokens is not None:
            notes.append(f"A sequence may have at most {self.global_tokens} global tokens; more are refused.")
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


def globals_of_feeds(spec: BandedModelSpec, feeds: Mapping[str, Any]) -> Any:
    """The tokens that are global, boolean, in the shape of the mask: `longformer.global_tokens` of numpy arrays."""
    import numpy as np

    ids, keep = feeds["input_ids"], feeds["attention_mask"] != 0
    given = (feeds[GLOBAL_MASK] != 0) & keep
    if spec.task not in RULES:
        return given
    position = np.arange(ids.shape[-1])
    if spec.task == "sequence-classification":
        by_rule = (position == 0) & keep
    else:
        separators = np.where((ids == spec.sep_token_id) & keep, position, ids.shape[-1])
        first = separators.min(axis=-1, keepdims=True)
        of_task = position < first if spec.task == "question-answering" else position > first + 1
        by_rule = of_task & (first < ids.shape[-1]) & keep
    return given | (by_rule & ~given.any(axis=-1, keepdims=True))


def too_many_global_tokens(found: int, most: int, rule: str = "") -> str:
    """The error for a sequence with more global tokens than a model was built for. rule: the task whose rule chose
    them, "" for those of the mask."""
    because = f", because {RULES[rule]} where {GLOBAL_MASK} has none" if rule else f" in {GLOBAL_MASK}"
    remedy = SHORTER.get(rule, "mark fewer")
    return (
        f"a sequence has {found} global tokens{because}; this model was built for at most {most}: {remedy}, or build "
        "with a larger --global-tokens"
    )


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
    OPTIONS: ClassVar[tuple[str, ...]] = ("task", "seq_len", "num_labels", "global_tokens")
    NOT_READ: ClassVar[tuple[str, ...]] = ("attention_window", "sep_token_id", "pooler", "global_tokens")
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
        if self.global_tokens is not None and self.task in SEPARATED and self.sep_token_id in tokens:
            # so that questions are short enough
            tokens[self.sep_token_id] = max(SHARE_OF_SPECIAL, min(1 / 4, 1 / self.global_tokens))
        return {"input_ids": tokens, GLOBAL_MASK: {0: self.share_of_local}}

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
