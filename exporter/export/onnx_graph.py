"""The signature of a graph, checked in the written file, and a summary of any graph for `inspect`."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.base.dtypes import TensorInfo
from effexport.base.errors import StageError, UserError
from effexport.base.files import file_digest, is_inside
from effexport.base.spec import NEXT_PREFIX, BuildSpec
from effexport.export.failures import GRAPH_CHECK
from effexport.models.encoder.spec import LARGEST_TOP_K
from effexport.plugins.function_body import traps
from effexport.plugins.ops import DOMAIN, MODULE_KEY, PLUGIN_NAMESPACE, SCOPES_KEY, counted

if TYPE_CHECKING:
    import onnx

STANDARD_DOMAINS = ("", "ai.onnx")
# Nodes that no exported graph may contain, each with its reason.
RANDOM_OPS: dict[str, str] = {
    "RandomNormal": "two runs would differ, and TensorRT ignores the seed",
    "RandomNormalLike": "two runs would differ, and TensorRT ignores the seed",
    "RandomUniform": "two runs would differ, and TensorRT ignores the seed",
    "RandomUniformLike": "two runs would differ, and TensorRT ignores the seed",
    "Bernoulli": "two runs would differ",
    "Multinomial": "two runs would differ",
}
# Nodes that no graph of our own layers and no TensorRT engine may contain. In a user's own model they are noted.
FORBIDDEN_OPS: dict[str, str] = RANDOM_OPS | {
    "Loop": "TensorRT runs it step by step, and some runtimes compute it differently",
    "Scan": "TensorRT runs it step by step",
    "ReduceLogSumExp": "TensorRT imports it without subtracting the maximum",
    "TopK": "TensorRT stops at 3840 elements",  # fewer are allowed, see `why_forbidden`
    "CumSum": "TensorRT's parser has made a sequential loop of it (10.1)",
}
# Runtimes replace calls of functions by their nodes. Models of ours have a few thousand, the largest published ones
# some hundred thousand.
MOST_NODES = 2_000_000
# Of protobuf. Larger models keep their weights in files beside them.
MOST_BYTES = 2**31 - 1
# From this size on, reading a file takes longer than knowing that it is the same; and a weight is left out of it.
LARGE_FILE_BYTES, LARGE_WEIGHT_BYTES = 1 << 24, 1 << 12
OLDEST_IR_VERSION = 3
# dtype and dims of a value; None for a dimension without a name
ValueType = tuple[str, tuple[int | str | None, ...]]


@dataclass(frozen=True)
class GraphSignature:
    """The signature that a graph must have: inputs, outputs, and a number of nodes for each of our operators.

    Those of users and quantised linear layers may occur any number of times: no spec says which a module calls.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    custom_ops: Mapping[str, int]


def signature_with_state(spec: BuildSpec, states: tuple[TensorInfo, ...], *, one_token: bool) -> GraphSignature:
    """The signature of a decode step, which takes one token, or of a prefill, with these inputs for the state."""
    tokens, output = spec.inputs, spec.outputs[0]
    if one_token:
        token, output = (replace(tensor, dims=("batch", 1, *tensor.dims[2:])) for tensor in (tokens[0], output))
        tokens = (token,)
    position = (TensorInfo("position", "int64", ("batch",)),) if spec.model.counts_positions else ()
    outputs = (output, *(replace(state, name=NEXT_PREFIX + state.name) for state in states))
    return GraphSignature((*tokens, *position, *states), outputs, {} if one_token else spec.prefill_ops)


def check_graph(path: Path, signature: GraphSignature, forbidden: Mapping[str, str] = FORBIDDEN_OPS) -> None:
    """Raise StageError unless the file is valid ONNX and has the signature, and no node of a forbidden type."""
    if problem := why_invalid(path, infer_shapes=True):
        raise StageError(GRAPH_CHECK, f"onnx rejects the graph: {problem}")
    model = graph_outline(path)
    if problem := why_another(model, signature):
        raise StageError(GRAPH_CHECK, problem)
    found = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    bodies = {function.name for function in model.functions if function.domain == DOMAIN}
    if bodies != found:
        raise StageError(GRAPH_CHECK, f"function bodies are {sorted(bodies)}; expected {sorted(found)}")
    constants = small_constants(model)
    for node in all_nodes(model):
        if reason := why_forbidden(node, constants, forbidden):
            raise StageError(GRAPH_CHECK, f"node {node.name!r} is a {node.op_type}: {reason}")
        if node.domain == DOMAIN and (PLUGIN_NAMESPACE, DOMAIN.encode()) not in [(a.name, a.s) for a in node.attribute]:
            raise StageError(GRAPH_CHECK, f"node {node.name!r} does not carry {PLUGIN_NAMESPACE}={DOMAIN!r}")


