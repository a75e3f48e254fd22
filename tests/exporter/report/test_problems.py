"""Failures and checks not run are reported once, worst first; the reason of a limit is not named as a cause."""

from __future__ import annotations

import math

from effexport.proof.check import ALL_CASES, METRIC, CaseLabel, Check, Kind, not_run, outcomes_text
from effexport.report.wording import cases_text, failure_lines, problems_of

SHORT, LONG = CaseLabel("short", (2, 7)), CaseLabel("padded batch", (3, 64), padded=True)
SUMS = "float32 sums in another order"


def arithmetic(case: CaseLabel, value: float) -> Check:
    status = "passed" if value <= 1e-4 else "failed"
    return Check(Kind.ARITHMETIC, case, METRIC, status, value, 1e-4, SUMS, f"worst at x[{value}]")


def test_the_cases_of_a_failure_are_one_line_that_names_the_worst() -> None:
    checks = [arithmetic(SHORT, 2e-4), arithmetic(LONG, 5e-4), arithmetic(CaseLabel("export", (1, 64)), 1e-6)]
    (problem,) = problems_of(checks)
    assert problem.text == (
        "failed: arithmetic in 2 of 3 cases, most in padded batch (3 × 64, padded): "
        "max |error| / RMS 0.0005, limit 0.0001; worst at x[0.0005]"
    )
    nan = problems_of([*checks, arithmetic(SHORT, math.nan)])
    assert "most in short (2 × 7): max |error| / RMS nan, limit 0.0001" in nan[0].text


def test_the_reason_of_a_limit_is_no_part_of_a_failure() -> None:
    assert SUMS not in " ".join(failure_lines([arithmetic(SHORT, 1.0)]))


def test_one_reason_is_given_once_for_all_checks_that_share_it() -> None:
    reason = "a user's own module may mix samples"
    checks = [
        not_run(Kind.BATCH_INVARIANCE, reason, LONG),
        not_run(Kind.PYTORCH_MODULE, "its code is not here"),
        not_run(Kind.PADDING_CONTENT, reason, LONG),
        not_run(Kind.BATCH_INVARIANCE, reason, SHORT),
        arithmetic(SHORT, 1.0),
    ]
    assert [problem.text.partition("; worst")[0] for problem in problems_of(checks)] == [
        "failed: arithmetic in short (2 × 7): max |error| / RMS 1, limit 0.0001",
        "not run: PyTorch module: its code is not here",
        f"not applicable: batch invariance and padding content: {reason}",
    ]


def test_what_does_not_apply_is_told_from_what_could_not_run_here() -> None:
    prefix = not_run(Kind.CAUSAL_PREFIX, "later tokens move the borders of chunks", SHORT)
    parity = not_run(Kind.PARITY, "no bfloat16 kernels here", ALL_CASES)
    good, bad = arithmetic(SHORT, 0.0), arithmetic(SHORT, 1.0)
    assert outcomes_text([good, good, prefix]) == "2 checks passed, 1 not applicable"
    assert outcomes_text([parity, good, bad, prefix]) == "1 check failed, 1 passed, 1 not applicable, 1 not run"
    assert outcomes_text([]) == "0 checks run"
    assert cases_text([good, bad]) == "1 of 2"
    assert cases_text([good, prefix]) == "1 of 1, 1 not applicable"
    assert cases_text([prefix]) == "–"
