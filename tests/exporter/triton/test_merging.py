"""Requests that run together get what each would get on its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import effexport
from effexport.artifact import Artifact
from effexport.dtypes import TensorInfo
from effexport.errors import RuntimeFailedError, UserError
from effexport.runners.feeds import FeedLimits
from effexport.serving.triton.merging import run_merged


class Doubling:
    """Doubles its input, and remembers the batches that it saw."""

    inputs = (TensorInfo("x", "float32", ("batch", "seq")), TensorInfo("attention_mask", "int64", ("batch", "seq")))
    limits = FeedLimits(max_seq_len=9)

    def __init__(self, broken: bool = False) -> None:
        self.batches: list[int] = []
        self.broken = broken

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        self.batches.append(len(feeds["x"]))
        if self.broken:
            raise RuntimeFailedError("planted")
        return {"y": feeds["x"] * 2 * feeds["attention_mask"]}


def request(rows: int, seq: int, start: float = 0.0) -> dict[str, Any]:
    return {"x": np.arange(rows * seq, dtype=np.float32).reshape(rows, seq) + start}


def run(runner: Any, requests: list[Any], *, merge: bool = True) -> list[Any]:
    return run_merged(runner, requests, 8 if merge else 0)


def test_requests_of_one_shape_become_one_batch_and_get_their_own_rows() -> None:
    runner = Doubling()
    requests = [request(1, 3), request(2, 3, 10), request(1, 4, 20), request(3, 3, 30)]
    answers = run(runner, requests)
    assert sorted(runner.batches) == [1, 6]
    for asked, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer["y"], asked["x"] * 2)


def test_a_bad_request_gets_its_error_and_spoils_no_other_one() -> None:
    runner = Doubling()
    bad = [{"x": np.zeros((1, 3), np.float64)}, {}, request(1, 10), request(1, 3) | {"z": np.zeros(1)}]
    answers = run(runner, [request(1, 3), *bad, request(1, 3, 5)])
    assert [isinstance(answer, UserError) for answer in answers] == [False, True, True, True, True, False]
    assert runner.batches == [2]
    np.testing.assert_array_equal(answers[5]["y"], request(1, 3, 5)["x"] * 2)


def test_a_given_mask_and_the_mask_that_stands_in_for_a_missing_one_go_together() -> None:
    runner = Doubling()
    masked = request(1, 3) | {"attention_mask": np.array([[1, 0, 1]])}
    answers = run(runner, [masked, request(1, 3)])
    assert runner.batches == [2]
    np.testing.assert_array_equal(answers[0]["y"], [[0, 0, 4]])
    np.testing.assert_array_equal(answers[1]["y"], [[0, 2, 4]])


def test_requests_stay_apart_where_batch_mates_matter() -> None:
    runner = Doubling()
    answers = run(runner, [request(1, 3), request(2, 3)], merge=False)
    assert runner.batches == [1, 2]
    assert [len(answer["y"]) for answer in answers] == [1, 2]


def test_a_batch_has_no_more_rows_than_the_model_takes_unless_one_request_has() -> None:
    runner = Doubling()
    requests = [request(rows, 2, start) for rows, start in ((3, 0), (4, 10), (2, 20), (9, 30), (1, 40))]
    answers = run(runner, requests)
    assert runner.batches == [7, 2, 9, 1]
    for asked, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer["y"], asked["x"] * 2)


def test_a_failure_of_the_model_reaches_every_request_of_its_batch() -> None:
    answers = run(Doubling(broken=True), [request(1, 3), request(1, 3)])
    assert [str(answer) for answer in answers] == ["planted", "planted"]


@pytest.mark.requires("torch", "onnx", "ort", "native")
def test_a_real_model_answers_merged_requests_as_it_answers_single_ones(built: Callable[..., Artifact]) -> None:
    rng = np.random.default_rng(0)
    requests = [{"input_ids": rng.integers(1, 258, (1, 40))} for _ in range(5)]
    with effexport.load(built("softmax").path) as runner:
        merged = run(runner, requests)
        for asked, answer in zip(requests, merged, strict=True):
            alone = runner.run(asked)["last_hidden_state"]
            # one product of more rows may add in another order: a few float32 roundings of values around 1
            np.testing.assert_allclose(answer["last_hidden_state"], alone, atol=1e-5)
