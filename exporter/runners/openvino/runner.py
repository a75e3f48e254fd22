"""Compiles ONNX files in OpenVINO, with bodies in place of custom operators, and runs them.

Places of tokens stay exact where OpenVINO computes in bfloat16, which has every integer only up to 256.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from effexport.base.errors import (
    EffexportError,
    MissingExtraError,
    RuntimeFailedError,
    RuntimeUnsupportedError,
    UserError,
)
from effexport.base.runtimes import BFLOAT16_RUNTIME
from effexport.export.custom_nodes import inlined
from effexport.export.onnx_graph import (
    all_nodes,
    custom_ops_of_model,
    external_sizes,
    graph_tensors,
    load_graph,
    value_types,
)
from effexport.plugins.function_body import LARGEST_FILL
from effexport.runners.options import RunOptions
from effexport.runners.runner import CheckedRunner, FeedLimits, check_bound_feeds, signature_of

if TYPE_CHECKING:
    import onnx

    from effexport.base.dtypes import Array, TensorInfo


# ONNX has them for integers too, and they make integers of integers.
EXACT = (
    *("Add", "Cast", "Concat", "Expand", "Gather", "Identity", "MatMul", "Mul", "Pad", "ReduceSum", "Reshape"),
    *("Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"),
)
# Behind the last of these, OpenVINO computes in float32 whatever an output is made of.
ROUNDED = ("Attention", "Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN", "Resize")
PERIODIC = ("Cos", "Sin")
FLOATS = ("float64", "float32", "float16", "bfloat16")
INDICES = ("int32", "int64")


def keep_places(model: onnx.ModelProto) -> None:
    """Let indices, sizes and angles of positions be computed without bfloat16. The model has no functions.

    Function bodies count tokens in float32, by sums and by products with triangles of ones. These become sums and
    products of int32, which OpenVINO does not round. Other numbers that become indices, and sines and cosines of
    positions, become outputs that nobody reads.
    Raises UserError for an index, and for an angle of positions, that is made of products in bfloat16.
    """
    Places(model).keep()


class Places:
    """The graph of a model, and the values of int32 that stand for floating-point ones."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph, self.types = model.graph, value_types(model)
        self.producers = {output: node for node in self.graph.node for output in node.output}
        self.constants = {tensor.name: tensor for tensor in self.graph.initializer}
        nodes = (node for node in self.graph.node if node.op_type == "Constant")
        self.constants |= {node.output[0]: node.attribute[0].t for node in nodes if node.attribute[0].name == "value"}
        # by the value that they stand for: a name, "" if there is none, and the node that computes it
        self.integers: dict[str, str] = {}
        self.nodes: dict[str, onnx.NodeProto] = {}

    def keep(self) -> None:
        for node in self.graph.node:
            if node.op_type == "Cast" and self.is_float(node.input[0]) and self.dtype(node.output[0]) in INDICES:
                if integer := self.integer(node.input[0]):
                    node.input[0] = integer
                else:
                    self.compute_in_float32(node)
            elif node.op_type in PERIODIC and self.is_of_positions(node):
                self.compute_in_float32(node)
        ordered = [each for node in self.graph.node for each in (node, self.nodes.get(node.output[0])) if each]
        del self.graph.node[:]
        self.graph.node.extend(ordered)

    def dtype(self, name: str) -> str:
        return self.types[name][0] if name in self.types else ""

    def is_float(self, name: str) -> bool:
        return self.dtype(name) in FLOATS

    def integer(self, name: str) -> str:
        """The value of int32 that equals a floating-point one; "" if there is none."""
        if name not in self.integers:
            new = f"{name}__int32"
            made = self.made_constant(name, new) if name in self.constants else self.made_node(name, new)
            self.integers[name] = new if made else ""
        return self.integers[name]

    def made_constant(self, name: str, new: str) -> bool:
        import onnx

        if self.constants[name].data_location == onnx.TensorProto.EXTERNAL:
            return False
        values = onnx.numpy_helper.to_array(self.constants[name])
        if not (np.abs(values) <= LARGEST_FILL).all() or (values % 1).any():
            return False
        self.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.int32), new))
        return True

    def made_node(self, name: str, new: str) -> bool:
        import onnx

        node = self.producers.get(name)
        if node is None or node.op_type not in EXACT:
            return False
        inputs = [self.integer(given) if self.is_float(given) else given for given in node.input]
        if any(given and not integer for given, integer in zip(node.input, inputs, strict=True)):
            return False
        made = onnx.NodeProto()
        made.CopyFrom(node)
        made.name, made.input[:], made.output[:] = new, inputs, [new]
        for attribute in made.attribute:
            if attribute.name == "to":
                attribute.i = onnx.TensorProto.INT32
        self.nodes[name] = made
        return True

    def compute_in_float32(self, node: onnx.NodeProto) -> None:
        """Make the result an output. Raises UserError if that is not enough."""
        import onnx

        for above in self.floats_above(node):
            if above.op_type == "MatMul" and self.is_outer(above):
                above.op_type = "Mul"  # the same product
            if above.op_type in ROUNDED:
                raise UserError(
                    f"--precision-hint bf16 does not apply to this model: {node.name or node.output[0]} computes an "
                    f"index or an angle of numbers that {above.name or above.op_type} rounds to bfloat16; leave it out"
                )
        name = node.output[0]
        if name not in [output.name for output in self.graph.output]:
            dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype(name)))
            self.graph.output.append(onnx.helper.make_tensor_value_info(name, dtype, None))

    def is_outer(self, product: onnx.NodeProto) -> bool:
        left, right = (self.types[name][1] if name in self.types else () for name in product.input)
        return len(left) > 1 and len(right) > 1 and (left[-1] == 1 or right[-2] == 1)

    def is_of_positions(self, node: onnx.NodeProto) -> bool:
        """True for numbers that depend on places in ranges of integers, and on no input and no embedding."""
        above = list(self.floats_above(node))
        inputs = {name for each in above for name in each.input if self.is_float(name)}
        made_of_others = inputs.intersection(tensor.name for tensor in self.graph.input)
        made_of_places = any(
            each.op_type == "Range" or (each.op_type == "Cast" and not self.is_float(each.input[0])) for each in above
        )
        return made_of_places and not made_of_others and all(each.op_type != "Gather" for each in above)

    def floats_above(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """The nodes that compute the floating-point numbers of which a node is made."""
        waiting, seen = list(node.input), set[str]()
        while waiting:
            name = waiting.pop()
            if name in self.producers and name not in seen and self.is_float(name):
                seen.add(name)
                yield self.producers[name]
                waiting += self.producers[name].input


DEVICE = "CPU"
BFLOAT16 = 16  # in onnx.TensorProto.DataType
# --precision-hint → OpenVINO's name of the element type that it computes in.
PRECISIONS: dict[str, str] = {"fp32": "f32", "bf16": "bf16"}
LONGEST_REASON = 300


def import_openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise MissingExtraError("openvino", BFLOAT16_RUNTIME.package.extra) from error
    return openvino


@functools.cache
def core_of(openvino: Any) -> Any:
    """The only Core of the process, which stays. Each Core sets an alternate stack for signals (OpenVINO 2026.4); if
    Cores end in another order than that of their creation, a freed stack stays in use, and the next signal that Python
    handles ends the process with SIGSEGV."""
    return openvino.Core()


def onnx_from_source(model: Path | bytes) -> onnx.ModelProto:
    """A model without its external data. model: path of the file, or the serialised model."""
    import onnx

    return onnx.ModelProto.FromString(model) if isinstance(model, bytes) else load_graph(model)


def compiled_model(proto: onnx.ModelProto, folder: Path | None, options: RunOptions) -> Any:
    """OpenVINO's compiled model. folder: of the external data, if there is any.

    Raises MissingExtraError without OpenVINO, UserError for a model without function bodies and for a precision that
    this CPU does not support or `keep_places` refuses, and RuntimeUnsupportedError if OpenVINO refuses the model.
    """
    core = core_of(import_openvino())
    check_precision(core, options.precision_hint)
    check_rounding(core, proto)
    properties: dict[str, Any] = {
        # OpenVINO would choose bfloat16 by itself where the CPU has it
        "INFERENCE_PRECISION_HINT": PRECISIONS[options.precision_hint or "fp32"],
        "PERFORMANCE_HINT": "LATENCY",
    }
    if options.threads is not None:
        properties["INFERENCE_NUM_THREADS"] = options.threads
    try:
        # weights are read while the model is compiled, and not later
        with tempfile.TemporaryDirectory(prefix="effexport-") as name:
            path = standard_file(proto, folder, Path(name), options.precision_hint)
            return core.compile_model(core.read_model(path), DEVICE, properties)
    except RuntimeError as error:
        raise RuntimeUnsupportedError(f"OpenVINO {version()} refuses the model: {reason_of(error)}") from error


def standard_file(proto: onnx.ModelProto, folder: Path | None, output: Path, precision_hint: str = "") -> Path:
    """Write a model into `output`, with standard operators only, beside its external data.

    OpenVINO does not know model-local functions, and does not follow symbolic links out of the model's folder.
    """
    for location in external_sizes(proto):
        (output / location).parent.mkdir(parents=True, exist_ok=True)
        source = ((folder or Path()) / location).resolve()
        try:
            os.link(source, output / location)
        except OSError:  # on another file system
            shutil.copyfile(source, output / location)
    path, standard = output / "model.onnx", inlined(proto)
    if precision_hint:
        keep_places(standard)
    path.write_bytes(standard.SerializeToString())
    return path


def version() -> str:
    """The release, such as 2026.4.1, without the name of the build."""
    return BFLOAT16_RUNTIME.package.version or "of unknown version"


def check_precision(core: Any, precision_hint: str) -> None:
    """Raises UserError for a precision that OpenVINO would emulate, or ignore, on this CPU."""
    capabilities = core.get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
    if precision_hint and precision_hint.upper() not in capabilities:
        raise UserError(
            f"--precision-hint {precision_hint}: OpenVINO {version()} computes on this CPU in "
            f"{', '.join(sorted(capabilities))}; leave it out, or use a CPU with AVX512-BF16 or AMX"
        )


@functools.cache
def rounds_to_bfloat16(core: Any) -> bool:
    """True if OpenVINO rounds float32 to the nearest bfloat16 on this CPU, in a model of one Cast and another back.
    Release 2026.4.1 rounds some down and others up where a size is free."""
    import ml_dtypes
    from onnx import TensorProto, helper

    casts = [
        helper.make_node("Cast", ["x"], ["rounded"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["rounded"], ["y"], to=TensorProto.FLOAT),
    ]
    x = 1 + np.arange(1024, dtype=np.float32) / 1024
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["size"]) for name in "xy"]
    model = helper.make_model(
        helper.make_graph(casts, "casts", values[:1], values[1:]), opset_imports=[helper.make_opsetid("", 20)]
    )
    properties = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(core.read_model(model.SerializeToString(), b""), DEVICE, properties)
    return np.array_equal(compiled([x])[0], x.astype(ml_dtypes.bfloat16).astype(np.float32))


