"""Recurrent layers of PyTorch → LSTM, GRU and RNN of ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def recurrent_translation(opset: int) -> dict[Any, Callable[..., Any]]:
    """Translations for torch.onnx.export of the operator of `models.adapters.recurrent`, by operator."""
    import numpy as np
    import onnx_ir as ir
    import torch
    from onnxscript import values

    from effexport.models.user.traced_code import GATES

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
