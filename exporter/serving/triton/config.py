"""config.pbtxt, the configuration of a model for Triton."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.artifact import Artifact
from effexport.dtypes import TensorInfo
from effexport.errors import UserError
from effexport.plugins.building.library import LIBRARY_NAME
from effexport.proof.cases import load_reference
from effexport.proof.inputs import EXPORT, REFERENCE_SEED_OFFSET, case_inputs
from effexport.runners.joining import rows_of
from effexport.serving.engine.signature import PackagedSignature, triton_type
from effexport.serving.triton.backends import Backend
from effexport.serving.triton.spec import DEFAULT_MAX_BATCH, DEFAULT_SESSIONS, PackageSpec
from effexport.spec import BuildSpec
from effexport.tensorrt.sidecar import EngineInfo
from effexport.version import __version__

if TYPE_CHECKING:
    from effexport.dtypes import Array


INDENT = "  "


class Word(str):
    """A value of an enumeration, which is written without quotes."""

    __slots__ = ()


# The fields of a message in order; a value is text, a number, a bool, a Word, a tuple of these, or a message. A
# repeated field has one entry for each value.
Message = list[tuple[str, Any]]


def text_from_message(message: Message) -> str:
    return "\n".join(lines_of(message)) + "\n"


def lines_of(message: Message, indent: str = "") -> Iterator[str]:
    for name, value in message:
        if isinstance(value, list) and value:
            yield f"{indent}{name} {{"
            yield from lines_of(value, indent + INDENT)
            yield f"{indent}}}"
        elif isinstance(value, list):
            yield f"{indent}{name} {{ }}"
        else:
            yield f"{indent}{name}: {text_of(value)}"


def text_of(value: object) -> str:
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(text_of, value))}]"
    return str(value)


def quoted(text: str) -> str:
    """A quoted string; bytes of its UTF-8 form that are not printable ASCII become octal escapes."""
    escapes = {ord("\\"): "\\\\", ord('"'): '\\"'}
    return '"' + "".join(escapes.get(b, chr(b) if 32 <= b < 127 else f"\\{b:03o}") for b in text.encode()) + '"'


def comment(text: str, width: int = 116) -> str:
    """Lines of a comment."""
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, width, break_long_words=False))


@dataclass(frozen=True)
class Batching:
    """Dynamic batching of Triton. max_batch: 0 if every request runs on its own, whatever its first dimension.

    preferred: batch sizes that run without further waiting. reason: why requests are not batched.
    """

    max_batch: int
    preferred: tuple[int, ...] = ()
    reason: str = ""

    @property
    def is_dynamic(self) -> bool:
        return self.max_batch > 1


def batching_of(build: BuildSpec, spec: PackageSpec, engine: EngineInfo | None = None) -> Batching:
    """Raises UserError for options that the model or its engine does not allow."""
    asked = spec.max_batch is not None or bool(spec.preferred_batch)
    reason = build.model.why_samples_mix
    if reason:
        if asked:
            raise UserError(
                f"the results of this model depend on the rest of the batch ({reason}), so batching requests would "
                "change their answers; leave out --max-batch and --preferred-batch. A request may still contain "
                "several samples"
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


@dataclass(frozen=True)
class WarmUp:
    """A warm-up request. files: the file of each input in the model's folder `warmup`, named by its content."""

    inputs: dict[str, Array]

    @property
    def batch(self) -> int:
        return rows_of(self.inputs)

    @property
    def files(self) -> dict[str, str]:
        return {
            name: f"{name}-{'x'.join(map(str, value.shape))}-{hashlib.sha256(value.tobytes()).hexdigest()[:8]}.bin"
            for name, value in self.inputs.items()
        }


def warm_ups(artifact: Artifact, sizes: tuple[int, ...], engine: EngineInfo | None = None) -> tuple[WarmUp, ...]:
    """One request per batch size at the exported length, except those that the engine does not accept.

    sizes: 0 stands for the golden batch as it is.
    """
    golden = golden_inputs(artifact)
    if any(tensor.dims[:1] != ("batch",) for tensor in artifact.spec.inputs):
        sizes = (0,)  # the rows of such a model are not samples
    found = []
    for size in sizes:
        count = rows_of(golden)
        if size and size * sum(value[:1].nbytes for value in golden.values()) > LARGEST_BYTES:
            continue
        rows = np.arange(size) % count
        inputs = {n: np.asarray(value[rows] if size else value, order="C") for n, value in golden.items()}
        if engine is None or any(accepts(profile, inputs) for profile in engine.profiles):
            found.append(WarmUp(inputs))
    return tuple(found)


def golden_inputs(artifact: Artifact) -> Mapping[str, Array]:
    """The inputs of the case that has the shape of the export; drawn again if the golden file does not hold them."""
    stored = load_reference(artifact.reference_path) if artifact.has_golden else []
    found = next((case.inputs for case in stored if case.name == EXPORT), None)
    return found or case_inputs(artifact.spec, artifact.spec.seed + REFERENCE_SEED_OFFSET)[EXPORT]


def accepts(profile: Mapping[str, Sequence[Sequence[int]]], inputs: dict[str, Array]) -> bool:
    """True if every input is between the smallest and the largest shape of a profile."""
    return all(
        low <= size <= high
        for name, value in inputs.items()
        for low, size, high in zip(profile[name][0], value.shape, profile[name][2], strict=True)
    )


