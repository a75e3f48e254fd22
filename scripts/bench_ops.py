#!/usr/bin/env python3
"""Time the kernels of operators on this CPU: kernel, function body, PyTorch, ONNX Runtime's own operator if it has one
that can stand for ours (`--carrier contrib`), and the baselines of the contract.

Inputs, sizes and limits are those of the operator's contract: of the first case that it times, in float32, unless other
sizes are given, in its order. What has the outputs of the operator is compared with the torch operator before it is
timed. Candidates take turns as in `effexport bench`; only the ratios of one run are worth quoting. The lower bound
copies as many bytes as all inputs and outputs have.

    .venv/bin/python scripts/bench_ops.py                                  # all operators
    .venv/bin/python scripts/bench_ops.py --op iterative_pinv --op lsh_sort --sizes 16,8192,256 --output ops.json
    .venv/bin/python scripts/bench_ops.py --op causal_conv --sizes 1,2048,8192,4,1 --threads 1
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support")]

from emulated_plugins import array_of  # noqa: E402
from one_node import one_node_model  # noqa: E402
from turns import Call, rotated  # noqa: E402

from effexport.base.environment import versions  # noqa: E402
from effexport.base.machine import peak_bytes_of  # noqa: E402
from effexport.bench.timing import times_faster  # noqa: E402
from effexport.export.custom_nodes import use_carriers  # noqa: E402
from effexport.plugins.building.library import find_library  # noqa: E402
from effexport.plugins.contract import Case, Contract, load_contract  # noqa: E402
from effexport.plugins.ops import OPS, Op  # noqa: E402
from effexport.runners.options import RunOptions  # noqa: E402
from effexport.runners.ort.runner import OrtRunner  # noqa: E402

BY_NAME = {op.torch_name: op for op in OPS.values()}
KERNEL, BODY, TORCH, BOUND = "kernel", "body in ONNX Runtime", "torch operator", "lower bound: a copy of the bytes"
CARRIER = "ONNX Runtime's own operator"


@dataclass(frozen=True)
class Timing:
    """times_kernel: the median over the rounds. peak_bytes: beside inputs, without a memory arena. disturbed: whether
    other programs disturbed too many rounds for a median to quote."""

    name: str
    median_us: float
    lowest_us: float
    highest_us: float
    times_kernel: float | None
    peak_bytes: int | None
    disturbed: bool


def main() -> None:
    arguments = parse_arguments()
    library = find_library()
    if library is None or library.outdated:
        sys.exit("bench_ops.py: the kernel library is missing or outdated; build it with: effexport plugins build")
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    results: dict[str, Any] = {"environment": versions(), "machine": platform.machine(), "threads": arguments.threads}
    for name, sizes in arguments.cases:
        contract = load_contract(BY_NAME[name])
        case = case_of(contract, sizes)
        title = f"{name}: {contract.sizes} = {case.name}"
        print(f"\n{title}\n  {'':46}{'median':>12}{'lowest':>12}{'highest':>12}{'÷ kernel':>12}{'peak':>12}")
        timings = list(measured(BY_NAME[name], contract, case, arguments))
        results[title] = [asdict(timing) for timing in timings]
        for t in timings:
            times = "" if t.times_kernel is None else f"{t.times_kernel:.2f}"
            peak = "" if t.peak_bytes is None else f"{t.peak_bytes / 1e6:.0f} MB"
            figures = f"{t.median_us:9.0f} µs{t.lowest_us:9.0f} µs{t.highest_us:9.0f} µs{times:>12}{peak:>12}"
            print(f"  {t.name:46}{figures}{'  disturbed' * t.disturbed}", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=BY_NAME, help="repeatable; default: all of them")
    parser.add_argument("--sizes", type=sizes, metavar="N,…", help="of the last operator, in the contract's order")
    parser.add_argument("--turns", type=int, default=30, help="turns of each candidate (default 30)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of every candidate")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if arguments.turns < 3 or arguments.threads < 1:
        parser.error("--turns must be at least 3 and --threads at least 1")
    if arguments.sizes and not arguments.op:
        parser.error("--sizes belong to an operator; add --op")
    arguments.cases = [(name, None) for name in arguments.op or BY_NAME]
    arguments.cases[-1] = (arguments.cases[-1][0], arguments.sizes)
    return arguments


def sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def case_of(contract: Contract, sizes: tuple[int, ...] | None) -> Case:
    first = contract.timed[0].case if contract.timed else (*contract.cases, *contract.larger)[-1]
    if sizes and len(sizes) != len(first.sizes):
        sys.exit(
            f"bench_ops.py: --sizes has {len(sizes)} numbers; expected those of {contract.sizes}, as {first.sizes}"
        )
    dtype = first.dtype if first.dtype == "int32" else "float32"
    return replace(first, sizes=sizes or first.sizes, dtype=dtype)


def measured(op: Op, contract: Contract, case: Case, arguments: argparse.Namespace) -> Iterator[Timing]:
    """Timings of all candidates. Peaks are measured before, one by one."""
    inputs, attributes = contract.inputs(case, "cpu"), contract.attributes(case)
    feeds = {name: array_of(x) for name, x in inputs.items()}
    model = one_node_model(op.onnx_name, feeds, body=True, **attributes)

    def runner(how: str, memory_arena: bool = True) -> OrtRunner:
        opened = OrtRunner(model, RunOptions(implementation=how, threads=arguments.threads, memory_arena=memory_arena))
        assert set(opened.implementation.values()) == {how}
        return opened

    def carrier() -> OrtRunner:
        carried = ir.from_proto(onnx.load_model_from_string(model))
        for value in carried.graph.inputs:
            value.shape = ir.Shape(feeds[str(value.name)].shape)
        use_carriers(carried, "contrib")
        return OrtRunner(ir.to_proto(carried).SerializeToString(), RunOptions(threads=arguments.threads))

    def operator() -> Any:
        return getattr(op.load(), op.torch_name)(*inputs.values(), *attributes.values())

    kernel, body = runner("kernel"), runner("body")
    own = {CARRIER: carrier()} if op.carrier else {}
    expected = operator()
    limit = 2 * contract.limit(case).value  # both sides round
    for found in (one.run(feeds) for one in (kernel, body, *own.values())):
        for array, wanted in zip(found.values(), expected if isinstance(expected, tuple) else [expected], strict=True):
            error = np.abs(array - wanted.numpy()).max() / max(np.abs(wanted.numpy()).max(), 1)
            assert error <= limit, f"{op.torch_name}: error {error:.3g}; expected at most {limit:.3g}"
    bytes_of_all = sum(x.nbytes for x in (*feeds.values(), *found.values()))
    source, target = (torch.zeros(bytes_of_all // 2, dtype=torch.uint8) for _ in range(2))
    calls: dict[str, Call] = {
        KERNEL: kernel.bind(feeds).run,
        "kernel, outputs allocated": lambda: kernel.run(feeds),
        BODY: lambda: body.run(feeds),
        **{name: run_of(one, feeds) for name, one in own.items()},
        TORCH: operator,
        **contract.baselines(case, inputs),
        BOUND: lambda: target.copy_(source),
    }
    bare = {name: runner(how, memory_arena=False) for name, how in ((KERNEL, "kernel"), (BODY, "body"))}
    peaks = {name: peak_bytes_of(run_of(one, feeds)) for name, one in bare.items()}
    rotation = rotated(calls, arguments.turns)
    rounds = {name: rotation.used_rounds(name) for name in calls}
    for name, taken in rounds.items():
        us = [seconds * 1e6 for seconds in taken.values()]
        times = times_faster(rounds[KERNEL], taken, 1)
        disturbed = rotation.median_ms(name) is None
        yield Timing(name, statistics.median(us), min(us), max(us), times, peaks.get(name), disturbed)


def run_of(runner: OrtRunner, feeds: dict[str, np.ndarray]) -> Callable[[], object]:
    return lambda: runner.run(feeds)


if __name__ == "__main__":
    main()
