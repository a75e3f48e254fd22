#!/usr/bin/env python3
"""Measure `effexport serve` on this machine: speed beside the runner, lengths of all kinds, latency, and overload.

The server runs in a process of its own. The load comes from this process, over 127.0.0.1, and its share of the machine
is printed. The runner in a loop takes turns with the server, at the batch sizes that the server ran. docs/scale.md
shows results; scripts/simulate_serving.py compares such results with a simulation.

    .venv/bin/python scripts/bench_serve.py                                    # all of it, about four minutes
    .venv/bin/python scripts/bench_serve.py --variant linear --only throughput,latency
    .venv/bin/python scripts/bench_serve.py --artifact artifacts/lsh --seq-len 512 --json serve.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from serving_load import (  # noqa: E402
    Outcome,
    Sample,
    ServerProcess,
    binary_request,
    closed_loop,
    even_times,
    exchange_once,
    open_loop,
    poisson_times,
    running_server,
)

import effexport  # noqa: E402
from effexport.artifact import open_artifact  # noqa: E402
from effexport.base.spec import BuildSpec, build_spec_from_options  # noqa: E402
from effexport.proof.tolerances import arithmetic_limit  # noqa: E402
from effexport.runners.runner import Runner  # noqa: E402

MIXED_LENGTHS = (64, 2048)
MIB = 1 << 20
COMPUTE = "effexport_compute_seconds_sum"


@dataclass(frozen=True)
class Bench:
    """The setup that all phases share. start: starts another server, with further options."""

    server: ServerProcess
    start: Callable[..., AbstractContextManager[ServerProcess]]
    runner: Runner
    path: Path
    samples: Sequence[Sample]
    seq_len: int
    arguments: argparse.Namespace

    def feeds(self, rows: int) -> dict[str, np.ndarray]:
        return {"input_ids": np.random.default_rng(rows).integers(2, 250, (rows, self.seq_len))}


def make_samples(model: str, runner: Runner, spec: BuildSpec, lengths: Sequence[int]) -> list[Sample]:
    """Requests of one row and these lengths, with the runner's output for each alone.

    Rows in a batch may differ from it by rounding.
    """
    limit = arithmetic_limit(spec).value
    samples = []
    for seed, seq_len in enumerate(lengths):
        feeds = {"input_ids": np.random.default_rng(1000 + seed).integers(2, 250, (1, seq_len))}
        right = next(iter(runner.run(feeds).values()))
        scale = float(np.sqrt(np.mean(np.square(right, dtype=np.float64))))
        samples.append(Sample(binary_request(model, feeds), right.tobytes(), limit * scale))
    return samples


def busy_s() -> float:
    """CPU seconds that all processes of the machine together have used so far."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def remarks(outcome: Outcome) -> str:
    """Counts of answers, and the share of the machine that the client took."""
    share = outcome.client_cpu_s / outcome.wall_s / (os.cpu_count() or 1)
    answers = f"wrong {outcome.wrong}, lost {outcome.lost}, statuses {dict(outcome.statuses)}"
    return f"{answers}; client {100 * share:.0f} % of the machine"


def runner_loop(bench: Bench, sizes: Counter[int]) -> tuple[float, float]:
    """Seconds and CPU seconds that the runner alone takes for runs of these sizes, one after the other."""
    total = total_cpu = 0.0
    for rows, count in sizes.items():
        feeds = bench.feeds(rows)
        bench.runner.run(feeds)
        times = []
        cpu = time.process_time()
        # at least three runs of every size, for a stable mean
        for _ in range(max(3, min(count, 40))):
            started = time.perf_counter()
            bench.runner.run(feeds)
            times.append(time.perf_counter() - started)
        total += statistics.fmean(times) * count
        total_cpu += (time.process_time() - cpu) / len(times) * count
    return total, total_cpu


