"""The result of a check, and how results add up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from effexport.proof.case_label import ALL_CASES, CaseLabel

if TYPE_CHECKING:
    from effexport.proof.tolerances import Limit

Status = Literal["passed", "failed", "not run"]
METRIC = "max |error| / RMS"
RMS_METRIC = "RMS error / RMS"
NOT_MEASURED = "not measured"
# Relative errors from 1e-9 to 1, one decade each.
HISTOGRAM_EDGES = tuple(10.0**exponent for exponent in range(-9, 1))
# One below each edge, and one beyond the last.
HISTOGRAM_BINS = len(HISTOGRAM_EDGES) + 1
OUTSIDE = "is outside the shapes that the model was built for"


class Kind(StrEnum):
    """What a check compares, by its name, and in one sentence what it means to pass."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Kind:
        kind = str.__new__(cls, name)
        kind._value_, kind.meaning = name, meaning
        return kind

    SIGNATURE = "signature", "The outputs have the names, types and shapes that the spec declares."
    FINITE = "finite", "The outputs contain neither NaN nor infinity."
    REPEATABLE = "repeatable", "The same inputs give the same bits twice."
    ARITHMETIC = "arithmetic", "Every element of the outputs is close to PyTorch's."
    GIVEN_BUCKETS = (
        "arithmetic with identical buckets",
        "Every element is close to PyTorch's if the model is given PyTorch's buckets.",
    )
    HIDDEN_BUCKETS = (
        "arithmetic (buckets not visible)",
        "Every element is close to PyTorch's, although the runtime does not show its buckets.",
    )
    OVERALL_ERROR = "overall error", "The error over all elements is far below what a single element may have."
    BUCKET_AGREEMENT = "bucket agreement", "Few tokens are in another bucket than in PyTorch."
    BUCKET_NEAR_TIES = "bucket near-ties", "Tokens in another bucket were nearly tied between the two."
    FREE_RUN = (
        "free run",
        "With its own buckets, the model differs no more than re-drawing the rotations would change it.",
    )
    GIVEN_ROUNDINGS = (
        "arithmetic with identical roundings",
        "Every element is close to PyTorch's quantised model if the model is given PyTorch's roundings.",
    )
    ROUNDING_AGREEMENT = (
        "rounding agreement",
        "Few numbers are rounded to another step than in PyTorch, and those to the next one.",
    )
    QUANTIZED_RUN = (
        "quantised run",
        "With its own roundings, the model differs no more than rounding its weights would change it.",
    )
    QUANTIZED_PRODUCTS = (
        "quantised products",
        "Every product is quantised where it should be, or declared to stay float.",
    )
    QUANTIZATION_LOSS = (
        "quantisation loss",
        "How far the quantised model is from the float model; it fails only against --max-loss.",
    )
    TASK_LOSS = (
        "task loss",
        "How much worse at its task the quantised model is; it fails only against --max-loss.",
    )
    RANK_NEAR_TIES = (
        "rank near-ties",
        "Where another token is at a rank than in PyTorch, PyTorch gives both nearly the same score.",
    )
    ANSWERS = "answers", "How many of the most probable answers on the data are not PyTorch's."
    ANSWER_NEAR_TIES = "answer near-ties", "Answers on the data that are not PyTorch's were nearly tied with those."
    BATCH_INVARIANCE = "batch invariance", "A sample alone gives the same result as in a batch."
    PADDING_LENGTH = "padding length", "A sample gives the same result at its own length as padded to a longer one."
    PADDING_CONTENT = "padding content", "The result does not depend on what the padding contains."
    CAUSAL_PREFIX = "causal prefix", "The first tokens give the same result as if nothing followed them."
    LONG_SEQUENCE = "long sequence", "A long sequence does not overflow half precision."
    FLOAT32_OPS = (
        "ops kept in float32",
        "Operations that would overflow or lose accuracy in half precision stay in float32.",
    )
    FUNCTION_BODIES = "function bodies", "The whole model, run without native kernels, gives PyTorch's results too."
    DECODE_STEP = "decode step", "Decoding token by token gives the results of the whole sequence."
    PREFILL_STATE = "prefill state", "Reading a prompt at once leaves the same state as decoding it token by token."
    PREFILL = "prefill", "Decoding after a prompt that was read at once gives the results of the whole sequence."
    # the reference itself
    REFERENCE = "reference", "PyTorch's float32 results are close to its own in float64."
    REFERENCE_REPEATABLE = "reference repeatable", "PyTorch gives the same bits twice."
    REFERENCE_BUCKETS = (
        "reference bucket agreement",
        "In the model that it is compared with, few tokens are in another bucket than in PyTorch.",
    )
    REFERENCE_NEAR_TIES = (
        "reference bucket near-ties",
        "In the model that it is compared with, tokens in another bucket were nearly tied between the two.",
    )
    INDEPENDENT = (
        "independent samples",
        "In PyTorch, a sample gives the same result alone, in its batch and in another batch.",
    )
    REPLACEMENT = "replaced layers", "In PyTorch, the model with our layers computes what the original computes."
    # what could not run as a whole
    SHAPES = "shapes", "The model was built for the shapes of these inputs."
    PARITY = "parity", "The model runs here, so that it can be compared at all."
    PYTORCH_MODULE = "PyTorch module", "The PyTorch module can be made again, to compute new answers."
    # what the user named or asked for beside the model
    WEIGHTS = "weights", "The weights that were named are those that the artifact was built with, bit by bit."
    TRACE = "trace", "The values inside the graph could be compared with PyTorch's."
    TRANSFORMERS = "transformers", "The model gives the results of the checkpoint in transformers."


