"""Valid and invalid requests: bodies without a server."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from effexport.base.dtypes import TensorInfo
from effexport.base.errors import UserError
from effexport.base.spec import BuildSpec
from effexport.serving.engine.errors import RequestError
from effexport.serving.engine.settings import ServingSettings
from effexport.serving.engine.signature import ServedSignature, example_shape, signature_from_spec
from effexport.serving.http.bodies import InferRequest, answer_from_outputs, infer_request, json_length

pytestmark = pytest.mark.requires("serve")


@pytest.fixture
def signature(small_spec: Callable[..., BuildSpec]) -> ServedSignature:
    return signature_from_spec(small_spec("linear"), ServingSettings(max_batch=4))


@pytest.fixture
def hidden_signature(small_spec: Callable[..., BuildSpec]) -> Callable[[str], ServedSignature]:
    """precision → the signature of an attention layer, whose input is of that type."""

    def make(precision: str) -> ServedSignature:
        return signature_from_spec(small_spec("linear", "attention", precision=precision), ServingSettings())

    return make


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "input_ids", "shape": [1, 4], "datatype": "INT64", "data": [1, 2, 3, 4], **changes}


def request_from_body(body: bytes, header: str | None, signature: ServedSignature) -> InferRequest:
    return infer_request(body, json_length(body, header), signature, dict)


def parsed(signature: ServedSignature, inputs: list[dict[str, Any]], **fields: Any) -> InferRequest:
    return request_from_body(json.dumps({"inputs": inputs, **fields}).encode(), None, signature)


def binary(signature: ServedSignature, inputs: list[dict[str, Any]], data: bytes, **fields: Any) -> InferRequest:
    head = json.dumps({"inputs": inputs, **fields}).encode()
    return request_from_body(head + data, str(len(head)), signature)


def refusal(signature: ServedSignature, *inputs: dict[str, Any], **fields: Any) -> str:
    with pytest.raises(UserError) as refused:
        parsed(signature, list(inputs), **fields)
    return str(refused.value)


def test_an_example_has_two_of_what_has_no_known_size() -> None:
    tensor = TensorInfo("input_ids", "int64", ("batch", "choices", "2*seq", 3))
    assert example_shape(tensor, {"batch": 1, "seq": 5}) == (1, 2, 10, 3)


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]]])
def test_data_may_be_flat_or_nested(signature: ServedSignature, data: list[Any]) -> None:
    request = parsed(signature, [tensor(shape=[2, 2], data=data)])
    assert request.feeds["input_ids"].tolist() == [[1, 2], [3, 4]]
    assert request.feeds["input_ids"].dtype == np.int64


def test_an_absent_mask_keeps_every_token(signature: ServedSignature) -> None:
    assert parsed(signature, [tensor()]).feeds["attention_mask"].tolist() == [[1, 1, 1, 1]]


def test_json_and_binary_tensors_mix_in_one_request(signature: ServedSignature) -> None:
    mask = np.array([[1, 1, 0, 0]])
    second = {"name": "attention_mask", "shape": [1, 4], "datatype": "INT64", "parameters": {"binary_data_size": 32}}
    for inputs in ([tensor(), second], [second, tensor()]):
        request = binary(signature, inputs, mask.tobytes())
        assert request.feeds["input_ids"].tolist() == [[1, 2, 3, 4]]
        assert request.feeds["attention_mask"].tolist() == mask.tolist()


def test_binary_data_that_begins_anywhere_is_read_right(signature: ServedSignature) -> None:
    value = np.array([[5, 6, 7, 8]])
    part = {"name": "input_ids", "shape": [1, 4], "datatype": "INT64", "parameters": {"binary_data_size": 32}}
    for padding in range(8):
        request = binary(signature, [part], value.tobytes(), id="x" * padding)
        assert request.feeds["input_ids"].tolist() == value.tolist()
        assert request.feeds["input_ids"].flags.aligned


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_travels_as_binary_data_alone(
    hidden_signature: Callable[[str], ServedSignature], precision: str
) -> None:
    signature, datatype = hidden_signature(precision), {"fp16": "FP16", "bf16": "BF16"}[precision]
    part = {"name": "hidden_states", "shape": [1, 2, 32], "datatype": datatype}
    data = np.arange(64, dtype=np.float32).astype(np.float16 if precision == "fp16" else bfloat16())
    outputs = {"parameters": {"binary_data_output": True}}
    request = binary(signature, [part | {"parameters": {"binary_data_size": 128}}], data.tobytes(), **outputs)
    assert (request.feeds["hidden_states"].reshape(-1) == data).all()
    assert "which JSON cannot represent" in refusal(signature, part | {"data": [0.0] * 64}, **outputs)
    with pytest.raises(RequestError, match="ask for it with binary_data: true"):
        binary(signature, [part | {"parameters": {"binary_data_size": 128}}], data.tobytes())


def bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "input_id"}, "unknown input 'input_id'; did you mean 'input_ids'?"),
        ({"datatype": "INT32"}, "has datatype 'INT32'; expected INT64"),
        ({"shape": [4]}, "of rank 1; expected rank 2"),
        ({"shape": [1] * 65}, "of rank 65; expected rank 2"),  # numpy has at most 64
        ({"shape": [1, 0]}, "every size at least 1"),
        ({"shape": [-1, -4]}, "every size at least 1"),
        ({"shape": [1, 65], "data": [0] * 65}, "seq is 65; this server takes at most 64"),
        ({"shape": [5, 4]}, "batch is 5; this server takes at most 4"),
        ({"shape": [2**62, 2**62]}, "this server takes at most"),
        ({"shape": [True, 4]}, "expected a list of integers"),
        ({"shape": [1.0, 4]}, "expected a list of integers"),
        ({"shape": None}, "expected a list of integers"),
        ({"data": [1, 2, 3]}, "has 3 elements; its shape [1, 4] has 4"),
        ({"data": [[1, 2], [3, 4]]}, "does not have its shape"),
        ({"data": [[[1, 2, 3, 4]]]}, "does not have its shape"),
        ({"data": [[1, 2, 3, [4]]]}, "expected integers"),
        ({"data": [1, 2, 3, True]}, "holds True; expected integers"),
        ({"data": [1, 2, 3, 4.0]}, "holds 4.0; expected integers"),
        ({"data": [1, 2, 3, None]}, "holds None; expected integers"),
        ({"data": [1, 2, 3, "4"]}, "holds '4'; expected integers"),
        ({"data": [1, 2, 3, 2**63]}, "outside of INT64"),
        ({"data": [1, 2, 3, 258]}, "input_ids contains 258; expected 0 to 257"),
        ({"data": [1, 2, 3, -1]}, "input_ids contains -1"),
        ({"data": "1234"}, "expected a list"),
        ({"parameters": {"binary_data_size": 32}}, "has both data and the parameter binary_data_size"),
        ({"parameters": {"shared_memory_region": "x"}}, "does not support"),
        ({"parameters": []}, "expected an object"),
    ],
)
def test_a_wrong_tensor_is_refused_with_what_was_expected(
    signature: ServedSignature, changes: dict[str, Any], message: str
) -> None:
    assert message in refusal(signature, tensor(**changes))


@pytest.mark.parametrize(
    ("inputs", "fields", "message"),
    [
        ([tensor(), tensor()], {}, "inputs name 'input_ids' twice"),
        ([tensor(), tensor(name="attention_mask", shape=[1, 3], data=[1, 1, 1])], {}, "but seq is 4 in 'input_ids'"),
        ([tensor()], {"outputs": [{"name": "logits"}]}, "unknown output 'logits'"),
        ([tensor()], {"outputs": [{"name": "last_hidden_state"}] * 2}, "twice"),
        ([tensor()], {"id": 5}, "id is 5; expected a string"),
        ([tensor()], {"parameters": 3}, "parameters of the request are 3; expected an object"),
        ([tensor()], {"parameters": {"binary_data_output": "yes"}}, "binary_data_output 'yes'; expected true or false"),
    ],
)
def test_what_does_not_go_together_is_refused(
    signature: ServedSignature, inputs: list[dict[str, Any]], fields: dict[str, Any], message: str
) -> None:
    assert message in refusal(signature, *inputs, **fields)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"[]", "expected a JSON object"),
        (b"{}", "has no inputs; expected: input_ids int64 [batch, seq]"),
        (b'{"inputs": []}', "expected a list of at least one object"),
        (b'{"inputs": [1]}', "expected an object with a name"),
        (b'{"inputs": [{"name": "input_ids"}]}', "has datatype None"),
        (b'{"inputs": ' + b"[" * 100_000, "not JSON"),
        (b'{"inputs": [{"name": "\xff"}]}', "not JSON"),
        (b'{"inputs": NaN}', "not JSON"),
    ],
)
def test_a_body_that_is_no_request_is_refused(signature: ServedSignature, body: bytes, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        request_from_body(body, None, signature)
    assert message in str(refused.value)


@pytest.mark.parametrize("header", ["-1", "0", "abc", "1e3", "9" * 30, " 5", "+5", "1_0", "٣"])
def test_a_header_length_that_is_no_length_of_the_body_is_refused(signature: ServedSignature, header: str) -> None:
    body = json.dumps({"inputs": [tensor()]}).encode()
    with pytest.raises(RequestError, match="Inference-Header-Content-Length is"):
        request_from_body(body, header, signature)


@pytest.mark.parametrize(
    ("size", "present"), [(32, 31), (32, 33), (32, 0), (31, 31), (2**64, 32), (-32, 32), (None, 32)]
)
def test_binary_sizes_must_agree_with_shape_and_body(
    signature: ServedSignature, size: int | None, present: int
) -> None:
    part = {"name": "input_ids", "shape": [1, 4], "datatype": "INT64", "parameters": {"binary_data_size": size}}
    with pytest.raises(RequestError):
        binary(signature, [part], bytes(present))


def test_a_long_value_does_not_fill_the_message(signature: ServedSignature) -> None:
    assert len(refusal(signature, tensor(name="x" * 10_000))) < 300


def test_float32_survives_json_exactly(hidden_signature: Callable[[str], ServedSignature]) -> None:
    """Every float32 has a shortest decimal that reads back as itself; random bits reach all magnitudes."""
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)][: 64 * 60].reshape(1, -1, 32)
    part = {"name": "hidden_states", "shape": list(values.shape), "datatype": "FP32", "data": values.ravel().tolist()}
    request = parsed(hidden_signature("fp32"), [part])
    assert request.feeds["hidden_states"].tobytes() == values.tobytes()
    body, _ = answer_from_outputs(request, {"attended": values, "last_hidden_state": values}, "m", "1")
    data = json.loads(body)["outputs"][0]["data"]
    assert np.array(data, dtype=np.float32).tobytes() == values.tobytes()


def test_numbers_outside_of_float32_are_refused(hidden_signature: Callable[[str], ServedSignature]) -> None:
    part = {"name": "hidden_states", "shape": [1, 1, 32], "datatype": "FP32", "data": [1e39] * 32}
    assert "outside of FP32" in refusal(hidden_signature("fp32"), part)


def test_outputs_that_json_cannot_hold_are_an_error_and_no_null(signature: ServedSignature) -> None:
    request = parsed(signature, [tensor()])
    with pytest.raises(RequestError, match="ask for binary data"):
        answer_from_outputs(request, {"last_hidden_state": np.full((1, 4, 32), np.nan, np.float32)}, "m", "1")


def test_a_model_without_a_limit_of_length_gets_one(small_spec: Callable[..., BuildSpec]) -> None:
    spec = small_spec("linear", "attention")
    assert spec.model.max_seq_len is None
    assert signature_from_spec(spec, ServingSettings()).max_sizes["seq"] == 16384
    assert signature_from_spec(spec, ServingSettings(max_seq_len=20_000)).max_sizes["seq"] == 20_000


def test_a_name_of_megabytes_is_refused_without_much_memory(signature: ServedSignature) -> None:
    name = "x" * 2_000_000
    tracemalloc.start()
    try:
        message = refusal(signature, tensor(name=name))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert message.startswith(f"unknown input '{name[:79]}…. Expected: ")
    # copies of the body and of its words; comparing with the known names would take 45 bytes for each character
    assert peak < 20 * len(name)
