"""Repairs of torch.onnx: translations that it lacks, and nodes that other tools misread.

Translated are arithmetic on sizes, with the results that Python has, and recurrent layers. Nodes that other tools
misread are replaced by nodes that compute the same: see docs/function_bodies.md.
"""

from __future__ import annotations

import math
import operator
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx.defs
import onnx_ir as ir
import torch
from onnxscript import values

from effexport.export.custom_nodes import nodes_of, replace_node
from effexport.models.user.modes import GATES


def size_translation(opset: int) -> dict[Any, Callable[..., Any]]:
    """Translations for torch.onnx.export of functions of sizes, by function. For one export: they keep state."""
    sizes = _Sizes(opset)
    functions = {
        torch.sym_float: "float",
        torch.sym_sqrt: "Sqrt",
        torch.sym_min: "Min",
        torch.sym_max: "Max",
        operator.truediv: "Div",
        operator.add: "Add",
        operator.sub: "Sub",
        operator.mul: "Mul",
        operator.pow: "Pow",
        operator.neg: "Neg",
    }
    roundings = {math.floor: "Floor", math.ceil: "Ceil", math.trunc: "Trunc", round: "Round"}
    table: dict[Any, Callable[..., Any]] = {key: sizes.function(name) for key, name in functions.items()}
    table |= {key: sizes.rounding(name) for key, name in roundings.items()}
    return table | {operator.floordiv: lambda a, b: sizes.floor_of_quotient(a, b)}


class _Sizes:
    """Translations of functions of sizes.

    Tensors meet numbers that are not whole in float32. Python has them in double, where `int(n * 0.29)` may be
    another one, so what is rounded is computed once more from its beginnings: in integers if it is a quotient or a
    root of whole numbers, which TensorRT reads, otherwise in double.
    """

    def __init__(self, opset: int) -> None:
        self.op = values.Opset("", opset)
        self.origins: dict[Any, tuple[str, tuple[Any, ...]]] = {}  # the function and the arguments of float32 scalars

    def function(self, name: str) -> Callable[..., Any]:
        """The translation of a function: of ONNX, or "float"."""

        def translate(*arguments: Any) -> Any:
            if name not in ("float", "Sqrt", "Div") and all(map(is_whole, arguments)):
                return getattr(self.op, name)(*arguments)
            result = self.computed(name, arguments, ir.DataType.FLOAT)
            self.origins[result] = (name, arguments)
            return result

        return translate

    def rounding(self, name: str) -> Callable[..., Any]:
        """The translation of a function that makes an integer: Floor, Ceil or Round of ONNX, or "Trunc"."""

        def translate(number: Any, digits: None = None) -> Any:
            if is_whole(number):
                return self.op.Identity(number)
            function, arguments = self.origins.get(number, ("", ()))
            is_root = function == "Sqrt" or (function == "Pow" and arguments[1] == 0.5)
            wholes = [self.whole(argument) for argument in arguments[: 1 if is_root else 2]]
            if name != "Round" and wholes and None not in wholes:
                if function == "Div":
                    return self.quotient(name, *wholes)
                if is_root:
                    return self.root(name, *wholes)
            exact = self.number(number, ir.DataType.DOUBLE)
            return self.op.Cast(exact if name == "Trunc" else getattr(self.op, name)(exact), to=ir.DataType.INT64)

        return translate

    def computed(self, name: str, arguments: tuple[Any, ...], dtype: Any) -> Any:
        numbers = [self.number(argument, dtype) for argument in arguments]
        return numbers[0] if name == "float" else getattr(self.op, name)(*numbers)

    def number(self, value: Any, dtype: Any) -> Any:
        """A number, or what a scalar of the graph was computed from, in a type of floating-point numbers."""
        if isinstance(value, int | float):
            return self.op.Constant(value=ir.tensor(np.array(value, dtype.numpy())))
        if dtype == ir.DataType.DOUBLE and value in self.origins:
            return self.computed(*self.origins[value], dtype)
        return value if value.dtype == dtype else self.op.Cast(value, to=dtype)

    def whole(self, value: Any) -> Any:
        """A number as an integer, if it is one; otherwise None."""
        function, arguments = ("", ()) if isinstance(value, int | float) else self.origins.get(value, ("", ()))
        value = arguments[0] if function == "float" else value
        return value if is_whole(value) else None

    def floor_of_quotient(self, a: Any, b: Any) -> Any:
        # the remainder has the sign of b, as in Python; ONNX's division of integers rounds towards zero
        return self.op.Div(self.op.Sub(a, self.op.Mod(a, b)), b)

    def quotient(self, name: str, a: Any, b: Any) -> Any:
        if name == "Ceil":
            return self.op.Neg(self.floor_of_quotient(self.op.Neg(a), b))
        return self.floor_of_quotient(a, b) if name == "Floor" else self.op.Div(a, b)

    def root(self, name: str, n: Any) -> Any:
        """The square root, rounded down or up. Of float32 it may be off by one, which its square shows."""
        op = self.op
        near = op.Cast(op.Sqrt(op.Cast(n, to=ir.DataType.FLOAT)), to=ir.DataType.INT64)
        low = op.Sub(near, self.count(op.Greater(op.Mul(near, near), n)))
        next_one = op.Add(low, 1)
        low = op.Add(low, self.count(op.LessOrEqual(op.Mul(next_one, next_one), n)))
        return op.Add(low, self.count(op.Less(op.Mul(low, low), n))) if name == "Ceil" else low

    def count(self, condition: Any) -> Any:
        return self.op.Cast(condition, to=ir.DataType.INT64)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) or (not isinstance(value, float) and value.dtype == ir.DataType.INT64)


