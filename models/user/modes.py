"""Modes of PyTorch that see its functions, or run the code of a user's model otherwise: at one precision, whatever
types it casts to, mixes, or asks autocast for; or as it is exported, where torch.export would tie a call to the sizes
of its example, or ONNX Runtime would compute it slowly."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from effexport.models.user.size_arithmetic import arithmetic_of_sizes
from effexport.models.validation import require


def is_write(name: str) -> bool:
    """True if a function writes into its first argument, whose type therefore stays."""
    in_place = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return in_place or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def writes(func: Any, kwargs: Any) -> bool:
    """True if a call of a PyTorch function writes into its first argument, or into `out`."""
    name = getattr(func, "__name__", "")
    return is_write(name) or name == "__set__" or kwargs.get("out") is not None or bool(kwargs.get("inplace"))


def storage(x: Tensor) -> int:
    """Identity of the memory of a tensor, also of one without memory while torch.export traces."""
    return int(x.untyped_storage()._cdata)


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """F.scaled_dot_product_attention in single operations, with zeros where a query has no visible key.

    torch.onnx translates it for four axes, and gives the average of all values where a query has no visible key.
    Shapes: [..., queries, head_dim], [..., keys, head_dim], [..., keys, value_dim].
    """
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if factor != 1:
        root = math.sqrt(abs(factor))  # of both, so that float16 does not overflow
        query, key = query * math.copysign(root, factor), key * root
    scores = query @ key.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores.softmax(-1) @ value
    is_exact = mask.dtype != torch.float16  # in which a large negative number in a mask becomes -inf with a score
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -math.inf)
    scores = scores + mask
    # a mask is usually smaller than the scores
    hidden = (mask if is_exact else scores).amax(-1, keepdim=True) == -math.inf
    return (scores.softmax(-1) @ value).masked_fill(hidden, 0)


# Our operators take the types that our layers give them: a weight may be float32 beside values in half precision.
OPERATORS = "torch._ops.effexport"
HALVES = (torch.float16, torch.bfloat16)
METHODS = {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16, Tensor.float: torch.float32}
# Products with weights, which set the type.
WITH_WEIGHTS = frozenset(
    {
        *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "embedding_bag", "prelu"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    }
)
# The result has the type of the first argument, whatever that of the weights and statistics is. Their eps is an
# attribute of an ONNX operator that computes in float32.
NORMS = frozenset({"layer_norm", "group_norm", "batch_norm", "instance_norm"})
# The same with an eps that becomes 0 in float16 although nobody has written it, or that depends on the type.
NORMS_IN_FLOAT32 = frozenset({"normalize", "rms_norm", "cosine_similarity", "pairwise_distance"})
# Moderate numbers have results beyond the largest float16, or sums that bfloat16 does not resolve. Most are in the list
# of functions that torch.autocast computes in float32.
WIDE_RESULTS = frozenset(
    {
        *("pow", "__pow__", "__rpow__", "float_power", "square", "exp", "expm1", "exp2", "sinh", "cosh"),
        *("rsqrt", "reciprocal", "cumsum", "cumprod", "prod", "logsumexp", "logcumsumexp"),
    }
)
# They put a number in the place of others. If it is too large, it means "hidden", and the largest one does as well.
FILLS = frozenset(
    {
        *("masked_fill", "where", "full", "full_like", "new_full", "tensor", "scalar_tensor"),
        *("pad", "constant_pad_nd", "index_fill", "scatter"),
    }
)
# Here a second tensor only says the type of the result.
CASTS = frozenset({"to", "type_as", "type"})
# They count tokens. From 2,048 on in float16, and from 256 on in bfloat16, neighbouring positions are one number.
COUNTING = frozenset({"arange", "linspace", "cumsum"})
# Where a position is used as a number, not as an index.
ARITHMETIC = frozenset(
    {"add", "sub", "__rsub__", "mul", "div", "true_divide", "__rdiv__", "outer", "matmul", "einsum", *CASTS}
)


class OnePrecision(TorchFunctionMode):
    """Computes in one type, and in float32 what the code casts to float32, or what the type has no numbers for.

    A model that is written for float32 does not run after `module.half()`: `mask.float()` meets half weights, 1e-12
    becomes 0, and -1e9 minus infinity. It does under the rules of mixed precision:

    - Products with weights have the type `dtype`, like the weights. Otherwise the widest type wins, as where PyTorch
      promotes types by itself; so what is float32 stays float32 until it is cast, or meets weights.
    - A function with a number that `dtype` cannot tell from 0, 1 or infinity is computed in float32, but for fills; and
      so is one with results that it does not hold.
    - Autocast is off, and casts to another half type give float32: at least the precision that was asked for.

    In float32 the last rule is what remains; in float64 it also holds for casts to float32. Works while torch.export
    traces (strict=False).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.wide = dtype, torch.promote_types(dtype, torch.float32)
        self.positions: dict[int, Tensor] = {}  # integers, by id; they are kept, so that their ids stay their own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]
        if name == "__get__" or getattr(func, "__module__", "") == OPERATORS:
            return func(*args, **(kwargs or {}))
        if METHODS.get(func, self.dtype) != self.dtype:
            func = Tensor.float if self.wide == torch.float32 else Tensor.double
        args, kwargs = tree_map(self.allowed, (args, kwargs or {}))
        counts = any(id(x) in self.positions for x in tree_leaves((args, kwargs)))
        with autocast_off():
            result = self.call(func, name, args, kwargs, name in COUNTING or (counts and name in ARITHMETIC))
        if (counts or name in COUNTING) and is_integer(result):
            self.positions[id(result)] = result
        return result

    def allowed(self, value: Any) -> Any:
        """Types that the code asks for, but `dtype`, at least as wide as float32; anything else as it is."""
        other = isinstance(value, torch.dtype) and value in METHODS.values() and value != self.dtype
        return self.wide if other else value

    def call(self, func: Any, name: str, args: Any, kwargs: Any, is_wide: bool) -> Any:
        """The result of a function, with its arguments in the types that it needs. is_wide: half precision is not
        enough."""
        types = types_of((args, kwargs))
        half = next((x for x in (*types, *args, *kwargs.values()) if isinstance(x, torch.dtype) and x in HALVES), None)
        writes = is_write(name)
        if half is not None and (name not in CASTS or is_wide):
            lost = [x for x in (*args, *kwargs.values()) if is_lost(x, half)]
            if writes or (name in FILLS and all(abs(x) > 1 for x in lost)):
                args, kwargs = with_nearest(name, args, kwargs, half)
            elif is_wide or (lost and name not in NORMS) or name in WIDE_RESULTS | NORMS_IN_FLOAT32:
                args, kwargs = cast((args, kwargs), torch.float32, (half,))
        if len(set(types_of((args, kwargs)))) > 1 and name not in CASTS:
            if name in WITH_WEIGHTS:
                wanted = self.dtype
            elif writes and args[0].is_floating_point():
                wanted = args[0].dtype
            else:
                wanted = functools.reduce(torch.promote_types, types)
            args, kwargs = cast((args, kwargs), wanted, types)
        result = func(*args, **kwargs)
        return cast(result, types[0], types_of(result)) if types and name in NORMS | NORMS_IN_FLOAT32 else result


