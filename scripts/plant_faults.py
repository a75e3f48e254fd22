#!/usr/bin/env python3
"""Plant every fault of tests/support/planted_faults.py into small artifacts, and show which checks catch it.

Each artifact is first verified without a fault; a healthy model that fails is an error too. Exit status 1 if a fault is
not caught or a healthy model fails.

    .venv/bin/python scripts/plant_faults.py                                 # everything
    .venv/bin/python scripts/plant_faults.py --variant lsh --fault "chunk off by one"
    .venv/bin/python scripts/plant_faults.py --bodies                        # faults in function bodies alone
    .venv/bin/python scripts/plant_faults.py --markdown faults.md

Faults in function bodies are those of tests/support/body_faults.py: every edit of every node. `verify` and `build`
check each body by itself, with kernels present or not, and that is the check that is tested here.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]

from body_faults import (  # noqa: E402
    FORMS,
    HALF,
    BodyFault,
    body_faults,
    damaged_use,
    healthy_use,
    reason_for_no_op,
)
from fused_faults import ALL_FAULTS  # noqa: E402
from pages import table  # noqa: E402
from planted_faults import CONFIGURATIONS, VARIANTS, Fault, plant  # noqa: E402
from small_specs import spec_of  # noqa: E402

from effexport.artifact import Artifact  # noqa: E402
from effexport.base.errors import EffexportError  # noqa: E402
from effexport.models.variants import ATTENTION_SPECS  # noqa: E402
from effexport.pipeline.build import artifact_from_spec  # noqa: E402
from effexport.proof.candidate import ModelCandidate, open_in_ort  # noqa: E402
from effexport.proof.cases import Case, load_reference  # noqa: E402
from effexport.proof.check import Check  # noqa: E402
from effexport.proof.checks.function_bodies import check_function_body  # noqa: E402
from effexport.proof.tolerances import relative_error, rms  # noqa: E402
from effexport.proof.verify import verify_candidate  # noqa: E402
from effexport.runners.options import RunOptions  # noqa: E402
from effexport.runners.runner import limits_from_spec  # noqa: E402

SETTINGS = RunOptions(memory_arena=False)
REFUSED = "does not run"
# The columns of the table of measures, each the worst over the cases.
MEASURES = ("max error / RMS", "RMS error / RMS", "1 − cosine")


@dataclass(frozen=True)
class Outcome:
    """The result of checking one model.

    fault: None for the healthy model.
    failed: names of the checks that failed.
    share: the largest value of a check divided by its limit.
    measures: the columns of MEASURES; None if the model gave no outputs of the right shape.
    """

    variant: str
    configuration: str
    fault: Fault | None
    failed: tuple[str, ...]
    share: float
    measures: tuple[float, ...] | None

    @property
    def reason_for_no_op(self) -> str:
        return "" if self.fault is None else self.fault.no_ops.get(self.variant, "")

    @property
    def as_expected(self) -> bool:
        """A fault is caught; a healthy model and an edit that changes nothing pass."""
        passes = self.fault is None or bool(self.reason_for_no_op)
        return bool(self.failed) != passes


def outcomes(variants: Sequence[str], faults: Sequence[Fault], folder: Path) -> Iterator[Outcome]:
    for variant in variants:
        for configuration, (scope, fields) in CONFIGURATIONS.items():
            if "causal" in configuration and ATTENTION_SPECS[variant].why_not_causal:
                continue
            spec = spec_of(variant, scope, **fields)
            artifact, _ = artifact_from_spec(spec, folder / f"{variant}-{configuration}")
            yield examine(artifact, artifact.model_path, variant, configuration, None)
            for index, fault in enumerate(faults):
                if not fault.applies(variant, configuration):
                    continue
                path = plant(fault, artifact, folder / f"{variant}-{configuration}-{index}")
                if path is None:
                    raise SystemExit(f"{fault.name} found nothing to damage in {variant} {configuration}")
                yield examine(artifact, path, variant, configuration, fault)


def examine(artifact: Artifact, model: Path, variant: str, configuration: str, fault: Fault | None) -> Outcome:
    """Verify a model as `effexport verify --model` does, and measure its errors."""
    cases = load_reference(artifact.reference_path)
    hashes = artifact.manifest.hash_values
    try:
        checks = verify_candidate(model, cases, artifact.spec, hashes, SETTINGS).checks
        failed = tuple(dict.fromkeys(check.name for check in checks if check.status == "failed"))
        candidate = ModelCandidate(model, hashes, limits_from_spec(artifact.spec), open_in_ort(SETTINGS))
        measures = None if "signature" in failed else measured(candidate, cases)
    except EffexportError:
        return Outcome(variant, configuration, fault, (REFUSED,), math.inf, None)
    return Outcome(variant, configuration, fault, failed, max(map(share_of_limit, checks)), measures)


def share_of_limit(check: Check) -> float:
    if check.value is None or not check.limit:
        return 0.0
    return check.value / check.limit if check.value == check.value else math.inf


def measured(candidate: ModelCandidate, cases: Sequence[Case]) -> tuple[float, ...]:
    """The worst of each of MEASURES over all samples; a model that hashes is given the buckets of the reference."""
    worst = np.zeros(len(MEASURES))
    for case in cases:
        if candidate.given:
            outputs, _ = candidate.run_with_given(case.inputs, case.buckets)
        else:
            outputs = candidate.run(case.inputs)
        for name, expected in case.outputs.items():
            for sample in case.samples(expected):
                pair = case.kept(name, outputs[name], sample), case.kept(name, expected, sample)
                worst = np.maximum(worst, distances(*(array.astype(np.float64) for array in pair)))
    return tuple(map(float, worst))


def distances(actual: np.ndarray, expected: np.ndarray) -> tuple[float, float, float]:
    if not np.isfinite(actual).all():
        return (math.inf,) * 3
    product = float(np.vdot(actual, expected))
    cosine = product / max(float(np.linalg.norm(actual) * np.linalg.norm(expected)), 1e-300)
    return relative_error(actual, expected)[0], rms(actual - expected) / rms(expected), 1 - cosine


def number(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "∞"
    return f"{value:.1e}" if value < 0.1 or value >= 1e4 else f"{value:.3g}"


def fault_table(results: Sequence[Outcome]) -> str:
    """The table fault × variant: the smallest share of a limit, and all checks that failed."""
    rows = []
    for fault in ALL_FAULTS:
        own = [result for result in results if result.fault is fault]
        if not own:
            continue
        cells = [cell([result for result in own if result.variant == variant]) for variant in VARIANTS]
        names = dict.fromkeys(name for result in own for name in result.failed)
        rows.append((f"**{fault.name}**: {fault.description}", *cells, ", ".join(names)))
    return table(("fault", *VARIANTS, "caught by"), rows)


def cell(own: Sequence[Outcome]) -> str:
    if not own:
        return "·"
    if own[0].reason_for_no_op:
        return "no-op" if all(result.as_expected for result in own) else "**alarm**"
    escaped = [result for result in own if not result.failed]
    if escaped:
        return "**escapes** " + ", ".join(f"{result.configuration} {number(result.share)}" for result in escaped)
    smallest = min(result.share for result in own)
    # checks without a limit: signatures, repeated bits, refused models
    return number(smallest) if 1 < smallest < math.inf else "caught"


def healthy_table(results: Sequence[Outcome]) -> str:
    """The table of errors of healthy models."""
    measured = [(x, x.measures) for x in results if x.fault is None and x.measures is not None]
    rows = [(result.variant, result.configuration, *map(number, measures)) for result, measures in measured]
    return table(("variant", "configuration", *MEASURES), rows)


def smallest_table(results: Sequence[Outcome]) -> str:
    """The table of float32 errors by fault, the smallest among the models that it was planted into."""
    rows = []
    for fault in ALL_FAULTS:
        measures = [
            result.measures
            for result in results
            if result.fault is fault and result.configuration != "fp16" and not result.reason_for_no_op
            if result.measures is not None
        ]
        if measures:
            rows.append((fault.name, *map(number, np.min(measures, axis=0))))
    return table(("fault", *MEASURES), rows)


@dataclass(frozen=True)
class BodyOutcome:
    """The result of checking one damaged body. no_op: why the fault changes nothing, or empty."""

    fault: BodyFault
    form: str
    precision: str
    caught: bool
    no_op: str

    @property
    def as_expected(self) -> bool:
        return self.caught != bool(self.no_op)


def body_outcomes() -> Iterator[BodyOutcome]:
    for precision, forms in (("fp32", tuple(FORMS)), ("fp16", HALF)):
        for form in forms:
            healthy = healthy_use(form, precision)
            if check_function_body(healthy.node.op_type, [healthy]).status != "passed":
                raise SystemExit(f"the body of {form} fails without a fault in {precision}")
            for fault in body_faults(healthy):
                check = check_function_body(fault.op, [damaged_use(healthy, fault)])
                no_op = reason_for_no_op(fault, form, precision)
                yield BodyOutcome(fault, form, precision, check.status == "failed", no_op)


def body_table(results: Sequence[BodyOutcome]) -> str:
    """The table operator × edit: how many faults were caught, and how many edits change nothing."""
    edits = list(dict.fromkeys(result.fault.edit for result in results))
    rows = []
    for op in dict.fromkeys(result.fault.op for result in results):
        own = [result for result in results if result.fault.op == op]
        matter = [result for result in own if not result.no_op]
        cells = [caught_text([result for result in matter if result.fault.edit == edit]) for edit in edits]
        types = ", ".join(sorted({result.fault.node_type for result in matter}))
        rows.append((f"`{op}`", *cells, len(own) - len(matter), types))
    return table(("body of", *edits, "change nothing", "types of nodes"), rows)


def caught_text(results: Sequence[BodyOutcome]) -> str:
    caught = sum(result.caught for result in results)
    return "·" if not results else str(caught) if caught == len(results) else f"**{caught} of {len(results)}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only this variant; repeatable")
    parser.add_argument("--fault", action="append", choices=[fault.name for fault in ALL_FAULTS], metavar="NAME")
    parser.add_argument("--bodies", action="store_true", help="only faults in function bodies")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file")
    options = parser.parse_args()
    logging.getLogger("torch.__trace").propagate = False
    faults = [fault for fault in ALL_FAULTS if not options.fault or fault.name in options.fault]
    # one fault or variant is asked for where bodies are not
    bodies = [] if options.fault or options.variant else list(body_outcomes())
    results = []
    if not options.bodies:
        with tempfile.TemporaryDirectory() as folder:
            for result in outcomes(options.variant or VARIANTS, faults, Path(folder)):
                results.append(result)
                print(line(result), flush=True)
    for body in bodies:
        if not body.as_expected:
            print(f"{'ALARM' if body.caught else 'ESCAPES'}: {body.form} {body.precision}: {body.fault} {body.no_op}")
    print(body_table(bodies))
    if options.markdown:
        tables = [fault_table(results), healthy_table(results), smallest_table(results), body_table(bodies)]
        options.markdown.write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    kinds = {result.fault.name for result in results if result.fault is not None}
    planted = sum(result.fault is not None for result in results)
    wrong = sum(not result.as_expected for result in [*results, *bodies])
    changing = sum(not body.no_op for body in bodies)
    print(f"{len(kinds)} kinds of faults, planted {planted} times; {wrong} unexpected results")
    print(f"{len(bodies)} faults in function bodies, of which {changing} change something")
    sys.exit(1 if wrong else 0)


def line(result: Outcome) -> str:
    name = "healthy" if result.fault is None else result.fault.name
    verdict = "as expected" if result.as_expected else "WRONG"
    measures = "" if result.measures is None else " ".join(map(number, result.measures))
    failed = ", ".join(result.failed) or "passes"
    start = f"{result.variant:10} {result.configuration:9} {name:34} {verdict:15} {number(result.share):>8}"
    return f"{start} [{measures}] {failed}"


if __name__ == "__main__":
    main()
