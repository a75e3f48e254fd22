"""Models of Triton that an artifact can be: the backends that run it, how requests are batched, and config.pbtxt."""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import json
import shlex
import textwrap
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from effexport.artifact import MANIFEST, Artifact
from effexport.base.dtypes import Array, TensorInfo
from effexport.base.errors import UserError
from effexport.base.formatting import listed
from effexport.base.runtimes import CPU, CUDA, RUNTIME_OF_PROVIDER
from effexport.base.spec import BuildSpec, is_optional
from effexport.base.version import __version__
from effexport.export.onnx_graph import external_files
from effexport.plugins.building.library import CUDA_NAME, LIBRARY_NAME
from effexport.proof.cases import load_reference
from effexport.proof.inputs import EXPORT, REFERENCE_SEED_OFFSET, case_inputs
from effexport.render.formats import escaped, template_environment
from effexport.runners.options import RunOptions
from effexport.runners.ort.kernels import library_for
from effexport.serving.engine.queue import rows_of, why_not_joined
from effexport.serving.engine.signature import ANSWER, CONTEXT, GENERATION, STRING, TEXT, PackagedSignature, triton_type
from effexport.serving.triton.repository import Content
from effexport.serving.triton.spec import BACKENDS, DEFAULT_MAX_BATCH, DEFAULT_SESSIONS, BackendName, PackageSpec
from effexport.tasks.fast_tokenizer import tokenizer_from_artifact
from effexport.tasks.task import Task, Tokenizer
from effexport.tasks.tasks import task_from_artifact
from effexport.tasks.text_generator import check_generates
from effexport.tensorrt.sidecar import EngineInfo, read_sidecar
from effexport.tensorrt.spec import Profiles

if TYPE_CHECKING:
    import jinja2


@dataclass(frozen=True)
class Backend:
    """An artifact as a model of Triton: the backend that serves it, and the options that it was packaged with.

    files: contents of the folder of a version. engine: description of the engine, for the backend tensorrt. example:
    texts of a request, by input; {} for a model of tensors only. generates: whether the model continues texts, instead
    of answering tensors and texts.
    """

    artifact: Artifact
    spec: PackageSpec
    name: BackendName
    kind: Literal["cpu", "gpu"]
    files: Content
    engine: EngineInfo | None = None
    example: Mapping[str, str] = field(default_factory=dict)
    generates: bool = False

    @property
    def title(self) -> str:
        return f"{self.artifact.spec.model.title}, {self.artifact.spec.precision}"

    @functools.cached_property
    def batching(self) -> Batching:
        """Raises UserError as `batching_of`."""
        return Batching(0) if self.generates else batching_of(self.artifact.spec, self.spec, self.engine)

    @property
    def signature(self) -> PackagedSignature:
        if self.generates:
            return GENERATION
        inputs, outputs = self.artifact.spec.inputs, self.artifact.spec.outputs
        if not self.example:
            # effexport's runner has defaults for missing inputs; other backends need every input of the graph
            optional = [tensor for tensor in inputs if self.name == "python" and is_optional(tensor)]
            return PackagedSignature(inputs, outputs, frozenset(tensor.name for tensor in optional))
        # also a text for each row of a batch, in place of the tensors, and its answer
        dims = ("batch", 1) if self.batching.max_batch else ("batch",)
        text, context, answer = (TensorInfo(name, STRING, dims) for name in (TEXT, CONTEXT, ANSWER))
        inputs = (*inputs, text, context)
        return PackagedSignature(inputs, (*outputs, answer), frozenset(tensor.name for tensor in inputs))

    @functools.cached_property
    def warm_ups(self) -> tuple[Mapping[str, Array], ...]:
        """Batches of 1, and on a GPU also of the preferred sizes, for which it chooses memory and kernels."""
        if self.generates or not self.spec.warm_up:
            return ()
        preferred = self.batching.preferred if self.kind == "gpu" else ()
        sizes = tuple(sorted({1, *preferred})) if self.batching.max_batch else (0,)
        return warm_ups(self.artifact, sizes, self.engine)

    @property
    def parameters(self) -> dict[str, int]:
        """Settings that the backend reads: of ONNX Runtime, and of generated texts."""
        threads = self.spec.threads or 0
        if self.name != "python":
            return {"intra_op_thread_count": threads} if self.name == "onnxruntime" and threads else {}
        if not self.generates:
            return {"threads": threads}
        sessions = self.spec.max_batch or DEFAULT_SESSIONS
        return {"threads": threads, "sessions": sessions, "max_queue": self.spec.max_queue}

    def config(self, model: str, version: int) -> bytes:
        """The contents of config.pbtxt, which names the kernel library by its path on the server."""
        named = LIBRARY_NAME in self.files and self.name != "python"
        library = f"{self.spec.server_path.rstrip('/')}/{model}/{version}/{LIBRARY_NAME}" if named else ""
        values = {"model": model, "backend": self, "library": library, "release": __version__}
        return render("config.pbtxt.j2", values).encode()


