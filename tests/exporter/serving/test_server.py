"""The server itself: limits, tokens, slow and rude clients, overload, stopping. Raw HTTP, so that nothing is polite."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving_fuzz import infer, malformed_requests, right_fields
from serving_load import (
    Connection,
    Reply,
    Sample,
    ServerProcess,
    check_malformed,
    check_right_answers,
    closed_loop,
    exchange_once,
    json_of,
    open_loop,
    poisson_times,
    post,
    running_server,
    stop_under_load,
    wait_until,
)

from effexport.artifact import Artifact
from effexport.serving.http.server import MAX_CONNECTIONS

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "serve"), pytest.mark.xdist_group("serving")]
MIB = 1 << 20


def exchange(server: ServerProcess, request: bytes) -> Reply:
    return asyncio.run(exchange_once(server.port, request))


def get(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n".encode()


def right_request(model: str = "small", headers: str = "") -> bytes:
    return infer(model, json.dumps(right_fields()).encode(), headers)


def test_curl_and_a_few_lines_of_json_get_an_answer(server: ServerProcess) -> None:
    reply = exchange(server, right_request())
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert json_of(reply)["outputs"][0]["shape"] == [1, 8, 32]
    assert len(json_of(reply)["outputs"][0]["data"]) == 8 * 32


def test_a_chunked_body_is_taken(server: ServerProcess) -> None:
    body = json.dumps(right_fields()).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:50], body[50:]))
    head = b"POST /v2/models/small/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert exchange(server, head + chunks + b"0\r\n\r\n").status == 200


def test_a_list_of_encodings_allows_but_does_not_ask_for_compression(server: ServerProcess) -> None:
    """HTTP libraries send such a list unasked, and floats take longer to pack than to compute."""
    assert (
        "content-encoding"
        not in exchange(server, right_request(headers="Accept-Encoding: gzip, deflate, br\r\n")).headers
    )
    reply = exchange(server, right_request(headers="Accept-Encoding: gzip\r\n"))
    assert reply.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(reply.body))["model_name"] == "small"


@pytest.mark.parametrize("path", ["/", "/v2/models/small/infer/", "/v2/models/small/config"])
def test_what_is_not_served_is_answered_in_json(server: ServerProcess, path: str) -> None:
    reply = exchange(server, get(path))
    assert reply.status == 404
    assert path in json_of(reply)["error"]


def test_500_malformed_requests_each_get_a_4xx_and_nothing_leaks(server: ServerProcess, samples: list[Sample]) -> None:
    # 500 bodies of up to 200 kB would be 10 MiB and more, were they kept
    check_malformed(server, malformed_requests("small", 500), 100, 8 * MIB)
    check_right_answers(server, samples, 4)


def test_64_clients_lose_nothing_and_get_right_answers(server: ServerProcess, samples: list[Sample]) -> None:
    check_right_answers(server, samples, 64, 2000)


def overloaded(server: ServerProcess, samples: list[Sample], seconds: float) -> None:
    """Twice of what it can: right answers and 503s, memory within bounds, and soon well again."""
    capacity = asyncio.run(closed_loop(server.port, samples, 8, 200)).per_s
    rss = server.rss_bytes
    outcome = asyncio.run(open_loop(server.port, samples, poisson_times(2 * capacity, seconds)))
    assert set(outcome.statuses) <= {200, 503}
    assert outcome.statuses[200] > 0
    assert outcome.retry_after == outcome.statuses[503]
    assert (outcome.wrong, outcome.lost) == (0, 0)
    # ONNX Runtime keeps the memory of the first two full batches that run at once
    assert server.rss_bytes - rss < 128 * MIB
    check_right_answers(server, samples, 1, 20)


@pytest.mark.slow
def test_overload_is_answered_with_503_and_the_server_recovers(
    long_artifact: Artifact, tmp_path: Path, long_samples: list[Sample]
) -> None:
    with running_server(long_artifact.path, tmp_path, "--name", "small", "--queue-size", "8") as server:
        overloaded(server, long_samples, 5.0)
        # a crowd that comes at once does not fit into the queue, however fast the machine is
        crowd = asyncio.run(open_loop(server.port, long_samples, [0.0] * 200))
        assert set(crowd.statuses) == {200, 503}
        assert (crowd.wrong, crowd.lost) == (0, 0)
        assert server.metric("effexport_rejected_total") >= crowd.statuses[503]


@pytest.mark.soak
def test_a_minute_of_overload_leaves_the_server_as_it_was(
    long_artifact: Artifact, tmp_path: Path, long_samples: list[Sample]
) -> None:
    with running_server(long_artifact.path, tmp_path, "--name", "small") as server:
        overloaded(server, long_samples, 60.0)


@contextmanager
def file_limit(files: int) -> Iterator[None]:
    """Limit the open files of processes that start within, unless they ask for more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_many_connections_are_told_when_to_come_back(artifact: Artifact, tmp_path: Path) -> None:
    async def load(server: ServerProcess) -> tuple[Reply, Reply, Reply]:
        files = server.open_files
        crowd = [await Connection.open(server.port) for _ in range(MAX_CONNECTIONS + 1)]
        while server.open_files <= files + MAX_CONNECTIONS:  # the system took them, the server not yet
            await asyncio.sleep(0.05)
        refused = await crowd[0].exchange(right_request())
        probe = await crowd[1].exchange(get("/v2/health/live"))
        await asyncio.gather(*(connection.close() for connection in crowd[2:]))
        while server.open_files > files + 2:
            await asyncio.sleep(0.05)
        well = await crowd[1].exchange(right_request())
        await asyncio.gather(*(connection.close() for connection in crowd[:2]))
        return refused, probe, well

    with ExitStack() as stack:
        with file_limit(1024):
            server = stack.enter_context(running_server(artifact.path, tmp_path, "--name", "small"))
        refused, probe, well = asyncio.run(asyncio.wait_for(load(server), 60))
        assert (refused.status, probe.status, well.status) == (503, 200, 200)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        assert "too many connections" in json_of(refused)["error"]
        assert server.metric("effexport_rejected_total") == 1


