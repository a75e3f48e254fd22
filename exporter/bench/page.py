"""Benchmarks and sweeps as documents, and their files: results.json, results.csv and report.html."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from effexport.base.disk import write_error
from effexport.base.files import FolderKind, csv_text, write_file
from effexport.base.formatting import (
    NOTHING,
    counted,
    duration,
    listed,
    memory,
    number,
    rate,
    seconds,
    three_digits,
    times,
)
from effexport.bench import findings
from effexport.bench.findings import Curve
from effexport.bench.grid import BenchResults, BenchRow, SweepResults, SweepRow
from effexport.bench.presets import PRESETS, mean_ratios, measured_table, published_tables
from effexport.bench.recommendation import Advice, parts_of_advice
from effexport.proof.check import METRIC
from effexport.render.document import (
    Chart,
    Code,
    Column,
    Document,
    Facts,
    Item,
    Line,
    Link,
    Part,
    PlotLine,
    Quantity,
    Section,
    Sentence,
    Table,
    chart_of,
    columns_and_lines,
    present,
)
from effexport.render.formats import html_from_document

JSON, CSV, PAGE = "results.json", "results.csv", "report.html"
BENCH_FOLDER = FolderKind("a benchmark", JSON, b'{\n  "format_version": 1,\n  "rows": [')
# A longer table is folded, so that the sections below it are easy to find.
MAX_OPEN_ROWS, MAX_OPEN_CELLS = 40, 60
CASE_FIELDS = ["label", "variant", "options", "scope", "seq_len", "batch", "precision", "heads", "head_dim", "runtime"]
TIMING_FIELDS = ["runs", "median_ms", "mean_ms", "deviation_ms", "lowest_ms", "highest_ms", "spread_ms"]
# Column of the CSV file (flat, with units in the names) → attribute of a row, in the order of the file.
COLUMNS: dict[str, str] = {
    **{name: f"case.{name}" for name in CASE_FIELDS},
    **{name: name for name in ("implementation", "status", "reason")},
    **{f"parity_{name}": f"parity.{name}" for name in ("passed", "metric", "value", "limit")},
    **{name: f"timing.{name}" for name in TIMING_FIELDS},
    **{name: name for name in ("tokens_per_second", "times_softmax", "times_torch")},
    **{f"floor_{name}": f"floor.{name}" for name in ("products_ms", "pass_ms")},
    "floor_ms": "floor.total_ms",
    **{name: name for name in ("times_floor", "peak_bytes", "note")},
    **{f"rounds_{name}": f"disturbance.{name}" for name in ("kept", "dropped")},
    **{name: f"disturbance.{name}" for name in ("waited_share", "own_cores", "other_cores", "stolen_cores")},
}
# Every field of a cell but the log, which has many lines.
COLUMNS_OF_CELL = {one.name: one.name for one in fields(SweepRow) if one.name != "log_tail"}
What = Literal["latency", "memory", "ratio", "floor"]
RATIO = Quantity("Times as fast as softmax", "times as fast", times)
# each with its value in a row, in the unit of the axis
QUANTITIES: dict[What, tuple[Quantity, Callable[[BenchRow], float | None]]] = {
    "latency": (Quantity("Latency against length", "milliseconds", duration), lambda row: row.median_ms),
    "memory": (
        Quantity("Peak memory against length", "megabytes", lambda value: memory(value * 1e6)),
        lambda row: None if row.peak_bytes is None else row.peak_bytes / 1e6,
    ),
    "ratio": (RATIO, lambda row: row.times_softmax),
    "floor": (Quantity("Times the floor", "times the floor", times), lambda row: row.times_floor),
}
HOW = (
    (
        "Parity first",
        "Every candidate is compared with the PyTorch reference before it is timed; one that fails has no timing "
        "here. The column shows the largest error relative to the RMS of the reference, and its limit; a row that is "
        "judged by another metric names it. “Ran as” says whether custom operators ran as native kernels or as "
        "function bodies of standard operators.",
    ),
    (
        "Rounds",
        "The candidates of one length take turns within a round, so that slow changes of the machine, such as of its "
        "clock rate, affect all of them. A ratio is the median over rounds of the ratio within a round. Ratios are "
        "what can be quoted; milliseconds belong to this machine.",
    ),
    (
        "Other programs",
        "A run is disturbed if its threads were ready to run but had no core for more than 5 % of its time. "
        "Disturbed runs do not count and are repeated, within bounds. A row with fewer than three undisturbed "
        "rounds, or far below its floor, is marked disturbed, and nothing is derived from it.",
    ),
)
FLOOR = (
    "Floor",
    "A lower bound for any implementation of the same formula: its matrix products alone, in PyTorch, and one pass "
    "over inputs and outputs. It is timed in turn with the candidates.",
)
MEMORY = (
    "Memory",
    "The most memory in use while the candidate ran, beyond what was in use before its inputs were made. kB, MB and GB "
    "are powers of ten.",
)
# A column, and its text in a row. Those of the case come first; the others are empty for a row without a timing.
OF_CASE: tuple[tuple[Column, Callable[[BenchRow], str]], ...] = (
    (Column("Tokens", True, group="{} tokens"), lambda row: f"{row.case.seq_len:,}"),
    (Column("Model"), lambda row: row.case.label),
    (Column("Runtime"), lambda row: row.case.runtime),
    (Column("Scope"), lambda row: row.case.scope),
    (Column("Batch", True), lambda row: f"{row.case.batch:,}"),
    (Column("Precision"), lambda row: row.case.precision),
    (Column("Heads", True), lambda row: f"{row.case.heads} × {row.case.head_dim}"),
)


def parity_text(row: BenchRow) -> str:
    """`2.5e-06 of 0.0002`; the result in words if there is no number."""
    if row.parity is None:
        return NOTHING
    if row.parity.value is None:
        return row.parity.detail or ("passed" if row.parity.passed else "failed")
    return f"{number(row.parity.value)} of {number(row.parity.limit)}"


def implementation_text(row: BenchRow) -> str:
    """`kernel` if all custom operators ran so, else what ran each of them."""
    ran = list(dict.fromkeys(row.implementation.values()))
    return ran[0] if len(ran) == 1 else ", ".join(f"{op}: {what}" for op, what in row.implementation.items()) or NOTHING


MEASURED: tuple[tuple[Column, Callable[[BenchRow], str]], ...] = (
    (Column("Median ± spread", True), findings.median_text),
    (Column("Tokens/s", True, below="{} tokens/s"), lambda row: rate(row.tokens_per_second)),
    (Column("× softmax", True), lambda row: three_digits(row.times_softmax)),
    (Column("× torch", True), lambda row: three_digits(row.times_torch)),
    (Column("× floor", True), lambda row: three_digits(row.times_floor)),
    (Column("Floor", True, below="floor {}"), lambda row: duration(row.floor.total_ms) if row.floor else NOTHING),
    (Column("Peak memory", True), lambda row: memory(row.peak_bytes)),
    (Column("Parity", True), parity_text),
    (Column("Metric", below="{}"), lambda row: row.parity.metric if row.parity and row.parity.metric != METRIC else ""),
    (Column("Ran as"), implementation_text),
    (Column("Runs", True), lambda row: NOTHING if row.timing is None else f"{row.timing.runs:,}"),
)
# Columns that are left out if all rows have the same text, which is a condition then.
CONDITIONS = {
    "Runtime": "{}",
    "Scope": "{}",
    "Precision": "{}",
    "Batch": "batch {}",
    "Heads": "heads {}",
    "Runs": "{} runs",
}


def document_from_results(results: BenchResults, advice: Advice | None = None) -> Document:
    """A benchmark, which may be incomplete; that of an advice begins with it."""
    conditions = conditions_of(results.rows)
    found = findings.headlines(results)
    warnings = ((findings.interruption(results), "not run"), (findings.disturbance(results), "disturbed"))
    verdicts = [Sentence(text, status) for text, status in warnings if text]
    verdicts.append(Sentence(advice.sentences[0] if advice else found[0]))
    sentences = [Sentence(text) for text in (advice.sentences if advice else found)[1:]]
    sentences += [Sentence(text, "not run") for text in findings.remarks(results)]
    is_advice = advice is not None  # whose table says what those of a benchmark do
    how = HOW + (FLOOR,) * any(row.floor for row in results.rows)
    how += (MEMORY,) * any(row.peak_bytes is not None for row in results.rows)
    versions = {name: text for name, text in results.environment.items() if name not in results.machine}
    cases = [row.case for row in results.rows if row.case.options]
    options_of = {case.label: ", ".join(f"{name} {value}" for name, value in case.options.items()) for case in cases}
    options = Facts("Options", tuple(options_of.items()))
    sections = (
        Section("Failed, disturbed and not run", tuple(findings.problems(results)), is_background=is_advice),
        Section("Next to the published figures", beside_published(results), is_background=True),
        Section("Speed and memory", present(bench_chart(results))),
        Section(
            "Where it pays: lengths at which softmax is overtaken",
            present(crossings_table(results)),
            is_background=is_advice,
        ),
        Section("Every row", present(rows_table(results, conditions)), is_background=is_advice),
        Section("What is special about each model", present(options), is_background=True),
        Section("How it was measured", (Facts("How it was measured", how, is_prose=True),), is_background=True),
        Section(
            "Machine and versions",
            present(Facts("Machine", tuple(results.machine.items())), Facts("Versions", tuple(versions.items()))),
            is_background=True,
        ),
        Section("Repeat it", (Code(results.command),), is_background=True),
    )
    return Document(
        program="effexport bench",
        title=title_of(results),
        lead=", ".join(CONDITIONS[name].format(text) for name, text in conditions.items()),
        created=results.created,
        verdicts=tuple(verdicts),
        sentences=(*sentences, Sentence(findings.parity_sentence(results), findings.verdict(results))),
        parts=parts_of_advice(advice, timing_note(results)) if advice else (),
        sections=sections,
    )


def title_of(results: BenchResults) -> str:
    """The published experiment that is repeated, else the models that are compared."""
    if results.preset:
        return f"Repeated: {PRESETS[results.preset].title if results.preset in PRESETS else results.preset}"
    labels = list(dict.fromkeys(row.case.label for row in results.rows))
    if len(labels) > 6:
        return f"Attention benchmark of {len(labels)} models"
    return f"Attention benchmark: {listed(labels)}"


def conditions_of(rows: Sequence[BenchRow]) -> dict[str, str]:
    """The texts that all rows have in common, by the title of their column, in the order of CONDITIONS."""
    timed = [row for row in rows if row.is_quotable]
    texts = {column.title: {text(row) for row in rows} for column, text in OF_CASE}
    texts |= {column.title: {text(row) for row in timed} for column, text in MEASURED}
    return {name: min(texts[name]) for name in CONDITIONS if len(texts[name]) == 1 and texts[name] != {NOTHING}}


def rows_table(results: BenchResults, conditions: dict[str, str]) -> Table:
    """All rows by length. Columns that are the same in all rows, or empty, are left out."""
    own = [one for one in OF_CASE if one[0].title not in conditions]
    others = [one for one in MEASURED if one[0].title not in conditions]
    rows = sorted(results.rows, key=lambda row: row.case.seq_len)
    columns, lines = columns_and_lines(own, others, "Status", rows, problem_of)
    count = counted(len(lines), "row")
    note = (
        f"{timing_note(results)} × softmax and × torch: how many times faster than softmax on the same runtime, and "
        "than eager PyTorch on the same model; × floor: the median as a multiple of its lower bound."
    )
    is_open = len(lines) <= MAX_OPEN_ROWS
    return Table("Every row", columns, lines, note, f"{count} by length", is_open)


def timing_note(results: BenchResults) -> str:
    threads = f", {counted(results.threads, 'thread')}" if results.threads else ""
    return (
        f"Median of {counted(results.rounds, 'round')}{threads}; the spread is half the distance between the quartiles."
    )


def problem_of(row: BenchRow) -> Line | None:
    """The reason a row may not be quoted; for a disturbed row with its median, which is only an upper limit."""
    if row.is_quotable:
        return None
    reason = row.reason or findings.NO_REASON
    if row.status != "disturbed" or row.timing is None:
        return Line((), row.status, reason)
    median = duration(row.timing.median_ms)
    return Line((), row.status, f"{reason}; its median was {median}", f"disturbed: {median}")


def crossings_table(results: BenchResults) -> Table:
    columns = (Column("Model"), Column("Where"), Column("Against softmax there, it is"))
    found = findings.crossovers(findings.curves(results))
    lines = tuple(Line((curve.label, curve.place, text)) for curve, text in found)
    note = "Medians, interpolated between measured lengths on logarithmic axes; other lengths are not predicted."
    return Table("Where softmax is overtaken", columns, lines, note)


def beside_published(results: BenchResults) -> tuple[Part, ...]:
    parts: list[Part | None] = []
    for published, table in published_tables(results):
        parts += [Sentence(published.title), f"{published.source}. {published.note}", table]
    measured = measured_table(results)
    parts += [Sentence("Measured here") if measured else None, measured]
    if results.preset == "linear-blog":
        # the chart of the blog
        quantity = Quantity("Mean time of softmax over that of the model", RATIO.axis, RATIO.text)
        parts.append(chart_of("mean-ratio", {quantity: with_even_line(mean_ratios(results))}))
        parts.append("Means, as in the blog; the other ratios on this page are medians.")
    return present(*parts)


def bench_chart(results: BenchResults, wanted: Sequence[What] = tuple(QUANTITIES)) -> Chart | None:
    """Latency and memory, and how the times relate to softmax and to the floor; None for a benchmark of one row."""
    if len(results.rows) < 2:
        return None
    every = findings.curves(results)
    lines: dict[Quantity, list[PlotLine]] = {}
    for what in wanted:
        quantity, read = QUANTITIES[what]
        # a logarithmic axis has no 0, such as memory too small to be measured
        values = [(curve, {n: value for n, value in curve.values(read).items() if value > 0}) for curve in every]
        lines[quantity] = with_even_line(values) if what == "ratio" else [plot_line(*entry) for entry in values]
    return chart_of("-".join(wanted), lines)


def plot_line(curve: Curve, values: dict[int, float]) -> PlotLine:
    return PlotLine(curve.label, curve.place, values, is_baseline=curve.is_baseline)


def with_even_line(found: Sequence[tuple[Curve, dict[int, float]]]) -> list[PlotLine]:
    """Ratios to softmax, and in each place the line for models exactly as fast as softmax."""
    ratios = [plot_line(curve, values) for curve, values in found if values and not curve.is_baseline]
    places: dict[str, set[int]] = {}
    for line in ratios:
        places.setdefault(line.place, set()).update(line.values)
    even = [PlotLine(findings.BASELINE, at, {min(n): 1.0, max(n): 1.0}, is_baseline=True) for at, n in places.items()]
    return [*even, *ratios]


HOW_OF_CELLS = (
    "Parity is the verdict of the cell's own report: the exported model was compared with PyTorch, and what fails is "
    "not written. “not run” means that no runtime there could run the model. The worst error is the largest max "
    "|error| / RMS of all its checks. The time is that of the process that built the cell, with its peak memory. An "
    "engine gives its version of TensorRT, the GPUs it is for, size, layers and how long it took to build; “run: not "
    "run” means that there was no GPU to run it on. Reports and logs are files in this folder."
)
# A column, and its text in a row; those of a cell that is not finished end with its state.
OF_CELL: tuple[tuple[Column, Callable[[SweepRow], str]], ...] = (
    (Column("Model", group="{}"), lambda row: row.label),
    (Column("Tokens", True), lambda row: f"{row.seq_len:,}"),
    (Column("Precision"), lambda row: row.precision),
    (Column("Target"), lambda row: row.target),
    (Column("GPU", below="{}"), lambda row: row.gpu),
)
OF_BUILD: tuple[tuple[Column, Callable[[SweepRow], str | Link]], ...] = (
    (Column("State", is_status=True), lambda row: row.status),
    (Column("Parity", is_status=True, below="parity: {}"), lambda row: row.parity),
    (Column("Worst error", True), lambda row: number(row.worst_error)),
    (Column("Limit", True, below="of {}"), lambda row: number(row.error_limit)),
    (Column("Time", True), lambda row: NOTHING if row.seconds is None else duration(row.seconds * 1000)),
    (Column("Memory", True, below="{}"), lambda row: memory(row.peak_bytes)),
    (Column("Size", True), lambda row: memory(row.model_bytes)),
    (Column("Engine"), lambda row: row.engine),
    (Column("Run", is_status=True, below="run: {}"), lambda row: row.engine and row.engine_parity),
    (Column("Report"), lambda row: Link("report", f"{row.artifact}/report.html")),
    (Column("Log", below="{}"), lambda row: Link("log", row.log)),
)


def document_from_sweep(results: SweepResults) -> Document:
    scopes, batches = {row.scope for row in results.rows}, {row.batch for row in results.rows}
    lead = [f"scope {scope}" for scope in scopes if len(scopes) == 1]
    lead += [f"batch {batch}" for batch in batches if len(batches) == 1]
    verdicts = [Sentence(results.sentence, results.verdict)]
    if not results.complete:
        verdicts.insert(0, Sentence("Interrupted: run the same command again to resume.", "not run"))
    unfinished = [row for row in results.rows if row.status != "finished"]
    problems = tuple(Item(row.status, row.title, row.reason, row.log_tail, row.command) for row in unfinished)
    place = Facts("Run", (("place", results.where or "nothing had to run"), ("this run", seconds(results.seconds))))
    chart = sweep_chart(results.rows)
    note = "Short bars are the limits of the errors in their colour. The time is that of the whole build."
    repeated = "What is finished is not built again, and what failed only with --retry-failed."
    versions = Facts("Versions", tuple(results.environment.items()))
    return Document(
        program="effexport sweep",
        title=f"Sweep: {results.name}",
        lead=", ".join(lead),
        created=results.created,
        verdicts=tuple(verdicts),
        sentences=(),
        parts=(),
        sections=(
            Section("Failed and not run", problems),
            Section("Error, size and time against length", (chart, note) if chart else (), is_background=True),
            Section("Every cell", (cells_table(results.rows),)),
            Section("What the columns say", (HOW_OF_CELLS,), is_background=True),
            Section("Where it ran", present(place, versions), is_background=True),
            Section("Repeat it", (repeated, Code(results.command)), is_background=True),
        ),
    )


def cells_table(rows: Sequence[SweepRow]) -> Table:
    """All cells, by variant with its options; columns that are empty in all rows are left out."""
    labels = list(dict.fromkeys(row.label for row in rows))
    ordered = sorted(rows, key=lambda row: labels.index(row.label))

    def reason_of(row: SweepRow) -> Line | None:
        return None if row.status == "finished" else Line((), row.status, row.reason.partition("\n")[0])

    columns, lines = columns_and_lines(OF_CELL, OF_BUILD, "State", ordered, reason_of)
    folded = f"{counted(len(rows), 'cell')} by variant"
    return Table("Every cell", columns, lines, "", folded, len(rows) <= MAX_OPEN_CELLS)


# each with its field of a row, the unit of the axis in that of the field, and the field of its limit
QUANTITIES_OF_CELL = (
    (Quantity("Worst error against length", "max |error| / RMS", number), "worst_error", 1.0, "error_limit"),
    (Quantity("Size of the model against length", "megabytes", "{:.3g} MB".format), "model_bytes", 1e6, ""),
    (Quantity("Time of the build against length", "seconds", "{:.3g} s".format), "seconds", 1.0, ""),
)


def sweep_chart(rows: Sequence[SweepRow]) -> Chart | None:
    """Errors with their limits, sizes and times against length; None if nothing was built for several lengths."""
    finished = [row for row in rows if row.status == "finished"]
    settings = [(row.precision, row.target, row.gpu) for row in finished]
    groups = findings.grouped(finished, [row.label for row in finished], settings)
    if all(len({row.seq_len for row in group}) < 2 for group in groups.values()):
        return None

    def values(rows: Sequence[SweepRow], name: str, unit: float) -> dict[int, float]:
        # a logarithmic axis has no 0
        return {row.seq_len: getattr(row, name) / unit for row in rows if name and getattr(row, name)}

    lines = {
        quantity: [PlotLine(*key, values(rows, name, unit), values(rows, limit, unit)) for key, rows in groups.items()]
        for quantity, name, unit, limit in QUANTITIES_OF_CELL
    }
    return chart_of("sweep", lines)


def write_results(
    results: BenchResults, output: Path, advice: Advice | None = None, *, force: bool
) -> tuple[Path, ...]:
    """Write all files or none; the page begins with the advice. Returns their paths. Raises as `FolderKind.new`."""
    texts = texts_of_results(results, document_from_results(results, advice))
    with BENCH_FOLDER.new(output, force=force) as folder:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return tuple(output / name for name in texts)


def write_sweep(results: SweepResults, folder: Path) -> None:
    """Write each file completely or not at all. Raises UserError."""
    try:
        for name, text in texts_of_results(results, document_from_sweep(results)).items():
            write_file(folder / name, text)
    except OSError as error:
        raise write_error(folder, error, "move the folder; it has the finished cells") from error


def texts_of_results(results: BenchResults | SweepResults, document: Document) -> dict[str, str]:
    """The files by name."""
    return {JSON: results.to_json(), CSV: csv_from_results(results), PAGE: html_from_document(document)}


def csv_from_results(results: BenchResults | SweepResults) -> str:
    """The rows as CSV; the cell of a value that was not measured is empty."""
    columns = COLUMNS if isinstance(results, BenchResults) else COLUMNS_OF_CELL
    return csv_text(columns, ([field_of(row, path) for path in columns.values()] for row in results.rows))


def field_of(row: BenchRow | SweepRow, path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return " ".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, dict) else value
