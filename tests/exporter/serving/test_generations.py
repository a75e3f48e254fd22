"""The thread that steps many texts together, with a decoder that a test holds back, breaks or slows down."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from alphabet import Alphabet, quick_switches
from serving_load import events_of

from effexport.base.errors import UserError
from effexport.serving.engine.errors import (
    QUEUE_FULL,
    STOPPING,
    WAITED_TOO_LONG,
    ClientGoneError,
    RequestError,
    refusal_of,
)
from effexport.serving.engine.metrics import Metrics
from effexport.serving.engine.texts import Generations, Stream
from effexport.serving.http.endpoints import EventStream, generate_request
from effexport.serving.http.service import watched
from effexport.tasks.sampling import Sampling
from effexport.tasks.task import ByteTokenizer
from effexport.tasks.text_generator import TextGenerator

COUNTING = Sampling(max_new_tokens=6, temperature=0)


@pytest.fixture
def decoder() -> Alphabet:
    return Alphabet()


@pytest.fixture
def made(decoder: Alphabet) -> Iterator[Callable[..., Generations]]:
    """(**options) → Generations of this decoder."""
    opened = []

    def make(**options: Any) -> Generations:
        generator = TextGenerator(decoder, ByteTokenizer(), 10**9)  # type: ignore[arg-type]
        opened.append(Generations(generator, **{"max_sessions": 64, "metrics": Metrics("letters"), **options}))
        return opened[-1]

    yield make
    decoder.going.set()
    for generations in opened:
        generations.close()
    assert decoder.closed


async def text_of(generations: Generations, prompt: str, sampling: Sampling = COUNTING) -> str:
    return await rest_of(await generations.submit(prompt, sampling))


async def rest_of(stream: Stream) -> str:
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
            assert await rest_of(stream) == expected

    asyncio.run(check())


def test_a_text_without_a_token_in_time_is_refused_and_dropped(
    decoder: Alphabet, made: Callable[..., Generations]
) -> None:
    generations = made()

    async def check() -> None:
        decoder.going.clear()
        stream = await generations.submit("a", COUNTING)
        assert (await stream.pieces())[0].text == "b", "that of the prompt"
        stream._timeout_s = 0.05
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
        streams = [await generations.submit(prompt, COUNTING) for prompt in "ab"]
        closing = asyncio.create_task(asyncio.to_thread(generations.close))
        while not generations._closing:
            await asyncio.sleep(0.001)
        with pytest.raises(RequestError, match="the server is stopping") as error:
            await generations.submit("c", COUNTING)
        assert error.value.kind is STOPPING
        decoder.going.set()
        assert await asyncio.gather(*map(rest_of, streams)) == ["bcdefg", "cdefgh"]
        await closing

    asyncio.run(check())
    assert not generations.is_alive


async def sent(stream: Any) -> list[dict[str, Any]]:
    """The messages of a response."""
    messages = []

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    answers = stream.answers(in_pieces=True)
    with ExitStack() as stack:
        stack.callback(stream.close)
        response = EventStream(await anext(answers), answers, stack.pop_all())
    await response({"type": "http", "asgi": {"spec_version": "2.4"}}, None, send)  # type: ignore[arg-type]
    return messages


def test_what_fails_after_the_first_event_is_an_event_too(decoder: Alphabet, made: Callable[..., Generations]) -> None:
    generations, decoder.breaks_after = made(), 2

    async def check() -> list[dict[str, Any]]:
        return await sent(await generations.submit("a", COUNTING))

    start, *parts = asyncio.run(check())
    assert start["status"] == 200
    events = events_of(b"".join(part["body"] for part in parts).decode())
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

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGoneError), contextlib.closing(stream), watched(receive):
            await stream.pieces()
        decoder.going.set()
        assert await text_of(generations, "x", Sampling(max_new_tokens=2, temperature=0)) == "yz"

    asyncio.run(check())
    assert decoder.steps <= 2, "one may have begun before, and one is of the second text"


def tokens_counted(metrics: Metrics) -> float:
    found = metrics.registry.get_sample_value("effexport_generated_tokens_total", {"model": metrics.model})
    assert found is not None
    return found


@quick_switches()
def test_of_2000_cancelled_texts_none_runs_on_and_each_token_is_counted_once() -> None:
    """At every stage: while they wait, while the prompt is read, between steps, and when the last token comes."""
    decoder, metrics, dice = Alphabet(batches=64), Metrics("letters"), random.Random(0)
    generator = TextGenerator(decoder, ByteTokenizer(), 10**9)  # type: ignore[arg-type]
    generations = Generations(generator, 64, metrics=metrics)
    streams: list[Stream] = []
    taken = 0

    async def cancelled(places: asyncio.Semaphore) -> None:
        nonlocal taken
        # some end by themselves at the moment when they are cancelled
        length = dice.choice((3, 10**6))
        async with places:
            stream = await generations.submit("a" * dice.randrange(1, 20), Sampling(max_new_tokens=length))
            streams.append(stream)
            for _ in range(dice.randrange(4)):
                pieces = await stream.pieces()
                taken += len(pieces)
                if pieces[-1].finish_reason is not None:
                    break
            await asyncio.sleep(dice.choice((0, 0, 0.0005)))
            stream.close()

    async def scenario() -> float:
        places = asyncio.Semaphore(40)
        await asyncio.gather(*(cancelled(places) for _ in range(2000)))
        # the thread drops the last ones, and needs no further request for that
        deadline = time.monotonic() + 20
        while generator.stepper.is_busy:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        counted = tokens_counted(metrics)
        left = sum(len(stream.session.pieces) for stream in streams)
        assert counted == taken + left
        return counted

    counted = asyncio.run(scenario())
    assert len(streams) == 2000
    assert all(stream.session.ended for stream in streams)
    assert counted == sum(stream.session.count for stream in streams)
    assert decoder.state == {}, "an idle generator holds no state"
    steps = decoder.steps
    time.sleep(0.1)
    assert (decoder.steps, tokens_counted(metrics)) == (steps, counted)
    assert metrics.registry.get_sample_value("effexport_generation_sessions", {"model": "letters"}) == 0
    assert asyncio.run(text_of(generations, "x", Sampling(max_new_tokens=2, temperature=0))) == "yz"
    start = time.monotonic()
    generations.close()
    assert time.monotonic() - start < 20


def test_an_end_of_text_token_is_not_counted(decoder: Alphabet) -> None:
    metrics, tokenizer = Metrics("letters"), ByteTokenizer(eos_token_id=ord("d") + 2)
    generations = Generations(TextGenerator(decoder, tokenizer, 1000), 64, metrics=metrics)  # type: ignore[arg-type]
    try:
        assert asyncio.run(text_of(generations, "a")) == "bc"
        assert tokens_counted(metrics) == 2
    finally:
        generations.close()


def test_of_a_crowd_with_long_prompts_no_more_are_read_than_may_be_continued(
    decoder: Alphabet, made: Callable[..., Generations]
) -> None:
    generations, reading = made(), threading.Event()
    read, prompts = generations._generator.session, []

    def held(prompt: str, sampling: Sampling) -> Any:
        prompts.append(prompt)
        assert reading.wait(20)
        return read(prompt, sampling)

    generations._generator.session = held  # type: ignore[method-assign]

    async def check() -> None:
        crowd = [asyncio.create_task(generations.submit("a" * 3000, COUNTING)) for _ in range(30)]
        done: set[asyncio.Task[Any]] = set()
        async with asyncio.timeout(60):
            while len(done) < 27:
                done, _ = await asyncio.wait(crowd, timeout=0.1)
        assert len(done) == 27
        assert {getattr(task.exception(), "kind", None) for task in done} == {QUEUE_FULL}
        reading.set()
        streams = [await task for task in crowd if task not in done]
        for stream in streams:
            stream.close()
        with pytest.raises(UserError, match="the prompt is empty"):
            await generations.submit("", COUNTING)
        assert await text_of(generations, "a") == "bcdefg"

    asyncio.run(check())
    assert len(prompts) == 3 + 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the request is not JSON"),
        (b"[]", "the request is []; expected a JSON object with text_input"),
        (b"{}", "text_input is missing; expected the text to continue"),
        (b'{"text_input": 5}', "text_input is 5; expected a string"),
        (b'{"text_input": "x", "id": 5}', "id is 5; expected a string"),
        (b'{"text_input": "x", "parameters": []}', "parameters are []; expected an object"),
        (b'{"text_input": "x", "max_token": 5}', "unknown parameter 'max_token'; did you mean 'max_tokens'?"),
        (b'{"text_input": "x", "max_tokens": 5, "parameters": {"max_new_tokens": 6}}', "max_new_tokens is given twice"),
        (b'{"text_input": "x", "temperature": "hot"}', "temperature is 'hot'; expected a finite number"),
        (b'{"text_input": "x", "stream": true}', "send the request to \u2026/generate_stream, or leave stream out"),
    ],
)
def test_requests_that_cannot_work_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(UserError) as error:
        generate_request(body, streaming=False)
    assert message in str(error.value)
    assert refusal_of(error.value).status == 400


def test_parameters_may_stand_in_parameters_or_beside_the_text_and_null_is_the_default() -> None:
    inside = generate_request(b'{"text_input": "x", "parameters": {"max_tokens": 5, "seed": 2}}', streaming=False)
    beside = generate_request(b'{"text_input": "x", "max_new_tokens": 5, "seed": 2, "stream": true}', streaming=True)
    assert inside == beside
    assert inside == ("x", Sampling(max_new_tokens=5, seed=2), None)
    assert generate_request(b'{"text_input": "x", "top_k": null}', streaming=False)[1] == Sampling()
