"""A TensorRT plugin as data: one launch of a CUDA kernel, one row in the `trt.py` of its operator.

A row says what the node takes and returns, and how its kernel is launched, in arithmetic that works for integers and
for TensorRT's symbolic dimensions alike: with a dimension on the left of +, − and ·, and `cdiv`, `fdiv`, `minimum` and
`maximum`. `tensorrt_plugins` registers rows with TensorRT; tests execute the same rows in an emulation.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from effexport.plugins.ops import FLOAT_TYPES

# A dimension, or what is computed from some: an int, or a symbolic expression of TensorRT.
Size = Any
# The dimensions and attributes of a node by name, and what its row computes from them.
Sizes = Any
INT32_MAX = 2**31 - 1
# Kernels count in int32, up to a tile beyond the end of a dimension.
LARGEST_DIM = 2**31 - 2**16


def cdiv(whole: Size, part: Size) -> Size:
    """The number of parts that make up the whole, the last one perhaps smaller."""
    if isinstance(whole, int) and isinstance(part, int):
        return -(-whole // part)
    import tensorrt.plugin as trtp

    return trtp.cdiv(whole, part)


def fdiv(whole: Size, part: Size) -> Size:
    """The number of whole parts that fit."""
    if isinstance(whole, int) and not isinstance(part, int):
        import tensorrt.plugin as trtp

        whole = trtp.ShapeExpr(whole)
    return whole // part


def minimum(a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    import tensorrt.plugin as trtp

    return trtp.min(a, b)


def maximum(a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    import tensorrt.plugin as trtp

    return trtp.max(a, b)


@dataclass(frozen=True)
class Tensor:
    """An input or output. dims: names of sizes, or numbers. dtype: "T" for the type that a node's floats share."""

    name: str
    dtype: str
    dims: tuple[str, ...]


def tensor_from_text(text: str) -> Tensor:
    """`q: T [batch heads n d]` as a Tensor."""
    match = re.fullmatch(r"(\w+): (\w+) \[([\w ]*)\]", text)
    assert match, text
    return Tensor(match[1], match[2], tuple(match[3].split()))


@dataclass(frozen=True)
class Launch:
    """The launch of a kernel. scalars: its arguments between inputs and outputs, each an int32 or a float32."""

    blocks: Size
    threads: int
    scalars: tuple[Size, ...]
    shared_bytes: Size = 0

    @property
    def grid(self) -> Size:
        """A grid of no blocks cannot be launched, and kernels are right with any other."""
        return minimum(maximum(self.blocks, 1), INT32_MAX)


def int32_bits(scalar: Size) -> Size:
    """A float as the int32 of the same bits, because TensorRT passes integers only; anything else as it is."""
    return struct.unpack("<i", struct.pack("<f", scalar))[0] if isinstance(scalar, float) else scalar