async def throughput(bench: Bench) -> dict[str, Any]:
    """Rounds of: the server under load, then the runner in a loop over the batch sizes that the server ran."""
    ratios, rates, loops, cpu_ratios, sizes_seen = [], [], [], [], Counter()
    for _ in range(bench.arguments.rounds):
        before, cpu = bench.server.batch_sizes(), bench.server.cpu_s
        computed = bench.server.metric(COMPUTE)
        outcome = await closed_loop(bench.server.port, bench.samples, bench.arguments.clients, bench.arguments.requests)
        sizes = bench.server.batch_sizes() - before
        rows = sum(size * count for size, count in sizes.items())
        server_cpu = (bench.server.cpu_s - cpu) / rows
        computed = bench.server.metric(COMPUTE) - computed
        loop_s, loop_cpu_s = runner_loop(bench, sizes)
        loop_rate = rows / loop_s
        cpu_ratios.append(loop_cpu_s / rows / server_cpu)
        ratios.append(outcome.per_s / loop_rate)
        rates.append(outcome.per_s)
        loops.append(loop_rate)
        sizes_seen += sizes
        print(
            f"  server {outcome.per_s:6.1f}/s, runner in a loop {loop_rate:6.1f}/s at the same batch sizes, "
            f"ratio {ratios[-1]:.2f}; CPU of a request {server_cpu * 1e3:.1f} and {loop_cpu_s / rows * 1e3:.1f} ms, "
            f"ratio {cpu_ratios[-1]:.2f}; {100 * computed / outcome.wall_s:.0f} % of the time in runs; "
            f"{remarks(outcome)}"
        )
    mean = sum(size * count for size, count in sizes_seen.items()) / sum(sizes_seen.values())
    ratio = statistics.median(ratios)
    sizes_text = dict(sorted(sizes_seen.items()))
    cpu_text = f"by CPU time, which depends less on other work on the machine, {statistics.median(cpu_ratios):.2f}"
    print(f"  median ratio {ratio:.2f} (at least 0.85 wanted); {cpu_text}; mean batch {mean:.1f}, sizes {sizes_text}")
    return {
        "ratio": ratio,
        "ratios": ratios,
        "cpu_ratios": cpu_ratios,
        "server_per_s": rates,
        "loop_per_s": loops,
        "batch_sizes": sizes_seen,
    }


# Servers that take turns with the default one: one run at a time, of one length; and as many as by default.
ONE_RUN = ("--max-padding", "0", "--concurrent-runs", "1", "--max-run-tokens", str(10**9))
ONE_LENGTH = ("--max-padding", "0")


async def mixed(bench: Bench) -> dict[str, Any]:
    """Many lengths, log-uniform: the server in turns with one that runs one at a time, and one that pads nothing."""
    shortest, longest = map(int, bench.arguments.mixed_lengths.split(","))
    spec = open_artifact(bench.path).spec
    ends = np.log((shortest, min(longest, spec.model.max_seq_len or longest)))
    lengths = np.exp(np.random.default_rng(0).uniform(*ends, bench.arguments.mixed_requests)).astype(int)
    samples = make_samples(bench.server.model, bench.runner, spec, lengths.tolist())
    with bench.start(*ONE_RUN) as one_run, bench.start(*ONE_LENGTH) as one_length:
        servers = {"one run": one_run, "one length": one_length, "default": bench.server}
        rounds = []
        for _ in range(bench.arguments.rounds):
            rounds.append([await mixed_round(name, servers[name], samples, bench.arguments) for name in servers])
    # axes: round, server, figure
    found = np.array(rounds)
    ratios = found / found[:, :1]
    results = {}
    for number, name in enumerate(servers):
        per_s, p50, p99 = np.median(found[:, number], axis=0)
        factor, _, slower = np.median(ratios[:, number], axis=0)
        lowest, highest = ratios[:, number, 0].min(), ratios[:, number, 0].max()
        print(
            f"  {name:>10}: medians {per_s:.1f}/s, median {p50:.0f} ms, p99 {p99:.0f} ms; {factor:.2f} × the rate "
            f"({lowest:.2f} to {highest:.2f}) and {slower:.2f} × the p99 of one run"
        )
        results[name] = {"per_s": per_s, "p50_ms": p50, "p99_ms": p99, "rate_ratio": factor, "p99_ratio": slower}
    print("  at least 1.5 × the rate wanted, at no larger p99")
    return {"medians": results, "rounds": rounds}


