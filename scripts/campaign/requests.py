"""Malformed requests to a running server, each beside a good one whose answer is compared.

All the time, 200 clients send a byte a second, and 20 do not read their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import signal
import socket
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from serving_fuzz import KINDS, PATH_TRICKS, TEXT_KINDS, as_json, bad_heads, infer, right_fields
from serving_load import (
    Connection,
    Reply,
    Sample,
    ServerProcess,
    binary_request,
    exchange_once,
    post,
    running_server,
    token_ids,
)
from small_builds import built_artifact
from small_specs import spec_of

import effexport
from campaign.commands import Tally

TOKEN = "the-token-of-the-campaign"
AUTHORIZATION = f"Authorization: Bearer {TOKEN}\r\n"
# The first takes token ids, "hidden" floats, "pooled" texts; "writer" generates.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "small": ("linear", "encoder", {}),
    "hidden": ("nystrom", "attention", {}),
    "pooled": ("linear", "encoder", {"pool": "cls"}),
    "writer": ("linear", "encoder", {"causal": True, "lm_head": True}),
}
AT_ONCE = 8
ANSWER_S = 30.0
SLOW_CLIENTS, UNREAD_CLIENTS = 200, 20
# Cases before the memory is measured: what is allocated once is there then.
WARM_UP = 200
# The allocator keeps some of what bombs of 80 MiB have used.
MORE_MEMORY = 64 << 20
REST_S = 60.0

Kind = Callable[[random.Random], bytes]


@dataclass(frozen=True)
class Malformed:
    """A malformed request. asks_token: whether it comes without the token, so that 401 is right.

    ends: whether the connection must end after one answer, so that nothing behind the request is taken for another.
    """

    kind: str
    request: bytes
    asks_token: bool = False
    ends: bool = False


def bad_head(dice: random.Random) -> Malformed:
    name, request = dice.choice(bad_heads("small"))
    return Malformed(f"bad head, {name}", request, ends=True)


def damaged_head(dice: random.Random) -> Malformed:
    """A byte of the head that belongs into none."""
    head, _, body = infer("small", as_json(right_fields())).partition(b"\r\n\r\n")
    place = dice.randrange(1, len(head))  # empty lines before a request are allowed
    byte = dice.choice((b"\0", b"\r", b"\n", b"\x01", b"\x7f"))
    return Malformed("damaged head", head[:place] + byte + head[place:] + b"\r\n\r\n" + body, ends=True)


def around_the_token(dice: random.Random) -> Malformed:
    path = dice.choice(PATH_TRICKS)
    method = dice.choice(("GET", "POST", "DELETE", "OPTIONS", "PUT")).encode()
    host = dice.choice((b"x", b"x/v2/health/live?", b"x/v2/health/live#", b"[", b"\xff", b""))
    token = dice.choice(("", "Bearer", "Bearer ", "Bearer x", TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN}x")).encode()
    head = method + b" " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nContent-Length: 0\r\n"
    return Malformed("around the token", head + (b"Authorization: " + token + b"\r\n") * bool(token) + b"\r\n", True)


def token_in_trailer(dice: random.Random) -> Malformed:
    body = as_json(right_fields())
    head = b"POST /v2/models/small/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    trailers = dice.choice((AUTHORIZATION, f"X: y\r\n{AUTHORIZATION}", AUTHORIZATION * 2)).encode()
    return Malformed("token in trailer", head + b"%x\r\n%s\r\n0\r\n" % (len(body), body) + trailers + b"\r\n", True)


def poison(dice: random.Random) -> Malformed:
    """A number that is none, in a tensor that is right otherwise."""
    hidden = np.zeros((1, dice.choice((8, 64)), 32), np.float32)
    hidden[0, dice.randrange(8), dice.randrange(32)] = dice.choice((np.nan, np.inf, -np.inf))
    return Malformed("poison", binary_request("hidden", {"hidden_states": hidden}))


def wrong_values(dice: random.Random) -> Malformed:
    """Tokens and masks that no model knows."""
    ids = token_ids(dice.choice((1, 2)), 64, dice.randrange(10))
    mask = np.ones_like(ids)
    array, values = dice.choice(((ids, (-1, 258, 2**31, 2**63 - 1, -(2**63))), (mask, (-1, 2, 2**63 - 1))))
    array[dice.randrange(len(array)), dice.randrange(64)] = dice.choice(values)
    return Malformed("wrong values", binary_request("small", {"input_ids": ids, "attention_mask": mask}))


@cache
def packed(encoding: str, part: bytes, mebibytes: int) -> bytes:
    text = b"[" + part * ((mebibytes << 20) // len(part))
    return gzip.compress(text, 1) if encoding == "gzip" else zlib.compress(text, 1)


def bomb(dice: random.Random) -> Malformed:
    """Small bodies that are large when they are decompressed, nested or damaged."""
    encoding = dice.choice(("gzip", "deflate"))
    if dice.random() < 0.1:
        body = packed(encoding, *dice.choice(((b" ", 80), (b"[],", 63), (b'"a",', 63), (b"[", 63))))
    else:
        whole = packed(encoding, b" ", 1)
        body = dice.choice((gzip.compress(whole), whole[:-9], whole + b"x", whole[:50] + b"\xff" + whole[51:], whole))
    header = dice.choice((encoding, encoding, encoding, f"{encoding}, {encoding}", "br", "zstd", "identity, gzip"))
    return Malformed("bomb", post("/v2/models/small/infer", body, f"Content-Encoding: {header}\r\n"))


def strange_text(dice: random.Random) -> Malformed:
    """JSON, valid or nearly, that is not a text: surrogates, numbers of thousands of digits, depth, length."""
    value = dice.choice(
        (b'"\\ud800"', b'"\\udfff\\ud800"', b'"\xed\xa0\x80"', b"1" * 5000, b"-" + b"9" * 5000 + b"e99", b"1e400",
         b"[" * 2000 + b"]" * 2000, b'{"a":' * 2000 + b"1" + b"}" * 2000, b'"' + b"x" * 300_000 + b'"', b"[]", b"{}",
         b"true", b"NaN", b'["a"', b'"a\0"', b'"\xff"'))  # fmt: skip
    path, fields = dice.choice(
        (
            ("/v1/embeddings", b'{"model":"pooled","input":%s}'),
            ("/v1/embeddings", b'{"model":"pooled","input":["a",%s]}'),
            ("/v2/models/writer/generate", b'{"text_input":%s,"max_tokens":1}'),
            ("/v2/models/writer/generate_stream", b'{"text_input":%s,"max_tokens":1}'),
            ("/v2/models/pooled/infer", b'{"inputs":[{"name":"text","shape":[1],"datatype":"BYTES","data":[%s]}]}'),
        )
    )
    return Malformed("strange text", post(path, fields % value))


def names_of_folders(dice: random.Random) -> Malformed:
    """Names that would lead out of the folder of loadable models."""
    name = dice.choice(
        ("..", "../small", "..%2fsmall", "%2e%2e%2f%2e%2e%2fetc", "%2fetc", "%2Ftmp", "~", "small%00", "%ff", "a%0ab",
         "..%5csmall", "C:", "leads-out", "small/../pooled", ".", "%2e", "small%2f.", "x" * 300,
         "x" * 20_000))  # fmt: skip
    return Malformed("name of a folder", post(f"/v2/repository/models/{name}/{dice.choice(('load', 'unload'))}", b""))


def smuggled(dice: random.Random) -> Malformed:
    """A second request in a place where a careless server, or a proxy, begins to read one."""
    second = b"GET /v2/models HTTP/1.1\r\nHost: x\r\n\r\n"
    head = "POST /v2/models/small/infer HTTP/1.1\r\nHost: x\r\n"
    request = dice.choice(
        (
            f"{head}Content-Length: 5\r\nContent-Length: 0\r\n\r\n".encode() + second,
            f"{head}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode() + second,
            f"{head}Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n".encode() + second,
            f"{head}Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n".encode() + second,
            f"{head}Transfer-Encoding: chunked\r\n\r\n5\nGET /\r\n0\r\n\r\n".encode() + second,
            f"{head}Transfer-Encoding: chunked\r\n\r\n0\n\n".encode() + second,
            f"{head}Transfer-Encoding: chunked\r\n\r\n-1\r\n".encode() + second,
            f"{head}Transfer-Encoding: chunked\r\n\r\n{'f' * 17}\r\n".encode() + second,
            f"{head}Content-Length: 0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 9\r\n\r\n".encode()
            + second,
        )
    )
    return Malformed("smuggled", request, ends=True)


def fuzzed(kinds: Sequence[Callable[[str, random.Random], bytes]], model: str) -> Callable[[random.Random], Malformed]:
    """One of the kinds of tests/support/serving_fuzz.py."""

    def made(dice: random.Random) -> Malformed:
        kind = dice.choice(kinds)
        return Malformed(kind.__name__, kind(model, dice))

    return made


OWN_KINDS = (
    bad_head, damaged_head, around_the_token, token_in_trailer, poison, wrong_values, bomb, strange_text,
    names_of_folders, smuggled,
)  # fmt: skip
# Weighed by how many kinds each stands for.
CHOICES: tuple[tuple[Callable[[random.Random], Malformed], int], ...] = (
    (fuzzed(KINDS, "small"), len(KINDS)),
    (fuzzed(TEXT_KINDS, "pooled"), len(TEXT_KINDS)),
    *((kind, 1) for kind in OWN_KINDS),
)


def malformed(dice: random.Random) -> Malformed:
    kinds, weights = zip(*CHOICES, strict=True)
    made: Malformed = dice.choices(kinds, weights)[0](dice)
    return made


def with_token(request: bytes) -> bytes:
    """The request with the token after its first line."""
    first, separator, rest = request.partition(b"\r\n")
    return first + separator + AUTHORIZATION.encode() + rest


def good_requests(folders: dict[str, Path]) -> list[Sample]:
    """Requests to the models that take tensors, with the answers of the runner alone."""
    made = []
    generator = np.random.default_rng(0)
    for model, name in (("small", "input_ids"), ("hidden", "hidden_states")):
        with effexport.load(folders[model]) as runner:
            for number in range(24):
                length = (16, 40, 64)[number % 3]
                feeds = {name: token_ids(1, length, number)}
                if model == "hidden":
                    feeds = {name: generator.standard_normal((1, length, 32), dtype=np.float32)}
                (right,) = runner.run(feeds).values()
                # rounding of float32: the rows of a joined run may be summed in another order
                made.append(Sample(with_token(binary_request(model, feeds)), right.tobytes(), 1e-5))
    return made


async def text_requests(port: int) -> list[Sample]:
    """Requests with texts; the answers are those of the server before it is attacked."""
    made = []
    for path, fields in (
        ("/v1/embeddings", {"model": "pooled", "input": ["a text", "another text"]}),
        ("/v2/models/writer/generate", {"text_input": "Once upon", "max_tokens": 4, "seed": 7}),
    ):
        request = with_token(post(path, as_json(fields)))
        reply = await exchange_once(port, request)
        assert reply.status == 200, reply
        made.append(Sample(request, b"", 0.0, checked=json_is(json.loads(reply.body))))
    return made


def json_is(right: Any) -> Callable[[bytes], bool]:
    """A test that a body is this JSON, but for the rounding of its numbers."""

    def same(given: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            return given.keys() == expected.keys() and all(same(given[name], expected[name]) for name in expected)
        if isinstance(expected, list):
            return len(given) == len(expected) and all(map(same, given, expected))
        return abs(given - expected) <= 1e-5 if isinstance(expected, float) else bool(given == expected)

    return lambda body: same(json.loads(body), right)


async def answers(port: int, case: Malformed) -> list[Reply]:
    """The answer to a malformed request, and those to what the server takes for further ones."""
    connection = await Connection.open(port)
    request = case.request if case.asks_token else with_token(case.request)
    found: list[Reply] = []
    try:
        connection.writer.write(request)
        found.append(await asyncio.wait_for(connection.read_reply(), ANSWER_S))
        while case.ends:
            found.append(await asyncio.wait_for(connection.read_reply(), ANSWER_S))
    except TimeoutError:
        raise
    except (EOFError, OSError):
        pass
    finally:
        await connection.close()
    return found


def problem_of(case: Malformed, replies: Sequence[Reply]) -> str | None:
    """The fault of the answers to a malformed request, or None."""
    statuses = [reply.status for reply in replies]
    if len(statuses) != 1:
        return f"{len(statuses)} answers {statuses}; expected one"
    (reply,) = replies
    if reply.status == 503:
        return None if "retry-after" in reply.headers else "503 without Retry-After"
    if not 400 <= reply.status < 500:
        return f"status {reply.status}; expected 4xx: {reply.body[:100]!r}"
    if case.asks_token and reply.status not in (400, 401):
        return f"status {reply.status} without the token; expected 401"
    return None if "error" in json.loads(reply.body) else f"the answer has no error: {reply.body[:100]!r}"


async def one_case(port: int, seed: int, index: int, good: Sequence[Sample], tally: Tally) -> None:
    """A malformed request, and at the same time a good one."""
    dice = random.Random(f"{seed}-{index}")
    case, sample = malformed(dice), dice.choice(good)
    try:
        replies, reply = await asyncio.gather(answers(port, case), exchange_once(port, sample.request))
    except (TimeoutError, EOFError, OSError) as error:
        tally.problems.append(f"seed {seed}, case {index} ({case.kind}): {type(error).__name__}, no answer {error}")
        return
    problem = problem_of(case, replies)
    if not sample.is_right(reply.status, reply.body, reply.header_length):
        problem = f"a good request beside it got {reply.status} {reply.body[:100]!r}"
    if problem is not None:
        tally.problems.append(f"seed {seed}, case {index} ({case.kind}): {problem}; sent {case.request[:200]!r}")
        return
    tally.outcomes[f"refused with {replies[0].status}"] += 1


async def slow_client(port: int, number: int) -> None:
    """Sends a byte a second, and begins again whenever the server gives it up."""
    starts = (
        "GET /v2 HTTP/1.1\r\nHost: x\r\nX: ",
        f"POST /v2/models/small/infer HTTP/1.1\r\nHost: x\r\n{AUTHORIZATION}Content-Length: 999\r\n\r\n",
        "POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n",
        f"POST /v2/models/small/infer HTTP/1.1\r\nHost: x\r\n{AUTHORIZATION}Transfer-Encoding: chunked\r\n\r\n",
    )
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(starts[number % 4].encode())
                while not writer.transport.is_closing():
                    await asyncio.sleep(1)
                    writer.write(b"1")
            finally:
                writer.transport.abort()


async def unread_client(port: int) -> None:
    """Asks for answers as long as the server takes its requests, and reads nothing."""
    request = with_token(binary_request("small", {"input_ids": token_ids(8, 64)}))
    while True:
        with contextlib.suppress(OSError), socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", port))
            while True:
                await loop.sock_sendall(client, request)
                await asyncio.sleep(0.5)


@asynccontextmanager
async def besieged(port: int) -> AsyncIterator[None]:
    """Slow clients and clients that do not read, during the block."""
    tasks = [asyncio.create_task(slow_client(port, number)) for number in range(SLOW_CLIENTS)]
    tasks += [asyncio.create_task(unread_client(port)) for _ in range(UNREAD_CLIENTS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def attack(port: int, seed: int, indices: Sequence[int], good: Sequence[Sample], tally: Tally) -> None:
    """Cases, some at a time."""
    waiting: Iterator[int] = iter(indices)

    async def client() -> None:
        for index in waiting:
            await one_case(port, seed, index, good, tally)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))


@contextmanager
def served(folder: Path) -> Iterator[tuple[ServerProcess, dict[str, Path]]]:
    """A server of all MODELS, which may load others from an empty folder; and their artifacts."""
    folders = {
        name: built_artifact(spec_of(variant, scope, **fields)) for name, (variant, scope, fields) in MODELS.items()
    }
    loadable = folder / "models"
    loadable.mkdir()
    (loadable / "leads-out").symlink_to(folders["small"])
    names = [option for name in MODELS for option in ("--name", name)]
    first, *others = map(str, folders.values())
    options = (*others, *names, "--allow-load", str(loadable), "--batch-delay-ms", "2", "--timeout", "10")
    with running_server(Path(first), folder, *options, EFFEXPORT_SERVE_TOKEN=TOKEN) as server:
        yield server, folders


def run(cases: int, seed: int, folder: Path) -> Tally:
    """Attack one server, and see that it is as before: alive, its memory and files, and no traceback in its log."""
    tally = Tally()
    with served(folder) as (server, folders):
        good = [*good_requests(folders), *asyncio.run(text_requests(server.port)) * 8]
        files = server.open_files

        async def scenario() -> int:
            async with besieged(server.port):
                first = min(WARM_UP, cases // 2)
                await attack(server.port, seed, range(first), good, tally)
                rss = server.rss_bytes
                await attack(server.port, seed, range(first, cases), good, tally)
            return rss

        rss = asyncio.run(scenario())
        tally.problems += remains(server, files, rss)
        if server.stop(signal.SIGTERM) != 0:
            tally.problems.append(f"seed {seed}: the server ended with status {server.process.returncode}")
        log = server.log.read_text()
        if "Traceback" in log:
            tally.problems.append(
                f"seed {seed}: the server's log has a traceback: {log[log.index('Traceback') :][-1000:]}"
            )
    return tally


def remains(server: ServerProcess, files: int, rss: int) -> list[str]:
    """Traces that an attack has left behind."""
    if server.process.poll() is not None:
        return [f"the server has died with status {server.process.returncode}: {server.log.read_text()[-1000:]}"]
    deadline = time.monotonic() + REST_S
    while server.open_files > files + 1 and time.monotonic() < deadline:
        time.sleep(0.2)
    found = []
    if server.open_files > files + 1:
        found.append(f"the server has {server.open_files} open files; {files} before")
    if server.rss_bytes - rss > MORE_MEMORY:
        found.append(f"the server has {server.rss_bytes >> 20} MiB of memory; {rss >> 20} after the first cases")
    return found
