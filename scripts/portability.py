#!/usr/bin/env python3
"""Send every variant through the tools that people use on ONNX files, and check what comes out of each.

The results are judged by the checks of `effexport verify --model`, at five lengths, padded and not. The tools are
pinned in scripts/portability/requirements and live in environments of their own, in the user's cache. Exit status 1 if
a result is not as expected, or if something could not run.

    .venv/bin/python scripts/portability.py                                  # everything, and docs/portability.md
    .venv/bin/python scripts/portability.py --tool onnxslim --variant lsh    # some cells, without the page
    .venv/bin/python scripts/portability.py --prepare                        # only make the environments
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]

from portability.cells import NOT_RUN, Matrix, Outcome  # noqa: E402
from portability.environments import prepare  # noqa: E402
from portability.known import surprise  # noqa: E402
from portability.models import PRECISIONS, VARIANTS  # noqa: E402
from portability.page import PAGE, counts, page_of_outcomes  # noqa: E402
from portability.tools import TABLE  # noqa: E402

from effexport.base.environment import usable_cores  # noqa: E402


@dataclass(frozen=True)
class Row:
    """A tool, by name, and models of one precision; what one process does."""

    tool: str
    precision: str
    variants: Sequence[str]


def outcomes(rows: Sequence[Row], jobs: int) -> Iterator[Outcome]:
    """All cells in order; `jobs` processes share the rows."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(row_outcomes, rows):
            yield from row


def row_outcomes(row: Row) -> list[Outcome]:
    logging.getLogger("torch.__trace").propagate = False
    tool = next(tool for tool in TABLE if tool.name == row.tool)
    found = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Matrix(Path(folder)) as matrix:
        for variant in row.variants:
            found.append(matrix.cell(tool, variant, row.precision))
            print(line(found[-1]), flush=True)
    return found


def line(outcome: Outcome) -> str:
    error = "" if outcome.error is None else f"{outcome.error:.1e}"
    start = f"{outcome.tool:44} {outcome.variant:10} {outcome.precision} {outcome.verdict:8} {error:8}"
    unexpected = surprise(outcome)
    return f"{start} {outcome.words[:200]}{' <- ' + unexpected if unexpected else ''}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = [tool.name for tool in TABLE]
    parser.add_argument("--prepare", action="store_true", help="only make the environments")
    parser.add_argument("--tool", action="append", choices=names, metavar="NAME", help="only this tool; repeatable")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only this variant; repeatable")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="only this precision; repeatable")
    parser.add_argument(
        "--jobs", type=int, default=usable_cores(), metavar="N", help="processes, %(default)s by default"
    )
    options = parser.parse_args()
    missing = prepare()
    for reason in missing:
        print(f"NOT RUN, because it could not be set up: {reason}", file=sys.stderr)
    if options.prepare:
        sys.exit(1 if missing else 0)
    tools = [tool for tool in TABLE if not options.tool or tool.name in options.tool]
    precisions, variants = options.precision or PRECISIONS, options.variant or VARIANTS
    rows = [Row(tool.name, name, variants) for tool in tools for name in precisions if name in tool.precisions]
    results = list(outcomes(rows, options.jobs))
    if not (options.tool or options.variant or options.precision):
        PAGE.write_text(page_of_outcomes(results), encoding="utf-8")
    print("\n".join(counts(results)))
    unexpected = [outcome for outcome in results if surprise(outcome)]
    not_run = sum(outcome.verdict == NOT_RUN for outcome in results)
    verdicts = Counter(outcome.verdict for outcome in results)
    print(f"{len(results)} cells: {dict(verdicts)}; {len(unexpected)} not as expected")
    for outcome in unexpected:
        print(line(outcome), file=sys.stderr)
    if not_run:
        print(f"INCOMPLETE: {not_run} cells did not run, see the reasons above", file=sys.stderr)
    sys.exit(1 if unexpected or not_run or missing else 0)


if __name__ == "__main__":
    main()
