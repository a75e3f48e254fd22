"""Random inputs: the shapes of every case, filled with random tokens or hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from effexport.dtypes import TensorInfo, numpy_dtype
from effexport.models.contract import NONE, longer_length
from effexport.models.head_spec import POSITIONS
from effexport.models.size_formula import shape_of
from effexport.spec import MASK_NAME, BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array

# Golden inputs are drawn from a seed of their own, so that they do not repeat the stream that made the weights.
REFERENCE_SEED_OFFSET = 7919
# The case that has the shape of the export.
EXPORT = "export"
# The case of a sample without any token that counts: a mask hides all, or a length is 0. Not every model has an answer.
NOTHING_KEPT = "nothing kept"
# Batch, length, and how many tokens of each sample are kept: all for None.
Shape = tuple[int, int, Sequence[int] | None]
# Answers per question in the cases of a multiple-choice model.
CHOICES = 3


def case_inputs(spec: BuildSpec, seed: int) -> dict[str, dict[str, Array]]:
    """Inputs of every case by name: the shape of the export, other lengths and sizes, and padding of every kind that
    the model may have."""
    model, rng = spec.model, np.random.default_rng(seed)
    shapes = case_shapes(spec)
    cases = {name: random_inputs(spec, rng, *shape) for name, shape in shapes.items()}
    if model.axis_sizes:
        # different ones that divide by little, and those that every divisor of the example's divides
        longer = {axis: longer_length(size) + i for i, (axis, size) in enumerate(model.axis_sizes.items())}
        double = {axis: 2 * size for axis, size in model.axis_sizes.items()}
        for name, sizes in (("other sizes", longer), ("double sizes", double)):
            cases[name] = random_inputs(spec, rng, *shapes[EXPORT], sizes)
    padded_len = longest_padded(spec)
    marks = [tensor.name for tensor in spec.inputs if marks_tokens(tensor, spec)]
    if model.padding or marks:
        # models make masks of padding tokens, or take marks of tokens under any name: at the end, and at the beginning
        inputs = random_inputs(spec, rng, 3, padded_len, None)
        ends = np.array([padded_len, max(1, padded_len * 2 // 3), max(1, padded_len // 3)])[:, None]
        beyond = np.arange(padded_len) >= ends
        for name, hidden in (("padding at the end", beyond), ("padding at the beginning", beyond[:, ::-1])):
            padded = {
                key: np.where(hidden, value, inputs[key]).astype(inputs[key].dtype)
                for key, value in model.padding.items()
                if inputs[key].shape == hidden.shape
            }
            cases[name] = inputs | padded | {key: np.ascontiguousarray(hidden) for key in marks}
    counts = [tensor.name for tensor in spec.inputs if tensor.name in model.guesses and tensor.dims == ("batch",)]
    # half precision may have other numbers in the place of all that is hidden
    if not model.answers_always and spec.precision == "fp32" and (model.mask or counts):
        empty = random_inputs(spec, rng, 2, padded_len, [padded_len, 0])
        for name in counts:
            empty[name][1] = 0
        cases[NOTHING_KEPT] = empty
    return cases


def case_shapes(spec: BuildSpec) -> dict[str, Shape]:
    """Batch, length and kept tokens of each sample, by case, in the order in which they are drawn."""
    model, seq_len, fixed = spec.model, spec.seq_len, spec.fixed_seq_len
    whole: dict[str, Shape] = {EXPORT: (spec.batch, fixed or seq_len, None)}
    others: dict[str, Shape] = {}
    if fixed is not None:
        whole["single"] = (1, fixed, None)
    else:
        others["odd length"] = (1, taken_length(spec, max(1, seq_len * 5 // 8 - 1)), None)
        others["short"] = (2, taken_length(spec, min(seq_len, 7)), None)
        if model.length_multiple == model.shortest == 1:
            others["single token"] = (1, 1, None)
        if spec.max_seq_len is None and seq_len <= 4096:
            longer = longer_length(seq_len) + model.length_multiple - 1
            others["longer"] = (1, taken_length(spec, longer), None)
    length = longest_padded(spec)
    padded: dict[str, Shape] = {"padded batch": (3, length, [length, max(1, length * 2 // 3), 1])}
    if fixed is not None or not model.padded_first:
        padded["padded single"] = (1, length, [max(1, length // 2)])
    if not model.mask:
        padded = {"batch": (3, length, None)}
    return whole | padded | others if model.padded_first else whole | others | padded


def taken_length(spec: BuildSpec, length: int) -> int:
    """The nearest length up to this one that the original takes, or its shortest."""
    step = spec.model.length_multiple
    return max(-(-spec.model.shortest // step) * step, length - length % step)


def longest_padded(spec: BuildSpec) -> int:
    """The length of padded batches."""
    return spec.fixed_seq_len or taken_length(spec, min(spec.seq_len, 300))


def marks_tokens(tensor: TensorInfo, spec: BuildSpec) -> bool:
    """Whether an input is one boolean for each token, and not known as a mask."""
    is_mask = tensor.name == spec.model.mask
    return tensor.dtype == "bool" and not is_mask and len(tensor.dims) == 2 and "seq" in tensor.dims[1:]


def random_inputs(
    spec: BuildSpec,
    rng: np.random.Generator,
    batch: int,
    seq_len: int,
    lengths: Sequence[int] | None,
    sizes: Mapping[str, int] = NONE,
) -> dict[str, Array]:
    """Random values of every input: indices within their ranges, and floats of unit variance.

    lengths: counts the kept tokens of each sample. sizes: of other axes, if not those of the example.
    """
    model = spec.model
    sizes = {"batch": batch, "choices": CHOICES, "seq": seq_len, **model.axis_sizes, **sizes}
    keep = np.ones((batch, seq_len), dtype=bool)
    for row, length in enumerate(lengths or []):
        keep[row, length:] = False
    inputs: dict[str, Array] = {}
    for tensor in spec.inputs:
        if tensor.name == POSITIONS:
            continue
        name, shape = tensor.name, shape_of(tensor.dims, sizes)
        if name == model.mask:
            inputs[name] = spread(keep != model.mask_ignores, model.mask_axes, shape).astype(tensor.dtype)
        elif tensor.dtype == "bool":
            inputs[name] = rng.random(shape) < 0.5
        elif name in model.drawn_ranges:
            drawn = rng.integers(*model.drawn_ranges[name], shape, dtype=tensor.dtype)
            padding = model.padded_with.get(name)
            inputs[name] = drawn if padding is None else np.where(spread(keep, model.mask_axes, shape), drawn, padding)
        else:
            inputs[name] = rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(tensor.dtype))
    return with_positions(inputs, spec, rng)


def with_positions(inputs: dict[str, Array], spec: BuildSpec, rng: np.random.Generator) -> dict[str, Array]:
    """The inputs and, for a model that is asked for some tokens, which ones: of those that are kept, in any order."""
    if spec.top_k is None:
        return inputs
    mask = inputs[MASK_NAME]
    count = min(mask.shape[1], len(mask) + 1)  # other numbers in other cases
    return inputs | {POSITIONS: np.stack([rng.choice(np.flatnonzero(row), count) for row in mask])}


def spread(mask: Array, axes: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """A mask [batch, seq] along these axes of an array of this shape."""
    batch, tokens = axes
    ordered = mask if batch < tokens else mask.T
    whole = [size if axis in (batch, tokens) else 1 for axis, size in enumerate(shape)]
    return np.ascontiguousarray(np.broadcast_to(ordered.reshape(whole), shape))