def why_invalid(path: Path, *, infer_shapes: bool = False) -> str:
    """The reason a file is not valid ONNX; "" if it is. infer_shapes: also look for contradictory shapes."""
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=infer_shapes)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return str(error).partition("\n")[0]
    except UnicodeDecodeError:  # the checker's own message, which quotes the file
        return "a name in it is not UTF-8"
    return ""


def why_another(model: onnx.ModelProto, signature: GraphSignature) -> str:
    """The difference of a graph from its signature; "" if there is none."""
    found = Counter(node.op_type for node in model.graph.node if node.domain == DOMAIN)
    ours, declared = counted(found), counted(signature.custom_ops)
    if ours != declared:
        return f"custom operators are {ours}; declared are {declared}"
    for what, actual, expected in (
        ("inputs", graph_inputs(model), signature.inputs),
        ("outputs", graph_tensors(model.graph.output), signature.outputs),
    ):
        if actual != expected:
            return f"{what} are {', '.join(map(str, actual))}; expected {', '.join(map(str, expected))}"
    return ""


def why_not_traced(traced: bytes, signature: GraphSignature, opset: int, weights: Mapping[str, TensorInfo]) -> str:
    """The reason a graph from an archive, see traced_graphs.py, was not traced from a module with these weights; "" if
    it may have been: it is valid ONNX with the signature, and its other inputs are some of the weights."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.ModelProto.FromString(traced)
        if problem := why_not_readable(model):
            return problem
        if external_sizes(model):
            return "it refers to other files"
        onnx.checker.check_model(model)
    except DecodeError:
        return "it is not an ONNX model"
    except (onnx.checker.ValidationError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        return str(error).partition("\n")[0]
    if opset_of(model) != opset:
        return f"its opset is {opset_of(model)}; expected {opset}"
    taken = tuple(tensor for tensor in graph_inputs(model) if tensor.name in weights)
    for tensor in taken:
        if tensor != weights[tensor.name]:
            return f"it takes {tensor}; expected {weights[tensor.name]}"
    return why_another(model, replace(signature, inputs=(*signature.inputs, *taken)))


def why_other_weights(model: onnx.ModelProto, weights: Mapping[str, tuple[int, ...]]) -> str:
    """The first weight that does not have the size that a spec gives it; "" if there is none.

    weights: shapes by name. Exporters rename and transpose some weights, so that only those with a known name count.
    """
    for tensor in model.graph.initializer:
        shape = weights.get(tensor.name)
        if shape is not None and math.prod(shape) != math.prod(tensor.dims):
            return f"{tensor.name} has shape {list(tensor.dims)}; expected {list(shape)}"
    return ""


def opset_of(model: onnx.ModelProto) -> int | None:
    """The version of the standard operators of a graph; None if it has none."""
    return next((entry.version for entry in model.opset_import if entry.domain in STANDARD_DOMAINS), None)


def not_for_tensorrt(path: Path) -> tuple[str, ...]:
    """A sentence on the standard operators of a file that no engine may contain; none if it has none of them."""
    model = graph_outline(path)
    constants = small_constants(model)
    found = sorted({node.op_type for node in all_nodes(model) if why_forbidden(node, constants)})
    if not found:
        return ()
    reasons = "; ".join(f"{op}: {FORBIDDEN_OPS[op]}" for op in found)
    return (f"The model has operators that TensorRT engines of effexport do without ({reasons}).",)


def why_forbidden(
    node: onnx.NodeProto, constants: Mapping[str, int], forbidden: Mapping[str, str] = FORBIDDEN_OPS
) -> str:
    """The reason a graph may not hold a node; "" if it may. constants: see `small_constants`."""
    if node.op_type == "TopK" and constants.get(node.input[1] if len(node.input) > 1 else "", 2**63) <= LARGEST_TOP_K:
        return ""
    return forbidden.get(node.op_type, "")


def small_constants(model: onnx.ModelProto) -> dict[str, int]:
    """Integers that are constants of a graph, alone in their tensor and in the file, by the name of their value."""
    import onnx

    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    return {
        name: int(onnx.numpy_helper.to_array(tensor).item())
        for name, tensor in tensors.items()
        if tensor.data_type == onnx.TensorProto.INT64
        and tensor.data_location != onnx.TensorProto.EXTERNAL
        and math.prod(tensor.dims) == 1
    }


def check_portable(path: Path) -> None:
    """Raise StageError if the graph or a function body holds a construct that a known tool misreads."""
    for trap in traps(graph_outline(path)):
        raise StageError(GRAPH_CHECK, f"other tools would misread the graph: {trap}; see docs/function_bodies.md")


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of the graph, its subgraphs and its functions."""
    yield from nodes_within(model.graph.node)
    for function in model.functions:
        yield from nodes_within(function.node)


