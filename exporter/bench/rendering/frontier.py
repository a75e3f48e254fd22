"""What --quality adds to an advice: the frontier of latency against loss, and what each step along it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from effexport.bench.rendering.entries import FITTING, Entry
from effexport.units import counted, duration, three_digits

NO_DIFFERENCE = (
    "Where intervals overlap or are unknown, these results show no difference; `effexport evaluate ARTIFACT --compare "
    "OTHER` compares two models row by row, which tells more."
)
OTHER_WEIGHTS = "The timed models have the sizes of those that were judged, but other weights."


def with_frontier(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with the frontier marked. The one with the lowest loss is to be used, unless one with a lower loss
    may fit that other programs disturbed."""
    fitting = [entry for entry in entries if entry.quality is not None and entry.standing in FITTING]
    best = min(fitting, key=lambda entry: (loss_of(entry), entry.latency_ms or 0.0), default=None)
    if best is None:
        return list(entries)
    unsure = [entry for entry in entries if entry.quality is not None and entry.standing == "disturbed"]
    is_sure = all(loss_of(entry) > loss_of(best) for entry in unsure)
    timed = sorted((entry for entry in fitting if not entry.is_disturbed), key=lambda entry: entry.latency_ms or 0.0)

    def placed(entry: Entry) -> Entry:
        if entry is best:
            return replace(entry, standing="use this" if is_sure else "frontier")
        if entry not in timed:
            return entry
        better = next((other for other in timed if beats(other, entry)), None)
        return replace(entry, standing="frontier") if better is None else replace(entry, why=f"beaten by {better.name}")

    return [placed(entry) for entry in entries]


def loss_of(entry: Entry) -> float:
    assert entry.quality is not None
    return entry.quality.loss.value


def beats(one: Entry, other: Entry) -> bool:
    """Whether one of two timed and judged entries is at least as good in latency and in loss, and better in one."""
    first, second = (((entry.latency_ms or 0.0), loss_of(entry)) for entry in (one, other))
    return first[0] <= second[0] and first[1] <= second[1] and first != second


def on_frontier(entries: Sequence[Entry]) -> list[Entry]:
    """The frontier, the lowest loss first."""
    found = [entry for entry in entries if entry.quality is not None and entry.standing in ("use this", "frontier")]
    return sorted(found, key=loss_of)


def sentences_of_frontier(entries: Sequence[Entry], seq_len: int, limits: str) -> Iterator[str]:
    """The lowest loss, then what each faster model of the frontier loses."""
    best, *faster = on_frontier(entries)
    assert best.quality is not None
    within = f" within {limits}" if limits else ""
    yield (
        f"{best.name} has the lowest loss{within}: {best.quality.text}, with {best.figures} for {seq_len:,} tokens, "
        f"measured on this machine. It was judged as {best.quality.model}."
    )
    if best.standing != "use this":
        yield "A model with a lower loss may fit, too: other programs disturbed its timing."
    for entry in faster:
        yield f"{entry.name} {speed_beside(entry, best)} and {loss_beside(entry, best)}."
    rivals = [entry for entry in entries if entry.quality is not None and entry.standing in FITTING]
    if not faster and len(rivals) > 1 and not any(entry.is_disturbed for entry in rivals):
        yield "No other model that fits and was judged is faster."
    if any(are_alike(best, entry) for entry in faster):
        yield NO_DIFFERENCE
    unknown = sum(entry.quality is None and entry.standing in FITTING for entry in entries)
    if unknown:
        yield f"{counted(unknown, 'model')} without a result cannot be placed."


def speed_beside(entry: Entry, best: Entry) -> str:
    """`is 2.10 times as fast`; its time alone if that of the other is not known."""
    if best.is_disturbed or best.latency_ms is None or entry.latency_ms is None:
        return f"takes {duration(entry.latency_ms)}"
    return f"is {three_digits(best.latency_ms / entry.latency_ms)} times as fast"


def loss_beside(entry: Entry, best: Entry) -> str:
    """`loses 0.12 bits per byte`."""
    assert entry.quality is not None
    if are_alike(entry, best):
        return "shows no difference in loss"
    return f"loses {loss_of(entry) - loss_of(best):.2g} {entry.quality.unit}"


def are_alike(one: Entry, other: Entry) -> bool:
    """Whether the confidence intervals of the losses overlap, or one of them is unknown."""
    assert one.quality is not None
    assert other.quality is not None
    first, second = one.quality.loss, other.quality.loss
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return True
    return first.low <= second.high and second.low <= first.high