PLAN = "model.plan"


def choose_backends(artifact: Artifact, spec: PackageSpec) -> tuple[tuple[Backend, ...], tuple[str, ...]]:
    """The requested backends, or all that the artifact has files for; and why the others cannot be used.

    The backend python gets a second model for an artifact that generates text.

    Raises UserError if a requested backend cannot run the artifact.
    """
    chosen, remarks = [], []
    for name in [one for one in BACKENDS if one in (spec.backends or BACKENDS)]:
        try:
            chosen.append(MAKERS[name](artifact, spec))
        except UserError as error:
            if spec.backends:
                raise
            remarks.append(f"no model for the backend {name}: {error}")
    if not chosen:
        raise UserError(f"no backend of Triton can run {artifact.path}: {'; '.join(remarks)}")
    python = next((backend for backend in chosen if backend.name == "python"), None)
    if python is not None and artifact.spec.has_decode_step:
        try:
            check_generates(artifact)
            tokenizer_from_artifact(artifact)
            chosen.append(replace(python, example={}, generates=True))
        except UserError as error:
            remarks.append(f"no model that generates text: {error}")
    return tuple(chosen), tuple(remarks)


def onnxruntime_backend(artifact: Artifact, spec: PackageSpec) -> Backend:
    model = artifact.model_path
    kind = spec.kind or "cpu"
    if artifact.spec.arithmetic == "bf16" and kind == "cpu":
        raise UserError(
            "ONNX Runtime does not support bfloat16 on the CPU; expected --kind gpu, or a build with fp32 or fp16"
        )
    library = kernel_library(artifact, spec, kind)
    # the model names the files of its weights as they lie beside it
    weights = {path.relative_to(model.parent).as_posix(): path for path in external_files(model)}
    if taken := weights.keys() & {model.name, *library}:
        raise UserError(f"{model} keeps its weights in {min(taken)}, which is another file in Triton; build it again")
    files: dict[str, bytes | Path] = {model.name: model, **weights}
    return Backend(artifact, spec, "onnxruntime", kind, files | library)


def python_backend(artifact: Artifact, spec: PackageSpec) -> Backend:
    if artifact.spec.arithmetic == "bf16":
        raise UserError(
            "Triton's Python backend uses NumPy arrays, which do not support bfloat16; build with fp32 or fp16"
        )
    try:
        example = example_request(task_from_artifact(artifact), tokenizer_from_artifact(artifact))
    except UserError:  # an artifact without a tokenizer, or whose outputs answer no text
        example = {}
    kind = spec.kind or "cpu"
    files: dict[str, bytes | Path] = {
        f"artifact/{name}": artifact.path / name for name in (MANIFEST, *artifact.manifest.files)
    }
    files["model.py"] = Path(__file__).with_name("model.py")
    files["effexport.zip"] = zip_of_effexport()
    return Backend(artifact, spec, "python", kind, files | kernel_library(artifact, spec, kind), example=example)


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
    return Backend(artifact, spec, "tensorrt", "gpu", {PLAN: engine}, engine=read_sidecar(engine))


MAKERS: dict[str, Callable[[Artifact, PackageSpec], Backend]] = {
    "onnxruntime": onnxruntime_backend,
    "python": python_backend,
    "tensorrt": tensorrt_backend,
}


def kernel_library(artifact: Artifact, spec: PackageSpec, kind: str) -> dict[str, bytes | Path]:
    """The kernel library of this machine, and for a GPU its CUDA kernels, which it finds beside itself; empty if
    function bodies are to run. Warns if kernels are missing."""
    settings = RunOptions(
        runtime=RUNTIME_OF_PROVIDER[CUDA if kind == "gpu" else CPU].name, implementation=spec.implementation
    )
    library = library_for(sorted(artifact.manifest.custom_ops), settings)
    if library is None:
        return {}
    # one that EFFEXPORT_LIBRARY names has no record, and its CUDA kernels beside it
    cuda = library.cuda.path if library.cuda else library.path.with_name(CUDA_NAME)
    is_there = kind == "gpu" and cuda.name == CUDA_NAME and cuda.is_file()
    return {LIBRARY_NAME: library.path, **({CUDA_NAME: cuda} if is_there else {})}