async def mixed_round(
    name: str, server: ServerProcess, samples: Sequence[Sample], arguments: argparse.Namespace
) -> tuple[float, ...]:
    """Requests per second, median and p99 in ms."""
    before, cpu, busy = server.batch_sizes(), server.cpu_s, busy_s()
    outcome = await closed_loop(server.port, samples, arguments.clients, len(samples))
    cpu, busy = server.cpu_s - cpu, busy_s() - busy
    sizes = server.batch_sizes() - before
    others = (busy - cpu - outcome.client_cpu_s) / outcome.wall_s / (os.cpu_count() or 1)
    mean = sum(rows * count for rows, count in sizes.items()) / sum(sizes.values())
    found = (outcome.per_s, outcome.percentile_ms(0.5), outcome.percentile_ms(0.99))
    print(
        f"  {name:>10}: {found[0]:5.1f}/s, median {found[1]:.0f} ms, p99 {found[2]:.0f} ms, mean batch {mean:.2f}, "
        f"{server.rss_bytes / MIB:.0f} MiB; CPU of a request {cpu / len(samples) * 1e3:.0f} ms; {remarks(outcome)}, "
        f"other processes {100 * others:.0f} %",
        flush=True,
    )
    return found


async def capacity_of(bench: Bench) -> float:
    """Requests per second of a busy server."""
    outcome = await closed_loop(bench.server.port, bench.samples, bench.arguments.clients, bench.arguments.requests)
    return outcome.per_s


async def latency(bench: Bench) -> dict[str, Any]:
    """Open loops at half the capacity: requests arrive on schedule, whether earlier ones are answered or not."""
    capacity = await capacity_of(bench)
    result: dict[str, Any] = {"capacity_per_s": capacity}
    for name, times in (("steady", even_times), ("poisson", poisson_times)):
        outcome = await open_loop(bench.server.port, bench.samples, times(capacity / 2, bench.arguments.seconds))
        p50, p99 = outcome.percentile_ms(0.5), outcome.percentile_ms(0.99)
        print(
            f"  {name} arrivals at {capacity / 2:.1f}/s: median {p50:.1f} ms, p90 {outcome.percentile_ms(0.9):.1f} ms, "
            f"p99 {p99:.1f} ms, p99 / median {p99 / p50:.2f}; {len(outcome.latencies_s)} requests, {remarks(outcome)}"
        )
        result[name] = {"p50_ms": p50, "p99_ms": p99, "ratio": p99 / p50, "wrong": outcome.wrong, "lost": outcome.lost}
    print(f"  p99 / median with steady arrivals: {result['steady']['ratio']:.2f} (at most 3 wanted)")
    return result


async def overload(bench: Bench) -> dict[str, Any]:
    """Twice the capacity for a minute; then how soon a lone request is answered as quickly as before."""
    capacity = await capacity_of(bench)
    quiet = [await lone_latency(bench) for _ in range(20)]
    typical = statistics.median(quiet)
    before = bench.server.rss_bytes
    highest = [before]
    watcher = asyncio.create_task(watch_memory(bench.server, highest))
    times = even_times(2 * capacity, bench.arguments.overload_seconds)
    outcome = await open_loop(bench.server.port, bench.samples, times)
    ended = time.perf_counter()
    watcher.cancel()
    # open_loop waited for the last answers, so emptying the queue is part of the recovery
    backlog_s = outcome.wall_s - times[-1]
    while await lone_latency(bench) > 2 * typical and time.perf_counter() - ended < 30:
        pass
    recovered = backlog_s + time.perf_counter() - ended
    print(
        f"  {2 * capacity:.0f}/s for {outcome.wall_s:.0f} s: 503 with Retry-After {outcome.retry_after}; answered "
        f"{outcome.per_s:.1f}/s of {capacity:.1f}/s; {remarks(outcome)}\n"
        f"  RSS before {before / MIB:.0f} MiB, highest {max(highest) / MIB:.0f} MiB, after "
        f"{bench.server.rss_bytes / MIB:.0f} MiB; a lone request takes {typical * 1e3:.1f} ms, and at most twice that "
        f"again {recovered:.2f} s after the last arrival (at most 2 s wanted)"
    )
    return {"statuses": dict(outcome.statuses), "wrong": outcome.wrong, "lost": outcome.lost, "recovered_s": recovered,
            "rss_before": before, "rss_highest": max(highest), "capacity_per_s": capacity}  # fmt: skip


