"""Each function body of a model by itself, against the definition of its operator.

TensorRT, browsers and plain ONNX Runtime execute the bodies; ONNX Runtime with our kernel library never looks at them.
In a whole model, much of a body has no effect on the answer to a few random inputs. So each body is also called alone,
on inputs that make every part of it count.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.base.dtypes import DTYPE_OF_PRECISION, UNIT_ROUNDOFF, Array, numpy_dtype
from effexport.base.errors import EffexportError, RuntimeFailedError, StageError, UserError
from effexport.base.spec import BuildSpec
from effexport.export.onnx_graph import all_nodes, graph_outline, value_types
from effexport.plugins.building.library import known_ops
from effexport.plugins.ops import DOMAIN, OPS, PLUGIN_NAMESPACE, Op
from effexport.proof.check import METRIC, CaseLabel, Check, Limit, Worst, function_body_of, judged, not_run
from effexport.proof.module_runs import Answer, RepeatedRuns, torch_threads
from effexport.proof.tolerances import function_body_limit, relative_error
from effexport.runners.options import RunOptions
from effexport.runners.ort import import_onnxruntime
from effexport.runners.ort.runner import value_from_array
from effexport.runners.ort.session import session_from_model

if TYPE_CHECKING:
    import onnx
    import torch

Inputs = dict[str, "Array"]
Attributes = Mapping[str, Any]
SEED = 20_101


def operator_inputs(op: str, attributes: Attributes, dtype: str) -> Iterator[tuple[str, Inputs]]:
    """Name and inputs of each case, in the order of the operator's inputs. dtype: of the operator's type T.

    attributes: of the node. Ours have them in their __init__.py, operators of users in their op.py, as `proof_inputs`.
    Raises UserError for one of a user that has none, or without PyTorch.
    """
    rng = np.random.default_rng(SEED)
    make = OPS[op].load_calls().proof_inputs if op in OPS else proof_inputs_of(known_ops()[op])
    for name, inputs in make(rng, attributes):
        # float64 stands for T; what is float32 whatever T is stays so
        yield name, {key: x.astype(numpy_dtype(dtype)) if x.dtype == np.float64 else x for key, x in inputs.items()}


def proof_inputs_of(op: Op) -> Callable[[np.random.Generator, Attributes], Iterator[tuple[str, Inputs]]]:
    """The function that makes the inputs for an operator of a user."""
    try:
        module = op.load()
    except ImportError as error:
        raise UserError(f"{op.package}.op does not load: {error}; expected it to, with PyTorch installed") from error
    if not hasattr(module, "proof_inputs"):
        raise UserError(f"{op.package}.op has no proof_inputs(rng, attributes); expected inputs to check the body with")
    made: Callable[[np.random.Generator, Attributes], Iterator[tuple[str, Inputs]]] = module.proof_inputs
    return made


def rounded_anew(inputs: Mapping[str, Array], precision: str, seed: int) -> Inputs:
    """The inputs with each number off by at most one rounding. Equal numbers stay equal: what depends on their
    equality would change by more than rounding explains."""
    rng = np.random.default_rng(SEED + seed)

    def moved(x: Array) -> Array:
        values, places = np.unique(x.astype(np.float64), return_inverse=True)
        values *= 1 + UNIT_ROUNDOFF[precision] * rng.uniform(-1, 1, values.shape)
        return values[places].reshape(x.shape).astype(x.dtype)

    return {name: x if x.dtype.kind in "bi" else moved(x) for name, x in inputs.items()}


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
    ort = import_onnxruntime()
    silent = ort.RunOptions()
    silent.log_severity_level = 4
    session = session_from_model(one_node_model(use, inputs), settings).inference

    def run(inputs: Mapping[str, Array]) -> Sequence[Array]:
        try:
            values = {name: value_from_array(ort, array) for name, array in inputs.items()}
            return [value.numpy() for value in session.run_with_ort_values(None, values, silent)]
        except Exception as error:  # onnxruntime has no common base class for its errors
            raise RuntimeFailedError(str(error)) from error

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
    row = known_ops()[use.node.op_type]

    def output(index: int, name: str) -> onnx.ValueInfoProto:
        own = row.type_of_output(index)
        element = onnx.helper.np_dtype_to_tensor_dtype(first.dtype if own == "T" else np.dtype(own))
        return onnx.helper.make_tensor_value_info(name, element, None)

    outputs = [output(index, name) for index, name in enumerate(node.output)]
    graph = onnx.helper.make_graph([node], use.node.op_type, [value(*item) for item in inputs.items()], outputs)
    model = onnx.ModelProto(ir_version=use.model.ir_version, graph=graph)
    model.opset_import.extend(use.model.opset_import)
    model.functions.extend(use.model.functions)
    serialised: bytes = model.SerializeToString()
    return serialised


@dataclass(frozen=True)
class Definition:
    """The results that a body must compute.

    exact: by the operator's definition.
    in_float32: by the same, with float32 arithmetic.
    """

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
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted.values())
    attributes = {name: value for name, value in attributes.items() if takes_any or name in wanted}
    # with `rounded`, the weights of some tokens are what float32 makes of a sum with -1e5
    dtype = np.float32 if attributes.get("rounded") else exact

    def compute(tensors: Mapping[str, torch.Tensor]) -> Answer:
        # of small tensors, one thread is ten times as fast as two that wait for each other
        with torch_threads(1):
            outputs = op.reference(**tensors, **attributes)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return {"outputs": {str(i): output.numpy() for i, output in enumerate(outputs)}}

    def run(inputs: Mapping[str, Array]) -> Sequence[Array]:
        given = {name.lower(): x.astype(dtype) if x.dtype.kind not in "bi" else x for name, x in inputs.items()}
        tensors = {name: torch.from_numpy(x) for name, x in given.items() if name in wanted}
        runs = RepeatedRuns("PyTorch")
        answer = runs.answer(CaseLabel(f"the definition of {use.node.op_type}"), lambda: compute(tensors))
        return list(answer["outputs"].values())

    return run


EXACT = Limit(0, "integers are exact")


def check_function_bodies(model: Path, spec: BuildSpec) -> list[Check]:
    """One check per operator of ours that a model file calls: none if a tool has inlined them.

    Bodies run in ONNX Runtime on the CPU, whatever runtime the model is proven in: they are a part of the file.
    """
    return [check_function_body(op, uses) for op, uses in uses_by_operator(graph_outline(model), spec).items()]


def check_function_body(op: str, uses: Sequence[OperatorUse]) -> Check:
    """The worst result of a body over all uses of its operator, or the first failure."""
    kind = function_body_of(op)
    if (row := known_ops().get(op)) is None:
        return not_run(kind, "neither this release of effexport nor an installed package knows the operator")
    if not uses[0].has_body:
        detail = "the file has no body of this operator: only ONNX Runtime with the kernel library can run it"
        return Check(kind, CaseLabel("the file"), "functions", "failed", detail=detail)
    if "bfloat16" in row.element_types and any(use.precision == "bf16" for use in uses):
        return not_run(kind, "bodies are checked in ONNX Runtime on the CPU, which has no arithmetic in bfloat16")
    worst: Check | None = None
    for use in uses:
        for check in compared(use, kind):
            if check.status != "passed":
                return check
            if worst is None or share_of_limit(check) > share_of_limit(worst):
                worst = check
    assert worst is not None
    return worst


def compared(use: OperatorUse, kind: str) -> Iterator[Check]:
    """One check for each of the operator's inputs. A body that does not run has failed."""
    try:
        cases = list(operator_inputs(use.node.op_type, use.attributes, use.dtype))
    except UserError as error:
        yield not_run(kind, str(error))
        return
    label = CaseLabel("its nodes")
    try:
        defined = definition(use, cases[0][1])
        body = call_in_ort(use, "body", cases[0][1])
        for name, inputs in cases:
            first = next(iter(inputs.values()))
            label = CaseLabel(name, (len(first), first.shape[-2 if first.ndim > 2 else -1]))
            yield OperatorCase(kind, label, use, defined, inputs).judged(body(inputs))
    except StageError:
        raise  # PyTorch never gives the same answer twice: no body can be compared with it
    except UserError as error:
        yield not_run(kind, f"this needs ONNX Runtime, and PyTorch or the kernel library to compare with: {error}")
    except EffexportError as error:
        yield Check(kind, label, METRIC, "failed", detail=f"the body does not run: {str(error).splitlines()[0]}")


