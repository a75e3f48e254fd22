#!/usr/bin/env python3
"""Export published models as their packages ship them, and write docs/wild.md: what came of each.

Every model runs in a process of its own with a time limit, in an environment that holds the packages of
scripts/wild-requirements.txt before those of .venv. Results are kept in build/wild/, one file each: a run goes on where
it stopped, and repeats only models whose row, packages or effexport have changed. Exit status 1 if a file is wrong at
any size, or if effexport fails otherwise than with an error of its own.

    .venv/bin/python scripts/wild.py                                 # everything, and docs/wild.md
    .venv/bin/python scripts/wild.py --model BERT --model TransMIL   # some models, without the page
    .venv/bin/python scripts/wild.py --again                         # also those that have a result
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import wild.models
from kept_rows import Row, Script, options_of, results_of
from portability.environments import SharedVenv
from wild.models import MODELS, Model
from wild.page import page_of_results

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = SharedVenv("wild", ROOT / "scripts" / "wild-requirements.txt")
# Of one model; the slowest needs a third of the limit.
SCRIPT = Script(Path(__file__), ROOT / "build" / "wild", 300, (ROOT / "scripts" / "wild" / "measure.py",))
BAD = ("wrong", "crashed")


def row_of(model: Model) -> Row:
    """A model, whose result depends on the source of its row in the table."""
    # rows begin at this indentation, and their other lines further to the right
    sources = re.split(r"\n    (?=\w)", inspect.getsource(wild.models).partition("MODELS = (")[2])
    source = next(text for text in sources if json.dumps(model.name, ensure_ascii=False) in text)
    facts = {"name": model.name, "package": model.package, "commit": commit()}
    return Row(model.name, ENVIRONMENT, facts, source)


def commit() -> str:
    """The commit, and whether something that decides results is not committed."""
    git = ["git", "-C", str(ROOT)]
    short = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    changed = subprocess.check_output([*git, "status", "--porcelain", "exporter", "models", "plugins"], text=True)
    return f"{short} with changes" if changed else short


def measured(name: str, folder: Path) -> dict[str, Any]:
    from wild.measure import measured

    return measured(next(model for model in MODELS if model.name == name), folder)


def main() -> None:
    options = options_of(__doc__, [model.name for model in MODELS], "--model", 40, measured)
    # all that the fast tests need
    tests = ["bash", "-c", "source scripts/test_environment.sh && ensure_tests fast"]
    subprocess.run(tests, check=True, cwd=ROOT)
    results = list(results_of(SCRIPT, [row_of(model) for model in MODELS], options))
    if not options.chosen:
        (ROOT / "docs" / "wild.md").write_text(page_of_results(results), encoding="utf-8")
    bad = [found for found in results if found["result"] in BAD]
    missing = sum(found["result"] == "not run" for found in results)
    print(f"{len(results)} models, {len(bad)} wrong or crashed, {missing} not run")
    sys.exit(1 if bad or missing else 0)


if __name__ == "__main__":
    main()
