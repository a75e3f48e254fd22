"""Generate text with an artifact: many sessions, decoded together one step at a time."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from effexport.base.errors import EffexportError, RuntimeFailedError, UserError
from effexport.base.formatting import counted, listed
from effexport.models.variants import WITH_STATE
from effexport.runners.decode import DecodeRunner, Graph
from effexport.runners.runner import Closeable
from effexport.tasks.fast_tokenizer import tokenizer_from_artifact
from effexport.tasks.sampling import Sampling

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.base.dtypes import Array
    from effexport.base.spec import BuildSpec
    from effexport.tasks.task import Tokenizer


def next_token(logits: Array, sampling: Sampling, generator: np.random.Generator) -> int | None:
    """The token that follows, or None if the largest logit is NaN or infinite. logits: float [vocab].

    Greedy, the first of the largest logits. Otherwise one number u from [0, 1) is drawn, and the token is the first at
    which the sum of the probabilities softmax(logits / temperature), in the order of the ids, exceeds u. With top_k,
    only the k largest logits count; of equal ones, those with the smaller ids.
    """
    best = int(logits.argmax())  # of NaN, if there is any
    peak = float(logits[best])
    if not math.isfinite(peak):
        return None
    if sampling.temperature == 0:
        return best
    ids = None if sampling.top_k is None or sampling.top_k >= len(logits) else largest(logits, sampling.top_k)
    scores = (logits if ids is None else logits[ids]).astype(np.float64)
    # in place, because this runs between any two steps of the model
    scores -= peak
    scores /= sampling.temperature
    sums = np.cumsum(np.exp(scores, out=scores), out=scores)
    # the product may round up to the last sum
    place = min(int(sums.searchsorted(generator.random() * sums[-1], side="right")), len(sums) - 1)
    return place if ids is None else int(ids[place])


def largest(scores: Array, count: int) -> Array:
    """The ids of the `count` largest scores, ascending; of equal scores, the smaller ids. scores: float [vocab]."""
    least = np.partition(scores, -count)[-count]
    above = np.flatnonzero(scores > least)
    ties = np.flatnonzero(scores == least)[: count - len(above)]
    return np.sort(np.concatenate([above, ties]))


# What a tokenizer writes for bytes that are not UTF-8, such as the first bytes of a character.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes, so at most 3 tokens may be the beginning of one.
MOST_INCOMPLETE = 3
# So many tokens without a complete character at their end are not UTF-8; they are released with replacements.
MOST_WAITING = 16


class StreamDecoder:
    """The text of a growing list of tokens, in pieces of complete characters.

    A token may end inside a character: a byte of UTF-8, or a piece of byte-level BPE. Its text waits for the rest. And
    the text of a token may depend on those before it: the first word of a text has no space before it, later ones do.
    Tokens are therefore decoded with those of the piece before. Memory does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt)
        self._written = tokenizer.decode(self._context)
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """The text that is complete with this token; "" if the token ends inside a character."""
        self._waiting.append(token)
        text = self._tokenizer.decode([*self._context, *self._waiting])
        if not text.endswith(REPLACEMENT):
            return self._write(text, len(self._waiting))
        if len(self._waiting) < MOST_WAITING:
            return ""
        count = len(self._waiting) - MOST_INCOMPLETE
        return self._write(self._tokenizer.decode([*self._context, *self._waiting[:count]]), count)

    def end(self) -> str:
        """The rest of the text; a character that never became complete is replaced by U+FFFD."""
        return self._write(self._tokenizer.decode([*self._context, *self._waiting]), len(self._waiting))

    def _write(self, text: str, count: int) -> str:
        """The new part of the text of the context and the first `count` waiting tokens, which become the context."""
        piece = text[len(self._written) :]
        if count:
            # a special token has no text, so it cannot tell whether a space comes next
            before = [] if piece else self._context[-MOST_WAITING:]
            self._context, self._waiting = [*before, *self._waiting[:count]], self._waiting[count:]
            self._written = self._tokenizer.decode(self._context)
        return piece


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
        """True if a step would do anything, if only drop sessions that have ended."""
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


DEFAULT_SAMPLING = Sampling()


