"""Model cards: the metadata that hubs read, and the bill of materials."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from effexport.artifact import Artifact, open_artifact
from effexport.report.card import Card, bill_of_materials
from effexport.report.formats import report_of_artifact

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Cli = Callable[..., Any]


def front_matter(readme: Path) -> dict[str, Any]:
    """The lines between the marks, each a key and a value in JSON, which is YAML, too."""
    _, head, _ = readme.read_text(encoding="utf-8").split("---\n", 2)
    return {key: json.loads(value) for key, _, value in (line.partition(": ") for line in head.splitlines())}


def test_a_card_has_the_metadata_of_hubs_and_a_bill_of_materials(
    built: Callable[..., Artifact], cli: Cli, tmp_path: Path
) -> None:
    artifact = built("softmax", "attention")
    hub = tmp_path / "hub"
    result = cli("package", artifact.path, "--format", "hub", "-o", hub, "--name", "mine", "--license", "mit", "--json")
    assert result.code == 0, result.err
    assert result.json["files"] == ["README.md", "bom.cdx.json", *sorted({*artifact.manifest.files, "manifest.json"})]
    assert {path.name for path in hub.iterdir()} == set(result.json["files"])
    assert front_matter(hub / "README.md") == {
        "license": "mit",
        "library_name": "effexport",
        "tags": ["effexport", "onnx", "softmax", "fp32"],
    }
    assert "Passed: the exported model computes what PyTorch computes" in (hub / "README.md").read_text()
    bom = json.loads((hub / "bom.cdx.json").read_text())
    assert (bom["bomFormat"], bom["specVersion"], bom["version"]) == ("CycloneDX", "1.6", 1)
    model = bom["metadata"]["component"]
    assert (model["type"], model["name"]) == ("machine-learning-model", "mine")
    for file in model["components"]:
        digest = hashlib.sha256((hub / file["name"]).read_bytes()).hexdigest()
        assert file["hashes"] == [{"alg": "SHA-256", "content": digest}]
    torch = next(library for library in bom["components"] if library["name"] == "torch")
    assert torch["purl"] == f"pkg:pypi/torch@{torch['version'].replace('+', '%2B')}"
    assert set(bom["dependencies"][0]["dependsOn"]) == {library["bom-ref"] for library in bom["components"]}
    again = Card(open_artifact(hub), report_of_artifact(artifact), "mine", "mit")
    assert bill_of_materials(again) == bom


def test_figures_of_an_evaluation_become_a_model_index(
    built: Callable[..., Artifact], cli: Cli, tmp_path: Path
) -> None:
    artifact, figures = built("linear", lm_head=True), tmp_path / "quality.json"
    values: dict[str, Any] = dict.fromkeys(("model", "label", "runtime", "precision", "data_sha256"), "x")
    values |= {"spec": artifact.manifest.spec, "tokens": 8, "objective": "language model", "data": "text.txt"}
    values |= {"rows": 3, "answers": 9, "seconds": 1.0}
    values["estimates"] = [{"name": "bits per byte", "value": 2.5, "low": 2.0, "high": 3.0}]
    figures.write_text(json.dumps(values))
    words = ("package", artifact.path, "--format", "card", "-o", tmp_path / "card", "--quality", figures)
    assert cli(*words).code == 0
    found = front_matter(tmp_path / "card" / "README.md")
    assert found["pipeline_tag"] == "fill-mask"
    assert found["model-index"][0]["results"] == [
        {
            "task": {"type": "fill-mask"},
            "dataset": {"type": "text.txt", "name": "text.txt"},
            "metrics": [{"type": "bits_per_byte", "name": "bits per byte", "value": 2.5}],
        }
    ]
    assert "exists" in cli(*words).error()
    assert cli(*words, "--force").code == 0
    figures.write_text(json.dumps(values | {"spec": {}}))
    assert "has the figures of another model" in cli(*words, "--force").error()
    assert "--license only works with --format card or hub" in cli(*words[:2], "-o", "x", "--license", "mit").error()
    assert "--threads only works with --format triton" in cli(*words, "--threads", "2").error()
