"""The name and shape of the inputs that a check compared, and their text in reports."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TEXT = re.compile(r"(?P<name>.*): (?P<shape>\d+(?: × \d+)*)(?P<padded>, padded)?", re.DOTALL)


@dataclass(frozen=True)
class CaseLabel:
    """Which inputs a check compared.

    name: "export", "padded batch" and so on. shape: of the attention mask, (batch, seq), or (batch, choices, seq) for
    multiple choice; empty if the check is not about one input. padded: whether the mask hides some tokens.
    """

    name: str
    shape: tuple[int, ...] = ()
    padded: bool = False

    def __str__(self) -> str:
        """`padded batch: 3 × 300, padded`."""
        return f"{self.name}: {self.shape_text}" if self.shape else self.name

    @property
    def shape_text(self) -> str:
        """`3 × 300, padded`."""
        return " × ".join(map(str, self.shape)) + (", padded" if self.padded else "")

    @classmethod
    def from_text(cls, text: str) -> CaseLabel:
        """The inverse of `str`, for reports that are read from a file. Any other text is a name without a shape."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return cls(text)
        return cls(match["name"], tuple(map(int, match["shape"].split(" × "))), match["padded"] is not None)


ALL_CASES = CaseLabel("all cases")
