"""Rows of a benchmark as curves over the length: for plots and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from effexport.bench.rendering.crossover import DISTURBED, Crossover, crossover
from effexport.bench.results import BenchResults, Case, Row

BASELINE = "softmax"


@dataclass(frozen=True)
class Setting:
    """What must be equal for two models to be compared. batch is 0 if it depends on the length."""

    runtime: str
    scope: str
    precision: str
    batch: int


@dataclass(frozen=True)
class Curve:
    """The rows of one model in one setting, in order of length.

    name: what tells it from the others of its benchmark; place: the same without the model.
    """

    label: str
    setting: Setting
    name: str
    place: str
    rows: tuple[Row, ...]

    @property
    def is_baseline(self) -> bool:
        return self.rows[0].case.variant == BASELINE

    def values(self, read: Callable[[Row], float | None]) -> dict[int, float]:
        """Values of the rows whose timing may be quoted, by length."""
        known = ((row.case.seq_len, read(row)) for row in self.rows if row.is_quotable)
        return {length: value for length, value in known if value is not None}

    def medians(self) -> dict[int, float]:
        return self.values(median_ms)

    @property
    def is_disturbed(self) -> bool:
        return any(row.status == "disturbed" for row in self.rows)


def median_ms(row: Row) -> float | None:
    return None if row.timing is None else row.timing.median_ms


def curves(results: BenchResults) -> list[Curve]:
    """All curves, softmax first, the others in the order of the rows."""
    groups: dict[tuple[str, Setting], list[Row]] = {}
    batch_varies = has_several_batches(results.rows)
    for row in results.rows:
        groups.setdefault((row.case.label, setting_of(row.case, batch_varies)), []).append(row)
    settings = list(dict.fromkeys(setting for _, setting in groups))
    places = {setting: _place(setting, settings) for setting in settings}
    found = [
        Curve(
            label,
            setting,
            f"{label}, {places[setting]}",
            places[setting],
            tuple(sorted(rows, key=lambda row: row.case.seq_len)),
        )
        for (label, setting), rows in groups.items()
    ]
    return sorted(found, key=lambda curve: not curve.is_baseline)


def setting_of(case: Case, batch_varies: bool) -> Setting:
    return Setting(case.runtime, case.scope, case.precision, case.batch if batch_varies else 0)


def baseline_of(curve: Curve, among: Iterable[Curve]) -> Curve | None:
    """Softmax in the same setting; None if it was not measured, and for softmax itself."""
    if curve.is_baseline:
        return None
    return next((one for one in among if one.is_baseline and one.setting == curve.setting), None)


def crossovers(found: Sequence[Curve]) -> list[tuple[Curve, Crossover]]:
    """For each curve that was timed and has a baseline, where its medians cross those of the baseline.

    A curve with a disturbed row is not compared: without this length, it might seem to cross elsewhere or never.
    """
    pairs = [(curve, baseline_of(curve, found)) for curve in found if curve.medians() or curve.is_disturbed]
    return [
        (curve, DISTURBED if curve.is_disturbed or other.is_disturbed else crossover(curve.medians(), other.medians()))
        for curve, other in pairs
        if other
    ]


def has_several_batches(rows: Iterable[Row]) -> bool:
    """Whether any length was measured with several batches. If batches only shrink with length, they form one curve."""
    batches: dict[int, set[int]] = {}
    for row in rows:
        batches.setdefault(row.case.seq_len, set()).add(row.case.batch)
    return any(len(sizes) > 1 for sizes in batches.values())


def _place(setting: Setting, settings: Sequence[Setting]) -> str:
    """The runtime, and those parts of the setting that differ within this benchmark."""
    parts = [setting.runtime]
    if len({one.scope for one in settings}) > 1:
        parts.append(setting.scope)
    if len({one.precision for one in settings}) > 1:
        parts.append(setting.precision)
    if len({one.batch for one in settings}) > 1:
        parts.append(f"batch {setting.batch}")
    return ", ".join(parts)
