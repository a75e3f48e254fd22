"""Figures and fields as people read them; every rendering of a report says them the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from effexport.base.errors import Unavailable
from effexport.base.units import NOTHING, counted, number
from effexport.models.variants.pytorch.spec import PyTorchSpec
from effexport.proof.check import METRIC, Check, Suspect, Trace, outcome_of, outcomes_text
from effexport.report.problems import problems_of

if TYPE_CHECKING:
    from effexport.evaluation.figures import Estimate, Quality

# How many nodes or weights a sentence lists.
LISTED = 5


def status_of(entry: Mapping[str, Any]) -> str:
    """The status of an entry of `summary`: one failure is a failure."""
    return "failed" if entry["failed"] else "passed" if entry["passed"] else "not run"


def cases_text(checks: Sequence[Check]) -> str:
    """`6 of 6` checks of one name that ran have passed; `2 of 2, 1 not run`; nothing if none ran."""
    ran = [check for check in checks if check.status != "not run"]
    if not ran:
        return NOTHING
    others = [check for check in checks if check.status == "not run"]
    passed = f"{sum(check.status == 'passed' for check in ran)} of {len(ran)}"
    return f"{passed}, {len(others)} {outcome_of(others)}" if others else passed


def limit_text(check: Check) -> str:
    """`why this limit: float32 sums`; empty without a reason, which a check that was not run has for itself."""
    return f"why this limit: {check.reason}" if check.reason and check.status != "not run" else ""


def failure_lines(checks: Sequence[Check], trace: Trace | Unavailable | None = None) -> list[str]:
    """The reasons nothing was written: the first divergence of a trace if there is one, then one line per failure."""
    lines = [] if trace is None else [trace_text(trace)]
    lines += [problem.text for problem in problems_of(checks) if problem.outcome == "failed"]
    return [f"{outcomes_text(checks)}; nothing was written", *(f"  {line}" for line in lines)]


def trace_text(trace: Trace | Unavailable, *, other_weights: bool = False) -> str:
    """The first divergence of a trace, what agrees before it, and how many values were compared.

    other_weights: whether PyTorch is known to have other weights than the model, so that no node is to blame.
    """
    if isinstance(trace, Unavailable):
        return f"no trace: {trace.reason}"
    compared = f"{len(trace.values)} of {trace.pairable} values were compared with PyTorch's ({trace.case})"
    value = trace.first_divergence
    if not trace.pairable:
        return f"no trace: {trace.model} names no value as PyTorch does when it is exported here"
    if not trace.values:
        return f"no trace: none of the {trace.pairable} values has kept its name in {trace.model}"
    if value is None:
        return f"no divergence: {compared}, and all agree where the runtime does not optimise the graph"
    agreeing = trace.values.index(value)
    metric = METRIC if value.limit else "share of elements that differ"
    before = "it is the first value"
    if agreeing:
        before = f"the {agreeing} values before it agree" if agreeing > 1 else "the value before it agrees"
    cause = _suspects_text(trace.suspects, other_weights=other_weights)
    return (
        f"first divergence: value `{value.name}` of {value.module or 'the model itself'} ({value.op_type}), {metric} "
        f"{value.error:.2g} > {value.limit:.2g}; {before}; {cause}. {compared}"
    )


def _suspects_text(suspects: Sequence[Suspect], *, other_weights: bool) -> str:
    """The likely fault behind a divergence."""
    weights = list(dict.fromkeys(name for suspect in suspects for name in suspect.weights))
    listed = f"{', '.join(weights[:LISTED])}{' …' if len(weights) > LISTED else ''}"
    if other_weights:
        return f"it is computed from the weights {listed}" if weights else "it depends on the weights"
    if len(suspects) > 1:
        nodes = ", ".join(f"{s.op_type} `{s.value}`" for s in suspects[:LISTED])
        more = f" and {len(suspects) - LISTED} more" if len(suspects) > LISTED else ""
        text = f"the last values that agree enter these nodes, one of which is wrong: {nodes}{more}"
        return f"{text}, or the weights {listed}" if weights else text
    return f"its inputs agree, so its node is wrong, or the weights {listed}" if weights else "its inputs agree"


def share_of_limit(value: float | None, limit: float | None) -> str:
    """The used share of a limit, in percent; nothing if there is no limit, or one of 0."""
    if value is None or not limit:
        return NOTHING
    if not math.isfinite(value):
        return "beyond"
    percent = 100 * value / limit
    return "< 1 %" if 0 < percent < 1 else f"{percent:,.0f} %"


def measures_text(measures: Mapping[str, float]) -> str:
    """Further figures of a check. A cosine is close to 1, so it needs its digits."""
    names = {"max_abs": "largest |error|", "rms_error": "RMS error / RMS", "cosine": "cosine"}
    said = {n: f"{v:.9g}" if n == "cosine" else number(v) for n, v in measures.items()}
    return ", ".join(f"{names.get(name, name)} {value}" for name, value in said.items())


def size_text(fields: dict[str, Any]) -> str:
    """The sizes of a model that a spec has, in words."""
    words: dict[str, Callable[[int], str]] = {
        "dim": "width {}".format,
        "hidden_size": "width {}".format,
        "heads": lambda heads: counted(heads, "head"),
        "layers": lambda layers: counted(layers, "layer"),
        "seq_len": lambda length: f"exported for {counted(length, 'token')}",
        "batch": "batch {}".format,
    }
    if not fields.get("has_seq", True):  # a user's own model without an axis of tokens
        del words["seq_len"]
    if fields.get("variant") == PyTorchSpec.variant:  # one without attention of ours, whose sizes are not known
        del words["dim"], words["heads"]
    return ", ".join(text(fields[name]) for name, text in words.items() if name in fields)


def field_text(value: Any) -> str:
    """A field of a spec: None is what is not set, and lists are read without brackets."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def flat_fields(spec: dict[str, Any]) -> dict[str, Any]:
    """A nested spec as one table; of several fields with one name, the outermost."""
    flat: dict[str, Any] = {}
    for name, value in spec.items():
        if isinstance(value, dict):
            flat |= {key: inner for key, inner in flat_fields(value).items() if key not in spec}
        else:
            flat[name] = value
    return flat


