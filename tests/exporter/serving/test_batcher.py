"""Joining, waiting, refusing and stopping, with a runner that tests hold in their hands."""

from __future__ import annotations

import asyncio
import random
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from held_runner import HeldRunner

from effexport.base.errors import EffexportError, RuntimeFailedError, UserError
from effexport.base.spec import BuildSpec
from effexport.serving.engine.errors import RequestError, refusal_of
from effexport.serving.engine.metrics import Metrics
from effexport.serving.engine.queue import (
    NO_PADDING,
    Batcher,
    Job,
    Padding,
    TextMemory,
    padding_share,
    why_not_joined,
)
from effexport.serving.engine.settings import ServingSettings

pytestmark = pytest.mark.requires("serve")
TOKENS = Padding({"x": 1}, {"y": 1}, {})


@pytest.fixture
def runner() -> HeldRunner:
    return HeldRunner()


@pytest.fixture
def batcher(runner: HeldRunner) -> Iterator[Callable[..., Batcher]]:
    """(joins, padding, **settings) → a batcher, closed at the end."""
    made: list[Batcher] = []

    def make(joins: bool = True, padding: Padding = NO_PADDING, **settings: Any) -> Batcher:
        made.append(Batcher(runner.run, ServingSettings(**settings), Metrics("m"), joins=joins, padding=padding))
        return made[-1]

    yield make
    runner.let.set()
    for one in made:
        one.close()


def job(batcher: Batcher, value: int, length: int = 3, rows: int = 1) -> Job:
    return batcher.submit({"x": np.full((rows, length), value)})


async def held(batcher: Batcher, runner: HeldRunner) -> Job:
    """A first job that occupies the runner, so that all others wait."""
    first = job(batcher, 0)
    await asyncio.to_thread(runner.running.acquire)
    return first


def run(scenario: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario, 30)

    asyncio.run(limited())


@pytest.mark.parametrize(
    ("queue", "requests", "shapes"),
    [
        ({"max_batch": 4}, [(1, 3)] * 6, [(4, 3), (2, 3)]),
        # other lengths do not join, and do not starve
        ({}, [(1, 5), (1, 3), (1, 5), (1, 4), (1, 3)], [(2, 5), (2, 3), (1, 4)]),
        # rows of a request stay together
        ({"max_batch": 4}, [(3, 3), (2, 3), (1, 3)], [(4, 3), (2, 3)]),
        # samples depend on each other
        ({"joins": False, "batch_delay_ms": 1000.0}, [(1, 3)] * 2, [(1, 3)] * 2),
        # the oldest runs with those closest to its length: 8 + 9 + 10 in 3 × 10 are 10 % padding; 9 + 10 + 12 would be
        # 14 %, so 12 is the oldest of a later run
        (
            {"padding": TOKENS, "max_padding": 0.12},
            [(1, length) for length in (10, 40, 9, 12, 41, 8)],
            [(3, 10), (2, 41), (1, 12)],
        ),
        ({"padding": TOKENS, "max_padding": 0.0}, [(1, 10), (1, 9), (1, 10)], [(2, 10), (1, 9)]),
        # the first is alone, and longer than any run that is shared
        (
            {"padding": TOKENS, "max_padding": 0.2, "max_run_tokens": 30},
            [(1, length) for length in (40, 10, 10, 10, 9)],
            [(1, 40), (3, 10), (1, 9)],
        ),
    ],
)
def test_requests_that_wait_share_the_runs_that_they_may_and_get_their_own_answers(
    batcher: Callable[..., Batcher],
    runner: HeldRunner,
    queue: dict[str, Any],
    requests: list[tuple[int, int]],
    shapes: list[tuple[int, int]],
) -> None:
    """requests, shapes: rows and length of each request, and of each run after the one that they wait for."""

    async def scenario() -> None:
        made = batcher(**queue)
        jobs = [await held(made, runner)]
        jobs += [job(made, value, length, rows) for value, (rows, length) in enumerate(requests, 1)]
        runner.let.set()
        for value, (one, (rows, length)) in enumerate(zip(jobs, [(1, 3), *requests], strict=True)):
            answer = await one.answer
            assert answer["y"].tolist() == [[2 * value] * length] * rows
            assert answer["pooled"].tolist() == [value * length] * rows

    run(scenario())
    assert runner.shapes == [(1, 3), *shapes]