def recurrent_translation(opset: int) -> dict[Any, Callable[..., Any]]:
    """Translations for torch.onnx.export of the recurrent operator of `models.user.modes`, by operator."""
    op = values.Opset("", opset)

    def translate(
        kind: str,
        x: Any,
        input_weight: Any,
        state_weight: Any,
        input_bias: Any,
        state_bias: Any,
        hidden: Any,
        cell: Any,
        reverse: bool,
    ) -> tuple[Any, ...]:
        width = int(state_weight.shape[-1])
        rows = np.concatenate([np.arange(gate * width, (gate + 1) * width) for gate in GATES[kind]])
        order, first = op.Constant(value=ir.tensor(rows)), op.Constant(value_ints=[0])
        weights = [op.Unsqueeze(op.Gather(weight, order), first) for weight in (input_weight, state_weight)]
        biases = op.Concat(op.Gather(input_bias, order), op.Gather(state_bias, order), axis=0)
        states = [op.Unsqueeze(state, first) for state in ((hidden, cell) if kind == "lstm" else (hidden,))]
        attributes: dict[str, Any] = {"hidden_size": width}
        if reverse:
            attributes["direction"] = "reverse"
        if kind == "gru":
            attributes["linear_before_reset"] = 1
        if kind == "rnn_relu":
            attributes["activations"] = ["Relu"]
        layer = getattr(op, kind.partition("_")[0].upper())
        output, *last = layer(
            x, *weights, op.Unsqueeze(biases, first), None, *states, _outputs=2 + (kind == "lstm"), **attributes
        )
        directions = op.Constant(value_ints=[1])
        ends = [op.Squeeze(state, first) for state in last]
        return op.Squeeze(output, directions), ends[0], ends[-1]

    return {torch.ops.effexport_recurrent.layer.default: translate}


ELLIPSIS = "..."


def make_portable(model: ir.Model) -> None:
    """Replace what tools misread, in the graph and its subgraphs. Function bodies are written without it."""
    make_divisions_exact(model)
    select_instead_of_casting(model)
    reduce_parts_of_concatenations(model)
    halve_the_input_of_gelu(model)
    find_rows_without_keys(model)
    name_axes_of_einsum(model)
    write_out_sums_of_exponentials(model)


def make_divisions_exact(model: ir.Model) -> None:
    """Make the dividend of every integer division a multiple of the divisor.

    The result is the same, but OpenVINO forgets to round the quotient.
    """
    for node in nodes_of(model, "Div"):
        dividend = node.inputs[0]
        if dividend is not None and dividend.dtype in (ir.DataType.INT32, ir.DataType.INT64):
            # fmod: like Div, which rounds towards zero
            rest = ir.node("Mod", [dividend, node.inputs[1]], {"fmod": 1})
            whole = ir.node("Sub", [dividend, rest.outputs[0]])
            for value in (*rest.outputs, *whole.outputs):
                value.type, value.shape = dividend.type, node.outputs[0].shape
            assert node.graph is not None
            node.graph.insert_before(node, [rest, whole])
            node.replace_input_with(0, whole.outputs[0])