def nodes_within(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, and those of their subgraphs. A function has names of its own, so it is not entered."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from nodes_within(graph.node)


def module_of_node(node: onnx.NodeProto) -> str:
    """The path of the module that a node came from; "" for the root, and where the file does not say."""
    known = {entry.key: entry.value for entry in node.metadata_props}
    # as torch.onnx writes it: a list in Python, of which the last scope is the operator itself
    scopes = re.findall(r"'([^']*)'", known.get(SCOPES_KEY, ""))
    path: str = known.get(MODULE_KEY, scopes[-2] if len(scopes) > 1 else "")
    return path


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every weight and every tensor of a constant: of the graph, its subgraphs and its functions."""
    graphs, sparse = [model.graph], []
    for node in all_nodes(model):
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            sparse += [attribute.sparse_tensor, *attribute.sparse_tensors]
            graphs += [attribute.g, *attribute.graphs]
    for graph in graphs:
        yield from graph.initializer
        sparse += graph.sparse_initializer
    for pair in sparse:
        yield from (pair.values, pair.indices)


def graph_inputs(model: onnx.ModelProto) -> tuple[TensorInfo, ...]:
    """The inputs without weights, which old files list as inputs too."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return tuple(tensor for tensor in graph_tensors(model.graph.input) if tensor.name not in weights)


def graph_tensors(values: object) -> tuple[TensorInfo, ...]:
    """Names, dtypes and dims of graph inputs or outputs. Unnamed dynamic dimensions read "?", unknown types too."""
    import onnx

    known = onnx.helper.get_all_tensor_dtypes()
    tensors = []
    for value in values:  # type: ignore[attr-defined]
        tensor = value.type.tensor_type
        dims = tuple(dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or "?") for dim in tensor.shape.dim)
        is_known = tensor.elem_type in known
        element = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name if is_known else "?"
        tensors.append(TensorInfo(value.name, element, dims))
    return tuple(tensors)


def value_types(model: onnx.ModelProto) -> dict[str, ValueType]:
    """dtype and dims of the values of a graph, as far as ONNX can infer them; None for a dimension without a name."""
    import onnx

    try:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except onnx.shape_inference.InferenceError:
        # shapes contradict each other: what the file itself declares is known all the same
        graph = model.graph
    values: dict[str, ValueType] = {}
    for weight in graph.initializer:  # which not every exporter lists among the values
        values[weight.name] = (onnx.helper.tensor_dtype_to_np_dtype(weight.data_type).name, tuple(weight.dims))
    for value in (*graph.value_info, *graph.input, *graph.output):
        tensor = value.type.tensor_type
        if not tensor.elem_type:
            continue  # for example a sequence
        dims = tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim)
        values[value.name] = (onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name, dims)
    return values


