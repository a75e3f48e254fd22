"""The inputs of a user's own module as the spec of an artifact has them."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING

from effexport.models.user.inputs import (
    MaskKind,
    ModuleInput,
    ModuleInputs,
    as_exported,
    by_name,
    input_from_tensor,
    is_parameter,
    is_tensor,
    sizes_of,
)
from effexport.models.validation import require

if TYPE_CHECKING:
    from torch import nn

    from effexport.models.contract import ModelContract


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
    mask: MaskKind = "" if name != spec.mask else "ignore" if spec.mask_ignores else "keep"
    return ModuleInput(
        name=name,
        dims=spec.inputs[name],
        dtype=element,  # type: ignore[arg-type]
        low=low,
        high=high,
        is_guess=name in spec.guesses,
        padding=spec.padding.get(name),
        mask=mask,
    )