# How a check of replaced layers names one that differs.
OTHER_LAYER = "the first layer that differs is"
_FUNCTION_BODY_OF = "function body of "
_FUNCTION_BODY_MEANING = "In standard ONNX operators, the operator computes what it is defined to compute."


def function_body_of(op: str) -> str:
    """The kind of the check of one operator's function body."""
    return f"{_FUNCTION_BODY_OF}{op}"


def meaning_of(kind: str) -> str:
    """What it means to pass a check, in one sentence; empty for the kinds of another release."""
    if kind.startswith(_FUNCTION_BODY_OF):
        return _FUNCTION_BODY_MEANING
    return next((known.meaning for known in Kind if known == kind), "")


def is_about_bodies(check: Check) -> bool:
    """Whether a check is about function bodies and not about what ran in the other checks."""
    return check.kind == Kind.FUNCTION_BODIES or check.kind.startswith(_FUNCTION_BODY_OF)


# Checks that judge the reference: however many of them pass, nothing is known about the model.
OF_THE_REFERENCE = (
    Kind.REFERENCE,
    Kind.REFERENCE_REPEATABLE,
    Kind.REFERENCE_BUCKETS,
    Kind.REFERENCE_NEAR_TIES,
    Kind.INDEPENDENT,
    Kind.REPLACEMENT,
)
# Checks of what a model need not promise, or of shapes that it may not be built for: those that do not run are not
# applicable, wherever the model is checked.
WHERE_APPLICABLE = (
    Kind.SHAPES,
    Kind.BATCH_INVARIANCE,
    Kind.PADDING_LENGTH,
    Kind.PADDING_CONTENT,
    Kind.CAUSAL_PREFIX,
    Kind.LONG_SEQUENCE,
    Kind.GIVEN_ROUNDINGS,
)
# In the order in which a sentence counts them.
OUTCOMES = ("failed", "passed", "not applicable", "not run")


@dataclass(frozen=True)
class Worst:
    """The element of an output that is furthest from what was expected, relative to the scale of its sample."""

    output: str
    index: tuple[int, ...]
    actual: float
    expected: float


