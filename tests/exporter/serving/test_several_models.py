"""Several models in one server: each is called by its name, and none disturbs another."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from serving_load import (
    Sample,
    ServerProcess,
    check_right_answers,
    closed_loop,
    exchange_once,
    json_of,
    post,
    running_server,
    samples_of,
)

import effexport
from effexport.artifact import Artifact
from effexport.base.errors import RuntimeFailedError, UserError
from effexport.runners.options import RunOptions
from effexport.serving.engine.settings import DEFAULT_MAX_SEQ_LEN, ServingSettings
from effexport.serving.http.models import ServedModel, ServingTarget

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
    check_right_answers(both, mixed_samples, 8, 96)
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


@pytest.fixture(scope="module")
def loading(artifact: Artifact, other: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of "small" that may load "second" and "damaged", whose weights are cut off."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("second", "damaged"):
        shutil.copytree(other.path, folder / name)
    (folder / "leads-out").symlink_to(artifact.path)
    model = folder / "damaged" / "model.onnx"
    model.write_bytes(model.read_bytes()[:-100])
    options = ("--name", "small", "--allow-load", str(folder))
    with running_server(artifact.path, tmp_path_factory.mktemp("server"), *options) as running:
        yield running


def ask(server: ServerProcess, path: str, body: object = None) -> Any:
    """(status, JSON of the answer) of a POST to the repository."""
    sent = b"" if body is None else json.dumps(body).encode()
    reply = asyncio.run(exchange_once(server.port, post(f"/v2/repository/{path}", sent)))
    return reply.status, json_of(reply) if reply.body else None


def states(server: ServerProcess, **body: object) -> dict[str, tuple[str, str]]:
    return {entry["name"]: (entry["state"], entry["reason"]) for entry in ask(server, "index", body)[1]}


def test_models_are_loaded_again_and_unloaded_under_load_without_a_lost_or_wrong_answer(
    loading: ServerProcess, mixed_samples: list[Sample]
) -> None:
    second = mixed_samples[1::2]

    async def change(path: str) -> int:
        return (await exchange_once(loading.port, post(f"/v2/repository/models/second/{path}", b"{}"))).status

    async def changes() -> list[int]:
        statuses = []
        for path in ("load", "unload", "unload", "load"):
            await asyncio.sleep(0.1)
            statuses.append(await change(path))
        return statuses

    async def scenario() -> tuple[list[Any], list[int]]:
        assert await change("load") == 200
        changing = asyncio.create_task(changes())
        outcomes = [await closed_loop(loading.port, second, 8, 64)]
        while not changing.done():
            outcomes.append(await closed_loop(loading.port, second, 8, 64))
        return outcomes, await changing

    outcomes, statuses = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert statuses == [200, 200, 404, 200]
    assert {status for outcome in outcomes for status in outcome.statuses} == {200, 404}
    assert all((outcome.wrong, outcome.lost) == (0, 0) for outcome in outcomes)
    assert states(loading)["second"] == ("READY", "")
    check_right_answers(loading, second)


def test_a_load_that_fails_changes_nothing_and_the_index_says_why(
    loading: ServerProcess, samples: list[Sample]
) -> None:
    assert states(loading)["damaged"] == ("UNAVAILABLE", "not loaded")
    status, answer = ask(loading, "models/damaged/load")
    assert status == 400
    assert "damaged was not loaded" in answer["error"]
    state, reason = states(loading)["damaged"]
    assert state == "UNAVAILABLE"
    assert "model.onnx" in reason
    assert "damaged" not in states(loading, ready=True)
    check_right_answers(loading, samples)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("models/absent/load", {}, "no artifact 'absent' in"),
        ("models/leads-out/load", {}, "leads out of the folder"),
        ("models/../load", {}, "the model's name is '..'"),
        ("models/.hidden/load", {}, "the model's name is '.hidden'"),
        ("models/second/load", {"parameters": {"config": "{}"}}, "the parameter 'config', which this server does not"),
        ("models/absent/unload", {}, "no model 'absent'"),
        ("models/damaged/unload", {}, "'damaged'"),
        ("index", {"ready": "yes"}, "ready 'yes'; expected true or false"),
        ("index", [], "expected a JSON object"),
    ],
)
def test_repository_requests_that_cannot_work_are_refused(
    loading: ServerProcess, path: str, body: object, message: str
) -> None:
    before = states(loading)
    status, answer = ask(loading, path, body)
    assert 400 <= status < 500
    assert message in answer["error"]
    assert states(loading) == before


def test_without_permission_nothing_is_loaded_or_unloaded(both: ServerProcess) -> None:
    for path in ("models/small/unload", "models/small/load", "models/x/load"):
        status, answer = ask(both, path)
        assert status == 403
        assert "start it with --allow-load" in answer["error"]
    assert states(both) == {"small": ("READY", ""), "second": ("READY", "")}


def test_memory_is_bounded_for_all_models_together(cli: Callable[..., Any], artifact: Artifact) -> None:
    error = cli("serve", artifact.path, "--port", "0", "--max-memory", "10MB").error(2)
    assert "--max-memory allows 10.0 MB for all models together" in error
    assert "--max-memory is 'much'" in cli("serve", artifact.path, "--max-memory", "much").error(2)

    # the process before and after loading: only the weights' size, and only the first run, show that it is too much
    weights = (artifact.path / "model.onnx").stat().st_size
    target = ServingTarget(artifact.path, "small", RunOptions(), ServingSettings(max_memory_bytes=10**9))
    for resident, words in (([10**9 - weights + 1], "with the"), ([0, 10**9 + 1], "with small loaded")):
        threads = threading.active_count()
        with (
            mock.patch("effexport.serving.http.models.status_bytes", side_effect=resident),
            pytest.raises(UserError, match=f"{words}.*the server would use 1.00 GB .* leave out another model"),
        ):
            target.load()
        assert threading.active_count() == threads


def test_a_model_of_any_length_is_not_warmed_up_at_whatever_length_its_manifest_has(
    copied: Callable[..., Path], rewrite_manifest: Callable[..., None]
) -> None:
    folder = copied("linear", "attention")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["spec"]["model"]["seq_len"] = 2**31 - 1
    rewrite_manifest(folder, spec=manifest["spec"])
    report = json.loads((folder / "report.json").read_text()) | {"spec": manifest["spec"]}
    (folder / "report.json").write_text(json.dumps(report))
    rewrite_manifest(folder)
    lengths = []
    target = ServingTarget(folder, "small", RunOptions(), ServingSettings())
    example_feeds = ServedModel.example_feeds
    with mock.patch.object(ServedModel, "example_feeds", autospec=True) as made:
        made.side_effect = lambda model, rows, length: (lengths.append(length), example_feeds(model, rows, 8))[1]
        target.load().close()
    assert lengths == [DEFAULT_MAX_SEQ_LEN]


def test_a_warm_up_without_the_memory_for_it_is_one_error(artifact: Artifact) -> None:
    target = ServingTarget(artifact.path, "small", RunOptions(), ServingSettings())
    with (
        mock.patch.object(ServedModel, "example_feeds", side_effect=MemoryError),
        pytest.raises(RuntimeFailedError, match=r"small cannot run with \d+ tokens here: there is not enough memory"),
    ):
        target.load()
