"""The tables of docs/quantization.md: size, time, and the two verdicts of every variant in every precision.

    .venv/bin/python -m scripts.quantization_table [--variant NAME …] [--trained]

Times are medians of calls on one thread, all precisions of a variant in turns; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import effexport
from effexport.base.spec import build_spec_from_options
from effexport.models.variants import ATTENTION_SPECS
from effexport.proof.check import Kind
from effexport.report.report import Report
from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner
from scripts.training.experiments import EXPERIMENTS
from scripts.turns import timed_in_turns

ROOT = Path(__file__).parents[1]
SEQ_LEN, ROUNDS, WARM_UP = 1024, 21, 4
# Real text that every checkout has.
TEXT = ROOT / "CHANGELOG.md"
SCHEMES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "int8 dynamic": {"precision": "int8"},
    "int8 static": {"precision": "int8", "quantization": "static"},
    "fp8": {"precision": "fp8"},
}
TRAINED = ("causal-linear", "masked-nystrom", "masked-lsh", "masked-aft-conv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", action="append", choices=list(ATTENTION_SPECS))
    parser.add_argument("--trained", action="store_true", help="the models that scripts/train_proof.py has trained")
    options = parser.parse_args()
    rows = trained_rows() if options.trained else default_rows(options.variant or list(ATTENTION_SPECS))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def default_rows(variants: list[str]) -> Iterator[tuple[str, ...]]:
    """(variant, precision, size, time, verdict on the arithmetic, loss)."""
    yield "variant", "precision", "size", "time", "own model: RMS error", "against float: RMS error, cosine"
    yield ("---",) * 6
    for variant in variants:
        with tempfile.TemporaryDirectory() as folder:
            built = {name: build(variant, fields, Path(folder) / name) for name, fields in SCHEMES.items()}
            times = milliseconds({name: result.artifact.model_path for name, result in built.items()})
            for name, result in built.items():
                size = result.artifact.model_path.stat().st_size / 1e6
                speed = f"{times[name]:.1f} ms, {times['fp32'] / times[name]:.2f} ×"
                yield variant, name, f"{size:.1f} MB", speed, own_error(result.report), loss(result.report)


def build(variant: str, fields: Mapping[str, Any], folder: Path) -> effexport.BuildResult:
    spec = build_spec_from_options({"variant": variant, "seq_len": SEQ_LEN, **fields}, None).decided(has_engines=False)
    return effexport.build(spec, folder, calibration=TEXT if spec.is_quantized else None)


def milliseconds(models: Mapping[str, Path]) -> dict[str, float]:
    """The median time of a call of each model, in turns."""
    runners = {name: OrtRunner(path, RunOptions(threads=1)) for name, path in models.items()}
    feeds = {"input_ids": np.random.default_rng(0).integers(2, 258, (1, SEQ_LEN))}
    calls = {name: partial(runner.run, feeds) for name, runner in runners.items()}
    taken = timed_in_turns(calls, ROUNDS, warm_up=WARM_UP)
    return {name: 1e3 * statistics.median(values) for name, values in taken.items()}


def own_error(report: Report) -> str:
    """The largest RMS error against PyTorch's model of the same precision, with the same roundings and buckets."""
    checks = (check for check in report.checks if check.kind in WITH_SAME_DECISIONS and check.status != "not run")
    values = [check.measures["rms_error"] for check in checks]
    return f"{max(values):.1e}"


WITH_SAME_DECISIONS = (Kind.GIVEN_ROUNDINGS, Kind.ARITHMETIC, Kind.GIVEN_BUCKETS)


def loss(report: Report) -> str:
    found = report.quantization
    if found is None or found.loss is None:
        return "–"
    flips = "" if found.loss.bucket_flips is None else f", {100 * found.loss.bucket_flips:.2f} % of buckets"
    return f"{100 * found.loss.rms_error:.2f} %, {found.loss.cosine:.5f}{flips}"


def trained_rows() -> Iterator[tuple[str, ...]]:
    """(model, precision, RMS error, bits per byte, relative change of the loss)."""
    yield "model", "precision", "against float: RMS error", "task: loss", "float", "change"
    yield ("---",) * 6
    for name in TRAINED:
        for scheme in ("bf16", "int8 dynamic", "int8 static", "fp8"):
            with tempfile.TemporaryDirectory() as folder:
                text = Path(folder) / "text"
                text.write_bytes((ROOT / "README.md").read_bytes()[: 16 * 512])
                result = trained(name, SCHEMES[scheme], text, Path(folder))
            record = result.report.quantization
            assert record is not None
            assert record.loss is not None
            figure = next(figure for figure in record.task if figure.name == "loss")
            change = f"{100 * figure.relative_loss:+.2f} %"
            values = (f"{figure.quantized_value:.4f}", f"{figure.float_value:.4f}", change)
            yield name, scheme, f"{100 * record.loss.rms_error:.2f} %", *values


def trained(name: str, fields: Mapping[str, Any], text: Path, folder: Path) -> effexport.BuildResult:
    spec = replace(EXPERIMENTS[name].spec("", "fp32"), **fields)
    weights = ROOT / "build" / "trained" / f"{name}.safetensors"
    return effexport.build(spec, folder / "built", weights=weights, calibration=TEXT, evaluate=text)


if __name__ == "__main__":
    main()
