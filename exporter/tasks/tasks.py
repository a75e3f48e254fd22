"""The tasks of transformers' pipelines, the one that an artifact answers, and a model that answers it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.models.checkpoints.spec import CONFIG, label_names
from effexport.models.encoder.spec import EMBEDDING, POSITIONS, SCORES, Head, Pooling
from effexport.models.encoder.spec import TOKENS as BEST_TOKENS
from effexport.models.validation import SpecError
from effexport.runners.runner import Closeable
from effexport.tasks.fast_tokenizer import json_of, tokenizer_from_artifact
from effexport.tasks.task import (
    DEFAULT_OPTIONS,
    TOKENS,
    Encoding,
    PreparedText,
    Reader,
    Task,
    TextOptions,
    Tokenizer,
    best,
    joined_outputs,
    reader_from_spec,
    softmax,
)

if TYPE_CHECKING:
    from effexport.base.dtypes import Array
    from effexport.base.spec import BuildSpec
    from effexport.runners.runner import Runner


# Token-classification does not list the tokens with this label.
OUTSIDE = "O"


@dataclass(frozen=True)
class Labels:
    """The classes of a checkpoint. problem_type: as in config.json, None if it names none."""

    names: tuple[str, ...]
    problem_type: str | None = None

    def scores(self, logits: Array) -> Array:
        """Scores of a text's classes: probabilities, unless the checkpoint estimates numbers."""
        wide = logits.astype(np.float64)
        if self.problem_type == "regression":
            return wide
        if self.problem_type == "multi_label_classification" or len(self.names) == 1:
            independent: Array = 1 / (1 + np.exp(-wide))
            return independent
        return softmax(wide)


def labels_from_config(config: Mapping[str, Any], count: int) -> Labels:
    """The classes that config.json names; transformers calls unnamed ones LABEL_0, LABEL_1, … Raises UserError."""
    try:
        names = label_names(config)
    except SpecError as error:
        raise UserError(str(error)) from error
    return Labels(tuple(names.get(i, f"LABEL_{i}") for i in range(count)), config.get("problem_type"))


@dataclass(frozen=True)
class TextClassification:
    """Classifies a whole text, or a pair of texts. top: how many labels, None for all."""

    name: ClassVar[str] = "text-classification"
    reader: Reader
    labels: Labels
    top: int | None = None

    def prepare(self, text: str, pair: str | None = None) -> PreparedText:
        return self.reader.whole(text, pair, "classification")

    def answer(self, prepared: PreparedText, outputs: Mapping[str, Array]) -> Any:
        """A list of {label, score}, from the highest score."""
        scores = self.labels.scores(next(iter(outputs.values()))[0])
        places = best(scores, len(scores) if self.top is None else self.top)
        return [{"label": self.labels.names[i], "score": float(scores[i])} for i in places]


@dataclass(frozen=True)
class TokenClassification:
    """Classifies every token. A token that is in two windows is judged in the one where it is further from the edge."""

    name: ClassVar[str] = "token-classification"
    reader: Reader
    labels: Labels
    stride: int
    max_window: int | None = None

    def prepare(self, text: str, pair: str | None = None) -> PreparedText:
        return self.reader.split(text, pair, limit=self.max_window, stride=self.stride)

    def answer(self, prepared: PreparedText, outputs: Mapping[str, Array]) -> Any:
        """A list of {entity, score, index, word, start, end} of all tokens whose label is not "O".

        index: the place of the token in the tokens of the whole text, with those that the tokenizer adds. start, end:
        characters.
        """
        logits = next(iter(outputs.values()))
        whole, tokenizer = prepared.encoding, self.reader.tokenizer
        entities = []
        for index, (row, column) in enumerate(judged_in(prepared)):
            scores = softmax(logits[row, column])
            label = int(scores.argmax())
            if whole.special[index] or self.labels.names[label] == OUTSIDE:
                continue
            start, end = whole.offsets[index]
            token, text = whole.ids[index], prepared.pair if whole.sequence[index] == 1 else prepared.text
            # an unknown token says nothing; the text does
            word = (text or "")[start:end] if token == tokenizer.unk_token_id else tokenizer.token(token)
            entities.append(
                {
                    "entity": self.labels.names[label],
                    "score": float(scores[label]),
                    "index": index,
                    "word": word,
                    "start": start,
                    "end": end,
                }
            )
        return entities


def judged_in(prepared: PreparedText) -> list[tuple[int, int]]:
    """For each token of the text, the row and column where the nearer end of the row is furthest away."""
    found: dict[int, tuple[int, int, int]] = {}
    for row, places in enumerate(prepared.places):
        for column, place in enumerate(places):
            distance = min(column, len(places) - 1 - column)
            if place not in found or distance > found[place][0]:
                found[place] = (distance, row, column)
    return [found[place][1:] for place in range(len(prepared.encoding))]


