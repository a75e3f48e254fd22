"""Figures and fields as people read them; every rendering of a report says them the same way.

Checks that failed or did not run are collapsed: one entry for all cases of a check, and no reason twice. Quantisation
and its cost are told in words and rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from effexport.base.errors import Unavailable
from effexport.base.formatting import NOTHING, counted, listed, number
from effexport.models.variants.pytorch import PyTorchSpec
from effexport.proof.check import ALL_CASES, METRIC, Check, Suspect, Trace, excess, outcome_of, outcomes_text
from effexport.quantize.record import Quantization

if TYPE_CHECKING:
    from effexport.tasks.figures import Estimate, Quality


@dataclass(frozen=True)
class Problem:
    """Checks of one name that failed, or checks that did not run for the same reason.

    ran: how many checks of the name of a failure ran.
    """

    checks: tuple[Check, ...]
    ran: int = 0

    @property
    def outcome(self) -> str:
        """ "failed", "not run" or "not applicable"."""
        return self.checks[0].outcome

    @property
    def worst(self) -> Check:
        """The check that is furthest beyond its limit."""
        return max(self.checks, key=lambda check: excess(check.value, check.limit))

    @property
    def subject(self) -> str:
        """`arithmetic in 2 of 6 cases, most in short (2 × 7)`."""
        names = listed(list(dict.fromkeys(check.name for check in self.checks)))
        worst = self.worst.case
        place = f"{worst.name} ({worst.shape_text})" if worst.shape else worst.name
        if len(self.checks) == 1:
            return names if worst == ALL_CASES else f"{names} in {place}"
        if self.outcome == "failed":
            return f"{names} in {len(self.checks)} of {counted(self.ran, 'case')}, most in {place}"
        return names

    @property
    def finding(self) -> str:
        """The worst check's measurement and its place; or the reason nothing was measured."""
        check = self.worst
        if check.status != "failed":
            return check.reason or check.detail
        value = "" if check.value is None else f"{check.metric} {number(check.value)}, limit {number(check.limit)}"
        return "; ".join(part for part in (value, check.detail) if part) or check.metric

    @property
    def text(self) -> str:
        """One sentence without the reason of a limit, which is never the cause of a failure."""
        return f"{self.outcome}: {self.subject}: {self.finding}"


def problems_of(checks: Sequence[Check]) -> list[Problem]:
    """Failures by name, then what did not run by its reason, then what does not apply."""
    groups: dict[tuple[str, str], list[Check]] = {}
    for check in checks:
        if check.status != "passed":
            key = check.name if check.status == "failed" else check.reason or check.detail
            groups.setdefault((check.outcome, key), []).append(check)
    ran: dict[str, int] = {}
    for check in checks:
        ran[check.name] = ran.get(check.name, 0) + (check.status != "not run")
    found = [Problem(tuple(group), ran[group[0].name]) for group in groups.values()]
    return sorted(found, key=lambda problem: ("failed", "not run", "not applicable").index(problem.outcome))


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
    return f"{text} ({' to '.join(map(form.format, estimate.interval))})" if estimate.interval else text


SCALES = {
    "dynamic": "a scale for each token, found as the model runs",
    "static": "one scale for the input of each layer, from calibration",
}


def quantization_facts(record: Quantization) -> list[tuple[str, str]]:
    """The quantised parts, the samples that decided on them, and the cost on these samples."""
    floats = sum(product.operator == "Linear" for product in record.products)
    rows = [
        ("Quantised", f"{len(record.layers)} of {len(record.layers) + floats} linear layers to {record.precision}"),
        ("Weights", "one scale for each output channel, symmetric" if record.scales else "rounded to bfloat16"),
        ("Activations", SCALES[record.scales] if record.scales else "rounded to bfloat16 before each product"),
        ("Embeddings", ", ".join(table.layer for table in record.embeddings) or "float"),
        ("Samples", samples_text(record)),
    ]
    if rounded := sum(layer.rounds_output for layer in record.layers):
        rows.insert(3, ("Results", f"of {counted(rounded, 'layer')} rounded to bfloat16: attention multiplies them"))
    if record.smooth is not None:
        rows.append(
            ("SmoothQuant", f"α = {record.smooth:g}, folded into {counted(len(record.smoothing), 'layer norm')}")
        )
    if record.max_loss is not None:
        limited = "the task's loss" if record.task else "the RMS error"
        rows.append(("--max-loss", f"{record.max_loss:g} of {limited}; {put_back_text(record)}"))
    rows += loss_rows(record)
    return rows


def loss_rows(record: Quantization) -> list[tuple[str, str]]:
    """The cost of quantisation on the samples, and on the data of --evaluate."""
    rows: list[tuple[str, str]] = []
    if record.loss is not None:
        rows += [("RMS error against float", percent(record.loss.rms_error)), ("Cosine", f"{record.loss.cosine:.6f}")]
        if record.loss.bucket_flips is not None:
            rows.append(("Tokens in other buckets", percent(record.loss.bucket_flips)))
    rows += [
        (
            f"{figure.name.capitalize()} on {record.task_data}",
            f"{figure.quantized_value:.5g}, float {figure.float_value:.5g}: {100 * figure.relative_loss:+.3g} %",
        )
        for figure in record.task
    ]
    return rows


def samples_text(record: Quantization) -> str:
    samples = record.samples
    if not samples.source:
        return f"{samples.samples} drawn at random, which says little about real data"
    return f"{samples.samples} of {samples.source}, SHA-256 {samples.sha256[:16]}…"


def put_back_text(record: Quantization) -> str:
    if not record.search_put_back:
        return "no layer had to be put back to float"
    return f"put back to float: {', '.join(record.search_put_back)}"


def quantization_text(record: Quantization) -> str:
    """One line for a terminal."""
    parts = [f"{name}: {value}" for name, value in loss_rows(record)]
    floats = Counter(product.reason for product in record.products if product.operator == "Linear")
    kept = f"; {counted(floats.total(), 'linear layer')} in float" if floats else ""
    scales = f" ({record.scales} scales)" if record.scales else ""
    return (
        f"{len(record.layers)} linear layers in {record.precision}{scales}{kept}; "
        f"samples: {samples_text(record)}. {'; '.join(parts)}"
    )


def cost_text(record: Quantization) -> str:
    """The cost of quantisation, in one sentence."""
    on = record.samples.source or "random input"
    error = "" if record.loss is None else f"an RMS error of {percent(record.loss.rms_error)} on {on}"
    task = next((figure for figure in record.task if figure.name == "loss"), None)
    added = f", and {100 * task.relative_loss:+.2g} % of the loss on {record.task_data}" if task else ""
    return f"Against the float model, quantisation costs {error}{added}."


def layer_rows(record: Quantization) -> list[tuple[str, str, str, str]]:
    """(layer, precision, loss if it alone is quantised, why it stays float): the largest loss first."""
    by_loss = sorted(record.layers, key=lambda layer: -(layer.loss or 0.0))
    rows: list[tuple[str, str, str, str]]
    rows = [(layer.layer, record.precision, percent(layer.loss), "") for layer in by_loss]
    rows += [(table.layer, "int8 table", "", "") for table in record.embeddings]
    rows += [
        (product.layer or "the model itself", f"float ({product.operator})", "", product.reason)
        for product in record.products
    ]
    return rows


def percent(share: float | None) -> str:
    return number(None) if share is None else f"{100 * share:.3g} %"
