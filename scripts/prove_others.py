#!/usr/bin/env python3
"""Prove ONNX files that other exporters make, plant faults into some of them, and write docs/others.md.

The files are made and proven in environments that have their exporters, one process each: .venv, and two that this
script makes beside it from scripts/others/requirements-*.txt. Files and results are kept in build/others/, so that a
run goes on where it stopped. Exit status 1 if a fault that changes an answer escapes, or a row has no result.

    .venv/bin/python scripts/prove_others.py                        # everything, and docs/others.md
    .venv/bin/python scripts/prove_others.py --file mobius-onnx-bert
    .venv/bin/python scripts/prove_others.py --again                # also those that have a result
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from file_judge import LIMIT  # noqa: E402 - below the path of tests/support
from others.files import OTHERS, Other  # noqa: E402
from others.page import page_of_results  # noqa: E402

RESULTS, PAGE = ROOT / "build" / "others", ROOT / "docs" / "others.md"
# The environment below each of ours, whose packages are found as well; scripts/test.sh --all makes both.
BELOW = {"4": ".venv", "5": ".venv-transformers5"}


def python_of(environment: str) -> Path:
    """The interpreter of an environment, which is made from its requirements if it is not there."""
    if not environment:
        return Path(sys.executable)
    folder, requirements = ROOT / f".venv-others-{environment}", f"scripts/others/requirements-{environment}.txt"
    python, stamp, wanted = folder / "bin" / "python", folder / "effexport.stamp", (ROOT / requirements).read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"creating {folder.name}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-P", "-m", "venv", "--without-pip", "--clear", folder], check=True)
        pip = [sys.executable, "-P", "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "-r", ROOT / requirements], check=True)
        below = ROOT / BELOW[environment] / packages_of(python).relative_to(folder)
        lines = [str(below)] * (environment == "5") + [
            f"import site; site.addsitedir({str(packages_of(sys.executable))!r})"
        ]
        (packages_of(python) / "effexport.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
        stamp.write_text(wanted)
    return python


def packages_of(interpreter: str | Path) -> Path:
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(subprocess.check_output([interpreter, "-P", "-c", where], text=True).strip())


def run(others: Sequence[Other], work: str) -> None:
    """Do a part of the work for rows of one environment, in a process of their own. What it prints is its log."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    rows = [word for one in others for word in ("--file", one.key)]
    command = [python_of(others[0].environment), __file__, "--child", work, *rows]
    with (RESULTS / f"log-{work}-{others[0].environment}.txt").open("w") as log:
        environment = {**os.environ, **one_thread, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)


def proven(other: Other) -> None:
    """Make the file of a row unless it is there, prove it, and keep the result."""
    import effexport
    from effexport.base.errors import EffexportError

    folder, module, inputs = RESULTS / other.key, other.make(), dict(other.inputs())
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.onnx").exists():
        other.export(module, inputs, folder / "model.onnx")
        module = other.make()  # exporters may change it
    file, start = folder / "model.onnx", time.perf_counter()
    result: dict[str, Any] = {"key": other.key, "exporter": other.title, "size": size_of(file)}
    try:
        report = effexport.prove(file, other.called(module), inputs)
    except EffexportError as error:
        result |= {"verdict": "refused", "failed": {}, "notes": [str(error)]}
    else:
        failed: dict[str, str] = {}
        for check in report.checks:
            if check.status == "failed":
                reason = check.detail or f"{check.value:.1e} of {check.limit:.1e}"
                failed.setdefault(str(check.kind), f"{check.case}: {reason}")
        compared = [check for check in report.checks if check.kind == "arithmetic" and check.value is not None]
        result |= {
            "verdict": report.verdict,
            "failed": failed,
            "notes": list(report.notes),
            "cases": sorted({str(check.case) for check in compared}),
            "share": max((check.value / check.limit for check in compared if check.limit), default=None),
            "divergence": report.divergence,
        }
    write(other, result | {"seconds": time.perf_counter() - start})


def write(other: Other, result: dict[str, Any]) -> None:
    result_file(other).write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(other.key, result["verdict"], flush=True)


def plant_faults(other: Other) -> None:
    """Add to the result of a row, by fault that finds a place: the check that fails and, if none does, the change of
    the answers."""
    from file_faults import FILE_FAULTS, opened, planted
    from file_judge import Judge

    result = json.loads(result_file(other).read_text(encoding="utf-8"))
    file, found = RESULTS / other.key / "model.onnx", {}
    judge = Judge(file, other.called(other.make()), dict(other.inputs()))
    for fault in FILE_FAULTS:
        damaged = planted(fault.damage, opened(file), file.with_name("damaged.onnx"))
        if damaged is not None:
            failure = judge.failure(damaged)
            found[fault.name] = [failure[:200], None if failure else judge.effect(damaged)]
            print(fault.name, found[fault.name], flush=True)
    write(other, result | {"faults": found})


def size_of(file: Path) -> int:
    """The number of nodes."""
    import onnx

    return len(onnx.load(str(file), load_external_data=False).graph.node)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    by_key = {other.key: other for other in OTHERS}
    parser.add_argument("--file", action="append", choices=by_key, metavar="KEY", help="only this file; repeatable")
    parser.add_argument("--again", action="store_true", help="also files that have a result")
    parser.add_argument("--child", choices=WORK, help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = [by_key[key] for key in options.file or by_key]
    if options.child:
        warnings.simplefilter("ignore")
        for other in wanted:
            WORK[options.child](other)
        return
    for other in wanted if options.again else ():
        result_file(other).unlink(missing_ok=True)
    for work, environment in product(WORK, ("", "4", "5")):
        rows = [other for other in wanted if other.environment == environment and not is_done(other, work)]
        if rows:
            run(rows, work)
    results = [json.loads(result_file(other).read_text()) for other in wanted if result_file(other).exists()]
    for result in results:
        print(result["key"], result["verdict"])
    if not options.file:
        PAGE.write_text(page_of_results(results), encoding="utf-8")
    missing = [other.key for other in wanted if not result_file(other).exists()]
    print(f"no result: {', '.join(missing)}; see {RESULTS}/log-*.txt" if missing else f"{len(results)} results")
    sys.exit(1 if missing or any(escaped(result) for result in results) else 0)


WORK = {"prove": proven, "faults": plant_faults}


def is_done(other: Other, work: str) -> bool:
    result = json.loads(result_file(other).read_text()) if result_file(other).exists() else {}
    return bool(result) if work == "prove" else not is_to_be_damaged(other, result) or "faults" in result


def is_to_be_damaged(other: Other, result: dict[str, Any]) -> bool:
    return other.is_faulted and result.get("verdict") == "passed"


def result_file(other: Other) -> Path:
    return RESULTS / other.key / "result.json"


def escaped(result: dict[str, Any]) -> list[str]:
    """Faults that no check finds, although an answer changes by more than the limit."""
    return [name for name, (failure, change) in result.get("faults", {}).items() if not failure and not change <= LIMIT]


if __name__ == "__main__":
    main()
