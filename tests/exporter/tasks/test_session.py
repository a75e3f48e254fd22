"""A session ends once: whatever other threads ask for while its stepper works, it does not come back to life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from alphabet import Alphabet

from effexport.base.errors import RuntimeFailedError
from effexport.tasks.sampling import Sampling
from effexport.tasks.task import ByteTokenizer
from effexport.tasks.text_generator import Session, Stepper

GREEDY = Sampling(max_new_tokens=6, temperature=0)


def session_of(prompt: str, sampling: Sampling = GREEDY, tokenizer: Any = None) -> Session:
    return Session([byte + 2 for byte in prompt.encode()], sampling, tokenizer or ByteTokenizer())


def text_of(session: Session) -> str:
    return "".join(piece.text for piece in session.pieces)


@pytest.fixture
def decoder() -> Alphabet:
    return Alphabet()


@pytest.fixture
def stepper(decoder: Alphabet) -> Stepper:
    return Stepper(decoder)  # type: ignore[arg-type]


class Interrupting:
    """A tokenizer during whose work another thread cancels the session."""

    eos_token_id = None

    def __init__(self) -> None:
        self.session: Session | None = None

    def decode(self, ids: Sequence[int]) -> str:
        if self.session is not None:
            self.session.cancel()
        return ByteTokenizer().decode(ids)


@pytest.mark.parametrize("tokens_before", [0, 1, 4])
def test_a_text_cancelled_while_its_token_is_chosen_is_dropped(
    decoder: Alphabet, stepper: Stepper, tokens_before: int
) -> None:
    tokenizer, other = Interrupting(), session_of("m")
    session = session_of("a", tokenizer=tokenizer)
    stepper.add(session)
    stepper.add(other)
    for _ in range(tokens_before):
        stepper.step()
    tokenizer.session = session
    stepper.step()
    assert session.ended
    assert stepper.sessions == 1
    assert session not in stepper.step()
    while stepper.is_busy:
        stepper.step()
    assert text_of(session) == "bcdefg"[: tokens_before + 1]
    assert text_of(other) == "nopqrs"
    assert decoder.state == {}


def test_a_text_cancelled_before_its_turn_costs_nothing(decoder: Alphabet, stepper: Stepper) -> None:
    waiting, behind = session_of("a" * 600), session_of("abc")
    stepper.add(waiting)
    stepper.add(behind)
    assert stepper.is_busy
    waiting.cancel()
    behind.cancel()
    assert stepper.step() == []
    assert not stepper.is_busy
    assert decoder.prompts == 0

    # while the others are stepped, in the step in which it would have joined
    running, joining = session_of("a"), session_of("abc")
    stepper.add(running)
    stepper.step()
    stepper.add(joining)
    step = decoder.step_unchecked
    with mock.patch.object(decoder, "step_unchecked", lambda feeds: joining.cancel() or step(feeds)):
        stepper.step()
    assert decoder.prompts == 1
    assert text_of(running) == "bc"
    assert not joining.pieces


def test_an_unexpected_failure_ends_all_texts_with_an_error_and_later_ones_run(
    decoder: Alphabet, stepper: Stepper
) -> None:
    """Such as no memory for the states together: the thread that steps must outlive it."""
    running, ended, joining, waiting = session_of("a"), session_of("b"), session_of("c"), session_of("d" * 600)
    stepper.add(running)
    stepper.add(ended)
    stepper.step()
    ended.cancel()
    stepper.add(joining)
    with mock.patch.object(np, "concatenate", side_effect=MemoryError("no memory")):
        found = stepper.step()
    assert found == [running, joining]
    for session, text in ((running, "bc"), (joining, "d")):
        assert isinstance(session.error, RuntimeFailedError)
        assert str(session.error) == "the decode step failed: no memory"
        assert text_of(session) == text
    assert ended.error is None
    assert stepper.step() == []
    assert decoder.state == {}

    stepper.add(waiting)
    stepper.step()
    with mock.patch.object(stepper, "_drop_ended", side_effect=ValueError("planted")):
        assert stepper.step() == [waiting]
    assert str(waiting.error) == "the decode step failed: planted"
    later = session_of("x", Sampling(max_new_tokens=2, temperature=0))
    stepper.add(later)
    while stepper.is_busy:
        stepper.step()
    assert text_of(later) == "yz"
