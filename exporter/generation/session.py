"""One text that is being generated."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from effexport.errors import EffexportError, RuntimeFailedError
from effexport.generation.next_token import next_token
from effexport.generation.sampling import Sampling
from effexport.generation.stream_decoder import StreamDecoder

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.text.tokenizer import Tokenizer

# Why a text has ended: it has max_new_tokens, or the end-of-text token came.
FinishReason = Literal["length", "eos"]
SEED_BITS_DRAWN = 32


class Piece(NamedTuple):
    """A new token and the text that became complete with it, which may be empty. finish_reason: of the last piece."""

    token: int
    text: str
    finish_reason: FinishReason | None


class Session:
    """One text: its prompt until that is read, its sampling with random numbers of its own, and its new pieces.

    `pieces` fills as the stepper decodes; whoever reads it removes what it has read. `error` is set if the session
    failed, after which no piece follows. The session holds no earlier tokens, so its size stays the same.

    It belongs to the thread of its stepper, which alone changes it. Other threads take pieces, and ask for its end with
    `cancel`. What the stepper has ended and what others want ended are kept apart, and neither is ever taken back, so
    that no order of the threads brings an ended session back to life.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, tokenizer: Tokenizer) -> None:
        """prompt: the ids of its tokens, at least one."""
        self.prompt = tuple(prompt)
        self.sampling = sampling
        self.seed = secrets.randbits(SEED_BITS_DRAWN) if sampling.seed is None else sampling.seed
        self.pieces: deque[Piece] = deque()
        self.token = 0
        self.count = 0
        self.error: EffexportError | None = None
        self._done = False
        self._cancelled = False
        self._eos = tokenizer.eos_token_id if sampling.stop_at_eos else None
        self._generator = np.random.default_rng(self.seed)
        self._decoder = StreamDecoder(tokenizer, self.prompt)

    @property
    def ended(self) -> bool:
        return self._done or self._cancelled

    def take(self, logits: Array) -> None:
        """Choose the next token and add its piece. logits: float [vocab], of this session alone."""
        token = next_token(logits, self.sampling, self._generator)
        if token is None:
            self.fail(RuntimeFailedError(f"the logits of new token {self.count + 1} contain NaN or infinity"))
            return
        self.token = token
        if self.token == self._eos:
            self._add(self._decoder.end(), "eos")
            return
        self.count += 1
        text = self._decoder.add(self.token)
        if self.count == self.sampling.max_new_tokens:
            self._add(text + self._decoder.end(), "length")
        else:
            self._add(text, None)

    def _add(self, text: str, finish_reason: FinishReason | None) -> None:
        self.pieces.append(Piece(self.token, text, finish_reason))
        if finish_reason is not None:
            self._done = True

    def fail(self, error: EffexportError) -> None:
        self.error, self._done = error, True

    def cancel(self) -> None:
        """Ask for the end; the stepper drops the session before its next step. From any thread."""
        self._cancelled = True
