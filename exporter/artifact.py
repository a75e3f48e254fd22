"""The artifact folder: written atomically, read with every file checked against the manifest."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec

from effexport.base.dtypes import TensorInfo
from effexport.base.errors import UserError
from effexport.base.files import FolderKind, file_digest, is_inside
from effexport.base.formatting import command_line
from effexport.base.records import Count, Figure, Seconds, record_from_values, text_of_file, values_of_text
from effexport.base.runtimes import engine_name
from effexport.base.spec import BuildSpec
from effexport.export.onnx_graph import (
    GraphSignature,
    external_sizes,
    graph_inputs,
    graph_outline,
    opset_of,
    signature_with_state,
    why_another,
    why_invalid,
    why_other_weights,
)
from effexport.models.checkpoints.spec import is_checkpoint
from effexport.models.validation import near_path
from effexport.plugins.ops import counted
from effexport.quantize.record import Quantization

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
MODEL = "model.onnx"
DECODE_STEP = "decode_step.onnx"
PREFILL = "prefill.onnx"
ENCODER = "encoder.onnx"
TRACED = "traced.zip"
REFERENCE = "reference.safetensors"
REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
ARTIFACT_FOLDER = FolderKind("an artifact", MANIFEST, b'"effexport_version"')
REMEDY = "build the artifact again, or copy it again from its source"


class FileEntry(msgspec.Struct, frozen=True):
    """The checksum and size of one file of an artifact."""

    sha256: str
    bytes: Count


Dims = tuple[Count, ...]


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A TensorRT engine of an artifact in short; its sidecar has all details."""

    target: str
    file: str
    tensorrt_version: str
    compute_capabilities: Annotated[
        tuple[int, ...], msgspec.Meta(description="The GPUs it was built for; empty where TensorRT-RTX chose.")
    ]
    profiles: Annotated[
        tuple[Annotated[dict[str, tuple[Dims, Dims, Dims]], msgspec.Meta(min_length=1)], ...],
        msgspec.Meta(description="Per profile and input, the smallest, the optimal and the largest shape."),
    ]
    implementation: dict[str, str]
    layers: Count
    bytes: Count
    build_seconds: Seconds
    remarks: tuple[str, ...]


