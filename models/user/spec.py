"""The description of a user's own module; `spec_from_module` makes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from effexport.models.attention_spec import AttentionSpec, attention_from_dict
from effexport.models.checkpoints.spec import CheckpointSpec
from effexport.models.shapes import Dims
from effexport.models.size_formula import axes_of, with_fixed_axis
from effexport.models.validation import LARGEST_SIZE, as_written, require, shown

# PyTorch has at most this many axes.
MOST_AXES = 64
LONGEST_TEXT = 200


def is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_SIZE


def is_integer(value: object) -> bool:
    return type(value) is int and -(2**63) <= value <= 2**63


def is_dims(value: object) -> bool:
    """True if a value is a list of sizes and names of axes."""
    if not isinstance(value, list | tuple) or len(value) > MOST_AXES:
        return False
    return all(isinstance(dim, str) or is_size(dim) for dim in value)


def is_range(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_integer, value))


def is_word(value: object) -> bool:
    return isinstance(value, str)


def is_constant(value: object) -> bool:
    """True if a manifest can hold an argument that is not a tensor: a short text, a number, a boolean or None."""
    if isinstance(value, str):
        return value.isprintable() and len(value) <= LONGEST_TEXT
    return value is None or type(value) is bool or is_integer(value) or (type(value) is float and math.isfinite(value))


# Field of ModuleSpec → whether a value in it is right, and what it should be.
TABLES: dict[str, tuple[Callable[[object], bool], str]] = {
    "fused_op_counts": (is_size, "counts"),
    "unfused_op_counts": (is_size, "counts"),
    "input_dims": (is_dims, "axes"),
    "output_dims": (is_dims, "axes"),
    "tensor_types": (is_word, "element types"),
    "ranges": (is_range, "two integers"),
    "axis_sizes": (is_size, "sizes"),
    "padding": (is_integer, "integers"),
    "replaced": (is_word, "names of classes"),
    "size_notes": (is_word, "sentences"),
    "lowest": (is_size, "sizes"),
    "constants": (is_constant, "texts and numbers"),
}


@dataclass(frozen=True, kw_only=True)
class ModuleSpec(CheckpointSpec):
    """A user's own module.

    attention_fields: the spec of the layer that decides how results are compared, as `AttentionSpec.to_dict` writes it.
    attention_layers: how many layers are of effexport.models, as they were written or in the place of others.
    input_dims, output_dims: axes by name; their length is a number if the module takes one length only. Those of
    outputs may be formulas of those of inputs, such as "seq//4": see `size_formula`.
    tensor_types: element types of inputs and outputs, see `ModelContract.element_types`.
    ranges: the lowest and the highest value + 1 of integers, by input.
    longest: the most tokens that the module takes; None if no limit was found.
    remarks: sentences for the report. constants: as far as a manifest can hold them. For others, see the contract.
    """

    why_not_alone: ClassVar[str] = "code that an artifact does not hold"
    weights_option: ClassVar[str] = "--module"
    new_weights: ClassVar[str] = (
        "came from {origin}, code that an artifact does not hold; name the module that has the new weights with "
        "--module, or one and a file of weights with --module and --weights"
    )
    family: ClassVar[str] = "module"
    is_traced_as_found: ClassVar[bool] = True
    has_whole_state: ClassVar[bool] = False
    is_portable: ClassVar[bool] = False
    keeps_float32: ClassVar[bool] = False
    answers_always: ClassVar[bool] = False
    padded_first: ClassVar[bool] = False
    TASKS: ClassVar[Mapping[str, str]] = {"custom": "a module of your own"}

    task: str = "custom"
    module: str
    attention_fields: Mapping[str, Any]
    attention_layers: int
    fused_op_counts: Mapping[str, int]
    unfused_op_counts: Mapping[str, int]
    input_dims: Mapping[str, Any]
    output_dims: Mapping[str, Any]
    longest: int | None
    has_seq: bool = True
    tensor_types: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, Any] = field(default_factory=dict)
    guesses: tuple[str, ...] = ()
    axis_sizes: Mapping[str, int] = field(default_factory=dict)
    length_multiple: int = 1
    padding: Mapping[str, int] = field(default_factory=dict)
    mask: str = "attention_mask"
    mask_ignores: bool = False
    replaced: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    shortest: int = 1
    size_notes: Mapping[str, str] = field(default_factory=dict)
    lowest: Mapping[str, int] = field(default_factory=dict)
    independent_samples: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Also checks the tables, which a manifest may fill with anything."""
        require(isinstance(self.attention_fields, Mapping), "attention_fields is not a table; expected a spec")
        for name, (is_right, words) in TABLES.items():
            table = getattr(self, name)
            right = isinstance(table, Mapping) and all(isinstance(k, str) and is_right(v) for k, v in table.items())
            require(right, f"{name} is {shown(table)}; expected {words} by name")
        for name, words in (("remarks", "sentences"), ("guesses", "names of inputs")):
            texts = getattr(self, name)
            require(
                isinstance(texts, tuple) and all(isinstance(text, str) for text in texts),
                f"{name} is {shown(as_written(texts))}; expected a list of {words}",
            )
        super().__post_init__()
        require(self.length_multiple >= 1, f"length_multiple is {self.length_multiple}; expected at least 1")
        require(
            1 <= self.shortest <= self.seq_len,
            f"shortest is {self.shortest}; expected 1 to {self.seq_len}, the length to export for",
        )
        axes = self.input_dims.get(self.mask, ("batch", "seq"))
        require(
            "batch" in axes and ("seq" in axes or self.seq_len in axes),
            f"the mask {shown(self.mask)} has the axes {shown(as_written(axes))}; expected batch and seq among them",
        )
        free = self.free_axes
        for dim in (dim for dims in self.output_dims.values() for dim in dims if isinstance(dim, str)):
            unknown = sorted(axes_of(dim) - free) if dim not in free else []
            require(not unknown, f"an output has the axis {shown(dim)}, and no input has {', '.join(unknown)}")
        if self.independent_samples:
            for name, dims in (*self.input_dims.items(), *self.output_dims.items()):
                require(
                    tuple(dims[:1]) == ("batch",),
                    f"independent samples: {name} of {self.module} is {shown(as_written(dims))}; expected the batch, "
                    "of any size, as the first axis of every input and output; leave --independent-samples out",
                )
        require(self.attention_layers >= 0, f"attention_layers is {self.attention_layers}; expected 0 or more")
        _ = self.attention  # checks its fields

    def to_dict(self) -> dict[str, Any]:
        # an older effexport can read a module of any size
        usual: dict[str, Any] = {
            "shortest": 1,
            "size_notes": {},
            "lowest": {},
            "independent_samples": False,
            "constants": {},
        }
        left_out = [name for name, value in usual.items() if getattr(self, name) == value]
        return {name: value for name, value in super().to_dict().items() if name not in left_out}

    def with_fixed(self, axis: str, size: int, note: str) -> ModuleSpec:
        """Without a batch, a mask is an input like any other."""

        def fixed(table: Mapping[str, Any]) -> dict[str, Dims]:
            return {
                name: tuple(with_fixed_axis(dim, axis, size, self.free_axes) for dim in dims)
                for name, dims in table.items()
            }

        mask, ranges = self.mask, dict(self.ranges)
        if axis == "batch":
            mask = ""
            if self.tensor_types.get(self.mask, "").startswith("int"):
                ranges[self.mask] = [0, 2]
        changed = replace(
            self,
            input_dims=fixed(self.input_dims),
            output_dims=fixed(self.output_dims),
            axis_sizes={name: number for name, number in self.axis_sizes.items() if name != axis},
            lowest={name: number for name, number in self.lowest.items() if name != axis},
            size_notes={**self.size_notes, axis: note},
            mask=mask,
            ranges=ranges,
        )
        return replace(changed, longest=size, shortest=1, length_multiple=1) if axis == "seq" else changed

    def with_range(self, axis: str, lowest: int, highest: int | None, note: str) -> ModuleSpec:
        noted = replace(self, size_notes={**self.size_notes, axis: note})
        if axis == "seq":
            return replace(noted, shortest=lowest, longest=highest)
        return replace(noted, lowest={**self.lowest, axis: lowest})

    def with_outputs(self, axes: Mapping[str, Dims]) -> ModuleSpec:
        return replace(self, output_dims={**self.output_dims, **axes})

    @property
    def trace_sizes(self) -> dict[str, int]:
        """Those of the example, whose branches the code then takes, each other than all before it: PyTorch takes equal
        sizes for the same."""
        # at the limit, the first `seq` of so many positions would be all of them, and `seq` a constant
        at_limit = self.seq_len == self.max_seq_len and self.fixed_seq_len is None
        wanted = {"seq": max(self.seq_len - at_limit, self.shortest), **self.axis_sizes, "batch": 2}
        found: dict[str, int] = {}
        for axis, least in wanted.items():
            found[axis] = next(size for size in itertools.count(max(2, least)) if size not in found.values())
        return found

    @property
    def drawn_ranges(self) -> Mapping[str, tuple[int, int]]:
        return self.ranges or super().drawn_ranges

    @property
    def title(self) -> str:
        return self.module

    @property
    def attention(self) -> AttentionSpec:
        return attention_from_dict(self.attention_fields)

    @property
    def layers(self) -> int:
        return self.attention_layers

    def custom_ops(self, fused: bool) -> dict[str, int]:
        return dict(self.fused_op_counts if fused else self.unfused_op_counts)

    def with_custom_ops(self, found: Mapping[str, int], fused: bool, remarks: Iterable[str]) -> ModuleSpec:
        if fused:
            return replace(self, fused_op_counts=found, remarks=(*self.remarks, *remarks))
        return replace(self, unfused_op_counts=found)

    @property
    def max_seq_len(self) -> int | None:
        return self.longest

    @property
    def fixed_seq_len(self) -> int | None:
        return None if any("seq" in dims for dims in self.input_dims.values()) else self.seq_len

    @property
    def kept_dims(self) -> Dims:
        """The axes along which tokens count or not: (batch, tokens) with a mask; without one, whichever of them the
        inputs have, or a single place."""
        named = {dim for dims in self.input_dims.values() for dim in dims}
        axes = tuple(axis for axis in ("batch", "seq") if axis in named)
        fixed = self.fixed_seq_len if self.mask in self.input_dims else None
        return (axes if fixed is None else (*axes, fixed)) or (1,)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on replaced and kept parts, and on the lengths that the file is for."""
        return (*self.remarks, *self.length_notes)

    @property
    def length_notes(self) -> tuple[str, ...]:
        notes = tuple(self.size_notes.values())
        if self.length_multiple > 1:
            return (
                f"{self.module} takes multiples of {self.length_multiple} tokens; the exported file takes every "
                "length, and was compared at lengths that both take.",
                *notes,
            )
        if self.fixed_seq_len is None or not self.has_seq or "seq" in self.size_notes:
            return notes
        tokens = f"{self.fixed_seq_len} token{'s' * (self.fixed_seq_len != 1)}"
        remedy = "; pad shorter sequences, with an attention mask" * (self.fixed_seq_len != 1)
        only = f"{self.module} is exported for exactly {tokens}, because it does not take every length{remedy}."
        return (only, *notes)

    @property
    def free_axes(self) -> set[str]:
        """Names of the free axes of the inputs."""
        dims = itertools.chain.from_iterable(self.input_dims.values())
        return {dim for dim in dims if isinstance(dim, str) and dim.isidentifier()}

    @property
    def inputs(self) -> dict[str, Dims]:
        return {name: tuple(dims) for name, dims in self.input_dims.items()}

    @property
    def outputs(self) -> dict[str, Dims]:
        return {name: tuple(dims) for name, dims in self.output_dims.items()}

    @property
    def why_not_invariant(self) -> str:
        return "a user's own module may mix the samples of a batch, or read padding, on purpose"

    @property
    def why_float64_differs(self) -> str:
        return "a user's own module may decide by comparisons (argmax, round), which may turn out otherwise in float64"

    @property
    def element_types(self) -> Mapping[str, str]:
        return self.tensor_types

    @property
    def input_limits(self) -> dict[str, int]:
        if not self.ranges:  # an artifact from before there were others
            return {"input_ids": self.vocab_size, "token_type_ids": 2}
        return {name: high for name, (low, high) in self.ranges.items() if low >= 0 and name not in self.guesses}
