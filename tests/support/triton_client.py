"""Runs in .venv-triton, where NVIDIA's client is: COMMAND FOLDER JOB; prints one JSON value. See triton_server.py."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np


def infer(folder: Path, job: dict[str, Any]) -> dict[str, str]:
    """Send all requests of inputs.npz at once; outputs.npz gets the answers, the result has the errors."""
    if job["protocol"] == "http":
        import tritonclient.http as client
    else:
        import tritonclient.grpc as client
    from tritonclient.utils import InferenceServerException, np_to_triton_dtype

    file = np.load(folder / "inputs.npz")
    arrays = {name: file[name] for name in file.files}
    outputs: dict[str, Any] = {}
    errors: dict[str, str] = {}
    # a connection for each request: the HTTP client may be used by one thread only
    servers = [client.InferenceServerClient(job["url"]) for _ in range(job["count"])]

    def send(i: int) -> None:
        inputs = []
        for name, value in arrays.items():
            if name.startswith(f"{i}/"):
                tensor = client.InferInput(name.split("/", 1)[1], list(value.shape), np_to_triton_dtype(value.dtype))
                tensor.set_data_from_numpy(value)
                inputs.append(tensor)
        try:
            answer = servers[i].infer(job["model"], inputs, model_version=job["version"])
        except InferenceServerException as error:
            errors[str(i)] = f"{error.status()}: {error.message()}"
            return
        described = answer.get_response(as_json=True) if job["protocol"] == "grpc" else answer.get_response()
        for output in described["outputs"]:
            outputs[f"{i}/{output['name']}"] = answer.as_numpy(output["name"])

    with ThreadPoolExecutor(job["count"]) as pool:
        list(pool.map(send, range(job["count"])))
    np.savez(folder / "outputs.npz", **outputs)
    return errors


def stream(folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Send several prompts to a model that generates, over one gRPC stream; its answers, in pieces, by prompt.

    A job with `leave_after` cancels the stream after so many responses.
    """
    import queue

    import tritonclient.grpc as client

    answers: list[dict[str, Any]] = [{"pieces": [], "finish_reason": None, "error": None} for _ in job["prompts"]]
    responses: queue.Queue[Any] = queue.Queue()
    server = client.InferenceServerClient(job["url"])
    server.start_stream(lambda result, error: responses.put((result, error)))
    for i, prompt in enumerate(job["prompts"]):
        inputs = [client.InferInput("text_input", [1], "BYTES"), client.InferInput("stream", [1], "BOOL")]
        inputs[0].set_data_from_numpy(np.array([prompt.encode()], dtype=object))
        inputs[1].set_data_from_numpy(np.array([True]))
        parameters = {name: value[i] for name, value in job["parameters"].items()}
        server.async_stream_infer(job["model"], inputs, request_id=str(i), parameters=parameters)
    left, seen = len(answers), 0
    while left and seen != job.get("leave_after"):
        result, error = responses.get(timeout=60)
        seen += 1
        if error is not None:
            answers[0]["error"] = error.message()
            break
        answer = answers[int(result.get_response().id)]
        answer["pieces"].append(result.as_numpy("text_output")[0].decode())
        reason = result.as_numpy("finish_reason")
        if reason is not None:
            answer["finish_reason"] = reason[0].decode()
            left -= 1
    server.stop_stream(cancel_requests=bool(left))
    return answers


def parse(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Every config.pbtxt of a repository, read by the text format parser of protobuf with Triton's own messages."""
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import model_config_pb2

    return {
        path.parent.name: json_format.MessageToDict(
            text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig()),
            preserving_proto_field_name=True,
        )
        for path in sorted(folder.glob("*/config.pbtxt"))
    }


def load(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Open an artifact with the effexport of a packaged model, and say which frameworks that took."""
    version = Path(job["version"])
    sys.path.insert(0, str(version / "effexport.zip"))
    import effexport

    with effexport.load(version / "artifact", effexport.RunOptions(implementation="body")) as runner:
        names = [tensor.name for tensor in runner.inputs]
    return {
        "inputs": names,
        "effexport": str(effexport.__file__),
        "numpy": np.__version__,
        "torch": "torch" in sys.modules,
    }


COMMANDS = {"infer": infer, "stream": stream, "parse": parse, "load": load}

if __name__ == "__main__":
    print(json.dumps(COMMANDS[sys.argv[1]](Path(sys.argv[2]), json.loads(sys.argv[3]))))
