"""Calls in the code of a user's own module as PyTorch traces them: what torch.export would tie to the sizes of its
example, or ONNX Runtime would compute slowly, is written otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from effexport.models.user.modes import autocast_off
from effexport.models.user.size_arithmetic import arithmetic_of_sizes
from effexport.models.validation import require

# What an ellipsis stands for; equations of PyTorch have letters only.
AXES = "0123456789"


def product_of(equation: str, operands: Sequence[Tensor]) -> Tensor | None:
    """The result of an equation, pair by pair from the left; None if a pair is neither a product of matrices nor a
    multiplication by factors."""
    terms = plain_terms(equation, operands)
    if terms is None or len(operands) < 2:
        return None
    *axes, output = terms
    found, letters = operands[0], axes[0]
    for i, (other, others) in enumerate(zip(operands[1:], axes[1:], strict=True), start=1):
        needed = set(output).union(*axes[i + 1 :])
        pair = product_of_pair(found, letters, other, others, needed)
        if pair is None:
            return None
        found, letters = pair
    # for `view`, which may follow
    return found.permute([letters.index(letter) for letter in output]).contiguous()


def plain_terms(equation: str, operands: Sequence[Tensor]) -> list[str] | None:
    """The axes of the operands and of the result, each once, without an ellipsis; None for other equations."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != len(operands):
        return None
    counts = {x.dim() - len(term) + 3 for term, x in zip(terms, operands, strict=True) if "..." in term}
    if len(counts) > 1 or ("..." in output and not counts) or max(counts, default=0) > len(AXES):
        return None
    plain = [term.replace("...", AXES[: max(counts, default=0)]) for term in (*terms, output)]
    is_plain = all(len(set(term)) == len(term) for term in plain)
    fits = all(len(term) == x.dim() for term, x in zip(plain, operands, strict=False))
    return plain if is_plain and fits and set(plain[-1]) <= set("".join(plain[:-1])) else None


def product_of_pair(a: Tensor, a_axes: str, b: Tensor, b_axes: str, needed: set[str]) -> tuple[Tensor, str] | None:
    """The product of two operands, and its axes. needed: those that are not summed over."""
    shared = [axis for axis in a_axes if axis in b_axes]
    batch = "".join(axis for axis in shared if axis in needed)
    summed = "".join(axis for axis in shared if axis not in needed)
    rows, columns = ("".join(x for x in axes if x not in shared) for axes in (a_axes, b_axes))
    if not summed and needed.issuperset(a_axes) and not columns:  # factors
        b = b.permute([b_axes.index(axis) for axis in batch])
        return a.permute([a_axes.index(axis) for axis in batch + rows]) * b[(..., *[None] * len(rows))], batch + rows
    if not summed and not rows:
        return product_of_pair(b, b_axes, a, a_axes, needed)
    if not batch or len(summed) != 1 or max(len(rows), len(columns)) > 1 or not needed.issuperset(rows + columns):
        return None
    if a.dtype == torch.bool:  # which has no matrix product
        return None
    sizes = a.shape[a_axes.index(summed)], b.shape[b_axes.index(summed)]
    ones = [isinstance(size, int) and size == 1 for size in sizes]
    if ones[0] != ones[1]:  # einsum repeats it, which matmul does not
        return None
    a = a.permute([a_axes.index(axis) for axis in batch + rows + summed])
    b = b.permute([b_axes.index(axis) for axis in batch + summed + columns])
    product = (a if rows else a.unsqueeze(-2)) @ (b if columns else b.unsqueeze(-1))
    product = product if columns else product.squeeze(-1)
    return (product if rows else product.squeeze(-1 - len(columns))), batch + rows + columns


# All are PyTorch's names of it.
SAME = (torch.max_pool1d, F.max_pool1d, F._max_pool1d)  # type: ignore[attr-defined]


def max_pool1d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,  # always, or it is another function
) -> Tensor:
    """The largest of each window: [..., channels, seq] → [..., channels, windows]."""
    window, step, edge, gap = (one(x) for x in (kernel_size, stride or kernel_size, padding, dilation))
    flat = F.max_pool2d(input.unsqueeze(-2), (1, window), (1, step), (0, edge), (1, gap), ceil_mode)
    return flat.squeeze(-2)


def one(value: Any) -> int:
    return int(value[0] if isinstance(value, tuple | list) else value)


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


def takes_all(arguments: Sequence[Any]) -> bool:
    """True if `layer` takes a call: not one with the weights of projections, nor one of a packed sequence, which has
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
    """The result of `torch._VF.<kind>`: the output of the last layer, and the last states of all."""
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


class CodeAsExported(TorchFunctionMode):
    """Computes calls as the exported file does, and with autocast off, also within a region of it that was traced.

    `torch.einsum` becomes transpositions, products of matrices and factors, where it is as many of these as there are
    pairs of operands; `torch.max_pool1d`, which makes a free length a constant of the trace, a function that does not;
    a recurrent layer one or several of `layer`, in float32 at least, so that rounding does not add up over the tokens.
    Works while torch.export traces (strict=False). Raises SpecError for an LSTM with projections and for packed
    sequences.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, kind = kwargs or {}, getattr(func, "__name__", "")
        with autocast_off():
            if kind in GATES:
                return recurrent_layers(kind, args)
            if func is torch.einsum and args and isinstance(args[0], str) and not kwargs:
                operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
                if (result := product_of(args[0], operands)) is not None:
                    return result
            return (max_pool1d if func in SAME else func)(*args, **kwargs)


def recurrent_layers(kind: str, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """The result of `torch._VF.<kind>`. Raises SpecError for a call that `layer` does not take."""
    require(
        takes_all(arguments),
        f"nn.{kind.partition('_')[0].upper()} with proj_size, or of a packed sequence, has no counterpart in ONNX; "
        "expected a layer without projections, on a padded sequence",
    )
    x, states, weights, has_biases, _, _, _, bidirectional, batch_first = arguments
    return run_layers(kind, x, states, weights, has_biases, bidirectional, batch_first)


@contextlib.contextmanager
def code_as_exported(module: nn.Module) -> Iterator[None]:
    """Read the code of a user's own module as it is exported, but for attention, for the length of a `with` block."""
    # the code may seed the generator
    with torch.random.fork_rng(devices=[]), CodeAsExported(), arithmetic_of_sizes(module):
        yield