@dataclass(frozen=True)
class Check:
    """The result of one check: what was compared (`kind`), on which inputs (`case`), by which metric, and its status.

    kind: a `Kind`, or `function_body_of` an operator; a report of another release may hold others. value and limit are
    None if the metric is not a number; limit also where every value may pass.
    reason: explains the limit, or why the check was not run. detail: what helps to find a failure.
    measures: other figures of the same comparison, by name: max_abs, rms_error (relative), cosine.
    seq_len: tokens of the case, if a value was measured on it. histogram: how many elements have a relative error in
    each decade of HISTOGRAM_EDGES, including those below the first edge and beyond the last.
    target: the engine that ran, as in --target; "" for a model file.
    """

    kind: str
    case: CaseLabel
    metric: str
    status: Status
    value: float | None = None
    limit: float | None = None
    reason: str = ""
    detail: str = ""
    measures: Mapping[str, float] = field(default_factory=dict)
    worst: Worst | None = None
    seq_len: int | None = None
    histogram: tuple[int, ...] = ()
    target: str = ""

    @property
    def name(self) -> str:
        """The kind, after the target if there is one: `trt-rtx: finite`. Reports group their checks by it."""
        return f"{self.target}: {self.kind}" if self.target else str(self.kind)

    @property
    def outcome(self) -> str:
        """One of OUTCOMES: the status, which tells what does not apply to the model from what could not run here."""
        return "not applicable" if self.status == "not run" and self.kind in WHERE_APPLICABLE else self.status


def passed(checks: Sequence[Check]) -> bool:
    """At least one check of the whole model ran, and none failed."""
    ran = any(c.status == "passed" and is_about_the_model(c) for c in checks)
    return ran and all(c.status != "failed" for c in checks)


def only_weights_failed(checks: Sequence[Check]) -> bool:
    """Whether the weights that were named are others, and nothing else is wrong."""
    return {check.kind for check in checks if check.status == "failed"} == {Kind.WEIGHTS}


def is_about_the_model(check: Check) -> bool:
    """Whether a check compared what the whole model computes: not the reference, weights, or one function body."""
    others = (*OF_THE_REFERENCE, Kind.WEIGHTS, Kind.TRACE)
    return check.kind not in others and not check.kind.startswith(_FUNCTION_BODY_OF)


def judged(kind: str, case: CaseLabel, metric: str, value: float, limit: Limit, detail: str = "") -> Check:
    """A check against a limit. NaN fails."""
    status: Status = "passed" if value <= limit.value else "failed"
    return Check(kind, case, metric, status, value, limit.value, limit.reason, detail, seq_len=case.shape[-1])


def not_run(kind: str, reason: str, case: CaseLabel = ALL_CASES, metric: str = NOT_MEASURED, target: str = "") -> Check:
    """A check that could not run here, and why."""
    return Check(kind, case, metric, "not run", reason=reason, target=target)


def summary(checks: Sequence[Check]) -> dict[str, dict[str, Any]]:
    """Per name of a check: how many passed, failed or did not run, and the worst value beside its limit."""
    result: dict[str, dict[str, Any]] = {}
    for check in checks:
        entry = result.setdefault(
            check.name,
            {"passed": 0, "failed": 0, "not run": 0, "worst": None, "limit": None, "metric": check.metric},
        )
        entry[check.status] += 1
        if check.value is None:
            continue
        # the worst is the one closest to its own limit, or beyond it; NaN is beyond every limit
        if entry["worst"] is None or not excess(check.value, check.limit) <= excess(entry["worst"], entry["limit"]):
            entry["worst"], entry["limit"] = check.value, check.limit
    return result


def by_name(checks: Iterable[Check]) -> dict[str, list[Check]]:
    """The checks of each name."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        groups.setdefault(check.name, []).append(check)
    return groups


def outcome_of(checks: Sequence[Check]) -> str:
    """What several checks of one name amount to: one failure is a failure."""
    found = {check.outcome for check in checks}
    return next(outcome for outcome in ("failed", "passed", "not run", "not applicable") if outcome in found)


def outcomes_text(checks: Sequence[Check]) -> str:
    """`2 checks failed, 33 passed, 4 not applicable`: how many checks had each outcome."""
    counts = {outcome: sum(check.outcome == outcome for check in checks) for outcome in OUTCOMES}
    parts = [f"{count} {outcome}" for outcome, count in counts.items() if count]
    first, *others = parts or ["0 run"]
    number, _, outcome = first.partition(" ")
    return ", ".join([f"{number} {'check' if number == '1' else 'checks'} {outcome}", *others])


def excess(value: float | None, limit: float | None) -> float:
    """How far a value is beyond its limit, for ranking; infinite for NaN, and without a value."""
    if value is None or value != value:
        return float("inf")
    return value / limit if limit else value
