"""text-classification and token-classification: labels with scores, as transformers' pipelines answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from effexport.errors import UserError
from effexport.models.checkpoints.spec import label_names
from effexport.models.validation import SpecError
from effexport.text.task import Prepared, Reader, best, softmax

if TYPE_CHECKING:
    from effexport.dtypes import Array

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

    def prepare(self, text: str, pair: str | None = None) -> Prepared:
        return self.reader.whole(text, pair, "classification")

    def answer(self, prepared: Prepared, outputs: Mapping[str, Array]) -> Any:
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

    def prepare(self, text: str, pair: str | None = None) -> Prepared:
        return self.reader.split(text, pair, limit=self.max_window, stride=self.stride)

    def answer(self, prepared: Prepared, outputs: Mapping[str, Array]) -> Any:
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


def judged_in(prepared: Prepared) -> list[tuple[int, int]]:
    """For each token of the text, the row and column where the nearer end of the row is furthest away."""
    found: dict[int, tuple[int, int, int]] = {}
    for row, places in enumerate(prepared.places):
        for column, place in enumerate(places):
            distance = min(column, len(places) - 1 - column)
            if place not in found or distance > found[place][0]:
                found[place] = (distance, row, column)
    return [found[place][1:] for place in range(len(prepared.encoding))]