TOKEN = "Authorization: Bearer s3cret\r\n"


@pytest.fixture(scope="module")
def strict(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a token, small bodies and little patience, whose model has the name of its folder."""
    options = ("--max-request-bytes", "1000", "--timeout", "0.5")
    with running_server(
        artifact.path, tmp_path_factory.mktemp("strict"), *options, EFFEXPORT_SERVE_TOKEN="s3cret"
    ) as server:
        yield server
        assert "s3cret" not in server.log.read_text()


def test_a_body_larger_than_the_limit_is_refused_before_it_is_read(strict: ServerProcess) -> None:
    assert exchange(strict, right_request(strict.model, TOKEN)).status == 200
    head = f"POST /v2/models/{strict.model}/infer HTTP/1.1\r\nHost: x\r\n{TOKEN}".encode()
    # the body never comes: the length alone decides
    reply = exchange(strict, head + b"Content-Length: 1001\r\n\r\n")
    assert reply.status == 413
    assert "takes at most 1000" in json_of(reply)["error"]
    chunked = b"Transfer-Encoding: chunked\r\n\r\n7d0\r\n" + b" " * 2000 + b"\r\n0\r\n\r\n"
    assert exchange(strict, head + chunked).status == 413
    for bomb in (gzip.compress(b" " * 100_000), gzip.compress(b" " * 10 * MIB)[:900]):
        assert exchange(strict, infer(strict.model, bomb, f"{TOKEN}Content-Encoding: gzip\r\n")).status == 413


def test_a_body_that_dawdles_is_refused_and_others_are_not_held_up(strict: ServerProcess) -> None:
    async def scenario(port: int, request: bytes) -> tuple[Reply, Reply]:
        slow = await Connection.open(port)
        slow.writer.write(request[:-10])
        quick = await exchange_once(port, request)
        refused = await asyncio.wait_for(slow.read_reply(), 20)
        await slow.close()
        return quick, refused

    quick, slow = asyncio.run(scenario(strict.port, right_request(strict.model, TOKEN)))
    assert quick.status == 200
    assert slow.status == 408
    assert slow.headers["connection"] == "close"


def test_a_client_that_goes_away_takes_nothing_with_it(server: ServerProcess, samples: list[Sample]) -> None:
    files = server.open_files
    for cut in (10, 150, len(samples[0].request) - 1, len(samples[0].request)):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(samples[0].request[:cut])
    check_right_answers(server, samples)
    wait_until(lambda: server.open_files <= files + 1, 30)
    assert server.metric("effexport_queue_depth") == 0


def test_a_token_is_asked_for_everywhere_but_at_the_probes(artifact: Artifact, strict: ServerProcess) -> None:
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert exchange(strict, get(path)).status == 200
    for request in (get("/v2"), get("/metrics"), get("/v2/models/small"), post("/v2/repository/index", b"")):
        assert exchange(strict, request).status == 401
    for given in ("", "Bearer", "Bearer wrong", "Bearer s3cret2", "Basic s3cret", "Bearer sécret"):
        header = f"Authorization: {given}\r\n" if given else ""
        reply = exchange(strict, right_request(strict.model, header))
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    reply = exchange(strict, get(f"/v2/models/{artifact.path.name}", TOKEN))
    assert (reply.status, json_of(reply)["name"]) == (200, artifact.path.name)


def test_metrics_count_requests_runs_and_refusals(server: ServerProcess, samples: list[Sample]) -> None:
    def counts() -> list[float]:
        names = ("requests_total", "rejected_total", "batch_size_sum", "queue_seconds_count", "request_seconds_count")
        return [server.metric(f"effexport_{name}") for name in names]

    before = counts()
    asyncio.run(closed_loop(server.port, samples, 1, 10))
    exchange(server, infer("small", b"{}"))
    assert [after - start for after, start in zip(counts(), before, strict=True)] == [11, 1, 10, 10, 11]
    assert server.metric("process_resident_memory_bytes") > 0


def test_the_port_of_another_server_is_one_clear_error(
    cli: Callable[..., Any], artifact: Artifact, server: ServerProcess
) -> None:
    error = cli("serve", artifact.path, "--port", server.port).error(2)
    assert f"cannot listen on 127.0.0.1 port {server.port}: Address already in use" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-batch", "0"), "--max-batch is 0; expected at least 1"),
        (("--max-padding", "1"), "--max-padding is 1; expected a share, at least 0 and below 1"),
        (("--concurrent-runs", "0"), "--concurrent-runs is 0; expected at least 1"),
        (("--timeout", "nan"), "--timeout is nan"),
        (("--queue-size", "-1"), "--queue-size is -1"),
        (("--name", "a/b"), "the model's name is 'a/b'"),
        (("--max-seq-len", "65"), "this model has positions for 64"),
        (("--token", ""), "the argument after --token is empty"),
        (("--token", "a\nb"), "characters that an HTTP header cannot contain"),
        (("--runtime", "ortt"), "unknown --runtime 'ortt'; did you mean 'ort'?"),
        (("--host", "no.such.host.invalid"), "which is not an address"),
        (("--min-replicas", "2"), "--min-replicas only works with --ray"),
        (("--runtime", "trt-rtx"), "has no trt-rtx engine"),
        (("again",), "several models have the name"),
        (("again", "--name", "a", "--name", "a"), "several models have the name a;"),
        (("again", "--name", "a"), "--name is given 1 time for 2 artifacts; expected one name for each artifact"),
        (("again", "--name", "a", "--name", "b", "--ray"), "--ray serves one artifact; 2 were given"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_listens(
    cli: Callable[..., Any], artifact: Artifact, options: tuple[str, ...], message: str
) -> None:
    """again: the artifact for a second time."""
    words = [artifact.path if word == "again" else word for word in options]
    assert message in cli("serve", artifact.path, "--port", "0", *words).error(2)


def test_what_is_no_artifact_is_refused(cli: Callable[..., Any], tmp_path: Path) -> None:
    assert "no artifact at" in cli("serve", tmp_path / "absent").error(2)


def test_two_servers_of_one_artifact_do_not_disturb_each_other_and_a_stop_under_load_answers_what_was_accepted(
    artifact: Artifact, server: ServerProcess, tmp_path: Path, samples: list[Sample]
) -> None:
    async def load(*ports: int) -> list[Any]:
        return await asyncio.gather(*(closed_loop(port, samples, 4, 100) for port in ports))

    with running_server(artifact.path, tmp_path, "--name", "small", "--implementation", "body") as other:
        results = asyncio.run(load(server.port, other.port))
        assert [(outcome.statuses, outcome.wrong) for outcome in results] == [({200: 100}, 0)] * 2
        stopped = asyncio.run(stop_under_load(other, samples, 32, 1.0))
        assert stopped.exit_status == 0
        assert (stopped.outcome.lost, stopped.outcome.wrong) == (0, 0)
        assert set(stopped.outcome.statuses) <= {200, 503}
        assert stopped.outcome.statuses[200] > 32
        assert "stopped: every accepted request was answered" in other.log.read_text()
