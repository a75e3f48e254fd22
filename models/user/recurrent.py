"""Calls of `nn.LSTM`, `nn.GRU` and `nn.RNN` in any module → one operator for each layer and direction.

torch.export unrolls these layers over the tokens of its example, which ties the graph to that many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from effexport.models.validation import require

# What PyTorch calls → its gates in the order of ONNX, which is another one than PyTorch's.
GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2), "rnn_tanh": (0,), "rnn_relu": (0,)}


@torch.library.custom_op("effexport_recurrent::layer", mutates_args=())
def layer(
    kind: str,
    x: Tensor,
    input_weight: Tensor,
    state_weight: Tensor,
    input_bias: Tensor,
    state_bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer of `torch._VF.<kind>` in one direction: x [seq, batch, channels], hidden and cell [batch, width] →
    [seq, batch, width] and the last states; `cell` is that of an LSTM only."""
    weights = [input_weight, state_weight, input_bias, state_bias]
    states = (hidden[None], cell[None]) if kind == "lstm" else hidden[None]
    result = getattr(torch._VF, kind)(x.flip(0) if reverse else x, states, weights, True, 1, 0.0, False, False, False)
    output, last, *last_cell = result
    return output.flip(0) if reverse else output.clone(), last[0].clone(), (last_cell or [last])[0][0].clone()


@layer.register_fake
def layer_shapes(kind: str, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden = rest[-3]
    return x.new_empty(*x.shape[:2], hidden.shape[-1]), torch.empty_like(hidden), torch.empty_like(hidden)


class RecurrentCalls(TorchFunctionMode):
    """Turns recurrent layers into `layer` for the length of a `with` block.

    They run in float32 at least, so that rounding does not add up over the tokens. Raises SpecError for an LSTM with
    projections and for packed sequences.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = getattr(func, "__name__", "")
        if kind not in GATES:
            return func(*args, **kwargs)
        require(
            takes_all(args),
            f"nn.{kind.partition('_')[0].upper()} with proj_size, or of a packed sequence, has no counterpart in ONNX; "
            "expected a layer without projections, on a padded sequence",
        )
        x, states, weights, has_biases, _, _, _, bidirectional, batch_first = args
        return run_layers(kind, x, states, weights, has_biases, bidirectional, batch_first)


def takes_all(arguments: Sequence[Any]) -> bool:
    """Whether `layer` takes a call: not one with the weights of projections, nor one of a packed sequence, which has
    its batch sizes in the place of the states."""
    if len(arguments) != 9 or not isinstance(arguments[3], bool):
        return False
    _, _, weights, has_biases, layers, _, _, bidirectional, _ = arguments
    return isinstance(weights, tuple | list) and len(weights) == layers * (1 + bidirectional) * (2 + 2 * has_biases)


def run_layers(
    kind: str,
    x: Tensor,
    states: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """What `torch._VF.<kind>` returns: the output of the last layer, and the last states of all."""
    given = states if isinstance(states, tuple | list) else (states,)
    dtype = x.dtype
    x, *parts = (tensor.to(torch.promote_types(dtype, torch.float32)) for tensor in (x, *given, *weights))
    hidden, cell, parts = parts[0], parts[len(given) - 1], parts[len(given) :]
    x = x.transpose(0, 1) if batch_first else x
    directions, width = 1 + bidirectional, 2 + 2 * has_biases
    last: list[tuple[Tensor, ...]] = []
    while parts:
        outputs = []
        for reverse in range(directions):
            own, parts = parts[:width], parts[width:]
            biases = () if has_biases else [x.new_zeros(own[0].shape[0])] * 2
            output, *ends = layer(kind, x, *own, *biases, hidden[len(last)], cell[len(last)], bool(reverse))
            outputs.append(output)
            last.append(tuple(ends[: len(given)]))
        x = torch.cat(outputs, dim=-1) if bidirectional else outputs[0]
    ends = [torch.stack(of_layers).to(dtype) for of_layers in zip(*last, strict=True)]
    return ((x.transpose(0, 1) if batch_first else x).to(dtype), *ends)
