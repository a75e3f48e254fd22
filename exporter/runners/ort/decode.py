"""A decode step in ONNX Runtime, with its state carried from token to token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import UserError
from effexport.runners.feeds import FeedLimits
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.ort.settings import OrtSettings
from effexport.runners.runner import Closeable
from effexport.spec import NEXT_PREFIX

if TYPE_CHECKING:
    from effexport.dtypes import Array


class DecodeRunner(Closeable):
    """Feeds a decode step token by token and carries its state.

        with DecodeRunner("artifacts/linear/decode_step.onnx") as decoder:
            for token in tokens:                      # int64 [batch, 1]
                logits = decoder.step({"input_ids": token})["logits"]

    Not thread-safe, because it has a state. `state` is a dictionary of float32 arrays, empty before the first token,
    when all of it is zero; copy it to fork a beam.
    """

    def __init__(self, path: str | Path, limits: FeedLimits | None = None, settings: OrtSettings | None = None) -> None:
        self._runner = OrtRunner(Path(path), settings)
        self._limits = limits or FeedLimits()
        outputs = {tensor.name for tensor in self._runner.outputs}
        self.states = tuple(t for t in self._runner.inputs if NEXT_PREFIX + t.name in outputs)
        self.state: dict[str, Array] = {}
        self.position = 0

    def reset(self) -> None:
        """Clear the state: the next token is the first."""
        self.state = {}
        self.position = 0

    def step(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """One token for each sample: `input_ids` int64 [batch, 1] or `hidden_states` [batch, 1, dim].

        Returns the model's output for these tokens. Raises UserError for feeds that do not fit.
        """
        batch = next(iter(feeds.values())).shape[0]
        state = self.state or {t.name: np.zeros((batch, *t.dims[1:]), dtype=np.float32) for t in self.states}
        complete = {**feeds, **state}
        if any(t.name == "position" for t in self._runner.inputs):
            longest = self._limits.max_seq_len
            if longest is not None and self.position >= longest:
                raise UserError(f"token {self.position + 1} is beyond the {longest} learned positions of this model")
            complete["position"] = np.full(batch, self.position, dtype=np.int64)
        results = self._runner.run(complete)
        self.state = {t.name: results.pop(NEXT_PREFIX + t.name) for t in self.states}
        self.position += 1
        return results

    def close(self) -> None:
        self._runner.close()
