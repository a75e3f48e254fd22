"""A decoder without a model, for tests of what steps many texts: the next token is the next letter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from effexport.base.errors import RuntimeFailedError

VOCABULARY = 258


@contextmanager
def quick_switches() -> Iterator[None]:
    """Threads take turns 500 times as often as usual, so that they meet at every place."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Alphabet:
    """It steps while `going`, and breaks after some steps. After the last token of the vocabulary comes the first.

    batches: the largest batch. prompts: tokens of prompts that were read, which come one by one.
    """

    has_prefill = False

    def __init__(self, batches: int = 3) -> None:
        self.going = threading.Event()
        self.going.set()
        self.state: dict[str, Any] = {}
        self.position = np.zeros((), dtype=np.int64)
        self.batches = batches
        self.breaks_after: int | None = None
        self.steps = 0
        self.prompts = 0
        self.closed = False

    def step(self, feeds: dict[str, Any]) -> dict[str, Any]:
        self.prompts += 1
        return self._logits(feeds["input_ids"])

    def step_unchecked(self, feeds: dict[str, Any]) -> dict[str, Any]:
        assert self.going.wait(20)
        self.steps += 1
        if self.breaks_after is not None and self.steps > self.breaks_after:
            raise RuntimeFailedError("the GPU is gone")
        tokens = feeds["input_ids"]
        assert len(self.state["s"]) == len(self.position) == len(tokens), "a row of the state for each token"
        return self._logits(tokens)

    def _logits(self, tokens: Any) -> dict[str, Any]:
        logits = np.zeros((len(tokens), 1, VOCABULARY), dtype=np.float32)
        logits[np.arange(len(tokens)), 0, (tokens[:, 0] + 1) % VOCABULARY] = 1
        self.state = {"s": np.zeros((len(tokens), 2), dtype=np.float32)}
        self.position = np.zeros(len(tokens), dtype=np.int64)
        return {"logits": logits}

    def accepts(self, graph: object, batch: int, seq_len: int) -> bool:
        return batch <= self.batches

    def reset(self) -> None:
        self.state, self.position = {}, np.zeros((), dtype=np.int64)

    def close(self) -> None:
        self.closed = True
