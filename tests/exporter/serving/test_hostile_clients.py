"""Clients that attack the server: ambiguous heads, tricks around the token, slow and unread connections, poisoned
requests, bombs. docs/security.md says what holds; scripts/campaign.py does the same at random."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from serving_fuzz import PATH_TRICKS, bad_heads, right_fields
from serving_load import (
    Connection,
    Reply,
    Sample,
    ServerProcess,
    binary_request,
    check_right_answers,
    exchange_once,
    json_of,
    post,
    running_server,
    token_ids,
    wait_until,
)
from starlette.datastructures import URL
from starlette.requests import Request

import effexport
from effexport.artifact import Artifact
from effexport.models.validation import shown
from effexport.serving.engine.errors import RequestError
from effexport.serving.engine.settings import ServingSettings
from effexport.serving.http.service import MAX_HEAD_BYTES, Service, check_head

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "serve"), pytest.mark.xdist_group("serving")]
HOST = (b"host", b"x")
TOKEN = "s3cret"
PATH = "/v2/models/small/infer"
HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


def body() -> bytes:
    return json.dumps(right_fields()).encode()


def replies(port: int, sent: bytes, timeout_s: float = 5.0) -> tuple[list[Reply], bool]:
    """All answers to what is sent over one connection, and whether the server has closed it."""

    async def read() -> tuple[list[Reply], bool]:
        connection = await Connection.open(port)
        connection.writer.write(sent)
        found: list[Reply] = []
        try:
            while True:
                found.append(await asyncio.wait_for(connection.read_reply(), timeout_s))
        except TimeoutError:
            return found, False
        except (EOFError, OSError):
            return found, True
        finally:
            await connection.close()

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("version", "headers", "status", "message"),
    [
        ("0.9", [], 400, "HTTP/0.9; expected HTTP/1.1"),
        ("2.0", [HOST], 400, "HTTP/2.0; expected HTTP/1.1"),
        ("1.1", [], 400, "no header Host"),
        ("1.1", [HOST, HOST], 400, "the header host is given 2 times"),
        ("1.1", [HOST, (b"authorization", b"a"), (b"authorization", b"b")], 400, "the header authorization is given 2"),
        ("1.1", [HOST, (b"transfer-encoding", b"gzip, chunked")], 400, "'gzip, chunked'; expected chunked"),
        ("1.1", [HOST, (b"upgrade", b"h2c"), (b"content-length", b"5")], 400, "Upgrade and a body"),
        ("1.1", [HOST, (b"x", b"y" * MAX_HEAD_BYTES)], 431, "expected at most 32768: send less"),
        ("1.1", [HOST, *[(b"x", b"yz")] * 20_000], 431, "expected at most 32768: send less"),
    ],
)
def test_heads_that_are_ambiguous_or_too_large_are_refused(
    version: str, headers: list[tuple[bytes, bytes]], status: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        check_head(version, b"/v2", headers)
    assert refused.value.kind.status == status


def test_usual_heads_are_taken() -> None:
    check_head("1.0", b"/v2", [])
    check_head("1.1", b"/v2", [HOST, (b"transfer-encoding", b"Chunked"), (b"accept", b"a"), (b"accept", b"b")])
    # curl offers HTTP/2 with a request that has no body
    check_head("1.1", b"/v2", [HOST, (b"upgrade", b"h2c"), (b"content-length", b"0")])


def test_every_bad_head_gets_one_4xx_and_ends_its_connection(server: ServerProcess) -> None:
    for name, request in bad_heads("small"):
        # what follows would be answered if the server took up again somewhere in the middle
        found, closed = replies(server.port, request + HEALTH)
        assert closed, name
        assert [400 <= reply.status < 500 for reply in found] == [True], (name, found)
        assert "error" in json_of(found[0])
    assert "Traceback" not in server.log.read_text()


def test_no_path_leads_around_the_token_and_no_trailer_brings_one(artifact: Artifact, tmp_path: Path) -> None:
    with running_server(artifact.path, tmp_path, "--name", "small", EFFEXPORT_SERVE_TOKEN=TOKEN) as server:
        for host in (b"x", b"x/v2/health/live?", b"x/v2/health/live#", b"[", b"\xff"):
            for path in PATH_TRICKS:
                for method in (b"GET", b"POST", b"HEAD", b"OPTIONS", b"DELETE"):
                    request = method + b" " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\n"
                    sent = request + b"Content-Length: 0\r\nConnection: close\r\n\r\n"
                    with socket.create_connection(("127.0.0.1", server.port)) as connection:
                        connection.sendall(sent)
                        status = int(connection.recv(12)[9:])
                    assert status in (400, 401), (method, path, host, status)
        chunk = b"%x\r\n%s\r\n0\r\n" % (len(body()), body())
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n".encode()
        authorization = f"Authorization: Bearer {TOKEN}\r\n".encode()
        for sent, status in ((head + b"\r\n" + chunk + authorization + b"\r\n", 401),
                             (head + authorization + b"\r\n" + chunk + b"X: y\r\n\r\n", 200)):  # fmt: skip
            assert asyncio.run(exchange_once(server.port, sent)).status == status
        assert TOKEN not in server.log.read_text()


def test_the_header_host_does_not_decide_what_needs_the_token() -> None:
    """Older versions of Starlette take the path of request.url from it, if it has one."""
    service = Service(SimpleNamespace(settings=ServingSettings(token=TOKEN)))  # type: ignore[arg-type]
    scope = {"type": "http", "http_version": "1.1", "path": "/v2", "query_string": b"", "headers": [HOST]}
    with (
        mock.patch.object(Request, "url", URL("http://x/v2/health/live?/v2")),
        pytest.raises(RequestError, match="expected the header Authorization"),
    ):
        service.check_request(Request(scope))


def test_good_requests_are_answered_before_the_bad_one_behind_them(
    server: ServerProcess, samples: list[Sample]
) -> None:
    for bad in (b"NONSENSE\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", post(PATH, b"").replace(b"0\r\n", b"x\r\n")):
        found, closed = replies(server.port, samples[0].request + HEALTH + samples[1].request + bad + HEALTH)
        assert closed
        assert [reply.status for reply in found] == [200, 200, 200, 400]
        for reply, sample in ((found[0], samples[0]), (found[2], samples[1])):
            assert sample.is_right(reply.status, reply.body, reply.header_length)
    # a broken body behind a good request
    broken = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{{\r\nzz\r\n".encode()
    found, closed = replies(server.port, samples[0].request + broken)
    assert ([reply.status for reply in found], closed) == ([200, 400], True)
    # a body is never read as a request
    found, _ = replies(server.port, post(PATH, HEALTH) + post("/nowhere", HEALTH) + HEALTH, 1.0)
    assert [reply.status for reply in found] == [400, 404, 200]


def test_a_connection_takes_64_requests_at_once(server: ServerProcess, samples: list[Sample]) -> None:
    found, closed = replies(server.port, samples[0].request + HEALTH * 64, 1.0)
    assert ([reply.status for reply in found], closed) == ([200] * 65, False)
    found, closed = replies(server.port, samples[0].request + HEALTH * 1000)
    assert ([reply.status for reply in found], closed) == ([200] * 65 + [400], True)
    assert "64 requests wait on this connection" in json_of(found[-1])["error"]


def test_a_client_that_goes_takes_its_waiting_requests_with_it(server: ServerProcess, samples: list[Sample]) -> None:
    files = server.open_files
    for number in range(30):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"".join(sample.request for sample in samples) * 2)
            time.sleep(0.001 * number)
            # a reset: answers to what still waits would be written to a connection that is closed
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: server.open_files <= files, 30)
    assert server.metric("effexport_queue_depth") == 0
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nX: ", b"y"),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\n", b"X: y\r\n"),
        (b"GET /", b"y"),
        (b"", b"\r\n"),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"X: y\r\n"),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"y"),
    ],
    ids=["header", "headers", "path", "empty lines", "trailers", "chunk extension"],
)
def test_a_head_without_end_is_not_kept(server: ServerProcess, first: bytes, then: bytes) -> None:
    rss = server.rss_bytes
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(first)
        sent = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 50 << 20:
                sent += connection.send(then * (100_000 // len(then)))
        # what the system itself holds of it, and no more
        assert sent < 20 << 20
    assert server.rss_bytes - rss < 8 << 20


def test_small_bombs_are_refused_within_a_second(server: ServerProcess, samples: list[Sample]) -> None:
    """64 MiB of JSON in 64 KiB: read as JSON, the lists would be 1.7 GB."""
    whole = server_peak(server)
    bombs = (
        (b"[" + b"[]," * (21 << 20), 413),
        (b"[" + b'"ab",' * (12 << 20), 413),
        (b" " * (80 << 20), 413),
        (b"[" * (60 << 20), 413),
        (b"[" + b"0," * 1_000_000 + b"0]", 400),
    )
    for text, status in bombs:
        request = post(PATH, gzip.compress(text), "Content-Encoding: gzip\r\n")
        start = server.cpu_s
        assert asyncio.run(exchange_once(server.port, request)).status == status
        assert server.cpu_s - start < 3
    assert server_peak(server) - whole < 300 << 20
    nested = post(PATH, gzip.compress(gzip.compress(body())), "Content-Encoding: gzip, gzip\r\n")
    assert asyncio.run(exchange_once(server.port, nested)).status == 415
    check_right_answers(server, samples)


def server_peak(server: ServerProcess) -> int:
    """The largest resident memory that the server has had, in bytes."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def test_a_huge_value_is_shown_at_once() -> None:
    start = time.process_time()
    for value in ([0.5] * 5_000_000, {"a": [[1.5] * 5_000_000]}, "x" * 50_000_000, [[]] * 1_000_000):
        assert len(shown(value)) == 81
    assert time.process_time() - start < 1
    for value in ([1, [2, {"a": "b"}], None], {"a": {}, "b": []}, "it's", (1,), [[]]):
        assert shown(value) == repr(value)


