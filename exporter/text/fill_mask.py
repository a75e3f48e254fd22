"""fill-mask: the most probable tokens for each mask, as transformers' FillMaskPipeline answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from effexport.errors import UserError
from effexport.models.encoder.spec import POSITIONS, SCORES
from effexport.models.encoder.spec import TOKENS as BEST_TOKENS
from effexport.text.task import TOKENS, Prepared, Reader, best, softmax

if TYPE_CHECKING:
    from effexport.dtypes import Array

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

    def prepare(self, text: str, pair: str | None = None) -> Prepared:
        prepared = self.reader.whole(text, pair, "fill-mask")
        masks = self.masks(prepared)
        if not len(masks):
            raise UserError(
                f"the text has no {self.reader.tokenizer.mask_token}; write it where a token is to be predicted"
            )
        if self.in_graph is None:
            return prepared
        return dataclasses.replace(prepared, feeds={**prepared.feeds, POSITIONS: masks[None].astype(np.int64)})

    def masks(self, prepared: Prepared) -> Array:
        """Where the masks stand in the only row."""
        places: Array = np.flatnonzero(prepared.feeds[TOKENS][0] == self.reader.tokenizer.mask_token_id)
        return places

    def answer(self, prepared: Prepared, outputs: Mapping[str, Array]) -> Any:
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

    def proposal(self, prepared: Prepared, place: int, token: int, score: float, *, alone: bool) -> dict[str, Any]:
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
