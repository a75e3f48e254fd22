"""The client of the field, unchanged, against `effexport serve` as users start it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_load import ServerProcess, running_server, token_ids

import effexport
from effexport.artifact import Artifact

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "serve"), pytest.mark.xdist_group("serving")]
Feeds = dict[str, Any]
Expected = Callable[[Feeds], Feeds]
# rounding of float32 where rows of a joined run are summed in another order
JOINED_LIMIT = 1e-5


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    import tritonclient.http

    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=8) as client:
        yield client


def inputs_of(feeds: Feeds, *, binary: bool = True) -> list[Any]:
    from tritonclient.http import InferInput

    datatypes = {"int64": "INT64", "float32": "FP32", "float16": "FP16"}
    inputs = []
    for name, value in feeds.items():
        one = InferInput(name, value.shape, datatypes[value.dtype.name])
        one.set_data_from_numpy(value, binary_data=binary)
        inputs.append(one)
    return inputs


def refusal(client: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    """Status and message of a request that must be refused."""
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException) as refused:
        client.infer(*arguments, **options)
    return refused.value.status(), refused.value.message()


def test_health_metadata_and_index_are_those_of_the_artifact(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("small")
    assert client.is_model_ready("small", "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "effexport"
    assert client.get_server_metadata()["version"] == effexport.__version__
    metadata = client.get_model_metadata("small")
    assert metadata == client.get_model_metadata("small", "1")
    assert metadata["versions"] == ["1"]
    assert metadata["inputs"] == [
        {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1]},
    ]
    assert metadata["outputs"] == [{"name": "last_hidden_state", "datatype": "FP32", "shape": [-1, -1, 32]}]
    assert client.get_model_repository_index() == [{"name": "small", "version": "1", "state": "READY", "reason": ""}]


@pytest.mark.parametrize("binary_input", [True, False])
@pytest.mark.parametrize("binary_output", [True, False, None])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_every_encoding_gets_the_runners_answer_exactly(
    client: Any, expected: Expected, binary_input: bool, binary_output: bool | None, compression: str | None
) -> None:
    from tritonclient.http import InferRequestedOutput

    feeds = {"input_ids": token_ids(2, 40)}
    outputs = None
    if binary_output is not None:
        outputs = [InferRequestedOutput("last_hidden_state", binary_data=binary_output)]
    result = client.infer(
        "small",
        inputs_of(feeds, binary=binary_input),
        outputs=outputs,
        request_id="mine",
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )
    answer = result.as_numpy("last_hidden_state")
    assert answer.dtype == np.float32
    # nothing else is running, so the same numbers go through the same operators
    assert np.array_equal(answer, expected(feeds)["last_hidden_state"])
    assert result.get_response()["id"] == "mine"
    assert result.get_response()["model_name"] == "small"
    assert result.get_response()["model_version"] == "1"


def test_a_mask_is_taken_and_padding_changes_nothing(client: Any, expected: Expected) -> None:
    feeds = {"input_ids": token_ids(1, 30), "attention_mask": np.ones((1, 30), np.int64)}
    feeds["attention_mask"][:, 20:] = 0
    answer = client.infer("small", inputs_of(feeds), model_version="1").as_numpy("last_hidden_state")
    assert np.array_equal(answer, expected(feeds)["last_hidden_state"])
    alone = expected({"input_ids": feeds["input_ids"][:, :20]})["last_hidden_state"]
    assert np.abs(answer[:, :20] - alone).max() <= JOINED_LIMIT


def test_requests_at_once_are_joined_and_each_gets_its_own_answer(
    client: Any, server: ServerProcess, expected: Expected
) -> None:
    before = server.batch_sizes()
    feeds = [{"input_ids": token_ids(1, (24, 48)[seed % 2], seed)} for seed in range(96)]
    pending = [client.async_infer("small", inputs_of(one)) for one in feeds]
    for one, waiting in zip(feeds, pending, strict=True):
        answer = waiting.get_result().as_numpy("last_hidden_state")
        right = expected(one)["last_hidden_state"]
        assert answer.shape == right.shape
        assert np.abs(answer - right).max() <= JOINED_LIMIT
    sizes = server.batch_sizes() - before
    assert sum(size * count for size, count in sizes.items()) == 96
    assert max(sizes) > 1, sizes


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"input_ids": token_ids(1, 65)}, "seq is 65; this server takes at most 64"),
        ({"input_ids": token_ids(9, 8)}, "batch is 9; this server takes at most 8"),
        ({"input_ids": np.full((1, 8), 258)}, "expected 0 to 257"),
        ({"input_ids": np.zeros((1, 8), np.float32)}, "has datatype 'FP32'; expected INT64"),
        ({"tokens": token_ids(1, 8)}, "unknown input 'tokens'"),
        ({"attention_mask": token_ids(1, 8)}, "input 'input_ids' is missing"),
        ({"input_ids": token_ids(1, 8), "attention_mask": token_ids(1, 8)}, "values other than 0 and 1"),
    ],
)
def test_wrong_inputs_raise_the_clients_exception_with_what_was_expected(
    client: Any, feeds: Feeds, message: str
) -> None:
    status, text = refusal(client, "small", inputs_of(feeds))
    assert status == "400"
    assert message in text


def test_a_wrong_model_version_or_output_is_named(client: Any) -> None:
    from tritonclient.http import InferRequestedOutput

    inputs = inputs_of({"input_ids": token_ids(2, 40)})
    assert refusal(client, "other", inputs) == ("404", "no model 'other'; this server has 'small'")
    assert refusal(client, "small", inputs, model_version="2")[0] == "404"
    status, text = refusal(client, "small", inputs, outputs=[InferRequestedOutput("logits")])
    assert status == "400"
    assert "unknown output 'logits'" in text


@pytest.mark.slow
@pytest.mark.requires("transformers")
def test_several_outputs_and_half_precision_are_served_as_they_are_asked_for(
    cli: Callable[..., Any], built: Callable[..., Artifact], tmp_path: Path
) -> None:
    """And requests to a checkpoint never share a run: published Nyströmformer models mix the samples of a batch."""
    from transformers_models import TINY_NYSTROMFORMER, saved
    from tritonclient.http import InferenceServerClient, InferRequestedOutput

    from effexport.artifact import open_artifact

    saved(tmp_path / "checkpoint", "NystromformerForQuestionAnswering", TINY_NYSTROMFORMER)
    assert cli("build", "--checkpoint", tmp_path / "checkpoint", "-o", tmp_path / "two").code == 0
    artifact, half = open_artifact(tmp_path / "two"), built("linear", "attention", precision="fp16")
    names = [tensor.name for tensor in artifact.spec.outputs]
    assert len(names) > 1
    rng = np.random.default_rng(0)
    feeds = {"input_ids": rng.integers(3, 60, (2, 20))}
    halves = {"hidden_states": rng.standard_normal((2, 33, 32)).astype(np.float16)}
    with effexport.load(artifact.path) as runner, effexport.load(half.path) as second:
        right, right_half = runner.run(feeds), second.run(halves)["last_hidden_state"]
    with (
        running_server(artifact.path, tmp_path, str(half.path), "--name", "two", "--name", "half") as server,
        InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=8) as client,
    ):
        assert "padding and other samples may affect the result" in server.log.read_text()
        for wanted in (None, names[1:], names[::-1]):
            outputs = wanted and [InferRequestedOutput(name, binary_data=i == 0) for i, name in enumerate(wanted)]
            result = client.infer("two", inputs_of(feeds), outputs=outputs)
            assert [output["name"] for output in result.get_response()["outputs"]] == (wanted or names)
            for name in wanted or names:
                assert np.array_equal(result.as_numpy(name), right[name])
        pending = [client.async_infer("two", inputs_of(feeds)) for _ in range(8)]
        assert all(np.array_equal(one.get_result().as_numpy(names[0]), right[names[0]]) for one in pending)
        assert set(server.batch_sizes()) == {2}
        answer = client.infer("half", inputs_of(halves)).as_numpy("last_hidden_state")
        assert answer.dtype == np.float16
        assert np.array_equal(answer, right_half)
        output = InferRequestedOutput("last_hidden_state", binary_data=False)
        assert "which JSON cannot represent" in refusal(client, "half", inputs_of(halves), outputs=[output])[1]
