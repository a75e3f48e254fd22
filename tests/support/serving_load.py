"""A server in a process of its own, and a client that loads it from one thread: for tests and scripts/bench_serve.py.

The client speaks HTTP/1.1 over asyncio streams with requests that were made before, so that it takes little of the
machine. It talks to 127.0.0.1 alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ServerProcess:
    """`effexport serve` as a user starts it. model: the first of its models."""

    process: subprocess.Popen[str]
    port: int
    model: str
    log: Path

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return bytes(answer.read())

    def metric(self, name: str, model: str | None = None) -> float:
        """Sum over the labels of one metric; model: only of this one."""
        lines = self.get("/metrics").decode().splitlines()
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        label = "" if model is None else f'model="{model}"'
        return sum(float(line.rsplit(" ", 1)[1]) for line in found if label in line)

    def batch_sizes(self) -> Counter[int]:
        """Numbers of runs of the first model so far, by their rows."""
        sizes: Counter[int] = Counter()
        below = 0.0
        for line in self.get("/metrics").decode().splitlines():
            if not line.startswith("effexport_batch_size_bucket") or f'model="{self.model}"' not in line:
                continue
            if 'le="+Inf"' not in line:
                size = int(float(line.split('le="')[1].split('"')[0]))
                count = float(line.rsplit(" ", 1)[1])
                sizes[size] += int(count - below)
                below = count
        return +sizes

    @property
    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """The exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


