"""Inputs of a user's own model by name: from examples, from a table, from its signature, or from a spec."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from effexport.models.shapes import Dims
from effexport.models.size_formula import shape_of, size_of, with_fixed_axis
from effexport.models.validation import LARGEST_SIZE, SpecError, did_you_mean, require

if TYPE_CHECKING:
    from torch import Tensor, nn

    from effexport.models.contract import ModelContract


# "float" is the element type of the build's precision.
Element = Literal["float", "int64", "int32", "uint8", "bool"]
ELEMENTS = ("float", "int64", "int32", "uint8", "bool")
FLOATS = ("float", "float32", "float16", "bfloat16", "float64")
# Which value of a mask keeps a token: "keep" is 1 or True, "ignore" is 0 or False; "" is not a mask of tokens.
MaskKind = Literal["", "keep", "ignore"]
# What masks of tokens are called.
MASKS: dict[str, MaskKind] = {
    "attention_mask": "keep",
    "input_mask": "keep",
    "mask": "keep",
    "key_padding_mask": "ignore",
    "pad_mask": "ignore",
    "padding_mask": "ignore",
    "src_key_padding_mask": "ignore",
}
# Inputs that need no description.
KNOWN_INPUTS = ("input_ids", "hidden_states", "attention_mask", "token_type_ids")
TABLE_KEYS = ("dims", "dtype", "range", "mask")
DESCRIBE = (
    'describe the inputs: return (model, {"name": tensor, …}) from the factory, or name a file with --inputs FILE.toml'
)


@dataclass(frozen=True, kw_only=True)
class ModuleInput:
    """One input.

    dims: sizes, and names of free axes ("batch" and "seq" mean what they do everywhere) or formulas of those of others.
    low, high: integers are low to high − 1; high is None until the model is run. is_guess: whether only the example
    says so, and no table that they select from. padding: the padding_idx of the embedding that they select from.
    """

    name: str
    dims: Dims
    dtype: Element = "float"
    low: int = 0
    high: int | None = None
    is_guess: bool = False
    padding: int | None = None
    mask: MaskKind = ""

    @property
    def is_of_tokens(self) -> bool:
        """True if there is a part for each token of each sample."""
        return self.dims.count("batch") == self.dims.count("seq") == 1

    @property
    def constant(self) -> int:
        """The integer to try: one, if it may be, as zero often stands for padding; the next if one does."""
        usual = max(self.low, min(1, (self.high or 2) - 1))
        return usual + 1 if usual == self.padding and usual + 1 < (self.high or 0) else usual


@dataclass(frozen=True, kw_only=True)
class ModuleInputs:
    """The inputs of a module in the order of the exported file.

    sizes: of the free axes when the model is exported; without "batch". examples: the tensors that were given, by name;
    empty if there are none. constants: arguments that are not tensors. is_guess: whether nobody has named the axes.
    declared: axes that the user has named as free.
    """

    inputs: tuple[ModuleInput, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    is_guess: bool = False
    declared: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the free axes."""
        dims = (dim for one in self.inputs for dim in one.dims)
        return tuple(dict.fromkeys(dim for dim in dims if isinstance(dim, str) and dim.isidentifier()))

    def without_seq(self) -> ModuleInputs:
        """The same with a length that is a number."""
        size, axes = self.sizes["seq"], self.axes
        dims = (tuple(with_fixed_axis(dim, "seq", size, axes) for dim in one.dims) for one in self.inputs)
        return replace(self, inputs=tuple(replace(one, dims=own) for one, own in zip(self.inputs, dims, strict=True)))

    def tensors(self, sizes: Mapping[str, int]) -> Iterator[Tensor]:
        """Tensors of other sizes of the free axes: the examples repeated or cut off, or constants without them.

        Raises SpecError for one with more than LARGEST_SIZE elements.
        """
        import torch

        for one in self.inputs:
            example = self.examples.get(one.name)
            if example is not None:
                yield resized(example, one.dims, sizes)
                continue
            shape = shape_of(one.dims, sizes)
            count = math.prod(shape)
            problem = f"{one.name} would have {count:,} elements; expected at most {LARGEST_SIZE:,}"
            require(count <= LARGEST_SIZE, problem)
            fill = (int(one.mask == "keep") if one.mask else one.constant) * (one.dtype != "float")
            yield torch.full(shape, fill, dtype=torch_dtype(one.dtype))