def test_a_lone_request_is_run_at_once(batcher: Callable[..., Batcher], runner: HeldRunner) -> None:
    async def scenario() -> None:
        one = job(batcher(max_batch=8), 1)
        assert await asyncio.to_thread(runner.running.acquire, True, 30)
        runner.let.set()
        await one.answer

    run(scenario())


def test_a_delay_waits_for_others_and_ends_when_the_batch_is_full(
    batcher: Callable[..., Batcher], runner: HeldRunner
) -> None:
    async def scenario() -> None:
        runner.let.set()
        # the delay is longer than the limit of this test: only a full batch ends it
        queue = batcher(max_batch=2, batch_delay_ms=60_000.0)
        jobs = [job(queue, 1), job(queue, 2)]
        await asyncio.gather(*(one.answer for one in jobs))

    run(scenario())
    assert runner.shapes == [(2, 3)]


def test_one_more_than_the_queue_holds_is_refused(batcher: Callable[..., Batcher], runner: HeldRunner) -> None:
    async def scenario() -> None:
        queue = batcher(queue_size=2)
        jobs = [await held(queue, runner), job(queue, 1), job(queue, 2)]
        with pytest.raises(RequestError, match="2 requests are waiting") as refused:
            job(queue, 3)
        assert refused.value.kind.status == 503
        assert queue.retry_after_s >= 1
        runner.let.set()
        await asyncio.gather(*(one.answer for one in jobs))

    run(scenario())


def test_a_request_that_nobody_waits_for_is_not_run(batcher: Callable[..., Batcher], runner: HeldRunner) -> None:
    async def scenario() -> None:
        queue = batcher()
        first, second = await held(queue, runner), job(queue, 1)
        queue.withdraw(second)
        runner.let.set()
        await first.answer
        assert (await job(queue, 2).answer)["y"][0, 0] == 4

    run(scenario())
    assert len(runner.shapes) == 2


def test_a_request_that_waited_too_long_is_refused_and_not_run(
    batcher: Callable[..., Batcher], runner: HeldRunner
) -> None:
    async def scenario() -> None:
        queue = batcher()
        running = asyncio.create_task(queue.outputs({"x": np.ones((1, 3))}, 0.2))
        await asyncio.to_thread(runner.running.acquire)
        with pytest.raises(RequestError, match="waited too long") as refused:
            await queue.outputs({"x": np.ones((1, 3))}, 0.3)
        assert refused.value.kind.status == 503
        runner.let.set()
        assert (await running)["y"][0, 0] == 2, "what runs is waited for"

    run(scenario())
    assert len(runner.shapes) == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [(UserError("outside of the profile"), 400), (RuntimeFailedError("no memory"), 500), (ValueError("a bug"), 500)],
)
def test_a_run_that_fails_harms_only_the_request_that_makes_it_fail(
    batcher: Callable[..., Batcher], runner: HeldRunner, error: Exception, status: int
) -> None:
    runner.error = lambda x: error if (x == 2).any() else None

    async def scenario() -> None:
        queue = batcher()
        jobs = [await held(queue, runner), *(job(queue, value) for value in (1, 2, 3))]
        runner.let.set()
        answers = await asyncio.gather(*(one.answer for one in jobs), return_exceptions=True)
        assert [int(answer["y"][0, 0]) for answer in answers if isinstance(answer, dict)] == [0, 2, 6]
        (refused,) = (answer for answer in answers if isinstance(answer, EffexportError))
        assert refusal_of(refused).status == status
        assert (await job(queue, 4).answer)["y"][0, 0] == 8

    run(scenario())


