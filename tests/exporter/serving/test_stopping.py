"""SIGTERM ends an idle server at once, whatever its clients did before and whatever they hold open; a second Ctrl-C
ends any server."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from serving_load import ServerProcess, post, running_server, wait_until

from effexport.artifact import Artifact

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "serve"), pytest.mark.xdist_group("serving")]
# It takes 0.6 s, and more on a busy machine, but less than the server waits for a head (10 s) or an idle client (75 s).
STOP_S = 8.0
STATUS = b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def writer(built: Callable[..., Artifact], tmp_path: Path) -> Iterator[ServerProcess]:
    artifact = built("linear", causal=True, lm_head=True)
    with running_server(artifact.path, tmp_path, "--name", "writer") as running:
        yield running


def opened(server: ServerProcess, sent: bytes, *, answered: bool = False) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(sent)
    if answered:
        assert connection.recv(9) == b"HTTP/1.1 "
    return connection


def check_stop(server: ServerProcess, number: int = signal.SIGTERM) -> None:
    start = time.monotonic()
    assert server.stop(number) == 0
    assert time.monotonic() - start < STOP_S
    assert server.log.read_text().splitlines()[-1] == "stopped: every accepted request was answered"


def test_a_server_that_nobody_asked_anything_stops_at_ctrl_c(writer: ServerProcess) -> None:
    check_stop(writer, signal.SIGINT)


def test_a_server_stops_although_clients_keep_their_connections_open(writer: ServerProcess) -> None:
    with ExitStack() as stack:
        for sent in (b"", STATUS, STATUS * 3, b"GET /v2 HT", STATUS + b"POST /v2/models/writer/infer HTTP/1.1\r\nHo"):
            for _ in range(5):
                stack.enter_context(opened(writer, sent, answered=sent.startswith(STATUS)))
        files = writer.open_files
        check_stop(writer)
        assert files > 25


def text_request(number: int, verb: str) -> bytes:
    fields = {"text_input": "abc", "max_tokens": 5 if number % 3 == 0 else 60, "seed": number}
    return post(f"/v2/models/writer/{verb}", json.dumps(fields).encode())


def test_a_server_whose_clients_left_their_texts_is_idle_and_stops(writer: ServerProcess) -> None:
    """At every stage: before the head is complete, while the text waits or begins, and after its first event."""
    for number in range(120):
        request = text_request(number, "generate_stream" if number % 2 else "generate")
        cut = len(request) - (7 if number % 10 == 0 else 0)
        opened(writer, request[:cut], answered=number % 4 == 1 and cut == len(request)).close()
    wait_until(lambda: not writer.metric("effexport_generation_sessions"))
    tokens = writer.metric("effexport_generated_tokens_total")
    assert tokens <= 120 * 60
    cpu = writer.cpu_s
    time.sleep(0.5)
    assert writer.metric("effexport_generated_tokens_total") == tokens
    assert writer.cpu_s - cpu < 0.25, "nothing runs any more"
    check_stop(writer)


def test_a_server_whose_clients_leave_while_it_stops_finishes_the_texts_of_the_others(writer: ServerProcess) -> None:
    with ExitStack() as stack:
        requests = [text_request(number, "generate_stream") for number in range(40)]
        connections = [stack.enter_context(opened(writer, request)) for request in requests]
        # the first event of each text is on its way
        wait_until(lambda: writer.metric("effexport_requests_total") >= 40)
        writer.process.send_signal(signal.SIGTERM)
        for connection in connections[::2]:
            connection.close()
        texts = [b"".join(iter(partial(connection.recv, 65536), b"")) for connection in connections[1::2]]
    check_stop(writer)
    assert all(text.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in text for text in texts)


def test_a_second_ctrl_c_ends_a_server_at_once_although_requests_run(writer: ServerProcess) -> None:
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": [8, 64], "data": [1] * 512}
    running = post("/v2/models/writer/infer", json.dumps({"inputs": [tensor]}).encode())
    with ExitStack() as stack:
        for request in [running, text_request(1, "generate")] * 25:
            stack.enter_context(opened(writer, request))
        # the server would wait for the rest of this body until its --timeout
        stack.enter_context(opened(writer, running[:-1]))
        wait_until(lambda: writer.metric("effexport_compute_seconds_count"))
        writer.process.send_signal(signal.SIGINT)
        wait_until(lambda: not accepts_connections(writer))
        start = time.monotonic()
        assert writer.stop(signal.SIGINT) == 130
        assert time.monotonic() - start < 2
    log = writer.log.read_text().splitlines()
    assert log[-1] == "stopped: requests that were running got no answer"
    assert not any("Traceback" in line for line in log)


def accepts_connections(server: ServerProcess) -> bool:
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=20).close()
    except ConnectionRefusedError:
        return False
    return True
