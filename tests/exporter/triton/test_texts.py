"""Requests with texts get the answers of their own texts, whatever runs beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from effexport.dtypes import TensorInfo
from effexport.errors import RuntimeFailedError, UserError
from effexport.runners.feeds import FeedLimits
from effexport.serving.triton.texts import Request, options_from_parameters, run_requests
from effexport.text.task import TextOptions
from effexport.text.tasks import Embedding


class Doubling:
    """Doubles its input, and remembers the shapes of its batches."""

    inputs = (TensorInfo("input_ids", "int64", ("batch", "seq")),)
    limits = FeedLimits(max_seq_len=9)

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        self.shapes.append(feeds["input_ids"].shape)
        if (feeds["input_ids"] < 0).any():
            raise RuntimeFailedError("planted")
        return {"y": feeds["input_ids"] * 2}


@dataclass(frozen=True)
class Lines:
    """The lengths of the words of each line, "!" as -1; every line is a window."""

    text: str
    windows: tuple[list[int], ...]

    @property
    def runs(self) -> list[dict[str, Any]]:
        return [{"input_ids": np.array([window])} for window in self.windows]


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


def run(runner: Any, requests: list[Any], *, merge: bool = True) -> list[Any]:
    def task_of(parameters: Mapping[str, Any]) -> Any:
        return LengthsOfWords(parameters.get("unit", 1))

    given = [request if isinstance(request, Request) else Request(request) for request in requests]
    return run_requests(runner, task_of, given, 8 if merge else 0)


def lengths(answer: Any) -> list[Any]:
    return [json.loads(data)["lengths"] for data in answer["answer"].ravel()]


def test_texts_of_any_length_and_tensors_run_together_and_get_their_own_answers() -> None:
    runner = Doubling()
    tensors = {"input_ids": np.array([[5, 6]])}
    answers = run(runner, [{"text": texts("one three")}, tensors, {"text": texts("a", "bb ccc", "d")}])
    assert lengths(answers[0]) == [[[6, 10]]]
    assert answers[1]["y"].tolist() == [[10, 12]]
    assert answers[2]["answer"].shape == (3, 1)
    assert lengths(answers[2]) == [[[2]], [[4, 6]], [[2]]]
    assert sorted(runner.shapes) == [(2, 1), (3, 2)]


def test_an_answer_has_the_shape_of_its_text_and_keeps_every_character() -> None:
    (answer,) = run(Doubling(), [{"text": texts("über 猫", shape=(1,))}])
    assert answer["answer"].shape == (1,)
    assert json.loads(answer["answer"][0]) == {"text": "über 猫", "lengths": [[8, 2]]}


def test_the_windows_of_a_long_text_run_in_batches_that_the_model_takes() -> None:
    runner = Doubling()
    (answer,) = run(runner, [{"text": texts("\n".join(["a bb"] * 19 + ["ccc"]))}])
    assert lengths(answer) == [[[2, 4]] * 19 + [[6]]]
    assert sorted(runner.shapes) == [(1, 1), (3, 2), (8, 2), (8, 2)]


def test_a_context_belongs_to_its_text() -> None:
    request = {"text": texts("a", "bb"), "context": texts("ccc", "dddd")}
    assert lengths(run(Doubling(), [request])[0]) == [[[2], [6]], [[4], [8]]]


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
        ({"text": texts(shape=(0, 1))}, "at least one text"),
        ({"text": texts("a" * 300_000)}, "has 300000 bytes; expected at most 262144"),
        ({"text": texts("\n".join("a" * 257))}, "257 windows of tokens; expected at most 256"),
        ({}, "has no inputs; expected text"),
    ],
)
def test_a_bad_request_gets_its_error_and_spoils_no_other_one(request_: Any, message: str) -> None:
    good = {"text": texts("one")}
    first, bad, last = run(Doubling(), [good, request_, good])
    assert lengths(first) == lengths(last) == [[[6]]]
    with pytest.raises(UserError, match=message):
        raise bad


def test_each_request_is_answered_with_its_own_parameters() -> None:
    request = {"text": texts("aa")}
    answers = run(Doubling(), [request, Request(request, {"unit": 4}), request])
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
    assert options_from_parameters({"top": 3, "stride": 2, "id": "of the request"}) == TextOptions(top=3, stride=2)
    with pytest.raises(UserError, match=re.escape(message)):
        options_from_parameters(parameters)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_request_gets_the_outputs_that_it_asks_for_but_no_float16_beside_an_answer(dtype: Any) -> None:
    """Triton refuses float16 in JSON, and `generate` always asks for all outputs."""

    class Pooling(Doubling):
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
    requests = [Request({"text": texts("a bb")}, outputs=outputs) for outputs in asked]
    answers = run_requests(Pooling(), lambda parameters: task, requests, 8)  # type: ignore[arg-type]
    both = {"answer", "embedding"} if dtype == np.float32 else {"answer"}
    assert [set(answer) for answer in answers] == [both, {"answer"}, {"embedding"}]  # type: ignore[arg-type]
    assert json.loads(answers[0]["answer"][0, 0]) == [1, 2]  # type: ignore[index]
    assert answers[2]["embedding"].dtype == dtype  # type: ignore[index]
    assert answers[2]["embedding"].tolist() == [[1, 2]]  # type: ignore[index]


def test_a_failure_of_the_model_is_the_answer_of_the_whole_request() -> None:
    failed, good = run(Doubling(), [{"text": texts("a b", "!")}, {"text": texts("a b")}])
    assert str(failed) == "planted"
    assert lengths(good) == [[[2, 2]]]


def test_texts_stay_apart_where_batch_mates_matter() -> None:
    runner = Doubling()
    assert lengths(run(runner, [{"text": texts("a", "b")}], merge=False)[0]) == [[[2]], [[2]]]
    assert runner.shapes == [(1, 1), (1, 1)]


def test_a_model_of_tensors_only_knows_no_texts() -> None:
    (answer,) = run_requests(Doubling(), None, [Request({"text": texts("a")})], 8)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="unknown input 'text'"):
        raise answer  # type: ignore[misc]
