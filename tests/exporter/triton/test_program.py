"""A packaged model.py in a process without this checkout, with a stand-in for what Triton gives it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import effexport
from effexport.artifact import Artifact
from effexport.serving.triton.package import PackageResult
from effexport.tasks.sampling import Sampling

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]
# Arguments: the folder of a version, the inputs of a model, and requests as JSON. Prints the answers as JSON, and the
# file of the effexport that gave them.
PROGRAM = """
import json, sys, threading, types
from pathlib import Path

import numpy as np

version, inputs, given = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
DTYPES = {"text_input": object, "text": object, "max_new_tokens": np.int32, "stream": bool}


class Tensor:
    def __init__(self, name, array):
        self.name, self.as_numpy = lambda: name, lambda: array


class TritonError(Exception):
    INVALID_ARG, UNAVAILABLE, INTERNAL, CANCELLED = "invalid", "unavailable", "internal", "cancelled"

    def __init__(self, message, code):
        self.message, self.code = message, code


class InferenceResponse:
    def __init__(self, tensors=(), error=None):
        found = {one.name(): one.as_numpy().ravel().tolist() for one in tensors}
        self.shown = {key: [v.decode() if isinstance(v, bytes) else v for v in one] for key, one in found.items()}
        if error is not None:
            self.shown = {"error": error.message, "code": error.code}


class Request:
    def __init__(self, tensors, parameters):
        arrays = {name: np.array([v.encode() if isinstance(v, str) else v for v in value], DTYPES.get(name, np.int64))
                  for name, value in tensors.items()}
        self.tensors = [Tensor(name, array if name in ("text_input", *DTYPES) else array[None]) for name, array in
                        arrays.items()]
        self.given, self.shown, self.done = parameters, [], threading.Event()

    def inputs(self):
        return self.tensors

    def parameters(self):
        return self.given

    def requested_output_names(self):
        return ["answer", "embedding"]

    def get_response_sender(self):
        return self

    def is_cancelled(self):
        return False

    def send(self, response, flags):
        self.shown.append(response.shown)
        if flags:
            self.done.set()


backend = types.SimpleNamespace(
    Tensor=Tensor, TritonError=TritonError, InferenceResponse=InferenceResponse,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1, Logger=types.SimpleNamespace(log_info=lambda text: None),
)
sys.modules["triton_python_backend_utils"] = backend
names = {"__file__": str(version / "model.py"), "__name__": "model"}
exec((version / "model.py").read_text(), names)
model = names["TritonPythonModel"]()
values = {"threads": 1, "sessions": 4, "max_queue": 0}
config = {"input": [{"name": name} for name in inputs], "max_batch_size": 8,
          "parameters": {name: {"string_value": str(value)} for name, value in values.items()}}
model.initialize({"model_config": json.dumps(config), "model_name": "m", "model_instance_kind": "CPU",
                  "model_instance_device_id": "0"})
requests = [Request(*one) for one in given]
responses = model.execute(requests)
if responses is None:
    assert all(one.done.wait(60) for one in requests)
    shown = [one.shown for one in requests]
else:
    shown = [one.shown for one in responses]
model.finalize()
print(json.dumps({"shown": shown, "effexport": sys.modules["effexport"].__file__}))
"""


def answers(version: Path, inputs: list[str], *requests: tuple[dict[str, Any], str]) -> list[Any]:
    command = [sys.executable, "-c", PROGRAM, str(version), json.dumps(inputs), json.dumps(requests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=version)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["effexport"].startswith(str(version / "effexport.zip")), "not the one that packaged the model"
    shown: list[Any] = found["shown"]
    return shown


def test_a_packaged_model_answers_with_the_effexport_beside_it(
    built: Built, package: Callable[..., PackageResult], tmp_path: Path
) -> None:
    artifact = built("linear", pool="mean")
    package(artifact, tmp_path, name="m", backends=("python",))
    right, no_text, unknown, text = answers(
        tmp_path / "m" / "1",
        ["input_ids", "attention_mask", "text", "context"],
        ({"input_ids": [5, 6, 7]}, '{"id": "7"}'),
        ({"text": [""]}, ""),
        ({"text": ["a"]}, '{"topp": 3}'),
        ({"text": ["one two"]}, '{"id": "8"}'),
    )
    with effexport.load_text(artifact.path) as model:
        wanted = model("one two")
    assert len(right["embedding"]) == len(wanted["embedding"])
    assert json.loads(text["answer"][0])["tokens"] == wanted["tokens"]
    assert text["embedding"] == pytest.approx(wanted["embedding"], abs=1e-5)
    assert (no_text["code"], unknown["code"]) == ("invalid", "invalid")
    assert "did you mean 'top'?" in unknown["error"]


def test_a_packaged_model_generates_what_effexport_itself_generates(
    built: Built, package: Callable[..., PackageResult], tmp_path: Path
) -> None:
    artifact = built("linear", causal=True, lm_head=True)
    package(artifact, tmp_path, name="m", backends=("python",))
    greedy = '{"temperature": 0, "id": "7"}'
    whole, pieces, refused = answers(
        tmp_path / "m-generate" / "1",
        ["text_input", "stream", "max_new_tokens"],
        ({"text_input": ["Once"], "max_new_tokens": [9]}, greedy),
        ({"text_input": ["Once"], "max_new_tokens": [9], "stream": [True]}, greedy),
        ({"text_input": [""]}, ""),
    )
    with effexport.load_generator(artifact.path) as generator:
        wanted = generator("Once", Sampling(max_new_tokens=9, temperature=0))
    assert [part["text_output"] for part in whole] == [[wanted.text]]
    assert whole[0]["finish_reason"] == ["length"]
    assert whole[0]["prompt_tokens"] == [wanted.prompt_tokens]
    assert "".join(part["text_output"][0] for part in pieces) == wanted.text
    assert [set(part) for part in pieces[:-1]] == [{"text_output"}] * (len(pieces) - 1)
    assert refused == [{"error": "the prompt is empty; expected text to continue", "code": "invalid"}]
