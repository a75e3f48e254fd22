"""Half precision overflows and cancels in long sums: the answer to a long sequence must stay finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from effexport.proof.case_label import CaseLabel
from effexport.proof.cases import Case
from effexport.proof.checks.arithmetic import FINITE_METRIC, check_finite
from effexport.proof.checks.candidate import Candidate
from effexport.proof.checks.result import OUTSIDE, Check, Kind, not_run
from effexport.proof.inputs.random import random_inputs
from effexport.spec import BuildSpec

# Long enough for sums in float16 to overflow; shorter for quadratic variants, because of their memory.
LONG = 8192
LONG_IF_QUADRATIC = 2048
SEED = 8192


def check_long_sequence(candidate: Candidate, cases: Sequence[Case], spec: BuildSpec) -> Iterator[Check]:
    """No NaN and no infinity in the answer to one long sequence; nothing if some case is as long already."""
    kind = Kind.LONG_SEQUENCE
    length = min(LONG_IF_QUADRATIC if spec.attention.is_quadratic else LONG, spec.max_seq_len or LONG)
    if spec.fixed_seq_len is not None or length <= max(case.keep.shape[-1] for case in cases):
        return
    label = CaseLabel("long", (1, length))
    inputs = random_inputs(spec, np.random.default_rng(SEED), 1, length, None)
    if not candidate.accepts(inputs):
        yield not_run(kind, f"a sequence of {length} tokens {OUTSIDE}", label, FINITE_METRIC)
        return
    yield check_finite(label, candidate.run(inputs), kind)
