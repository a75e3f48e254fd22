"""The cases of a benchmark, models × lengths × batches × runtimes, and the results of benchmarks and sweeps.

Results are the records behind JSON, CSV and page. Loads no framework.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from effexport.base.dtypes import FLOAT_PRECISIONS
from effexport.base.environment import versions
from effexport.base.errors import UserError
from effexport.base.files import json_text
from effexport.base.formatting import counted, listed, words
from effexport.base.records import read_record
from effexport.base.runtimes import BENCH_RUNTIMES, DEFAULT_RUNTIME
from effexport.base.spec import BuildSpec
from effexport.models.attention_spec import AttentionSpec, attention_spec
from effexport.models.encoder.spec import EncoderSpec
from effexport.models.shapes import Product
from effexport.models.validation import did_you_mean
from effexport.models.variants import ATTENTION_SPECS

SCOPES = ("core", "attention", "encoder")


@dataclass(frozen=True)
class Model:
    """A variant with some fields of its spec set, and what tables call it."""

    variant: str
    options: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", ATTENTION_SPECS[self.variant].label_with(self.options))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The choices of a benchmark; every combination is a case.

    scope: "core" times attention on ready queries, keys and values, "attention" a layer with its projections, "encoder"
    a whole encoder. encoder: fields of its spec that differ from their defaults.
    """

    models: tuple[Model, ...] = tuple(Model(variant) for variant in ("softmax", "linear", "nystrom", "lsh"))
    seq_lens: tuple[int, ...] = (512, 2048, 8192)
    batches: tuple[int, ...] = (1,)
    precisions: tuple[str, ...] = ("fp32",)
    runtimes: tuple[str, ...] = ("torch", DEFAULT_RUNTIME)
    scope: str = "core"
    heads: int = 8
    head_dim: int = 64
    encoder: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names("--runtimes", self.runtimes, BENCH_RUNTIMES)
        check_names("--precision", self.precisions, FLOAT_PRECISIONS)
        check_names("--scope", (self.scope,), SCOPES)
        widths = {"--heads": (self.heads,), "--head-dim": (self.head_dim,)}
        for option, values in {"--seq-lens": self.seq_lens, "--batch": self.batches, **widths}.items():
            check_distinct(option, values)
            if min(values) < 1:
                raise UserError(f"{option} has {min(values)}; expected positive integers")
        check_distinct("--variants", [model.label for model in self.models])
        # a spec that cannot work is refused before anything is measured
        _ = [case.spec for case in self.cases()]

    def cases(self) -> Iterator[BenchCase]:
        """Shorter sequences first; of one size, model by model."""
        sizes = itertools.product(sorted(self.seq_lens), sorted(self.batches), self.precisions)
        shared = {name: getattr(self, name) for name in ("scope", "heads", "head_dim", "encoder")}
        for (seq_len, batch, precision), model, runtime in itertools.product(sizes, self.models, self.runtimes):
            own: dict[str, Any] = {"seq_len": seq_len, "batch": batch, "precision": precision, "runtime": runtime}
            yield BenchCase(label=model.label, variant=model.variant, options=model.options, **own, **shared)


def models_from_text(text: str, option: str = "--variants") -> tuple[Model, ...]:
    """`softmax,nystrom:num_landmarks=32,lsh:num_hashes=4:chunk_length=32` → models.

    Raises UserError for text of another form; an unknown variant or field is reported by Grid.
    """
    return tuple(model_from_text(part, option) for part in words(text, option))


def model_from_text(text: str, option: str) -> Model:
    variant, *settings = text.split(":")
    if variant not in ATTENTION_SPECS:
        raise UserError(
            f"unknown variant {variant!r} in {option}{did_you_mean(variant, ATTENTION_SPECS)} "
            f"Expected some of: {', '.join(ATTENTION_SPECS)}"
        )
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"cannot read {text!r} in {option}; expected VARIANT:FIELD=VALUE, such as lsh:num_hashes=4")
        options[name.replace("-", "_")] = value_from_text(value)
    return Model(variant, options)


def value_from_text(text: str) -> Any:
    """An integer, a number, true, false, none, or the text itself."""
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(text)
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def check_names(option: str, given: Collection[str], known: Collection[str]) -> None:
    check_distinct(option, given)
    for name in given:
        known_name(option, name, known)


def known_name(option: str, name: Any, known: Collection[str]) -> str:
    """The name. Raises UserError if it is not one of those that are known."""
    if name not in known:
        raise UserError(f"{option} has {name!r}{did_you_mean(name, known)} Expected: {', '.join(known)}")
    return str(name)