@contextmanager
def autocast_off() -> Iterator[None]:
    # not a region of torch.autocast, which torch.export would record
    enabled = torch.is_autocast_enabled("cpu")
    if enabled:
        torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        if enabled:
            torch.set_autocast_enabled("cpu", True)


def types_of(values: Any) -> list[torch.dtype]:
    """The types of the floating-point tensors in arguments or results, in their order."""
    return [x.dtype for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()]


def cast(values: Any, wanted: torch.dtype, types: Sequence[torch.dtype]) -> Any:
    """Arguments or results with the tensors of some types, and these types themselves, in the wanted type."""

    def one(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return wanted if value in types else value
        return value.to(wanted) if isinstance(value, Tensor) and value.dtype in types else value

    return tree_map(one, values)


def is_lost(value: Any, half: torch.dtype) -> bool:
    """True if a number becomes infinity, 1, 0, or too small for processors that have no subnormal numbers."""
    if type(value) not in (int, float) or value == 0 or not math.isfinite(value):
        return False
    size, limits = abs(value), torch.finfo(half)
    return bool(not limits.tiny <= size <= limits.max or 0 < abs(size - 1) < limits.eps / 2)


def with_nearest(name: str, args: Any, kwargs: Any, half: torch.dtype) -> tuple[Any, Any]:
    """Arguments with the numbers of a half type next to those that are lost there."""
    limits = torch.finfo(half)

    def nearest(value: Any) -> Any:
        if not is_lost(value, half):
            return value
        return math.copysign(min(max(abs(value), limits.tiny), limits.max), value)

    # the second argument of __setitem__ may be an index
    first = 2 if name == "__setitem__" else 0
    return (*args[:first], *map(nearest, args[first:])), {key: nearest(value) for key, value in kwargs.items()}


def is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64)


class Observer(TorchDispatchMode):
    """Sees every operator that PyTorch computes in a `with` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch would load its compiler, for a second, to keep it out of code that is not compiled anyway
        return False

    def see(self, func: Any, arguments: tuple[Any, ...]) -> None:
        """Look at a call before it is computed."""

    def seen(self, func: Any, arguments: Any, result: Any) -> None:
        """Look at a call after it was computed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.see(func, args)
        result = func(*args, **(kwargs or {}))
        self.seen(func, (args, kwargs), result)
        return result


class FloatTypes(Observer):
    """Collects the floating-point types of all results in a `with` block, in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def seen(self, func: Any, arguments: Any, result: Any) -> None:
        self.found.update(types_of(result))


class Selections(Observer):
    """Collects what is selected by indices in a `with` block. found: table, axis, indices, and padding_idx or None."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, int, Tensor, int | None]] = []

    def see(self, func: Any, arguments: tuple[Any, ...]) -> None:
        aten = torch.ops.aten
        if func is aten.embedding.default:
            table, index, *rest = arguments
            self.found.append((table, 0, index, rest[0] if rest and rest[0] >= 0 else None))
        elif func is aten.index.Tensor:
            table, indices = arguments
            integers = [(axis, x) for axis, x in enumerate(indices) if x is not None and x.dtype is not torch.bool]
            self.found += [(table, axis, index, None) for axis, index in integers]
        elif func in (aten.index_select.default, aten.gather.default):
            table, axis, index = arguments[:3]
            self.found.append((table, axis % max(1, table.ndim), index, None))


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
