"""Results that reports hold: of the checks of a case, how they add up, and the trace of the values inside a graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

_TEXT = re.compile(r"(?P<name>.*): (?P<shape>\d+(?: × \d+)*)(?P<padded>, padded)?", re.DOTALL)


@dataclass(frozen=True)
class CaseLabel:
    """The inputs that a check compared.

    name: "export", "padded batch" and so on.
    shape: of the attention mask, (batch, seq), or (batch, choices, seq) for multiple choice; empty if the check is not
    about one input.
    padded: whether the mask hides some tokens.
    """

    name: str
    shape: tuple[int, ...] = ()
    padded: bool = False

    def __str__(self) -> str:
        """`padded batch: 3 × 300, padded`."""
        return f"{self.name}: {self.shape_text}" if self.shape else self.name

    @property
    def shape_text(self) -> str:
        """`3 × 300, padded`."""
        return " × ".join(map(str, self.shape)) + (", padded" if self.padded else "")

    @classmethod
    def from_text(cls, text: str) -> CaseLabel:
        """The inverse of `str`, for reports that are read from a file. Any other text is a name without a shape."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return cls(text)
        return cls(match["name"], tuple(map(int, match["shape"].split(" × "))), match["padded"] is not None)


ALL_CASES = CaseLabel("all cases")


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
    """The subject of a check, by its name, with one sentence on the meaning of a pass."""

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
    RUNS = "runs", "The file runs on every input that the reference answers, within the axes that it says are free."
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
    """The meaning of a pass, in one sentence; empty for the kinds of another release."""
    if kind.startswith(_FUNCTION_BODY_OF):
        return _FUNCTION_BODY_MEANING
    return next((known.meaning for known in Kind if known == kind), "")


def is_about_bodies(check: Check) -> bool:
    """True for a check of function bodies, which the other checks need not have run."""
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
class Limit:
    """The largest value that passes, and why it is that large."""

    value: float
    reason: str


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
    reason: explains the limit, or why the check was not run.
    detail: what helps to find a failure.
    measures: other figures of the same comparison, by name: max_abs, rms_error (relative), cosine.
    seq_len: tokens of the case, if a value was measured on it.
    histogram: how many elements have a relative error in each decade of HISTOGRAM_EDGES, including those below the
    first edge and beyond the last.
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
    """True if only the weights differ from those that were named, and nothing else is wrong."""
    return {check.kind for check in checks if check.status == "failed"} == {Kind.WEIGHTS}


def is_about_the_model(check: Check) -> bool:
    """True for a check of the whole model: not of the reference, of weights, or of one function body."""
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
    """The outcome of several checks of one name: one failure is a failure."""
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
    """A value as a multiple of its limit, for ranking; infinite for NaN, and without a value."""
    if value is None or value != value:
        return float("inf")
    return value / limit if limit else value


NAMED = ("auto", "golden", "torch", "transformers")
# Of a file with answers.
GOLDEN_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class TracedValue:
    """One value of the graph beside PyTorch's. module: path of the module it belongs to, "" for the root.

    error: max |error| / RMS; of integers and booleans the share that differs; infinite for another shape. NaN fails.
    """

    name: str
    module: str
    op_type: str
    error: float
    limit: float

    @property
    def diverges(self) -> bool:
        return not self.error <= self.limit

    @property
    def share(self) -> float:
        """Share of the limit that was used; ranks the values. Infinite for NaN and beyond a limit of 0."""
        if self.error != self.error or self.error > self.limit == 0:
            return float("inf")
        return self.error / self.limit if self.limit else 0.0


@dataclass(frozen=True)
class Suspect:
    """A node that may be at fault. weights: the initializers it reads."""

    value: str
    op_type: str
    module: str
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """The paired values of a model in the order of its graph.

    case: the input it ran on.
    pairable: how many values a file of this export has in common with PyTorch.
    not_paired: values of the file without a counterpart: steps inside one operation of PyTorch, and what a tool has
    renamed.
    suspects: if a value diverges, its node, and those between it and the last values that agree.
    """

    model: str
    case: CaseLabel
    values: tuple[TracedValue, ...]
    pairable: int
    not_paired: int
    suspects: tuple[Suspect, ...] = ()

    @cached_property
    def first_divergence(self) -> TracedValue | None:
        return next((value for value in self.values if value.diverges), None)

    def layers(self) -> list[dict[str, Any]]:
        """Per module path in the order of the graph, the value closest to its limit or furthest beyond:
        layer, op_type, error, limit, value."""
        worst: dict[str, TracedValue] = {}
        for value in self.values:
            if value.module not in worst or value.share > worst[value.module].share:
                worst[value.module] = value
        return [
            {"layer": module, "op_type": v.op_type, "error": v.error, "limit": v.limit, "value": v.name}
            for module, v in worst.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        first = self.first_divergence
        return {
            "model": self.model,
            "case": str(self.case),
            "paired": len(self.values),
            "pairable": self.pairable,
            "not_paired": self.not_paired,
            "first_divergence": asdict(first) if first else None,
            "suspects": [asdict(suspect) for suspect in self.suspects],
            "layers": self.layers(),
        }