def select_instead_of_casting(model: ir.Model) -> None:
    """Replace casts of booleans to float32 by the choice between 1 and 0.

    onnxconverter-common, which converts files to float16, keeps the type of casts and so writes files that do not load.
    """
    graph = model.graph
    casts = [
        node
        for node in nodes_of(model, "Cast")
        if node.inputs[0] is not None
        and node.inputs[0].dtype == ir.DataType.BOOL
        and node.attributes["to"].as_int() == ir.DataType.FLOAT
    ]
    if not casts:
        return
    one = _initializer(graph, "true_as_float", np.array(1, np.float32))
    zero = _initializer(graph, "false_as_float", np.array(0, np.float32))
    for cast in casts:
        replace_node(cast, ir.node("Where", [cast.inputs[0], one, zero]))


def reduce_parts_of_concatenations(model: ir.Model) -> None:
    """Replace the maximum of a concatenation along its axis by the maximum of the parts' maxima, and minima likewise.

    The result has the same bits. OpenVINO before 2026.2 takes the first form for an elementwise maximum of the parts.
    """
    elementwise = {"ReduceMax": "Max", "ReduceMin": "Min"}
    waiting = nodes_of(model, *elementwise)
    while waiting:
        node = waiting.pop()
        reduced = node.inputs[0]
        source = reduced.producer() if reduced is not None else None
        if source is None or source.op_type != "Concat" or not _reduces_axis_of(node, source):
            continue
        parts = [ir.node(node.op_type, [part, node.inputs[1]], dict(node.attributes)) for part in source.inputs]
        whole = ir.node(elementwise[node.op_type], [part.outputs[0] for part in parts])
        for part in parts:
            part.outputs[0].type, part.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        replace_node(node, *parts, whole)
        waiting += parts
        if not source.outputs[0].uses():
            assert source.graph is not None
            source.graph.remove(source, safe=True)


def halve_the_input_of_gelu(model: ir.Model) -> None:
    """Replace x · (0.5 · (1 + erf(x / √2))) by (x · 0.5) · (1 + erf(x / √2)), and likewise for tanh instead of erf.

    torch.onnx writes the first form before opset 20, which has Gelu; ONNX Runtime makes one kernel of the second form
    only. Halving is exact, so both have the same bits, but for numbers so small that halves of them are rounded.
    """
    for node in nodes_of(model, "Erf", "Tanh"):
        readers = _readers(node, "Add", "Mul", "Mul")
        if not readers:
            continue
        addition, halving, product = readers
        half = next((value for value in halving.inputs if value is not addition.outputs[0]), None)
        x = next((value for value in product.inputs if value is not halving.outputs[0]), None)
        factor = ir.convenience.get_const_tensor(half) if half is not None else None
        if x is None or factor is None or factor.numpy().shape != () or factor.numpy() != 0.5:
            continue
        halved = ir.node("Mul", [x, half], name=halving.name)
        halved.metadata_props.update(halving.metadata_props)
        halved.outputs[0].type, halved.outputs[0].shape = x.type, x.shape
        assert product.graph is not None
        product.graph.insert_before(product, halved)
        product.replace_input_with(product.inputs.index(x), halved.outputs[0])
        product.replace_input_with(product.inputs.index(halving.outputs[0]), addition.outputs[0])
        product.graph.remove(halving, safe=True)


def find_rows_without_keys(model: ir.Model) -> None:
    """Let the search for NaN in the result of a softmax also find the rows that are −∞ throughout.

    PyTorch's softmax gives NaN there, and its attention then writes zeros; ONNX Runtime's gives equal shares.
    """
    for node in nodes_of(model, "IsNaN"):
        shares = node.inputs[0]
        softmax = shares.producer() if shares is not None else None
        scores = softmax.inputs[0] if softmax is not None and softmax.op_type == "Softmax" else None
        if softmax is None or scores is None or scores.dtype is None:
            continue
        axis = softmax.attributes["axis"].as_int() if "axis" in softmax.attributes else -1
        # of the graph, also for a node in a subgraph
        axes = _initializer(model.graph, f"softmax_axis_{axis}".replace("-", "last_"), np.array([axis], np.int64))
        lowest = _initializer(
            model.graph, f"minus_infinity_{scores.dtype.name.lower()}", np.array(-np.inf, scores.dtype.numpy())
        )
        highest = ir.node("ReduceMax", [scores, axes], {"keepdims": 1})
        hidden = ir.node("Equal", [highest.outputs[0], lowest])
        found = ir.node("IsNaN", [shares])
        either = ir.node("Or", [found.outputs[0], hidden.outputs[0]])
        highest.outputs[0].type = scores.type
        for value in (hidden.outputs[0], found.outputs[0], either.outputs[0]):
            value.type = node.outputs[0].type
        found.outputs[0].shape = either.outputs[0].shape = node.outputs[0].shape
        replace_node(node, highest, hidden, found, either)


