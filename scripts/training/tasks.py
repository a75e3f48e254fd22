"""Tasks with an answer that a script can make: duplication, and ListOps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
Batch = tuple[NDArray[np.int64], NDArray[np.int64]]  # input_ids and labels, [rows, tokens]


@dataclass(frozen=True)
class Duplication:
    """0w0w: the second half is the first once more (Kitaev et al. 2020, section 5). A causal model is asked for w in
    the second half, where it has already seen it. symbols: w is drawn from 1 to this number."""

    length: int
    symbols: int = 127

    def batch(self, rows: int, generator: np.random.Generator) -> Batch:
        half = self.length // 2
        word = generator.integers(1, self.symbols + 1, (rows, half - 1))
        begin = np.zeros((rows, 1), np.int64)
        ids = np.hstack([begin, word, begin, word])
        labels = np.full_like(ids, IGNORED)
        labels[:, half:-1] = ids[:, half + 1 :]
        # token 0 is padding in our encoders, so all symbols move up by one
        return ids + 1, np.where(labels == IGNORED, IGNORED, labels + 1)


OPERATORS = ("MAX", "MIN", "MED", "SM")
CLOSE, FIRST_OPERATOR, FIRST_DIGIT, ANSWER_HERE = 1, 2, 6, 16
LISTOPS_VOCABULARY = 17


@dataclass(frozen=True)
class ListOps:
    """Nested lists of digits, such as [MAX 2 [MIN 4 7] 1], whose value is one of ten classes (Nangia and Bowman 2018;
    long ones as in Long Range Arena). The model answers at its first token.

    length: tokens of a row, with padding (0). shortest: of an expression.
    """

    length: int
    shortest: int
    arguments: int = 10
    depth: int = 10

    def batch(self, rows: int, generator: np.random.Generator) -> Batch:
        ids = np.zeros((rows, self.length), np.int64)
        labels = np.full((rows, self.length), IGNORED)
        for row in range(rows):
            tokens, value = self.expression(generator)
            ids[row, 0] = ANSWER_HERE
            ids[row, 1 : len(tokens) + 1] = tokens
            labels[row, 0] = FIRST_DIGIT + value
        return ids, labels

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
        return [*tokens, CLOSE], value_of(operator, values)


def value_of(operator: int, values: list[int]) -> int:
    match OPERATORS[operator]:
        case "MAX":
            return max(values)
        case "MIN":
            return min(values)
        case "MED":
            return int(np.median(values))
        case _:  # the sum modulo 10
            return sum(values) % 10