def load_graph(path: Path) -> onnx.ModelProto:
    """A model file without its external data. Raises UserError for a file that is missing, damaged, of a version that
    nothing can read, refers to data outside its own folder, or has functions without end."""
    import onnx
    from google.protobuf.message import DecodeError

    expected = "expected the path of an ONNX file"
    if path.is_dir():
        raise UserError(f"{path} is a folder; {expected}")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file; {expected}")
    if path.exists() and path.stat().st_size > MOST_BYTES:
        raise UserError(f"{path} has more bytes than the {MOST_BYTES} that an ONNX file can have; {expected}")
    try:
        # a name such as model.json would make onnx read it as text
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except FileNotFoundError:
        raise UserError(f"no model file at {path}; {expected}") from None
    except (DecodeError, ValueError) as error:
        raise UserError(f"{path} is not an ONNX model: it has another format or is damaged; {expected}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {expected}") from error
    if not model.graph.node:
        raise UserError(f"{path} is not an ONNX model: it has no nodes; {expected}")
    if problem := why_not_readable(model):
        raise UserError(f"{path} cannot be used: {problem}; expected a model that onnx {onnx.__version__} can read")
    check_external_data(model, path)
    return model


def graph_outline(path: Path) -> onnx.ModelProto:
    """The model as `load_graph` returns it, without the numbers of large weights. Do not change it: a large file, which
    takes a second to read, is cached as long as it stays the same."""
    found = path.stat() if path.is_file() else None
    if found is None or found.st_size < LARGE_FILE_BYTES:
        return load_graph(path)
    state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    model = _outline(_File(path, state))
    check_external_data(model, path)
    return model


@dataclass(frozen=True)
class _File:
    """A file in one state, wherever its folder has been moved."""

    path: Path = field(compare=False)
    state: tuple[int, ...]


@functools.lru_cache(maxsize=4)
def _outline(file: _File) -> onnx.ModelProto:
    from onnx import ModelProto

    model, outline = load_graph(file.path), ModelProto()
    for tensor in all_tensors(model):
        if len(tensor.raw_data) > LARGE_WEIGHT_BYTES:
            tensor.ClearField("raw_data")
    outline.CopyFrom(model)  # which leaves the memory of the numbers behind
    return outline


def why_not_readable(model: onnx.ModelProto) -> str:
    """A fault that no runtime could handle, or "": versions, attributes, endless functions."""
    import onnx

    if not OLDEST_IR_VERSION <= model.ir_version <= onnx.IR_VERSION:
        return f"its IR version is {model.ir_version}, not {OLDEST_IR_VERSION} to {onnx.IR_VERSION}"
    if model.training_info:
        return "it holds a training step"
    if sum(entry.domain in STANDARD_DOMAINS for entry in model.opset_import) > 1:
        return "it needs several versions of the standard operators"
    newest = onnx.defs.onnx_opset_version()
    for holder, imports in (("it", model.opset_import), *((f.name, f.opset_import) for f in model.functions)):
        for entry in imports:
            if entry.domain in STANDARD_DOMAINS and not 1 <= entry.version <= newest:
                return f"{holder} needs opset {entry.version}, not 1 to {newest}"
    for holder, names in _names(model):
        # protobuf gives bytes for a text that is not UTF-8
        if any(isinstance(name, bytes) for name in names):
            return f"a name of its {holder} is not UTF-8"
        if not "".join(names).isprintable():
            return f"a name of its {holder} has a control character"
    for tensor in model.graph.initializer:
        if min(tensor.dims, default=0) < 0 or math.prod(tensor.dims) >= 2**63:
            return f"its weight {tensor.name!r} has a shape that no tensor has"
    for node in nodes_within(model.graph.node):
        if any(attribute.ref_attr_name for attribute in node.attribute):
            return f"its node {node.name!r} takes an attribute from a function, and is in none"
    return _why_without_end(model)


def _names(model: onnx.ModelProto) -> Iterator[tuple[str, list[str]]]:
    """Names in a model, by the kind of their owners."""
    graphs = [model.graph]
    for function in model.functions:
        yield "functions", [function.name, function.domain, *function.input, *function.output, *function.attribute]
        yield "operator sets", [entry.domain for entry in function.opset_import]
    yield "operator sets", [entry.domain for entry in model.opset_import]
    for node in all_nodes(model):
        attributes = [name for attribute in node.attribute for name in (attribute.name, attribute.ref_attr_name)]
        yield "nodes", [node.op_type, node.domain, node.name, *node.input, *node.output, *attributes]
        graphs += (graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs))
    for tensor in all_tensors(model):
        texts = (text for entry in tensor.external_data for text in (entry.key, entry.value))
        yield "weights", [tensor.name, *texts]
    for graph in graphs:
        values = [*graph.input, *graph.output, *graph.value_info]
        yield "values", [value.name for value in values]
        yield "dimensions", [dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim]