def check_rounding(core: Any, model: onnx.ModelProto) -> None:
    """Raises UserError for linear layers in bfloat16 where OpenVINO does not round to it. In a graph that is bfloat16
    as a whole, this does not show."""
    is_whole = "bfloat16" in {tensor.dtype for tensor in graph_tensors(model.graph.output)}
    to = [a.i for node in all_nodes(model) if node.op_type == "Cast" for a in node.attribute if a.name == "to"]
    if BFLOAT16 in to and not is_whole and not rounds_to_bfloat16(core):
        raise UserError(
            f"this model rounds numbers to bfloat16, as linear layers of --precision bf16 do, and OpenVINO {version()} "
            "does not round to the nearest bfloat16 on this CPU; use --runtime ort, or build the model in fp32"
        )


def reason_of(error: RuntimeError) -> str:
    """The sentence that says why, on one line: OpenVINO puts places in its own sources around it."""
    lines = [line.strip() for line in str(error).splitlines()]
    words = [line for line in lines if line and not line.startswith(("Exception from ", "Check '", "FrontEnd API"))]
    reason = " ".join(words or lines)
    return reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} …"


class OpenVinoRunner(CheckedRunner):
    """Runs an ONNX model in OpenVINO, on the CPU. Thread-safe; use it as a context manager or call `close`.

    model: path of the file, or the serialised model together with the folder of its external data.
    implementation: "body" for every custom operator of the model.
    Raises MissingExtraError without openvino, UserError for a precision that this CPU does not support, and
    RuntimeUnsupportedError if OpenVINO refuses the model.
    """

    def __init__(
        self,
        model: Path | bytes,
        options: RunOptions | None = None,
        *,
        limits: FeedLimits | None = None,
        external_folder: Path | None = None,
    ) -> None:
        self.limits = limits or FeedLimits()
        proto = onnx_from_source(model)
        constants = {tensor.name for tensor in proto.graph.initializer}
        # OpenVINO forgets the names of dimensions
        self.inputs = graph_tensors([value for value in proto.graph.input if value.name not in constants])
        self.outputs = graph_tensors(proto.graph.output)
        self.implementation: dict[str, str] = dict.fromkeys(custom_ops_of_model(model), "body")
        folder = external_folder if isinstance(model, bytes) else model.parent
        self._compiled: Any = compiled_model(proto, folder, options or RunOptions(runtime=BFLOAT16_RUNTIME.name))
        self._idle: list[Any] = []
        self._lock = threading.Lock()

    def complete(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        # OpenVINO reads contiguous and writable arrays where they are; all others are copied
        return {name: np.require(array, None, ("C", "W")) for name, array in super().complete(feeds).items()}

    def _run(self, opened: Any, feeds: dict[str, Array]) -> dict[str, Array]:
        request = self._request(opened)
        try:
            set_inputs(request, feeds)
            request.infer()
            return outputs_of(request, self.outputs)
        except RuntimeError as error:
            raise run_failure(feeds, error) from error
        finally:
            with self._lock:
                self._idle.append(request)

    def bind(self, feeds: Mapping[str, Array]) -> BoundRequest:
        """Copy the inputs once, for many runs of one shape without copies. Raises as `run` does."""
        compiled, complete = self.opened(), self.complete(feeds)
        try:
            return BoundRequest(self._request(compiled), complete, self.outputs)
        except RuntimeError as error:
            raise run_failure(complete, error) from error

    def close(self) -> None:
        """Free the model. `run` fails afterwards."""
        self._compiled = None
        self._idle = []

    def opened(self) -> Any:
        compiled = self._compiled
        if compiled is None:
            raise EffexportError("this runner is closed; load the artifact again")
        return compiled

    def _request(self, compiled: Any) -> Any:
        """A request that no other thread uses."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return compiled.create_infer_request()


class BoundRequest:
    """A model bound to inputs of one shape, made by `OpenVinoRunner.bind`; see `effexport.runners.ort.runner`."""

    def __init__(self, request: Any, feeds: Mapping[str, Array], outputs: tuple[TensorInfo, ...]) -> None:
        """feeds: complete and checked."""
        self._request, self._outputs = request, outputs
        self._feeds = {name: array.copy() for name, array in feeds.items()}
        self._lock = threading.Lock()
        set_inputs(request, self._feeds)

    def update(self, feeds: Mapping[str, Array]) -> None:
        """Copy new values, unchecked, into bound inputs. Raises UserError for another name, dtype or shape."""
        check_bound_feeds(feeds, signature_of(self._feeds))
        with self._lock:
            for name, array in feeds.items():
                self._feeds[name][...] = array

    def run(self) -> None:
        """Compute the outputs from the inputs. Raises RuntimeFailedError when the graph fails."""
        with self._lock:
            try:
                self._request.infer()
            except RuntimeError as error:
                raise run_failure(self._feeds, error) from error

    def outputs(self) -> dict[str, Array]:
        """Copies of the outputs of the last run."""
        with self._lock:
            return outputs_of(self._request, self._outputs)


def set_inputs(request: Any, feeds: Mapping[str, Array]) -> None:
    """Let a request read the arrays, which are contiguous and must live until it has run."""
    ov = import_openvino()
    for name, array in feeds.items():
        if array.dtype.name == "bfloat16":  # which OpenVINO knows, but not from numpy
            request.set_tensor(name, ov.Tensor(array.view(np.uint16), list(array.shape), ov.Type.bf16))
        else:
            request.set_tensor(name, ov.Tensor(array, shared_memory=True))


def outputs_of(request: Any, outputs: tuple[TensorInfo, ...]) -> dict[str, Array]:
    """Copies of the outputs of a request, by name."""
    found: dict[str, Array] = {}
    for tensor in outputs:
        array: Array = np.array(request.get_tensor(tensor.name).data)
        found[tensor.name] = array.view(ml_dtypes.bfloat16) if tensor.dtype == "bfloat16" else array
    return found


def run_failure(feeds: Mapping[str, Array], error: RuntimeError) -> RuntimeFailedError:
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in feeds.items())
    return RuntimeFailedError(f"OpenVINO failed on {shapes}: {reason_of(error)}")


def open_model(
    options: RunOptions,
    model: Path | bytes,
    limits: FeedLimits,
    external_folder: Path | None = None,
) -> OpenVinoRunner:
    """See `effexport.runners.artifact_runner`."""
    return OpenVinoRunner(model, options, limits=limits, external_folder=external_folder)
