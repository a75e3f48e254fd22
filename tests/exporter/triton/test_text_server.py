"""The real tritonserver on models that read and write text: their answers are effexport's own."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept import kept
from random_tokenizers import saved_tokenizer
from serving_load import events_of, wait_until
from small_builds import what_decides_a_build
from transformers_models import TINY_OF_TEXTS, saved
from triton_server import ENVIRONMENT, ROOT, TritonServer, ask_client, environment

import effexport
from effexport.artifact import Artifact, open_artifact
from effexport.serving.triton.package import PackageResult
from effexport.tasks.sampling import Sampling

pytestmark = [
    pytest.mark.requires("torch", "onnx", "ort", "native", "transformers", "triton"),
    pytest.mark.xdist_group("triton"),
]
Built = Callable[..., Artifact]
Packaging = Callable[..., PackageResult]
CONFIG = TINY_OF_TEXTS | {"max_position_embeddings": 32}
LOADED = ("masked", "sentences", "writer-generate", "writer-slow-generate")
# Appended to a packaged model: its longest text takes 25 seconds, so that a client always leaves before the end.
SLOW_STEPS = """
import time


class TritonPythonModel(TritonPythonModel):
    def initialize(self, args):
        super().initialize(args)
        stepper = self.instance._generations._generator.stepper
        step = stepper.step
        stepper.step = lambda: time.sleep(0.05) or step()
