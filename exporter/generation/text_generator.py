"""Generate text with an artifact: prompt in, text out, at once or as it arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from effexport.errors import UserError
from effexport.generation.sampling import Sampling
from effexport.generation.session import FinishReason, Piece, Session
from effexport.generation.stepper import INPUT, OUTPUT, Stepper
from effexport.runners.runner import Closeable
from effexport.text.tokenizer import tokenizer_from_artifact
from effexport.units import counted

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.runners.decode import DecodeRunner
    from effexport.spec import BuildSpec
    from effexport.text.tokenizer import Tokenizer

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
    """How many tokens a prompt and its new tokens may have together."""
    longest = artifact.spec.model.max_seq_len
    assert longest is not None, "an encoder has learned positions"
    return longest


def check_generates(artifact: Artifact) -> None:
    """Raises UserError for an artifact that cannot generate text."""
    why = why_not_generated(artifact.spec)
    if why:
        raise UserError(
            f"{artifact.path} cannot generate text: it {why}; causal linear and aft-simple encoders with a "
            "language-model head can: effexport build --variant linear --causal --lm-head"
        )


def why_not_generated(spec: BuildSpec) -> str:
    """Why a model cannot generate text; "" if it can."""
    if not spec.has_decode_step:
        return "has no decode step"
    if INPUT not in spec.model.inputs:
        return "reads hidden states instead of tokens"
    if list(spec.model.outputs) != [OUTPUT]:
        return f"answers with {', '.join(spec.model.outputs)} instead of logits"
    return ""
