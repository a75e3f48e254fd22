"""Answers that a reference repeats: the same bits in several runs on the same inputs."""

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
# Two equal runs are enough if no other run differs. A reference that is wrong in every second run must not win by
# chance, so after a dispute the answer needs two runs more than any other.
LEAD = 2
# Enough to settle a dispute with two wrong runs, of which each gives other bits.
MOST_RUNS = 5
METRIC = "cases whose runs differ"


@dataclass
class RepeatedRuns:
    """Runs a reference at least twice on the same inputs, and returns what it answered most often.

    The first large parallel call of a process was seen to be wrong by 1e-3 in half of its results, so a single run
    cannot be trusted to judge others.

    reference: whose answers they are, as messages name it. disputed: cases in which two runs had different bits.
    """

    reference: str
    cases: set[CaseLabel] = field(default_factory=set)
    disputed: dict[CaseLabel, str] = field(default_factory=dict)

    def answer(self, case: CaseLabel, compute: Callable[[], Answer]) -> Answer:
        """The answer of `compute` that, bit by bit, LEAD more runs gave than any other answer.

        Raises StageError, which names the reference, if there is none after MOST_RUNS runs.
        """
        self.cases.add(case)
        answers: list[Answer] = []
        counts: list[int] = []
        for run in range(1, MOST_RUNS + 1):
            answer = compute()
            known = next((i for i, other in enumerate(answers) if same_bits(answer, other)), None)
            if known is None:
                answers.append(answer)
                counts.append(1)
                continue
            counts[known] += 1
            others = answers[:known] + answers[known + 1 :]
            if counts[known] - max(counts[:known] + counts[known + 1 :], default=0) >= LEAD:
                if others:
                    self.disputed[case] = f"{run - counts[known]} of {run} runs, {difference(answer, others[0])}"
                return answer
        raise StageError(
            "reference",
            f"{self.reference} gave {len(answers)} different answers in {MOST_RUNS} runs on the same inputs ({case}): "
            f"{difference(answers[-1], answers[-2])}; expected the same bits in every run, or one answer in at least "
            f"{LEAD} runs more than any other. The exported model was not judged. If the module draws random numbers, "
            f"or keeps a state between calls, remove that. Otherwise {self.reference} computes wrongly on this "
            "machine: try OMP_NUM_THREADS=1 or another release of PyTorch",
        )

    @property
    def check(self) -> Check:
        """How many cases had to be settled by further runs.

        It has no limit, because a case that was not settled is an error.
        """
        reason = (
            f"two equal runs are enough; if two differ, an answer is used if it leads every other by {LEAD} of at most "
            f"{MOST_RUNS} runs; otherwise the build stops"
        )
        details = "; ".join(f"{case}: {text}" for case, text in self.disputed.items())
        detail = ""
        if self.disputed:
            detail = (
                f"{self.reference} disagreed with itself in {len(self.disputed)} of {len(self.cases)} cases, and the "
                f"answer that it gave most often was used ({details})"
            )
        count = len(self.disputed)
        return Check(Kind.REFERENCE_REPEATABLE, ALL_CASES, METRIC, "passed", count, reason=reason, detail=detail)


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