@contextmanager
def running_server(artifact: Path, folder: Path, *options: str, **environment: str) -> Iterator[ServerProcess]:
    """A server on a free port, ready. It is killed at the end if it is still there."""
    log = folder / f"server-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "effexport", "serve", str(artifact), "--port", "0", "--json", *options]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stream, text=True, env={**os.environ, **environment}
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        while line and "}" not in line:
            line += process.stdout.readline()
        assert line, f"the server did not start:\n{log.read_text()}"
        ready = json.loads(line)
        yield ServerProcess(process, int(ready["url"].rsplit(":", 1)[1]), ready["models"][0], log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@dataclass(frozen=True)
class Sample:
    """A request, ready to be sent, and its right answer. limit: for max |error|; what is equal needs none.

    status: of the right answer. checked: whether a body is right that is not float32 alone.
    """

    request: bytes
    expected: bytes
    limit: float
    status: int = 200
    checked: Callable[[bytes], bool] | None = None

    def is_right(self, status: int, body: bytes, header_length: int) -> bool:
        if status != self.status or self.checked is not None:
            return status == self.status and self.checked is not None and self.checked(body)
        # a slice of bytes compares as memory, a memoryview element by element: the client has little time
        data = body[header_length:]
        if data == self.expected:
            return True
        if len(data) != len(self.expected):
            return False
        given, right = (np.frombuffer(value, np.float32) for value in (data, self.expected))
        return bool((np.abs(given - right) <= self.limit).all())


def binary_request(model: str, feeds: dict[str, np.ndarray], *, extra: str = "") -> bytes:
    """A POST of binary tensors that asks for binary outputs."""
    datatypes = {"int64": "INT64", "float32": "FP32"}
    inputs = [
        {
            "name": name,
            "shape": list(value.shape),
            "datatype": datatypes[value.dtype.name],
            "parameters": {"binary_data_size": value.nbytes},
        }
        for name, value in feeds.items()
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = head + b"".join(value.tobytes() for value in feeds.values())
    return post(f"/v2/models/{model}/infer", body, f"Inference-Header-Content-Length: {len(head)}\r\n{extra}")


def token_ids(rows: int, seq_len: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(2, 250, (rows, seq_len))


def samples_of(run: Callable[[dict[str, Any]], Any], lengths: Sequence[int], model: str = "small") -> list[Sample]:
    """24 requests of these lengths for a model, with their right answers."""
    made = []
    for seed in range(24):
        feeds = {"input_ids": token_ids(1, lengths[seed % len(lengths)], seed)}
        right = run(feeds)["last_hidden_state"]
        # rounding of float32 in sums over 32 channels; the rows of a joined run may be summed in another order
        made.append(Sample(binary_request(model, feeds), right.tobytes(), 1e-5))
    return made


def post(path: str, body: bytes, headers: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode("latin-1")
        + body
    )


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def header_length(self) -> int:
        return int(self.headers.get("inference-header-content-length", "0"))


class Connection:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=4 << 20))

    async def exchange(self, request: bytes) -> Reply:
        """Raises OSError or EOFError when the server closes without an answer."""
        self.writer.write(request)
        return await self.read_reply()

    async def read_reply(self) -> Reply:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.split(":", 1) for line in head[1:] if line)
        headers = {name.lower(): value.strip() for name, value in pairs}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Reply(int(head[0].split(" ")[1]), headers, body)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class Pool:
    """Connections that are used again, as a client library would."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[Connection] = []

    async def exchange(self, request: bytes) -> Reply:
        connection = self._free.pop() if self._free else await Connection.open(self._port)
        try:
            reply = await connection.exchange(request)
        except BaseException:
            await connection.close()
            raise
        if reply.headers.get("connection") == "close":
            await connection.close()
        else:
            self._free.append(connection)
        return reply

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._free))


@dataclass
class Outcome:
    """Results of a load. latencies_s: of right answers. lost: requests without any answer."""

    statuses: Counter[int] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    wrong: int = 0
    lost: int = 0
    retry_after: int = 0
    wall_s: float = 0.0
    client_cpu_s: float = 0.0

    @property
    def per_s(self) -> float:
        return self.statuses[200] / self.wall_s

    def percentile_ms(self, share: float) -> float:
        return float(np.percentile(self.latencies_s, 100 * share)) * 1e3

    def count(self, reply: Reply, sample: Sample, latency_s: float) -> None:
        self.statuses[reply.status] += 1
        self.retry_after += "retry-after" in reply.headers
        if reply.status == 200:
            self.latencies_s.append(latency_s)
        if reply.status == 200 or sample.status != 200:
            self.wrong += not sample.is_right(reply.status, reply.body, reply.header_length)


@contextmanager
def measured(outcome: Outcome) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    outcome.wall_s += time.perf_counter() - wall
    outcome.client_cpu_s += time.process_time() - cpu


async def closed_loop(port: int, samples: Sequence[Sample], clients: int, requests: int) -> Outcome:
    """Every client sends its next request when it has its answer, until `requests` are sent."""
    outcome, pool = Outcome(), Pool(port)
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            sample = samples[number % len(samples)]
            started = time.perf_counter()
            try:
                reply = await pool.exchange(sample.request)
            except (OSError, EOFError):
                outcome.lost += 1
                continue
            outcome.count(reply, sample, time.perf_counter() - started)

    with measured(outcome):
        await asyncio.gather(*(client() for _ in range(clients)))
    await pool.close()
    return outcome


async def open_loop(port: int, samples: Sequence[Sample], times_s: Sequence[float]) -> Outcome:
    """Requests at their times, whether others are answered or not. Latency counts from the time of the plan."""
    outcome, pool = Outcome(), Pool(port)
    begin = time.perf_counter() + 0.05

    async def send(sample: Sample, planned: float) -> None:
        try:
            reply = await pool.exchange(sample.request)
        except (OSError, EOFError):
            outcome.lost += 1
            return
        outcome.count(reply, sample, time.perf_counter() - planned)

    tasks = set()
    with measured(outcome):
        for number, offset in enumerate(times_s):
            await asyncio.sleep(max(0.0, begin + offset - time.perf_counter()))
            task = asyncio.create_task(send(samples[number % len(samples)], begin + offset))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
    await pool.close()
    return outcome


def even_times(rate: float, seconds: float) -> list[float]:
    return [number / rate for number in range(int(rate * seconds))]


def poisson_times(rate: float, seconds: float, seed: int = 0) -> list[float]:
    gaps = np.random.default_rng(seed).exponential(1 / rate, int(rate * seconds))
    return [float(value) for value in np.cumsum(gaps)]


async def stop_under_load(
    server: ServerProcess, samples: Sequence[Sample], clients: int, after_s: float, number: int = signal.SIGTERM
) -> Stopped:
    """A signal while clients send without a pause. A request counts as accepted when it was sent before."""
    stopped = Stopped(Outcome())
    signalled = asyncio.Event()

    async def client() -> None:
        connection: Connection | None = None
        for sample in itertools.cycle(samples):
            sent_before = not signalled.is_set()
            started = time.perf_counter()
            try:
                connection = connection or await Connection.open(server.port)
                reply = await connection.exchange(sample.request)
            except (OSError, EOFError):
                stopped.outcome.lost += sent_before
                stopped.refused_later += not sent_before
                if connection is not None:
                    await connection.close()
                return
            stopped.outcome.count(reply, sample, time.perf_counter() - started)
            if reply.headers.get("connection") == "close":
                await connection.close()
                connection = None

    async def stop() -> None:
        await asyncio.sleep(after_s)
        signalled.set()
        server.process.send_signal(number)

    await asyncio.gather(stop(), *(client() for _ in range(clients)))
    stopped.exit_status = await asyncio.to_thread(server.process.wait, 60)
    return stopped


@dataclass
class Stopped:
    """refused_later: requests of after the signal, for which no connection was there any more."""

    outcome: Outcome
    refused_later: int = 0
    exit_status: int | None = None


def check_right_answers(server: ServerProcess, samples: Sequence[Sample], clients: int = 2, requests: int = 24) -> None:
    outcome = asyncio.run(closed_loop(server.port, samples, clients, requests))
    assert (outcome.statuses, outcome.wrong, outcome.lost) == ({200: requests}, 0, 0)


def wait_until(done: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def events_of(body: str) -> list[dict[str, Any]]:
    """The events of a stream, as a client reads them: lines `data: …`, each before an empty line."""
    *lines, last = body.split("\n\n")
    assert last == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def check_malformed(server: ServerProcess, requests: Sequence[tuple[str, bytes]], first: int, most_bytes: int) -> None:
    """Each gets a 4xx with one message, and nothing leaks. requests: with their kinds.

    first: after so many, all is there that is allocated once. most_bytes: by which the others may grow the process.
    """

    def ask(request: bytes) -> Reply:
        return asyncio.run(exchange_once(server.port, request))

    index = ask(post("/v2/repository/index", b"{}")).body
    for _, request in requests[:first]:
        ask(request)
    rss, files = server.rss_bytes, server.open_files
    for kind, request in requests:
        reply = ask(request)
        assert 400 <= reply.status < 500, (kind, reply, request[:500])
        error = json_of(reply)["error"]
        if re.match(rb"\S+ /v1/", request):
            assert set(error) == {"message", "type", "param", "code"}
            error = error["message"]
        # a line, however long what it is about
        assert 10 < len(error) < 500, (kind, error)
        assert "\n" not in error
    assert server.rss_bytes - rss < most_bytes
    assert server.open_files <= files + 1
    assert server.metric("effexport_queue_depth") == 0
    assert "Traceback" not in server.log.read_text()
    assert ask(post("/v2/repository/index", b"{}")).body == index


async def exchange_once(port: int, request: bytes, timeout_s: float = 30.0) -> Reply:
    connection = await Connection.open(port)
    try:
        async with asyncio.timeout(timeout_s):
            return await connection.exchange(request)
    finally:
        await connection.close()


def json_of(reply: Reply) -> Any:
    return json.loads(reply.body[: reply.header_length or None])