def write_out_sums_of_exponentials(model: ir.Model) -> None:
    """Replace ReduceLogSumExp by its formula, with the maximum subtracted, which TensorRT leaves out."""
    for node in nodes_of(model, "ReduceLogSumExp"):
        x, *axes = node.inputs
        if x is None or x.dtype is None:
            continue
        zero = _initializer(model.graph, f"zero_{x.dtype.name.lower()}", np.array(0, x.dtype.numpy()))
        attributes = dict(node.attributes)
        keep = attributes["keepdims"].as_int() if "keepdims" in attributes else 1
        highest = ir.node("ReduceMax", [x, *axes], {**attributes, "keepdims": 1})
        # rows that are infinite throughout, as in PyTorch
        is_infinite = ir.node("IsInf", highest.outputs)
        offset = ir.node("Where", [*is_infinite.outputs, zero, *highest.outputs])
        shifted = ir.node("Sub", [x, *offset.outputs])
        power = ir.node("Exp", shifted.outputs)
        total = ir.node("ReduceSum", [*power.outputs, *axes], attributes)
        logarithm = ir.node("Log", total.outputs)
        back = [] if keep else [ir.node("Squeeze", [*offset.outputs, *axes])]
        result = ir.node("Add", [*logarithm.outputs, *(back[0] if back else offset).outputs])
        new = [highest, is_infinite, offset, shifted, power, total, logarithm, *back, result]
        for made in new:
            made.outputs[0].type = x.type
        is_infinite.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
        shifted.outputs[0].shape = power.outputs[0].shape = x.shape
        result.outputs[0].shape = node.outputs[0].shape
        replace_node(node, *new)


def name_axes_of_einsum(model: ir.Model) -> None:
    """Give every axis of every Einsum a lower-case letter, where the ranks are known.

    TensorRT refuses capitals, and an ellipsis that stands for more axes in one operand than in another, which ONNX
    Runtime does too. The results of up to two operands have the same bits.
    """
    for node in nodes_of(model, "Einsum"):
        shapes = [value.shape if value is not None else None for value in node.inputs]
        ranks = [len(shape) for shape in shapes if shape is not None]
        equation = node.attributes["equation"].as_string()
        if len(ranks) == len(shapes):
            node.attributes["equation"] = ir.AttrString("equation", plain_equation(equation, ranks))


def plain_equation(equation: str, ranks: Sequence[int]) -> str:
    """An equation with lower-case letters only, without an ellipsis and with "->"; the given one if it needs none of
    that, or more than 26 letters. ranks: those of the operands."""
    operands, arrow, output = equation.replace(" ", "").partition("->")
    if arrow and ELLIPSIS not in equation and equation.islower():
        return equation
    terms = operands.split(",")
    if not arrow:
        # ONNX: what the ellipsis stands for, then the letters that occur once, in the order of the alphabet
        letters = sorted(letter for letter in set(operands) if letter.isalpha() and operands.count(letter) == 1)
        output = ELLIPSIS * (ELLIPSIS in operands) + "".join(letters)
    named = sorted({letter for letter in operands if letter.isalpha()})
    covered = [rank - len(term.replace(ELLIPSIS, "")) for term, rank in zip(terms, ranks, strict=True)]
    most = max((n for term, n in zip(terms, covered, strict=True) if ELLIPSIS in term), default=0)
    taken = [letter for letter in named if letter.islower()]
    free = [letter for letter in string.ascii_lowercase if letter not in taken]
    capitals = [letter for letter in named if letter.isupper()]
    if len(free) < len(capitals) + most:
        return equation
    lower = {**{letter: letter for letter in taken}, **dict(zip(capitals, free, strict=False))}
    axes = "".join(free[len(capitals) : len(capitals) + most])

    def plain(term: str, count: int) -> str:
        before, ellipsis, after = term.partition(ELLIPSIS)
        # operands are aligned at the last of these axes
        middle = axes[most - count :] if ellipsis else ""
        return "".join(lower[letter] for letter in before) + middle + "".join(lower[letter] for letter in after)

    return ",".join(map(plain, terms, covered)) + "->" + plain(output, most)