def _why_without_end(model: onnx.ModelProto) -> str:
    """The fault of functions that call themselves, or each other so often that their nodes exceed memory; or ""."""
    calls = {
        (function.domain, function.name): Counter((node.domain, node.op_type) for node in nodes_within(function.node))
        for function in model.functions
    }
    # after all calls are replaced; what is not a function is a node
    nodes: dict[tuple[str, str], int] = {}
    try:
        for one in TopologicalSorter(calls).static_order():
            nodes[one] = sum(n * nodes[called] for called, n in calls[one].items()) if one in calls else 1
    except CycleError as error:
        return f"its function {error.args[1][0][1]} calls itself"
    total = sum(nodes.get((node.domain, node.op_type), 1) for node in nodes_within(model.graph.node))
    return f"its functions amount to {total} nodes, more than {MOST_NODES}" if total > MOST_NODES else ""


def check_external_data(model: onnx.ModelProto, path: Path) -> None:
    """Raise UserError if a file with weights of a model is missing, too short, or outside the folder of the model."""
    try:
        needed = external_sizes(model)
    except ValueError as error:
        raise UserError(f"{path} is damaged: the place of its external weights cannot be read: {error}") from error
    for location, size in needed.items():
        if not is_inside(path.parent / location, path.parent):
            raise UserError(
                f"{path} keeps weights at {location!r}, outside its own folder; expected a file beside the model. "
                "Do not run this model unless you know where it comes from"
            )
        if not (path.parent / location).is_file():
            raise UserError(
                f"{path} keeps weights in {location!r}, which is missing from {path.parent}; copy that file too, or "
                "save the model again with its weights: a model that was loaded with load_external_data=False has none"
            )
        found = (path.parent / location).stat().st_size
        if found < size:
            raise UserError(
                f"{path} keeps weights in {location!r}, which is too short: it has {found} bytes; expected at least "
                f"{size}. Copy that file again"
            )


def node_types(model: Path | bytes) -> set[tuple[str, str]]:
    """Domain and type of all nodes of a model, which may be serialised. Raises UserError for a file that is not one."""
    import onnx

    proto = onnx.ModelProto.FromString(model) if isinstance(model, bytes) else graph_outline(model)
    return {(node.domain, node.op_type) for node in all_nodes(proto)}


def custom_ops_of_model(model: Path | bytes) -> tuple[str, ...]:
    """Names of our operators in a model. Raises as `node_types`."""
    return tuple(sorted(op for domain, op in node_types(model) if domain == DOMAIN))


def operators_of_model(path: Path) -> dict[str, int]:
    """The number of nodes of each custom operator in a model."""
    return dict(Counter(node.op_type for node in graph_outline(path).graph.node if node.domain == DOMAIN))


def ops_without_body(model: onnx.ModelProto) -> tuple[str, ...]:
    """Names of our operators in a model that have no function body in it, so that only our kernels can run them."""
    bodies = {function.name for function in model.functions if function.domain == DOMAIN}
    return tuple(sorted({node.op_type for node in all_nodes(model) if node.domain == DOMAIN} - bodies))


def external_files(model: Path | bytes, folder: Path | None = None) -> list[Path]:
    """Files with external weights of a model, next to its file or, for a serialised model, in the folder."""
    import onnx

    if isinstance(model, Path):
        return sorted(model.parent / location for location in external_sizes(graph_outline(model)))
    locations = external_sizes(onnx.ModelProto.FromString(model))
    return sorted((folder or Path()) / location for location in locations)


def model_digest(model: Path) -> str:
    """SHA-256 of a model.onnx and of the files with its external weights, if it has any."""
    digests = [file_digest(file) for file in (model, *external_files(model))]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def external_sizes(model: onnx.ModelProto) -> dict[str, int]:
    """Files that a model's tensors refer to, as named in the model, each with the bytes that it needs at least."""
    import onnx
    from onnx.external_data_helper import ExternalDataInfo

    sizes: dict[str, int] = {}
    for tensor in all_tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            data = ExternalDataInfo(tensor)
            sizes[data.location] = max(sizes.get(data.location, 0), (data.offset or 0) + (data.length or 0))
    return sizes
