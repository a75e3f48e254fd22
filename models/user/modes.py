"""Modes of PyTorch that see its functions, or run the code of a user's model at one precision, whatever types it casts
to, mixes, or asks autocast for."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# As modes see it, also while its name stands for another function.
ATTENTION = F.scaled_dot_product_attention


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
