#!/usr/bin/env python3
"""Export published models as their packages ship them, and write docs/wild.md: what came of each.

Every model runs in a process of its own with a time limit, in .venv-wild, which holds the packages of
scripts/wild-requirements.txt beside those of .venv. Results are kept in build/wild/, one file each: a run goes on where
it stopped, and repeats only models whose row, packages or effexport have changed. Exit status 1 if a file is wrong at
any size, or if effexport fails otherwise than with an error of its own.

    .venv/bin/python scripts/wild.py                                 # everything, and docs/wild.md
    .venv/bin/python scripts/wild.py --model BERT --model TransMIL   # some models, without the page
    .venv/bin/python scripts/wild.py --again                         # also those that have a result
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from wild.models import MODELS, Model
from wild.page import commit, page_of_results

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT, RESULTS, PAGE = ROOT / ".venv-wild", ROOT / "build" / "wild", ROOT / "docs" / "wild.md"
REQUIREMENTS = ROOT / "scripts" / "wild-requirements.txt"
# Of one model; the slowest needs a third of it.
LIMIT_S = 300
BAD = ("wrong", "crashed")


def prepare() -> None:
    """Make .venv-wild, unless it is made from the present requirements; before it, all that the fast tests need."""
    tests = ["bash", "-c", "source scripts/test_environment.sh && ensure_tests fast"]
    subprocess.run(tests, check=True, cwd=ROOT)
    stamp, wanted = ENVIRONMENT / "effexport.stamp", hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        print("creating .venv-wild (180 MB)", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-P", "-m", "venv", "--without-pip", "--clear", ENVIRONMENT], check=True)
        pip = [sys.executable, "-P", "-m", "pip", "--python", python(), "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "-r", REQUIREMENTS], check=True)
        # its own packages come first
        Path(packages_of(python()), "effexport.pth").write_text(
            f"import site; site.addsitedir({packages_of(sys.executable)!r})\n", encoding="utf-8"
        )
        stamp.write_text(wanted, encoding="utf-8")


def packages_of(interpreter: str) -> str:
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return subprocess.check_output([interpreter, "-P", "-c", where], text=True).strip()


def python() -> str:
    return str(ENVIRONMENT / "bin" / "python")


@functools.cache
def sources() -> str:
    """A digest of what decides a result besides its row: effexport, the packages, and how it is measured."""
    files = [path for folder in ("exporter", "models", "plugins") for path in (ROOT / folder).rglob("*.*")]
    chosen = [path for path in files if path.suffix in {".py", ".cc", ".h"}]
    digest = hashlib.sha256()
    for path in [*sorted(chosen), REQUIREMENTS, ROOT / "constraints.txt", ROOT / "scripts" / "wild" / "measure.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key_of(model: Model) -> str:
    row = next(text for text in rows() if json.dumps(model.name, ensure_ascii=False) in text)
    return hashlib.sha256(f"{sources()}{row}".encode()).hexdigest()


@functools.cache
def rows() -> list[str]:
    """The source of each row of the table."""
    import wild.models

    return inspect.getsource(wild.models).partition("MODELS = (")[2].split("\n    ")


def file_of(model: Model) -> Path:
    return RESULTS / f"{model.package}-{''.join(c if c.isalnum() else '-' for c in model.name)}.json"


def kept(model: Model) -> dict[str, Any] | None:
    """The result of an earlier run that still holds."""
    try:
        found: dict[str, Any] = json.loads(file_of(model).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return found if found["key"] == key_of(model) else None


def run(model: Model, deadline: float) -> dict[str, Any]:
    """Measure a model in a process of its own, and keep the result."""
    left = min(LIMIT_S, deadline - time.monotonic())
    result: dict[str, Any] = {"name": model.name, "package": model.package, "key": key_of(model)}
    if left < 1:
        return result | {"result": "not run", "message": "the time of the run was over"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        command = [python(), __file__, "--child", model.name, folder]
        child = subprocess.Popen(
            command,
            env={**os.environ, **threads, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        start = time.monotonic()
        try:
            output, _ = child.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            if left < LIMIT_S:
                return result | {"result": "not run", "message": "the time of the run was over"}
            result |= {"result": "crashed", "message": f"no result in {LIMIT_S} s"}
        else:
            file = Path(folder, "result.json")
            if file.exists():
                result |= json.loads(file.read_text(encoding="utf-8"))
            else:
                tail = " / ".join(output.strip().splitlines()[-3:])
                result |= {"result": "crashed", "message": f"exit status {child.returncode}: {tail}"}
        result |= {"seconds": time.monotonic() - start, "commit": commit(ROOT)}
    RESULTS.mkdir(parents=True, exist_ok=True)
    file_of(model).write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf-8")
    return result


def child(name: str, folder: Path) -> None:
    from wild.measure import measured

    model = next(model for model in MODELS if model.name == name)
    (folder / "result.json").write_text(json.dumps(measured(model, folder)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = [model.name for model in MODELS]
    parser.add_argument("--model", action="append", choices=names, metavar="NAME", help="only this model; repeatable")
    parser.add_argument("--again", action="store_true", help="also models that have a result")
    parser.add_argument(
        "--minutes", type=float, default=40, help="start nothing later than this, %(default)g by default"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread, %(default)s by default")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]))
        return
    prepare()
    chosen = [model for model in MODELS if not options.model or model.name in options.model]
    deadline = time.monotonic() + 60 * options.minutes

    def result_of(model: Model) -> dict[str, Any]:
        earlier = None if options.again else kept(model)
        found = earlier or run(model, deadline)
        text = found.get("message", "").split("\n")[0][:160]
        print(f"{model.package:28} {model.name:30} {found['result']:9} {text}", flush=True)
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(result_of, chosen))
    if not options.model:
        PAGE.write_text(page_of_results(results, ROOT), encoding="utf-8")
    bad = [found for found in results if found["result"] in BAD]
    missing = sum(found["result"] == "not run" for found in results)
    print(f"{len(results)} models, {len(bad)} wrong or crashed, {missing} not run")
    sys.exit(1 if bad or missing else 0)


if __name__ == "__main__":
    main()