def _initializer(graph: ir.Graph, name: str, array: Any) -> ir.Value:
    """A constant of a graph, made when it is first needed."""
    if name not in graph.initializers:
        tensor = ir.tensor(array)
        graph.register_initializer(
            ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        )
    return graph.initializers[name]


def avoid_missing_bfloat16(model: ir.Model) -> None:
    """Compute in float32 what ONNX does not define for bfloat16 in the opset of the graph: in opset 20, sines, Elu,
    convolutions and recurrent layers among others."""
    half = ir.DataType.BFLOAT16
    for node in [node for node in model.graph.all_nodes() if node.domain == ""]:
        takes, makes = _types_without_bfloat16(node, model.opset_imports[""])
        given = {i: value for i in takes if (value := node.inputs[i]) is not None and value.dtype == half}
        # within what torch.onnx writes for one function, results have no types: they have those of the inputs
        bound = {takes[i] for i in given}
        made = [i for i in makes if node.outputs[i].dtype == half or makes[i] in bound]
        if not given and not made:
            continue
        widened = {i: _cast(value, ir.DataType.FLOAT) for i, value in given.items()}
        inputs = [widened[i].outputs[0] if i in widened else value for i, value in enumerate(node.inputs)]
        wide = ir.node(node.op_type, inputs, dict(node.attributes), num_outputs=len(node.outputs), name=node.name)
        wide.metadata_props.update(node.metadata_props)
        for i, value in enumerate(wide.outputs):
            value.type, value.shape = node.outputs[i].type, node.outputs[i].shape
            if i in made:
                value.type = ir.TensorType(ir.DataType.FLOAT)
        rounded = {i: _cast(wide.outputs[i], half) for i in made}
        outputs = [rounded[i].outputs[0] if i in rounded else value for i, value in enumerate(wide.outputs)]
        new = [*widened.values(), wide, *rounded.values()]
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], new, node.outputs, outputs)


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [value], {"to": dtype})
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
    return cast


def _types_without_bfloat16(node: ir.Node, opset: int) -> tuple[dict[int, str], dict[int, str]]:
    """The inputs and the outputs of a node that may be float32 but not bfloat16, with their type variables."""
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    lacking = {
        one.type_param_str
        for one in schema.type_constraints
        if "tensor(float)" in one.allowed_type_strs and "tensor(bfloat16)" not in one.allowed_type_strs
    }

    def places(formal: Sequence[onnx.defs.OpSchema.FormalParameter], count: int) -> dict[int, str]:
        # the last parameter may stand for several
        types = (formal[min(i, len(formal) - 1)].type_str for i in range(count))
        return {i: name for i, name in enumerate(types) if name in lacking}

    return places(schema.inputs, len(node.inputs)), places(schema.outputs, len(node.outputs))


def _readers(node: ir.Node, *op_types: str) -> list[ir.Node]:
    """The nodes of these types that read one another's result, beginning with the node's; [] if there are others."""
    found: list[ir.Node] = []
    for op_type in op_types:
        (result,) = node.outputs
        uses = [use.node for use in result.uses()]
        if result.is_graph_output() or [(use.domain, use.op_type) for use in uses] != [("", op_type)]:
            return []
        node = uses[0]
        found.append(node)
    return found


def _reduces_axis_of(reduction: ir.Node, concatenation: ir.Node) -> bool:
    """True if a reduction runs over the axis of a concatenation, and no part of it can be empty."""
    given = reduction.inputs[1] if len(reduction.inputs) > 1 else None
    axes = ir.convenience.get_const_tensor(given) if given is not None else None
    axis = concatenation.attributes["axis"].as_int()
    sizes = []
    for part in concatenation.inputs:
        if axes is None or part is None or part.shape is None:
            return False
        rank, size = len(part.shape), part.shape[axis]
        if axis % rank not in {int(number) % rank for number in axes.numpy()}:
            return False
        sizes.append(size)
    return all(isinstance(size, int) and size > 0 for size in sizes)
