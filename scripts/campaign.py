#!/usr/bin/env python3
"""Attack effexport at random, with a seed, and count how each case ended. docs/security.md shows the last figures.

    .venv/bin/python scripts/campaign.py                                # everything, as scripts/soak.sh does
    .venv/bin/python scripts/campaign.py --part operators --cases 500   # one part, fewer cases
    .venv/bin/python scripts/campaign.py --part artifacts --seed 7

Exit status 1 if a case ended as it must not: a traceback, a crash, a wrong answer, a lost file, or beyond its
limit of time or memory. The attacks use packages of the tests, which scripts/test.sh and scripts/soak.sh install.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / "support")]

from campaign.commands import Tally  # noqa: E402
from pages import table  # noqa: E402

PACKAGES_OF_TESTS = ("transformers", "pytest")
SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class Part:
    """One kind of attack, a module of campaign/. cases: how many by default."""

    title: str
    cases: int


PARTS = {
    "artifacts": Part("Mutated artifacts and records", 10_000),
    "checkpoints": Part("Mutated checkpoints and spec files", 2_000),
    "operators": Part("Operator calls under ASan and UBSan", 100_000),
    "requests": Part("Malformed requests", 5_000),
    "interruptions": Part("Full disks, kills and simultaneous commands", 500),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="which part; repeatable; default: all")
    parser.add_argument("--cases", type=int, help="number of cases of each part; default: see the table at the end")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    missing = [package for package in PACKAGES_OF_TESTS if importlib.util.find_spec(package) is None]
    if missing:
        parser.error(f"{', '.join(missing)} not installed; expected the packages of the tests; run: scripts/test.sh")

    failed = False
    rows = []
    for name in options.part or PARTS:
        part, start = PARTS[name], time.monotonic()
        module = importlib.import_module(f"campaign.{name}")
        with tempfile.TemporaryDirectory(prefix="effexport-campaign-") as folder:
            tally: Tally = module.run(options.cases or part.cases, options.seed, Path(folder))
        minutes = (time.monotonic() - start) / 60
        outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in tally.outcomes.most_common())
        rows.append((part.title, f"{tally.cases:,}", outcomes, len(tally.problems), f"{minutes:.1f}"))
        for problem in tally.problems[:SHOWN_PROBLEMS]:
            print(f"{name}: {problem}", file=sys.stderr, flush=True)
        failed |= bool(tally.problems) or not tally.cases
    print(table(("Part", "Cases", "Outcomes", "Problems", "Minutes"), rows))
    sys.exit(failed)


if __name__ == "__main__":
    main()