def resized(example: Tensor, dims: Dims, sizes: Mapping[str, int]) -> Tensor:
    """An example repeated or cut off along its free axes."""
    import torch

    for axis, dim in enumerate(dims):
        if isinstance(dim, str) and (size := size_of(dim, sizes)) != example.shape[axis]:
            example = example.index_select(axis, torch.arange(size) % example.shape[axis])
    return example


def torch_dtype(element: Element) -> Any:
    import torch

    return torch.float32 if element == "float" else getattr(torch, element)


def inputs_from_examples(
    module: nn.Module, name: str, examples: object, dynamic: Mapping[str, object] | None = None
) -> ModuleInputs:
    """Inputs from what a module was called with: a tensor, a tuple in the order of `forward`, or a dictionary.

    dynamic: the free axes of each input by name, as torch.onnx.export takes them: {"x": {0: "batch", 1: "seq"}}, or all
    dims: {"x": ("batch", "seq", 512)}. Without it, the first axis is the batch, and the second of tokens or of vectors
    is the sequence if the module takes other lengths.
    Values that are not tensors are passed on as they are, and become constants of the file.
    Raises SpecError for names that `forward` does not have, for other types, and for axes that do not fit.
    """
    named = by_name(module, name, examples)
    tensors = {key: value for key, value in named.items() if is_tensor(value)}
    constants = {key: value for key, value in named.items() if key not in tensors}
    for key, value in constants.items():
        require(
            value is None or isinstance(value, bool | int | float | str),
            f"the example input {key!r} of {name} is a {type(value).__name__}; expected a tensor, a number or None",
        )
    require(bool(tensors), f"the example inputs of {name} hold no tensor; expected one for each input")
    for key, value in tensors.items():
        require(not value.is_meta, f"the example input {key!r} of {name} is on meta, without values; give real numbers")
    ordered = sorted(tensors, key=lambda key: key in ("attention_mask", "token_type_ids"))
    dims = guessed_dims(tensors) if dynamic is None else given_dims(name, tensors, dynamic)
    sizes = sizes_of(name, tensors, dims)
    return ModuleInputs(
        inputs=tuple(input_from_tensor(key, tensors[key], dims[key]) for key in ordered),
        sizes={axis: size for axis, size in sizes.items() if axis != "batch"},
        examples={key: as_exported(tensors[key]) for key in ordered},
        constants=constants,
        is_guess=dynamic is None,
        declared=tuple(dim for key in dynamic or () for dim in dims[key] if isinstance(dim, str)),
    )


