"""Commands on the pages of a report, which are there to be copied: none of an artifact's texts becomes an option."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from command_lines import words_in_bash

from effexport.artifact import EngineEntry
from effexport.base.errors import UserError
from effexport.base.spec import BuildSpec
from effexport.models.attention_spec import attention_spec
from effexport.proof.check import CaseLabel, Check, Kind
from effexport.proof.verify_artifact import parse_choice
from effexport.quantize.record import Quantization, Samples
from effexport.report.compare import Side
from effexport.report.formats import FORMATS, report_from_values, text_from_report
from effexport.report.report import Report, json_from_report
from effexport.report.reproduce import RECORDED, build_command, verify_command

FILE = Path("artifact/report.json")
SPEC = json.loads(json.dumps(BuildSpec(model=attention_spec("softmax")).to_dict()))


def report_of(*checks: Check, **fields: Any) -> Report:
    values = {"title": "softmax", "spec": SPEC, "environment": {}, "created": "2026-01-02T03:04:05+00:00"}
    return Report(checks=list(checks), **(values | fields))


def check_of(name: str = "export") -> Check:
    return Check("arithmetic", CaseLabel(name), "metric", "passed", 0, 1)


@pytest.mark.parametrize(
    "options",
    [
        # replaced a file of the reader's when it was copied from the page
        ["-o", "home/notes.md", "--force"],
        ["--force"],
        ["--output", "x.json"],
        ["--model"],
        ["--model", "--force"],
        ["--model", ""],
        ["--model", "a\nb"],
        ["--model", "a.onnx", "--force"],
        ["--model", "a.onnx", "--model", "b.onnx"],
        ["--weights", "\u2028x"],
        ["--data", "-rf"],
        ["--reference", "nothing"],
        ["--reference", "-x@ort"],
        ["--reference", "x@nowhere"],
        ["--implementation", "body --force"],
        ["--implementation", "-o=body"],
        ["--device", "-1"],
        ["--device", "١"],
        ["--device", "0; true"],
        ["--precision-hint", "--force"],
        ["--trace", "x"],
        ["--case", "export"],
        ["--runtime", "ort"],
        ["--module", "os:abort"],
        ["; true", "x"],
        ["artifacts/other"],
        [1, 2],
        [["--force"]],
        "--force",
    ],
    ids=str,
)
def test_options_that_effexport_does_not_record_are_damage(options: Any) -> None:
    values = json.loads(json_from_report(report_of())) | {"options": options}
    with pytest.raises(UserError, match=r"report\.json is damaged: .*; build the artifact again") as raised:
        report_from_values(values, FILE)
    assert str(raised.value).isprintable()


def test_every_option_that_a_verification_records_is_read_again() -> None:
    options = ["--model", "a b.onnx", "--weights", "w.safetensors", "--data", "d.npz", "--reference", "other/one@ort"]
    options += ["--implementation", "LSHSort=body,MaskedAttention=auto", "--device", "1", "--precision-hint", "bf16"]
    assert ["--against", *options[::2]] == list(RECORDED)  # the first is of prove
    report = report_from_values(json.loads(json_from_report(report_of(options=options))), FILE)
    words = words_in_bash(verify_command(check_of(), report, "artifact"))
    assert words == ["effexport", "verify", "artifact", *options, "--case", "export"]


@pytest.mark.parametrize(
    ("against", "expected"),
    [
        ("nets.py:make", "effexport prove m.onnx --against nets.py:make --runtime openvino"),
        ("Masked", "effexport.prove('m.onnx', model)  # in Python; model: a Masked"),
    ],
)
def test_a_proof_is_repeated_as_one(against: str, expected: str) -> None:
    """In Python if the other model has no name; and nothing says how to build the file."""
    report = report_of(options=["--against", against], runtime="openvino")
    assert verify_command(check_of(), report, "m.onnx") == expected
    assert build_command(report, "rebuilt") == ""


@pytest.mark.parametrize("reference", ["golden", "answers.safetensors", "torch"])
def test_every_form_of_a_reference_is_read_again(reference: str) -> None:
    options = ["--reference", parse_choice(reference).option]
    assert report_from_values(json.loads(json_from_report(report_of(options=options))), FILE).options == options


def as_option(option: str, value: str) -> list[str]:
    return [f"{option}={value}"] if value.startswith("-") else [option, value]


HOSTILE = (
    "--force",
    "-o",
    "-",
    "a\nrm x",
    "a\rb",
    "$(true)",
    "`true`",
    "x; true",
    "\x1b[2J",
    "'",
    '"',
    "\u202e",
    "```",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_an_artifact_becomes_another_word_of_a_command(text: str) -> None:
    report = report_of(weights_from=text)
    path = f"./{text}" if text.startswith("-") else text
    words = words_in_bash(verify_command(check_of(text), report, text))
    assert words == ["effexport", "verify", path, *as_option("--case", text)]
    # a file that is quantised, with engines
    record = Quantization(
        precision="int8", scales="static", samples=Samples(source=text, sha256="0", samples=1), task_data=text
    )
    engine = EngineEntry(
        target=text,
        file=text,
        tensorrt_version="1",
        compute_capabilities=(),
        profiles=(),
        implementation={},
        layers=1,
        bytes=1,
        build_seconds=1.0,
        remarks=(),
    )
    report = report_of(weights_from=text, quantization=record, engines=[engine])
    words = words_in_bash(build_command(report, "again"))
    named = [*as_option("--weights", text), *as_option("--calibration", text), *as_option("--evaluate", text)]
    assert words[-len(named) - 2 :] == [*named, "-o", "again"]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_checkpoint_or_a_module_is_called_is_one_word(text: str) -> None:
    spec = {"scope": "checkpoint", "batch": 1, "precision": "fp32", "opset": 20, "seed": 0}
    report = report_of(spec=spec | {"model": {"family": "reformer"}}, weights_from=text)
    words = words_in_bash(build_command(report, "again"))
    assert words == ["effexport", "build", *as_option("--checkpoint", text), "-o", "again"]
    for name in (text, f"{text}:make()", f"{text}\n:make"):
        report = report_of(spec=spec | {"model": {"family": "module"}}, weights_from=name)
        command = build_command(report, "again")
        assert command.startswith("effexport.export(model, example_inputs, 'again')  # in Python; model: a ")
        assert "\n" not in command


@pytest.mark.parametrize("text", ["--force", "a\nb", "\x1b[2J"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_page_has_no_line_that_a_name_has_made(form: str, text: str) -> None:
    report = report_of(check_of(text), weights_from=text)
    page = text_from_report(Side(text, report), form)
    assert "verify --force" not in page
    # in HTML a line feed is a space, and no browser acts on an escape sequence
    assert form == "html" or ("\x1b" not in page and "\nb" not in page)


@pytest.mark.parametrize("golden", ["full", "small", "none"])
def test_a_check_of_a_module_names_it_where_the_stored_answers_do_not_suffice(golden: str) -> None:
    spec = {"scope": "checkpoint", "golden": golden, "model": {"family": "module"}}
    report = report_of(spec=spec, weights_from="model.py:make")
    case = "effexport verify art --case short" + " --module model.py:make" * (golden != "full")
    assert verify_command(check_of("short"), report, "art") == case
    reference = dataclasses.replace(check_of("short"), kind=Kind.REFERENCE)
    assert verify_command(reference, report, "art") == "effexport verify art --reference torch --module model.py:make"
    unnamed = verify_command(reference, dataclasses.replace(report, weights_from="Encoder"), "art")
    assert unnamed.startswith("effexport.export(model, example_inputs, 'rebuilt'")
    declared = spec | {"model": {"family": "module", "independent_samples": True}}
    again = build_command(dataclasses.replace(report, spec=declared), "art")
    assert "--independent-samples" in again
    assert ("--golden" in again) == (golden != "full")
