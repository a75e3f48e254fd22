"""Made-up results of benchmarks, whose times follow power laws: what crosses where is known."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from effexport.bench.grid import Agreement, BenchCase, BenchResults, BenchRow, Floor, Timing
from effexport.bench.page import document_from_results
from effexport.bench.presets import PRESETS
from effexport.render.formats import html_from_document

LENGTHS = (512, 1024, 2048, 4096, 8192)
# label → variant, and milliseconds and bytes at 1024 tokens with the powers of the length by which they grow
MODELS: dict[str, tuple[str, float, float, float, float]] = {
    "softmax": ("softmax", 4.0, 2.0, 8e6, 2.0),
    "linear": ("linear", 2.0, 1.0, 2e6, 1.0),
    "nystrom-64": ("nystrom", 4.0, 1.0, 4e6, 1.0),
    "lsh, 4 rounds": ("lsh", 16.0, 1.0, 16e6, 1.0),
}
# how many times the time of the first runtime
RUNTIMES = {"torch": 1.0, "ort": 0.8, "ort-cuda": 0.05}
PASSED = Agreement(passed=True, metric="max |error| / RMS", value=2.5e-6, limit=2e-4)
FAILED = Agreement(passed=False, metric="max |error| / RMS", value=3e-3, limit=2e-4, detail="worst at y[0, 63, 17]")


def case(label: str = "linear", seq_len: int = 1024, runtime: str = "ort", **fields: Any) -> BenchCase:
    variant = MODELS[label][0] if label in MODELS else label
    sizes: dict[str, Any] = {
        "variant": variant,
        "scope": "core",
        "batch": 1,
        "precision": "fp32",
        "heads": 4,
        "head_dim": 64,
    }
    return BenchCase(label=label, runtime=runtime, seq_len=seq_len, **(sizes | fields))


def timing(median_ms: float) -> Timing:
    return Timing(
        runs=50,
        median_ms=median_ms,
        mean_ms=1.02 * median_ms,
        deviation_ms=0.04 * median_ms,
        lowest_ms=0.95 * median_ms,
        highest_ms=1.3 * median_ms,
        spread_ms=0.02 * median_ms,
    )


def row(label: str, seq_len: int, runtime: str = "ort", **fields: Any) -> BenchRow:
    """A measured row of a model of MODELS. fields: of the case."""
    _, ms, ms_power, size, size_power = MODELS[label]
    growth, share = seq_len / 1024, RUNTIMES.get(runtime, 1.0)
    median = ms * growth**ms_power * share
    softmax = MODELS["softmax"][1] * growth**2 * share
    return BenchRow(
        case=case(label, seq_len, runtime, **fields),
        status="measured",
        parity=None if runtime == "torch" else PASSED,
        timing=timing(median),
        floor=Floor(products_ms=0.3 * median, pass_ms=0.02 * growth),
        peak_bytes=int(size * growth**size_power),
        implementation={"LSHSort": "kernel"} if label.startswith("lsh") and runtime != "torch" else {},
        times_softmax=softmax / median,
        times_torch=1 / share,
    )


def results(rows: tuple[BenchRow, ...] | None = None, **fields: Any) -> BenchResults:
    """A benchmark of all models, lengths and runtimes, or of the rows that are given."""
    if rows is None:
        rows = tuple(row(label, n, runtime) for n in LENGTHS for runtime in RUNTIMES for label in MODELS)
    known: dict[str, Any] = {
        "created": "2026-01-02T03:04:05+00:00",
        "command": "effexport bench --variants softmax,linear,nystrom,lsh --seq-lens 512,1024,2048,4096,8192 -o bench/",
        "rounds": 5,
        "threads": 2,
        "machine": {"processor": "A processor", "cores": "2", "GPU": "A GPU", "memory": "16 GB"},
        "environment": {"effexport": "0.1.0", "torch": "2.13.0", "onnxruntime": "1.30.0"},
    }
    return BenchResults(rows=rows, **(known | fields))


def html_from_results(*found: Any) -> str:
    """The page of a benchmark, and of its advice."""
    return html_from_document(document_from_results(*found))


def without_timing(status: Any, reason: str, parity: Agreement | None = None, **fields: Any) -> BenchRow:
    return BenchRow(case=case(**fields), status=status, reason=reason, parity=parity)


HOSTILE = """<script>alert(1)</script> & "quotes" 'too'"""


def ort_only(**fields: Any) -> BenchResults:
    return results(tuple(row(label, length) for length in LENGTHS for label in MODELS), **fields)


def broken_results() -> BenchResults:
    """Interrupted, with rows that failed, that were not run, and of which little is known."""
    rows = [
        *results().rows[:30],
        without_timing("failed", "parity failed", FAILED, label="lsh, 4 rounds", seq_len=8192),
        without_timing("failed", "the runtime ended", label="linear", seq_len=8192),
        *[without_timing("not run", "there is no GPU", label=label, runtime="trt") for label in MODELS],
        replace(row("linear", 2048, "trt"), times_softmax=None, times_torch=None, floor=None, peak_bytes=None),
        replace(row("linear", 4096), parity=None),
    ]
    return results(tuple(rows), complete=False)


def two_hundred_rows() -> BenchResults:
    runtimes = ("torch", "ort", "ort-cuda", "ort-trt", "trt")
    models = itertools.product(range(2), MODELS)
    rows: list[BenchRow] = []
    for (n, label), runtime, length in itertools.product(models, runtimes, LENGTHS):
        one = row(label, length, runtime)
        variant = one.case.variant if n == 0 else f"other-{one.case.variant}"
        rows.append(replace(one, case=replace(one.case, label=variant if n else label, variant=variant)))
    assert len(rows) == 200
    return results(tuple(rows))


def preset_results(preset: str) -> BenchResults:
    rows = [row(label, length, runtime) for runtime in ("torch", "ort") for label in MODELS for length in LENGTHS]
    return results(tuple(rows), preset=preset)


def hostile_results() -> BenchResults:
    one = row("linear", 512)
    bad = replace(one, case=replace(one.case, label=HOSTILE, runtime=HOSTILE, options={HOSTILE: HOSTILE}))
    failed = without_timing("failed", HOSTILE, replace(FAILED, detail=HOSTILE, metric=HOSTILE), label=HOSTILE)
    known = {
        "command": HOSTILE,
        "created": "<b>now</b>",
        "machine": {HOSTILE: HOSTILE},
        "environment": {HOSTILE: HOSTILE},
    }
    operators = replace(bad, case=replace(bad.case, seq_len=1024), implementation={HOSTILE: HOSTILE})
    return results((bad, operators, failed), preset=HOSTILE, **known)


RESULTS = {
    "whole": results,
    "one runtime": ort_only,
    "broken": broken_results,
    "one row": lambda: results((row("linear", 1024),)),
    "nothing timed": lambda: results((without_timing("not run", "there is no GPU"),)),
    "200 rows": two_hundred_rows,
    "hostile": hostile_results,
    **{preset: (lambda preset=preset: preset_results(preset)) for preset in PRESETS},
}
