"""Training tasks: text, duplication and ListOps. Each makes rows of tokens with labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from effexport.tasks.data import IGNORED, MASKED_SHARE
from effexport.tasks.task import BYTE_MASK
from scripts.training.corpus import Corpus

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]  # input_ids and labels, [rows, tokens]; token 0 is padding


class Task(Protocol):
    """length: tokens of a row."""

    @property
    def length(self) -> int: ...

    def batch(self, rows: int, generator: np.random.Generator) -> Batch:
        """Rows to train on."""

    def held_out(self, rows: int) -> Batch:
        """Rows that training does not see, always the same."""


@dataclass(frozen=True)
class Text:
    """Random windows of a text: for each token the next one, or the tokens behind masks."""

    corpus: Corpus
    length: int
    masked: bool

    def batch(self, rows: int, generator: np.random.Generator) -> Batch:
        starts = generator.integers(0, len(self.corpus.training) - self.length, (rows, 1))
        windows = self.corpus.training[starts + np.arange(self.length + 1)]
        return self.asked(windows, generator)

    def held_out(self, rows: int) -> Batch:
        starts = self.length * np.arange(rows)[:, None]
        return self.asked(self.corpus.held_out[starts + np.arange(self.length + 1)], np.random.default_rng(1))

    def asked(self, windows: NDArray[np.int64], generator: np.random.Generator) -> Batch:
        """windows: [rows, length + 1]."""
        ids = windows[:, :-1]
        if not self.masked:
            return ids, windows[:, 1:]
        chosen = generator.random(ids.shape) < MASKED_SHARE
        return np.where(chosen, BYTE_MASK, ids), np.where(chosen, ids, IGNORED)


@dataclass(frozen=True)
class Duplication:
    """0w0w: the second half is the first once more (Kitaev et al. 2020, section 5). A causal model is asked for w in
    the second half, where it has already seen it. symbols: w is drawn from 1 to this number; all move up by one."""

    length: int
    symbols: int = 127

    @property
    def vocabulary(self) -> int:
        return self.symbols + 2

    def batch(self, rows: int, generator: np.random.Generator) -> Batch:
        half = self.length // 2
        begin = np.zeros((rows, 1), np.int64)
        word = generator.integers(1, self.symbols + 1, (rows, half - 1))
        ids = np.hstack([begin, word, begin, word]) + 1
        labels = np.full_like(ids, IGNORED)
        labels[:, half:-1] = ids[:, half + 1 :]
        return ids, labels

    def held_out(self, rows: int) -> Batch:
        return self.batch(rows, np.random.default_rng([1]))


OPERATORS = ("MAX", "MIN", "MED", "SM")
CLOSE, FIRST_OPERATOR, FIRST_DIGIT, ANSWER_HERE = 1, 2, 6, 16


@dataclass(frozen=True)
class ListOps:
    """Nested lists of digits, such as [MAX 2 [MIN 4 7] 1], whose value is one of ten classes (Nangia and Bowman 2018;
    long ones as in Long Range Arena). The model answers at its first token.

    length: tokens of a row, with padding. shortest: of an expression.
    """

    length: int
    shortest: int
    arguments: int = 10
    depth: int = 10

    @property
    def vocabulary(self) -> int:
        return ANSWER_HERE + 1

    def batch(self, rows: int, generator: np.random.Generator) -> Batch:
        ids = np.zeros((rows, self.length), np.int64)
        labels = np.full((rows, self.length), IGNORED)
        ids[:, 0] = ANSWER_HERE
        for row in range(rows):
            tokens, value = self.expression(generator)
            ids[row, 1 : len(tokens) + 1] = tokens
            labels[row, 0] = FIRST_DIGIT + value
        return ids, labels

    def held_out(self, rows: int) -> Batch:
        return self.batch(rows, np.random.default_rng([1]))

    def expression(self, generator: np.random.Generator) -> tuple[list[int], int]:
        """Tokens and value, with `shortest` to length − 1 tokens."""
        while True:
            tokens, value = self.tree(generator, self.depth)
            if self.shortest <= len(tokens) < self.length:
                return tokens, value

    def tree(self, generator: np.random.Generator, depth: int) -> tuple[list[int], int]:
        if depth == 1 or (depth < self.depth and generator.random() > 0.25):
            digit = int(generator.integers(10))
            return [FIRST_DIGIT + digit], digit
        operator = int(generator.integers(len(OPERATORS)))
        tokens, values = [FIRST_OPERATOR + operator], []
        for _ in range(int(generator.integers(2, self.arguments + 1))):
            more, value = self.tree(generator, depth - 1)
            tokens += more
            values.append(value)
        return [*tokens, CLOSE], value_of(OPERATORS[operator], values)


def value_of(operator: str, values: list[int]) -> int:
    """MED is the median, rounded down; SM the sum modulo 10."""
    match operator:
        case "MAX":
            return max(values)
        case "MIN":
            return min(values)
        case "MED":
            return int(np.median(values))
        case _:
            return sum(values) % 10
