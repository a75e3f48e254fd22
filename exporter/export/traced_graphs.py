"""The graphs of an artifact as PyTorch traced them, without weights, from which every export is finished.

The exporter computes with weights: it transposes them, folds what depends on them alone, and keeps one of several equal
tensors. Which initializer holds which parameter therefore depends on the values, and names do not tell. In a traced
graph, every parameter and buffer is an input under its own name, because PyTorch traces without their values. Finished
with other weights, it is the file that an export of these weights would write.
"""

from __future__ import annotations

import ast
import contextlib
import lzma
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes import PassError
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn

from effexport.base.dtypes import TensorInfo
from effexport.base.errors import EffexportError, StageError, UserError, is_out_of_memory
from effexport.plugins.ops import SCOPES_KEY

# Of one traced graph; those of effexport have some kilobytes per layer. A larger one is not kept: a refit traces again.
MOST_BYTES = 128 << 20
REMEDY = "build the artifact again with effexport build"
# Ten times the distance within which onnxscript takes a number for 0 or 1.
ALMOST = {0.0: 1e-7, 1.0: 1e-4}
# The end of a slice that has none.
FAR = 2**63 - 1


def graph_without_weights(model: ir.Model, module: nn.Module) -> bytes:
    """A graph that was just traced from `module`, not optimised, as a serialised model; `model` is used up.

    Its weights follow the other inputs. Stack traces and other metadata of the exporter are left out.
    """
    graph = model.graph
    clear_metadata(model, lambda node: (SCOPES_KEY, node.metadata_props.get(SCOPES_KEY, "")))
    weights = module.state_dict()
    for name in [name for name in graph.initializers if name in weights]:
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)
    traced: bytes = ir.to_proto(model).SerializeToString()
    return traced


def clear_metadata(model: ir.Model, kept: Callable[[ir.Node], tuple[str, str]]) -> None:
    """Remove the exporter's metadata, stack traces with paths of this machine, but one entry of each node.

    kept: its key and its value, if that is not empty.
    """
    graph = model.graph
    for node in graph.all_nodes():
        key, value = kept(node)
        node.metadata_props.clear()
        node.doc_string = None
        if value:
            node.metadata_props[key] = value
    for value_of_graph in [*graph.inputs, *graph.outputs, *graph.initializers.values()]:
        value_of_graph.metadata_props.clear()
    graph.metadata_props.clear()
    model.metadata_props.clear()


def graph_without_numbers(traced: bytes) -> bytes:
    """A traced graph of a user's own module, without the values of tensors that are not weights."""
    model = onnx.ModelProto.FromString(traced)
    kept = [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in model.graph.initializer]
    del model.graph.initializer[:]
    for name, data_type, dims in kept:
        model.graph.initializer.add(name=name, data_type=data_type, dims=dims)
    found: bytes = model.SerializeToString()
    return found


def optimized_graph(traced: bytes, module: nn.Module, layers: Collection[str] = ()) -> ir.Model:
    """A traced graph with the weights of a module as initializers, optimised as torch.onnx does.

    traced: checked with `why_not_traced`. module: of the same classes and sizes as the one that was traced, at the same
    precision. layers: see `name_products`.
    """
    import torch.onnx
    from onnxscript import optimizer

    model = ir.from_proto(onnx.ModelProto.FromString(traced))
    weights = module.state_dict()
    for value in [value for value in model.graph.inputs if value.name in weights]:
        assert value.name is not None
        tensor = TorchTensor(weights[value.name], name=value.name)
        model.graph.inputs.remove(value)
        value.const_value = tensor
        model.graph.register_initializer(value)
    name_products(model, module, layers)
    leave_slices(model)
    program = torch.onnx.ONNXProgram(model, None)
    try:
        with hidden_constants(model) as hidden:
            program.optimize()
        if hidden:  # what depends on nothing else
            optimizer.fold_constants(program.model)
            optimizer.remove_unused_nodes(program.model)
    except PassError as error:
        cause = " ".join(str(error.__cause__ or error).split())
        raise StageError(
            "export", f"torch.onnx could not optimise the graph: {cause}; --debug shows the traceback"
        ) from error
    return program.model


def name_products(model: ir.Model, module: nn.Module, layers: Collection[str]) -> None:
    """Give the products of linear layers the paths of their layers where torch.export has lost them, as it does in
    `torch.no_grad()` and in the forward of an autograd function: by the weights that they read."""
    named = {path for path, child in module.named_modules(remove_duplicate=False) if isinstance(child, nn.Linear)}
    for path in layers:
        weight = model.graph.initializers.get(f"{path}.weight")
        readers = [] if weight is None else weight.consumers()
        readers = [each for node in readers for each in (node.successors() if node.op_type == "Transpose" else [node])]
        for node in readers:
            scopes = ast.literal_eval(node.metadata_props.get(SCOPES_KEY, "[]"))
            if node.op_type in ("MatMul", "Gemm") and scopes and not named.intersection(scopes[-2:-1]):
                node.metadata_props[SCOPES_KEY] = repr([*scopes[:-1], path, scopes[-1]])


