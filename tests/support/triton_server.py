"""The real tritonserver, for tests: started on free ports of this machine, asked through NVIDIA's own client."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from serving_load import free_ports

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-triton"
CLIENT = Path(__file__).with_name("triton_client.py")
START_SECONDS = 60


def environment() -> dict[str, str]:
    """Of processes of .venv-triton: none of the packages of the tests, and the libraries of the wheel."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    kept = {name: value for name, value in kept.items() if not name.startswith(("EFFEXPORT_", "PYTEST_"))}
    libraries = (ENVIRONMENT / "library-path").read_text().strip()
    return kept | {"LD_LIBRARY_PATH": libraries, "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}"}


def ask_client(command: str, folder: Path, job: Mapping[str, Any]) -> Any:
    """Run a function of triton_client.py; folder: for the files that go to and fro."""
    done = subprocess.run(
        [str(ENVIRONMENT / "bin" / "python"), str(CLIENT), command, str(folder), json.dumps(job)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class TritonServer:
    """Use it as a context manager. Models are loaded on demand."""

    def __init__(self, repository: Path, log: Path, models: Sequence[str] = ()) -> None:
        self.http, self.grpc = free_ports(2)
        self.log = log
        server = (ENVIRONMENT / "server").read_text().strip()
        command = [
            f"{server}/bin/tritonserver",
            f"--backend-directory={server}/backends",
            f"--model-repository={repository}",
            "--model-control-mode=explicit",
            "--exit-on-error=false",
            "--allow-metrics=false",
            *(f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc")),
            f"--http-port={self.http}",
            f"--grpc-port={self.grpc}",
            *(f"--load-model={model}" for model in models),
        ]
        with log.open("wb") as stream:
            self.process = subprocess.Popen(command, env=environment(), stdout=stream, stderr=subprocess.STDOUT)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text(errors="replace")
            try:
                if self.get("/v2/health/live")[0] == 200:
                    return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"tritonserver did not start:\n{self.log.read_text(errors='replace')}")

    def get(self, path: str) -> tuple[int, Any]:
        return self._open(urllib.request.Request(f"http://127.0.0.1:{self.http}{path}"))

    def post(self, path: str, body: bytes | Mapping[str, Any] = b"") -> tuple[int, Any]:
        """Status, and the answer as JSON, or as it is where it is none."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._open(urllib.request.Request(f"http://127.0.0.1:{self.http}{path}", data=data, method="POST"))

    def _open(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, data = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, data = error.code, error.read()
        try:
            return status, json.loads(data)
        except ValueError:
            return status, data

    def infer(
        self, model: str, requests: Sequence[Mapping[str, Any]], folder: Path, *, protocol: str, version: str = ""
    ) -> list[Any]:
        """Outputs of each request, all sent at the same time, or the text of its error."""
        folder.mkdir(exist_ok=True)
        arrays = {f"{i}/{name}": value for i, request in enumerate(requests) for name, value in request.items()}
        np.savez(folder / "inputs.npz", **arrays)
        url = f"127.0.0.1:{getattr(self, protocol)}"
        job = {"protocol": protocol, "url": url, "model": model, "version": version, "count": len(requests)}
        errors = ask_client("infer", folder, job)
        with np.load(folder / "outputs.npz") as file:
            found = {name: file[name] for name in file.files}
        return [
            errors.get(str(i))
            or {name.split("/", 1)[1]: value for name, value in found.items() if name.startswith(f"{i}/")}
            for i in range(len(requests))
        ]

    def state(self, model: str) -> dict[str, tuple[str, str]]:
        """Version → state and reason, as the repository index says."""
        _, index = self.post("/v2/repository/index")
        entries = [entry for entry in index if entry["name"] == model]
        return {entry.get("version", ""): (entry.get("state", ""), entry.get("reason", "")) for entry in entries}

    def counts(self, model: str) -> tuple[int, int]:
        """Numbers of answered samples and of executions."""
        _, answer = self.get(f"/v2/models/{model}/stats")
        stats = answer["model_stats"][0]
        return stats["inference_count"], stats["execution_count"]

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=45)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
