"""Texts over HTTP: as BYTES inputs beside tensors, and as OpenAI's embeddings, against transformers and the runner."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept import kept
from random_tokenizers import saved_tokenizer
from serving_fuzz import malformed_texts
from serving_load import (
    Reply,
    Sample,
    ServerProcess,
    check_malformed,
    exchange_once,
    json_of,
    post,
    running_server,
    samples_of,
)
from serving_traffic import SCORE_LIMIT, VECTOR_LIMIT, Oracle, check_load, mixed_traffic, sized, text_input
from small_builds import what_decides_a_build
from transformers_models import TINY_OF_TEXTS, saved

import effexport
from effexport.artifact import Artifact

pytestmark = [
    pytest.mark.requires("torch", "onnx", "ort", "serve", "transformers"),
    pytest.mark.xdist_group("serving"),
    # the pipeline of transformers converts tensors as an older numpy did
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
NAMES = ("fill", "ask", "pooled", "layer", "writer")
CONFIG = TINY_OF_TEXTS | {"max_position_embeddings": 64}
MASKED = ("Paris is the [MASK] of France.", "The quick [MASK] fox doesn't jump over the lazy dog", "[MASK] are kept")
QUESTION = ("Is it 42?", "Two spaces, tabs and brackets are kept, or not. Is it 42 or 1,024? We're here.")


def checkpoints(folder: Path) -> None:
    for name, kind in (("fill", "NystromformerForMaskedLM"), ("ask", "NystromformerForQuestionAnswering")):
        saved(folder / "checkpoints" / name, kind, CONFIG)
        saved_tokenizer("bert-with-words", folder / "checkpoints" / name)
        effexport.build(checkpoint=folder / "checkpoints" / name, output=folder / name, seq_len=64)


@pytest.fixture(scope="module")
def read() -> Path:
    """A folder with artifacts of two checkpoints: `fill` fills masks, `ask` answers questions."""
    return kept("artifacts/texts", what_decides_a_build(), checkpoints)


@pytest.fixture(scope="module")
def pooled(built: Callable[..., Artifact]) -> Artifact:
    """A byte-level encoder of 64 tokens whose answer is one vector of 32 channels."""
    return built("linear", pool="cls")


@pytest.fixture(scope="module")
def reading(
    read: Path, pooled: Artifact, built: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """It also has a model that generates, and may load "guest"."""
    others = (
        read / "ask",
        pooled.path,
        built("linear", "attention").path,
        built("linear", causal=True, lm_head=True).path,
    )
    names = [option for name in NAMES for option in ("--name", name)]
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(built("aft-simple").path, folder / "guest")
    (folder / "leads-out").symlink_to(pooled.path)
    options = (*map(str, others), *names, "--allow-load", str(folder))
    with running_server(read / "fill", tmp_path_factory.mktemp("server"), *options) as running:
        yield running


@pytest.fixture(scope="module")
def pipeline(read: Path) -> Callable[[str], Any]:
    import transformers

    return lambda task: transformers.pipeline(
        task, str(read / "checkpoints" / {"fill-mask": "fill", "question-answering": "ask"}[task]), device="cpu"
    )


@pytest.fixture(scope="module")
def oracle(pooled: Artifact, built: Callable[..., Artifact], pipeline: Callable[[str], Any]) -> Iterator[Oracle]:
    with effexport.load(pooled.path) as first, effexport.load(built("linear", "attention").path) as second:

        def only_output(runner: Any, feeds: dict[str, Any]) -> Any:
            (output,) = runner.run(feeds).values()
            return output

        yield Oracle(
            pipeline("fill-mask"),
            pipeline("question-answering"),
            partial(only_output, first),
            partial(only_output, second),
        )


@pytest.fixture(scope="module")
def vector(oracle: Oracle) -> Callable[[str], Any]:
    """text → the vector of its bytes, each of which is a token, as the runner computes it."""
    return oracle.vector


@pytest.fixture(scope="module")
def traffic(oracle: Oracle) -> list[Sample]:
    return mixed_traffic(oracle)


@pytest.fixture(scope="module")
def guest(built: Callable[..., Artifact]) -> list[Sample]:
    """Requests to the model that the server may load."""
    with effexport.load(built("aft-simple").path) as runner:
        return samples_of(runner.run, (16, 40, 64), "guest")


def ask(server: ServerProcess, path: str, fields: object, headers: str = "", data: bytes = b"") -> Reply:
    head = json.dumps(fields).encode()
    headers += f"Inference-Header-Content-Length: {len(head)}\r\n" if data else ""
    return asyncio.run(exchange_once(server.port, post(path, head + data, headers)))


def binary_input(data: bytes) -> dict[str, Any]:
    """Two texts, as binary data."""
    return {"name": "text", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}


def infer(server: ServerProcess, model: str, *inputs: dict[str, Any], **fields: Any) -> Any:
    """The outputs of a request by name."""
    reply = ask(server, f"/v2/models/{model}/infer", {"inputs": inputs, **fields})
    assert reply.status == 200, reply
    return {output["name"]: output for output in json_of(reply)["outputs"]}


def answers(server: ServerProcess, model: str, *inputs: dict[str, Any], **parameters: Any) -> list[Any]:
    return list(map(json.loads, infer(server, model, *inputs, parameters=parameters)["answer"]["data"]))


def embed(server: ServerProcess, **fields: Any) -> Reply:
    return ask(server, "/v1/embeddings", {"model": "pooled", **fields})


def assert_same_masks(given: Any, right: Any) -> None:
    assert [entry["token"] for entry in given] == [entry["token"] for entry in right]
    for one, other in zip(given, right, strict=True):
        assert abs(one["score"] - other["score"]) <= SCORE_LIMIT
        assert (one["token_str"], one["sequence"]) == (other["token_str"], other["sequence"])


def test_texts_are_answered_as_transformers_pipeline_answers_them(
    reading: ServerProcess, pipeline: Callable[[str], Any]
) -> None:
    right = pipeline("fill-mask")
    # more texts than rows of a run, of different lengths
    for given, text in zip(answers(reading, "fill", text_input([*MASKED] * 4)), [*MASKED] * 4, strict=True):
        assert_same_masks(given, right(text))
    (two,) = answers(reading, "fill", text_input([MASKED[0]], shape=[1, 1]), top=2)
    assert_same_masks(two, right(MASKED[0], top_k=2))

    question, context = QUESTION
    inputs = text_input([question]), text_input([context], "context")
    (answer,) = answers(reading, "ask", *inputs)
    expected = pipeline("question-answering")(question=question, context=context)
    assert abs(answer.pop("score") - expected.pop("score")) <= SCORE_LIMIT
    assert answer == expected


def test_texts_and_answers_travel_as_binary_data_too(reading: ServerProcess, vector: Callable[[str], Any]) -> None:
    texts = ["Paris", "naïve 漢字"]
    data = sized(*(text.encode() for text in texts))
    fields = {"inputs": [binary_input(data)], "parameters": {"binary_data_output": True}, "id": "7"}
    reply = ask(reading, "/v2/models/pooled/infer", fields, data=data)
    described = json_of(reply)
    assert described["id"] == "7"
    assert [(one["name"], one["datatype"], one["shape"]) for one in described["outputs"]] == [
        ("answer", "BYTES", [2]),
        ("embedding", "FP32", [2, 32]),
    ]
    size = described["outputs"][0]["parameters"]["binary_data_size"]
    body = reply.body[reply.header_length :]
    vectors = np.frombuffer(body[size:], np.float32).reshape(2, 32)
    for text, found in zip(texts, vectors, strict=True):
        assert np.abs(found - vector(text)).max() <= VECTOR_LIMIT
    (length,) = struct.unpack_from("<I", body)
    answer = json.loads(body[4 : 4 + length])
    assert answer["tokens"] == len(texts[0].encode())
    assert answer["embedding"] == vectors[0].tolist()


def test_tritonclient_sends_texts_as_arrays_of_objects(reading: ServerProcess, vector: Callable[[str], Any]) -> None:
    import tritonclient.http

    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{reading.port}") as client:
        parameters = client.get_model_metadata("fill")["parameters"]
        assert parameters["task"] == "fill-mask"
        assert [one["name"] for one in parameters["text_inputs"]] == ["text"]
        assert "top" in parameters["text_parameters"]
        text = tritonclient.http.InferInput("text", [1], "BYTES")
        text.set_data_from_numpy(np.array(["Lyon"], dtype=object))
        found = client.infer("pooled", [text], outputs=[tritonclient.http.InferRequestedOutput("embedding")])
        assert np.abs(found.as_numpy("embedding")[0] - vector("Lyon")).max() <= VECTOR_LIMIT


@pytest.mark.parametrize(
    ("model", "inputs", "fields", "message"),
    [
        ("pooled", sized(b"good", b"\xff\xfe"), {}, "text 1: text is not UTF-8: byte 0 is 0xff"),
        ("pooled", sized(b"good", b"bad")[:-1], {}, "ends within element 1"),
        ("pooled", sized(b"good") + b"\xff\xff\xff\xff", {}, "ends within element 1"),
        ("pooled", sized(b"good", b"bad", b"more"), {}, "has 8 bytes after its 2 strings"),
        ("fill", [text_input(["no mask"])], {}, "the text has no [MASK]"),
        ("fill", [text_input([*MASKED, "no mask"])], {}, "text 3: the text has no [MASK]"),
        ("pooled", [text_input([""])], {}, "the text is empty"),
        ("pooled", [text_input(["x" * 65])], {}, "65 tokens"),
        ("fill", [text_input(["[MASK] a " * 40])], {}, "this model takes 64"),
        ("pooled", [text_input(["x" * 300_000])], {}, "text has 300000 bytes; expected at most"),
        ("pooled", [text_input([7])], {}, "text is 7; expected a string"),
        ("pooled", [text_input(["a"], shape=[2])], {}, "has 1 elements; its shape [2] has 2"),
        ("pooled", [text_input(["a"], shape=[1, 2])], {}, "expected [n] or [n, 1], for n texts"),
        ("pooled", [text_input(["a"], datatype="INT64")], {}, "has datatype 'INT64'; expected BYTES"),
        ("pooled", [text_input(["a"] * 5000)], {}, "has the shape [5000]; expected 1 to 2048 texts"),
        ("pooled", [text_input(["a"], shape=[5000])], {}, "has 1 elements; its shape [5000] has 5000"),
        ("pooled", [text_input(["a"]), text_input([1], "input_ids", datatype="INT64", shape=[1, 1])], {},
         "the request has input_ids, text; expected text, with or without context, or the model's tensors"),
        ("pooled", [text_input(["a"])], {"outputs": [{"name": "last"}]}, "Expected: answer, embedding"),
        ("pooled", [text_input(["a"])], {"parameters": {"top": 0}}, "top is 0; expected at least 1"),
        ("ask", [text_input(["a"]), text_input(["b " * 60_000], "context")], {"parameters": {"stride": 59}},
         "tokens in all; expected at most 2097152: share fewer tokens"),
        ("ask", [text_input(["a"]), text_input(["b " * 10_000], "context")], {"parameters": {"stride": 56}},
         "windows; expected at most 2048: send it in parts"),
        ("ask", [text_input(["a"])], {}, "question-answering needs two texts"),
        ("layer", [text_input(["a"])], {}, "model 'layer' does not read text"),
        ("pooled", [{"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [5, 6, 258]}], {},
         "input_ids contains 258; expected 0 to 257; see input_ids[0, 2]"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_answered_are_refused_with_the_reason(
    reading: ServerProcess, model: str, inputs: list[dict[str, Any]] | bytes, fields: dict[str, Any], message: str
) -> None:
    """inputs: or the binary data of two texts."""
    data = inputs if isinstance(inputs, bytes) else b""
    given = [binary_input(data)] if data else inputs
    reply = ask(reading, f"/v2/models/{model}/infer", {"inputs": given, **fields}, data=data)
    assert reply.status == 400
    assert message in json_of(reply)["error"]


def test_embeddings_have_the_form_of_openai(reading: ServerProcess, vector: Callable[[str], Any]) -> None:
    texts = ["Paris", "is the capital of France"]
    tokens = [[b + 2 for b in text.encode()] for text in texts]
    for given, count in ((texts, 2), (tokens, 2), (texts[0], 1), (tokens[0], 1)):
        body = json_of(embed(reading, input=given, dimensions=32, user="somebody"))
        assert (body["object"], body["model"]) == ("list", "pooled")
        assert [(one["object"], one["index"]) for one in body["data"]] == [("embedding", i) for i in range(count)]
        total = sum(map(len, tokens[:count]))
        assert body["usage"] == {"prompt_tokens": total, "total_tokens": total}
        for one, text in zip(body["data"], texts, strict=False):
            assert np.abs(np.array(one["embedding"]) - vector(text)).max() <= VECTOR_LIMIT
    (packed,) = json_of(embed(reading, input=texts[1], encoding_format="base64"))["data"]
    values = np.frombuffer(base64.b64decode(packed["embedding"]), "<f4")
    assert np.abs(values - vector(texts[1])).max() <= VECTOR_LIMIT
    models = json.loads(reading.get("/v1/models"))
    assert [one["id"] for one in models["data"]] == [*NAMES]
    assert json.loads(reading.get("/v1/models/pooled"))["object"] == "model"


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"input": "a", "model": "absent"}, 404, None, "no model 'absent'"),
        ({"input": "a", "model": "fill"}, 400, "model", "'fill' answers fill-mask, not embeddings"),
        ({"input": "a", "model": "layer"}, 400, None, "does not read text"),
        ({"input": "a", "model": None}, 400, "model", "expected the name of a model"),
        ({"input": "a", "dimensions": 16}, 400, "dimensions", "dimensions is 16; 'pooled' has 32"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format", "expected float or base64"),
        ({"input": "a", "dimension": 32}, 400, "dimension", "unknown field 'dimension'"),
        ({}, 400, "input", "input is None; expected a string"),
        ({"input": []}, 400, "input", "input is []; expected a string"),
        ({"input": ""}, 400, None, "the text is empty"),
        ({"input": ["a", ""]}, 400, None, "text 1: the text is empty"),
        ({"input": ["a", 7]}, 400, "input", "element 1 of input is 7; expected a string"),
        ({"input": [[5, 258]]}, 400, None, "input_ids contains 258; expected 0 to 257; see input_ids[0, 1]"),
        ({"input": [5, 2**70]}, 400, "input", "at 1; expected tokens of the vocabulary"),
        ({"input": [[5], "a"]}, 400, "input", "element 1 of input is 'a'; expected a list of tokens"),
        ({"input": [5] * 65}, 400, None, "the input has 65 tokens; this model takes 64"),
        ({"input": ["a"] * 3000}, 400, "input", "input has 3000 texts; expected at most 2048"),
    ],
)
def test_embeddings_that_cannot_be_made_are_refused_in_the_form_of_openai(
    reading: ServerProcess, fields: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    reply = embed(reading, **fields)
    assert reply.status == status
    error = json_of(reply)["error"]
    assert message in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert set(error) == {"message", "type", "param", "code"}


def test_what_openai_has_and_this_server_does_not_is_refused_in_the_form_of_openai(reading: ServerProcess) -> None:
    reply = ask(reading, "/v1/chat/completions", {"model": "pooled"})
    assert reply.status == 404
    assert json_of(reply)["error"]["message"] == "POST /v1/chat/completions: Not Found"


def test_malformed_requests_each_get_a_4xx_with_one_message_and_nothing_leaks(
    reading: ServerProcess, traffic: list[Sample]
) -> None:
    # requests have half a megabyte at most; the allocator keeps some of what was freed
    check_malformed(reading, malformed_texts("pooled", 450), 90, 16 << 20)
    check_load(reading.port, traffic, 120)


def test_requests_to_four_models_are_neither_lost_nor_wrong_while_another_comes_and_goes(
    reading: ServerProcess, traffic: list[Sample], guest: list[Sample]
) -> None:
    check_load(reading.port, traffic, 240, guest)


@pytest.mark.soak
def test_10000_requests_to_four_models_are_neither_lost_nor_wrong_while_another_comes_and_goes(
    reading: ServerProcess, traffic: list[Sample], guest: list[Sample]
) -> None:
    check_load(reading.port, traffic, 1000, guest)
    rss, files = reading.rss_bytes, reading.open_files
    summary = check_load(reading.port, traffic, 10_000, guest)
    print(f"{summary}; resident {rss >> 20} → {reading.rss_bytes >> 20} MiB")
    assert reading.rss_bytes - rss < 32 << 20
    assert reading.open_files <= files + 1
    assert reading.metric("effexport_queue_depth") == 0
    assert "Traceback" not in reading.log.read_text()
