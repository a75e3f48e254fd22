#!/usr/bin/env python3
"""Prove ONNX files that other exporters make, plant faults into some of them, and write docs/others.md.

The files are made and proven in environments that have their exporters, one process each: .venv, and two with the
packages of scripts/others/requirements-*.txt. Results are kept in build/others/, so that a run goes on where it
stopped, and are made again if effexport has changed. Exit status 1 if a fault that changes an answer escapes, or a row
has no result.

    .venv/bin/python scripts/prove_others.py                        # everything, and docs/others.md
    .venv/bin/python scripts/prove_others.py --file mobius-onnx-bert
    .venv/bin/python scripts/prove_others.py --again                # also those that have a result
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from file_judge import LIMIT  # noqa: E402 - below the path of tests/support
from kept_rows import Row, Script, options_of, results_of  # noqa: E402
from others.files import OTHERS, Other  # noqa: E402
from others.page import page_of_results  # noqa: E402
from portability.environments import SharedVenv  # noqa: E402

FOLDER = ROOT / "scripts" / "others"
# The second is above an environment that scripts/test.sh --all makes.
ENVIRONMENTS = {
    "": None,
    "4": SharedVenv("others-4", FOLDER / "requirements-4.txt"),
    "5": SharedVenv("others-5", FOLDER / "requirements-5.txt", ROOT / ".venv-transformers5"),
}
SUPPORT = ROOT / "tests" / "support"
SCRIPT = Script(
    Path(__file__),
    ROOT / "build" / "others",
    3600,
    (Path(__file__), FOLDER / "files.py", SUPPORT / "file_faults.py", SUPPORT / "file_judge.py"),
)


def measured(key: str, folder: Path) -> dict[str, Any]:
    """Make the file of a row and prove it; if that passes, plant faults into it, if the row says so."""
    import onnx

    import effexport
    from effexport.base.errors import EffexportError

    warnings.simplefilter("ignore")
    other = next(other for other in OTHERS if other.key == key)
    file, inputs = folder / "model.onnx", dict(other.inputs())
    other.export(other.make(), inputs, file)
    module = other.called(other.make())  # another one, because exporters may change theirs
    size = len(onnx.load(str(file), load_external_data=False).graph.node)
    result: dict[str, Any] = {"exporter": other.title, "size": size}
    try:
        report = effexport.prove(file, module, inputs)
    except EffexportError as error:
        return result | {"result": "refused", "failed": {}, "notes": [str(error)]}
    failed: dict[str, str] = {}
    for check in report.checks:
        if check.status == "failed":
            reason = check.detail or f"{check.value:.1e} of {check.limit:.1e}"
            failed.setdefault(str(check.kind), f"{check.case}: {reason}")
    compared = [check for check in report.checks if check.kind == "arithmetic" and check.value is not None]
    result |= {
        "result": report.verdict,
        "failed": failed,
        "notes": list(report.notes),
        "cases": sorted({str(check.case) for check in compared}),
        "share": max((check.value / check.limit for check in compared if check.limit), default=None),
        "divergence": report.divergence,
    }
    if other.is_faulted and report.verdict == "passed":
        result["faults"] = faults_of(other, file)
    return result


def faults_of(other: Other, file: Path) -> dict[str, tuple[str, float | None]]:
    """By fault that finds a place: the check that fails and, if none does, the change of the answers."""
    from file_faults import FILE_FAULTS, opened, planted
    from file_judge import Judge

    found = {}
    judge = Judge(file, other.called(other.make()), dict(other.inputs()))
    for fault in FILE_FAULTS:
        damaged = planted(fault.damage, opened(file), file.with_name("damaged.onnx"))
        if damaged is not None:
            failure = judge.failure(damaged)
            found[fault.name] = failure[:200], None if failure else judge.effect(damaged)
    return found


def main() -> None:
    options = options_of(__doc__, [other.key for other in OTHERS], "--file", 600, measured)
    rows = [Row(other.key, ENVIRONMENTS[other.environment], {}) for other in OTHERS]
    results = list(results_of(SCRIPT, rows, options))
    made = [result for result in results if result["result"] not in ("crashed", "not run")]
    if not options.chosen:
        (ROOT / "docs" / "others.md").write_text(page_of_results(made), encoding="utf-8")
    print(f"{len(made)} of {len(results)} rows have a result")
    sys.exit(1 if len(made) < len(results) or any(escaped(result) for result in made) else 0)


def escaped(result: dict[str, Any]) -> list[str]:
    """Faults that no check finds, although an answer changes by more than the limit."""
    return [name for name, (failure, change) in result.get("faults", {}).items() if not failure and not change <= LIMIT]


if __name__ == "__main__":
    main()
