"""Triton's backends that can run an artifact, and the files that each needs."""

from __future__ import annotations

import importlib
import io
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from effexport.artifact import MANIFEST, Artifact
from effexport.errors import UserError
from effexport.export.onnx_graph import external_files
from effexport.generation.text_generator import check_generates
from effexport.plugins.building.library import LIBRARY_NAME
from effexport.runners.options import RunOptions
from effexport.runners.ort.kernels import library_for
from effexport.runtimes import CPU, CUDA, RUNTIME_OF_PROVIDER
from effexport.serving.engine.signature import CONTEXT, TEXT
from effexport.serving.triton.repository import Content
from effexport.serving.triton.spec import BACKENDS, BackendName, PackageName, PackageSpec
from effexport.tensorrt.sidecar import read_sidecar
from effexport.text.fast_tokenizer import TOKENIZER_JSON
from effexport.text.task import Task
from effexport.text.tasks import task_from_artifact
from effexport.text.tokenizer import Tokenizer, tokenizer_from_artifact

if TYPE_CHECKING:
    from effexport.tensorrt.sidecar import EngineInfo


@dataclass(frozen=True)
class Backend:
    """A backend of Triton that can serve an artifact.

    files: contents of the folder of a version. library: whether they include the kernel library.
    engine: description of the engine, for the backend tensorrt. example: texts of a request, by input; {} for a model
    of tensors only. generates: whether the model continues texts, instead of answering tensors and texts.
    packages: what it imports in the server, besides NumPy.
    """

    name: BackendName
    kind: Literal["cpu", "gpu"]
    files: Content
    library: bool = False
    engine: EngineInfo | None = None
    example: Mapping[str, str] = field(default_factory=dict)
    generates: bool = False
    packages: tuple[PackageName, ...] = ()


PLAN = "model.plan"
# Every Python model imports them; one with a tokenizer, tokenizers as well.
PYTHON_PACKAGES: tuple[PackageName, ...] = ("msgspec", "onnx", "onnxruntime")


def choose_backends(artifact: Artifact, spec: PackageSpec) -> tuple[tuple[Backend, ...], tuple[str, ...]]:
    """The requested backends, or all that the artifact has files for; and why the others cannot be used.

    The backend python gets a second model for an artifact that generates text.

    Raises UserError if a requested backend cannot run the artifact.
    """
    chosen, remarks = [], []
    for name in BACKENDS:
        if spec.backends and name not in spec.backends:
            continue
        try:
            chosen.append(MAKERS[name](artifact, spec))
        except UserError as error:
            if spec.backends:
                raise
            remarks.append(f"no model for the backend {name}: {error}")
    if not chosen:
        raise UserError(f"no backend of Triton can run {artifact.path}: {'; '.join(remarks)}")
    if any(backend.name == "python" for backend in chosen) and artifact.spec.has_decode_step:
        try:
            chosen.append(generation_backend(artifact, spec))
        except UserError as error:
            remarks.append(f"no model that generates text: {error}")
    return tuple(chosen), tuple(remarks)


def onnxruntime_backend(artifact: Artifact, spec: PackageSpec) -> Backend:
    model = artifact.model_path
    kind = spec.kind or "cpu"
    if artifact.spec.precision == "bf16" and kind == "cpu":
        raise UserError(
            "ONNX Runtime does not support bfloat16 on the CPU; expected --kind gpu, or a build with fp32 or fp16"
        )
    library = kernel_library(artifact, spec, kind)
    # the model names the files of its weights as they lie beside it
    weights = {path.relative_to(model.parent).as_posix(): path for path in external_files(model)}
    if taken := weights.keys() & {model.name, *library}:
        raise UserError(f"{model} keeps its weights in {min(taken)}, which is another file in Triton; build it again")
    files: dict[str, bytes | Path] = {model.name: model, **weights}
    return Backend("onnxruntime", kind, files | library, bool(library))


