#!/usr/bin/env python3
"""Predict how `effexport serve` behaves under load, and compare the prediction with the real server.

The durations of runs are measured for every batch size, before and after each load. A simulation of queue and batching
(tests/support/serving_simulation.py) draws from them. The script prints three results for the same arrivals: those of
the simulation, those of the server's own queue with a runner that sleeps as long as runs took, and those of the server.
The second is unaffected by other work on the machine. At the end it prints how many replicas a number of users need.

    .venv/bin/python scripts/simulate_serving.py --artifact artifacts/lsh --seq-len 512
    .venv/bin/python scripts/simulate_serving.py --variant linear --seconds 30 --users 100,1000,10000 --limit-ms 500
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "scripts")]

from bench_serve import artifact_of, make_samples, parser_of  # noqa: E402
from serving_load import Sample, ServerProcess, exchange_once, open_loop, poisson_times, running_server  # noqa: E402
from serving_simulation import Simulated, simulate  # noqa: E402
from turns import timed_in_turns  # noqa: E402

import effexport  # noqa: E402
from effexport.artifact import open_artifact  # noqa: E402
from effexport.runners.runner import Runner  # noqa: E402
from effexport.serving.engine.errors import RequestError  # noqa: E402
from effexport.serving.engine.metrics import Metrics  # noqa: E402
from effexport.serving.engine.queue import Batcher  # noqa: E402
from effexport.serving.engine.settings import ServingSettings  # noqa: E402

LOADS = (0.25, 0.5, 0.8, 1.5)
QUEUE_SIZE = 64
Curve = Mapping[int, Sequence[float]]
Array = npt.NDArray[Any]


def measured_curve(runner: Runner, seq_len: int, max_batch: int, rounds: int) -> dict[int, list[float]]:
    """Durations of runs by number of rows; sizes take turns, so that a disturbance affects all of them."""
    dice = np.random.default_rng(0)
    feeds = {rows: {"input_ids": dice.integers(2, 250, (rows, seq_len))} for rows in range(1, max_batch + 1)}
    return timed_in_turns({rows: partial(runner.run, given) for rows, given in feeds.items()}, rounds)


def rate_of(curve: Curve) -> float:
    """Requests per second if every run has the maximum number of rows."""
    rows = max(curve)
    return rows / statistics.fmean(curve[rows])


def prediction(arrivals_s: Sequence[float], curve: Curve, overhead_s: float, queue_size: int = QUEUE_SIZE) -> Simulated:
    dice = np.random.default_rng(0)
    return simulate(
        arrivals_s,
        lambda rows: float(dice.choice(curve[rows])),
        max_batch=max(curve),
        queue_size=queue_size,
        overhead_s=overhead_s,
    )


def replicas_for(rate: float, curve: Curve, limit_ms: float, overhead_s: float = 0.0) -> int | None:
    """The smallest number of replicas that keeps p99 within the limit for random arrivals.

    None if no number does, because a run alone takes longer.
    """
    if 1e3 * (statistics.median(curve[1]) + overhead_s) > limit_ms:
        return None

    def suffices(replicas: int) -> bool:
        result = prediction(poisson_times(rate / replicas, 3000 * replicas / rate), curve, overhead_s)
        return result.refused == 0 and result.percentile_ms(0.99) <= limit_ms

    enough = max(1, int(rate / rate_of(curve)))
    while not suffices(enough):
        # a lone request may miss the limit once in a hundred: then no number is enough
        if enough > 20 * max(1.0, rate / rate_of(curve)):
            return None
        enough += max(1, enough // 20)
    return enough


def overhead_of(server: ServerProcess, sample: Sample) -> float:
    """Seconds that a lone request takes in addition to its run: HTTP, checks, and the way to the process and back."""
    before = server.metric("effexport_compute_seconds_sum")
    started = time.perf_counter()
    for _ in range(30):
        asyncio.run(exchange_once(server.port, sample.request))
    wall_s = time.perf_counter() - started
    return (wall_s - (server.metric("effexport_compute_seconds_sum") - before)) / 30


async def paced(times: Sequence[float], curve: Curve) -> tuple[list[float], int, float]:
    """Run the server's own queue with a runner that sleeps as long as runs took, so other work does not disturb it.

    Returns latencies in seconds, the number of refused requests, and the mean batch size.
    """
    dice = np.random.default_rng(0)
    batches: list[int] = []

    def run(feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        batches.append(len(feeds["x"]))
        time.sleep(float(dice.choice(curve[batches[-1]])))
        return feeds

    batcher = Batcher(run, ServingSettings(max_batch=max(curve), queue_size=QUEUE_SIZE), Metrics("paced"), joins=True)
    latencies: list[float] = []
    refused = 0
    begin = time.perf_counter() + 0.05
    row = np.zeros((1, 1))

    async def wait(answer: asyncio.Future[Mapping[str, Array]], planned: float) -> None:
        await answer
        latencies.append(time.perf_counter() - planned)

    async with asyncio.TaskGroup() as group:
        for offset in times:
            await asyncio.sleep(max(0.0, begin + offset - time.perf_counter()))
            try:
                job = batcher.submit({"x": row})
            except RequestError:
                refused += 1
            else:
                group.create_task(wait(job.answer, begin + offset))
    batcher.close()
    return latencies, refused, statistics.fmean(batches)


def compare(
    server: ServerProcess,
    samples: Sequence[Sample],
    measure: Callable[[], dict[int, list[float]]],
    overhead_s: float,
    seconds: float,
) -> None:
    """Print simulation, queue and server for each load.

    measure: returns the current durations of runs, which drift with other work on the machine.
    """
    curve = measure()
    columns = f"{'p50':>9} {'p90':>9} {'p99':>9} {'refused':>8} {'batch':>6}"
    print(f"\n{'load':>5} {'offered':>9} {'':>10} {'answered':>10} {columns}")
    for load in LOADS:
        capacity = rate_of(curve)
        times = poisson_times(load * capacity, seconds)
        before = server.batch_sizes()
        real = asyncio.run(open_loop(server.port, samples, times))
        sizes = server.batch_sizes() - before
        curve, earlier = measure(), curve
        around = {rows: earlier[rows] + curve[rows] for rows in curve}
        predicted = prediction(times, around, overhead_s)
        mean = sum(rows * count for rows, count in sizes.items()) / sum(sizes.values())
        queue, queue_refused, queue_batch = asyncio.run(paced(times, around))
        queue_line = Simulated(queue, [], queue_refused, times[-1])
        lines = (
            ("simulation", predicted.per_s, predicted.percentile_ms, predicted.refused, predicted.mean_batch),
            ("queue", queue_line.per_s, queue_line.percentile_ms, queue_refused, queue_batch),
            ("server", real.per_s, real.percentile_ms, real.statuses[503], mean),
        )
        for name, per_s, percentile, refused, batch in lines:
            print(
                f"{load:5.2f} {load * capacity:7.1f}/s {name:>10} {per_s:8.1f}/s {percentile(0.5):6.0f} ms "
                f"{percentile(0.9):6.0f} ms {percentile(0.99):6.0f} ms {refused:8d} {batch:6.2f}"
            )
        if real.wrong or real.lost:
            print(f"      wrong {real.wrong}, lost {real.lost}: ignore these figures")


def plan(curve: Curve, overhead_s: float, users: Sequence[int], every_s: float, limit_ms: float) -> None:
    print(f"\nreplicas for users who each send a request every {every_s:g} s, with p99 within {limit_ms:g} ms:")
    for count in users:
        replicas = replicas_for(count / every_s, curve, limit_ms, overhead_s)
        needed = "impossible, because a run alone takes too long" if replicas is None else f"{replicas}"
        print(f"  {count:7,d} users, {count / every_s:8.1f}/s: {needed}")


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of measuring run durations")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each load")
    parser.add_argument("--users", default="100,1000,10000")
    parser.add_argument("--every-s", type=float, default=60.0, help="how often a user sends a request")
    parser.add_argument("--limit-ms", type=float, default=1000.0, help="limit of p99")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = artifact_of(arguments, folder)
        with effexport.load(path, runtime=arguments.runtime) as runner:
            spec = open_artifact(path).spec
            samples = make_samples(path.name, runner, spec, [arguments.seq_len] * 16)
            curve = measured_curve(runner, arguments.seq_len, arguments.max_batch, arguments.rounds)
            load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
            print(f"{path.name}: {spec.model.title}, seq {arguments.seq_len}, {os.cpu_count()} cores, load {load}")
            print("rows of a run: median duration, requests per second")
            for rows, times in curve.items():
                print(f"  {rows:3d}: {1e3 * statistics.median(times):7.1f} ms {rows / statistics.median(times):7.1f}/s")
            # the simulation has one runner, which uses the whole machine, and only rows limit its runs
            options = {
                "--max-batch": arguments.max_batch,
                "--runtime": arguments.runtime,
                "--concurrent-runs": 1,
                "--max-run-tokens": arguments.max_batch * arguments.seq_len,
            }
            words = [str(word) for option in options.items() for word in option]
            with running_server(path, folder, *words) as server:
                overhead_s = overhead_of(server, samples[0])
                print(f"a lone request takes {1e3 * overhead_s:.1f} ms in addition to its run")
                measure = partial(measured_curve, runner, arguments.seq_len, arguments.max_batch, arguments.rounds)
                compare(server, samples, measure, overhead_s, arguments.seconds)
        users = [int(count) for count in arguments.users.split(",")]
        plan(curve, overhead_s, users, arguments.every_s, arguments.limit_ms)


if __name__ == "__main__":
    main()
