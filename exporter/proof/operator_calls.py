"""Ways to compute one operator of a model by itself: its function body, and its definition."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.dtypes import DTYPE_OF_PRECISION
from effexport.errors import RuntimeFailedError
from effexport.export.onnx_graph import all_nodes, value_types
from effexport.plugins.known_ops import known_ops
from effexport.plugins.ops import DOMAIN, PLUGIN_NAMESPACE
from effexport.proof.case_label import CaseLabel
from effexport.proof.repeated_runs import Answer, RepeatedRuns
from effexport.runners.options import RunOptions
from effexport.runners.ort import import_onnxruntime
from effexport.runners.ort.session import session_from_model

if TYPE_CHECKING:
    import onnx
    import torch

    from effexport.dtypes import Array
    from effexport.spec import BuildSpec

# Inputs by name, in the operator's order → its outputs.
Call = Callable[[Mapping[str, "Array"]], Sequence["Array"]]


@dataclass(frozen=True)
class OperatorUse:
    """One way in which a model calls an operator of ours. precision: that of its type T, as in --precision."""

    model: onnx.ModelProto
    node: onnx.NodeProto
    precision: str

    @property
    def dtype(self) -> str:
        return DTYPE_OF_PRECISION[self.precision]

    @property
    def attributes(self) -> dict[str, Any]:
        import onnx

        return {a.name: onnx.helper.get_attribute_value(a) for a in self.node.attribute if a.name != PLUGIN_NAMESPACE}

    @property
    def has_body(self) -> bool:
        return any((f.domain, f.name) == (DOMAIN, self.node.op_type) for f in self.model.functions)


def uses_by_operator(model: onnx.ModelProto, spec: BuildSpec) -> dict[str, list[OperatorUse]]:
    """The calls of each of our operators; those with the same attributes and element type count once."""
    nodes = [node for node in all_nodes(model) if node.domain == DOMAIN]
    # in half precision, some operators are kept in float32
    types = value_types(model) if nodes and spec.arithmetic != "fp32" else {}
    found: dict[str, dict[object, OperatorUse]] = {}
    for node in nodes:
        dtype, _ = types.get(node.input[0], (spec.dtype, ()))
        precision = "fp32" if dtype == "float32" else spec.arithmetic
        attributes = frozenset(attribute.SerializeToString(deterministic=True) for attribute in node.attribute)
        found.setdefault(node.op_type, {}).setdefault((precision, attributes), OperatorUse(model, node, precision))
    return {op: list(uses.values()) for op, uses in sorted(found.items())}


def call_in_ort(use: OperatorUse, implementation: str, inputs: Mapping[str, Array]) -> Call:
    """The operator in ONNX Runtime on the CPU, by its "body" or by our "kernel", for inputs of these types.

    Raises UserError without onnxruntime or without kernels, and RuntimeUnsupportedError for a body that does not load.
    """
    # one thread: the inputs are small
    settings = RunOptions(implementation=implementation, threads=1, memory_arena=False)
    # what fails is reported as a check; without this ONNX Runtime would print it as well
    silent = import_onnxruntime().RunOptions()
    silent.log_severity_level = 4
    session = session_from_model(one_node_model(use, inputs), settings).inference

    def run(inputs: Mapping[str, Array]) -> Sequence[Array]:
        try:
            outputs: Sequence[Array] = session.run(None, dict(inputs), silent)
        except Exception as error:  # onnxruntime has no common base class for its errors
            raise RuntimeFailedError(str(error)) from error
        return outputs

    return run


def one_node_model(use: OperatorUse, inputs: Mapping[str, Array]) -> bytes:
    """The serialised model of one call. Sizes stay open, as they are in the whole model."""
    import onnx

    def value(name: str, array: Array) -> onnx.ValueInfoProto:
        element = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return onnx.helper.make_tensor_value_info(name, element, [None] * array.ndim)

    first = next(iter(inputs.values()))
    node = onnx.NodeProto()
    node.CopyFrom(use.node)
    del node.input[:], node.output[:]
    node.input.extend(inputs)
    node.output.extend(f"output_{i}" for i in range(len(use.node.output)))
    own = known_ops()[use.node.op_type].output_type
    element = onnx.helper.np_dtype_to_tensor_dtype(first.dtype if own == "T" else np.dtype(own))
    outputs = [onnx.helper.make_tensor_value_info(name, element, None) for name in node.output]
    graph = onnx.helper.make_graph([node], use.node.op_type, [value(*item) for item in inputs.items()], outputs)
    model = onnx.ModelProto(ir_version=use.model.ir_version, graph=graph)
    model.opset_import.extend(use.model.opset_import)
    model.functions.extend(use.model.functions)
    serialised: bytes = model.SerializeToString()
    return serialised


@dataclass(frozen=True)
class Definition:
    """What a body must compute. exact: the operator's definition; in_float32: the same, with float32 arithmetic."""

    exact: Call
    in_float32: Call


def definition(use: OperatorUse, inputs: Mapping[str, Array]) -> Definition:
    """The operator's PyTorch reference, in float64 and in float32; our kernel where PyTorch does not load.

    Raises UserError without either.
    """
    try:
        importlib.import_module("torch")
    except (ImportError, OSError):  # OSError: a shared library of it is missing
        kernel = call_in_ort(use, "kernel", inputs)
        return Definition(kernel, kernel)
    return Definition(call_in_torch(use, np.float64), call_in_torch(use, np.float32))


def call_in_torch(use: OperatorUse, exact: type[np.floating[Any]]) -> Call:
    """The `reference` of the operator in the type `exact`, computed until two runs agree.

    The torch operator around it would load PyTorch's compiler.
    """
    import torch

    op = known_ops()[use.node.op_type].load()
    # its parameters are named as in the signature; it needs neither what is redundant nor what only a body reads
    wanted = inspect.signature(op.reference).parameters
    attributes = {a.name: a.default for a in op.SIGNATURE.attributes} | use.attributes
    attributes = {name: value for name, value in attributes.items() if name in wanted}
    # with `rounded`, the weights of some tokens are what float32 makes of a sum with -1e5
    dtype = np.float32 if attributes.get("rounded") else exact

    def compute(tensors: Mapping[str, torch.Tensor]) -> Answer:
        threads = torch.get_num_threads()
        # of small tensors, one thread is ten times as fast as two that wait for each other
        torch.set_num_threads(1)
        try:
            outputs = op.reference(**tensors, **attributes)
        finally:
            torch.set_num_threads(threads)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return {"outputs": {str(i): output.numpy() for i, output in enumerate(outputs)}}

    def run(inputs: Mapping[str, Array]) -> Sequence[Array]:
        given = {name.lower(): x.astype(dtype) if x.dtype.kind not in "bi" else x for name, x in inputs.items()}
        tensors = {name: torch.from_numpy(x) for name, x in given.items() if name in wanted}
        runs = RepeatedRuns("PyTorch")
        answer = runs.answer(CaseLabel(f"the definition of {use.node.op_type}"), lambda: compute(tensors))
        return list(answer["outputs"].values())

    return run