"""
MASKED = "Paris is the [MASK] of France."
TEXTS = [("ab " * count).strip() for count in (1, 3, 9, 20, 2, 9)]


def masked_checkpoint(folder: Path) -> None:
    saved(folder / "checkpoint", "NystromformerForMaskedLM", CONFIG)
    saved_tokenizer("bert", folder / "checkpoint")
    effexport.build(checkpoint=folder / "checkpoint", output=folder / "built")


@dataclass(frozen=True)
class Running:
    server: TritonServer
    artifacts: dict[str, Artifact]
    folder: Path

    def infer(self, model: str, **inputs: Any) -> tuple[int, Any]:
        """Ask over HTTP; lists of texts are strings, other lists tokens."""
        tensors = []
        for name, values in inputs.items():
            array = np.array(values)
            datatype = "BYTES" if array.dtype.kind == "U" else "INT64"
            tensors.append({"name": name, "shape": list(array.shape), "datatype": datatype, "data": values})
        return self.server.post(f"/v2/models/{model}/infer", {"inputs": tensors})

    def generate(self, model: str, **fields: Any) -> tuple[int, Any]:
        return self.server.post(f"/v2/models/{model}/generate", fields)


@pytest.fixture(scope="module")
def running(built: Built, package: Packaging, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("texts")
    decided_by = [repr(CONFIG), *what_decides_a_build()]
    writer = built("linear", causal=True, lm_head=True, seq_len=512)
    artifacts = {
        "masked": open_artifact(kept("artifacts/masked-lm", decided_by, masked_checkpoint) / "built"),
        "sentences": built("linear", pool="mean"),
        "writer": writer,
        "writer-slow": writer,
    }
    options = {"sentences": {"queue_delay_us": 50_000}, "writer-slow": {"max_batch": 1}}
    for name, artifact in artifacts.items():
        package(artifact, folder / "models", name=name, backends=("python",), threads=1, **options.get(name, {}))
    with (folder / "models" / "writer-slow-generate" / "1" / "model.py").open("a") as model:
        model.write(SLOW_STEPS)
    with TritonServer(folder / "models", folder / "log", LOADED) as server:
        yield Running(server, artifacts, folder)


def outputs_of(answer: Any) -> dict[str, Any]:
    return {output["name"]: np.reshape(output["data"], output["shape"]) for output in answer["outputs"]}


def test_a_text_gets_the_answer_of_effexport_itself(running: Running) -> None:
    with effexport.load_text(running.artifacts["masked"].path) as model:
        expected = model(MASKED), model(MASKED, "Is it?")
    status, single = running.generate("masked", text=MASKED)
    assert status == 200, single
    _, many = running.generate("masked", text=MASKED, top=8)
    assert len(json.loads(many["answer"])) == 8
    status, answer = running.generate("masked", text=MASKED, topp=8)
    assert (status, "did you mean 'top'?" in answer["error"]) == (400, True)
    _, pair = running.infer("masked", text=[MASKED], context=["Is it?"])
    for answer, wanted in zip((single["answer"], outputs_of(pair)["answer"][0]), expected, strict=True):
        proposals = json.loads(answer)
        assert [one["token_str"] for one in proposals] == [one["token_str"] for one in wanted]
        assert [one["sequence"] for one in proposals] == [one["sequence"] for one in wanted]
        # the same kernels and the same release of ONNX Runtime
        np.testing.assert_allclose([one["score"] for one in proposals], [one["score"] for one in wanted], rtol=1e-5)


CURL = re.compile(r"^(?:\$ )?curl (?:-N )?localhost:8000(\S+)\s+(?:\\\s+)?-d '(.+)'$", re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.+?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "requests", "programs"), [("docs/triton.md", 4, 1), ("models/README.md", 4, 1)])
def test_the_examples_of_the_pages_work(running: Running, page: str, requests: int, programs: int) -> None:
    text = ((running.folder if page.startswith("models") else ROOT) / page).read_text()
    found = CURL.findall(text)
    assert len(found) == requests
    for path, body in found:
        status, answer = running.server.post(path, body.encode())
        # a page shows what an empty text gets
        assert status == (400 if '""' in body else 200), (path, body, answer)
    codes = [code for code in PYTHON.findall(text) if '"lsh"' not in code]
    assert len(codes) == programs
    for code in codes:
        code = code.replace("localhost:8000", f"127.0.0.1:{running.server.http}")
        subprocess.run([ENVIRONMENT / "bin" / "python", "-c", code], env=environment(), check=True, timeout=60)


def test_the_image_gets_tokenizers_for_an_artifact_with_a_tokenizer(running: Running) -> None:
    assert "tokenizers==" in (running.folder / "models" / "Dockerfile").read_text()
    for name, needed in (("masked", True), ("sentences", False), ("writer-generate", False)):
        record = json.loads((running.folder / "models" / name / "effexport.json").read_text())
        assert ("tokenizers" in record["packages"]) is needed


def test_texts_and_tensors_that_arrive_together_all_get_their_own_answers(running: Running) -> None:
    def ask(i: int) -> tuple[int, dict[str, Any]]:
        text = TEXTS[i % len(TEXTS)]
        if i % 3 == 0:
            status, answer = running.infer("sentences", input_ids=[[byte + 2 for byte in text.encode()]])
        else:
            others = [text, TEXTS[0]] if i % 3 == 1 else [text]
            status, answer = running.infer("sentences", text=[[one] for one in others])
        return status, outputs_of(answer)

    before = running.server.counts("sentences")
    with ThreadPoolExecutor(36) as pool:
        answers = list(pool.map(ask, range(36)))
    after = running.server.counts("sentences")
    assert after[1] - before[1] < after[0] - before[0] == 48
    with effexport.load_text(running.artifacts["sentences"].path) as model:
        expected = {text: model(text) for text in TEXTS}
    for i, (status, outputs) in enumerate(answers):
        text = TEXTS[i % len(TEXTS)]
        assert status == 200
        assert set(outputs) == ({"embedding"} if i % 3 == 0 else {"answer", "embedding"})
        # other samples in the batch only change the order of additions in a few products
        np.testing.assert_allclose(outputs["embedding"][0], expected[text]["embedding"], atol=1e-5)
        if i % 3:
            found = json.loads(outputs["answer"][0, 0])
            assert found["tokens"] == expected[text]["tokens"]
            np.testing.assert_allclose(found["embedding"], outputs["embedding"][0], atol=1e-7)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        ("masked", {"text": ["no mask"]}, "[MASK]"),
        ("masked", {"text": [""]}, "empty"),
        ("masked", {"text": [MASKED, "no mask"]}, "text 1: "),
        ("masked", {"text": [MASKED + " a" * 40]}, "32"),
        ("masked", {"text": [MASKED], "context": ["a", "b"]}, "expected a context for each text"),
        ("masked", {"context": ["a"]}, "expected text"),
        ("masked", {"text": [MASKED], "input_ids": [[1, 2]]}, "input_ids, text"),
        ("sentences", {"text": ["a"]}, "[-1,1]"),
        ("sentences", {"attention_mask": [[1]]}, "'input_ids' is missing"),
    ],
)
def test_a_bad_text_is_refused_and_the_server_lives_on(
    running: Running, model: str, inputs: dict[str, Any], message: str
) -> None:
    status, answer = running.infer(model, **inputs)
    assert status == 400, answer
    assert message in answer["error"]
    assert running.infer("masked", text=[MASKED])[0] == 200


def test_bytes_that_are_not_utf8_are_refused(running: Running) -> None:
    data = b"\x02\x00\x00\x00\xffa"
    head = {
        "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}]
    }
    body = json.dumps(head).encode()
    connection = http.client.HTTPConnection("127.0.0.1", running.server.http, timeout=60)
    headers = {"Inference-Header-Content-Length": str(len(body))}
    connection.request("POST", "/v2/models/masked/infer", body + data, headers)
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())) == (400, {"error": "text is not UTF-8: byte 0 is 0xff"})
    connection.close()


def sampling_of(i: int) -> dict[str, Any]:
    return {"max_new_tokens": 20 + 7 * i, "temperature": 0.7 if i % 4 else 0.0, "top_k": 30, "seed": i}


def test_sixteen_streams_at_the_same_time_are_effexports_own_texts(running: Running) -> None:
    def ask(i: int) -> tuple[int, bytes]:
        fields = {"text_input": f"prompt {i}", "stream": i % 2 == 0, **sampling_of(i)}
        return running.server.post("/v2/models/writer-generate/generate_stream", fields)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    with effexport.load_generator(running.artifacts["writer"].path) as generator:
        for i, (status, events) in enumerate(answers):
            assert status == 200, events
            parts = events_of(events.decode())
            expected = generator(f"prompt {i}", Sampling(**sampling_of(i)))
            assert "".join(part["text_output"] for part in parts) == expected.text
            assert [part.get("finish_reason") for part in parts] == [None] * (len(parts) - 1) + ["length"]
            assert i % 2 == 0 or len(parts) == 1


def test_one_answer_over_http_and_many_over_one_grpc_stream(running: Running) -> None:
    with effexport.load_generator(running.artifacts["writer"].path) as generator:
        expected = [generator(prompt, Sampling(max_new_tokens=30, seed=3)).text for prompt in ("one", "two", "three")]
    status, answer = running.generate("writer-generate", text_input="one", max_tokens=30, seed=3, id="7")
    assert (status, answer["text_output"], answer["finish_reason"]) == (200, expected[0], "length")
    assert (answer["prompt_tokens"], answer["seed"], answer["id"]) == (3, 3, "7")
    job = {
        "url": f"127.0.0.1:{running.server.grpc}",
        "model": "writer-generate",
        "prompts": ["one", "two", "three"],
        "parameters": {"max_tokens": [30] * 3, "seed": [3] * 3},
    }
    answers = ask_client("stream", running.folder, job)
    assert ["".join(answer["pieces"]) for answer in answers] == expected
    assert {answer["finish_reason"] for answer in answers} == {"length"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_input": ""}, "the prompt is empty"),
        ({"text_input": "a" * 512}, "positions for 512"),
        ({"text_input": "a", "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"text_input": "a", "temperature": -1}, "temperature is -1"),
        ({"text_input": "a", "max_token": 5}, "did you mean 'max_tokens'?"),
        ({"max_tokens": 5}, "'text_input'"),
    ],
)
def test_a_bad_prompt_is_refused_over_http_and_grpc(running: Running, fields: dict[str, Any], message: str) -> None:
    status, answer = running.generate("writer-generate", **fields)
    assert status == 400, answer
    assert message in answer["error"]
    if "text_input" in fields:
        parameters = {name: [value] for name, value in fields.items() if name not in ("text_input", "temperature")}
        job = {
            "url": f"127.0.0.1:{running.server.grpc}",
            "model": "writer-generate",
            "prompts": [fields["text_input"]],
            "parameters": parameters,
        }
        if "temperature" not in fields:
            assert message in ask_client("stream", running.folder, job)[0]["error"]
    assert running.generate("writer-generate", text_input="a", max_new_tokens=1)[0] == 200


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_stream_whose_client_leaves_ends(running: Running, protocol: str) -> None:
    count = 490 if protocol == "http" else 491
    fields = {"text_input": "once", "stream": True, "max_new_tokens": count}
    if protocol == "http":
        connection = http.client.HTTPConnection("127.0.0.1", running.server.http, timeout=60)
        connection.request("POST", "/v2/models/writer-slow-generate/generate_stream", json.dumps(fields))
        answer = connection.getresponse()
        assert answer.read(5) == b"data:"
        answer.close()
        connection.close()
    else:
        job = {
            "url": f"127.0.0.1:{running.server.grpc}",
            "model": "writer-slow-generate",
            "prompts": ["once"],
            "parameters": {"max_new_tokens": [count]},
            "leave_after": 1,
        }
        ask_client("stream", running.folder, job)
    # this model generates one text at a time, so the next one waits for the end of the first
    status, answer = running.generate("writer-slow-generate", text_input="b", max_new_tokens=2)
    assert status == 200, answer
    wait_until(lambda: f" of {count} tokens" in running.server.log.read_text(), 60)
    (line,) = [line for line in running.server.log.read_text().splitlines() if f" of {count} tokens" in line]
    assert "the client has gone after" in line