@functools.cache
def zip_of_effexport() -> bytes:
    """A zip archive of the Python files of effexport; the same files give the same bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, path in sorted(python_files().items()):
            entry = zipfile.ZipInfo(name)  # always dated 1980
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def python_files() -> dict[str, Path]:
    """Path within the package → file. In an editable installation, `models` and `plugins` are in other folders."""
    files: dict[str, Path] = {}
    for package in ("effexport", "effexport.models", "effexport.plugins"):
        folder = Path(str(importlib.import_module(package).__file__)).parent
        for path in folder.rglob("*.py"):
            files[f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}"] = path
    return files


@dataclass(frozen=True)
class Batching:
    """Dynamic batching of Triton. max_batch: 0 if every request runs on its own, whatever its first dimension.

    preferred: batch sizes that run without further waiting. reason: why requests are not batched.
    """

    max_batch: int
    preferred: tuple[int, ...] = ()
    reason: str = ""


def batching_of(build: BuildSpec, spec: PackageSpec, engine: EngineInfo | None = None) -> Batching:
    """Raises UserError for options that the model or its engine does not allow."""
    asked = spec.max_batch is not None or bool(spec.preferred_batch)
    if reason := why_not_joined(build):
        if asked:
            raise UserError(
                f"requests to this model cannot be batched, because that would change their answers ({reason}); leave "
                "out --max-batch and --preferred-batch. A request may still contain several samples"
            )
        return Batching(0, reason=reason)
    largest = spec.max_batch or DEFAULT_MAX_BATCH
    if engine is not None:
        largest = batch_of_engine(engine, spec, largest)
        if largest == 0:
            return Batching(0, reason="the engine does not accept a batch of one, which Triton may send")
    # by default full batches, and half of one: waiting for the last request of a batch costs more than it gains
    preferred = spec.preferred_batch or sorted({size for size in (largest // 2, largest) if size > 1})
    return Batching(largest, tuple(size for size in preferred if size <= largest))


def batch_of_engine(engine: EngineInfo, spec: PackageSpec, largest: int) -> int:
    """The largest batch that a profile of the engine allows; 0 if none accepts a single sample."""
    # smallest, optimal and largest shape of the first input, by profile
    shapes = [next(iter(profile.values())) for profile in engine.profiles]
    limit = max((largest_shape[0] for smallest, _, largest_shape in shapes if smallest[0] == 1), default=0)
    if limit and (spec.max_batch or 0) > limit:
        raise UserError(
            f"--max-batch is {spec.max_batch}, and the engine was built for batches of at most {limit}; lower it, or "
            f"build the engine with --profile batch=1:{spec.max_batch}:{spec.max_batch}"
        )
    return min(largest, limit)


# Larger batches are not warmed up, because their files would be larger than the model.
LARGEST_BYTES = 64_000_000


def warm_ups(artifact: Artifact, sizes: tuple[int, ...], engine: EngineInfo | None) -> tuple[Mapping[str, Array], ...]:
    """The inputs of one request per batch size at the exported length, if the engine accepts them.

    sizes: 0 stands for the golden batch as it is.
    """
    golden, found = golden_inputs(artifact), []
    profiles = None if engine is None else Profiles(engine)
    for size in sizes:
        if size and size * sum(value[:1].nbytes for value in golden.values()) > LARGEST_BYTES:
            continue
        rows = np.arange(size) % rows_of(golden)
        inputs = {n: np.asarray(value[rows] if size else value, order="C") for n, value in golden.items()}
        shapes = {name: value.shape for name, value in inputs.items()}
        if profiles is None or profiles.index(profiles.sizes(shapes)) is not None:
            found.append(inputs)
    return tuple(found)


def warm_up_file(value: Array, name: str) -> str:
    """The file of an input in the model's folder `warmup`, named by its content."""
    return f"{name}-{'x'.join(map(str, value.shape))}-{hashlib.sha256(value.tobytes()).hexdigest()[:8]}.bin"


def golden_inputs(artifact: Artifact) -> Mapping[str, Array]:
    """The inputs of the case that has the shape of the export; drawn again if the golden file does not hold them."""
    stored = load_reference(artifact.reference_path) if artifact.has_golden else []
    found = next((case.inputs for case in stored if case.name == EXPORT), None)
    return found or case_inputs(artifact.spec, artifact.spec.seed + REFERENCE_SEED_OFFSET)[EXPORT]


def quoted(text: str) -> str:
    """A quoted string; bytes of its UTF-8 form that are not printable ASCII become octal escapes."""
    escapes = {ord("\\"): "\\\\", ord('"'): '\\"'}
    return '"' + "".join(escapes.get(b, chr(b) if 32 <= b < 127 else f"\\{b:03o}") for b in text.encode()) + '"'


def comment(text: str) -> str:
    """Lines of a comment."""
    return "\n".join(f"# {line}" for line in textwrap.wrap(text, 116, break_long_words=False))


def render(template: str, values: Mapping[str, Any]) -> str:
    """A file of a repository: Markdown, YAML, a Dockerfile or a configuration."""
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> jinja2.Environment:
    filters: dict[str, Callable[..., Any]] = {
        "listed": listed,
        "json": json.dumps,
        "escaped": escaped,
        "quoted": shlex.quote,
        "text": quoted,
        "comment": comment,
        "triton_type": triton_type,
        "rows": rows_of,
        "warm_up_file": warm_up_file,
    }
    environment = template_environment(["serving/triton"], filters)
    environment.autoescape = False  # `ModelRecord` has checked the names in them
    environment.keep_trailing_newline = True
    return environment
