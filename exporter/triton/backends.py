"""Which of Triton's backends can run an artifact, and the files that each needs."""

from __future__ import annotations

import importlib
import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from effexport.artifact import MANIFEST, Artifact
from effexport.engines.sidecar import EngineInfo, read_sidecar
from effexport.errors import UserError
from effexport.export.onnx_graph import external_files
from effexport.plugins.building.library import LIBRARY_NAME
from effexport.runners.ort.kernels import library_for
from effexport.runners.ort.settings import OrtSettings
from effexport.triton.content import Content
from effexport.triton.spec import BACKENDS, PackageSpec

PLAN = "model.plan"


@dataclass(frozen=True)
class Backend:
    """A backend of Triton that can serve an artifact.

    files: contents of the folder of a version. library: whether they include the kernel library.
    engine: description of the engine, for the backend tensorrt.
    """

    name: str
    kind: str
    files: Content
    library: bool = False
    engine: EngineInfo | None = None


def choose_backends(artifact: Artifact, spec: PackageSpec) -> tuple[tuple[Backend, ...], tuple[str, ...]]:
    """The requested backends, or all that the artifact has files for; and why the others cannot be used.

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
    return tuple(chosen), tuple(remarks)


def onnxruntime_backend(artifact: Artifact, spec: PackageSpec) -> Backend:
    model = artifact.model_path
    kind = spec.kind or "cpu"
    if artifact.spec.precision == "bf16" and kind == "cpu":
        raise UserError(
            "ONNX Runtime does not support bfloat16 on the CPU; expected --kind gpu, or a build with fp32 or fp16"
        )
    library = kernel_library(artifact, spec, kind)
    files: dict[str, bytes | Path] = {path.name: path for path in (model, *external_files(model))}
    return Backend("onnxruntime", kind, files | library, bool(library))


def python_backend(artifact: Artifact, spec: PackageSpec) -> Backend:
    if artifact.spec.precision == "bf16":
        raise UserError(
            "Triton's Python backend uses NumPy arrays, which do not support bfloat16; build with fp32 or fp16"
        )
    kind = spec.kind or "cpu"
    library = kernel_library(artifact, spec, kind)
    files: dict[str, bytes | Path] = {
        f"artifact/{name}": artifact.path / name for name in (MANIFEST, *artifact.manifest.files)
    }
    files["model.py"] = Path(__file__).with_name("model.py")
    files["effexport.zip"] = zip_of_effexport()
    return Backend("python", kind, files | library, bool(library))


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
    settings = OrtSettings(provider="cuda" if kind == "gpu" else "cpu", implementation=spec.implementation)
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