def by_name(module: nn.Module, name: str, examples: object) -> dict[str, Any]:
    """Example inputs by the names of the parameters of `forward`; those of `*args` are args_0, args_1, …"""
    parameters = inspect.signature(module.forward).parameters
    if isinstance(examples, Mapping):
        for key in examples:
            require(
                isinstance(key, str) and is_parameter(module, key, examples),
                f"{name} was given an example of {key!r}{did_you_mean(str(key), list(parameters))} "
                f"Its forward takes: {', '.join(parameters)}",
            )
        return dict(examples)
    values = list(examples) if isinstance(examples, tuple | list) else [examples]
    names = [key for key, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names += more_names(module, values[len(names) :])
    require(
        len(values) <= len(names),
        f"{name} was given {len(values)} example inputs, but its forward takes: {', '.join(parameters)}",
    )
    return dict(zip(names, values, strict=False))


def is_parameter(module: nn.Module, key: str, names: Sized) -> bool:
    """True if `forward` takes an argument of this name. names: of all arguments."""
    parameters = inspect.signature(module.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_all or key in parameters or key in more_names(module, names)


def more_names(module: nn.Module, values: Sized) -> list[str]:
    """Names of as many values in the `*args` of a `forward`; none if it has no such parameter."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [f"{p.name}_{i}" for p in parameters if p.kind is p.VAR_POSITIONAL for i in range(len(values))]


def arguments_of(module: nn.Module, named: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments of a `forward` from its inputs by name, see `by_name`."""
    parameters = inspect.signature(module.forward).parameters.values()
    more = [key for key in more_names(module, named) if key in named]
    kinds = [inspect.Parameter.POSITIONAL_ONLY, *[inspect.Parameter.POSITIONAL_OR_KEYWORD] * bool(more)]
    first = [p.name for p in parameters if p.kind in kinds and p.name in named] + more
    return [named[key] for key in first], {key: value for key, value in named.items() if key not in first}


def is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def as_exported(tensor: Tensor) -> Tensor:
    """An example on the CPU, as the exported file takes it: floats in float32."""
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.is_floating_point() else tensor


def guessed_dims(tensors: Mapping[str, Tensor]) -> dict[str, Dims]:
    """The first axis of what has the first axis of the first input is the batch.

    The second axis of vectors [batch, seq, channels] and of indices [batch, seq] is the sequence; that of other inputs,
    and every axis of masks, if it has the same size.
    """
    import torch

    first = next(iter(tensors.values()))
    batch = first.shape[0] if first.ndim else None
    lengths = [t.shape[1] for t in tensors.values() if is_sequence(t)]
    dims = {}
    for name, tensor in tensors.items():
        named: list[int | str] = list(tensor.shape)
        if tensor.ndim and tensor.shape[0] == batch:
            named[0] = "batch"
            of_mask = tensor.dtype is torch.bool or "mask" in name
            for axis in range(1, tensor.ndim if of_mask else min(tensor.ndim, 2)):
                if lengths and tensor.shape[axis] == lengths[0]:
                    named[axis] = "seq"
        dims[name] = tuple(named)
    return dims


def is_sequence(tensor: Tensor) -> bool:
    """Vectors of tokens, or indices or masks of tokens."""
    return tensor.ndim == (3 if tensor.is_floating_point() else 2)


def given_dims(name: str, tensors: Mapping[str, Tensor], dynamic: Mapping[str, object]) -> dict[str, Dims]:
    """The dims of each example, with the names that `dynamic` gives to axes; those of inputs that it does not name are
    guessed."""
    require(isinstance(dynamic, Mapping), f"dynamic is {dynamic!r}; expected a dictionary of free axes by input")
    for key in dynamic:
        require(key in tensors, f"dynamic names {key!r}{did_you_mean(key, list(tensors))} Inputs: {', '.join(tensors)}")
    guessed = guessed_dims(tensors)
    dims: dict[str, Dims] = {}
    for key, tensor in tensors.items():
        if key not in dynamic:
            dims[key] = guessed[key]
            continue
        axes = dynamic[key] or {}
        expected = f"expected names by axis, such as {{0: 'batch', 1: 'seq'}}, for {list(tensor.shape)}"
        pairs = axes.items() if isinstance(axes, Mapping) else enumerate(axes) if isinstance(axes, tuple | list) else ()
        require(isinstance(axes, Mapping | tuple | list), f"dynamic[{key!r}] is {axes!r}; {expected}")
        named: list[int | str] = list(tensor.shape)
        for axis, dim in pairs:
            require(isinstance(axis, int) and 0 <= axis < tensor.ndim, f"dynamic[{key!r}] has axis {axis}; {expected}")
            if dim is not None and not isinstance(dim, int):
                # torch.export.Dim has a name, too
                named[axis] = str(getattr(dim, "__name__", dim))
        dims[key] = tuple(named)
    return dims


def sizes_of(name: str, tensors: Mapping[str, Tensor], dims: Mapping[str, Dims]) -> dict[str, int]:
    """The size of every free axis. Raises SpecError for one that has two."""
    sizes: dict[str, int] = {}
    owners: dict[str, str] = {}
    for key, tensor in tensors.items():
        for dim, size in zip(dims[key], tensor.shape, strict=True):
            if isinstance(dim, str):
                known = sizes.setdefault(dim, size)
                owner = owners.setdefault(dim, key)
                require(
                    known == size,
                    f"the axis {dim} of {name} is {known} in the example of {owner!r} and {size} in that of {key!r}; "
                    "expected one size: give other axes another name",
                )
    return sizes


def input_from_tensor(name: str, tensor: Tensor, dims: Dims) -> ModuleInput:
    import torch

    if tensor.is_floating_point():
        return ModuleInput(name=name, dims=dims)
    element = str(tensor.dtype).removeprefix("torch.")
    require(
        element in ELEMENTS,
        f"the example input {name!r} is {element}; expected floats, int64, int32, uint8 or bool: convert it",
    )
    one = ModuleInput(name=name, dims=dims, dtype=element)  # type: ignore[arg-type]
    is_mark = bool(((tensor == 0) | (tensor == 1)).all())
    if is_mark and one.is_of_tokens and name in MASKS:
        return replace(one, mask=MASKS[name])
    return one if tensor.dtype is torch.bool or not tensor.numel() else replace(one, low=min(0, int(tensor.min())))


def embedding_rows(module: nn.Module) -> int | None:
    """Rows of the first embedding, which is assumed to be that of the tokens."""
    from torch import nn

    return next((child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)), None)


def inputs_from_table(module: nn.Module, name: str, table: Mapping[str, Any]) -> ModuleInputs:
    """Inputs from a table, as --inputs reads it:

        [inputs.x]
        dims = ["batch", "seq", 512]   # sizes, and names of free axes
        dtype = "float"                # or int64, int32, uint8, bool
        [inputs.tokens]
        dims = ["batch", "seq"]
        dtype = "int64"
        range = [0, 20000]             # integers from 0 to 19999
        [inputs.mask]
        dims = ["batch", "seq"]
        dtype = "bool"
        mask = "keep"                  # 1 keeps a token; "ignore": 1 hides it
        [sizes]
        seq = 1024                     # the length to export for
        [constants]
        return_attn = false

    Raises SpecError for anything else.
    """
    for key in table:
        known = ("inputs", "sizes", "constants")
        require(key in known, f"the inputs file has {key!r}{did_you_mean(key, known)} Expected: {', '.join(known)}")
    entries = table.get("inputs")
    require(
        isinstance(entries, Mapping) and bool(entries),
        "the inputs file names no input; expected a table for each, such as [inputs.x] with dims",
    )
    assert isinstance(entries, Mapping)
    sizes, constants = table.get("sizes", {}), table.get("constants", {})
    require(isinstance(sizes, Mapping) and isinstance(constants, Mapping), "sizes and constants are expected as tables")
    by_name(module, name, dict.fromkeys([*entries, *constants]))
    inputs = [input_from_table(key, entry) for key, entry in entries.items()]
    inputs.sort(key=lambda one: one.name in ("attention_mask", "token_type_ids"))
    found = ModuleInputs(inputs=tuple(inputs), constants=dict(constants))
    found = replace(found, declared=found.axes)
    for axis, size in sizes.items():
        require(
            axis in found.axes, f"sizes names {axis!r}{did_you_mean(axis, found.axes)} Axes: {', '.join(found.axes)}"
        )
        require(type(size) is int and size >= 1, f"the size of {axis} is {size!r}; expected a positive integer")
    for axis in found.axes:
        if axis not in ("batch", "seq"):
            require(axis in sizes, f"the axis {axis} has no size; add it under [sizes]: {axis} = 16")
    return replace(found, sizes={axis: size for axis, size in sizes.items() if axis != "batch"})


def input_from_table(name: str, entry: object) -> ModuleInput:
    """One table [inputs.<name>]."""
    where = f"[inputs.{name}]"
    if not isinstance(entry, Mapping):
        raise SpecError(f"{where} is {entry!r}; expected a table with dims")
    for key in entry:
        require(key in TABLE_KEYS, f"{where} has {key!r}{did_you_mean(key, TABLE_KEYS)} Keys: {', '.join(TABLE_KEYS)}")
    dims = entry.get("dims")
    require(
        isinstance(dims, list)
        and all(dim.isidentifier() if isinstance(dim, str) else type(dim) is int and dim >= 1 for dim in dims),
        f'{where}: dims is {dims!r}; expected sizes and names of axes, such as ["batch", "seq", 512]',
    )
    assert isinstance(dims, list)
    dtype = str(entry.get("dtype", "float"))
    require(
        dtype in FLOATS or dtype in ELEMENTS, f"{where}: dtype is {dtype!r}; expected one of: {', '.join(ELEMENTS)}"
    )
    element: Element = "float" if dtype in FLOATS else dtype  # type: ignore[assignment]
    mask = entry.get("mask", "")
    require(mask in ("", "keep", "ignore"), f"{where}: mask is {mask!r}; expected keep or ignore")
    require(
        not mask or dims.count("batch") == dims.count("seq") == 1,
        f"{where}: dims is {dims}; a mask of tokens has the axes batch, seq, each once",
    )
    given = entry.get("range", [0, None])
    is_pair = isinstance(given, list) and [*map(type, given)] == [int, int]
    require(
        "range" not in entry or (is_pair and given[0] < given[1]),
        f"{where}: range is {given!r}; expected [lowest, highest + 1], such as [0, 20000]",
    )
    require("range" not in entry or element.startswith("int"), f"{where}: range belongs to integers, not to {dtype}")
    return ModuleInput(name=name, dims=tuple(dims), dtype=element, low=given[0], high=given[1], mask=mask)


def inputs_from_signature(module: nn.Module, name: str, widths: Sequence[int]) -> Iterator[ModuleInputs]:
    """Inputs that fit the signature of `forward`, the most likely first: tokens and vectors under the names that
    effexport and transformers use, or a single argument.

    widths: of the attention layers in the model. Raises SpecError for a signature that suggests nothing.
    """
    parameters = inspect.signature(module.forward).parameters
    needed = [
        key for key, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    rows = embedding_rows(module)
    if all(key in KNOWN_INPUTS for key in needed):
        data = [key for key in ("input_ids", "hidden_states") if key in parameters]
        masks = [key for key in ("attention_mask", "token_type_ids") if key in parameters]
        # transformers' models have many optional arguments, whose types are theirs to change
        others = [key for key in masks if key in needed or key == "attention_mask"]
        if data and not set(needed) - {data[0], *others}:
            yield known_inputs(name, data[0], others, rows, widths)
            return
    require(len(needed) == 1, f"forward of {name} takes {', '.join(parameters)}; {DESCRIBE}")
    require(rows is not None or bool(widths), f"forward of {name} takes {needed[0]} of unknown sizes; {DESCRIBE}")
    if rows is not None:
        yield ModuleInputs(inputs=(ModuleInput(name=needed[0], dims=("batch", "seq"), dtype="int64"),))
    for width in dict.fromkeys(widths):
        yield ModuleInputs(inputs=(ModuleInput(name=needed[0], dims=("batch", "seq", width)),))


def known_inputs(name: str, data: str, others: Sequence[str], rows: int | None, widths: Sequence[int]) -> ModuleInputs:
    dims: Dims = ("batch", "seq")
    if data == "input_ids":
        require(
            rows is not None,
            f"{name} takes input_ids but has no nn.Embedding, whose rows would be the number of tokens; {DESCRIBE}",
        )
        first = ModuleInput(name=data, dims=dims, dtype="int64")
    else:
        require(bool(widths), f"{name} takes hidden_states of an unknown width; {DESCRIBE}")
        first = ModuleInput(name=data, dims=(*dims, widths[0]))
    rest = (ModuleInput(name=key, dims=dims, dtype="int64", mask=MASKS.get(key, "")) for key in others)
    return ModuleInputs(inputs=(first, *rest))


def inputs_from_spec(module: nn.Module, name: str, spec: ModelContract, examples: object = None) -> ModuleInputs:
    """Inputs as the spec of an artifact has them, with the values of examples if there are any.

    Raises SpecError for a `forward` that does not take them, and for examples that do not have their axes and types.
    """
    parameters = inspect.signature(module.forward).parameters
    for key in (*spec.inputs, *spec.constants):
        require(
            is_parameter(module, key, [*spec.inputs, *spec.constants]),
            f"its forward takes {', '.join(parameters)}; the artifact has {key!r}",
        )
    given = {} if examples is None else by_name(module, name, examples)
    tensors = {key: value for key, value in given.items() if is_tensor(value)}
    constants = {**spec.constants, **{key: value for key, value in given.items() if key not in tensors}}
    require(
        not tensors or tensors.keys() == spec.inputs.keys(),
        f"its example inputs are {', '.join(tensors)}; the artifact takes {', '.join(spec.inputs)}",
    )
    types = {key: spec.element_types.get(key, "float" if key == "hidden_states" else "int64") for key in spec.inputs}
    for key, tensor in tensors.items():
        dims = list(spec.inputs[key])
        fits = tensor.ndim == len(dims) and all(
            isinstance(dim, str) or dim == size for dim, size in zip(dims, tensor.shape, strict=True)
        )
        element = input_from_tensor(key, tensor, spec.inputs[key]).dtype
        require(
            fits and element == types[key],
            f"its example of {key!r} is {element} {list(tensor.shape)}; the artifact takes {types[key]} {dims}",
        )
    sizes_of(name, tensors, spec.inputs)
    found = ModuleInputs(
        inputs=tuple(input_of_spec(spec, key, types[key]) for key in spec.inputs),
        examples={key: as_exported(tensors[key]) for key in spec.inputs if key in tensors},
        constants=constants,
    )
    sizes = {**spec.axis_sizes, "seq": spec.seq_len}
    return replace(found, sizes={axis: sizes[axis] for axis in found.axes if axis in sizes})


def input_of_spec(spec: ModelContract, name: str, element: str) -> ModuleInput:
    low, high = spec.drawn_ranges.get(name, (0, None))
    return ModuleInput(
        name=name,
        dims=spec.inputs[name],
        dtype=element,  # type: ignore[arg-type]
        low=low,
        high=high,
        is_guess=name in spec.guesses,
        padding=spec.padding.get(name),
        mask="" if name != spec.mask else "ignore" if spec.mask_ignores else "keep",
    )
