"""The document of a benchmark: what it says of complete, broken, small and large ones."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from bench_results import (
    FAILED,
    LENGTHS,
    MODELS,
    RESULTS,
    broken_results,
    case,
    html_from_results,
    ort_only,
    preset_results,
    results,
    row,
    two_hundred_rows,
    without_timing,
)
from documents import terminal_of

from effexport.base.formatting import duration, duration_with, memory, rate, three_digits
from effexport.bench.findings import crossovers, curves, headlines, interruption, parity_sentence, problems, verdict
from effexport.bench.grid import BenchResults
from effexport.bench.page import bench_chart, conditions_of, document_from_results, rows_table
from effexport.bench.presets import PRESETS, PUBLICATIONS, measured_table, published_tables
from effexport.render.document import Chart, Table
from effexport.render.svg import MAX_TICKS, ticks_between

# ---- what it says


def test_the_first_headline_is_the_fastest_at_the_longest_length() -> None:
    first, *others = headlines(results())
    assert first == (
        "At 8,192 tokens on ort-cuda, linear is the fastest with 800 µs: "
        "16.0 times as fast as softmax, with 32.0 times less memory (16.0 MB against 512 MB)."
    )
    assert [sentence.split()[4] for sentence in others] == ["ort,", "torch,"]


def test_softmax_may_be_the_fastest() -> None:
    rows = (row("softmax", 512), row("nystrom-64", 512))
    (sentence,) = headlines(results(rows))
    assert "softmax is the fastest with 800 µs; nystrom-64 is next and takes 2.00 times as long" in sentence


def test_a_model_without_softmax_beside_it_says_so() -> None:
    (sentence,) = headlines(results((replace(row("linear", 512), times_softmax=None),)))
    assert sentence == "At 512 tokens on ort, only linear was timed, with 800 µs; softmax was not timed there."


def test_the_speed_of_a_wrong_answer_is_no_speed() -> None:
    why = "parity: max |error| / RMS 0.003 > 0.0002; worst at y[0, 63, 17]"
    wrong = replace(row("linear", 8192), parity=FAILED, status="failed", reason=why)
    found = results((wrong, row("softmax", 8192)))
    assert "linear" not in headlines(found)[0]
    assert verdict(found) == "failed"
    assert parity_sentence(found) == "1 of 2 candidates failed parity: linear on ort at 8,192 tokens."
    (problem,) = problems(found)
    assert problem.text == f"{why} (linear on ort at 8,192 tokens)"
    assert crossovers(curves(found)) == []
    assert "12.8" not in html_from_results(found)


def test_an_interrupted_benchmark_says_so_and_does_not_pass() -> None:
    found = results(complete=False)
    assert verdict(found) == "not run"
    assert interruption(found) == "Interrupted after 60 rows. The other rows are missing."
    assert interruption(found) in html_from_results(found)
    assert interruption(results()) == ""


def test_rows_without_a_timing_are_gathered_by_reason() -> None:
    found = {problem.text.partition(" (")[0]: problem for problem in problems(broken_results())}
    models = "softmax on trt at 1,024 tokens; linear on trt at 1,024 tokens; nystrom-64"
    assert found["there is no GPU"].text.startswith(f"there is no GPU ({models}")
    assert (found["there is no GPU"].status, found["the runtime ended"].status) == ("not run", "failed")
    (unknown,) = problems(results((without_timing("not run", ""),)))
    assert unknown.text.startswith("no reason is known (")


def test_lengths_at_which_softmax_is_overtaken_are_those_of_the_power_laws() -> None:
    found = {(curve.label, curve.place): text for curve, text in crossovers(curves(results()))}
    assert found["nystrom-64", "ort"] == "faster from about 1,024 tokens on"
    assert found["lsh, 4 rounds", "torch"] == "faster from about 4,096 tokens on"
    assert len(found) == 9


def table_of(found: BenchResults) -> Table:
    return rows_table(found, conditions_of(found.rows))


def titles_of(table: Table) -> list[str]:
    return [column.title for column in table.columns]


def test_what_is_the_same_in_every_row_is_said_once() -> None:
    assert document_from_results(ort_only()).lead == "ort, core, fp32, batch 1, heads 4 × 64, 50 runs"
    assert document_from_results(results()).lead == "core, fp32, batch 1, heads 4 × 64, 50 runs"
    alone, several = table_of(ort_only()), table_of(results())
    assert ("Runtime" in titles_of(alone), "Runtime" in titles_of(several)) == (False, True)
    assert [heading for heading, _ in alone.groups] == [f"{length:,} tokens" for length in LENGTHS]


def test_columns_that_nobody_measured_are_left_out() -> None:
    bare = results(tuple(replace(one, floor=None, peak_bytes=None, times_torch=None) for one in ort_only().rows))
    titles = titles_of(table_of(bare))
    assert not {"× floor", "Floor", "Peak memory", "× torch"} & set(titles)
    assert "Median ± spread" in titles


def test_every_line_of_the_table_is_as_wide_as_its_head_or_says_why_not() -> None:
    table = table_of(broken_results())
    for line in table.lines:
        assert (len(line.cells) == len(table.columns)) == (not line.reason)


def test_curves_are_named_by_what_differs() -> None:
    rows = tuple(
        row("linear", 512, batch=batch, precision=precision) for batch in (1, 8) for precision in ("fp32", "fp16")
    )
    assert [f"{curve.label}, {curve.place}" for curve in curves(results(rows))] == [
        "linear, ort, fp32, batch 1",
        "linear, ort, fp16, batch 1",
        "linear, ort, fp32, batch 8",
        "linear, ort, fp16, batch 8",
    ]


def panels(chart: Chart | None) -> list[str]:
    assert chart is not None
    return [panel.svg for row in chart.rows.values() for panel in row]


def test_a_benchmark_has_one_chart_with_a_panel_for_each_quantity_and_runtime() -> None:
    quantities = ["Latency against length", "Peak memory against length", "Times as fast as softmax", "Times the floor"]
    chart = bench_chart(results())
    assert chart is not None
    assert {title: [panel.title for panel in row] for title, row in chart.rows.items()} == {
        title: ["torch", "ort", "ort-cuda"] for title in quantities
    }
    assert [entry.name for entry in chart.legend] == list(MODELS)
    alone = bench_chart(ort_only())
    assert alone is not None
    assert [panel.title for panel in alone.rows[""]] == quantities
    assert html_from_results(results()).count('<figure class="chart">') == 1
    assert bench_chart(results((row("linear", 512),))) is None


def test_panels_of_a_row_have_the_same_axes() -> None:
    chart = bench_chart(results())
    assert chart is not None
    for row_of_panels in chart.rows.values():
        labels = {tuple(re.findall(r"<text[^>]*>([^<]*)</text>", panel.svg)) for panel in row_of_panels}
        assert len(labels) == 1


def test_what_is_zero_has_no_place_on_a_logarithmic_axis() -> None:
    rows = [replace(one, peak_bytes=0 if one.case.seq_len == 512 else one.peak_bytes) for one in ort_only().rows]
    assert ">512</text>" not in panels(bench_chart(results(tuple(rows))))[1]
    assert "megabytes" not in "".join(panels(bench_chart(results(tuple(rows[:4])))))


def test_a_model_has_the_same_colour_and_mark_in_every_panel() -> None:
    for svg in panels(bench_chart(results())):
        groups = re.findall(r'<g class="(s\d|baseline)">.*?<title>([^,<]+)', svg)
        for label, css in {"softmax": "baseline", "linear": "s0", "nystrom-64": "s1"}.items():
            assert {found for found, named in groups if named == label} <= {css}


@pytest.mark.parametrize("values", [[1.0], [0.3, 0.31], [1e-3, 7.0], [5.0, 5000.0], [1e-9, 1e9], [0.0], [1.0, 1024.0]])
def test_labels_of_an_axis_are_around_all_values_and_few(values: list[float]) -> None:
    ticks = ticks_between(values)
    known = [value for value in values if value > 0] or [1.0]
    assert ticks[0] <= min(known)
    assert ticks[-1] >= max(known)
    assert 2 <= len(ticks) <= MAX_TICKS


@pytest.mark.parametrize(
    ("function", "values", "texts"),
    [
        (duration, (0.00123, 0.9996, 12.34, 99999.0, None), "1.23 µs|1.00 ms|12.3 ms|100 s|–"),
        (memory, (0, 12, 4096, 512e6, 10.233e9, None), "0 bytes|12 bytes|4.10 kB|512 MB|10.2 GB|–"),
        (rate, (999.0, 12345.0, 2.5e6), "999|12.3 k|2.50 M"),
        (three_digits, (0.0, 1e-6, 1234567.0, float("inf")), "0|1.00e-06|1,234,567|inf"),
    ],
)
def test_figures_have_three_digits_and_the_unit_that_suits_them(function: Any, values: Any, texts: str) -> None:
    assert [function(value) for value in values] == texts.split("|")


def test_a_spread_has_the_unit_of_its_time() -> None:
    assert duration_with(51.2, 1.0) == "51.2 ± 1.0 ms"
    assert duration_with(0.8, 0.0163) == "800 ± 16 µs"


# ---- beside published figures


def sheet_of(found: BenchResults) -> Table:
    ((_, table),) = published_tables(found)
    assert table is not None
    return table


def names_of(table: Table) -> list[tuple[Any, ...]]:
    return [line.cells[:2] for line in table.lines]


def test_nystrom_table_has_each_measured_row_below_the_published_one() -> None:
    table = sheet_of(preset_results("nystrom-table1"))
    names = names_of(table)
    at = names.index(("Nyströmformer-64", "published"))
    assert names[at + 1 : at + 3] == [("nystrom-64", "measured, torch"), ("nystrom-64", "measured, ort")]
    assert names[:2] == [("Transformer", "published"), ("softmax", "measured, torch")]
    assert table.lines[at].cells[-2:] == ("450 / 12.3", "22.7 × / 12.6 ×")
    assert table.lines[at + 2].cells[-2:] == ("32.0 / 25.6", "16.0 × / 8.00 ×")
    assert measured_table(preset_results("nystrom-table1")) is None


def test_landmarks_of_a_model_are_those_of_its_options_or_the_default() -> None:
    def names(label: str, **options: int) -> list[tuple[Any, ...]]:
        one = replace(row("linear", 512), case=case(label, 512, options=options, variant="nystrom"))
        return names_of(sheet_of(results((one,), preset="nystrom-table1")))

    for label, options, name in (("nystrom", {}, "64"), ("n", {"num_landmarks": 32}, "32")):
        found = names(label, **options)
        assert found[found.index((f"Nyströmformer-{name}", "published")) + 1] == (label, "measured, ort")
    assert names("nystrom-128", num_landmarks=128)[-1] == ("nystrom-128", "measured, ort")


def test_other_presets_have_a_table_of_their_own_measurements() -> None:
    table = measured_table(preset_results("linear-blog"))
    assert table is not None
    assert table.lines[1].cells[3::2] == ("1.00 ×", "2.00 ×", "4.00 ×", "8.00 ×", "16.0 ×")
    table = measured_table(preset_results("reformer-rounds"))
    assert table is not None
    assert titles_of(table)[2::2] == ["512", "1,024", "2,048", "4,096", "8,192"]
    assert table.lines[0].cells[2] == "2.00 / 1.00"
    assert measured_table(results()) is None


def test_a_chart_of_another_kernel_is_not_presented_as_a_figure_to_reach() -> None:
    page = html_from_results(preset_results("linear-blog"))
    assert "timed a kernel that is not linear attention" in page
    assert "Mean time of softmax over that of the model" in page


def test_published_tables_have_a_cell_for_each_column_and_a_preset_with_a_title() -> None:
    assert {published.preset for published in PUBLICATIONS} == set(PRESETS)
    for published in PUBLICATIONS:
        assert all(len(cells) == len(published.columns) for cells in published.rows), published.title
        assert published.source
        assert published.note


@pytest.mark.parametrize("width", [60, 80, 130, 200])
def test_a_terminal_clips_nothing(width: int) -> None:
    for name in ("whole", "broken", "one runtime"):
        assert "…" not in terminal_of(document_from_results(RESULTS[name]()), width)


def test_a_long_table_is_folded_and_a_short_one_is_not() -> None:
    assert "<details open>" in html_from_results(ort_only())
    assert "<details open>" not in html_from_results(two_hundred_rows())
