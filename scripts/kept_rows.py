"""Rows of a page, each measured in a process of its own with a time limit. Results are kept, so that a run goes on.

A result is measured again if its row, effexport or what the script names has changed.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.programs import run_program
from portability.environments import MissingError, SharedVenv

ROOT = Path(__file__).resolve().parents[1]
Result = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """key: its name on the command line. python: of its environment; None for this one. facts: of its result, known
    beforehand. decided_by: what its result depends on, beside effexport."""

    key: str
    python: SharedVenv | None
    facts: dict[str, str]
    decided_by: str = ""

    @property
    def file_name(self) -> str:
        return f"{''.join(c if c.isalnum() else '-' for c in self.key)}.json"


@dataclass(frozen=True)
class Script:
    """A script that measures rows. path: called with --child KEY FOLDER, it writes result.json into the folder.

    results: where results are kept. limit_s: of one row. measured_by: files that decide all results.
    """

    path: Path
    results: Path
    limit_s: float
    measured_by: tuple[Path, ...]

    @functools.cached_property
    def sources(self) -> str:
        """A digest of what decides all results: effexport, its packages, and how it is measured."""
        files = [path for folder in ("exporter", "models", "plugins") for path in (ROOT / folder).rglob("*.*")]
        chosen = sorted(path for path in files if path.suffix in {".py", ".cc", ".h"})
        digest = hashlib.sha256()
        for path in [*chosen, ROOT / "constraints.txt", *self.measured_by]:
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def key_of(self, row: Row) -> str:
        requirements = "" if row.python is None else row.python.requirements.read_text(encoding="utf-8")
        return hashlib.sha256(f"{self.sources}{requirements}{row.decided_by}".encode()).hexdigest()

    def kept(self, row: Row) -> Result | None:
        """The result of an earlier run that still holds."""
        try:
            found: Result = json.loads((self.results / row.file_name).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return found if found.get("decided_by") == self.key_of(row) else None

    def measured(self, row: Row, deadline: float) -> Result:
        """Measure a row in a process of its own, and keep the result: "not run" without time for it, "crashed" if the
        process takes too long or leaves none."""
        left = min(self.limit_s, deadline - time.monotonic())
        result: Result = {**row.facts, "row": row.key, "decided_by": self.key_of(row)}
        if left < 1:
            return result | {"result": "not run", "message": "the time of the run was over"}
        start = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            python = sys.executable if row.python is None else str(row.python.python)
            one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            command = [python, str(self.path), "--child", row.key, folder]
            try:
                done = run_program(command, left, {**os.environ, **one_thread, "HF_HUB_OFFLINE": "1"})
            except subprocess.TimeoutExpired:
                if left < self.limit_s:
                    return result | {"result": "not run", "message": "the time of the run was over"}
                result |= {"result": "crashed", "message": f"no result in {self.limit_s:g} s"}
            else:
                tail = " / ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
                crashed = {"result": "crashed", "message": f"exit status {done.returncode}: {tail}"}
                file = Path(folder, "result.json")
                result |= json.loads(file.read_text(encoding="utf-8")) if file.exists() else crashed
            result["seconds"] = time.monotonic() - start
        self.results.mkdir(parents=True, exist_ok=True)
        (self.results / row.file_name).write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf-8")
        return result


def options_of(
    about: str, keys: Sequence[str], flag: str, minutes: float, measure: Callable[[str, Path], Result]
) -> argparse.Namespace:
    """The command line of a script: rows to measure, as `chosen`, and how.

    In the process of a row, it measures the row, writes its result and exits.
    """
    parser = argparse.ArgumentParser(description=about.split("\n\n")[0])
    parser.add_argument(flag, action="append", choices=keys, metavar="NAME", dest="chosen", help="only it; repeatable")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="start nothing later than this, %(default)g by default"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread, %(default)s by default")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        key, folder = options.child
        Path(folder, "result.json").write_text(json.dumps(measure(key, Path(folder))), encoding="utf-8")
        sys.exit()
    return options


def results_of(script: Script, rows: Sequence[Row], options: argparse.Namespace) -> Iterator[Result]:
    """The results of the chosen rows, in order; each is printed as it comes."""
    chosen = [row for row in rows if not options.chosen or row.key in options.chosen]
    for environment in dict.fromkeys(row.python for row in chosen if row.python is not None):
        try:
            environment.prepare()
        except MissingError as error:
            sys.exit(f"{environment.name}: {error}")
    deadline = time.monotonic() + 60 * options.minutes

    def result_of(row: Row) -> Result:
        found = (None if options.again else script.kept(row)) or script.measured(row, deadline)
        print(f"{row.key:40} {found['result']:10} {found.get('message', '').partition(chr(10))[0][:160]}", flush=True)
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        yield from pool.map(result_of, chosen)