async def lone_latency(bench: Bench) -> float:
    started = time.perf_counter()
    reply = await exchange_once(bench.server.port, bench.samples[0].request)
    return time.perf_counter() - started if reply.status == 200 else float("inf")


async def watch_memory(server: ServerProcess, seen: list[int]) -> None:
    while True:
        seen.append(server.rss_bytes)
        await asyncio.sleep(0.2)


def artifact_of(arguments: argparse.Namespace, folder: Path) -> Path:
    if arguments.artifact is not None:
        return Path(arguments.artifact)
    from effexport.pipeline.build import artifact_from_spec

    print(f"building the default {arguments.variant} encoder", flush=True)
    spec = build_spec_from_options(
        {"variant": arguments.variant, "seq_len": max(MIXED_LENGTHS[1], arguments.seq_len)}, None
    )
    return artifact_from_spec(spec, folder / arguments.variant)[0].path


PHASES = {"throughput": throughput, "mixed": mixed, "latency": latency, "overload": overload}


async def run(bench: Bench, phases: Sequence[str]) -> dict[str, Any]:
    results = {}
    for phase in (phase for phase in PHASES if phase in phases):
        action = PHASES[phase]
        print(f"{phase}: {(action.__doc__ or '').strip().splitlines()[0]}", flush=True)
        results[phase] = await action(bench)
    return results


def parser_of(about: str) -> argparse.ArgumentParser:
    """The options that this script shares with simulate_serving.py."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--artifact", help="artifact folder; default: build a default encoder")
    parser.add_argument("--variant", default="nystrom")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--runtime", default="ort", help="as in effexport serve")
    parser.add_argument("--max-batch", type=int, default=8)
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--server-options", default="", help="further options of the server, in one argument")
    parser.add_argument("--clients", type=int, default=16, help="number of clients that measure throughput")
    parser.add_argument("--requests", type=int, default=400, help="requests per round")
    parser.add_argument("--mixed-requests", type=int, default=200, help="requests per round of mixed lengths")
    parser.add_argument("--mixed-lengths", default=",".join(map(str, MIXED_LENGTHS)), help="the shortest and longest")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each latency measurement")
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--only", default=",".join(PHASES), help="phases, separated by commas")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    phases = arguments.only.split(",")
    if set(phases) - set(PHASES):
        raise SystemExit(f"--only is {arguments.only!r}; expected some of: {', '.join(PHASES)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = artifact_of(arguments, folder)
        with effexport.load(path, runtime=arguments.runtime) as runner:
            spec = open_artifact(path).spec
            load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
            print(f"{path.name}: {spec.model.title}, seq {arguments.seq_len}, {os.cpu_count()} cores, load {load}")
            options = ["--max-batch", str(arguments.max_batch), "--runtime", arguments.runtime]
            start = partial(running_server, path, folder, *options)
            with start(*arguments.server_options.split()) as server:
                samples = make_samples(server.model, runner, spec, [arguments.seq_len] * 32)
                bench = Bench(server, start, runner, path, samples, arguments.seq_len, arguments)
                results = asyncio.run(run(bench, phases))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
