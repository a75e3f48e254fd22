"""docs/wild.md: what came of each model."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from pages import table

from effexport.base.machine import Processor

Result = Mapping[str, Any]
# A sentence that only repeats what the first paragraphs of the page say.
ADVICE = re.compile(r" For other (sizes|lengths), build .*", re.DOTALL)

HEAD = """# Published models, exported as they are

What becomes of models that packages on PyPI ship as code, given to `effexport.export` without a change: real
architectures with few layers and random weights. Each is exported from one example, a batch of 2. Its file then runs
in plain onnxruntime at three lengths and the batches 1, 2 and 3, with the kernels of effexport and with the function
bodies in the file, and is compared with the untouched module in PyTorch.

`.venv/bin/python scripts/wild.py` makes this page; `scripts/wild/models.py` has the models and sizes, and
`scripts/wild-requirements.txt` the packages.
"""

COLUMNS = """
* *result*: `any size`: the file takes all these sizes, or all that the module takes. `some sizes`: the code ties an
  axis, and the file takes one size of it, or a range; the reasons are below. `refused`: nothing is written; the
  messages are below.
* *error*: the largest error and, after the stroke, the RMS error, over all sizes and outputs, relative to the RMS of
  the answer of the module.
* *torch.onnx*: what plain `torch.onnx.export` does with the same module, example and free axes, at the same sizes.
* *build*: seconds of `effexport.export`, which includes the proof and its report, and of `torch.onnx.export`.
* *speed*: PyTorch's time divided by ours, and the time of plain torch.onnx's file divided by ours, at the largest size
  that the file takes; medians of 9 interleaved runs on one thread, in processor time. The models are small.
"""


def page_of_results(results: Sequence[Result]) -> str:
    parts = [HEAD, summary(results), COLUMNS, "", table(TABLE, map(row_of, results))]
    lists = {
        "Tied sizes": [(found, tied(found)) for found in results if found["result"] == "fixed"],
        "Refused": [(found, found["message"]) for found in results if found["result"] == "refused"],
        "Wrong, crashed or not run": [
            (found, found["message"]) for found in results if found["result"] in ("wrong", "crashed", "not run")
        ],
        "Replaced, and other remarks": [(found, remarks(found)) for found in results if remarks(found)],
    }
    for title, entries in lists.items():
        if entries:
            parts += [f"\n## {title}\n", *(f"* **{found['name']}**: {one_line(text)}" for found, text in entries)]
    return "\n".join(parts) + "\n"


def summary(results: Sequence[Result]) -> str:
    counts = Counter(found["result"] for found in results)
    exported = counts["any size"] + counts["fixed"]
    texts = [
        f"**{exported} of {len(results)} models export as published**: {counts['any size']} at any size, "
        f"{counts['fixed']} with a tied axis. {counts['refused']} are refused, {counts['wrong']} are wrong."
    ]
    if counts["crashed"]:
        texts.append(f"{counts['crashed']} end with an error that is not effexport's own, or without a result.")
    if counts["not run"]:
        texts.append(f"**This run is partial: {counts['not run']} models did not run.**")
    names = ("torch", "onnxruntime", "transformers")
    commits = sorted({found["commit"] for found in results if "commit" in found})
    texts.append(
        f"{datetime.now(UTC):%Y-%m-%d}, {Processor.here().name}, {platform.system()}, "
        f"Python {platform.python_version()}, "
        f"{', '.join(f'{name} {version(name)}' for name in names)}; effexport at {', '.join(commits)}."
    )
    return "\n".join(texts)


TABLE = ("model", "package", "result", "error, kernels", "error, bodies", "torch.onnx", "build, s", "speed")


def row_of(found: Result) -> list[str]:
    errors = found.get("errors", {})
    shown = [error_text(errors.get(name)) for name in ("kernel", "body")]
    if found.get("draws"):
        shown = ["–", "draws; see below"]
    by_torch = found.get("torch_onnx", {})
    build = f"{found['build_s']:.0f} / {by_torch['seconds']:.0f}" if "build_s" in found and by_torch else "–"
    result = RESULTS[found["result"]]
    return [found["name"], found["package"], result, *shown, by_torch.get("result", "–"), build, speed(found)]


RESULTS = {
    **{name: name for name in ("any size", "refused", "not run")},
    "fixed": "some sizes",
    "wrong": "**wrong**",
    "crashed": "**crashed**",
}


def error_text(errors: Mapping[str, float] | None) -> str:
    return f"{errors['max']:.0e} / {errors['rms']:.0e}" if errors and "max" in errors else "–"


def speed(found: Result) -> str:
    times = found.get("latency_ms", {})
    ratios = [
        f"{times[name] / times['ours']:.1f}" if name in times else "–" for name in ("eager", "torch_onnx") if times
    ]
    return " / ".join(ratios) or "–"


def tied(found: Result) -> str:
    notes = [note for note in found["notes"] if "takes" in note or "exported for exactly" in note]
    return " ".join(notes) or "the sizes of the example, which no axis name leaves free"


def remarks(found: Result) -> str:
    notes = found.get("notes", [])
    return (
        " ".join(note for note in notes if note not in tied(found)) if found["result"] == "fixed" else " ".join(notes)
    )


def one_line(text: str) -> str:
    return " ".join(ADVICE.sub("", text).split())
