"""Whether a sample gives the same result in any batch, of a user's own module of which that was declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from effexport.proof.cases import Case
from effexport.proof.checks.candidate import Candidate
from effexport.proof.checks.result import OUTSIDE, Check, Kind, judged, not_run
from effexport.proof.checks.worst import Worst, limit_without, metric_of
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array

# A larger batch than that of any case, and as large as a server makes by default.
MIXED_ROWS = 8
# The outputs of a batch that is made of these samples of a case.
RunRows = Callable[[Sequence[int]], Mapping[str, "Array"]]


def other_batches(count: int) -> Iterator[tuple[str, list[int]]]:
    """Batches of the samples of a case, by what they are: each alone; and all, several times, in the opposite order."""
    yield from (("alone", [row]) for row in range(count))
    yield "in another batch", [-1 - place % count + count for place in range(max(MIXED_ROWS, count))]


def rows_of(arrays: Mapping[str, Array], rows: Sequence[int], count: int) -> dict[str, Array]:
    """These samples of arrays with a batch of `count`, whose first axis may have several entries for each sample, as
    that of buckets has."""
    taken = {}
    for name, array in arrays.items():
        by_sample = array.reshape(count, -1, *array.shape[1:])[list(rows)]
        taken[name] = np.ascontiguousarray(by_sample.reshape(-1, *array.shape[1:]))
    return taken


def worst_of_batches(case: Case, outputs: Mapping[str, Array], spec: BuildSpec, run: RunRows) -> Worst:
    """The largest difference that other batches make. outputs: of the case."""
    worst = Worst(spec)
    for what, rows in other_batches(len(case.keep)):
        answer = run(rows)
        for output, whole in outputs.items():
            for place, row in enumerate(rows):
                detail = f"worst in {output} of sample {row} {what}"
                own = answer[output][place : place + 1]
                if own.shape[1:] != whole.shape[1:]:
                    worst.add(np.full((1, 1), np.nan), np.zeros((1, 1)), f"{detail}, whose shape is another one")
                    continue
                alike = np.broadcast_to(own, whole.shape)
                worst.add(case.kept(output, alike, row), case.kept(output, whole, row), detail)
    return worst


def check_independent(candidate: Candidate, case: Case, outputs: Mapping[str, Array], spec: BuildSpec) -> Check:
    """Each sample alone, and all in another batch, give what they give in the batch of the case.

    outputs: of the case; with its buckets, if the candidate can be given buckets.
    """
    kind, metric = Kind.BATCH_INVARIANCE, metric_of("other batch − batch", spec)
    count = len(case.keep)
    for _, rows in other_batches(count):
        if not candidate.accepts(rows_of(case.inputs, rows, count)):
            return not_run(kind, f"a batch of {len(rows)} {OUTSIDE}", case.label, metric)
    # a quantised model rounds by itself here: given roundings would hide a scale that depends on other samples
    run_with_given = None if spec.is_quantized else candidate.run_with_given

    def run(rows: Sequence[int]) -> Mapping[str, Array]:
        inputs = rows_of(case.inputs, rows, count)
        if run_with_given is None:
            return candidate.run(inputs)
        return run_with_given(inputs, rows_of(case.buckets, rows, count))[0]

    worst = worst_of_batches(case, outputs, spec, run)
    limit = limit_without(case, spec, "other samples may not add to it")
    return judged(kind, case.label, metric, worst.error, limit, worst.detail)
