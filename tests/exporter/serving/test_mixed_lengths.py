"""Requests of different lengths that share a run get the answers that they get alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import effexport
from effexport.artifact import Artifact
from effexport.base.runtimes import RUNTIMES
from effexport.base.spec import BuildSpec
from effexport.proof.tolerances import arithmetic_limit
from effexport.runners.options import RunOptions
from effexport.serving.engine.metrics import Metrics
from effexport.serving.engine.queue import Batcher, Padding
from effexport.serving.engine.settings import ServingSettings
from effexport.serving.http.models import ServingTarget, why_not_padded


def random_request(artifact: Artifact, rng: np.random.Generator) -> dict[str, Any]:
    """One to three rows of 1 to 64 tokens. Every second request has a mask of its own, with holes."""
    spec = artifact.spec
    shape = int(rng.integers(1, 4)), int(np.exp(rng.uniform(0, np.log(spec.model.seq_len))))
    mask = np.ones(shape, np.int64)
    if rng.random() < 0.5:
        mask = rng.integers(0, 2, shape)
        mask[:, 0] = 1
    if spec.model.scope == "encoder":
        return {"input_ids": rng.integers(0, 258, shape), "attention_mask": mask}
    hidden = rng.standard_normal((*shape, spec.attention.dim), dtype=np.float32)
    return {"hidden_states": hidden, "attention_mask": mask}


def joined_answers(run: Callable[..., Any], requests: list[dict[str, Any]], padding: Padding) -> list[Any]:
    """A queue's answers to requests that wait for each other, so that all are in one batch."""
    rows = [len(request["attention_mask"]) for request in requests]

    async def scenario() -> list[Any]:
        settings = ServingSettings(max_batch=sum(rows), max_padding=0.999, batch_delay_ms=60_000.0)
        batcher = Batcher(run, settings, Metrics("m"), joins=True, padding=padding)
        jobs = [batcher.submit(feeds) for feeds in requests]
        found = await asyncio.gather(*(job.answer for job in jobs), return_exceptions=True)
        await asyncio.to_thread(batcher.close)
        return found

    return asyncio.run(scenario())


@pytest.mark.requires("torch", "onnx", "ort", "native", "serve")
def test_a_mix_of_lengths_and_masks_gets_the_answers_of_single_requests(
    built: Callable[..., Artifact], variant: str, scope: str
) -> None:
    """Also if one of them is NaN throughout, which fails the runs of some variants."""
    artifact = built(variant, scope)
    assert why_not_padded(artifact, RUNTIMES["ort"]) == ""
    rng = np.random.default_rng(0)
    # that of the report: sums in another order, and nothing else
    limit = arithmetic_limit(artifact.spec).value
    largest = 0
    with effexport.load(artifact.path) as runner:

        def run(feeds: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal largest
            largest = max(largest, len(feeds["attention_mask"]))
            return runner.run(feeds)

        for _ in range(3):
            requests = [random_request(artifact, rng) for _ in range(6)]
            alone = [runner.run(request) for request in requests]
            poisoned = 2 if scope == "attention" else -1
            if scope == "attention":
                requests[poisoned]["hidden_states"] = requests[poisoned]["hidden_states"] * np.float32("nan")
            answers = joined_answers(run, requests, Padding.from_spec(artifact.spec))
            assert largest >= sum(len(request["attention_mask"]) for request in requests)
            for number, (request, right) in enumerate(zip(requests, alone, strict=True)):
                if number != poisoned:
                    check_kept_tokens(answers[number], right, request["attention_mask"], limit)


def check_kept_tokens(answer: Mapping[str, Any], right: Mapping[str, Any], mask: Any, limit: float) -> None:
    for name, expected in right.items():
        assert answer[name].shape == expected.shape
        for row, keep in enumerate(mask == 1):
            scale = np.sqrt(np.mean(np.square(expected[row, keep])))
            assert np.abs(answer[name][row, keep] - expected[row, keep]).max() <= limit * scale


@pytest.mark.requires("torch", "onnx", "ort")
def test_lengths_are_mixed_only_if_the_report_has_shown_that_it_changes_nothing(
    built: Callable[..., Artifact], small_spec: Callable[..., BuildSpec]
) -> None:
    artifact = built("linear")

    def reason(runtime: str = "ort", **fields: Any) -> str:
        changed = msgspec.structs.replace(artifact.manifest, **fields)
        return why_not_padded(replace(artifact, manifest=changed), RUNTIMES[runtime])

    parity = artifact.manifest.parity
    summary, check = parity.summary, parity.summary["padding length"]
    assert (check.passed, check.failed) == (1, 0)
    old = {name: other for name, other in summary.items() if other is not check}
    failed = {**summary, "padding length": msgspec.structs.replace(check, failed=1)}
    for changed in (old, failed):
        why = reason(parity=msgspec.structs.replace(parity, summary=changed))
        assert why == "its report has no passed check named 'padding length'; build it again"
    # an engine is judged by the checks of the engine
    assert "no passed check named 'trt: padding length'" in reason("trt")
    dependent = small_spec("nystrom", pinv_init="global")
    assert reason(spec=dependent.to_dict()).startswith("pinv_init=global: the other samples")


@pytest.mark.parametrize(
    ("runtime", "cores", "given", "runs", "threads", "tokens"),
    [
        ("ort", 4, {}, 2, 3, 1024),
        ("ort", 1, {}, 1, 1, 256),
        ("ort", 4, {"concurrent_runs": 4, "max_run_tokens": 50}, 4, 1, 50),
        ("ort", 2, {"concurrent_runs": 8}, 8, 1, 512),
        ("openvino", 4, {}, 1, 4, 1024),
        ("trt", 4, {}, 1, 4, None),
    ],
)
def test_concurrent_runs_share_the_cores_and_a_run_has_tokens_for_each(
    runtime: str, cores: int, given: dict[str, int], runs: int, threads: int, tokens: int | None
) -> None:
    on_cores = RunOptions(runtime=runtime, threads=cores)
    target = ServingTarget(Path("a"), None, on_cores, ServingSettings(**given))
    found = target.resolved()
    assert (found.settings.concurrent_runs, found.settings.max_run_tokens) == (runs, tokens)
    assert found.options.threads == threads
    # without a number of threads, those of the machine; a run that has all of them leaves the number to the runtime
    alone = replace(target, options=RunOptions(runtime=runtime), settings=ServingSettings(concurrent_runs=1))
    assert alone.resolved().options.threads is None