def test_a_failing_or_cancelled_request_of_another_length_costs_its_mates_nothing(
    batcher: Callable[..., Batcher], runner: HeldRunner
) -> None:
    runner.error = lambda x: RuntimeFailedError("planted") if (x == 2).any() else None

    async def scenario() -> None:
        queue = batcher(padding=TOKENS, max_padding=0.5)
        jobs = [await held(queue, runner), *(job(queue, i, length) for i, length in enumerate((10, 10, 9, 9), 1))]
        queue.withdraw(jobs.pop())
        runner.let.set()
        _, *answers = await asyncio.gather(*(one.answer for one in jobs), return_exceptions=True)
        assert [type(answer) for answer in answers] == [dict, RuntimeFailedError, dict]
        assert [answer["y"].shape for answer in answers if isinstance(answer, dict)] == [(1, 10), (1, 9)]

    run(scenario())
    # the whole batch without the cancelled request, then one by one
    assert runner.shapes == [(1, 3), (3, 10), (1, 10), (1, 10), (1, 9)]


def test_several_runs_go_on_at_once_and_all_end_before_a_stop(
    batcher: Callable[..., Batcher], runner: HeldRunner
) -> None:
    async def scenario() -> None:
        queue = batcher(joins=False, concurrent_runs=2)
        jobs = [job(queue, value) for value in range(3)]
        for _ in range(2):
            await asyncio.to_thread(runner.running.acquire)
        assert not runner.running.acquire(blocking=False)
        closing = asyncio.create_task(asyncio.to_thread(queue.close))
        runner.let.set()
        await asyncio.gather(*(one.answer for one in jobs))
        await closing

    run(scenario())
    assert len(runner.shapes) == 3


def test_a_delay_for_one_shape_does_not_keep_other_runners_from_sleeping_through_a_stop(
    batcher: Callable[..., Batcher], runner: HeldRunner
) -> None:
    runner.let.set()

    async def scenario() -> None:
        queue = batcher(padding=TOKENS, batch_delay_ms=60_000.0, concurrent_runs=3)
        one = job(queue, 1)
        started = time.perf_counter()
        await asyncio.to_thread(queue.close)
        assert (await one.answer)["y"].tolist() == [[2, 2, 2]]
        assert time.perf_counter() - started < 20

    run(scenario())


def test_the_share_of_padding_counts_rows() -> None:
    # 3 rows of 10 and 1 row of 6: 4 of 40 tokens
    assert padding_share([3, 1], [10, 6]) == pytest.approx(0.1)
    assert padding_share([2, 1], [7, 7]) == 0.0


def test_closing_runs_what_was_accepted_and_accepts_nothing_more(
    batcher: Callable[..., Batcher], runner: HeldRunner
) -> None:
    async def scenario() -> None:
        queue = batcher()
        jobs = [await held(queue, runner), job(queue, 1, 4), job(queue, 2, 5)]
        closing = asyncio.create_task(asyncio.to_thread(queue.close))
        deadline = time.monotonic() + 30
        refusals: list[int] = []
        while not refusals:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
            try:
                jobs.append(job(queue, 3))
            except RequestError as refused:
                refusals.append(refused.kind.status)
        runner.let.set()
        assert refusals == [503]
        assert len(await asyncio.gather(*(one.answer for one in jobs))) == len(jobs)
        await closing

    run(scenario())


def test_what_is_joined_comes_apart_again() -> None:
    feeds = [{"a": np.full((rows, 2), rows), "b": np.full((rows, 3), -rows)} for rows in (1, 3, 2)]
    parts = NO_PADDING.split(NO_PADDING.joined(feeds), feeds)
    for given, part in zip(feeds, parts, strict=True):
        assert all(np.array_equal(given[name], part[name]) for name in given)


