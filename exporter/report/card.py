"""Model cards: README.md with the metadata of hubs, and a bill of materials in CycloneDX 1.6, made from the report.

A card lies alone in a folder, or beside the files of its artifact, ready to be uploaded.
"""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from effexport.artifact import MANIFEST, Artifact
from effexport.base.environment import PACKAGES
from effexport.base.errors import UserError
from effexport.base.files import FolderKind, file_digest, json_text
from effexport.base.records import read_record
from effexport.export.exported_model import output_class
from effexport.models.encoder.spec import SCORES, TOKENS
from effexport.render.formats import escaped, fenced
from effexport.report.formats import markdown_from_report, report_of_artifact
from effexport.report.report import Report, versions_of
from effexport.tasks.figures import Evaluation

README, BOM = "README.md", "bom.cdx.json"
CARD_FOLDER = FolderKind("a model card", BOM, b'"CycloneDX"')
BOM_SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
MODEL_REF = "model"
# Class of what a model of texts returns, as transformers calls it → the name of its pipeline.
PIPELINES = {
    "MaskedLMOutput": "fill-mask",
    "CausalLMOutput": "text-generation",
    "Seq2SeqLMOutput": "text2text-generation",
    "SequenceClassifierOutput": "text-classification",
    "TokenClassifierOutput": "token-classification",
    "MultipleChoiceModelOutput": "multiple-choice",
    "QuestionAnsweringModelOutput": "question-answering",
    "BaseModelOutput": "feature-extraction",
    "BaseModelOutputWithPooling": "feature-extraction",
}


@dataclass(frozen=True)
class Card:
    """The contents of a card.

    name: of the model. license: of its weights, "" if it is not known. quality: the result of `effexport evaluate`.
    """

    artifact: Artifact
    report: Report
    name: str
    license: str = ""
    quality: Evaluation | None = None

    @property
    def pipeline(self) -> str:
        """The name of the pipeline in transformers that the model serves; "" if there is none, or it is not known."""
        spec = self.artifact.spec
        if spec.model.is_traced_as_found or "input_ids" not in spec.model.inputs:
            return ""
        if {tensor.name for tensor in spec.outputs} == {SCORES, TOKENS}:
            return "fill-mask"
        outputs = output_class(spec)
        return PIPELINES[outputs.name] if outputs else ""

    @property
    def metadata(self) -> dict[str, Any]:
        """The front matter of README.md, as hubs read it."""
        spec = self.artifact.spec
        tags = ["effexport", "onnx", spec.attention.variant, spec.precision]
        found = {"license": self.license, "library_name": "effexport", "pipeline_tag": self.pipeline, "tags": tags}
        return {key: value for key, value in found.items() if value} | self._results()

    def _results(self) -> dict[str, Any]:
        if self.quality is None:
            return {}
        data = self.quality.data or "data"
        metrics = [{"type": e.name.replace(" ", "_"), "name": e.name, "value": e.value} for e in self.quality.estimates]
        task, dataset = {"type": self.pipeline or "other"}, {"type": data, "name": data}
        result = {"task": task, "dataset": dataset, "metrics": metrics}
        return {"model-index": [{"name": self.name, "results": [result]}]}


def card_of_artifact(artifact: Artifact, name: str, license: str = "", quality: Path | None = None) -> Card:
    """The card of an artifact whose files were checked. quality: a file with the result of `effexport evaluate --json`.

    Raises UserError for a file that holds something else, or the figures of another model.
    """
    found = None
    if quality is not None:
        expected = "expected the output of effexport evaluate --json"
        found = read_record(quality, Evaluation, expected)
        if found.spec != artifact.manifest.spec:
            raise UserError(f"{quality} has the figures of another model, {found.model}; {expected} on {artifact.path}")
    return Card(artifact, report_of_artifact(artifact), name, license, found)


def write_card(card: Card, output: Path, *, with_model: bool, force: bool) -> list[str]:
    """Write a card into a new folder, and the artifact with it. Returns the names of the files.

    Signatures of the artifact are not copied: they cover its folder without a card.
    Raises UserError for a folder that exists and is not a card, or without `force`; DiskError if it cannot be written.
    """
    source = card.artifact.path
    files = sorted({*card.artifact.manifest.files, MANIFEST}) if with_model else []
    with CARD_FOLDER.new(output, force=force) as folder:
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        (folder / README).write_text(readme_text(card), encoding="utf-8")
        (folder / BOM).write_text(json_text(bill_of_materials(card)), encoding="utf-8")
    return [README, BOM, *files]


