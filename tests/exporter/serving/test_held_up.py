"""Requests that take long hold up nobody else: much JSON, a model that is unloaded, answers that are not read."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import orjson
import pytest
import uvicorn
from uvicorn.server import ServerState

from effexport.base.dtypes import TensorInfo
from effexport.serving.engine.errors import RequestError
from effexport.serving.engine.settings import ServingSettings
from effexport.serving.http.bodies import PIECE, InferRequest, answer_from_outputs, array_from_json, parsed_object
from effexport.serving.http.endpoints import embedding_request
from effexport.serving.http.models import ModelRepository
from effexport.serving.http.server import READ_TIMEOUT_S, Protocol, disconnect_slow_clients
from effexport.serving.http.service import Service

pytestmark = pytest.mark.requires("serve")


async def beats_during(work: Any) -> int:
    """The number of turns that another task gets while a coroutine runs."""
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.001)

    task = asyncio.create_task(beat())
    await asyncio.gather(work, return_exceptions=True)
    task.cancel()
    return beats


def made_service() -> Service:
    models: Any = SimpleNamespace(settings=ServingSettings())
    return Service(models)


def test_much_json_is_read_while_others_have_their_turn() -> None:
    body = b'{"model": "m", "input": [' + b",".join([b"1"] * 3_000_000) + b"]}"
    read = partial(embedding_request, body)
    found: list[Any] = []

    async def scenario() -> int:
        async def work() -> None:
            found.append(await made_service().parsed(len(body), read))

        return await beats_during(work())

    # one while it is parsed, and then one for each few milliseconds of half a second: 9 were seen in a quarter
    assert asyncio.run(scenario()) >= 10
    assert found == [embedding_request(body)]


def test_much_json_is_read_one_request_at_a_time_and_little_at_once() -> None:
    service, let = made_service(), threading.Event()
    reading = []

    def slow(number: int) -> int:
        reading.append(number)
        assert let.wait(20)
        assert reading[-1] == number
        return number

    async def scenario() -> None:
        large = [asyncio.create_task(service.parsed(1 << 20, partial(slow, number))) for number in range(4)]
        while not reading:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert reading == [0]
        main = threading.get_ident()
        assert await service.parsed(100, threading.get_ident) == main
        large[1].cancel()
        let.set()
        assert await asyncio.gather(*large, return_exceptions=True) == [0, mock.ANY, 2, 3]
        assert reading == [0, 2, 3]

    asyncio.run(scenario())


def test_the_garbage_collector_runs_again_after_json_was_read() -> None:
    for text in (b"{}", b"[", b"[1]"):
        with contextlib.suppress(RequestError):
            parsed_object(text)
        assert gc.isenabled()


@pytest.mark.parametrize("count", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_numbers_are_read_and_written_in_pieces_as_they_are_at_once(count: int, dtype: str) -> None:
    array = (np.random.default_rng(count).standard_normal(count) * 100).astype(dtype)
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    numbers = orjson.loads(text)
    read = array_from_json(numbers, TensorInfo("x", dtype, ("batch",)), (count,))
    assert np.array_equal(read, array)
    for binary in (False, True):
        wanted = InferRequest("a\0b", {"x": False, "y": binary, "z": False}, None)
        body, length = answer_from_outputs(wanted, {"x": array, "y": array, "z": array[:1]}, "m", "1")
        fields = orjson.loads(body[:length])
        assert fields["id"] == "a\0b"
        assert [entry["shape"] for entry in fields["outputs"]] == [[count], [count], [1]]
        assert fields["outputs"][0]["data"] == numbers
        assert fields["outputs"][2]["data"] == numbers[:1]
        assert fields["outputs"][1].get("data") == (None if binary else numbers)
        assert body.count(text) == (1 if binary else 2) + (count == 1)


@pytest.mark.parametrize("place", [0, PIECE + 3])
def test_what_is_wrong_in_a_late_piece_is_refused(place: int) -> None:
    for wrong in (None, "x", True, [1], 2**70):
        flat: list[Any] = [1] * (2 * PIECE)
        flat[place] = wrong
        with pytest.raises(RequestError):
            array_from_json(flat, TensorInfo("x", "int64", ("batch",)), (len(flat),))


class Model:
    """A served model that `retire` finds in use until it is let go."""

    version, is_ready = "1", True

    def __init__(self, name: str) -> None:
        self.name = name
        self.unused = asyncio.Event()
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_a_model_whose_client_is_slow_is_unloaded_while_others_are_loaded() -> None:
    async def scenario() -> None:
        slow = Model("slow")
        loadable: Any = SimpleNamespace(
            names=lambda: ["slow", "other"], target=lambda name: SimpleNamespace(load=lambda: Model(name))
        )
        models: Any = [slow]
        repository = ModelRepository(models, ServingSettings(), loadable)

        async def states() -> dict[str, str]:
            return {entry["name"]: entry["state"] for entry in await repository.index()}

        unloading = asyncio.create_task(repository.unload("slow"))
        await asyncio.sleep(0)
        await asyncio.wait_for(repository.load("other"), 30)
        assert await states() == {"other": "READY", "slow": "UNLOADING"}
        # and even the same one
        await asyncio.wait_for(repository.load("slow"), 30)
        assert not unloading.done()
        slow.unused.set()
        await unloading
        assert slow.closed
        assert await states() == {"other": "READY", "slow": "READY"}
        again: Any = repository.get("slow")
        again.unused.set()
        await repository.unload("slow")
        assert await states() == {"other": "READY", "slow": "UNAVAILABLE"}

    asyncio.run(scenario())


class Transport(asyncio.Transport):
    """A connection whose client takes nothing: what is written stays in the buffer, and a close waits for it."""

    def __init__(self, unread: int) -> None:
        self.unread = unread
        self.closing = self.aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return mock.Mock(getsockopt=lambda *_: 4096) if name == "socket" else default

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("end", [Protocol.shutdown, Protocol.timeout_keep_alive_handler])
def test_a_connection_that_is_closed_does_not_wait_forever_for_its_client_to_read(
    end: Callable[[Protocol], None],
) -> None:
    """Of a small rest of an answer: one that is too small to pause the writing, which is watched anyway."""

    async def scenario() -> None:
        config = uvicorn.Config(lambda *_: None, http=Protocol, lifespan="off")
        config.load()
        protocol = Protocol(config=config, server_state=ServerState(), app_state={})
        transport = Transport(unread=1000)
        protocol.connection_made(transport)
        disconnect_slow_clients([protocol], 1 << 20, 0.0)
        end(protocol)
        assert transport.closing
        for seconds, aborted in ((100.0, False), (100.0 + READ_TIMEOUT_S - 1, False), (100.0 + READ_TIMEOUT_S, True)):
            disconnect_slow_clients([protocol], 1 << 20, seconds)
            assert transport.aborted is aborted
        protocol.connection_lost(None)

    asyncio.run(scenario())
