"""config.pbtxt, the configuration of a model for Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from effexport.dtypes import TensorInfo
from effexport.plugins.building.library import LIBRARY_NAME
from effexport.triton.backend import Backend
from effexport.triton.batching import Batching
from effexport.triton.pbtxt import Message, Word, comment, text_from_message
from effexport.triton.signature import Signature, triton_type
from effexport.triton.spec import DEFAULT_SESSIONS, PackageSpec
from effexport.triton.warmup import WarmUp
from effexport.version import __version__

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
    signature: Signature
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
