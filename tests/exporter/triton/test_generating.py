"""Requests that generate text at the same time get what each would get alone, and leave when their client does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import effexport
from effexport.artifact import Artifact
from effexport.base.errors import EffexportError, UserError
from effexport.serving.engine.errors import ClientGoneError
from effexport.serving.engine.signature import generation_request
from effexport.serving.triton.instance import GenerationInstance, read_request, triton_code
from effexport.tasks.sampling import Sampling
from effexport.tasks.text_generator import TextGenerator

Built = Callable[..., Artifact]
SECONDS = 30
needs_a_model = pytest.mark.requires("torch", "onnx", "ort", "native")


class KeptReply:
    """Keeps what is sent. gone: the client has gone, as the server knows. broken: it has gone, and sending fails."""

    def __init__(self, *, gone: bool = False, broken: bool = False) -> None:
        self.gone, self.broken = gone, broken
        self.parts: list[tuple[str, str | None]] = []
        self.error: EffexportError | None = None
        self.cancelled = False
        self.done = threading.Event()

    def send(self, answer: Mapping[str, Any]) -> None:
        if self.broken:
            self.done.set()
            raise OSError("planted: the connection is closed")
        assert not self.done.is_set(), "nothing may follow the last part"
        self.parts.append((answer["text_output"], answer.get("finish_reason")))
        if "finish_reason" in answer:
            self.done.set()

    def fail(self, error: EffexportError | ClientGoneError) -> None:
        if isinstance(error, ClientGoneError):
            self.cancelled = True
        else:
            self.error = error
        self.done.set()

    def check_client(self, session: Any) -> None:
        if self.gone:
            raise ClientGoneError

    @property
    def text(self) -> str:
        assert self.done.wait(SECONDS), "no answer"
        assert self.error is None, self.error
        return "".join(text for text, _ in self.parts)


@pytest.fixture
def generator(built: Built) -> Iterator[TextGenerator]:
    with effexport.load_generator(built("linear", causal=True, lm_head=True).path) as generator:
        yield generator


@pytest.fixture
def loop(generator: TextGenerator) -> Iterator[GenerationInstance]:
    with GenerationInstance(generator, 8) as loop:
        yield loop


def sampling_of(i: int) -> Sampling:
    return Sampling(max_new_tokens=10 + 2 * i, temperature=0.9 if i % 3 else 0.0, top_k=20, seed=i)


@needs_a_model
def test_texts_that_grow_together_are_what_each_is_alone(loop: GenerationInstance, built: Built) -> None:
    replies = [KeptReply() for _ in range(16)]
    for i, reply in enumerate(replies):
        loop.begin(f"prompt {i}", sampling_of(i), i % 2 == 0, reply)
    texts = [reply.text for reply in replies]
    with effexport.load_generator(built("linear", causal=True, lm_head=True).path) as alone:
        assert texts == [alone(f"prompt {i}", sampling_of(i)).text for i in range(16)]
    for i, reply in enumerate(replies):
        assert [reason for _, reason in reply.parts] == [None] * (len(reply.parts) - 1) + ["length"]
        assert i % 2 == 0 or len(reply.parts) == 1


@needs_a_model
def test_a_client_that_has_gone_costs_no_more_steps_and_the_others_go_on(
    loop: GenerationInstance, generator: TextGenerator
) -> None:
    gone, broken, there = KeptReply(gone=True), KeptReply(broken=True), KeptReply()
    sampling = Sampling(max_new_tokens=50, seed=1)
    for reply in (gone, broken, there):
        loop.begin("a", sampling, True, reply)
    assert there.text
    assert gone.cancelled
    assert gone.parts == []
    last = KeptReply()
    loop.begin("a", Sampling(max_new_tokens=1), False, last)
    assert last.text is not None
    assert generator.stepper.sessions == 0


@needs_a_model
def test_requests_beyond_the_limit_wait_and_beyond_the_queue_are_refused(generator: TextGenerator) -> None:
    step, proceed = generator.stepper.step, threading.Event()

    def held() -> Any:
        assert proceed.wait(SECONDS)
        assert generator.stepper.sessions <= 1
        return step()

    generator.stepper.step = held  # type: ignore[method-assign]
    with GenerationInstance(generator, 1, 2) as loop:
        replies = [KeptReply() for _ in range(6)]
        for reply in replies:
            loop.begin("a", Sampling(max_new_tokens=3, seed=5), False, reply)
        # one runs and two wait
        assert all(reply.done.wait(SECONDS) for reply in replies[3:])
        proceed.set()
        assert len({reply.text for reply in replies[:3]}) == 1
        assert {triton_code(reply.error) for reply in replies[3:] if reply.error} == {"UNAVAILABLE"}


@needs_a_model
def test_an_unexpected_failure_is_the_answer_of_its_requests_only(
    loop: GenerationInstance, generator: TextGenerator
) -> None:
    drop = generator.stepper._drop_ended

    def failing() -> None:
        generator.stepper._drop_ended = drop  # type: ignore[method-assign]
        raise ValueError("planted")

    generator.stepper._drop_ended = failing  # type: ignore[method-assign]
    failed, good = KeptReply(), KeptReply()
    loop.begin("a", Sampling(max_new_tokens=9), True, failed)
    assert failed.done.wait(SECONDS)
    assert str(failed.error) == "the decode step failed: planted"
    assert triton_code(failed.error) == "INTERNAL"  # type: ignore[arg-type]
    loop.begin("a", Sampling(max_new_tokens=4), True, good)
    assert good.text


@needs_a_model
def test_a_text_that_cannot_even_begin_is_answered(
    loop: GenerationInstance, generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(generator, "session", failing)
    reply = KeptReply()
    loop.begin("a", Sampling(max_new_tokens=4), True, reply)
    assert reply.done.wait(SECONDS)
    assert str(reply.error) == "planted"
    assert triton_code(reply.error) == "INTERNAL"  # type: ignore[arg-type]


def test_options_are_inputs_or_parameters() -> None:
    inputs = {
        "text_input": np.array(["Größe".encode()], dtype=object),
        "temperature": np.array([0.7], np.float32),
        "max_new_tokens": np.array([5], np.int32),
        "stream": np.array([True]),
    }
    # the temperature that was written, not the nearest float32
    sampling = Sampling(max_new_tokens=5, temperature=0.7, top_k=4, seed=3)
    assert read_request(inputs, {"seed": 3, "top_k": 4}) == ("Größe", sampling, True)
    other = read_request({"text_input": inputs["text_input"]}, {"max_tokens": 9, "temperature": 0})
    assert other == ("Größe", Sampling(max_new_tokens=9, temperature=0), None)
    with pytest.raises(UserError, match="max_new_tokens is given twice"):
        read_request(inputs, {"max_tokens": 9})


@pytest.mark.parametrize(
    ("prompt", "parameters", "message"),
    [
        (b"a", {"max_token": 3}, "unknown parameter 'max_token'; did you mean 'max_tokens'?"),
        (b"a", {"stream": 1}, "stream is 1; expected true or false"),
        (b"a", {"top_k": 0}, "top_k is 0"),
        (b"\xff", {}, "text_input is not UTF-8"),
        (None, {}, "text_input is missing"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompt: bytes | None, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        generation_request(prompt, parameters.items())
    assert triton_code(raised.value) == "INVALID_ARG"
