"""Made-up results of benchmarks, whose times follow power laws: what crosses where is known."""

from __future__ import annotations

from typing import Any

from effexport.bench.results import BenchResults, Case, Floor, Parity, Row, Timing

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
PASSED = Parity(passed=True, metric="max |error| / RMS", value=2.5e-6, limit=2e-4)
FAILED = Parity(passed=False, metric="max |error| / RMS", value=3e-3, limit=2e-4, detail="worst at y[0, 63, 17]")


def case(label: str = "linear", seq_len: int = 1024, runtime: str = "ort", **fields: Any) -> Case:
    variant = MODELS[label][0] if label in MODELS else label
    sizes: dict[str, Any] = {
        "variant": variant,
        "scope": "core",
        "batch": 1,
        "precision": "fp32",
        "heads": 4,
        "head_dim": 64,
    }
    return Case(label=label, runtime=runtime, seq_len=seq_len, **(sizes | fields))


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


def row(label: str, seq_len: int, runtime: str = "ort", **fields: Any) -> Row:
    """A measured row of a model of MODELS. fields: of the case."""
    _, ms, ms_power, size, size_power = MODELS[label]
    growth, share = seq_len / 1024, RUNTIMES.get(runtime, 1.0)
    median = ms * growth**ms_power * share
    softmax = MODELS["softmax"][1] * growth**2 * share
    return Row(
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


def results(rows: tuple[Row, ...] | None = None, **fields: Any) -> BenchResults:
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


def without_timing(status: Any, reason: str, parity: Parity | None = None, **fields: Any) -> Row:
    return Row(case=case(**fields), status=status, reason=reason, parity=parity)
