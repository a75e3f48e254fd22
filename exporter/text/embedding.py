"""feature-extraction: one vector for a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from effexport.errors import UserError
from effexport.models.encoder.spec import Pooling
from effexport.text.task import Prepared, Reader

if TYPE_CHECKING:
    from effexport.dtypes import Array


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

    def prepare(self, text: str, pair: str | None = None) -> Prepared:
        if not self.splits:
            return self.reader.whole(text, pair, "an embedding of this kind (--pool cls, or --normalize)")
        return self.reader.split(text, pair, limit=self.max_window, stride=self.stride)

    def answer(self, prepared: Prepared, outputs: Mapping[str, Array]) -> Any:
        """{embedding: a list of numbers, tokens: their number in the text, with those that the tokenizer adds}."""
        return {"embedding": self.vector(prepared, outputs).tolist(), "tokens": len(prepared.encoding)}

    def vector(self, prepared: Prepared, outputs: Mapping[str, Array]) -> Array:
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
