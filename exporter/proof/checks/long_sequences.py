"""Half precision overflows and cancels where sums are long: a long sequence must stay finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from effexport.proof.case_label import CaseLabel
from effexport.proof.cases import Case
from effexport.proof.checks.candidate import Candidate
from effexport.proof.checks.result import OUTSIDE, Check, Kind, judged, not_run
from effexport.proof.inputs.random import random_inputs
from effexport.proof.tolerances import Limit
from effexport.spec import BuildSpec

# Long enough for sums to overflow float16 without float32 islands; quadratic variants get less, for their memory.
LONG = 8192
LONG_IF_QUADRATIC = 2048
SEED = 8192


def check_long_sequence(candidate: Candidate, cases: Sequence[Case], spec: BuildSpec) -> Iterator[Check]:
    """No NaN and no infinity in the answer to one long sequence, unless some case is as long as the model takes."""
    kind, metric = Kind.LONG_SEQUENCE, "NaN or Inf elements"
    length = min(LONG_IF_QUADRATIC if spec.attention.is_quadratic else LONG, spec.max_seq_len or LONG)
    if spec.fixed_seq_len is not None or length <= max(case.keep.shape[-1] for case in cases):
        return
    label = CaseLabel("long", (1, length))
    inputs = random_inputs(spec, np.random.default_rng(SEED), 1, length, None)
    if not candidate.accepts(inputs):
        yield not_run(kind, f"a sequence of {length} tokens {OUTSIDE}", label, metric)
        return
    outputs = candidate.run(inputs)
    bad = sum(int(np.count_nonzero(~np.isfinite(array.astype(np.float32)))) for array in outputs.values())
    yield judged(kind, label, metric, bad, Limit(0, "no output may be NaN or infinite"))