def readme_text(card: Card) -> str:
    """README.md. The values of its front matter are written as JSON, which is YAML, too."""
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in card.metadata.items()]
    spec = card.artifact.spec
    tensors = [f"* {kind}: {escaped(str(tensor))}" for kind in ("inputs", "outputs") for tensor in getattr(spec, kind)]
    return "\n\n".join(
        [
            "\n".join(["---", *lines, "---"]),
            f"# {escaped(card.name)}",
            "An ONNX model, exported with effexport, which compared it with PyTorch. It runs in ONNX Runtime with or "
            f"without effexport. `{BOM}` lists the digests of its files and the versions it was built with.",
            "\n".join(tensors),
            fenced("pip install 'effexport[cpu]'\neffexport verify . --reference golden"),
            markdown_from_report(card.report, "."),
        ]
    )


def bill_of_materials(card: Card) -> dict[str, Any]:
    """A CycloneDX 1.6 document: the model with its card, its files with their digests, and the packages of its build.

    The same artifact always gets the same document.
    """
    artifact, report = card.artifact, card.report
    manifest = artifact.manifest
    digest = file_digest(artifact.path / MANIFEST)
    versions = versions_of(manifest.environment).items()
    libraries = [library_of(name, version) for name, version in versions if version]
    model: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": MODEL_REF,
        "name": card.name,
        "description": report.title,
        **({"licenses": [{"license": {"name": card.license}}]} if card.license else {}),
        "modelCard": model_card(card),
        "components": [
            {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": [sha256_hash(entry.sha256)]}
            for name, entry in manifest.files.items()
        ],
        "properties": [
            {"name": f"effexport:{name}", "value": value}
            for name, value in {
                "verdict": report.verdict,
                "precision": manifest.precision,
                "opset": str(manifest.opset),
                "weights": manifest.weights_from,
                "weights sha256": manifest.weights_sha256,
                "manifest sha256": digest,
            }.items()
        ],
    }
    tool = library_of("effexport", manifest.effexport_version, "application")
    return bom_document(model, libraries, f"{digest}:{card.name}", report.created, tool)


def bom_document(
    component: dict[str, Any], libraries: list[dict[str, Any]], name: str, timestamp: str, *tools: dict[str, Any]
) -> dict[str, Any]:
    """A CycloneDX 1.6 document about a component that depends on libraries. name: what tells it from others."""
    return {
        "bomFormat": "CycloneDX",
        "$schema": BOM_SCHEMA,
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, f"effexport:{name}").urn,
        "version": 1,
        "metadata": {"timestamp": timestamp, "tools": {"components": list(tools)}, "component": component},
        "components": libraries,
        "dependencies": [{"ref": component["bom-ref"], "dependsOn": [library["bom-ref"] for library in libraries]}],
    }


def model_card(card: Card) -> dict[str, Any]:
    """The part modelCard of CycloneDX: what the model takes and returns, how it was checked, and its notes."""
    spec, manifest = card.artifact.spec, card.artifact.manifest
    checks = [
        {"type": f"{name}: {checks.metric}", "value": str(checks.worst)}
        for name, checks in manifest.parity.summary.items()
        if checks.worst is not None
    ]
    figures = [] if card.quality is None else card.quality.estimates
    measured: list[dict[str, Any]] = [
        {"type": e.name, "value": str(e.value), **interval(e.low, e.high)} for e in figures
    ]
    return {
        "modelParameters": {
            **({"task": card.pipeline} if card.pipeline else {}),
            "architectureFamily": spec.attention.variant,
            "modelArchitecture": card.report.title,
            "inputs": [{"format": str(tensor)} for tensor in spec.inputs],
            "outputs": [{"format": str(tensor)} for tensor in spec.outputs],
        },
        "quantitativeAnalysis": {"performanceMetrics": [*checks, *measured]},
        "considerations": {"technicalLimitations": list(card.report.notes)},
    }


def interval(low: float | None, high: float | None) -> dict[str, Any]:
    return {} if low is None else {"confidenceInterval": {"lowerBound": str(low), "upperBound": str(high)}}


def sha256_hash(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest}


def library_of(module: str, version: str, kind: str = "library") -> dict[str, Any]:
    """A component for a package, by the module that it has. Python itself and what pip does not install has no purl."""
    names = {package.module: package.distributions[0] for package in PACKAGES} | {"effexport": "effexport"}
    found: dict[str, Any] = {"type": kind, "bom-ref": f"{kind}:{module}", "name": names.get(module, module)}
    if module in names:
        found["purl"] = f"pkg:pypi/{names[module]}@{quote(version)}"
    return found | {"version": version}
