"""docs/portability.md, from the outcomes of the whole matrix."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pages import table

from effexport.base.machine import Processor
from portability.cells import NOT_RUN, REFUSED, RIGHT, WRONG, Outcome
from portability.known import known_failure
from portability.models import PRECISIONS, VARIANTS
from portability.tools import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "portability.md"
UNEXPECTED = "unexpected:"
FIELD = {"fp32": "float32", "fp16": "float16"}
INTRODUCTION = """\
# Portability

What other people's tools and runtimes make of our files. Every variant, in float32 and float16, goes through each tool;
the checks of `effexport verify --model` then judge the result, with function bodies only: kernels never run here. The
models are encoders (dim 64, 4 heads, 2 layers, 512 positions) with 1, 7, 64, 300 and 512 tokens, padded and not.
Models that hash get the reference's buckets as long as the tool has kept their names.

This page is written by one command, which makes the environments of all tools from pinned requirements
(`scripts/portability/requirements`), and fails if a cell is not as expected:

```sh
.venv/bin/python scripts/portability.py
```
"""
LEGEND = """\
A number is the largest error of any element of any case, relative to the RMS of PyTorch's answer, and the model is
right: it passed every check. **wrong** is followed by the same number, **refused** means that the tool or the runtime
reported an error; see [failures](#failures). "finite": the file loads and its results are finite, which is all that is
asked of a quantised model.
"""


def counts(results: Sequence[Outcome]) -> Iterator[str]:
    """A line per tool: how many of its cells are right, refused, wrong or not run."""
    for tool in dict.fromkeys(outcome.tool for outcome in results):
        verdicts = Counter(outcome.verdict for outcome in results if outcome.tool == tool)
        yield f"{tool:46} " + ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())


def page_of_outcomes(results: Sequence[Outcome]) -> str:
    date = time.strftime("%Y-%m-%d", time.gmtime())
    machine = f"Measured on {date}, on {platform.system()} {platform.machine()}, {Processor.here().name}."
    parts = [INTRODUCTION, f"{machine}\n", summary_table(results), LEGEND]
    parts += [f"## {FIELD[precision]}\n\n{precision_table(results, precision)}" for precision in PRECISIONS]
    parts.append(f"## Failures\n\n{failure_table(results)}")
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def summary_table(results: Sequence[Outcome]) -> str:
    rows = []
    for tool in TABLE:
        shares = [share([o for o in results if (o.tool, o.precision) == (tool.name, name)]) for name in PRECISIONS]
        rows.append((tool.name, tool.version, *shares, tool.advice))
    return table(("tool", "version", "right, float32", "right, float16", "what to do"), rows)


def share(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "–"
    if all(outcome.verdict == NOT_RUN for outcome in outcomes):
        return NOT_RUN
    return f"{sum(outcome.verdict == RIGHT for outcome in outcomes)} of {len(outcomes)}"


def precision_table(results: Sequence[Outcome], precision: str) -> str:
    cells = {(o.tool, o.variant): cell_text(o) for o in results if o.precision == precision}
    names = [tool.name for tool in TABLE if precision in tool.precisions]
    return table(("tool", *VARIANTS), ((name, *(cells[name, variant] for variant in VARIANTS)) for name in names))


def cell_text(outcome: Outcome) -> str:
    error = "" if outcome.error is None else f"{outcome.error:.0e}".replace("e-0", "e-").replace("e+00", "")
    if outcome.verdict == RIGHT:
        return error or "finite"
    return f"**{outcome.verdict}** {error}".rstrip() if outcome.verdict in (REFUSED, WRONG) else outcome.verdict


def failure_table(results: Sequence[Outcome]) -> str:
    """Cells that are not right, those with the same words together: what was said, why, and what to do."""
    versions = {tool.name: tool.version for tool in TABLE}
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in results:
        if outcome.verdict != RIGHT:
            known = known_failure(outcome)
            explained = (known.reason, known.remedy) if known else (f"{UNEXPECTED} {outcome.words}", "")
            groups.setdefault((outcome.tool, outcome.verdict, *explained), []).append(outcome)
    rows = []
    for (tool, verdict, reason, remedy), own in groups.items():
        models = ", ".join(
            f"{FIELD[precision]}: {variants_text([o.variant for o in own if o.precision == precision])}"
            for precision in PRECISIONS
            if any(o.precision == precision for o in own)
        )
        words = own[0].words.replace("|", "\\|").replace("<", "&lt;")
        rows.append((f"{tool} ({versions[tool]})", models, verdict, words, reason, remedy))
    head = ("tool", "models", "outcome", "its words, or the checks that failed", "reason", "what to do")
    return table(head, rows) if rows else "None."


def variants_text(variants: Sequence[str]) -> str:
    return "all" if set(variants) == set(VARIANTS) else ", ".join(variants)
