"""`generate` and `generate_stream` of a server in a process of its own, against the same generator without a server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving_load import ServerProcess, events_of, running_server, wait_until

import effexport
from effexport.artifact import Artifact
from effexport.tasks.text_generator import Generation, TextGenerator

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
SESSIONS = 64


@pytest.fixture(scope="module")
def writer(built: Callable[..., Artifact]) -> Artifact:
    return built("linear", causal=True, lm_head=True)


@pytest.fixture(scope="module")
def server(
    writer: Artifact, built: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """It has a model that generates and one that does not."""
    folder, other = tmp_path_factory.mktemp("server"), str(built("linear").path)
    with running_server(writer.path, folder, other, "--name", "writer", "--name", "reader") as running:
        yield running


@pytest.fixture(scope="module")
def generator(writer: Artifact) -> Iterator[TextGenerator]:
    with effexport.load_generator(writer.path) as generator:
        yield generator


def asked(server: ServerProcess, path: str, body: object) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of the answer to a POST."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", f"/v2/models/{path}", json.dumps(body))
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, headers, answer.read().decode()
    finally:
        connection.close()


def fields_of(number: int) -> dict[str, Any]:
    """The parameters of text number …: greedy or sampled, long or short."""
    return {"max_new_tokens": 20 + number % 30, "temperature": (number % 3) * 0.8, "seed": number}


def test_a_whole_answer_is_that_of_the_generator(server: ServerProcess, generator: TextGenerator) -> None:
    fields = {"max_new_tokens": 20, "temperature": 0.9, "top_k": 60, "seed": 4}
    expected = generator("Grüße", effexport.Sampling(**fields))
    body = {"text_input": "Grüße", "id": "a1", "parameters": fields}
    status, headers, text = asked(server, "writer/versions/1/generate", body)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(text) == {
        "model_name": "writer",
        "model_version": "1",
        "id": "a1",
        "text_output": expected.text,
        "tokens": list(expected.tokens),
        "finish_reason": "length",
        "prompt_tokens": 7,
        "seed": 4,
    }


def test_64_texts_at_once_whole_and_as_events_have_no_wrong_token(
    server: ServerProcess, generator: TextGenerator
) -> None:
    def answer(number: int) -> tuple[list[int], str]:
        body = {"text_input": f"text {number}", **fields_of(number)}
        verb = "generate_stream" if number % 2 else "generate"
        status, headers, text = asked(server, f"writer/{verb}", body)
        assert status == 200, text
        if number % 2:
            assert headers["content-type"].startswith("text/event-stream")
        parts = events_of(text) if number % 2 else [json.loads(text)]
        assert [part.get("finish_reason") for part in parts] == [None] * (len(parts) - 1) + ["length"]
        return [token for part in parts for token in part["tokens"]], "".join(part["text_output"] for part in parts)

    def alone(number: int) -> tuple[list[int], str]:
        found: Generation = generator(f"text {number}", effexport.Sampling(**fields_of(number)))
        return list(found.tokens), found.text

    steps = "effexport_generation_step_seconds_count"
    before = server.metric(steps)
    with ThreadPoolExecutor(SESSIONS) as pool:
        answers = list(pool.map(answer, range(SESSIONS)))
    assert answers == [alone(number) for number in range(SESSIONS)]
    tokens = sum(len(tokens) for tokens, _ in answers)
    assert server.metric(steps) - before < tokens, "texts shared steps"
    assert server.metric("effexport_generation_sessions") == 0


def test_a_stream_whose_client_goes_is_dropped(server: ServerProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v2/models/writer/generate_stream", json.dumps({"text_input": "x", "seed": 1}))
    connection.close()
    wait_until(lambda: not server.metric("effexport_generation_sessions"))


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("reader/generate", {"text_input": "x"}, 400, "model 'reader' does not generate: "),
        ("nobody/generate", {"text_input": "x"}, 404, "no model 'nobody'"),
        ("writer/generate", {"text_input": ""}, 400, "the prompt is empty; expected text to continue"),
        ("writer/generate_stream", {"text_input": "x" * 64}, 400, "this model has positions for 64: shorten"),
        ("writer/generate", {"text_input": "x" * 300_000}, 400, "has 300000 bytes; expected at most 262144"),
        ("writer/generate_stream", {"text_input": "\ud800"}, 400, "the request is not JSON"),
    ],
)
def test_mistakes_are_refused_before_a_stream_begins(
    server: ServerProcess, path: str, body: object, status: int, message: str
) -> None:
    found, _, text = asked(server, path, body)
    assert found == status
    assert message in json.loads(text)["error"]