@dataclass(frozen=True)
class OperatorCase:
    """One of the inputs on which a body is checked against its definition. kind, label: of the check."""

    kind: str
    label: CaseLabel
    use: OperatorUse
    defined: Definition
    inputs: Mapping[str, Array]

    def judged(self, outputs: Sequence[Array]) -> Check:
        """Check the outputs of a body: types, shapes, and the output that is furthest off."""
        expected = self.defined.exact(self.inputs)
        pairs = list(zip(outputs, expected, strict=True))
        for index, (actual, wanted) in enumerate(pairs):
            if actual.shape != wanted.shape:
                detail = f"output {index} is {list(actual.shape)}; expected {list(wanted.shape)}"
                return Check(self.kind, self.label, "shapes", "failed", detail=detail)
        if expected[0].dtype.kind == "i":
            different = sum(int(np.count_nonzero(actual != wanted)) for actual, wanted in pairs)
            return judged(self.kind, self.label, "elements that differ", different, EXACT)
        checks = [self.judged_output(index, *pair) for index, pair in enumerate(pairs)]
        return max(checks, key=lambda check: (check.status != "passed", share_of_limit(check)))

    def judged_output(self, index: int, actual: Array, wanted: Array) -> Check:
        """Check one output of floating-point numbers."""
        error, worst = largest_error(actual, wanted)
        limit = function_body_limit(self.use.precision, 0.0)
        if not error <= limit.value / 2:
            # close to the limit or beyond it: find out how far rounding alone takes the definition, which is slow
            limit = function_body_limit(self.use.precision, self.own_error(index, wanted))
        detail = (
            "" if worst is None else f"worst at {list(worst.index)}: {worst.actual:.6g}, defined {worst.expected:.6g}"
        )
        # the inputs of an operator are not a sequence of the model: no seq_len
        return replace(judged(self.kind, self.label, METRIC, error, limit, detail), worst=worst, seq_len=None)

    def own_error(self, index: int, wanted: Array) -> float:
        """The distance of an output from itself, `wanted`, in float32 or with inputs that are rounded anew."""
        rounding = "fp32" if known_ops()[self.use.node.op_type].body_in_float32 else self.use.precision
        # one draw of roundings may happen to change little
        moved = (rounded_anew(self.inputs, rounding, seed) for seed in range(2))
        healthy = [self.defined.in_float32(self.inputs), *map(self.defined.exact, moved)]
        return float(np.max([largest_error(outputs[index], wanted)[0] for outputs in healthy]))


def largest_error(actual: Array, expected: Array) -> tuple[float, Worst | None]:
    """The largest relative error over the samples of an output, [samples, …, channels]; NaN counts as the largest."""
    worst, largest = None, 0.0
    for sample in range(len(expected) if expected.size else 0):
        rows = [array[sample].reshape(-1, array.shape[-1]) for array in (actual, expected)]
        error, (row, channel) = relative_error(*rows)
        if worst is None or not error <= largest:
            place = np.unravel_index(row, expected.shape[1:-1])
            index = (sample, *map(int, place), channel)
            worst, largest = Worst("output", index, float(rows[0][row, channel]), float(rows[1][row, channel])), error
        if largest != largest:
            break
    return largest, worst


def share_of_limit(check: Check) -> float:
    return (check.value or 0.0) / (check.limit or 1.0)
