"""The thread that steps many texts together, with a decoder that a test holds back, breaks or slows down."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from effexport.errors import RuntimeFailedError
from effexport.generation.sampling import Sampling
from effexport.generation.text_generator import TextGenerator
from effexport.serving.protocol.errors import QUEUE_FULL, STOPPING, WAITED_TOO_LONG, ClientGoneError, RequestError
from effexport.serving.protocol.generate_request import generate_request
from effexport.serving.server.generate_endpoints import EventStream, Text
from effexport.serving.server.generations import Generations
from effexport.serving.server.metrics import Metrics
from effexport.serving.settings import ServingSettings
from effexport.text.tokenizer import ByteTokenizer

LETTER = 97 + 2
COUNTING = Sampling(max_new_tokens=6, temperature=0)


class Alphabet:
    """A decoder whose next token is the next letter. It steps while `going`, and breaks after some steps."""

    has_prefill = False

    def __init__(self) -> None:
        self.going = threading.Event()
        self.going.set()
        self.state: dict[str, Any] = {}
        self.position = np.zeros((), dtype=np.int64)
        self.breaks_after: int | None = None
        self.steps = 0
        self.closed = False

    def step(self, feeds: dict[str, Any]) -> dict[str, Any]:
        tokens = feeds["input_ids"]
        logits = np.zeros((len(tokens), 1, 258), dtype=np.float32)
        logits[np.arange(len(tokens)), 0, tokens[:, 0] + 1] = 1
        self.state = {"s": np.zeros((len(tokens), 2), dtype=np.float32)}
        self.position = np.zeros(len(tokens), dtype=np.int64)
        return {"logits": logits}

    def step_unchecked(self, feeds: dict[str, Any]) -> dict[str, Any]:
        assert self.going.wait(20)
        self.steps += 1
        if self.breaks_after is not None and self.steps > self.breaks_after:
            raise RuntimeFailedError("the GPU is gone")
        return self.step(feeds)

    def accepts(self, graph: object, batch: int, seq_len: int) -> bool:
        return batch <= 3

    def reset(self) -> None:
        self.state, self.position = {}, np.zeros((), dtype=np.int64)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def decoder() -> Alphabet:
    return Alphabet()


@pytest.fixture
def made(decoder: Alphabet) -> Iterator[Callable[..., Generations]]:
    """(**settings) → Generations of this decoder."""
    opened = []

    def make(**settings: Any) -> Generations:
        generator = TextGenerator(decoder, ByteTokenizer(), 1000)  # type: ignore[arg-type]
        opened.append(Generations(generator, ServingSettings(**settings), Metrics("letters")))
        return opened[-1]

    yield make
    decoder.going.set()
    for generations in opened:
        generations.close()
    assert decoder.closed


async def text_of(generations: Generations, prompt: str, sampling: Sampling = COUNTING) -> str:
    stream = await generations.submit(prompt, sampling)
    pieces = await stream.pieces()
    while pieces[-1].finish_reason is None:
        pieces += await stream.pieces()
    stream.close()
    return "".join(piece.text for piece in pieces)


def test_more_texts_than_the_engine_takes_at_once_are_refused_until_one_ends_or_its_client_goes(
    decoder: Alphabet, made: Callable[..., Generations]
) -> None:
    generations = made(max_sessions=64)
    assert generations.most == 3, "the decoder takes batches of 3"

    async def check() -> None:
        decoder.going.clear()
        streams = [await generations.submit(prompt, COUNTING) for prompt in "adg"]
        for _ in range(2):
            with pytest.raises(RequestError, match="3 texts are being generated") as error:
                await generations.submit("x", COUNTING)
            assert error.value.kind is QUEUE_FULL
        streams[1].close()
        fourth = asyncio.create_task(text_of(generations, "m"))
        await asyncio.sleep(0.05)
        decoder.going.set()
        assert await fourth == "nopqrs"
        for stream, expected in ((streams[0], "bcdefg"), (streams[2], "hijklm")):
            pieces = []
            while not pieces or pieces[-1].finish_reason is None:
                pieces += await stream.pieces()
            assert "".join(piece.text for piece in pieces) == expected
            stream.close()

    asyncio.run(check())


def test_a_text_without_a_token_in_time_is_refused_and_dropped(
    decoder: Alphabet, made: Callable[..., Generations]
) -> None:
    generations = made(timeout_s=0.05)

    async def check() -> None:
        decoder.going.clear()
        stream = await generations.submit("a", COUNTING)
        assert (await stream.pieces())[0].text == "b", "that of the prompt"
        with pytest.raises(RequestError, match=r"no token came within 0\.05 s") as error:
            await stream.pieces()
        assert error.value.kind is WAITED_TOO_LONG
        stream.close()
        decoder.going.set()

    asyncio.run(check())


def test_accepted_texts_are_finished_before_the_thread_stops_and_later_ones_are_refused(
    decoder: Alphabet, made: Callable[..., Generations]
) -> None:
    generations = made()

    async def check() -> None:
        decoder.going.clear()
        texts = [asyncio.create_task(text_of(generations, prompt)) for prompt in "ab"]
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(asyncio.to_thread(generations.close))
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError, match="the server is stopping") as error:
            await generations.submit("c", COUNTING)
        assert error.value.kind is STOPPING
        decoder.going.set()
        assert await asyncio.gather(*texts) == ["bcdefg", "cdefgh"]
        await closing

    asyncio.run(check())
    assert not generations.is_alive


class Model:
    name, version = "letters", "1"


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, as a client reads them: lines `data: …`, each before an empty line."""
    *lines, last = body.decode().split("\n\n")
    assert last == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def sent(stream: Any) -> list[dict[str, Any]]:
    """The messages of a response."""
    messages = []

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    request = generate_request(b'{"text_input": "a"}', streaming=True)
    text = Text(Model(), request, stream)  # type: ignore[arg-type]
    with ExitStack() as stack:
        stack.callback(stream.close)
        response = EventStream(text, await stream.pieces(), stack.pop_all())
    await response({}, None, send)  # type: ignore[arg-type]
    return messages


