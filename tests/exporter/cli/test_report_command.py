"""`effexport report`: every format, two artifacts side by side, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from effexport.artifact import Artifact
from effexport.report.formats import report_from_values

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Cli = Callable[..., Any]
Built = Callable[..., Artifact]
FORMATS = ("html", "json", "markdown", "junit")


@pytest.fixture
def artifact(built: Built) -> Path:
    return built("softmax", "attention").path


def test_a_terminal_gets_markdown(cli: Cli, artifact: Path) -> None:
    result = cli("report", artifact)
    assert result.code == 0
    assert result.out.startswith("### ✅ softmax attention, fp32\n")
    assert f"effexport verify {artifact}" in result.out
    assert result.err == ""


def test_json_is_the_report_itself(cli: Cli, artifact: Path) -> None:
    stored = json.loads((artifact / "report.json").read_text(encoding="utf-8"))
    built = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))["built"]
    stored |= {"weights_from": "seed", "created": built["created"], "seconds": built["seconds"]}
    stored["environment"] |= built["machine"]
    for arguments in (["--json"], ["--format", "json"], ["--format", "json", "--json"]):
        assert cli("report", artifact, *arguments).json == stored


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("count", [1, 2])
def test_every_format_is_written_for_one_and_for_two(
    cli: Cli, built: Built, artifact: Path, tmp_path: Path, form: str, count: int
) -> None:
    folders = [artifact, built("linear", "attention").path][:count]
    result = cli("report", *folders, "--format", form, "-o", tmp_path / "out.txt", "--json")
    assert result.json == {
        "output": str(tmp_path / "out.txt"),
        "format": form,
        "artifacts": [str(folder) for folder in folders],
        "verdicts": ["passed"] * count,
    }
    text = (tmp_path / "out.txt").read_text(encoding="utf-8")
    beginning = {"html": "<!doctype html>", "json": "{", "markdown": "### ", "junit": "<?xml"}
    assert text.startswith(beginning[form])
    for folder in folders if form != "json" or count == 2 else []:
        assert str(folder) in text.replace("\\", "")  # Markdown escapes underscores of the path
    if form == "junit":
        assert len(ElementTree.fromstring(text.encode()).findall("testsuite")) == count
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


@pytest.mark.parametrize(
    ("name", "beginning"), [("r.html", "<!doctype"), ("r.md", "###"), ("r.xml", "<?xml"), ("r.json", "{"), ("r", "###")]
)
def test_the_name_of_the_file_chooses_the_format(
    cli: Cli, artifact: Path, tmp_path: Path, name: str, beginning: str
) -> None:
    assert cli("report", artifact, "-o", tmp_path / name).code == 0
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(beginning)


def test_a_comparison_says_what_differs(cli: Cli, built: Built, artifact: Path) -> None:
    other = built("softmax", "attention", causal=True).path
    compared = cli("report", artifact, other, "--json").json
    assert compared["spec"] == {"causal": ["no", "yes"]}
    assert compared["verdicts"] == ["passed", "passed"]
    assert compared["environment"] == {}
    results = compared["checks"]["arithmetic"]["results"]
    assert [entry["status"] for entry in results] == ["passed", "passed"]
    assert compared["checks"]["causal prefix"]["results"][0] is None
    assert all(size > 0 for size in compared["bytes"]["model.onnx"])
    assert len(compared["seconds"]["exporting to ONNX"]) == 2
    text = cli("report", artifact, other).out
    assert "| causal | no | yes |" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| arithmetic | max"))
    assert line.count("| passed | ") == 2


def test_an_artifact_equals_itself(cli: Cli, artifact: Path) -> None:
    compared = cli("report", artifact, artifact, "--json").json
    assert compared["spec"] == compared["environment"] == {}
    assert "Both were built from the same spec." in cli("report", artifact, artifact).out


def test_the_schema_is_printed(cli: Cli, artifact: Path) -> None:
    printed = cli("report", "--schema").json
    assert printed["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert report_from_values(cli("report", artifact, "--json").json, artifact).verdict == "passed"
    assert "leave out the artifact and --format" in cli("report", artifact, "--schema").error()


def test_a_file_is_replaced_only_by_force(cli: Cli, artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "r.md").write_text("mine")
    assert (
        "exists; choose another file with -o, or replace it with --force"
        in cli("report", artifact, "-o", tmp_path / "r.md").error()
    )
    assert (tmp_path / "r.md").read_text() == "mine"
    assert cli("report", artifact, "-o", tmp_path / "r.md", "--force").code == 0
    assert (tmp_path / "r.md").read_text(encoding="utf-8").startswith("###")
    assert "is a folder" in cli("report", artifact, "-o", tmp_path, "--force").error()


def test_the_artifact_itself_is_not_written_to(cli: Cli, copied: Callable[..., Path]) -> None:
    folder = copied()
    message = cli("report", folder, "-o", folder / "report.html", "--force").error()
    assert "would change the artifact" in message
    assert cli("report", folder).code == 0


def test_bad_usage_is_said(cli: Cli, artifact: Path, tmp_path: Path) -> None:
    assert "add -o FILE" in cli("report", artifact, "--format", "html", "--json").error()
    page = tmp_path / "r.html"
    message = cli("report", artifact, "--format", "json", "-o", page).error(2)
    assert f"--format json contradicts -o {page}, a file of the format html; leave out --format" in message
    assert not page.exists()


DAMAGE: dict[str, tuple[str, str]] = {
    "not JSON": ("{", "is damaged: "),
    "not a report": ("[1]", "is damaged: it does not hold a JSON object"),
    "another object": ("{}", "is not a report of effexport: it has no report_version"),
    "newer": ('{"report_version": 99}', "report version 99; this effexport reads up to 5: upgrade effexport"),
    "incomplete": ('{"report_version": 2}', "is damaged: Object missing required field `title`"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_report_that_cannot_be_read_is_said(
    cli: Cli, copied: Callable[..., Path], rewrite_manifest: Callable[..., None], damage: str
) -> None:
    text, words = DAMAGE[damage]
    folder = copied()
    (folder / "report.json").write_text(text, encoding="utf-8")
    assert "is damaged: report.json has" in cli("report", folder).error()  # by its checksum
    rewrite_manifest(folder)
    assert words in cli("report", folder).error()


def test_a_report_with_a_wrong_value_is_said(
    cli: Cli, copied: Callable[..., Path], rewrite_manifest: Callable[..., None]
) -> None:
    folder = copied()
    values = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    values["checks"][2]["status"] = "maybe"
    (folder / "report.json").write_text(json.dumps(values), encoding="utf-8")
    rewrite_manifest(folder)
    message = cli("report", folder).error()
    assert "Invalid enum value 'maybe' - at `$.checks[2].status`; build the artifact again" in message


def test_an_artifact_without_a_report_is_said(
    cli: Cli, copied: Callable[..., Path], rewrite_manifest: Callable[..., None]
) -> None:
    folder = copied()
    (folder / "report.json").unlink()
    assert "report.json is missing" in cli("report", folder).error()
    rewrite_manifest(folder)
    assert "has no report.json" in cli("report", folder).error()