@pytest.mark.parametrize(
    ("of", "fields", "reason"),
    [
        ("nystrom", {}, ""),
        ("lsh", {}, ""),
        ("nystrom", {"pinv_init": "global"}, "pinv_init=global: the other samples of the batch affect the result"),
        ("nystrom", {"mask_landmarks": False, "segment_means_seq_len": 64}, "mask_landmarks=False"),
    ],
)
def test_only_models_that_are_proven_batch_invariant_share_runs(
    small_spec: Callable[..., BuildSpec], of: str, fields: dict[str, Any], reason: str
) -> None:
    found = why_not_joined(small_spec(of, **fields))
    assert found.startswith(reason) if reason else found == ""


def test_a_withdrawn_request_frees_its_place_while_another_one_runs(
    batcher: Callable[..., Batcher], runner: HeldRunner
) -> None:
    async def scenario() -> None:
        queue = batcher(queue_size=2)
        first, second, third = await held(queue, runner), job(queue, 1), job(queue, 2)
        feeds = weakref.ref(second.feeds["x"])
        queue.withdraw(second)
        del second
        assert feeds() is None, "nor does it hold memory"
        fourth = job(queue, 3)
        with pytest.raises(RequestError, match="2 requests are waiting"):
            job(queue, 4)
        queue.withdraw(first)  # it runs, so it goes on, and nobody gets its answer
        runner.let.set()
        assert [int((await one.answer)["y"][0, 0]) for one in (third, fourth)] == [4, 6]
        assert first.answer.cancelled()

    run(scenario())
    assert runner.shapes == [(1, 3), (2, 3)]


def test_a_request_whose_client_goes_while_it_waits_leaves_the_queue_at_once(
    batcher: Callable[..., Batcher], runner: HeldRunner
) -> None:
    async def scenario() -> None:
        queue = batcher(queue_size=1)
        first = await held(queue, runner)
        for _ in range(20):
            waiting = asyncio.create_task(queue.outputs({"x": np.ones((1, 3))}, 30.0))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        late = asyncio.create_task(queue.outputs({"x": np.ones((1, 3))}, 0.01))
        with pytest.raises(RequestError, match="waited too long"):
            await late
        there = job(queue, 5)
        runner.let.set()
        await first.answer
        assert int((await there.answer)["y"][0, 0]) == 10

    run(scenario())
    assert runner.shapes == [(1, 3)] * 2


def test_a_runtime_that_returns_no_arrays_fails_its_requests_and_not_the_thread(
    batcher: Callable[..., Batcher], runner: HeldRunner
) -> None:
    runner.returned = {"y": None}

    async def scenario() -> None:
        queue = batcher()
        jobs = [await held(queue, runner), *(job(queue, value) for value in (1, 2))]
        runner.let.set()
        await asyncio.gather(*(one.answer for one in jobs), return_exceptions=True)
        runner.returned = None
        assert queue.is_alive
        assert (await job(queue, 4).answer)["y"][0, 0] == 8

    run(scenario())


def test_texts_that_wait_for_memory_hear_of_it_whoever_is_cancelled() -> None:
    """64 texts, of which half are cancelled at any stage: the others all get their turn, and no character is lost."""
    dice, memory = random.Random(0), TextMemory(10)

    async def text() -> None:
        async with memory.holding(dice.randrange(1, 14), 20.0):
            await asyncio.sleep(dice.choice((0, 0, 0.0001)))

    async def scenario() -> None:
        for _ in range(30):
            tasks = [asyncio.create_task(text()) for _ in range(64)]
            for task in tasks[::2]:
                await asyncio.sleep(0)
                task.cancel()
            await asyncio.gather(*tasks[1::2])
            await asyncio.gather(*tasks, return_exceptions=True)
        async with memory.holding(10, 0.01):
            with pytest.raises(RequestError, match="waited too long"):
                async with memory.holding(1, 0.01):
                    pass

    run(scenario())