@dataclass(frozen=True)
class Embedding:
    """One vector for a text: the graph's own, or the mean over the kept tokens of the last hidden state.

    output: the name of the output. pooled: how the graph has pooled it, None if it has not. splits: whether windows of
    a long text can be put together: means are weighted by tokens, maxima compared; other vectors have no sum.
    """

    name: ClassVar[str] = "feature-extraction"
    reader: Reader
    output: str
    pooled: Pooling | None = None
    splits: bool = True
    stride: int = 0
    max_window: int | None = None

    def prepare(self, text: str | Sequence[int], pair: str | None = None) -> PreparedText:
        """text: or its tokens, which are one row."""
        if not isinstance(text, str):
            return self.reader.tokens(text)
        if not self.splits:
            return self.reader.whole(text, pair, "an embedding of this kind (--pool cls, or --normalize)")
        return self.reader.split(text, pair, limit=self.max_window, stride=self.stride)

    def answer(self, prepared: PreparedText, outputs: Mapping[str, Array]) -> Any:
        """{embedding: a list of numbers, tokens: their number in the text, with those that the tokenizer adds}."""
        return {"embedding": self.vector(prepared, outputs).tolist(), "tokens": len(prepared.encoding)}

    def vector(self, prepared: PreparedText, outputs: Mapping[str, Array]) -> Array:
        """The vector of a text, float32."""
        values = outputs[self.output].astype(np.float64)
        lengths = np.array([len(window) for window in prepared.windows])
        if self.pooled is None:
            values = np.stack([values[row, :length].mean(axis=0) for row, length in enumerate(lengths)])
        if self.pooled == "max":
            joined: Array = values.max(axis=0)
        else:
            joined = (values * (lengths / lengths.sum())[:, None]).sum(axis=0)
        if not np.isfinite(joined).all():
            raise UserError("the model answers this text with NaN or infinity; a higher --precision may help")
        return joined.astype(np.float32)


DEFAULT_TOP = 5


@dataclass(frozen=True)
class FillMask:
    """Predicts the tokens of all masks of a text, each by itself.

    in_graph: how many tokens the graph itself selects, at the places that its input `positions` names; None if it
    returns the logits of all tokens.
    """

    name: ClassVar[str] = "fill-mask"
    reader: Reader
    top: int = DEFAULT_TOP
    in_graph: int | None = None

    def __post_init__(self) -> None:
        if self.reader.tokenizer.mask_token_id is None:
            raise UserError("the tokenizer of this artifact has no mask token, so there is nothing to fill")
        if self.in_graph is not None and self.top > self.in_graph:
            raise UserError(
                f"top is {self.top}; this artifact returns the {self.in_graph} most probable tokens: build it with a "
                "larger --top-k, or without"
            )

    def prepare(self, text: str, pair: str | None = None) -> PreparedText:
        prepared = self.reader.whole(text, pair, "fill-mask")
        masks = self.masks(prepared)
        if not len(masks):
            raise UserError(
                f"the text has no {self.reader.tokenizer.mask_token}; write it where a token is to be predicted"
            )
        if self.in_graph is None:
            return prepared
        return dataclasses.replace(prepared, feeds={**prepared.feeds, POSITIONS: masks[None].astype(np.int64)})

    def masks(self, prepared: PreparedText) -> Array:
        """The places of the masks in the only row."""
        places: Array = np.flatnonzero(prepared.feeds[TOKENS][0] == self.reader.tokenizer.mask_token_id)
        return places

    def answer(self, prepared: PreparedText, outputs: Mapping[str, Array]) -> Any:
        """A list of {score, token, token_str, sequence}, from the most probable; a list of such lists for several
        masks, and the other masks stay in the sequences.
        """
        places = self.masks(prepared)
        answers = []
        for i, place in enumerate(places):
            if self.in_graph is None:
                shares = softmax(next(iter(outputs.values()))[0, place])
                tokens = best(shares, self.top)
                scores = shares[tokens]
            else:
                scores, tokens = outputs[SCORES][0, i, : self.top], outputs[BEST_TOKENS][0, i, : self.top]
            answers.append(
                [
                    self.proposal(prepared, int(place), int(token), float(score), alone=len(places) == 1)
                    for token, score in zip(tokens, scores, strict=True)
                ]
            )
        return answers[0] if len(answers) == 1 else answers

    def proposal(self, prepared: PreparedText, place: int, token: int, score: float, *, alone: bool) -> dict[str, Any]:
        tokenizer = self.reader.tokenizer
        ids = list(prepared.windows[0].ids)
        ids[place] = token
        filled = [number for number in ids if number != tokenizer.pad_token_id]
        return {
            "score": score,
            "token": token,
            "token_str": tokenizer.decode([token], skip_special_tokens=False),
            "sequence": tokenizer.decode(filled, skip_special_tokens=alone),
        }


