"""question-answering: the spans of a context that answer a question, as transformers' pipeline answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from effexport.errors import UserError
from effexport.text.task import Prepared, Reader, best, softmax
from effexport.text.tokenizer import Encoding

if TYPE_CHECKING:
    from effexport.dtypes import Array

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

    def prepare(self, text: str, pair: str | None = None) -> Prepared:
        """text: the question. pair: the context."""
        if pair is None:
            raise UserError("question-answering needs two texts: a question, and the context that answers it")
        return self.reader.split(text, pair, limit=self.max_window, stride=self.stride, sequence=CONTEXT)

    def answer(self, prepared: Prepared, outputs: Mapping[str, Array]) -> Any:
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
