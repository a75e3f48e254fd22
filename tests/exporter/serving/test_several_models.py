"""Several models in one server: each is called by its name, and none disturbs another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving_load import Sample, ServerProcess, closed_loop, exchange_once, json_of, post, running_server, samples_of

import effexport
from effexport.artifact import Artifact

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "serve"), pytest.mark.xdist_group("serving")]


@pytest.fixture(scope="module")
def other(built: Callable[..., Artifact]) -> Artifact:
    return built("aft-simple")


@pytest.fixture(scope="module")
def both(artifact: Artifact, other: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = (str(other.path), "--name", "small", "--name", "second", "--json")
    with running_server(artifact.path, tmp_path_factory.mktemp("server"), *options) as running:
        yield running


@pytest.fixture(scope="module")
def mixed_samples(samples: list[Sample], other: Artifact) -> list[Sample]:
    """Requests to both models in turn, with the right answers of each."""
    with effexport.load(other.path) as runner:
        seconds = samples_of(runner.run, (16, 40, 64), "second")
    return [sample for pair in zip(samples, seconds, strict=True) for sample in pair]


def test_each_model_answers_by_its_name_and_counts_its_own_requests(
    both: ServerProcess, mixed_samples: list[Sample]
) -> None:
    names = ("effexport_requests_total", "effexport_batch_size_sum", "effexport_queue_seconds_count")
    before = [both.metric(name, model) for model in ("small", "second") for name in names]
    outcome = asyncio.run(closed_loop(both.port, mixed_samples, 8, 96))
    assert (outcome.statuses, outcome.wrong) == ({200: 96}, 0)
    after = [both.metric(name, model) for model in ("small", "second") for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [48] * 6


def test_the_index_lists_all_models_and_an_unknown_name_is_told_them(both: ServerProcess) -> None:
    index = json_of(asyncio.run(exchange_once(both.port, post("/v2/repository/index", b""))))
    assert [(entry["name"], entry["state"]) for entry in index] == [("small", "READY"), ("second", "READY")]
    for name in ("small", "second"):
        assert json.loads(both.get(f"/v2/models/{name}"))["name"] == name
    reply = asyncio.run(exchange_once(both.port, post("/v2/models/third/infer", b"{}")))
    assert reply.status == 404
    assert json_of(reply)["error"] == "no model 'third'; this server has 'small' and 'second'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "several models have the name"),
        (("--name", "a", "--name", "a"), "several models have the name a;"),
        (("--name", "a"), "--name is given 1 time for 2 artifacts; expected one name for each artifact"),
        (("--name", "a", "--name", "b", "--ray"), "--ray serves one artifact; 2 were given"),
    ],
)
def test_names_that_do_not_fit_the_artifacts_are_refused(
    cli: Callable[..., Any], artifact: Artifact, options: tuple[str, ...], message: str
) -> None:
    assert message in cli("serve", artifact.path, artifact.path, "--port", "0", *options).error(2)