def leave_slices(model: ir.Model) -> None:
    """Forget the free sizes of what is cut at a fixed place, such as the first 100 tokens, where PyTorch takes them for
    those of the whole, as in the example. onnxscript would leave such a slice out (rewriter, collapse_slice2_rule)."""
    for node in [node for node in model.graph.all_nodes() if node.op_type == "Slice" and len(node.inputs) > 3]:
        data, starts, ends, axes = node.inputs[:4]
        shape = node.outputs[0].shape
        if data is None or shape is None or data.shape != shape:
            continue
        cuts = zip(*(constants_of(one) for one in (starts, ends, axes)), strict=False)
        cut = {axis % len(shape) for start, end, axis in cuts if (start, end) != (0, FAR)}
        if any(not isinstance(shape[axis], int) for axis in cut):
            node.outputs[0].shape = ir.Shape([None if i in cut else size for i, size in enumerate(shape)])


def constants_of(value: ir.Value | None) -> list[int]:
    """The numbers of a value, by way of casts and shapes; none of a value that is not constant."""
    while value is not None and (node := value.producer()) is not None and node.op_type in ("Cast", "Reshape"):
        value = node.inputs[0]
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return [] if tensor is None else tensor.numpy().flatten().tolist()


@contextlib.contextmanager
def hidden_constants(model: ir.Model) -> Iterator[bool]:
    """Make inputs of the constants that onnxscript takes for 0 or 1, for the length of a `with` block. Yields whether
    there are any.

    It removes `x + 1e-8` and `x * 1.000001` as if they did nothing, within 1e-8 and 1e-5 (rewriter/_pattern_ir.py,
    Constant). The first stands in a division by what may be 0.
    """
    graph, hidden = model.graph, []
    for node in [node for node in graph.all_nodes() if node.op_type == "Constant"]:
        value, tensor = node.outputs[0], ir.convenience.get_const_tensor(node.outputs[0])
        if tensor is None or not is_almost_neutral(tensor) or value.is_graph_output():
            continue
        constant = ir.Value(name=value.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
        ir.convenience.replace_all_uses_with(value, constant)
        assert node.graph is not None
        node.graph.remove(node, safe=True)
        hidden.append((constant, tensor))
    for value in list(graph.initializers.values()):
        if value.const_value is not None and is_almost_neutral(value.const_value):
            hidden.append((value, value.const_value))
            assert value.name is not None
            del graph.initializers[value.name]
            value.const_value = None
    graph.inputs.extend(value for value, _ in hidden)
    try:
        yield bool(hidden)
    finally:
        for value, tensor in hidden:
            graph.inputs.remove(value)
            value.const_value = tensor
            graph.register_initializer(value)


def is_almost_neutral(tensor: ir.TensorProtocol) -> bool:
    """True if a constant is one number that is close to 0 or 1, but not equal to it."""
    if tensor.size != 1 or not tensor.dtype.is_floating_point():
        return False
    number = float(tensor.numpy().item())
    return any(number != neutral and abs(number - neutral) <= ALMOST[neutral] for neutral in ALMOST)


def read_traced(path: Path, name: str) -> bytes | None:
    """The traced graph of the ONNX file with this name; None if the file `path` is not there or has none.

    Raises UserError for a file that is not a zip archive, or whose graph is too large or cannot be unpacked.
    """
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            if name not in archive.namelist():
                return None
            size = archive.getinfo(name).file_size
            if size > MOST_BYTES:
                raise UserError(f"{path.name} holds {size} bytes for {name}; expected at most {MOST_BYTES}; {REMEDY}")
            return archive.read(name)
    # RuntimeError: an encrypted entry, or an unknown compression
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path.name} is damaged: {error}; expected a zip archive of graphs; {REMEDY}") from error


def traced_weights(module: nn.Module) -> dict[str, TensorInfo]:
    """The weights of a module as inputs of a traced graph, by name."""
    return {
        name: TensorInfo(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape))
        for name, weight in module.state_dict().items()
    }


@contextlib.contextmanager
def blaming_traced(wanted: bool) -> Iterator[None]:
    """If wanted, make a UserError of whatever fails with a graph from an archive, which others may have written."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not wanted or (is_out_of_memory(error) and not isinstance(error, EffexportError)):
            raise
        raise UserError(f"a traced graph of the artifact cannot be completed: {error}; {REMEDY}") from error


def add_traced(path: Path, name: str, traced: bytes) -> None:
    """Add the traced graph of an ONNX file to `path`, a zip archive, unless it is too large to be read again.

    Equal graphs make equal archives.
    """
    if len(traced) > MOST_BYTES:
        return
    with zipfile.ZipFile(path, "a") as archive:
        # an entry made from a name alone has a date of 1980
        archive.writestr(zipfile.ZipInfo(name), traced, zipfile.ZIP_DEFLATED)