def check_distinct(option: str, given: Collection[object]) -> None:
    if not given:
        raise UserError(f"{option} is empty; expected at least one value")
    seen = set()
    for value in given:
        key = (type(value), repr(value))  # 1 and true are equal in Python, and not in TOML
        if key in seen:
            raise UserError(f"{option} has {value!r} twice; expected every value once")
        seen.add(key)


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

    @property
    def title(self) -> str:
        batch = f"{self.batch} × " if self.batch > 1 else ""
        return f"{self.label}, {batch}{self.seq_len} tokens{self.runtime and f' on {self.runtime}'}"

    @property
    def spec(self) -> BuildSpec:
        """The model as it is exported: seq_len is the measured length, and our operators are fused if possible.

        Raises SpecError for options that cannot work.
        """
        return BuildSpec(model=self.model, batch=self.batch, precision=self.precision, fused=True)  # type: ignore[arg-type]

    @property
    def model(self) -> AttentionSpec | EncoderSpec:
        sizes = {"dim": self.heads * self.head_dim, "heads": self.heads, "seq_len": self.model_seq_len or self.seq_len}
        attention = attention_spec(self.variant, sizes | self.options)
        return EncoderSpec(attention=attention, **self.encoder) if self.scope == "encoder" else attention

    @property
    def products(self) -> tuple[Product, ...]:
        """The matrix products of one call: for the scope "core" those of attention alone, else with all projections."""
        products = self.model.attention.core_products if self.scope == "core" else self.model.products
        return tuple(products(self.batch, self.seq_len))

    @property
    def flops(self) -> int:
        """Operations of its products."""
        return sum(product.flops for product in self.products)

    @property
    def logits_bytes(self) -> int:
        """The largest intermediate value of the plain formula, float32, such as the logits of softmax."""
        return 4 * self.model.attention.largest_intermediate(self.batch, self.seq_len)


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
    def median_ms(self) -> float | None:
        return None if self.timing is None else self.timing.median_ms

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


SWEEP_FORMAT = 1
CellStatus = Literal["finished", "failed", "not run"]


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """A cell and its result.

    parity: the verdict of its report: passed, or "not run" if no runtime there could run the model. worst_error: the
    largest max |error| / RMS; error_limit: its limit. engine_parity: "" without an engine. seconds: of the last
    attempt. artifact, log: paths relative to the folder of the sweep, or "". command: runs this cell only.
    """

    id: str
    label: str
    variant: str
    scope: str
    seq_len: int
    batch: int
    precision: str
    target: str
    gpu: str
    status: CellStatus
    command: str
    reason: str = ""
    is_new: bool = False
    parity: str = ""
    worst_error: float | None = None
    error_limit: float | None = None
    engine: str = ""
    engine_parity: str = ""
    seconds: float | None = None
    peak_bytes: int | None = None
    artifact_bytes: int | None = None
    model_bytes: int | None = None
    where: str = ""
    attempts: int = 0
    artifact: str = ""
    log: str = ""
    log_tail: str = ""

    @property
    def title(self) -> str:
        return title_of_cell(self.label, self.seq_len, self.precision, self.target, self.gpu)


def title_of_cell(label: str, seq_len: int | None, precision: str | None, target: str, gpu: str) -> str:
    """A cell in words: those that are known, or apply."""
    words = (label, seq_len and f"{seq_len} tokens", precision, target, gpu)
    return ", ".join(str(word) for word in words if word)


@dataclass(frozen=True, kw_only=True)
class SweepResults:
    """The results of a sweep. complete: False after an interrupt. where: the executor. seconds: of this run only."""

    rows: tuple[SweepRow, ...]
    name: str
    created: str
    command: str
    where: str = ""
    seconds: float = 0.0
    complete: bool = True
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> dict[str, int]:
        """The number of cells by status."""
        return {status: sum(row.status == status for row in self.rows) for status in get_args(CellStatus)}

    @property
    def verdict(self) -> str:
        """ "passed", "failed", or "not run" if some cells did not run."""
        if self.summary["failed"]:
            return "failed"
        return "not run" if self.summary["not run"] else "passed"

    @property
    def sentence(self) -> str:
        """The sweep in one line."""
        parts = [f"{count} {status}" for status, count in self.summary.items() if count]
        new = sum(row.is_new for row in self.rows if row.status == "finished")
        old = self.summary["finished"] - new
        before = f" ({new} now, {old} before)" if new and old else " (all before)" if old else ""
        return f"{counted(len(self.rows), 'cell')}: {listed(parts)}{before}"

    def to_json(self) -> str:
        values = asdict(self)
        cells = values.pop("rows")
        return json_text({"format_version": SWEEP_FORMAT, **values, "summary": self.summary, "cells": cells})


@dataclass(frozen=True)
class Step:
    """A progress message. text: what happens now. done, total: of the work, in seconds or cells.

    seconds_left: None if unknown or over. running: cells at the moment.
    """

    text: str
    done: float
    total: float
    seconds_left: float | None
    running: int = 0


OnStep = Callable[[Step], None]


@dataclass
class Pace:
    """A running total of the work done, which estimates how long the rest will take. total: in any unit."""

    total: float
    on_step: OnStep
    clock: Callable[[], float] = time.monotonic
    done: float = 0

    def __post_init__(self) -> None:
        self._start = self.clock()

    def say(self, text: str, running: int = 0) -> None:
        """running: parts of the work that are in progress, on average half done."""
        share = (self.done + running / 2) / self.total
        elapsed = self.clock() - self._start
        left = elapsed * (1 - share) / share if self.done and 0.02 < share < 1 else None
        self.on_step(Step(text, min(self.done, self.total), self.total, left, running))

    def pay(self, cost: float) -> None:
        self.done += cost


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def made_now() -> dict[str, Any]:
    """The fields of results that say when they were made, and with which versions."""
    return {"created": now(), "environment": {name: found for name, found in versions().items() if found is not None}}


def results_from_json(path: Path) -> BenchResults:
    """Read what `BenchResults.to_json` wrote. Raises UserError for another kind of file."""
    return read_record(path, BenchResults, "expected the results.json of effexport bench")