@dataclass(frozen=True)
class Generation:
    """A finished text.

    tokens: the ids of the new tokens, without one that ended the text. finish_reason: "length" after max_new_tokens,
    "eos" if the end-of-text token came. seed: gives the same text again.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    seed: int
    seconds: float


class TextGenerator(Closeable):
    """A model that continues texts. Use it as a context manager or call `close`.

        with effexport.load_generator("artifacts/linear") as generator:
            for piece in generator.stream("Once upon a time", effexport.Sampling(max_new_tokens=100, temperature=0.8)):
                print(piece, end="", flush=True)

    Streams may run at the same time, in one thread: they share the steps of the model, which do not affect each other.
    Other threads may only call `session`.
    """

    def __init__(self, decoder: DecodeRunner, tokenizer: Tokenizer, max_tokens: int) -> None:
        """decoder: of a model with logits, closed with the generator. max_tokens: of a prompt and its new tokens."""
        self.stepper = Stepper(decoder)
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens

    def __call__(
        self, prompt: str, sampling: Sampling = DEFAULT_SAMPLING, on_text: Callable[[str], object] | None = None
    ) -> Generation:
        """Generate a whole text. on_text: called with each piece of it as it arrives. Raises as `stream` does."""
        start = time.perf_counter()
        session = self.session(prompt, sampling)
        pieces = []
        for piece in self._pieces(session):
            pieces.append(piece)
            if on_text is not None and piece.text:
                on_text(piece.text)
        reason = pieces[-1].finish_reason
        assert reason is not None, "the last piece has one"
        return Generation(
            prompt=prompt,
            text="".join(piece.text for piece in pieces),
            tokens=tuple(piece.token for piece in pieces if piece.finish_reason != "eos"),
            prompt_tokens=len(session.prompt),
            finish_reason=reason,
            seed=session.seed,
            seconds=time.perf_counter() - start,
        )

    def stream(self, prompt: str, sampling: Sampling = DEFAULT_SAMPLING) -> Iterator[str]:
        """The text in pieces of whole characters, as they arrive. Closing the iterator ends the generation.

        Raises UserError for a prompt without tokens, or that is too long together with the new tokens; and
        RuntimeFailedError if the model fails or computes NaN.
        """
        session = self.session(prompt, sampling)
        return (piece.text for piece in self._pieces(session) if piece.text)

    def session(self, prompt: str, sampling: Sampling = DEFAULT_SAMPLING) -> Session:
        """A session for `stepper.add`. Raises UserError for a prompt that cannot be continued."""
        if not prompt:
            raise UserError("the prompt is empty; expected text to continue")
        ids = prompt_ids(self.tokenizer, prompt)
        if not ids:
            raise UserError("the prompt has no tokens, because the tokenizer drops all of it")
        left = self.max_tokens - len(ids)
        if left < sampling.max_new_tokens:
            remedy = f"expected max_new_tokens up to {left}" if left > 0 else "shorten the prompt"
            raise UserError(
                f"the prompt has {counted(len(ids), 'token')}, and max_new_tokens is {sampling.max_new_tokens}; this "
                f"model has positions for {self.max_tokens}: {remedy}, or build with a larger --seq-len"
            )
        return Session(ids, sampling, self.tokenizer)

    def warm_up(self) -> None:
        """Read a prompt and decode one step, so that the first text does not pay for one-time work.

        Raises what the runtime raises; then the generator is closed.
        """
        decoder, token = self.stepper.decoder, np.zeros((1, 1), dtype=np.int64)
        if self.max_tokens < 2:
            return
        try:
            if decoder.has_prefill:
                decoder.prefill({INPUT: token})
            decoder.step({INPUT: token})
            decoder.reset()
        except BaseException:
            self.close()
            raise

    def _pieces(self, session: Session) -> Iterator[Piece]:
        self.stepper.add(session)
        try:
            while True:
                while session.pieces:
                    piece = session.pieces.popleft()
                    yield piece
                    if piece.finish_reason is not None:
                        return
                if session.error is not None:
                    raise session.error
                self.stepper.step()
        finally:
            session.cancel()

    def close(self) -> None:
        self.stepper.close()


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> tuple[int, ...]:
    """The tokens of a prompt, without those that the tokenizer adds after a text, which goes on here."""
    encoding = tokenizer.encode(prompt)
    kept = [place for place, special in enumerate(encoding.special) if not special]
    return encoding.ids[: kept[-1] + 1] if kept else ()


def generator_from_artifact(artifact: Artifact, open_decoder: Callable[[Artifact], DecodeRunner]) -> TextGenerator:
    """A generator for an artifact. open_decoder: such as `decoder_from_artifact`; called if the artifact generates.

    Raises UserError for another artifact, and what `open_decoder` raises.
    """
    check_generates(artifact)
    tokenizer = tokenizer_from_artifact(artifact)
    return TextGenerator(open_decoder(artifact), tokenizer, max_tokens_of(artifact))


def max_tokens_of(artifact: Artifact) -> int:
    """The most tokens that a prompt and its new tokens may have together."""
    longest = artifact.spec.model.max_seq_len
    assert longest is not None, "an encoder has learned positions"
    return longest


def check_generates(artifact: Artifact) -> None:
    """Raises UserError for an artifact that cannot generate text."""
    why = why_not_generated(artifact.spec)
    if why:
        raise UserError(
            f"{artifact.path} cannot generate text: it {why}; causal encoders of {listed(WITH_STATE)} with a "
            "language-model head can: effexport build --variant linear --causal --lm-head"
        )


def why_not_generated(spec: BuildSpec) -> str:
    """The reason a model cannot generate text; "" if it can."""
    if spec.model.decoder is not None:
        return "reads a source first, which effexport.hf.model(…).generate takes"
    if not spec.has_decode_step:
        return "has no decode step"
    if INPUT not in spec.model.inputs:
        return "reads hidden states instead of tokens"
    if list(spec.model.outputs) != [OUTPUT]:
        return f"answers with {', '.join(spec.model.outputs)} instead of logits"
    return ""