class CheckSummary(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All checks of one name: how many passed, failed or did not run, and the worst value beside its limit."""

    passed: Count
    failed: Count
    not_run: Count = msgspec.field(name="not run")
    worst: Figure | None
    limit: Figure | None
    metric: str


class Parity(msgspec.Struct, frozen=True):
    """The result of the parity check."""

    passed: bool
    summary: dict[str, CheckSummary]


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """When, how long and on which machine an artifact was built: all that differs if it is built again.

    integrity: the checksum of the other fields, filled in when the manifest is written.
    """

    created: Annotated[str, msgspec.Meta(description="ISO 8601, UTC.")]
    seconds: Annotated[dict[str, Seconds], msgspec.Meta(description="By the stage of the build.", max_length=1000)]
    machine: dict[str, str | None]
    integrity: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of manifest.json.

    hash_values: graph values that hold buckets. weights_sha256: checksum of all parameters and buffers of the module.
    quantization: None if nothing is quantised. built: None in earlier artifacts, whose report and environment have it.
    files and integrity, the checksum of all other fields but built, are filled in when the manifest is written.
    """

    format_version: int = FORMAT_VERSION
    effexport_version: str
    variant: str
    spec: dict[str, Any]
    precision: str
    opset: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    custom_ops: dict[str, Count]
    hash_values: tuple[str, ...]
    weights_sha256: str
    weights_from: str
    notes: Annotated[tuple[str, ...], msgspec.Meta(max_length=1000)]
    engines: tuple[EngineEntry, ...]
    parity: Parity
    environment: dict[str, str | None]
    quantization: Quantization | None = None
    files: Annotated[dict[str, FileEntry], msgspec.Meta(max_length=10_000)] = {}
    built: Built | None = None
    integrity: str = ""

    @property
    def environment_of_build(self) -> dict[str, str | None]:
        """The versions, and the machine of the build."""
        return self.environment | (self.built.machine if self.built else {})

    @property
    def model_bytes(self) -> int:
        """Size of the model with its weights, without what only the proof needs, such as golden values."""
        return sum(entry.bytes for name, entry in self.files.items() if name in (MODEL, f"{MODEL}.data"))

    @property
    def decisions(self) -> tuple[str, ...]:
        """Graph values that the reference can prescribe: buckets, and what is rounded."""
        return (*self.hash_values, *(self.quantization.unrounded if self.quantization else ()))


@dataclass(frozen=True)
class Artifact:
    """A folder whose files match its manifest."""

    path: Path
    manifest: Manifest

    def __repr__(self) -> str:
        return f"<Artifact {self.path}: {self.spec.model.title}, {self.manifest.precision}>"

    @property
    def spec(self) -> BuildSpec:
        return BuildSpec.from_dict(self.manifest.spec)

    @property
    def model_path(self) -> Path:
        return self.path / MODEL

    @property
    def decode_step_path(self) -> Path:
        """Only causal models with a state of constant size have one, and encoder-decoders."""
        return self.path / DECODE_STEP

    @property
    def prefill_path(self) -> Path | None:
        """None in an artifact with a decode step that was built before there was a prefill."""
        return self.path / PREFILL if PREFILL in self.manifest.files else None

    @property
    def encoder_path(self) -> Path:
        """Only encoder-decoders have one, which reads the source."""
        return self.path / ENCODER

    @property
    def traced_path(self) -> Path:
        """The graphs without weights. Artifacts of an older effexport have none."""
        return self.path / TRACED

    def has_engine(self, target: str, model: str = MODEL) -> bool:
        """True if the artifact has an engine for a target, built from one of its ONNX files."""
        return engine_name(target, model) in {engine.file for engine in self.manifest.engines}

    def engine_path(self, target: str, model: str = MODEL) -> Path:
        """The engine of a target, built from one of the artifact's ONNX files. Raises UserError if there is none."""
        if self.has_engine(target, model):
            return self.path / engine_name(target, model)
        targets = list(dict.fromkeys(engine.target for engine in self.manifest.engines))
        if target in targets:
            missing = f"{target} engine of {model}, because an older effexport built it"
        else:
            missing = f"{target} engine, {'only ' + ', '.join(targets) if targets else 'nor any other'}"
        raise UserError(f"{self.path} has no {missing}; build one with: effexport build … --target {target}")

    @property
    def has_golden(self) -> bool:
        """True unless the artifact was built with --golden none."""
        return REFERENCE in self.manifest.files

    @property
    def reference_path(self) -> Path:
        return self.path / REFERENCE


def open_artifact(path: Path) -> Artifact:
    """Read a folder and check every file against its manifest. Nothing in it is executed.

    Raises UserError for a missing, damaged or foreign folder, or one from a newer effexport.
    """
    manifest = read_manifest(path)
    for name, entry in manifest.files.items():
        check_file(path, name, entry)
    artifact = Artifact(path, manifest)
    try:
        spec = artifact.spec
    except (ValueError, KeyError, TypeError) as error:  # SpecError is a ValueError
        raise UserError(f"{path / MANIFEST} holds a spec that cannot work: {error}") from error
    expected = {name: getattr(spec, name) for name in ("precision", "inputs", "outputs", "custom_ops")}
    expected["opset"] = spec.opset_of_file
    # what the graph is held to; earlier releases wrote some of them out in standard operators
    if Counter(counted(manifest.custom_ops)) <= Counter(counted(spec.custom_ops)):
        del expected["custom_ops"]
    for name, value in {"variant": spec.attention.variant, **expected}.items():
        if getattr(manifest, name) != value:
            raise UserError(f"{path / MANIFEST} is damaged: its fields {name} and spec contradict each other; {REMEDY}")
    graphs = (MODEL, DECODE_STEP) if spec.has_decode_step else (MODEL,)
    of_decoder: dict[str, GraphSignature] = {}
    if spec.model.decoder is not None:
        of_decoder[ENCODER] = GraphSignature(*spec.source_tensors, spec.custom_ops)
        of_decoder[DECODE_STEP] = GraphSignature(*spec.step_tensors, {})
    golden = () if spec.golden == "none" else (REFERENCE,)
    for required in (*graphs, *of_decoder, *golden):
        if required not in manifest.files:
            raise UserError(f"{path / MANIFEST} does not list {required}; {REMEDY}")
    states: tuple[TensorInfo, ...] = ()
    for graph in (*graphs, PREFILL):
        if graph in manifest.files:
            states = check_graph_of_artifact(artifact, graph, states)
    for graph, signature in of_decoder.items():
        check_graph_of_artifact(artifact, graph, signature=signature)
    return artifact


def check_graph_of_artifact(
    artifact: Artifact, name: str, states: tuple[TensorInfo, ...] = (), signature: GraphSignature | None = None
) -> tuple[TensorInfo, ...]:
    """Raise UserError unless a graph is valid ONNX, and the one that the manifest describes.

    states: the state that the decode step takes, which the prefill must take, too. signature: of a graph whose state
    the spec knows. Returns the state of this graph.
    """
    file, manifest, spec = artifact.path / name, artifact.manifest, artifact.spec
    graph = graph_outline(file)
    problem = why_invalid(file)
    if opset_of(graph) != manifest.opset:
        problem = f"its opset is {opset_of(graph)}; expected {manifest.opset}"
    elif unlisted := sorted(external_sizes(graph).keys() - manifest.files.keys()):
        problem = f"it keeps weights in {unlisted[0]!r}, which {MANIFEST} does not list"
    elif signature is not None and not problem:
        problem = why_another(graph, signature)
    elif name == MODEL and not problem:
        signature = GraphSignature(manifest.inputs, manifest.outputs, manifest.custom_ops)
        problem = why_another(graph, signature) or why_other_weights(graph, spec.model.weights())
    elif not problem:
        is_step = name == DECODE_STEP
        if is_step:
            # only the module knows the shapes of its state
            states = graph_inputs(graph)[len(signature_with_state(spec, (), one_token=True).inputs) :]
        signature = signature_with_state(spec, states, one_token=is_step)
        problem = why_another(graph, signature) or why_not_states(states, spec.attention.most_state_elements)
    if problem:
        raise UserError(f"{file} is not the graph that {MANIFEST} describes: {problem}; {REMEDY}")
    return states


def why_not_states(states: tuple[TensorInfo, ...], most_elements: int) -> str:
    """The reason inputs of a graph cannot be a state of constant size, within `most_elements` each; "" if they can."""
    if not states:
        return "it takes no state"
    for state in states:
        batch, *sizes = state.dims or ("",)
        fixed = [size for size in sizes if isinstance(size, int) and size > 0]
        if (state.dtype, batch) != ("float32", "batch") or fixed != sizes or math.prod(fixed) > most_elements:
            return f"its state {state} is not float32 with a batch and at most {most_elements} other elements"
    return ""


def artifact_in_progress(folder: Path, spec: BuildSpec) -> Artifact:
    """The folder of a build as an artifact, for what reads texts or runs the model before the build is finished."""
    return Artifact(folder, manifest_of_spec(spec, files_of_folder(folder)))


def manifest_of_spec(spec: BuildSpec, files: Iterable[str] = (), weights_from: str = "") -> Manifest:
    """The manifest of a model that was not built, or not yet."""
    return Manifest(
        effexport_version="",
        variant=spec.attention.variant,
        spec=spec.to_dict(),
        precision=spec.precision,
        opset=spec.opset_of_file,
        inputs=spec.inputs,
        outputs=spec.outputs,
        custom_ops=spec.custom_ops,
        hash_values=(),
        weights_sha256="",
        weights_from=weights_from,
        notes=(),
        engines=(),
        parity=Parity(False, {}),
        environment={},
        files=dict.fromkeys(files, FileEntry("", 0)),
    )


def is_bare_checkpoint(path: Path) -> bool:
    """True if a folder is a checkpoint and not an artifact, even a damaged one; artifacts have a config.json, too."""
    return is_checkpoint(path) and not any(os.path.lexists(path / name) for name in (MANIFEST, REFERENCE))


def not_an_artifact(path: Path) -> str:
    """The error for a file or folder that is not an artifact, with its remedy."""
    if path.is_file():
        whole = f", such as {path.parent}" if (path.parent / MANIFEST).is_file() else ""
        return f"{path} is not an artifact: it is a file; expected a folder made by effexport build{whole}"
    if is_bare_checkpoint(path):
        build = command_line("effexport", "build", "--checkpoint", path)
        return f"{path} is not an artifact: it is a checkpoint; export it first: {build}"
    # the folder of a sweep has artifacts in it, and a page of its own, which that of a benchmark has, too
    manifests = [found for name in ("*", "cells/*/*") for found in sorted(path.glob(f"{name}/{MANIFEST}"))]
    page = f"; its own report is {path / REPORT_HTML}" if (path / REPORT_HTML).is_file() else ""
    such = f", such as {manifests[0].parent}" if manifests else ""
    return f"{path} is not an artifact: it has no {MANIFEST}{page}; expected a folder made by effexport build{such}"


def read_manifest(path: Path) -> Manifest:
    """The manifest of an artifact folder, checked against its own checksum; the files it lists are not read.

    Raises UserError for a missing or damaged manifest, or one from a newer effexport.
    """
    file = path / MANIFEST
    if not path.exists():
        near = near_path(path, lambda other: os.path.isfile(other / MANIFEST))
        build = command_line("effexport", "build", "--variant", "lsh", "-o", path)
        raise UserError(f"no artifact at {path}{near or f'; make one with: {build}'}")
    if not file.is_file():
        raise UserError(not_an_artifact(path))
    text = text_of_file(file, REMEDY)
    values = values_of_text(text, file, REMEDY)
    if type(values.get("format_version")) is not int:
        raise UserError(
            f"{file} is not a manifest of effexport: it has no format_version; expected one that effexport build wrote"
        )
    version = values["format_version"]
    if version > FORMAT_VERSION:
        raise UserError(
            f"{file} has format version {version}, written by effexport {values.get('effexport_version')}; "
            f"this effexport reads up to {FORMAT_VERSION}: upgrade effexport"
        )
    # the text itself is compared too: 1e-05 and 1E-05 are one number, but only one of them was written
    built = values.get("built")
    has_own_built = not isinstance(built, dict) or built.get("integrity") == digest_without(built, "integrity")
    if values.get("integrity") != manifest_digest(values) or not has_own_built or text != manifest_text(values):
        raise UserError(f"{file} is damaged: its contents do not match its own checksum; {REMEDY}")
    return record_from_values(values, Manifest, str(file), REMEDY)


def check_file(folder: Path, name: str, entry: FileEntry) -> None:
    """Raise UserError unless a listed file lies in the folder and has the size and checksum of its entry."""
    file = folder / name
    if PurePosixPath(name).as_posix() != name or not name.isprintable():
        raise UserError(f"{folder / MANIFEST} lists {name!r}, which is not the plain name of a file; {REMEDY}")
    if not is_inside(file, folder):
        raise UserError(f"{folder / MANIFEST} lists {name!r}, outside the artifact; expected files inside it")
    if not file.is_file():
        raise UserError(f"{folder} is damaged: {name} is missing; {REMEDY}")
    size = file.stat().st_size
    if size != entry.bytes:
        raise UserError(f"{folder} is damaged: {name} has {size} bytes, expected {entry.bytes}; {REMEDY}")
    if file_digest(file) != entry.sha256:
        raise UserError(f"{folder} is damaged: {name} does not match its checksum; {REMEDY}")


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Checksum of a manifest, which is the same if the artifact is built again."""
    return digest_without(manifest, "integrity", "built")


def digest_without(record: Mapping[str, Any], *left_out: str) -> str:
    rest = {key: value for key, value in record.items() if key not in left_out}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Complete the manifest with the hashes of all files in the folder, and write it last."""
    files = {name: FileEntry(file_digest(file), file.stat().st_size) for name, file in files_of_folder(folder).items()}
    values = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(manifest, files=files)))
    values["integrity"] = manifest_digest(values)
    if values["built"] is not None:
        values["built"]["integrity"] = digest_without(values["built"], "integrity")
    (folder / MANIFEST).write_bytes(manifest_text(values))
    read_manifest(folder)  # what is written can be read again