# The sequence number of the context; the question comes first.
CONTEXT = 1
# What transformers' pipeline takes as the longest window.
DEFAULT_WINDOW = 384


@dataclass(frozen=True)
class QuestionAnswering:
    """Finds the answer to a question in a context, which is cut into windows.

    top: how many answers. max_window: tokens of a window with the question. stride: tokens that windows share.
    """

    name: ClassVar[str] = "question-answering"
    reader: Reader
    top: int
    max_window: int
    stride: int
    max_answer_tokens: int

    def prepare(self, text: str, pair: str | None = None) -> PreparedText:
        """text: the question. pair: the context."""
        if pair is None:
            raise UserError("question-answering needs two texts: a question, and the context that answers it")
        return self.reader.split(text, pair, limit=self.max_window, stride=self.stride, sequence=CONTEXT)

    def answer(self, prepared: PreparedText, outputs: Mapping[str, Array]) -> Any:
        """{score, start, end, answer} with characters of the context; a list of these if several are wanted.

        Equal answers of several windows or places count as one, with the sum of their scores.
        """
        assert prepared.pair is not None
        answers: dict[str, dict[str, Any]] = {}
        for row, window in enumerate(prepared.windows):
            logits = [outputs[name][row, : len(window)] for name in ("start_logits", "end_logits")]
            for first, last, score in self.spans(window, *logits):
                start, end = whole_words(window, first, last)
                text = prepared.pair[start:end]
                known = answers.setdefault(text.lower(), {"score": 0.0, "start": start, "end": end, "answer": text})
                known["score"] += score
        ranked = sorted(answers.values(), key=lambda answer: -answer["score"])[: self.top]
        return ranked[0] if len(ranked) == 1 else ranked

    def spans(self, window: Encoding, start: Array, end: Array) -> list[tuple[int, int, float]]:
        """The first and last token of the best spans of a window, and the probability of each.

        The token [CLS] stands for "no answer": it takes part in the probabilities and is not a span.
        """
        cls = self.reader.tokenizer.cls_token_id
        wanted = np.array([number == CONTEXT for number in window.sequence])
        counted = wanted | np.array([token == cls for token in window.ids]) if cls is not None else wanted
        first, last = (softmax(np.where(counted, logits.astype(np.float64), -10000.0)) for logits in (start, end))
        first[0] = last[0] = 0
        # every span that ends where it begins or later, and is not too long
        scores = np.tril(np.triu(first[:, None] * last[None, :]), self.max_answer_tokens - 1)
        # more than are wanted: several become one where they begin or end in the same words
        flat = best(scores.ravel(), 2 * self.top + 10)
        found = [(int(place // len(window)), int(place % len(window))) for place in flat]
        return [(i, j, float(scores[i, j])) for i, j in found if counted[i] and counted[j] and scores[i, j] > 0]


def whole_words(window: Encoding, first: int, last: int) -> tuple[int, int]:
    """The characters of a span of tokens, extended to whole words where the tokenizer knows words."""
    words = window.words[first], window.words[last]
    if None in words:
        return window.offsets[first][0], window.offsets[last][1]
    places = [
        [i for i, number in enumerate(window.sequence) if number == CONTEXT and window.words[i] == word]
        for word in words
    ]
    if not all(places):
        return window.offsets[first][0], window.offsets[last][1]
    return window.offsets[places[0][0]][0], window.offsets[places[1][-1]][1]


# Overlapping windows share at most this many tokens, and at most half of a window, as in transformers' pipeline.
DEFAULT_STRIDE = 128
# Tasks with different options that a server keeps of a model.
KEPT_TASKS = 16


def task_from_artifact(artifact: Artifact, options: TextOptions = DEFAULT_OPTIONS) -> Task:
    """The task that the outputs of an artifact answer. Raises UserError as `tasks_from_artifact`."""
    return tasks_from_artifact(artifact)(options)


def tasks_from_artifact(artifact: Artifact) -> Callable[[TextOptions], Task]:
    """The task that the outputs of an artifact answer, with any options.

    Raises UserError for an artifact without a tokenizer, or whose outputs answer no task; and so does the result for
    options that the artifact does not have.
    """
    spec, tokenizer, config = artifact.spec, tokenizer_from_artifact(artifact), json_of(artifact.path / CONFIG)
    task_of = functools.lru_cache(KEPT_TASKS)(functools.partial(task_from_spec, spec, tokenizer, config))
    task_of(DEFAULT_OPTIONS)
    return task_of


def task_from_spec(
    spec: BuildSpec, tokenizer: Tokenizer, config: Mapping[str, Any], options: TextOptions = DEFAULT_OPTIONS
) -> Task:
    """As `tasks_from_artifact`. config: config.json of the checkpoint, which names the labels; {} without one."""
    model = spec.model
    reader = reader_from_spec(spec, tokenizer, given_by_task=(POSITIONS,))
    inputs = {tensor.name: tensor.dims for tensor in spec.inputs}
    outputs = {tensor.name: tensor.dims for tensor in spec.outputs}
    kind = model.task
    if POSITIONS in inputs:
        return fill_mask(reader, options, outputs[SCORES][-1])
    if {"start_logits", "end_logits"} <= set(outputs):
        return question_answering(reader, options)
    if EMBEDDING in outputs:
        return pooled(reader, options, spec.head)
    name, dims = next(iter(outputs.items()))
    if kind == "lm-head" or (name == "logits" and model.is_causal):
        raise UserError(f"{model.title} continues texts: use --generate, or the endpoint generate of a server")
    if kind == "masked-lm" or (name == "logits" and dims[-1] == model.input_limits.get("input_ids")):
        return fill_mask(reader, options, None)
    if name == "logits" and kind != "multiple-choice" and isinstance(dims[-1], int):
        labels = labels_from_config(config, dims[-1])
        if len(dims) == 2:
            return TextClassification(reader, labels, options.top)
        return TokenClassification(reader, labels, overlap(options, window_of(reader, options)), options.max_window)
    if len(dims) == 3:
        return Embedding(reader, name, stride=options.stride or 0, max_window=options.max_window)
    found = ", ".join(str(tensor) for tensor in spec.outputs)
    raise UserError(f"the outputs of {model.title} answer no task for texts: {found}; use --text or --input")


def fill_mask(reader: Reader, options: TextOptions, in_graph: int | str | None) -> FillMask:
    count = in_graph if isinstance(in_graph, int) else None
    top = min(DEFAULT_TOP, count or DEFAULT_TOP) if options.top is None else options.top
    return FillMask(reader, top, count)


def question_answering(reader: Reader, options: TextOptions) -> QuestionAnswering:
    limits = (options.max_window or DEFAULT_WINDOW, reader.limit, reader.tokenizer.max_length)
    window = min(limit for limit in limits if limit is not None)
    return QuestionAnswering(reader, options.top or 1, window, overlap(options, window), options.max_answer_tokens)


def pooled(reader: Reader, options: TextOptions, head: Head) -> Embedding:
    """head: how the graph makes its vector; that of a module of the user's own is not known to be a mean."""
    splits = head.pool in ("mean", "max") and not head.normalize
    return Embedding(reader, EMBEDDING, head.pool or "cls", splits, options.stride or 0, options.max_window)


def window_of(reader: Reader, options: TextOptions) -> int | None:
    return min((limit for limit in (reader.limit, options.max_window) if limit is not None), default=None)


def overlap(options: TextOptions, window: int | None) -> int:
    if options.stride is not None:
        return options.stride
    return DEFAULT_STRIDE if window is None else min(window // 2, DEFAULT_STRIDE)


class TextModel(Closeable):
    """An open artifact that answers texts: a runner and a task. Thread-safe. Use it as a context manager, or `close`.

    batch: the most windows of a long text that run together.
    """

    def __init__(self, runner: Runner, task: Task, batch: int = 1) -> None:
        self.runner, self.task, self.batch = runner, task, batch

    def __repr__(self) -> str:
        return f"<TextModel: {self.task.name}, {self.runner!r}>"

    def __call__(self, text: str, pair: str | None = None) -> Any:
        """The answer to a text, in the form of transformers' pipeline for the task.

        pair: for question-answering, the context, with the question as the text; for others, a second text.
        Raises UserError for a text that the task or the model cannot take.
        """
        prepared = self.task.prepare(text, pair)
        return self.task.answer(prepared, self.outputs(prepared))

    def outputs(self, prepared: PreparedText) -> Mapping[str, Array]:
        """The outputs of all rows of a prepared text."""
        return joined_outputs([self.runner.run(rows) for rows in prepared.rows(self.batch)])

    def close(self) -> None:
        self.runner.close()
