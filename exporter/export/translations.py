"""Translations that torch.onnx.export lacks: of arithmetic on sizes, with the results that Python has, and of recurrent
layers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import values

from effexport.models.user.traced_code import GATES


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
    """Translations for torch.onnx.export of the operator of `models.user.traced_code`, by operator."""
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