BEGINNINGS: dict[str, Message] = {
    "onnxruntime": [("backend", "onnxruntime"), ("default_model_filename", "model.onnx")],
    "python": [("backend", "python"), ("default_model_filename", "model.py")],
    "tensorrt": [("platform", "tensorrt_plan"), ("default_model_filename", "model.plan")],
}


@dataclass(frozen=True)
class ModelConfig:
    """The contents of config.pbtxt."""

    name: str
    title: str
    backend: Backend
    signature: PackagedSignature
    batching: Batching
    warm_ups: Sequence[WarmUp]
    spec: PackageSpec
    version: int


def text_from_config(config: ModelConfig) -> str:
    message: Message = [
        ("name", config.name),
        *BEGINNINGS[config.backend.name],
        ("max_batch_size", config.batching.max_batch),
        *([("model_transaction_policy", [("decoupled", True)])] if config.backend.generates else []),
        *[("input", input_message(config, tensor)) for tensor in config.signature.inputs],
        *[("output", tensor_message(config, tensor)) for tensor in config.signature.outputs],
        *batching_message(config),
        ("instance_group", instance_message(config)),
        ("version_policy", [("latest", [("num_versions", config.spec.live_versions)])]),
        *runtime_message(config),
        *[("model_warmup", warm_up_message(config, warm_up)) for warm_up in config.warm_ups],
    ]
    return header(config) + text_from_message(message)


def header(config: ModelConfig) -> str:
    text = comment(f"{config.title}, written by effexport {__version__} from the manifest of its artifact.")
    if config.backend.generates:
        text += "#\n" + comment(
            "Generates text, for use with Triton's generate and generate_stream. The texts of concurrent requests grow "
            "together, one token of each in a step of the model; parameter sessions: how many at most."
        )
    elif config.batching.reason:
        text += "#\n" + comment(
            f"No dynamic batching: results depend on the rest of the batch ({config.batching.reason}). Every request "
            "runs on its own; its first dimension is the batch that the client chose."
        )
    elif config.batching.is_dynamic:
        text += "#\n" + comment(
            "Dynamic batching: results depend neither on the rest of the batch nor on padding, as the report of the "
            "artifact proves. Requests of the same shape are batched."
        )
    return text + "\n"


def input_message(config: ModelConfig, tensor: TensorInfo) -> Message:
    message = tensor_message(config, tensor)
    return [*message, ("optional", True)] if tensor.name in config.signature.optional else message


def tensor_message(config: ModelConfig, tensor: TensorInfo) -> Message:
    """An input or output. If Triton batches requests, its dims are without the batch dimension."""
    dims = tensor.dims[1:] if config.batching.max_batch else tensor.dims
    return [
        ("name", tensor.name),
        ("data_type", Word(triton_type(tensor.dtype))),
        ("dims", tuple(dim if isinstance(dim, int) else -1 for dim in dims)),
    ]


def batching_message(config: ModelConfig) -> Message:
    if not config.batching.is_dynamic:
        return []
    message: Message = []
    if config.batching.preferred:
        message.append(("preferred_batch_size", config.batching.preferred))
    message.append(("max_queue_delay_microseconds", config.spec.queue_delay_us))
    if config.spec.max_queue:
        message.append(("default_queue_policy", [("max_queue_size", config.spec.max_queue)]))
    return [("dynamic_batching", message)]


def instance_message(config: ModelConfig) -> Message:
    message: Message = [
        ("count", config.spec.instances),
        ("kind", Word("KIND_GPU" if config.backend.kind == "gpu" else "KIND_CPU")),
    ]
    profiles = len(config.backend.engine.profiles) if config.backend.engine else 0
    # by default, the backend loads only the first profile
    return message + [("profile", str(i)) for i in range(profiles) if profiles > 1]


def runtime_message(config: ModelConfig) -> Message:
    """The settings of ONNX Runtime: kernel library and threads."""
    backend, threads = config.backend, config.spec.threads
    if backend.name == "python":
        values = {"threads": threads or 0}
        if backend.generates:
            values |= {"sessions": config.spec.max_batch or DEFAULT_SESSIONS, "max_queue": config.spec.max_queue}
        return [parameter(name, str(value)) for name, value in values.items()]
    message: Message = []
    if backend.library:
        path = f"{config.spec.server_path.rstrip('/')}/{config.name}/{config.version}/{LIBRARY_NAME}"
        message.append(("model_operations", [("op_library_filename", path)]))
    if backend.name == "onnxruntime" and threads:
        message.append(parameter("intra_op_thread_count", str(threads)))
    return message


def parameter(key: str, value: str) -> tuple[str, Message]:
    return "parameters", [("key", key), ("value", [("string_value", value)])]


def warm_up_message(config: ModelConfig, warm_up: WarmUp) -> Message:
    message: Message = [
        ("name", f"golden inputs, batch of {warm_up.batch}"),
        # if Triton does not batch requests, the batch is one of the dims
        ("batch_size", warm_up.batch if config.batching.max_batch else 1),
    ]
    dtypes = {tensor.name: tensor.dtype for tensor in config.signature.inputs}
    for name, value in warm_up.inputs.items():
        dims = value.shape[1:] if config.batching.max_batch else value.shape
        entry: Message = [
            ("data_type", Word(triton_type(dtypes[name]))),
            ("dims", tuple(dims)),
            ("input_data_file", warm_up.files[name]),
        ]
        message.append(("inputs", [("key", name), ("value", entry)]))
    return message
