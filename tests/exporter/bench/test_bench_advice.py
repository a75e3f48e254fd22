"""`bench --advise`: what is measured, what is left out, and what the advice says about it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import bench_results
import pytest
from bench_results import html_from_results
from command_lines import options_from_words

from effexport.base.errors import UserError
from effexport.bench import advice as advise_module
from effexport.bench.advice import AdvicePlan, Adviser, Limits, least_ms_by_products, misses
from effexport.bench.grid import BenchCase, BenchRow, Grid, Status, models_from_text
from effexport.bench.recommendation import (
    BFLOAT16_HERE,
    NOTHING_MEASURED,
    OTHER_MODELS,
    Advice,
    advice_from_results,
    command_from_case,
    model_text,
)
from effexport.bench.run import Bench
from effexport.bench.timing import Settings
from effexport.cli.bench import BenchRequest
from effexport.models.validation import SpecError
from effexport.models.variants import ATTENTION_SPECS

LENGTH = 32_768
MB = 10**6
Cli = Callable[..., Any]


def plan_of(
    variants: str = "linear,nystrom,softmax", runtimes: tuple[str, ...] = ("ort",), **limits: Any
) -> AdvicePlan:
    grid = Grid(models=models_from_text(variants), seq_lens=(LENGTH,), runtimes=runtimes, scope="attention", heads=4)
    return AdvicePlan(grid=grid, limits=Limits(**limits))


def case_of(plan: AdvicePlan, label: str) -> BenchCase:
    return next(case for case in plan.cases if case.label == label)


def row_of(plan: AdvicePlan, label: str, median_ms: float, peak_mb: float | None = 100.0, **fields: Any) -> BenchRow:
    peak = None if peak_mb is None else int(peak_mb * MB)
    timing = bench_results.timing(median_ms)
    row = BenchRow(
        case=case_of(plan, label), status="measured", parity=bench_results.PASSED, timing=timing, peak_bytes=peak
    )
    return replace(row, **fields)


def left_out(plan: AdvicePlan, label: str, reason: str) -> BenchRow:
    return BenchRow(case=case_of(plan, label), status="not run", reason=reason)


def advice_of(plan: AdvicePlan, *rows: BenchRow, complete: bool = True) -> Advice:
    return advice_from_results(bench_results.results(rows, complete=complete), plan)


def standings(advice: Advice) -> dict[str, str]:
    return {entry.label: entry.standing for entry in advice.entries}


def test_the_fastest_within_the_limits_is_to_be_used_and_the_command_builds_it() -> None:
    plan = plan_of(latency_ms=200.0, memory_bytes=1000 * MB)
    rows = (row_of(plan, "nystrom", 150.0), row_of(plan, "linear", 120.0), row_of(plan, "softmax", 9000.0))
    advice = advice_of(plan, *rows)
    assert standings(advice) == {"linear": "use this", "nystrom": "fits", "softmax": "over the limit"}
    assert advice.sentences[0] == (
        "Use linear on ort: 120 ms and 100 MB for 32,768 tokens, measured on this machine, within 200 ms and 1.00 GB."
    )
    assert advice.entries[2].why == "latency 45.0 times the limit"
    assert advice.build is not None
    assert advice.build.text == (
        "effexport build --variant linear --scope attention --dim 256 --heads 4 --seq-len 32768"
    )
    assert OTHER_MODELS in advice.sentences


def test_on_a_processor_with_fast_bfloat16_the_last_sentence_names_it(each_processor: str) -> None:
    plan = plan_of("linear,nystrom")
    advice = advice_of(plan, row_of(plan, "linear", 120.0), row_of(plan, "nystrom", 150.0))
    assert advice.sentences[-1] == (BFLOAT16_HERE if each_processor == "AMX" else OTHER_MODELS)
    # without a measurement there is no advice, on any processor
    nothing = advice_of(plan, left_out(plan, "linear", "onnxruntime is not installed"))
    assert nothing.sentences == (NOTHING_MEASURED,)


def test_a_median_near_the_limit_is_recommended_with_its_slowest_run() -> None:
    plan = plan_of("linear", latency_ms=125.0)
    advice = advice_of(plan, row_of(plan, "linear", 120.0))
    assert advice.sentences[1] == "That is the median; the slowest of 50 runs took 156 ms, over the limit."


def test_unknown_memory_is_not_over_the_limit_and_not_within_it() -> None:
    plan = plan_of("linear,softmax", memory_bytes=50 * MB)
    note = "peak memory is unknown: no /proc"
    advice = advice_of(plan, row_of(plan, "linear", 120.0, None, note=note), row_of(plan, "softmax", 200.0, 80.0))
    assert standings(advice) == {"linear": "memory unknown", "softmax": "over the limit"}
    assert advice.entries[0].why == note
    assert advice.sentences[0] == "linear on ort is fast enough with 120 ms, but its memory is unknown."
    assert advice.build is None
    # without a memory limit, it is not asked for
    assert standings(advice_of(plan_of("linear"), row_of(plan, "linear", 120.0, None))) == {"linear": "use this"}


def test_if_nothing_fits_the_advice_names_the_fastest_that_was_measured() -> None:
    plan = plan_of("linear,softmax", latency_ms=100.0, memory_bytes=90 * MB)
    reason = "left out: it would take at least 9.00 s, extrapolated from 281 ms for 4,096 tokens"
    advice = advice_of(plan, row_of(plan, "linear", 120.0), left_out(plan, "softmax", reason))
    assert advice.sentences[0] == "No model meets 100 ms and 90.0 MB for 32,768 tokens on this machine."
    assert advice.sentences[1] == "The fastest that was measured is linear on ort with 120 ms and 100 MB."
    assert advice.entries[0].why == "latency 1.20 times the limit; memory 1.11 times the limit"
    assert (advice.entries[1].standing, advice.entries[1].why) == ("not measured", reason)


def test_without_a_limit_nothing_fits_and_the_fastest_is_named() -> None:
    plan = plan_of()
    softmax, linear = row_of(plan, "softmax", 150.0), row_of(plan, "linear", 120.0)
    advice = advice_of(plan, softmax, linear, left_out(plan, "nystrom", "it would take too long"))
    assert standings(advice) == {"linear": "use this", "softmax": "–", "nystrom": "not measured"}
    assert advice.sentences[0].startswith("linear on ort is the fastest: 120 ms and 100 MB for 32,768 tokens, measured")
    disturbed = advice_of(plan, softmax, replace(linear, status="disturbed", reason="its threads waited for a core"))
    assert standings(disturbed)["softmax"] == "–"
    assert disturbed.sentences[0].startswith("softmax on ort is the fastest that was not disturbed: 150 ms")
    assert disturbed.sentences[0].endswith("Another model may be faster.")
    alone = advice_of(plan, replace(linear, status="disturbed", reason="its threads waited for a core"), complete=False)
    assert alone.sentences[0].startswith("linear on ort is the fastest, but it was disturbed: 120 ms")


def test_the_page_begins_with_the_advice_its_limits_its_command_and_all_candidates() -> None:
    plan = plan_of(latency_ms=200.0)
    results = bench_results.results((row_of(plan, "linear", 120.0), row_of(plan, "nystrom", 900.0)))
    advice = advice_from_results(results, plan)
    header, _, _ = html_from_results(results, advice).partition("<nav")
    assert f'<p class="verdict">{advice.sentences[0]}</p>' in header
    assert "Limits: 200 ms. Measured: one attention layer (width 256, 4 heads), 1 × 32,768 tokens, fp32" in header
    assert advice.build is not None
    assert f"<pre><code>{advice.build.text}</code></pre>" in header
    for entry in advice.entries:
        assert entry.standing in header
        assert entry.why in header
    assert '<table class="candidates">' not in html_from_results(results)


def test_a_model_of_one_layer_and_one_head_is_told_in_the_singular() -> None:
    grid = Grid(
        models=models_from_text("linear"),
        seq_lens=(64,),
        runtimes=("ort",),
        scope="encoder",
        heads=1,
        head_dim=32,
        encoder={"layers": 1},
    )
    assert model_text(AdvicePlan(grid=grid, limits=Limits())).startswith(
        "an encoder of 1 layer (width 32, 1 head), 1 × 64"
    )


def test_an_interrupted_run_gives_the_advice_so_far_and_counts_what_is_missing() -> None:
    plan = plan_of(latency_ms=200.0)
    advice = advice_of(plan, row_of(plan, "linear", 120.0), complete=False)
    assert standings(advice) == {"linear": "use this", "nystrom": "not reached", "softmax": "not reached"}
    assert "Interrupted: 2 candidates were not measured." in advice.sentences
    none = advice_of(plan, row_of(plan, "linear", 320.0), complete=False)
    assert none.sentences[0].startswith("None of the models so far meets 200 ms for 32,768 tokens")


def test_a_disturbed_row_is_said_to_be_so_and_leaves_open_what_is_fastest() -> None:
    plan = plan_of("linear,nystrom", latency_ms=200.0)
    disturbed = row_of(plan, "linear", 120.0, status="disturbed", reason="its threads waited for a core")
    advice = advice_of(plan, disturbed, row_of(plan, "nystrom", 150.0))
    assert standings(advice) == {"nystrom": "fits", "linear": "fits"}
    assert advice.entries[1].why == "disturbed: its threads waited for a core"
    assert advice.sentences[0] == (
        "nystrom on ort fits: 150 ms and 100 MB for 32,768 tokens, measured on this machine, within 200 ms. "
        "Another model may be faster."
    )
    assert advice.sentences[1] == (
        "Other programs disturbed 1 measurement; repeat this on an idle machine, or with --wait-idle."
    )
    # what is far slower even so does not matter
    slow = row_of(plan, "linear", 900.0, status="disturbed", reason="its threads waited for a core")
    assert standings(advice_of(plan, slow, row_of(plan, "nystrom", 150.0)))["nystrom"] == "use this"
    # a disturbed run is only slower than an undisturbed one, so this one does meet the limit
    assert advice_of(plan_of("linear", latency_ms=200.0), disturbed).sentences[0].startswith("linear on ort fits")


def test_a_disturbed_row_is_not_over_the_latency_limit_but_may_be_over_the_memory_limit() -> None:
    plan = plan_of("linear", latency_ms=100.0, memory_bytes=90 * MB)
    disturbed = row_of(plan, "linear", 120.0, 80.0, status="disturbed", reason="its threads waited")
    advice = advice_of(plan, disturbed)
    assert standings(advice) == {"linear": "disturbed"}
    assert advice.sentences[0] == "No conclusion: linear on ort took 120 ms, but it was disturbed."
    assert advice.build is None
    assert standings(advice_of(plan, replace(disturbed, peak_bytes=95 * MB))) == {"linear": "over the limit"}


def test_rows_of_probes_are_not_ranked() -> None:
    plan = plan_of("linear", latency_ms=200.0)
    probe = row_of(plan, "linear", 1.0)
    probe = replace(probe, case=replace(probe.case, seq_len=4096, model_seq_len=LENGTH))
    assert standings(advice_of(plan, probe)) == {"linear": "not reached"}
    assert standings(advice_of(plan, probe, row_of(plan, "linear", 150.0))) == {"linear": "use this"}


@dataclass
class MadeUpBench:
    """A bench whose timings follow from a table: milliseconds per 1,024 tokens, by label."""

    speeds: dict[str, float]
    status: Status
    settings: Settings = field(default_factory=Settings)
    rows: list[BenchRow] = field(default_factory=list)
    sizes: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def pace(self) -> MadeUpBench:
        return self

    def say(self, text: str) -> None:
        self.said = text

    def size(self, cases: list[BenchCase]) -> None:
        for case in cases:
            self.sizes.append((case.label, case.seq_len, self.settings.rounds))
            timing = bench_results.timing(self.speeds[case.label] * case.seq_len / 1024)
            self.rows.append(BenchRow(case=case, status=self.status, timing=timing, peak_bytes=MB))


def carried_out(
    plan: AdvicePlan, speeds: dict[str, float], monkeypatch: pytest.MonkeyPatch, *, disturbed: bool = False
) -> MadeUpBench:
    monkeypatch.setattr(advise_module, "speed_of_products", lambda bench: (1e11, disturbed))
    bench: Any = MadeUpBench(speeds, "disturbed" if disturbed else "measured")
    Adviser(bench, plan).run()
    made_up: MadeUpBench = bench
    return made_up


def test_hopeless_models_are_left_out_and_say_from_what_that_was_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(latency_ms=200.0)
    bench = carried_out(plan, {"linear": 5.0, "nystrom": 20.0}, monkeypatch)
    # softmax is not even tried: 2 · 4 heads · 32,768² · 2 · 64 operations at 10¹¹ per second, half of that
    assert bench.sizes == [("linear", 4096, 3), ("linear", LENGTH, 15), ("nystrom", 4096, 3)]
    reasons = {row.case.label: row.reason for row in bench.rows if row.status == "not run"}
    assert reasons == {
        "nystrom": "left out: it would take at least 608 ms, extrapolated from 76.0 ms for 4,096 tokens",
        "softmax": "left out: its matrix products alone would take at least 5.58 s, extrapolated from 100 GFLOP/s of "
        "torch.matmul",
    }
    assert all(row.timing is None for row in bench.rows if row.status == "not run")


def test_disturbed_times_leave_a_model_out_only_if_a_quarter_of_them_does(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(latency_ms=200.0)
    bench = carried_out(plan, {"linear": 20.0, "nystrom": 80.0}, monkeypatch, disturbed=True)
    assert [size[:2] for size in bench.sizes] == [("linear", 4096), ("linear", LENGTH), ("nystrom", 4096)]
    reasons = [row.reason for row in bench.rows if row.status == "not run"]
    assert reasons[0] == (
        "left out: it would take at least 608 ms, extrapolated from 304 ms for 4,096 tokens, 4 times as fast because "
        "other programs disturbed that"
    )
    assert "its matrix products alone would take at least 1.40 s" in reasons[1]


def test_the_speed_of_products_is_measured() -> None:
    from effexport.base.machine import Machine

    class OneThread:
        threads, machine, rotation = 1, Machine(), Bench.rotation

    speed, _ = advise_module.speed_of_products(OneThread())  # type: ignore[arg-type]
    assert speed > 1e8


@pytest.mark.parametrize(
    ("speeds", "limits", "seq_len", "measured"),
    [
        # misses the limit by little
        ({"linear": 7.5}, {"latency_ms": 200.0}, LENGTH, [("linear", 4096), ("linear", LENGTH)]),
        # without a limit, what takes ten times as long as the fastest is left out
        ({"linear": 5.0, "nystrom": 100.0}, {}, LENGTH, [("linear", 4096), ("linear", LENGTH), ("nystrom", 4096)]),
        # a short length is measured directly
        ({"softmax": 50.0}, {"latency_ms": 1.0}, 512, [("softmax", 512)]),
    ],
)
def test_only_what_clearly_misses_the_limit_is_left_out(
    speeds: dict[str, float],
    limits: dict[str, float],
    seq_len: int,
    measured: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(",".join(speeds), **limits)
    plan = replace(plan, grid=replace(plan.grid, seq_lens=(seq_len,)))
    assert [size[:2] for size in carried_out(plan, speeds, monkeypatch).sizes] == measured


def test_only_what_is_worth_it_is_left_out() -> None:
    assert misses(400.0, 200.0)
    assert not misses(250.0, 200.0)
    # one call takes so little that the fixed part of a call counts, and that leaving it out would save nothing
    assert not misses(90.0, 1.0)
    assert not misses(1e9, math.inf)


def test_matrix_products_bound_only_what_runs_in_float32_on_the_cpu() -> None:
    case = case_of(plan_of(), "softmax")
    assert least_ms_by_products(case, 1e11) > 0
    assert least_ms_by_products(replace(case, precision="bf16"), 1e11) == 0
    assert least_ms_by_products(replace(case, runtime="torch-cuda"), 1e11) == 0


def test_the_plan_begins_with_cheap_models_and_takes_less_time_under_a_limit() -> None:
    plan = plan_of("softmax,nystrom,linear")
    assert [cases[0].label for cases in plan.models] == ["linear", "nystrom", "softmax"]
    seconds = plan.seconds(Settings())
    assert 0 < plan_of("softmax,nystrom,linear", latency_ms=1.0).seconds(Settings()) < seconds
    assert plan.seconds(Settings(memory=False)) < seconds


def described(tmp_path: Path, toml: str = "", **flags: Any) -> AdvicePlan:
    """The plan of these options and this spec file."""
    if toml:
        flags["spec"] = tmp_path / "spec.toml"
        flags["spec"].write_text(toml)
    return BenchRequest(**flags).plan()


def test_layers_describe_an_encoder_and_nothing_describes_the_default_layer_of_build(tmp_path: Path) -> None:
    layer, encoder = described(tmp_path, seq_len=64), described(tmp_path, seq_len=64, layers=3, dim=96, heads=3)
    assert (layer.cases[0].scope, layer.cases[0].heads * layer.cases[0].head_dim) == ("attention", 256)
    model = encoder.cases[0].model
    assert (model.scope, model.layers, model.attention.dim, model.attention.heads) == ("encoder", 3, 96, 3)
    assert len(layer.cases) == len(ATTENTION_SPECS)


def test_a_spec_file_describes_every_variant_and_refuses_those_that_cannot_be(tmp_path: Path) -> None:
    toml = 'variant = "lsh"\nseq_len = 64\ncausal = true\n[attention]\nnum_buckets = 4\n[encoder]\nff_dim = 48\n'
    plan = described(tmp_path, toml, variants="linear,lsh,nystrom")
    assert "nystrom attention has no causal form" in plan.refused["nystrom"]
    models = {case.label: case.model for case in plan.cases}
    assert set(models) == {"linear", "lsh"}
    assert all(model.attention.causal and model.ff_size == 48 for model in models.values())  # type: ignore[union-attr]
    assert models["lsh"].attention.num_buckets == 4  # type: ignore[attr-defined]
    command = command_from_case(case_of(plan, "linear"), plan.spec_file)
    assert command is not None
    assert command.before == f"First remove num_buckets from {plan.spec_file}, which this variant does not have."


@pytest.mark.parametrize(
    ("toml", "flags", "message"),
    [
        (
            "seq_len = 64\nchunk_lenght = 3",
            {},
            "'chunk_lenght', a field of no compared variant; did you mean 'chunk_length'",
        ),
        ("fused = false", {"seq_len": 64}, "turns fused operators off"),
        ("seq_len = 64\ncausal = true", {"variants": "nystrom"}, "no causal form"),
        ('scope = "attention"', {"seq_len": 64, "layers": 2}, "layers belongs to the encoder"),
        ("", {"seq_len": 64, "precision": "fp32,fp16"}, "--precision is 'fp32,fp16'; --advise works with one value"),
    ],
)
def test_a_model_that_cannot_be_is_refused(tmp_path: Path, toml: str, flags: dict[str, Any], message: str) -> None:
    with pytest.raises((UserError, SpecError), match=message):
        described(tmp_path, toml, **flags)


@pytest.mark.parametrize(
    ("toml", "flags"),
    [
        ("", {"seq_len": 64}),
        ("", {"seq_len": 64, "layers": 3, "dim": 96, "heads": 3, "batch": "2"}),
        (
            "",
            {"seq_len": 64, "variants": "lsh:num_hashes=4:chunk_length=16,nystrom:num_landmarks=8,linear:causal=true"},
        ),
        ("dim = 96\nheads = 3\nhead_dim = 16\n[encoder]\nlm_head = true", {"seq_len": 64, "layers": 3}),
        ('variant = "lsh"\nscope = "attention"\nseq_len = 128\nprecision = "fp16"', {"seq_len": 64}),
        ('variant = "lsh"\nnum_hashes = 8', {"seq_len": 64, "variants": "lsh:num_hashes=4"}),
    ],
)
def test_the_command_builds_the_model_that_was_measured(tmp_path: Path, toml: str, flags: dict[str, Any]) -> None:
    from effexport.pipeline.request import BuildRequest

    plan = described(tmp_path, toml, **flags)
    for case in plan.cases:
        found = command_from_case(case, plan.spec_file)
        assert found is not None
        assert not found.remove
        words = shlex.split(found.text)
        if found.lines:
            words[words.index(found.file)] = str(tmp_path / "written.toml")
            (tmp_path / "written.toml").write_text((toml and toml + "\n") + "\n".join(found.lines))
        spec = BuildRequest.of(options_from_words(words[2:])).resolve()[0]
        assert spec.model == case.model
        assert (spec.batch, spec.precision) == (case.batch, case.precision)


def test_what_pytorch_runs_itself_needs_no_build() -> None:
    assert command_from_case(case_of(plan_of(runtimes=("torch",)), "linear")) is None
    engine = command_from_case(replace(case_of(plan_of(), "linear"), runtime="trt"))
    assert engine is not None
    assert engine.text.endswith("--target trt")
