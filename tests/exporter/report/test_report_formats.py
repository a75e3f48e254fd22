"""Markdown, JUnit XML, the schema, and the commands that repeat what a report says."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from command_lines import options_from_words

from effexport.artifact import Artifact, EngineEntry, open_artifact
from effexport.base.errors import UserError
from effexport.base.runtimes import ARTIFACT_RUNTIMES
from effexport.base.spec import BuildSpec, build_spec_from_checkpoint
from effexport.options import BuildOptions
from effexport.pipeline.request import BuildRequest
from effexport.proof.check import ALL_CASES, CaseLabel, Check, Worst
from effexport.report.compare import Side
from effexport.report.formats import (
    html_from_report,
    junit_from_reports,
    markdown_from_report,
    report_from_values,
    report_of_artifact,
)
from effexport.report.report import REPORT_VERSION, LayerError, Report, json_from_report, schema_text
from effexport.report.reproduce import build_command, verify_command
from effexport.tasks.figures import Changes, Estimate, Quality

EXPORT = CaseLabel("export", (1, 64))
GOOD = Check("arithmetic", EXPORT, "max |error| / RMS", "passed", 1.5e-6, 2e-5, "float32 sums", seq_len=64)
BAD = Check(
    "finite", CaseLabel("short", (2, 7)), "NaN or Inf elements", "failed", 3, 0, "no NaN", "worst at x[0, 1, 2]"
)
NOT_RUN = Check("parity", ALL_CASES, "not measured", "not run", reason="no bfloat16 kernels here")
LOST = dataclasses.replace(
    GOOD,
    status="failed",
    value=math.nan,
    measures={"max_abs": math.inf},
    worst=Worst("x", (0, 1), -math.inf, 1.0),
    histogram=(0,) * 10 + (7,),
)
BITS, HALF = Estimate("bits per byte", 3.2411, 3.2102, 3.272), Estimate("accuracy", 0.5)
QUALITY = Quality(
    "texts/held-out.txt",
    "5" * 64,
    "language model",
    200,
    (BITS, Estimate("perplexity", math.inf, 1e300, math.inf), HALF),
    (Estimate("bits per byte", 3.2409, 3.21, 3.2718), Estimate("perplexity", 1234.56, 1200.0, 1300.0), HALF),
    (Estimate("bits per byte", 2e-4, 1e-4, 3e-4), Estimate("accuracy", 0.0, 0.0, 0.0)),
    Changes(12, 102_200),
)
ENGINE = EngineEntry(
    target="trt-rtx",
    file="engine/trt-rtx.engine",
    tensorrt_version="1.7.1",
    compute_capabilities=(),
    profiles=(),
    implementation={},
    layers=3,
    bytes=1000,
    build_seconds=1.5,
    remarks=(),
)
HOSTILE = "a | b\n<script>&]]>`code` *bold* [link](x) @someone \x00\x1b[31m \ud800 \ufffe 😀"


def report_of(*checks: Check, **fields: Any) -> Report:
    values: dict[str, Any] = {
        "title": "lsh encoder",
        "spec": {"scope": "encoder", "precision": "fp32", "opset": 20, "model": {"attention": {"variant": "lsh"}}},
        "checks": list(checks),
        "environment": {"effexport": "0.1.0", "torch": None},
        "created": "2026-01-02T03:04:05+00:00",
        "seconds": {"exporting to ONNX": 1.5},
    }
    return Report(**(values | fields))


def plain(report: Report) -> dict[str, Any]:
    """As any reader of report.json finds it."""
    value: dict[str, Any] = json.loads(json_from_report(report))
    return value


SCHEMA: dict[str, Any] = json.loads(schema_text())
validator = jsonschema.Draft202012Validator(SCHEMA)


def read(values: dict[str, Any]) -> Report:
    return report_from_values(values, Path("report.json"))


# ---- the schema


def test_the_schema_is_one_and_knows_this_version_and_all_runtimes() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["report_version"]["enum"] == [REPORT_VERSION]
    assert SCHEMA["properties"]["runtime"]["enum"] == sorted(ARTIFACT_RUNTIMES)


def test_every_reference_of_the_schema_leads_somewhere() -> None:
    names = re.findall(r'"#/\$defs/(\w+)"', schema_text())
    assert set(names) == SCHEMA["$defs"].keys()


@pytest.mark.requires("torch", "onnx", "ort")
def test_the_reports_of_all_variants_follow_the_schema(built: Callable[..., Artifact], variant: str) -> None:
    artifact = built(variant, "attention")
    values = json.loads((artifact.path / "report.json").read_text(encoding="utf-8"))
    validator.validate(values)
    assert plain(read(values)) == values
    assert (values["created"], values["seconds"]) == ("", {})
    when = artifact.manifest.built
    assert when is not None
    rest = {"created": when.created, "seconds": when.seconds, "environment": values["environment"] | when.machine}
    assert plain(report_of_artifact(artifact)) == values | {"weights_from": "seed"} | rest


@pytest.mark.parametrize("checks", [(GOOD,), (GOOD, BAD, NOT_RUN), (LOST,), ()])
def test_any_report_follows_the_schema_and_is_read_back(checks: tuple[Check, ...]) -> None:
    layers = [LayerError(layer="blocks.0", op_type="Add", error=math.nan, limit=1e-3, value="add_1")]
    report = report_of(*checks, layers=layers, quality=QUALITY)
    values = plain(report)
    validator.validate(values)
    assert plain(read(values)) == values
    # NaN does not equal itself, but its text does
    assert str(read(values).checks) == str(report.checks)
    assert str(read(values).layers) == str(layers)
    assert read(values).quality == QUALITY


def damaged_reports() -> dict[str, dict[str, Any]]:
    """A report with one thing wrong, by what that is."""
    reports = {}

    def change(name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
        values = copy.deepcopy(plain(report_of(GOOD, LOST)))
        edit(values)
        reports[name] = values

    change("missing required field `checks`", lambda v: v.pop("checks"))
    change("unknown field `extra`", lambda v: v.update(extra=1))
    change("enum value 1 - at `$.report_version`", lambda v: v.update(report_version=1))
    change("Expected `int`, got `bool` - at `$.report_version`", lambda v: v.update(report_version=True))
    change("enum value 'good' - at `$.verdict`", lambda v: v.update(verdict="good"))
    change("Expected `array`, got `object` - at `$.checks`", lambda v: v.update(checks={}))
    change("enum value 'maybe' - at `$.checks[0].status`", lambda v: v["checks"][0].update(status="maybe"))
    change("enum value 'much' - at `$.checks[0].value`", lambda v: v["checks"][0].update(value="much"))
    change("got `bool` - at `$.checks[0].limit`", lambda v: v["checks"][0].update(limit=True))
    change("missing required field `reason` - at `$.checks[0]`", lambda v: v["checks"][0].pop("reason"))
    change(">= 0 - at `$.checks[0].histogram[0]`", lambda v: v["checks"][0].update(histogram=[-1]))
    change("a histogram of 2 counts; expected 11", lambda v: v["checks"][0].update(histogram=[1, 2]))
    change("got `float` - at `$.checks[1].worst.index[0]`", lambda v: v["checks"][1]["worst"].update(index=[0.5]))
    change("got `int` - at `$.environment[...]`", lambda v: v["environment"].update(torch=2))
    change("enum value 'tpu' - at `$.runtime`", lambda v: v.update(runtime="tpu"))
    change("Expected `object`, got `array` - at `$.spec`", lambda v: v.update(spec=[]))
    change("is damaged: Invalid enum value 'int7' - at `$.precision`", lambda v: v["spec"].update(precision="int7"))
    change("got `null` - at `$.notes[0]`", lambda v: v.update(notes=[None]))
    return reports


@pytest.mark.parametrize("problem", damaged_reports())
def test_a_damaged_report_is_rejected_by_any_validator_and_when_it_is_read(problem: str) -> None:
    values = damaged_reports()[problem]
    assert not validator.is_valid(values)
    with pytest.raises(UserError, match=re.escape(problem)):
        read(values)


# ---- Markdown


def test_markdown_has_the_verdict_the_table_and_failures_in_full() -> None:
    text = markdown_from_report(report_of(GOOD, BAD, NOT_RUN, notes=["Mind the gap."]), "artifacts/lsh")
    assert text.splitlines()[0] == "### ❌ lsh encoder, fp32"
    assert (
        "Failed: the exported model does not compute what PyTorch computes (1 check failed, 1 passed, 1 not run)."
        in text
    )
    assert "| arithmetic | ✅ passed | max \\|error\\| / RMS | 1.5e-06 | 2e-05 | 8 % | 1 of 1 |" in text
    failure = "**failed**: finite in short (2 × 7): NaN or Inf elements 3, limit 0; worst at x\\[0, 1, 2\\]; "
    assert f"{failure}why this limit: no NaN" in text
    assert "effexport verify artifacts/lsh --case short" in text
    assert "**not run**: parity: no bfloat16 kernels here" in text
    assert "* Mind the gap." in text
    # failures come before the table, what did not run after it
    assert text.index("**failed**") < text.index("| check |") < text.index("**not run**")


def test_the_report_of_a_verification_names_the_reference_and_how_to_repeat_it() -> None:
    report = dataclasses.replace(
        report_of(GOOD, BAD),
        reference="other@ort",
        options=["--model", "bad.onnx", "--reference", "other@ort"],
        divergence="first divergence: value `x` of blocks.0",
    )
    text = markdown_from_report(report, "artifacts/lsh")
    assert "Failed: the model does not agree with other@\u2060ort (1 check failed, 1 passed)." in text
    assert "effexport verify artifacts/lsh --model bad.onnx --reference other@ort --case short" in text
    assert text.index("first divergence") < text.index("**failed**")
    (suite,) = suites(("artifacts/lsh", report))
    properties = {item.get("name"): item.get("value") for item in suite.iter("property")}
    assert properties["reference"] == "other@ort"
    assert properties["first divergence"] == "first divergence: value `x` of blocks.0"
    assert "first divergence: value `x` of blocks.0" in html_from_report(Side("artifacts/lsh", report))
    validator.validate(plain(report))
    assert read(plain(report)) == report


def test_every_format_shows_the_figures_on_data() -> None:
    report = report_of(GOOD, quality=QUALITY)
    line = "held-out.txt: bits per byte 3.2411 (3.2102 to 3.2720), PyTorch 3.2409, 12 of 102,200 answers changed"
    row = ("bits per byte", "3.2411 (3.2102 to 3.2720)", "3.2409 (3.2100 to 3.2718)", "+0.00020 (+0.00010 to +0.00030)")
    markdown = markdown_from_report(report, "artifacts/lsh")
    assert line in markdown
    assert f"| {' | '.join(row)} |" in markdown
    assert line in junit_from_reports([("artifacts/lsh", report)])
    assert line in report._repr_html_()
    page = html_from_report(Side("artifacts/lsh", report))
    cells = "".join(f'<td class="n">{cell}</td>' for cell in row[1:])
    assert f'<th scope="row">{row[0]}</th>{cells}' in page
    assert "12 of 102,200 answers changed" in page
    assert '<th scope="row">accuracy</th><td class="n">0.5000</td><td class="n">0.5000</td><td class="n">0</td>' in page
    assert "inf (1e+300 to inf)" in page
    assert "Quality" not in html_from_report(Side("artifacts/lsh", report_of(GOOD)))


def test_markdown_leaves_no_text_free_to_be_markup() -> None:
    check = Check(HOSTILE, CaseLabel(HOSTILE), HOSTILE, "failed", 1, 0, HOSTILE, HOSTILE)
    text = markdown_from_report(report_of(check, title=HOSTILE, notes=[HOSTILE]), "a")
    outside = "".join(text.split("```")[::2])
    assert "<script>" not in outside
    assert "@someone" not in outside
    rows = [line for line in text.splitlines() if line.startswith("| a ")]
    assert len(rows) == 1
    unescaped = rows[0].replace("\\|", "").count("|")
    assert unescaped == 8


# ---- JUnit


def suites(*reports: tuple[str, Report]) -> list[ElementTree.Element]:
    # parsed from bytes, as a CI system reads it
    root = ElementTree.parse(io.BytesIO(junit_from_reports(reports).encode())).getroot()
    assert root.tag == "testsuites"
    return list(root)


def test_junit_has_a_case_for_every_check() -> None:
    (suite,) = suites(("artifacts/lsh", report_of(GOOD, BAD, NOT_RUN)))
    counts = {name: suite.get(name) for name in ("tests", "failures", "skipped", "errors")}
    assert counts == {"tests": "3", "failures": "1", "skipped": "1", "errors": "0"}
    cases = suite.findall("testcase")
    assert [(c.get("classname"), c.get("name")) for c in cases] == [(c.name, str(c.case)) for c in (GOOD, BAD, NOT_RUN)]
    assert cases[0].find("failure") is None
    failure = cases[1].find("failure")
    assert failure is not None
    assert failure.get("message") == "NaN or Inf elements 3 > 0"
    for words in ("worst at x[0, 1, 2]", "no NaN", "effexport verify artifacts/lsh --case short"):
        assert words in str(failure.text)
    skipped = cases[2].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "no bfloat16 kernels here"


def test_junit_has_a_suite_for_each_artifact() -> None:
    names = [suite.get("name") for suite in suites(("a", report_of(GOOD)), ("b", report_of(LOST)))]
    assert names == ["lsh encoder (a)", "lsh encoder (b)"]


@pytest.mark.parametrize("status", ["passed", "failed", "not run"])
def test_junit_is_well_formed_whatever_the_texts_hold(status: Any) -> None:
    check = Check(HOSTILE, CaseLabel(HOSTILE), HOSTILE, status, math.nan, 0.0, HOSTILE, HOSTILE, {HOSTILE: math.inf})
    (suite,) = suites((HOSTILE, report_of(check, title=HOSTILE, environment={HOSTILE: HOSTILE})))
    (case,) = suite.findall("testcase")
    assert "<script>&]]>" in str(case.get("name"))
    assert "😀" in str(case.get("name"))


# ---- commands


def options_of_command(command: str, folder: Path) -> BuildOptions:
    """Options that `effexport build` parses from a command; its spec file is written into a folder."""
    script, _, last = command.rpartition("\n")
    if script:
        (folder / "spec.toml").write_text("\n".join(script.splitlines()[1:-1]), encoding="utf-8")
    words = shlex.split(last)
    assert words[:2] == ["effexport", "build"]
    return options_from_words(words[2:])


CHANGES: dict[str, dict[str, Any]] = {
    "softmax": {"causal": True},
    "linear": {"eps": 1e-5, "chunk_length": 32, "inline": True},
    "nystrom": {"num_landmarks": 16, "pinv_init": "global", "precision": "fp16"},
    "lsh": {"num_buckets": (4, 8), "num_hashes": 4, "external_data": True},
    "aft-full": {"position_dim": 8},
    "aft-simple": {"bias": False, "fused": False},
    "aft-local": {"window": 9, "seed": 7},
    "aft-conv": {"kernel_size": 5, "opset": 21},
}


@pytest.mark.parametrize("changed", [False, True])
def test_the_build_command_of_a_variant_builds_the_same_spec(
    small_spec: Callable[..., BuildSpec],
    variant: str,
    scope: str,
    changed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = small_spec(variant, scope, **(CHANGES.get(variant, {"bias": False}) if changed else {}))
    report = report_of(spec=json.loads(json.dumps(spec.to_dict())))
    options = options_of_command(build_command(report, "again"), tmp_path)
    assert BuildRequest.of(options).resolve()[0] == spec
    assert options.output == Path("again")


def test_a_field_that_was_unset_is_built_by_python(small_spec: Callable[..., BuildSpec]) -> None:
    spec = small_spec("nystrom", "attention")
    model = dataclasses.replace(spec.attention, conv_kernel_size=None)  # type: ignore[call-arg]
    spec = dataclasses.replace(spec, model=model)
    command = build_command(report_of(spec=spec.to_dict()), "again")
    lines = command.splitlines()
    assert lines[0] == "python - <<'END'"
    compile("\n".join(lines[1:-1]), "command", "exec")
    assert "'conv_kernel_size': None" in command


@pytest.mark.parametrize(
    ("model", "source", "expected"),
    [
        ({"family": "reformer", "task": "masked-lm", "seq_len": 512}, "", "--checkpoint CHECKPOINT"),
        ({"family": "reformer", "task": "masked-lm", "seq_len": 512}, "enwik8", "--checkpoint enwik8"),
        ({"family": "module", "seq_len": 512}, "pkg.mod:make", "--module pkg.mod:make"),
    ],
)
def test_the_build_command_of_a_checkpoint_names_what_it_came_from(
    model: dict[str, Any], source: str, expected: str
) -> None:
    spec = {"scope": "checkpoint", "batch": 1, "precision": "fp16", "opset": 20, "seed": 0, "model": model}
    command = build_command(report_of(spec=spec, weights_from=source, engines=[ENGINE]), "again")
    assert command.startswith(f"effexport build {expected} --precision fp16 --seq-len 512")
    assert command.endswith("--target trt-rtx -o again")


CONFIGS: dict[str, dict[str, Any]] = {
    "nystromformer": {"num_landmarks": 8, "segment_means_seq_len": 64, "max_position_embeddings": 66},
    "reformer": {"is_decoder": False, "num_hashes": 2, "axial_pos_shape": [8, 8], "max_position_embeddings": 64},
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    "chosen", [{}, {"seq_len": 64, "precision": "fp16", "opset": 21, "seed": 5, "fused": False, "inline": True}]
)
def test_the_build_command_of_a_checkpoint_builds_the_same_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, chosen: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    config = {"model_type": family, "architectures": [], **CONFIGS[family]}
    (tmp_path / "weights" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    task = "masked-lm"
    options = chosen | {"task": task} | ({"num_hashes": 4} if family == "reformer" else {"pinv_init": "per_head"})
    spec, _ = build_spec_from_checkpoint(options, Path("weights"))
    report = report_of(spec=json.loads(json.dumps(spec.to_dict())), weights_from="weights")
    options = options_of_command(build_command(report, "again"), tmp_path)
    assert BuildRequest.of(options).resolve()[0] == spec


@pytest.mark.parametrize(
    ("name", "case", "runtime", "expected"),
    [
        ("arithmetic", CaseLabel("padded batch", (3, 300), True), "ort", '. --case "padded batch"'),
        ("arithmetic", EXPORT, "ort-cuda", ". --case export --runtime ort-cuda"),
        ("function bodies", EXPORT, "ort", ". --reference golden"),
        ("function body of LSHSort", CaseLabel("300 tokens", (5, 300)), "ort", ". --reference golden"),
        ("trt-rtx: finite", CaseLabel("short", (2, 7)), "ort", ". --case short --runtime trt-rtx"),
        ("trt: parity", ALL_CASES, "ort", ". --reference golden --runtime trt"),
        ("long sequence", CaseLabel("long", (1, 8192)), "ort", ". --reference golden"),
        ("decode step", EXPORT, "ort", ". --reference golden"),
        ("PyTorch module", ALL_CASES, "ort", ". --reference torch"),
        ("reference", EXPORT, "ort", ". --reference torch"),
        ("reference repeatable", ALL_CASES, "ort", ". --reference torch"),
    ],
)
def test_every_row_says_how_to_repeat_it(name: str, case: CaseLabel, runtime: str, expected: str) -> None:
    target, _, kind = name.rpartition(": ")
    check = Check(kind, case, "metric", "passed", 0, 1, target=target)
    assert verify_command(check, report_of(check, runtime=runtime), ".") == f"effexport verify {expected}"


NEW_IN_REPORT = {
    2: ("layers", "bench", "weights_from"),
    3: ("reference", "options", "divergence"),
    4: ("quality",),
    5: ("quantization",),
}
NEW_IN_CHECK = {2: ("measures", "worst", "seq_len", "histogram"), 3: (), 4: (), 5: ()}


@pytest.mark.requires("torch", "onnx", "ort")
@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_report_of_an_older_version_is_read(
    copied: Callable[..., Path], rewrite_manifest: Callable[..., None], version: int
) -> None:
    folder = copied()
    values = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    for later in range(version + 1, REPORT_VERSION + 1):
        for name in NEW_IN_REPORT[later]:
            del values[name]
        for check in values["checks"]:
            for name in NEW_IN_CHECK[later]:
                del check[name]
    (folder / "report.json").write_text(json.dumps(values | {"report_version": version}), encoding="utf-8")
    rewrite_manifest(folder)
    report = report_of_artifact(open_artifact(folder))
    assert report.verdict == "passed"
    validator.validate(plain(report))


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (EXPORT, "export: 1 × 64"),
        (CaseLabel("padded batch", (3, 300), True), "padded batch: 3 × 300, padded"),
        (CaseLabel("choices: two", (1, 3, 8)), "choices: two: 1 × 3 × 8"),
        (ALL_CASES, "all cases"),
        (CaseLabel(HOSTILE), HOSTILE),
    ],
)
def test_the_text_of_a_case_is_read_back(label: CaseLabel, text: str) -> None:
    assert str(label) == text
    assert CaseLabel.from_text(text) == label
