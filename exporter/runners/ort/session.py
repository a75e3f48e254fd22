"""Opens sessions of ONNX Runtime: the provider, what runs custom operators, and what of a model leaves the GPU.

ONNX Runtime leaves nodes to the CPU that CUDA has no kernel for, and adds Memcpy nodes around them. A session does not
show these, but it can write its final graph. That keeps the weights in memory, so the graph comes from another session,
of a model without weights.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from effexport.base.errors import RuntimeUnsupportedError, UserError
from effexport.base.machine import Processor
from effexport.base.runtimes import CPU, CUDA, OPENVINO, ORT_RUNTIMES, RUNTIME_OF_PROVIDER, TENSORRT, TENSORRT_RTX
from effexport.base.spec import OPSETS
from effexport.export.onnx_graph import external_files, load_graph, node_types, value_types
from effexport.plugins.ops import DOMAIN
from effexport.runners.options import RunOptions
from effexport.runners.ort import import_onnxruntime
from effexport.runners.ort import providers as ort_providers
from effexport.runners.ort.kernels import (
    Kernels,
    assigned_nodes,
    assigned_ops,
    implementation_of,
    is_carrier,
    kernels_for,
    slower_on_cuda,
    warn,
)
from effexport.runners.ort.providers import check_provider, providers_from_settings
from effexport.tensorrt import ort_providers as ort_tensorrt

if TYPE_CHECKING:
    import onnx


EXTERNAL_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
# From ONNX Runtime 1.24 on, a session reports which provider runs which node; earlier releases ignore the key.
ASSIGNMENT_KEY = "session.record_ep_graph_assignment_info"
# Runs Q/DQ pairs as they are written.
KEEP_QDQ_KEY = "session.disable_quant_qdq"
# Without it, x86 CPUs that have no int8 dot products add two products in 16 bits, where large ones overflow. On those
# that have them, it takes the slower instructions all the same.
EXACT_INT8_KEY = "session.x64quantprecision"
# Rewrites of the graph that a session leaves out. On CPUs, onnxruntime's SkipLayerNormalization takes seven times as
# long as the Add and the LayerNormalization that it replaces (1.31).
LEFT_OUT_REWRITES_KEY, SLOW_ON_CPU = "optimization.disable_specified_optimizers", "SkipLayerNormFusion"
# Of the environment: "0" lets ONNX Runtime open models of opsets that it does not know yet.
ANY_OPSET = "ALLOW_RELEASED_ONNX_OPSET_ONLY"
# How the CUDA provider, and CUDA itself, refuse a device that no GPU has.
NO_SUCH_GPU = ("Invalid device ID", "invalid device ordinal")


@dataclass(frozen=True)
class OrtSession:
    """An open session. implementation: per custom operator of the model, and per operator that may stand for one,
    "kernel" or "body"."""

    inference: Any
    implementation: dict[str, Literal["kernel", "body"]]


def session_from_model(
    model: Path | bytes, settings: RunOptions, external_folder: Path | None = None, *, optimized: bool = True
) -> OrtSession:
    """Open a model: the path of a file, or the serialised model with the folder of its external data.

    optimized: see OrtRunner. Warns if an optimised model on CUDA leaves the GPU. Raises MissingExtraError without
    onnxruntime, UserError for a provider or kernels that are not available, or for a CUDA graph of a model that leaves
    the GPU, and RuntimeUnsupportedError if ONNX Runtime refuses the model.
    """
    ort = import_onnxruntime()
    providers = providers_from_settings(ort, settings)
    graph = without_weights(model) if settings.row.tensors == "cuda" else None
    options = session_options(ort, settings, external_folder)
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    kernels = kernels_of_model(model, graph, settings).register(options, settings)
    placement = None
    if settings.row.provider == CUDA and graph is not None and optimized:
        folder = model.parent.resolve() if isinstance(model, Path) else external_folder
        placement = Placement(ort, graph, kernels, settings, folder)
    if settings.row.provider == TENSORRT:
        external = external_files(model, external_folder)
        providers.insert(0, ort_tensorrt.provider_entry(ort, model, external, settings, kernels.ops))
    if settings.row.provider == TENSORRT_RTX:
        ort_providers.add_rtx(ort, options, model, external_files(model, external_folder), settings)
    try:
        inference = opened(ort, model, options, providers)
    except Exception as error:  # onnxruntime has no common base class for its errors
        if placement is not None and settings.cuda_graph:
            placement.check_capture()
        if any(text in str(error) for text in NO_SUCH_GPU):
            raise UserError(
                f"device is {settings.device}, and CUDA has no GPU of this number here; nvidia-smi -L lists them"
            ) from error
        if "only *guarantees* support for models stamped with official released onnx opset" in str(error):
            raise RuntimeUnsupportedError(
                f"ONNX Runtime {ort.__version__} refuses the model, because its opset is newer; set {ANY_OPSET}=0 in "
                "the environment: it then runs new operators by their function bodies"
            ) from error
        raise RuntimeUnsupportedError(f"ONNX Runtime {ort.__version__} refuses the model: {error}") from error
    check_provider(inference, settings)
    assigned = assigned_ops(inference)
    if settings.row.tensorrt and assigned is not None:
        ort_tensorrt.check_share(settings, assigned, kernels.ops)
    if settings.row.provider == OPENVINO and assigned is not None and not assigned.get(OPENVINO):
        raise UserError(
            f"OpenVINO took no node of the model, which would run on {', '.join(assigned)}; use --runtime ort"
        )
    if placement is not None and assigned is not None and assigned.get(CPU):
        placement.check()
    return OrtSession(inference, implementation_of(inference, kernels, settings))


def opened(ort: Any, source: Path | bytes, options: Any, providers: list[Any]) -> Any:
    """An InferenceSession. Raises what onnxruntime raises."""
    try:
        # by default, if a provider fails, onnxruntime prints a note and continues with the next one
        return ort.InferenceSession(source, options, providers=providers, enable_fallback=0)
    except Exception as error:
        if "float8" in str(error):
            # onnxruntime makes integer products of Q/DQ pairs in float8, and then refuses them (1.31)
            options.add_session_config_entry(KEEP_QDQ_KEY, "1")
        elif "replace the existing tensor" in str(error):
            # for exact int8 products, onnxruntime makes unsigned weights: for each product, under one name (1.31)
            if isinstance(source, Path):
                options.add_session_config_entry(EXTERNAL_FOLDER_KEY, str(source.parent.resolve()))
            source = with_own_weights(source)
        else:
            raise
    return ort.InferenceSession(source, options, providers=providers, enable_fallback=0)


def with_own_weights(model: Path | bytes) -> bytes:
    """A model in which no two nodes of the main graph read one int8 initializer: each but the first reads a copy.

    Copies of external data are references to the same place of the file. Raises UserError as `load_graph` does.
    """
    from onnx import TensorProto

    proto = proto_of(model)
    int8 = {tensor.name: tensor for tensor in proto.graph.initializer if tensor.data_type == TensorProto.INT8}
    readers = Counter[str]()
    for node in proto.graph.node:
        for position, name in enumerate(node.input):
            if name in int8:
                if readers[name]:
                    copy = proto.graph.initializer.add()
                    copy.CopyFrom(int8[name])
                    copy.name = node.input[position] = f"{name}.effexport.{readers[name]}"
                readers[name] += 1
    return bytes(proto.SerializeToString())


def without_weights(model: Path | bytes) -> onnx.ModelProto:
    """The graph of a model, as `remove_weights` leaves it. Raises UserError for a file that is not a model."""
    proto = proto_of(model)
    remove_weights(proto)
    return proto


def proto_of(model: Path | bytes) -> onnx.ModelProto:
    """A model without its external data. Raises UserError for a file that is not a model."""
    from onnx import ModelProto

    return load_graph(model) if isinstance(model, Path) else ModelProto.FromString(model)


def kernels_of_model(model: Path | bytes, graph: onnx.ModelProto | None, settings: RunOptions) -> Kernels:
    """The kernels that a model is to run with. graph: that of `without_weights`, where a GPU runs the model.

    Warns and raises as `library_for` does.
    """
    slow = slower_on_cuda(graph, value_types) if graph is not None else ()
    types = node_types(model)
    kernels = kernels_for(sorted(op for domain, op in types if domain == DOMAIN), slow, settings)
    return replace(kernels, carriers=tuple(sorted(one for one in types if is_carrier(*one))))


@dataclass(frozen=True)
class Placement:
    """Shows what leaves the GPU in a model, with a session of the same model without its weights.

    folder: of the model's external data.
    """

    ort: Any
    graph: onnx.ModelProto
    kernels: Kernels
    settings: RunOptions
    folder: Path | None

    def found(self) -> list[str]:
        """Nodes on the CPU and copies between devices, as `off_the_gpu` words them. Raises what ONNX Runtime raises."""
        from onnx import load

        settings = replace(self.settings, cuda_graph=False)
        options = session_options(self.ort, settings, self.folder)
        self.kernels.register(options, settings)
        providers = providers_from_settings(self.ort, settings)
        with tempfile.TemporaryDirectory(prefix="effexport-placement-") as temporary:
            path = Path(temporary) / "model.onnx"
            options.optimized_model_filepath = str(path)
            model = self.graph.SerializeToString()
            inference = self.ort.InferenceSession(model, options, providers=providers, enable_fallback=0)
            final = load(str(path), load_external_data=False).graph
        return off_the_gpu(final, assigned_nodes(inference, CPU))

    def check_capture(self) -> None:
        """Raises UserError if a model that ONNX Runtime refuses with a CUDA graph leaves the GPU, and names where."""
        try:
            found = self.found()
        except Exception:  # it is refused without a CUDA graph, too: the caller's error says why
            return
        if found:
            raise UserError(
                f"cuda_graph needs a model that stays on the GPU, but {listed(found)}; leave cuda_graph out"
            )

    def check(self) -> None:
        """Warns if a model leaves the GPU, and names where."""
        try:
            found = self.found()
        except Exception as error:  # the model itself is open, so this must not stop it
            warn(f"whether this model leaves the GPU is not known: without its weights, it does not open: {error}")
            return
        if found:
            warn(f"this model leaves the GPU in every run, and the GPU waits each time: {listed(found)}")


def check_settings(settings: RunOptions, opset: int = OPSETS.start) -> None:
    """Check, before a build, that sessions can start here: a model of one node is opened where a GPU is needed, and for
    an opset that only a carrier needs.

    Raises MissingExtraError and UserError as `session_from_model` does.
    """
    if settings.runtime not in ORT_RUNTIMES:
        expected = ", ".join(ORT_RUNTIMES)
        raise UserError(f"the runtime is {settings.runtime!r}; a build is checked in ONNX Runtime: {expected}")
    ort = import_onnxruntime()
    providers_from_settings(ort, settings)
    if settings.row.tensors == "cuda" or opset not in OPSETS:
        from onnx import TensorProto, helper

        info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
        graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "one node", info[:1], info[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        provider = CUDA if settings.row.tensors == "cuda" else CPU
        session_from_model(
            model.SerializeToString(), RunOptions(runtime=RUNTIME_OF_PROVIDER[provider].name, device=settings.device)
        )


def session_options(ort: Any, settings: RunOptions, external_folder: Path | None) -> Any:
    options = ort.SessionOptions()
    # on the CPU, exceptions say all that the log says; other providers only log why they do not start
    options.log_severity_level = 4 if settings.row.provider == CPU else 3
    options.add_session_config_entry(ASSIGNMENT_KEY, "1")
    if not Processor.here().has_int8_products:
        options.add_session_config_entry(EXACT_INT8_KEY, "1")
    if settings.row.provider == CPU:
        options.add_session_config_entry(LEFT_OUT_REWRITES_KEY, SLOW_ON_CPU)
    options.enable_cpu_mem_arena = settings.memory_arena
    if settings.threads is not None:
        options.intra_op_num_threads = settings.threads
    if external_folder is not None:
        options.add_session_config_entry(EXTERNAL_FOLDER_KEY, str(external_folder))
    if settings.row.provider == CUDA and ort_providers.is_cuda_plugin(ort):
        ort_providers.add_cuda(ort, options, settings)
    return options


# Larger initializers are weights. Smaller ones may be constants that decide how ONNX Runtime rewrites the graph.
LARGEST_CONSTANT = 1024
# How many nodes and copies a message names.
NAMED = 5
# Stands for a weight: no rewriting of ONNX Runtime computes it in advance, and no exported graph has any.
WEIGHT = "RandomUniform"
# onnx.TensorProto.FLOAT, FLOAT16 and BFLOAT16
_FLOATING = (1, 10, 16)
# They read the shape of a value, and not the value itself.
_OF_SHAPES = ("Shape", "Size")


def remove_weights(model: onnx.ModelProto) -> None:
    """Replace the large floating-point initializers of a model by nodes that would make values of their types.

    Not by inputs: ONNX Runtime moves some nodes that read inputs to the CPU, but not if they read weights instead.
    """
    from onnx import NodeProto, TensorProto, helper

    graph = model.graph
    fixed = {value.name for value in (*graph.input, *graph.output)}  # old files list weights as inputs too
    kept, makers = [], list[NodeProto]()
    for tensor in graph.initializer:
        name, dims = tensor.name, tensor.dims
        if tensor.data_type not in _FLOATING or math.prod(dims) <= LARGEST_CONSTANT or name in fixed:
            kept.append(TensorProto.FromString(tensor.SerializeToString()))
        else:  # not every provider makes random values in half precision
            makers.append(helper.make_node(WEIGHT, [], [f"{name} in float32"], shape=dims))
            makers.append(helper.make_node("Cast", [f"{name} in float32"], [name], to=tensor.data_type))
    nodes = [*makers, *(NodeProto.FromString(node.SerializeToString()) for node in graph.node)]
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(kept)
    graph.node.extend(nodes)


def off_the_gpu(graph: onnx.GraphProto, on_cpu: Collection[str]) -> list[str]:
    """Work of a final graph of ONNX Runtime outside the GPU, apart from arithmetic on shapes: one phrase for each
    node on the CPU and for each copy between the CPU and the GPU.

    on_cpu: names of the nodes that were assigned to the CPU.
    """
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    writers: dict[str, onnx.NodeProto] = {}
    computed = {value.name for value in graph.input}  # values that depend on more than shapes
    found = []
    for node in graph.node:  # in topological order
        for name in node.input:
            readers[name].append(node)
        writers |= dict.fromkeys(node.output, node)
        if node.op_type in _OF_SHAPES or (node.op_type != WEIGHT and computed.isdisjoint(node.input)):
            continue
        computed.update(node.output)
        if node.name in on_cpu:
            found.append(f"{text_of(node)} runs on the CPU")
    for node in graph.node:
        if node.op_type == "MemcpyToHost":
            to = ", ".join(map(text_of, readers[node.output[0]])) or "an output of the model"
            found.append(f"{node.input[0]!r} is copied to the CPU for {to}")
        elif node.op_type == "MemcpyFromHost":
            writer = writers.get(node.input[0])
            found.append(f"{node.input[0]!r} is copied to the GPU" + (f" from {text_of(writer)}" if writer else ""))
    return found


def text_of(node: onnx.NodeProto) -> str:
    """A node in a message; one without a name by its first output."""
    return f"{node.op_type} {node.name or node.output[0]!r}"


def listed(found: Collection[str]) -> str:
    """The first few phrases, and how many more there are."""
    more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return "; ".join(list(found)[:NAMED]) + more
