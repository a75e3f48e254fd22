"""Many sessions, decoded together one step at a time; they join and leave between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import EffexportError, RuntimeFailedError
from effexport.generation.session import Session
from effexport.runners.decode import DecodeRunner, Graph
from effexport.runners.runner import Closeable

if TYPE_CHECKING:
    from effexport.dtypes import Array

# Prompts are read in one step until they have so many tokens together, so that new sessions do not stop the others.
PROMPT_TOKENS_PER_STEP = 512
INPUT, OUTPUT = "input_ids", "logits"


class Stepper(Closeable):
    """Continuous batching of one decoder: row i of its state belongs to session i, and a step feeds one token of each.

    A prompt is read by itself, whatever else runs, so that the state of a session is the one it would have alone. A
    session costs one row of the state, of constant size. Rows are computed independently of each other, so no session
    sees another's tokens, and one with NaN fails alone. Not thread-safe; only `Session.cancel` may be called by
    others.
    """

    def __init__(self, decoder: DecodeRunner) -> None:
        """decoder: of a model with logits. It belongs to the stepper, which closes it."""
        self.decoder = decoder
        self._rows: list[Session] = []
        self._joining: deque[Session] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a step would do anything, if only drop sessions that have ended."""
        return bool(self._rows or self._joining)

    @property
    def sessions(self) -> int:
        """Sessions that have not ended."""
        return sum(not session.ended for session in (*self._rows, *self._joining))

    def add(self, session: Session) -> None:
        """Let a session join at one of the next steps."""
        self._joining.append(session)

    def step(self) -> list[Session]:
        """Decode one token of each session, and read the prompts of new ones, of which some may have to wait for the
        next step. Returns the sessions that have something new: a piece or an error.

        Failures of the runtime end the sessions concerned, with their `error`; any other failure ends all of them.
        """
        joined = self._next_to_join()
        try:
            self._drop_ended()
            stepped = list(self._rows)
            if stepped:
                tokens = np.array([[session.token] for session in stepped], dtype=np.int64)
                take_all(stepped, lambda: self.decoder.step_unchecked({INPUT: tokens})[OUTPUT][:, 0])
            if joined:
                self._join(joined)
        except Exception as error:  # such as no memory for all states together; the thread of the stepper goes on
            stepped = list(self._rows)
            fail_all((*stepped, *joined), error)
        return stepped + joined

    def _next_to_join(self) -> list[Session]:
        joined, read = [], 0
        while self._joining and read < PROMPT_TOKENS_PER_STEP:
            session = self._joining.popleft()
            if not session.ended:
                joined.append(session)
                read += len(session.prompt)
        return joined

    def _join(self, joined: list[Session]) -> None:
        """Read prompts, and add their states to that of the others."""
        parts = [(self.decoder.state, self.decoder.position)] if self._rows else []
        rows = list(self._rows)
        for session in joined:
            if session.ended:  # cancelled during this step
                continue
            self.decoder.reset()
            take_all([session], lambda session=session: self._last_logits(session.prompt))  # type: ignore[misc]
            if not session.ended:
                parts.append((self.decoder.state, self.decoder.position))
                rows.append(session)
        self.decoder.reset()
        if parts:
            names = parts[0][0]
            self.decoder.state = {name: np.concatenate([state[name] for state, _ in parts]) for name in names}
            self.decoder.position = np.concatenate([position for _, position in parts])
        self._rows = rows

    def _last_logits(self, prompt: tuple[int, ...]) -> Array:
        """The logits after the last token of a prompt, [1, vocab]."""
        tokens = np.array([prompt], dtype=np.int64)
        if self.decoder.has_prefill and self.decoder.accepts(Graph.PREFILL, 1, len(prompt)):
            return self.decoder.prefill({INPUT: tokens})[OUTPUT][:, -1]
        for column in range(len(prompt)):
            logits = self.decoder.step({INPUT: tokens[:, column : column + 1]})[OUTPUT]
        return logits[:, -1]

    def _drop_ended(self) -> None:
        kept = [row for row, session in enumerate(self._rows) if not session.ended]
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[row] for row in kept]
        if kept:
            position = self.decoder.position[kept]
            self.decoder.state = {name: rows[kept] for name, rows in self.decoder.state.items()}
            self.decoder.position = position
        else:
            self.decoder.reset()

    def close(self) -> None:
        self.decoder.close()


def take_all(sessions: list[Session], run: Callable[[], Array]) -> None:
    """Give each session its row of the logits that `run` returns, [sessions, vocab], or its error."""
    try:
        logits = run().astype(np.float32, copy=False)
    except Exception as error:
        fail_all(sessions, error)
        return
    for session, row in zip(sessions, logits, strict=True):
        session.take(row)


def fail_all(sessions: Iterable[Session], error: Exception) -> None:
    """End the sessions that have not ended yet with an error."""
    failure = error if isinstance(error, EffexportError) else RuntimeFailedError(f"the decode step failed: {error}")
    for session in sessions:
        if not session.ended:
            session.fail(failure)
