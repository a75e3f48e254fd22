"""Requests that run together, with tensors or texts, get what each would get on its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import effexport
from effexport.artifact import Artifact
from effexport.base.dtypes import TensorInfo
from effexport.base.errors import RuntimeFailedError, UserError
from effexport.runners.runner import FeedLimits
from effexport.serving.triton.instance import ModelInstance
from effexport.tasks.task import TextOptions, options_from_parameters
from effexport.tasks.tasks import Embedding


class Doubling:
    """Doubles its input, and remembers the shapes of its batches. One with a negative number fails."""

    inputs = (
        TensorInfo("input_ids", "int64", ("batch", "seq")),
        TensorInfo("attention_mask", "int64", ("batch", "seq")),
    )
    outputs: tuple[TensorInfo, ...] = ()
    limits = FeedLimits(max_seq_len=9)

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        self.shapes.append(feeds["input_ids"].shape)
        if (feeds["input_ids"] < 0).any():
            raise RuntimeFailedError("planted")
        return {"y": feeds["input_ids"] * 2 * feeds["attention_mask"]}

    def close(self) -> None:
        pass

    @property
    def batches(self) -> list[int]:
        return [rows for rows, _ in self.shapes]


class RefusedError(Exception):
    """The error of a request. code: of Triton."""

    INVALID_ARG, UNAVAILABLE, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "INTERNAL"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Request:
    """A request as Triton hands it over."""

    tensors: Mapping[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)
    wanted: Sequence[str] = ("answer", "embedding")

    def inputs(self) -> list[Any]:
        return [
            SimpleNamespace(name=lambda name=name: name, as_numpy=lambda value=value: value)
            for name, value in self.tensors.items()
        ]

    def parameters(self) -> str:
        return json.dumps(self.given)

    def requested_output_names(self) -> Sequence[str]:
        return self.wanted


# A response is the outputs by name, or the error.
BACKEND = SimpleNamespace(
    Tensor=lambda name, value: (name, value),
    TritonError=RefusedError,
    InferenceResponse=lambda tensors=(), error=None: error or dict(tensors),
)


def run(runner: Any, requests: list[Any], tasks: Any = None, max_batch: int = 8) -> list[Any]:
    """requests: or their tensors alone."""
    given = [one if isinstance(one, Request) else Request(one) for one in requests]
    with ModelInstance(runner, tasks, max_batch, BACKEND) as instance:
        return instance.execute(given)


def tensors(rows: int, seq: int, start: int = 0) -> dict[str, Any]:
    return {"input_ids": np.arange(rows * seq).reshape(rows, seq) + start}


def assert_doubled(requests: list[Any], answers: list[Any]) -> None:
    for asked, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer["y"], asked["input_ids"] * 2)


def test_requests_of_one_shape_become_one_batch_and_get_their_own_rows() -> None:
    runner = Doubling()
    requests = [tensors(1, 3), tensors(2, 3, 10), tensors(1, 4, 20), tensors(3, 3, 30)]
    assert_doubled(requests, run(runner, requests))
    assert sorted(runner.batches) == [1, 6]


def test_bad_tensors_get_their_error_and_spoil_no_other_request() -> None:
    runner = Doubling()
    bad = [{"input_ids": np.zeros((1, 3))}, {}, tensors(1, 10), tensors(1, 3) | {"z": np.zeros(1)}]
    first, *refused, last = run(runner, [tensors(1, 3), *bad, tensors(1, 3, 5)])
    assert [answer.code for answer in refused] == ["INVALID_ARG"] * 4
    assert runner.batches == [2]
    assert_doubled([tensors(1, 3), tensors(1, 3, 5)], [first, last])


def test_a_given_mask_and_the_mask_that_stands_in_for_a_missing_one_go_together() -> None:
    runner = Doubling()
    masked = tensors(1, 3) | {"attention_mask": np.array([[1, 0, 1]])}
    answers = run(runner, [masked, tensors(1, 3)])
    assert runner.batches == [2]
    assert [answer["y"].tolist() for answer in answers] == [[[0, 0, 4]], [[0, 2, 4]]]


@pytest.mark.parametrize(
    ("rows", "max_batch", "batches"),
    [((1, 2), 0, [1, 2]), ((3, 4, 2, 9, 1), 8, [8, 2, 9])],
    ids=["batch mates matter", "a request of more rows than the model takes"],
)
def test_a_batch_has_the_rows_that_the_model_takes(rows: Any, max_batch: int, batches: list[int]) -> None:
    runner = Doubling()
    requests = [tensors(count, 2, 10 * number) for number, count in enumerate(rows)]
    assert_doubled(requests, run(runner, requests, max_batch=max_batch))
    assert runner.batches == batches


@pytest.mark.requires("torch", "onnx", "ort", "native")
def test_a_real_model_answers_merged_requests_as_it_answers_single_ones(built: Callable[..., Artifact]) -> None:
    rng = np.random.default_rng(0)
    requests = [{"input_ids": rng.integers(1, 258, (1, 40))} for _ in range(5)]
    with effexport.load(built("softmax").path) as runner:
        alone = [runner.run(asked)["last_hidden_state"] for asked in requests]
        for answer, right in zip(run(runner, requests), alone, strict=True):
            # one product of more rows may add in another order: a few float32 roundings of values around 1
            np.testing.assert_allclose(answer["last_hidden_state"], right, atol=1e-5)


@dataclass(frozen=True)
class Lines:
    """The lengths of the words of each line, "!" as -1; every line is a window."""

    text: str
    windows: tuple[list[int], ...]

    def rows(self, batch: int) -> list[dict[str, Any]]:
        longest = max(map(len, self.windows))
        padded = np.array([window + [0] * (longest - len(window)) for window in self.windows])
        return [{"input_ids": padded[start : start + batch]} for start in range(0, len(padded), batch)]


@dataclass(frozen=True)
class LengthsOfWords:
    """Answers a text with twice the lengths of its words, line by line, in a unit."""

    unit: int = 1
    name = "lengths"

    def prepare(self, text: str, pair: str | None = None) -> Lines:
        lines = [[-1 if word == "!" else len(word) for word in line.split()] for line in text.split("\n")]
        if not all(lines):
            raise UserError("a line is empty; expected words")
        if pair is not None:
            lines.append([len(word) for word in pair.split()])
        return Lines(text, tuple(lines))

    def answer(self, prepared: Lines, outputs: Mapping[str, Any]) -> Any:
        rows = zip(prepared.windows, outputs["y"].tolist(), strict=True)
        return {
            "text": prepared.text,
            "lengths": [[value / self.unit for value in row[: len(window)]] for window, row in rows],
        }


def texts(*values: str | bytes, shape: tuple[int, ...] | None = None) -> Any:
    data = [value if isinstance(value, bytes) else value.encode() for value in values]
    return np.array(data, dtype=object).reshape(shape or (len(values), 1))


def tasks(options: TextOptions) -> Any:
    return LengthsOfWords(options.top or 1)


def lengths(answer: Any) -> list[Any]:
    return [json.loads(data)["lengths"] for data in answer["answer"].ravel()]


def test_texts_of_any_length_run_together_beside_tensors_and_get_their_own_answers() -> None:
    runner = Doubling()
    given = {"input_ids": np.array([[5, 6]])}
    answers = run(runner, [{"text": texts("one three")}, given, {"text": texts("a", "bb ccc", "d")}], tasks)
    assert lengths(answers[0]) == [[[6, 10]]]
    assert answers[1]["y"].tolist() == [[10, 12]]
    assert answers[2]["answer"].shape == (3, 1)
    assert lengths(answers[2]) == [[[2]], [[4, 6]], [[2]]]
    assert sorted(runner.shapes) == [(1, 2), (2, 1), (2, 2)]


def test_an_answer_has_the_shape_of_its_text_and_keeps_every_character() -> None:
    (answer,) = run(Doubling(), [{"text": texts("über 猫", shape=(1,))}], tasks)
    assert answer["answer"].shape == (1,)
    assert json.loads(answer["answer"][0]) == {"text": "über 猫", "lengths": [[8, 2]]}


def test_the_windows_of_a_long_text_run_in_batches_that_the_model_takes() -> None:
    runner = Doubling()
    (answer,) = run(runner, [{"text": texts("\n".join(["a bb"] * 19 + ["ccc"]))}], tasks)
    assert lengths(answer) == [[[2, 4]] * 19 + [[6]]]
    assert sorted(runner.shapes) == [(4, 2), (8, 2), (8, 2)]


def test_a_context_belongs_to_its_text() -> None:
    request = {"text": texts("a", "bb"), "context": texts("ccc", "dddd")}
    assert lengths(run(Doubling(), [request], tasks)[0]) == [[[2], [6]], [[4], [8]]]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"text": texts("")}, "^a line is empty; expected words$"),
        ({"text": texts("good", " ")}, "^text 1: a line is empty"),
        ({"text": texts(b"\xff")}, "^text is not UTF-8: byte 0 is 0xff$"),
        ({"text": texts("good"), "context": texts(b"ab\xc3")}, "^context is not UTF-8: byte 2 is 0xc3$"),
        ({"text": texts("a b c d e f g h i j")}, "has 10 tokens; this model has positions for 9"),
        ({"text": texts("a", "b"), "context": texts("c")}, r"shape \[2, 1\] and context \[1, 1\]"),
        ({"context": texts("c")}, "has context; expected text"),
        ({"text": texts("a"), "input_ids": np.ones((1, 1), int)}, "has input_ids, text; expected text"),
        ({"text": texts(shape=(0, 1))}, "expected 1 to 2048 texts"),
        ({}, "has no inputs; expected text"),
    ],
)
def test_bad_texts_get_their_error_and_spoil_no_other_request(request_: Any, message: str) -> None:
    good = {"text": texts("one")}
    first, bad, last = run(Doubling(), [good, request_, good], tasks)
    assert lengths(first) == lengths(last) == [[[6]]]
    assert bad.code == "INVALID_ARG"
    assert re.search(message, str(bad))


def test_each_request_is_answered_with_its_own_parameters() -> None:
    request = {"text": texts("aa")}
    answers = run(Doubling(), [request, Request(request, {"top": 4}), request], tasks)
    assert [lengths(answer) for answer in answers] == [[[[4]]], [[[1]]], [[[4]]]]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"topp": 3}, "unknown parameter 'topp'; did you mean 'top'?"),
        ({"top": True}, "top is True; expected an integer"),
        ({"top": "3"}, "top is '3'; expected an integer"),
        ({"top": 0}, "top is 0; expected at least 1"),
    ],
)
def test_parameters_that_no_task_has_are_refused(parameters: dict[str, Any], message: str) -> None:
    assert options_from_parameters({"top": 3, "stride": 2}) == TextOptions(top=3, stride=2)
    with pytest.raises(UserError, match=re.escape(message)):
        options_from_parameters(parameters)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_request_gets_the_outputs_that_it_asks_for_but_no_float16_beside_an_answer(dtype: Any) -> None:
    """Triton refuses float16 in JSON, and `generate` always asks for all outputs."""

    class Pooling(Doubling):
        outputs = (TensorInfo("embedding", np.dtype(dtype).name, ("batch", 2)),)

        def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
            return {"embedding": feeds["input_ids"].astype(dtype)}

    @dataclass(frozen=True)
    class Embedded(LengthsOfWords, Embedding):
        def vector(self, prepared: Any, outputs: Mapping[str, Any]) -> Any:
            return outputs["embedding"][0].astype(np.float32)

        def answer(self, prepared: Any, outputs: Mapping[str, Any]) -> Any:
            return self.vector(prepared, outputs).tolist()

    task = Embedded(reader=None, output="embedding")  # type: ignore[arg-type]
    asked = [("answer", "embedding"), ("answer",), ("embedding",)]
    requests = [Request({"text": texts("a bb")}, wanted=wanted) for wanted in asked]
    answers = run(Pooling(), requests, lambda options: task)
    both = {"answer", "embedding"} if dtype == np.float32 else {"answer"}
    assert [set(answer) for answer in answers] == [both, {"answer"}, {"embedding"}]
    assert json.loads(answers[0]["answer"][0, 0]) == [1, 2]
    assert answers[2]["embedding"].dtype == dtype
    assert answers[2]["embedding"].tolist() == [[1, 2]]


def test_a_failure_of_the_model_is_the_answer_of_the_whole_request() -> None:
    failed, good = run(Doubling(), [{"text": texts("a b", "!")}, {"text": texts("a b")}], tasks)
    assert (str(failed), failed.code) == ("planted", "INTERNAL")
    assert lengths(good) == [[[2, 2]]]


def test_a_model_of_tensors_only_knows_no_texts() -> None:
    (answer,) = run(Doubling(), [{"text": texts("a")}])
    assert "unknown input 'text'" in str(answer)