def test_what_fails_after_the_first_event_is_an_event_too(decoder: Alphabet, made: Callable[..., Generations]) -> None:
    generations, decoder.breaks_after = made(), 2

    async def check() -> list[dict[str, Any]]:
        return await sent(await generations.submit("a", COUNTING))

    start, *parts = asyncio.run(check())
    assert start["status"] == 200
    events = events_of(b"".join(part["body"] for part in parts))
    assert "".join(event.get("text_output", "") for event in events) == "bcd"
    assert events[-1] == {"error": "the GPU is gone"}
    assert [part["more_body"] for part in parts][-1] is False

    async def again() -> str:
        decoder.breaks_after = None
        return await text_of(generations, "d")

    assert asyncio.run(again()) == "efghij"


def test_a_client_that_goes_ends_its_text(decoder: Alphabet, made: Callable[..., Generations]) -> None:
    generations = made()

    async def check() -> None:
        decoder.going.clear()
        stream = await generations.submit("a", Sampling(max_new_tokens=150, temperature=0))
        await stream.pieces()
        stream.put(ClientGoneError())
        with pytest.raises(ClientGoneError):
            await stream.pieces()
        stream.close()
        decoder.going.set()
        assert await text_of(generations, "x", Sampling(max_new_tokens=2, temperature=0)) == "yz"

    asyncio.run(check())
    assert decoder.steps <= 2, "one may have begun before, and one is of the second text"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the request is not JSON"),
        (b"[]", "the request is []; expected a JSON object with text_input"),
        (b"{}", "text_input is missing; expected the text to continue"),
        (b'{"text_input": 5}', "text_input is 5; expected the text to continue"),
        (b'{"text_input": "x", "id": 5}', "id is 5; expected a string"),
        (b'{"text_input": "x", "parameters": []}', "parameters are []; expected an object"),
        (b'{"text_input": "x", "max_token": 5}', "unknown parameter 'max_token'; did you mean 'max_tokens'?"),
        (b'{"text_input": "x", "max_tokens": 5, "parameters": {"max_new_tokens": 6}}', "max_new_tokens is given twice"),
        (b'{"text_input": "x", "temperature": "hot"}', "temperature is 'hot'; expected a finite number"),
        (b'{"text_input": "x", "top_k": 0}', "top_k is 0; expected at least 1"),
        (b'{"text_input": "x", "seed": 1.5}', "seed is 1.5; expected an integer"),
        (b'{"text_input": "x", "stream": true}', "send the request to \u2026/generate_stream, or leave stream out"),
    ],
)
def test_requests_that_cannot_work_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(RequestError) as error:
        generate_request(body, streaming=False)
    assert message in str(error.value)
    assert error.value.kind.status == 400


def test_parameters_may_stand_in_parameters_or_beside_the_text_and_null_is_the_default() -> None:
    inside = generate_request(b'{"text_input": "x", "parameters": {"max_tokens": 5, "seed": 2}}', streaming=False)
    beside = generate_request(b'{"text_input": "x", "max_new_tokens": 5, "seed": 2, "stream": true}', streaming=True)
    assert inside == beside
    assert inside.sampling == Sampling(max_new_tokens=5, seed=2)
    assert generate_request(b'{"text_input": "x", "top_k": null}', streaming=False).sampling == Sampling()
