"""A worker process, and the small HTTP server on this machine from which it takes its commands."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from effexport.base.dtypes import TensorInfo
from effexport.base.errors import EffexportError
from effexport.export.onnx_graph import graph_tensors
from effexport.runners.artifact_runner import OpenModel
from effexport.runners.runner import Closeable, FeedLimits
from portability.environments import NODE, WORKERS, Environment, MissingError
from portability.workers.messages import packed, unpacked

# Beyond this a tool counts as hanging. The slowest known answer takes a tenth of it.
ANSWER_TIMEOUT_S = 300
POLL_S = 0.2
TYPES = {".html": "text/html", ".mjs": "text/javascript", ".wasm": "application/wasm"}


class ToolError(EffexportError):
    """The message of a tool or a runtime that refused."""


class Server(ThreadingHTTPServer):
    """Serves commands to one worker, takes its answers, and gives pages their files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.commands: queue.Queue[bytes] = queue.Queue()
        self.answers: queue.Queue[bytes] = queue.Queue()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A worker that has ended breaks its connection, which `Worker.call` notices itself."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/command":
            self.reply(self.server.commands.get())
            return
        name = Path(self.path).name
        file = NODE.dist / name if self.path.startswith("/dist/") else WORKERS / name
        if file.is_file():
            self.reply(file.read_bytes(), TYPES.get(file.suffix, "application/octet-stream"))
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        self.server.answers.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply(b"")

    def reply(self, body: bytes, kind: str = "application/octet-stream") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Worker(Closeable):
    """The process of one environment. It is started with the first command, and again after it has died.

    home: an empty folder for its log and what its tools leave behind.
    """

    def __init__(self, environment: Environment, home: Path) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._server: Server | None = None
        self._home = home

    @property
    def _log(self) -> Path:
        return self._home / "log"

    def start(self) -> Server:
        """Raises MissingError if the environment is missing."""
        if self._server is None:
            server = Server()
            try:
                command = self._environment.command(server.url, str(self._home))
            except MissingError:
                server.server_close()
                raise
            self._server = server
            threading.Thread(target=server.serve_forever, daemon=True).start()
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    # another Python than this one
                    env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
                )
        return self._server

    def call(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays of the worker's answer. Raises ToolError for its error, its end, or its silence."""
        server = self.start()
        server.commands.put(packed(header, arrays))
        end = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                answer, results = unpacked(server.answers.get(timeout=POLL_S))
            except queue.Empty:
                self._check(end)
                continue
            if "error" in answer:
                raise ToolError(answer["error"])
            return results

    def reset(self) -> None:
        """Close all models, if the process is alive."""
        if self._process is not None:
            self.call({"verb": "reset"}, {})

    def _check(self, end: float) -> None:
        assert self._process is not None
        status = self._process.poll()
        if status is None and time.monotonic() < end:
            return
        words = self._last_words()
        self.close()
        if status is None:
            raise ToolError(f"no answer within {ANSWER_TIMEOUT_S} s")
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        raise ToolError(f"the process ended with {name}: {words}")

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"

    def close(self) -> None:
        """End the process and its children. The next command starts another."""
        if self._server is not None:
            self._server.commands.put(b"")
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._process is not None:
            try:
                self._process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None


class WorkerRunner(Closeable):
    """A model that is open in a worker. options: further arguments of the runtime in workers/sessions.py."""

    _numbers = itertools.count()

    def __init__(self, worker: Worker, runtime: str, model: bytes, **options: str) -> None:
        import onnx

        graph = onnx.ModelProto.FromString(model).graph
        self.inputs: tuple[TensorInfo, ...] = graph_tensors(graph.input)
        self.outputs: tuple[TensorInfo, ...] = graph_tensors(graph.output)
        self.implementation: dict[str, str] = {}
        self._worker, self._number = worker, next(self._numbers)
        command = {"verb": "open", "number": self._number, "runtime": runtime, **options}
        worker.call(command, {"model": np.frombuffer(model, np.uint8)})

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._worker.call({"verb": "run", "number": self._number}, feeds)

    run_complete = run  # the runtime alone checks inputs here

    def close(self) -> None:
        """Nothing: `Worker.reset` closes all models at once."""


def open_in_worker(worker: Worker, runtime: str, **options: str) -> OpenModel:
    """A function that opens a model file, or a serialised model, in a worker. options: as in WorkerRunner."""

    def open_model(model: Path | bytes, limits: FeedLimits, external_folder: Path | None) -> WorkerRunner:
        return WorkerRunner(worker, runtime, model if isinstance(model, bytes) else model.read_bytes(), **options)

    return open_model
