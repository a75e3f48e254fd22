"""The artifact folder: written atomically, read with every file checked against the manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effexport.errors import UserError
from effexport.export.onnx_graph import load_graph
from effexport.files import FolderKind, file_digest
from effexport.runtimes import engine_name
from effexport.spec import BuildSpec

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MODEL = "model.onnx"
DECODE_STEP = "decode_step.onnx"
REFERENCE = "reference.safetensors"
REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
ARTIFACT_FOLDER = FolderKind("an artifact", MANIFEST)


@dataclass(frozen=True)
class Artifact:
    """A folder whose files match its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def spec(self) -> BuildSpec:
        return BuildSpec.from_dict(self.manifest["spec"])

    @property
    def model_path(self) -> Path:
        return self.path / MODEL

    @property
    def decode_step_path(self) -> Path:
        """Only causal models with a state of constant size have one."""
        return self.path / DECODE_STEP

    def engine_path(self, target: str) -> Path:
        """The engine of a target. Raises UserError when the artifact has none."""
        targets = [entry["target"] for entry in self.manifest["engines"]]
        if target not in targets:
            raise UserError(
                f"{self.path} has no {target} engine, {'only ' + ', '.join(targets) if targets else 'nor any other'}; "
                f"build one with: effexport build … --target {target}"
            )
        return self.path / engine_name(target)

    @property
    def reference_path(self) -> Path:
        return self.path / REFERENCE


def open_artifact(path: Path) -> Artifact:
    """Read a folder and check every file against its manifest. Nothing in it is executed.

    Raises UserError for a missing, damaged or foreign folder, or one from a newer effexport.
    """
    manifest = read_manifest(path)
    for name, entry in manifest["files"].items():
        check_file(path, name, entry)
    artifact = Artifact(path, manifest)
    try:
        spec = artifact.spec
    except (ValueError, KeyError, TypeError) as error:  # SpecError is a ValueError
        raise UserError(f"{path / MANIFEST} holds a spec that cannot work: {error}") from error
    graphs = (MODEL, DECODE_STEP) if spec.has_decode_step else (MODEL,)
    for required in (*graphs, REFERENCE):
        if required not in manifest["files"]:
            raise UserError(f"{path / MANIFEST} does not list {required}; {_REMEDY}")
    for graph in graphs:
        load_graph(path / graph)
    return artifact


def read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not path.exists():
        raise UserError(f"no artifact at {path}; make one with: effexport build --variant lsh -o {path}")
    if not file.is_file():
        raise UserError(f"{path} is not an artifact: it has no {MANIFEST}; expected a folder made by effexport build")
    try:
        text = file.read_text(encoding="utf-8")
        manifest = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{file} is damaged: {error}; {_REMEDY}") from error
    if not isinstance(manifest, dict) or type(manifest.get("format_version")) is not int:
        raise UserError(f"{file} is not a manifest of effexport: it has no format_version")
    version = manifest["format_version"]
    if version > FORMAT_VERSION:
        raise UserError(
            f"{file} has format version {version}, written by effexport {manifest.get('effexport_version')}; "
            f"this effexport reads up to {FORMAT_VERSION}: upgrade effexport"
        )
    # the text itself is compared too: 1e-05 and 1E-05 are one number, but only one of them was written
    if manifest.get("integrity") != manifest_digest(manifest) or text != manifest_text(manifest):
        raise UserError(f"{file} is damaged: its contents do not match its own checksum; {_REMEDY}")
    for name, kind in _FIELDS.items():
        if not isinstance(manifest.get(name), kind):
            raise UserError(f"{file} has no {name} that is a {kind.__name__}; {_REMEDY}")
    for name, entry in manifest["files"].items():
        if not isinstance(entry, dict) or not entry.keys() >= {"bytes", "sha256"}:
            raise UserError(f"{file} does not give bytes and sha256 of {name!r}; {_REMEDY}")
    return manifest


# What every reader of a manifest relies on, beyond its checksum.
_FIELDS: dict[str, type] = {
    "effexport_version": str,
    "variant": str,
    "spec": dict,
    "precision": str,
    "custom_ops": dict,
    "hash_values": list,
    "weights_sha256": str,
    "weights_from": str,
    "notes": list,
    "engines": list,
    "parity": dict,
    "files": dict,
}
_REMEDY = "build the artifact again, or copy it again from its source"


def check_file(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{folder / MANIFEST} lists {name!r}, outside the artifact; expected files inside it")
    if not file.is_file():
        raise UserError(f"{folder} is damaged: {name} is missing; {_REMEDY}")
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise UserError(f"{folder} is damaged: {name} has {size} bytes, expected {entry['bytes']}; {_REMEDY}")
    if file_digest(file) != entry["sha256"]:
        raise UserError(f"{folder} is damaged: {name} does not match its checksum; {_REMEDY}")


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Checksum of a manifest without its own `integrity` field."""
    rest = {key: value for key, value in manifest.items() if key != "integrity"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, contents: Mapping[str, Any]) -> None:
    """Complete the manifest with the hashes of all files in the folder, and write it last."""
    files = {
        file.relative_to(folder).as_posix(): {"sha256": file_digest(file), "bytes": file.stat().st_size}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    manifest = {"format_version": FORMAT_VERSION, **contents, "files": files}
    # as it will be read back: tuples become lists before the checksum is taken
    manifest = json.loads(json.dumps(manifest))
    manifest["integrity"] = manifest_digest(manifest)
    (folder / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """The only text that stands for this manifest."""
    return json.dumps(manifest, indent=2) + "\n"