@pytest.mark.parametrize("attention", ["linear", "nystrom"])
def test_a_poisoned_request_harms_none_of_those_that_share_its_run(
    built: Callable[..., Artifact], tmp_path: Path, attention: str
) -> None:
    """NaN, infinity and numbers that become infinite in the model."""
    generator = np.random.default_rng(0)
    artifact = built(attention, "attention")
    (name,) = (tensor.name for tensor in artifact.spec.inputs if tensor.dtype == "float32")
    feeds = [{name: generator.standard_normal((1, 64, 32), dtype=np.float32)} for _ in range(5)]
    with effexport.load(artifact.path) as runner:
        right = [next(iter(runner.run(one).values())) for one in feeds]
    good = [
        Sample(binary_request("small", one), value.tobytes(), 1e-5) for one, value in zip(feeds, right, strict=True)
    ]

    async def together(port: int, request: bytes) -> list[Reply]:
        return await asyncio.gather(
            *(exchange_once(port, one) for one in [*(sample.request for sample in good), request])
        )

    with running_server(artifact.path, tmp_path, "--name", "small", "--batch-delay-ms", "20") as server:
        for value in (np.nan, np.inf, -np.inf, 3e38):
            poison = {name: feeds[0][name].copy()}
            poison[name][0, 7, 3] = value
            as_json = {"name": name, "shape": [1, 64, 32], "datatype": "FP32", "data": poison[name].ravel().tolist()}
            fields = json.dumps({"inputs": [as_json]}).encode()
            for request in (binary_request("small", poison), post(PATH, fields)):
                *found, bad = asyncio.run(together(server.port, request))
                for reply, sample in zip(found, good, strict=True):
                    assert sample.is_right(reply.status, reply.body, reply.header_length)
                # finite numbers are taken, unless they become infinite in the kernel, or in an answer as JSON
                assert bad.status in ((200, 400) if value == 3e38 else (400,))
        assert "Traceback" not in server.log.read_text()
        assert max(server.batch_sizes()) > 4


