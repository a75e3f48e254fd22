"""Answers that a reference gives twice: the same bits in two runs on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import StageError
from effexport.proof.case_label import ALL_CASES, CaseLabel
from effexport.proof.checks.result import Check, Kind

if TYPE_CHECKING:
    from effexport.dtypes import Array

# The arrays of an answer by name, in parts: outputs, buckets, margins.
Answer = Mapping[str, Mapping[str, "Array"]]
# Two runs that agree are enough, a third settles a dispute, and a fourth allows for one more wrong run.
MOST_RUNS = 4
METRIC = "cases whose runs differ"


@dataclass
class RepeatedRuns:
    """Runs a reference at least twice on the same inputs, and returns what it answered twice.

    The first large parallel call of a process was seen to be wrong by 1e-3 in half of its results, so a single run
    cannot be trusted to judge others.

    reference: whose answers they are, as messages name it. disputed: cases in which two runs had different bits.
    """

    reference: str
    cases: set[CaseLabel] = field(default_factory=set)
    disputed: dict[CaseLabel, str] = field(default_factory=dict)

    def answer(self, case: CaseLabel, compute: Callable[[], Answer]) -> Answer:
        """The first answer of `compute` that has the same bits as an earlier one.

        Raises StageError, which names the reference, if no two of MOST_RUNS answers are equal.
        """
        self.cases.add(case)
        seen: list[Answer] = []
        while len(seen) < MOST_RUNS:
            answer = compute()
            others = [other for other in seen if not same_bits(answer, other)]
            if len(others) < len(seen):
                if others:
                    self.disputed[case] = f"{len(others)} of {len(seen) + 1} runs, {difference(answer, others[0])}"
                return answer
            seen.append(answer)
        raise StageError(
            "reference",
            f"{self.reference} gave {MOST_RUNS} different answers to the same inputs ({case}): "
            f"{difference(seen[-1], seen[-2])} in the last two; expected the same bits in at least two of {MOST_RUNS} "
            "runs. The exported model was not judged. If the module draws random numbers, or keeps a state between "
            f"calls, remove that. Otherwise {self.reference} computes wrongly on this machine: try OMP_NUM_THREADS=1 "
            "or another release of PyTorch",
        )

    @property
    def check(self) -> Check:
        """How many cases had to be settled by a third run."""
        reason = f"an answer is used if at least two of {MOST_RUNS} runs have the same bits; otherwise the build stops"
        details = "; ".join(f"{case}: {text}" for case, text in self.disputed.items())
        detail = ""
        if self.disputed:
            detail = (
                f"{self.reference} disagreed with itself in {len(self.disputed)} of {len(self.cases)} cases, and the "
                f"answer that it gave twice was used ({details})"
            )
        count, limit = len(self.disputed), len(self.cases)
        return Check(Kind.REFERENCE_REPEATABLE, ALL_CASES, METRIC, "passed", count, limit, reason, detail)


def same_bits(a: Answer, b: Answer) -> bool:
    """Whether two answers have the same arrays, bit by bit: NaN equals NaN, and 0 is not −0."""
    ours, theirs = flat(a), flat(b)
    return ours.keys() == theirs.keys() and all(
        array.dtype == theirs[name].dtype and np.array_equal(bits(array), bits(theirs[name]))
        for name, array in ours.items()
    )


def bits(array: Array) -> Array:
    """An array as unsigned integers of the same size."""
    return array.view(f"u{array.itemsize}")


def flat(answer: Answer) -> dict[str, Array]:
    """The arrays of an answer by part and name: `outputs last_hidden_state`."""
    return {f"{part} {name}": array for part, arrays in answer.items() for name, array in arrays.items()}


def difference(a: Answer, b: Answer) -> str:
    """`12 of 64 elements of outputs last_hidden_state, by up to 0.001`: the array of which most differs."""
    ours, theirs = flat(a), flat(b)
    if {name: x.shape for name, x in ours.items()} != {name: x.shape for name, x in theirs.items()}:
        return "other arrays or shapes"
    shares = {name: float(np.mean(bits(x) != bits(theirs[name]))) for name, x in ours.items()}
    name = max(shares, key=shares.__getitem__)
    with np.errstate(invalid="ignore"):  # inf − inf
        furthest = np.max(np.abs(ours[name].astype(np.float64) - theirs[name]), initial=0.0)
    count = round(shares[name] * ours[name].size)
    return f"{count} of {ours[name].size} elements of {name}, by up to {furthest:.2g}"
