"""`effexport serve --ray`: the same application on Ray Serve, on this machine, asked by tritonclient."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_load import free_ports

import effexport
from effexport.artifact import Artifact
from effexport.base.errors import UserError

pytestmark = [
    pytest.mark.requires("torch", "onnx", "ort", "serve", "ray-serve"),
    pytest.mark.xdist_group("serving"),
]


def test_the_application_on_ray_answers_as_the_runner_does_and_stops_cleanly(
    built: Callable[..., Artifact], tmp_path: Path
) -> None:
    import tritonclient.http
    from tritonclient.utils import InferenceServerException

    artifact, port = built("linear"), free_ports(1)[0]
    feeds = np.random.default_rng(0).integers(2, 250, (2, 40))
    with effexport.load(artifact.path) as runner:
        right = runner.run({"input_ids": feeds})["last_hidden_state"]
    options = f"--ray --port {port} --name small --json --max-replicas 2 --replica-cpus 0.5"
    command = [sys.executable, "-m", "effexport", "serve", str(artifact.path), *options.split()]
    log = tmp_path / "log"
    with (
        log.open("w") as stream,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            lines = ""
            while line := process.stdout.readline():
                lines += line
                if line.startswith("}"):
                    break
            ready = json.loads(lines or "{}")
            assert ready.get("url") == f"http://127.0.0.1:{port}", lines + log.read_text()
            assert (ready["model"], ready["version"]) == ("small", "1")
            with tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}", concurrency=8) as client:
                assert client.is_server_ready()
                assert client.is_model_ready("small")
                assert client.get_model_metadata("small")["outputs"][0]["shape"] == [-1, -1, 32]
                tensor = tritonclient.http.InferInput("input_ids", feeds.shape, "INT64")
                tensor.set_data_from_numpy(feeds)
                pending = [client.async_infer("small", [tensor]) for _ in range(24)]
                for one in pending:
                    answer = one.get_result().as_numpy("last_hidden_state")
                    # rows of a joined run may be summed in another order
                    assert np.abs(answer - right).max() <= 1e-5
                wrong = tritonclient.http.InferInput("input_ids", (1, 65), "INT64")
                wrong.set_data_from_numpy(np.ones((1, 65), np.int64))
                with pytest.raises(InferenceServerException, match="takes at most 64"):
                    client.infer("small", [wrong])
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            if process.poll() is None:
                process.kill()


# Ray Serve uses names of pydantic that are to go; only its import says so
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--min-replicas", "0"), "--min-replicas is 0"),
        (("--min-replicas", "3", "--max-replicas", "2"), "expected 1 or more, and a maximum that is not smaller"),
        (("--replica-cpus", "0"), "--replica-cpus is 0"),
        (("--port", "0"), "Ray Serve cannot pick a free port"),
        (("--name", "a b"), "the model's name is 'a b'"),
    ],
)
def test_options_that_cannot_work_are_refused_before_ray_starts(
    cli: Callable[..., Any], built: Callable[..., Artifact], options: tuple[str, ...], message: str
) -> None:
    assert message in cli("serve", built("linear").path, "--ray", "--port", str(free_ports(1)[0]), *options).error(2)


def test_a_runtime_on_a_gpu_gets_one_for_each_replica() -> None:
    from effexport.serving.http.ray_deployment import ReplicaSettings

    assert ReplicaSettings().gpus("ort-cuda") == 1.0
    assert ReplicaSettings(replica_gpus=0.25).gpus("trt-rtx") == 0.25
    assert ReplicaSettings().gpus("ort") == 0.0
    with pytest.raises(UserError, match="--replica-gpus"):
        ReplicaSettings(replica_gpus=-1.0)
