"""`bench --advise --quality`: which results belong to which candidates, and the frontier of latency against loss."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_results
import pytest
from bench_results import html_from_results

from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.base.files import json_text
from effexport.bench.advice import AdvicePlan, Limits, judged_from_files, quality_of_cases
from effexport.bench.grid import BenchRow, Grid, models_from_text
from effexport.bench.recommendation import Advice, advice_from_results, json_of_advice
from effexport.render.svg import ticks_around
from effexport.tasks.figures import Estimate, Evaluation, Objective

LENGTH = 64
Cli = Callable[..., Any]
VARIANTS = "softmax,lsh:num_hashes=4,linear,nystrom"
# Milliseconds and bits per byte: nystrom is beaten in both by linear, and lsh by no other model.
FIGURES = {"softmax": (40.0, 2.25), "lsh, 4 rounds": (25.2, 2.10), "linear": (12.0, 2.22), "nystrom": (13.0, 2.30)}


def plan_of(variants: str = VARIANTS, runtimes: tuple[str, ...] = ("ort",), **limits: Any) -> AdvicePlan:
    grid = Grid(
        models=models_from_text(variants),
        seq_lens=(LENGTH,),
        runtimes=runtimes,
        scope="encoder",
        heads=2,
        head_dim=16,
        encoder={"lm_head": True},
    )
    return AdvicePlan(grid=grid, limits=Limits(**limits))


def result_of(plan: AdvicePlan, label: str, width: float | None = 0.01, **fields: Any) -> Evaluation:
    """A made-up `effexport evaluate` result of a candidate. width: half of the confidence interval."""
    spec = next(case for case in plan.cases if case.label == label).spec
    bits = FIGURES[label][1]
    estimates = (
        Estimate("bits per byte", bits, *(() if width is None else (bits - width, bits + width))),
        Estimate("loss", bits * 0.693),
    )
    found = Evaluation(
        model=f"artifacts/{spec.attention.variant}, ort",
        label=spec.attention.label,
        spec=spec.to_dict(),
        runtime="ort",
        precision="fp32",
        tokens=LENGTH,
        objective=Objective.MASKED_LANGUAGE_MODEL,
        data="held-out.txt",
        data_sha256="5" * 64,
        rows=100,
        answers=6300,
        estimates=estimates,
        seconds=1.0,
    )
    return replace(found, **fields)


def written(folder: Path, *results: Evaluation) -> list[Path]:
    paths = []
    for n, one in enumerate(results):
        paths.append(folder / f"{n}-{one.label.replace(', ', '-').replace(' ', '-')}.json")
        paths[-1].write_text(json_text(one.to_dict()))
    return paths


def row_of(plan: AdvicePlan, label: str, **fields: Any) -> BenchRow:
    case = next(case for case in plan.cases if case.label == label)
    timing = bench_results.timing(FIGURES[label][0])
    row = BenchRow(case=case, status="measured", parity=bench_results.PASSED, timing=timing, peak_bytes=10**8)
    return replace(row, **fields)


def advice_of(plan: AdvicePlan, folder: Path, results: list[Evaluation], **changed: BenchRow) -> tuple[Advice, str]:
    """The advice, and its page."""
    quality = quality_of_cases(plan.cases, judged_from_files(written(folder, *results)))
    plan = replace(plan, quality=quality)
    rows = bench_results.results(tuple(changed.get(label.split(",")[0], row_of(plan, label)) for label in FIGURES))
    advice = advice_from_results(rows, plan)
    return advice, html_from_results(rows, advice)


def standings(advice: Advice) -> dict[str, str]:
    return {entry.label: entry.standing for entry in advice.entries}


def test_the_lowest_loss_is_recommended_and_the_frontier_says_what_faster_models_lose(tmp_path: Path) -> None:
    plan = plan_of()
    advice, page = advice_of(
        plan, tmp_path, [result_of(plan, label) for label in ("nystrom", "lsh, 4 rounds", "linear")]
    )
    # softmax was not judged; linear is better and faster than nystrom
    assert standings(advice) == {"lsh, 4 rounds": "use this", "linear": "frontier", "nystrom": "–", "softmax": "–"}
    assert {entry.label: entry.why for entry in advice.entries if entry.why} == {"nystrom": "beaten by linear on ort"}
    assert advice.sentences[:2] == (
        "lsh, 4 rounds on ort has the lowest loss: 2.1000 bits per byte (2.0900 to 2.1100), with 25.2 ms and 100 MB "
        "for 64 tokens, measured on this machine. It was judged as artifacts/lsh, ort.",
        "linear on ort is 2.10 times as fast and loses 0.12 bits per byte.",
    )
    assert "1 model without a result cannot be placed." in advice.sentences
    assert advice.build is None
    candidates = {one["label"]: one for one in json_of_advice(advice)["candidates"]}
    assert {label: one["on_frontier"] for label, one in candidates.items()} == {
        "lsh, 4 rounds": True,
        "linear": True,
        "nystrom": False,
        "softmax": False,
    }
    loss = {"name": "bits per byte", "value": 2.22, "low": 2.22 - 0.01, "high": 2.22 + 0.01}
    assert candidates["linear"]["loss"] == loss
    assert (candidates["softmax"]["loss"], candidates["softmax"]["judged"]) == (None, None)
    header, _, _ = page.partition("<nav")
    assert '<th class="n" scope="col">Bits per byte</th>' in header
    assert '<td class="n">2.2200 (2.2100 to 2.2300)</td>' in header
    assert "; linear on ort: 12.0 ± 0.24 ms, 2.2200 bits per byte (2.2100 to 2.2300).</desc>" in header
    # a line for the interval of each of the three, and one for the frontier
    (svg,) = re.findall(r"<svg role=.*?</svg>", header)
    assert svg.count('<path class="line"') == 4


def test_losses_within_their_intervals_are_no_difference(tmp_path: Path) -> None:
    plan = plan_of()
    for width in (0.07, None):
        results = [result_of(plan, label, width) for label in ("lsh, 4 rounds", "linear")]
        advice, _ = advice_of(plan, tmp_path, results)
        assert advice.sentences[1] == "linear on ort is 2.10 times as fast and shows no difference in loss."
        assert "`effexport evaluate ARTIFACT --compare OTHER` compares two models row by row" in advice.sentences[2]


def test_limits_come_first_and_a_disturbed_time_gives_no_ratio(tmp_path: Path) -> None:
    plan = plan_of(latency_ms=20.0)
    results = [result_of(plan, label) for label in FIGURES]
    advice, _ = advice_of(plan, tmp_path, results)
    assert standings(advice) == {
        "linear": "use this",
        "nystrom": "fits",
        "lsh, 4 rounds": "over the limit",
        "softmax": "over the limit",
    }
    assert advice.sentences[0].startswith("linear on ort has the lowest loss within 20.0 ms: 2.2200 bits per byte")
    assert advice.sentences[1] == "No other model that fits and was judged is faster."
    disturbed = row_of(plan, "lsh, 4 rounds", status="disturbed", reason="its threads waited for a core")
    unsure, _ = advice_of(plan, tmp_path, results, lsh=disturbed)
    assert standings(unsure)["linear"] == "frontier"
    assert unsure.sentences[1] == "A model with a lower loss may fit, too: other programs disturbed its timing."
    free, _ = advice_of(plan_of(), tmp_path, results, lsh=disturbed)
    assert standings(free)["lsh, 4 rounds"] == "use this"
    assert free.sentences[1] == "linear on ort takes 12.0 ms and loses 0.12 bits per byte."


def test_a_result_counts_for_all_runtimes_but_those_that_have_one_of_their_own(tmp_path: Path) -> None:
    plan = plan_of("linear", ("torch", "ort", "openvino"))
    other = replace(result_of(plan, "linear"), runtime="openvino", model="artifacts/linear, openvino")
    results = judged_from_files(written(tmp_path, result_of(plan, "linear"), other))
    models = {runtime: one.model for (_, runtime), one in quality_of_cases(plan.cases, results).items()}
    assert models == {
        "torch": "artifacts/linear, ort",
        "ort": "artifacts/linear, ort",
        "openvino": "artifacts/linear, openvino",
    }
    with pytest.raises(UserError, match=r"0-linear.json and .*1-linear.json both are results of linear on ort"):
        quality_of_cases(plan.cases, judged_from_files(written(tmp_path, *[result_of(plan, "linear")] * 2)))


def test_results_of_other_answers_or_of_models_that_are_not_timed_are_refused(tmp_path: Path) -> None:
    plan = plan_of("linear,lsh:num_hashes=4")
    linear, lsh = result_of(plan, "linear"), result_of(plan, "lsh, 4 rounds")
    spec = plan.cases[0].spec
    larger = replace(spec, model=replace(spec.model, layers=4, attention=replace(spec.attention, dim=64, seq_len=128)))
    wrong = {
        "cannot be compared: masked language model on held-out.txt": [lsh, replace(linear, data_sha256="6" * 64)],
        "language model on held-out.txt .* expected the same data": [
            lsh,
            replace(linear, objective=Objective.LANGUAGE_MODEL),
        ],
        "6,300 answers; .* 6,301 answers": [lsh, replace(linear, answers=6301)],
        "judged linear with dim 64, seq_len 128 and layers 4, but --advise times it with dim 32, seq_len 64 and "
        "layers 2": [replace(linear, spec=larger.to_dict())],
        "judged linear with tokens per row 32, but --advise times it with tokens per row 64": [
            replace(linear, tokens=32)
        ],
        "with precision bf16, but": [replace(linear, precision="bf16")],
        "judged softmax, which is not among the candidates: linear; lsh, 4 rounds; leave": [
            result_of(plan_of(), "softmax")
        ],
    }
    for message, results in wrong.items():
        with pytest.raises(UserError, match=message):
            quality_of_cases(plan.cases, judged_from_files(written(tmp_path, *results)))
    huge = replace(linear, estimates=(Estimate("loss", 10**400),))
    for damaged in (huge, replace(linear, estimates=()), replace(linear, estimates=(Estimate("loss", math.nan),))):
        with pytest.raises(UserError, match=r"expected what `effexport evaluate"):
            judged_from_files(written(tmp_path, damaged))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: there is no .json in this folder; expected what `effexport evaluate"):
        judged_from_files([tmp_path / "empty"])
    # rows of a classifier are as long as they are
    rows = replace(linear, objective=Objective.CLASSIFICATION, tokens=32)
    assert quality_of_cases(plan.cases, judged_from_files(written(tmp_path, rows)))


def test_ticks_of_a_linear_axis_enclose_its_values() -> None:
    for values in ([2.1, 2.34], [0.0], [-3.0, 5.5], [1.0, 1.00001], [2.5, 2.5]):
        ticks = ticks_around(values)
        assert ticks[0] <= min(values)
        assert ticks[-1] >= max(values)
        assert len(ticks) <= 7


@pytest.mark.requires("torch", "onnx", "ort")
def test_what_evaluate_wrote_says_which_models_to_time(
    built: Callable[..., Artifact], tmp_path: Path, cli: Cli
) -> None:
    artifacts = {name: built(name, causal=True, lm_head=True) for name in ("linear", "lsh")}
    spec = artifacts["linear"].spec
    (tmp_path / "held-out.txt").write_text("Groesse und Laenge, gemessen in Bytes. " * 20)
    quality = tmp_path / "quality"
    quality.mkdir()
    data = ("--data", tmp_path / "held-out.txt", "--window", spec.model.seq_len)
    for name, artifact in artifacts.items():
        assert cli("evaluate", artifact.path, *data, "-o", quality / f"{name}.json").code == 0
    arguments = ("--runtimes", "torch", "--no-memory", "--rounds", "3", "--threads", "1")
    result = cli("bench", "--advise", "--quality", quality, *arguments, "--json")
    assert result.code == 0, result.err
    candidates = {candidate["label"]: candidate for candidate in result.json["advice"]["candidates"]}
    cases = {row["case"]["label"]: row["case"] for row in result.json["rows"]}
    assert candidates.keys() == cases.keys() == {artifact.spec.attention.label for artifact in artifacts.values()}
    for name, artifact in artifacts.items():
        (loss, *_) = json.loads((quality / f"{name}.json").read_text())["estimates"]
        label = artifact.spec.attention.label
        assert candidates[label]["loss"] == loss
        case = cases[label]
        assert (case["scope"], case["seq_len"], case["options"]["causal"]) == ("encoder", spec.model.seq_len, True)
