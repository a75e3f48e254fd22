"""The results of a benchmark: the records behind its JSON, CSV and page."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from effexport.base.files import json_text
from effexport.base.records import read_record

Status = Literal["measured", "disturbed", "failed", "not run"]


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One cell of a benchmark: a model on a runtime.

    label: what tables call the model: the variant, and what is special about it ("nystrom-32", "lsh, 4 rounds").
    options: fields of the attention spec that differ from their defaults, apart from the sizes that have a field here.
    scope: "core" is attention without projections, "attention" the layer with them, "encoder" a whole encoder.
    encoder: fields of the encoder spec that differ from their defaults. model_seq_len: the length that the model was
    made for, if it is not the measured one.
    """

    label: str
    variant: str
    runtime: str
    scope: str
    seq_len: int
    batch: int
    precision: str
    heads: int
    head_dim: int
    options: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, Any] = field(default_factory=dict)
    model_seq_len: int | None = None

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The comparison before timing. value, limit: of the metric; None if nothing could be compared."""

    passed: bool
    metric: str
    value: float | None
    limit: float | None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of one call over all timed runs. spread_ms: half the distance between the quartiles."""

    runs: int
    median_ms: float
    mean_ms: float
    deviation_ms: float
    lowest_ms: float
    highest_ms: float
    spread_ms: float


@dataclass(frozen=True, kw_only=True)
class Floor:
    """A lower bound of the time of a formula, measured in turn with the candidates, as medians over the same rounds.

    products_ms: its matrix products alone, in PyTorch. pass_ms: one pass over inputs and outputs.
    """

    products_ms: float
    pass_ms: float

    @property
    def total_ms(self) -> float:
        return self.products_ms + self.pass_ms


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """Activity of other programs while a row was timed; None where the system does not tell.

    kept, dropped: its rounds; a round is dropped if its threads had to wait for a core.
    waited_share: seconds that its threads waited, all together, per second of the runs behind its timing.
    own_cores: cores that this process used on average during them. Both count from just before a run to just after it.
    other_cores, stolen_cores: cores that other programs used, and that the host of a virtual machine took, on average
    while all rows of its size were timed.
    """

    kept: int
    dropped: int
    waited_share: float | None
    own_cores: float | None
    other_cores: float | None
    stolen_cores: float | None


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """A case and its measurements.

    status: "disturbed" if other programs changed the timing, which is kept for the record only.
    reason: why a row was disturbed, failed or was not run.
    implementation: per custom operator, what ran it: "kernel", "body", ….
    peak_bytes: the most memory in use while it ran, beyond what was in use before its inputs were made.
    times_softmax, times_torch: how many times faster than softmax on the same runtime, and than eager PyTorch on the
    same model; the median over rounds of the ratio within a round; None without that row.
    note: what a reader should know about how the numbers were measured.
    """

    case: BenchCase
    status: Status
    reason: str = ""
    parity: Agreement | None = None
    timing: Timing | None = None
    floor: Floor | None = None
    peak_bytes: int | None = None
    implementation: dict[str, str] = field(default_factory=dict)
    times_softmax: float | None = None
    times_torch: float | None = None
    disturbance: Disturbance | None = None
    note: str = ""

    @property
    def is_quotable(self) -> bool:
        """True if sentences, ratios, ranks and charts may use the timing: of the right result, and undisturbed."""
        return self.status == "measured" and self.timing is not None and (self.parity is None or self.parity.passed)

    @property
    def tokens_per_second(self) -> float | None:
        if self.timing is None or self.status == "disturbed":
            return None
        return self.case.tokens / (self.timing.median_ms / 1e3)

    @property
    def times_floor(self) -> float | None:
        if self.timing is None or self.floor is None or self.status == "disturbed":
            return None
        return self.timing.median_ms / self.floor.total_ms


@dataclass(frozen=True, kw_only=True)
class BenchResults:
    """All results of a benchmark. complete: False if the run was interrupted; the rows are then those finished so far.

    preset: the name of the published experiment that was repeated, or "". environment: versions of the packages in
    use; machine: processor, cores, memory, and the GPU if one was used. command: how to repeat it.
    """

    format_version: Literal[1] = 1
    rows: tuple[BenchRow, ...]
    created: str
    command: str
    rounds: int
    threads: int
    machine: dict[str, str]
    environment: dict[str, str]
    preset: str = ""
    complete: bool = True

    def to_json(self) -> str:
        return json_text(asdict(self))


def results_from_json(path: Path) -> BenchResults:
    """Read what `BenchResults.to_json` wrote. Raises UserError for another kind of file."""
    return read_record(path, BenchResults, "expected the results.json of effexport bench")