def sizes(profiles: Sequence[Mapping[str, Sequence[Sequence[int]]]]) -> str:
    """Optimisation profiles in words: `input_ids 1 × 1 to 4 × 1024, tuned for 1 × 1024`, one input for each."""

    def shape(dims: Sequence[int]) -> str:
        return " × ".join(map(str, dims))

    first = [next(iter(profile.items())) for profile in profiles]
    return "; ".join(
        f"{name} {shape(smallest)} to {shape(largest)}, tuned for {shape(optimum)}"
        for name, (smallest, optimum, largest) in first
    )


def quality_text(quality: Quality) -> str:
    """`held-out.txt: bits per byte 3.2411 (3.2102 to 3.2720), PyTorch 3.2411, 0 of 102,200 answers changed`."""
    first, pytorch, changes = quality.estimates[0], quality.pytorch[0], quality.changes
    figures = f"{first.name} {interval_text(first)}, PyTorch {interval_text(replace(pytorch, low=None))}"
    return f"{data_name(quality)}: {figures}, {changes.count:,} of {changes.of:,} answers changed"


def data_name(quality: Quality) -> str:
    """Of the file, without its folder."""
    return PurePath(quality.data).name


def figure_rows(
    estimates: Sequence[Estimate], others: Sequence[Estimate], differences: Sequence[Estimate]
) -> list[tuple[str, str, str, str]]:
    """(name, figure, that of the other model, their difference) of two models with the same figures."""
    signed = {one.name: interval_text(one, signed=True) for one in differences}
    return [
        (ours.name, interval_text(ours), interval_text(theirs), signed.get(ours.name, NOTHING))
        for ours, theirs in zip(estimates, others, strict=True)
    ]


def interval_text(estimate: Estimate, *, signed: bool = False) -> str:
    """`2.1034 (2.0812 to 2.1256)`; signed, for a difference: `+0.02140 (+0.01990 to +0.02290)`."""
    if signed and {estimate.value, estimate.low, estimate.high} <= {0, None}:
        return "0"
    size = abs(estimate.value)
    if signed:
        form = "{:+.1e}" if 0 < size < 1e-4 else "{:+.5f}"
    else:
        form = "{:.4f}" if size < 100 else "{:,.1f}" if size < 1e6 else "{:.4g}"
    text = form.format(estimate.value)
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ({form.format(estimate.low)} to {form.format(estimate.high)})"