@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """The inputs and attributes of a node, and the limits of its support.

    inputs: such as "q: T [batch heads n d]". attributes: their names in the order of TensorRT's fields, with int,
    float, or tuple for ints. A node must carry all of them but `later`, which nodes of earlier versions lack, with the
    values that they have then. at_least: the smallest value of an integer attribute, by default 0. fixed: dimensions
    that must be known when the engine is built, with their range, which has a step of 2 for odd numbers, and more for
    multiples. types: what T may be. further: what else is wrong with dimensions (by name, as `bound` returns them) and
    attributes that pass these checks, as `why_not` says it. title: what takes the node, in these sentences.
    """

    name: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, type[int] | type[float] | type[tuple[int, ...]]] = field(default_factory=dict)
    at_least: Mapping[str, int] = field(default_factory=dict)
    later: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, range] = field(default_factory=dict)
    types: tuple[str, ...] = FLOAT_TYPES
    further: Callable[[Mapping[str, int | str | None], Mapping[str, Any]], str | None] = lambda sizes, attributes: None
    title: str = "the TensorRT plugin"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(map(tensor_from_text, self.inputs))

    def why_not(
        self, dtypes: Sequence[str], dims: Sequence[Sequence[int | str | None]], attributes: Mapping[str, Any]
    ) -> str | None:
        """The reason why a node is not supported, as a sentence for users; None if it is. Arguments: as `choose`'s."""
        return (
            self._why_not_ranks(dims)
            or self.why_not_types(dtypes)
            or self._why_not_equal(dims)
            or self._why_not_sizes(self.bound(dims))
            or self._why_not_attributes(attributes)
            or self.further(self.bound(dims), attributes)
        )

    def type_of_t(self, dtypes: Sequence[str]) -> str:
        """The type of T for inputs of these types; the only one if no input is of type T."""
        return next(
            (dtype for tensor, dtype in zip(self.tensors, dtypes, strict=True) if tensor.dtype == "T"), self.types[0]
        )

    def bound(self, dims: Sequence[Sequence[int | str | None]]) -> dict[str, int | str | None]:
        """The sizes by their names in this row: where a name occurs several times, a number if it is one anywhere."""
        sizes: dict[str, int | str | None] = {}
        for tensor, given in zip(self.tensors, dims, strict=True):
            for name, dim in zip(tensor.dims, given, strict=len(given) > 0):
                if not name.isdecimal() and not isinstance(sizes.get(name), int):
                    sizes[name] = dim
        return sizes

    def why_not_types(self, dtypes: Sequence[str]) -> str | None:
        of_t = [dtype for tensor, dtype in zip(self.tensors, dtypes, strict=True) if tensor.dtype == "T"]
        if set(of_t) - set(self.types) or len(set(of_t)) > 1:
            several = f", one type for all of {len(of_t)}" if len(of_t) > 1 else ""
            return f"Its inputs are {' and '.join(of_t)}; {self.title} takes {' or '.join(self.types)}{several}."
        for tensor, dtype in zip(self.tensors, dtypes, strict=True):
            if tensor.dtype not in ("T", dtype):
                return f"Its input {tensor.name} is {dtype}; {self.title} takes {tensor.dtype}."
        return None

    def _why_not_ranks(self, dims: Sequence[Sequence[int | str | None]]) -> str | None:
        if len(dims) != len(self.tensors):
            return f"It has {len(dims)} inputs; {self.title} takes {len(self.tensors)}."
        for tensor, given in zip(self.tensors, dims, strict=True):
            if given and len(given) != len(tensor.dims):
                expected = f"{self.title} takes {len(tensor.dims)}."
                return f"Its input {tensor.name} has {len(given)} dimensions; {expected}"
        return None

    def _why_not_equal(self, dims: Sequence[Sequence[int | str | None]]) -> str | None:
        numbers: dict[str, int] = {}
        for tensor, given in zip(self.tensors, dims, strict=True):
            for name, dim in zip(tensor.dims, given, strict=len(given) > 0):
                if isinstance(dim, int) and not name.isdecimal() and numbers.setdefault(name, dim) != dim:
                    return f"The dimension {name} of its inputs is {numbers[name]} and {dim}; {self.title} takes one."
        return None

    def _why_not_sizes(self, sizes: Mapping[str, int | str | None]) -> str | None:
        for name, allowed in self.fixed.items():
            size = sizes.get(name)
            number = {1: "number", 2: "odd number"}.get(allowed.step, f"multiple of {allowed.step}")
            wanted = f"{self.title} needs a fixed {number} from {allowed[0]} to {allowed[-1]}."
            if not isinstance(size, int):
                return f"The dimension {name} of its inputs is {size or 'not known'}; {wanted}"
            if size not in allowed:
                return f"The dimension {name} of its inputs is {size}; {wanted}"
        for name, size in sizes.items():
            if isinstance(size, int) and size > LARGEST_DIM:
                return f"The dimension {name} of its inputs is {size}; {self.title} takes at most {LARGEST_DIM}."
        return None

    def _why_not_attributes(self, attributes: Mapping[str, Any]) -> str | None:
        attributes = {**self.later, **attributes}
        for name, kind in self.attributes.items():
            if name not in attributes:
                return f"The node has no attribute `{name}`; attributes of TensorRT plugins have no defaults."
            values = attributes[name] if kind is tuple else [attributes[name]]
            least = self.at_least.get(name, 0)
            if kind is not float and any(not least <= value <= INT32_MAX for value in values):
                return f"`{name}` is {attributes[name]}; {self.title} takes {least} to {INT32_MAX}."
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class Plugin(Node):
    """A plugin: one launch of one kernel.

    op: the operator, a key of OPS, whose kernel_cuda.cu has the entry. entry: with {T} for the type of T. outputs: as
    inputs. sizes: further sizes by name, which dimensions of outputs may use and `launch` gets. The kernel's arguments
    are the inputs, the scalars of the launch, and the outputs.
    """

    op: str
    entry: str
    outputs: tuple[str, ...]
    launch: Callable[[Sizes], Launch]
    sizes: Callable[[Sizes], Mapping[str, Size]] = lambda sizes: {}

    @property
    def results(self) -> tuple[Tensor, ...]:
        return tuple(map(tensor_from_text, self.outputs))

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of all entries, one for each type of T."""
        return tuple(dict.fromkeys(self.entry.format(T=dtype) for dtype in self.types))

    def sizes_of(self, dtypes: Sequence[str], dims: Sequence[Sequence[Size]], attributes: Mapping[str, Any]) -> Sizes:
        """The argument of `launch`: dimensions, attributes, T, its `itemsize`, and what `sizes` adds, as attributes."""
        dtype = self.type_of_t(dtypes)
        known: dict[str, Size] = {"T": dtype, "itemsize": 4 if dtype == "float32" else 2}
        for tensor, given in zip(self.tensors, dims, strict=True):
            for name, dim in zip(tensor.dims, given, strict=True):
                if not name.isdecimal():
                    known.setdefault(name, dim)
        known |= attributes
        return SimpleNamespace(**known, **self.sizes(SimpleNamespace(**known)))

    def output_dims(self, sizes: Sizes) -> list[list[Size]]:
        """The dimensions of every output, from what `sizes_of` returns."""
        return [[int(dim) if dim.isdecimal() else getattr(sizes, dim) for dim in x.dims] for x in self.results]


@dataclass(frozen=True, eq=False, kw_only=True)
class Rewrite(Node):
    """Several plugins, and standard operators between them, in place of a node.

    nodes: in the syntax of function bodies (`signature.with_constants`), for T, the dimensions and the attributes
    of a node; a dimension that is not a number is a name or None. A plugin is written
    `y = effexport.LSHAttentionAttend <causal: int = @causal, rounds = 4> (x)`; @ takes an attribute of the operator.
    """

    nodes: Callable[[Sizes], str]

    def body(
        self, dtypes: Sequence[str], dims: Sequence[Sequence[int | str | None]], attributes: Mapping[str, Any]
    ) -> str:
        """The nodes in place of one."""
        return self.nodes(SimpleNamespace(T=self.type_of_t(dtypes), **{**self.bound(dims), **self.later, **attributes}))