def files_of_folder(folder: Path) -> dict[str, Path]:
    """All files in a folder, by their names in a manifest."""
    return {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}


def manifest_text(manifest: Mapping[str, Any]) -> bytes:
    """The only text that stands for this manifest."""
    return msgspec.json.format(json.dumps(manifest).encode(), indent=2) + b"\n"


def check_output_file(output: Path, *, force: bool) -> None:
    """Refuse, before any work, an output that exists or cannot be written, or that would change an artifact.

    Raises UserError.
    """
    if output.is_dir():
        raise UserError(f"{output} is a folder; expected the path of a file to write")
    if not output.parent.is_dir():
        problem = "is not a folder;" if output.parent.exists() else "does not exist; create the folder, or"
        raise UserError(f"{output.parent} {problem} choose another file with -o")
    for folder in output.resolve().parents:
        if (folder / MANIFEST).is_file():
            raise UserError(f"{output} would change the artifact {folder}; choose a file outside it with -o")
    if os.path.lexists(output) and not output.is_file():
        raise UserError(f"{output} is not a regular file; choose another file with -o")
    if output.exists() and not force:
        raise UserError(f"{output} exists; choose another file with -o, or replace it with --force")
    if not os.access(output.parent, os.W_OK):
        raise UserError(f"cannot write to {output.parent}; choose another file with -o")