def python_backend(artifact: Artifact, spec: PackageSpec) -> Backend:
    if artifact.spec.precision == "bf16":
        raise UserError(
            "Triton's Python backend uses NumPy arrays, which do not support bfloat16; build with fp32 or fp16"
        )
    try:
        task = task_from_artifact(artifact)
    except UserError:  # an artifact without a tokenizer, or whose outputs answer no text
        return python_model(artifact, spec)
    return python_model(artifact, spec, example=example_request(task, tokenizer_from_artifact(artifact)))


def generation_backend(artifact: Artifact, spec: PackageSpec) -> Backend:
    """The backend python with a model that generates text. Raises UserError if the artifact cannot."""
    check_generates(artifact)
    tokenizer_from_artifact(artifact)
    return python_model(artifact, spec, generates=True)


def python_model(
    artifact: Artifact, spec: PackageSpec, *, example: Mapping[str, str] | None = None, generates: bool = False
) -> Backend:
    kind = spec.kind or "cpu"
    library = kernel_library(artifact, spec, kind)
    files: dict[str, bytes | Path] = {
        f"artifact/{name}": artifact.path / name for name in (MANIFEST, *artifact.manifest.files)
    }
    files["model.py"] = Path(__file__).with_name("model.py")
    files["effexport.zip"] = zip_of_effexport()
    tokenizes = TOKENIZER_JSON in artifact.manifest.files and (example or generates)
    packages: tuple[PackageName, ...] = (*PYTHON_PACKAGES, "tokenizers") if tokenizes else PYTHON_PACKAGES
    return Backend(
        "python", kind, files | library, bool(library), example=example or {}, generates=generates, packages=packages
    )


def example_request(task: Task, tokenizer: Tokenizer) -> dict[str, str]:
    """The texts of a request for the README."""
    if task.name == "question-answering":
        return {TEXT: "Which city is the capital of France?", CONTEXT: "Paris is the capital of France."}
    return {TEXT: f"Paris is the {tokenizer.mask_token if task.name == 'fill-mask' else 'capital'} of France."}


def tensorrt_backend(artifact: Artifact, spec: PackageSpec) -> Backend:
    targets = [engine.target for engine in artifact.manifest.engines]
    if "trt" not in targets:
        only = ", only one for TensorRT-RTX, which Triton does not run" if targets else ""
        raise UserError(
            f"{artifact.path} has no TensorRT engine{only}; build one on the same kind of GPU as the server's with: "
            "effexport build … --target trt"
        )
    if spec.kind == "cpu":
        raise UserError("a TensorRT engine runs on a GPU only; expected --kind gpu, or another backend")
    engine = artifact.engine_path("trt")
    return Backend("tensorrt", "gpu", {PLAN: engine}, engine=read_sidecar(engine))


MAKERS: dict[str, Callable[[Artifact, PackageSpec], Backend]] = {
    "onnxruntime": onnxruntime_backend,
    "python": python_backend,
    "tensorrt": tensorrt_backend,
}


def kernel_library(artifact: Artifact, spec: PackageSpec, kind: str) -> dict[str, bytes | Path]:
    """The kernel library of this machine; empty if function bodies are to run. Warns if kernels are missing."""
    settings = RunOptions(
        runtime=RUNTIME_OF_PROVIDER[CUDA if kind == "gpu" else CPU].name, implementation=spec.implementation
    )
    library = library_for(sorted(artifact.manifest.custom_ops), settings)
    return {LIBRARY_NAME: library.path} if library is not None else {}


def zip_of_effexport() -> bytes:
    """A zip archive of the Python files of effexport; the same files give the same bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted(python_files().items()):
            entry = zipfile.ZipInfo(name)  # always dated 1980
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes())
    return stream.getvalue()


def python_files() -> dict[str, Path]:
    """Path within the package → file. In an editable installation, `models` and `plugins` are in other folders."""
    files: dict[str, Path] = {}
    for package in ("effexport", "effexport.models", "effexport.plugins"):
        folder = Path(str(importlib.import_module(package).__file__)).parent
        for path in folder.rglob("*.py"):
            files[f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}"] = path
    return files