@pytest.mark.parametrize(
    "feeds",
    [
        {"input_ids": np.array([[5, -1, 7]])},
        {"input_ids": np.array([[5, 258, 7]])},
        {"input_ids": np.array([[5, 2**63 - 1, 7]])},
        {"input_ids": np.array([[5, 6, 7]]), "attention_mask": np.array([[1, 2, 1]])},
        {"input_ids": np.array([[5, 6, 7]]), "attention_mask": np.array([[1, -1, 1]])},
    ],
    ids=["negative", "beyond", "largest", "mask of 2", "mask of -1"],
)
def test_values_that_no_model_knows_are_refused_beside_right_answers(
    server: ServerProcess, samples: list[Sample], feeds: dict[str, Any]
) -> None:
    async def together() -> list[Reply]:
        requests = [*(sample.request for sample in samples[:6]), binary_request("small", feeds)]
        return await asyncio.gather(*(exchange_once(server.port, one) for one in requests))

    *found, bad = asyncio.run(together())
    assert bad.status == 400
    assert all(s.is_right(r.status, r.body, r.header_length) for r, s in zip(found, samples, strict=False))


def test_answers_that_nobody_reads_do_not_fill_the_memory(
    long_artifact: Artifact, tmp_path: Path, long_samples: list[Sample]
) -> None:
    """Their clients are disconnected as soon as others need the memory: here, when they hold more than 1.2 MB."""
    request = binary_request("small", {"input_ids": token_ids(8, 4096)})  # 4 MiB of answer
    with running_server(long_artifact.path, tmp_path, "--name", "small", "--max-request-bytes", "300000") as server:
        files = server.open_files
        with contextlib.ExitStack() as stack:
            for number in range(1, 9):
                connection = stack.enter_context(socket.socket())
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", server.port))
                connection.sendall(request)
                while server.metric("effexport_requests_total") < number:
                    time.sleep(0.05)
            # far less than the 30 s that they would have otherwise
            wait_until(lambda: server.open_files <= files + 1, 15)
        check_right_answers(server, long_samples, 1, 4)


@pytest.mark.slow
def test_200_clients_that_send_a_byte_a_second_are_given_up_and_disturb_nobody(
    artifact: Artifact, tmp_path: Path, samples: list[Sample]
) -> None:
    head = b"GET /v2 HTTP/1.1\r\nHost: x\r\nX: "
    infer, nowhere = (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n" for path in (PATH, "/nowhere"))
    chunked = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    begin = (head, infer.encode(), nowhere.encode(), chunked.encode())
    with (
        running_server(artifact.path, tmp_path, "--name", "small", "--timeout", "5") as server,
        contextlib.ExitStack() as s,
    ):
        rss, files = server.rss_bytes, server.open_files
        slow = [s.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(200)]
        for number, connection in enumerate(slow):
            connection.sendall(begin[number % 4])
        start = time.monotonic()
        while time.monotonic() - start < 13:
            for connection in slow:
                with contextlib.suppress(OSError):
                    connection.send(b"1")
            before = time.monotonic()
            check_right_answers(server, samples)
            assert time.monotonic() - before < 10
            time.sleep(1)
        wait_until(lambda: server.open_files <= files, 30)
        assert server.rss_bytes - rss < 16 << 20
