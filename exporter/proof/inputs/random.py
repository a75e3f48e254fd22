"""Random inputs: the shapes of every case, filled with random tokens or hidden states."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from effexport.dtypes import TensorInfo, numpy_dtype
from effexport.models.checkpoint_spec import CheckpointSpec
from effexport.models.contract import longer_length
from effexport.models.encoder_spec import EncoderSpec
from effexport.models.head_spec import POSITIONS
from effexport.models.module_spec import ModuleSpec
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
# Answers per question in the cases of a multiple-choice model.
CHOICES = 3


def case_inputs(spec: BuildSpec, seed: int) -> dict[str, dict[str, Array]]:
    """Inputs of every case by name: the export shape, a padded batch, and lengths other than the export length."""
    if isinstance(spec.model, ModuleSpec):
        return module_cases(spec, spec.model, seed)
    rng = np.random.default_rng(seed)
    fixed, seq_len = spec.fixed_seq_len, spec.seq_len
    padded_len = min(seq_len, 300)
    shapes = {
        EXPORT: (spec.batch, seq_len, None),
        "padded batch": (3, padded_len, [padded_len, max(1, padded_len * 2 // 3), max(1, padded_len // 300)]),
        "odd length": (1, max(1, seq_len * 5 // 8 - 1), None),
        "short": (2, min(seq_len, 7), None),
        "single token": (1, 1, None),
    }
    if spec.max_seq_len is None and seq_len <= 4096:
        shapes["longer"] = (1, longer_length(seq_len), None)
    if fixed is not None:
        shapes = {
            EXPORT: (spec.batch, fixed, None),
            "single": (1, fixed, None),
            "padded batch": (3, fixed, [fixed, max(1, fixed * 2 // 3), 1]),
            "padded single": (1, fixed, [max(1, fixed // 2)]),
        }
    return {name: random_inputs(spec, rng, *shape) for name, shape in shapes.items()}


def random_inputs(
    spec: BuildSpec, rng: np.random.Generator, batch: int, seq_len: int, lengths: list[int] | None
) -> dict[str, Array]:
    """Random values of every input; `lengths` counts the kept tokens of each sample."""
    return with_positions(inputs_of_model(spec, rng, batch, seq_len, lengths), spec, rng)


def with_positions(inputs: dict[str, Array], spec: BuildSpec, rng: np.random.Generator) -> dict[str, Array]:
    """The inputs and, for a model that is asked for some tokens, which ones: of those that are kept, in any order."""
    if spec.top_k is None:
        return inputs
    mask = inputs[MASK_NAME]
    count = min(mask.shape[1], len(mask) + 1)  # other numbers in other cases
    return inputs | {POSITIONS: np.stack([rng.choice(np.flatnonzero(row), count) for row in mask])}


def inputs_of_model(
    spec: BuildSpec, rng: np.random.Generator, batch: int, seq_len: int, lengths: list[int] | None
) -> dict[str, Array]:
    """Random tokens or unit-variance hidden states."""
    mask = np.ones((batch, seq_len), dtype=np.int64)
    for row, length in enumerate(lengths or []):
        mask[row, length:] = 0
    if isinstance(spec.model, ModuleSpec):
        return module_inputs(spec, spec.model, rng, batch, mask)
    if isinstance(spec.model, CheckpointSpec):
        return checkpoint_inputs(spec, rng, mask)
    if isinstance(spec.model, EncoderSpec):
        return {
            "input_ids": rng.integers(0, spec.model.vocab_size, (batch, seq_len), dtype=np.int64),
            "attention_mask": mask,
        }
    hidden = rng.standard_normal((batch, seq_len, spec.attention.dim), dtype=np.float32)
    return {"hidden_states": hidden.astype(numpy_dtype(spec.dtype)), "attention_mask": mask}


def checkpoint_inputs(spec: BuildSpec, rng: np.random.Generator, mask: Array) -> dict[str, Array]:
    """Random indices within their limits, with the padding token where the mask says so. mask: [batch, seq]."""
    model = spec.model
    sizes = {"batch": mask.shape[0], "choices": CHOICES, "seq": mask.shape[1]}
    inputs: dict[str, Array] = {}
    for name, dims in model.inputs.items():
        shape = shape_of(dims, sizes)
        spread = mask if "choices" not in dims else np.broadcast_to(mask[:, None], shape)
        if name == "attention_mask":
            inputs[name] = np.ascontiguousarray(spread)
        else:
            padding = model.pad_token_id if name == "input_ids" else 0
            indices = rng.integers(0, model.input_limits[name], shape, dtype=np.int64)
            inputs[name] = np.where(spread != 0, indices, padding)
    return inputs


def module_cases(spec: BuildSpec, model: ModuleSpec, seed: int) -> dict[str, dict[str, Array]]:
    """Inputs of every case of a user's own module, of lengths that the original takes, and padded if it has a mask."""
    rng = np.random.default_rng(seed)
    step, seq_len = model.length_multiple, spec.seq_len

    def near(length: int) -> int:
        return max(-(-model.shortest // step) * step, length - length % step)

    if model.fixed_seq_len is not None:
        shapes: dict[str, tuple[int, int, list[int] | None]] = {
            EXPORT: (spec.batch, seq_len, None),
            "single": (1, seq_len, None),
        }
        padded_len = seq_len
    else:
        padded_len = near(min(seq_len, 300))
        shapes = {
            EXPORT: (spec.batch, seq_len, None),
            "odd length": (1, near(max(1, seq_len * 5 // 8 - 1)), None),
            "short": (2, near(min(seq_len, 7)), None),
        }
        if step == model.shortest == 1:
            shapes["single token"] = (1, 1, None)
        if model.longest is None and seq_len <= 4096:
            shapes["longer"] = (1, near(longer_length(seq_len) + step - 1), None)
    if model.mask:
        lengths = [padded_len, max(1, padded_len * 2 // 3), max(1, padded_len // 300)]
        shapes["padded batch"] = (3, padded_len, lengths)
        shapes["padded single"] = (1, padded_len, [max(1, padded_len // 2)])
    else:
        shapes["batch"] = (3, padded_len, None)
    cases = {name: random_inputs(spec, rng, *shape) for name, shape in shapes.items()}
    if model.axis_sizes:
        # different ones that divide by little, and those that every divisor of the example's divides
        longer = {axis: longer_length(size) + i for i, (axis, size) in enumerate(model.axis_sizes.items())}
        double = {axis: 2 * size for axis, size in model.axis_sizes.items()}
        for name, sizes in (("other sizes", longer), ("double sizes", double)):
            cases[name] = random_inputs(replace(spec, model=replace(model, axis_sizes=sizes)), rng, *shapes[EXPORT])
    marks = [tensor.name for tensor in spec.inputs if marks_tokens(tensor, model)]
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
    if spec.precision == "fp32" and (model.mask or counts):
        empty = random_inputs(spec, rng, 2, padded_len, [padded_len, 0])
        for name in counts:
            empty[name][1] = 0
        cases[NOTHING_KEPT] = empty
    return cases


def marks_tokens(tensor: TensorInfo, model: ModuleSpec) -> bool:
    """Whether an input is one boolean for each token, and not known as a mask."""
    return tensor.dtype == "bool" and tensor.name != model.mask and len(tensor.dims) == 2 and "seq" in tensor.dims[1:]


def module_inputs(
    spec: BuildSpec, model: ModuleSpec, rng: np.random.Generator, batch: int, mask: Array
) -> dict[str, Array]:
    """Random values of every input of a user's own module. mask: [batch, seq], 1 for the tokens to keep."""
    sizes = {"batch": batch, "seq": mask.shape[1], **model.axis_sizes}
    inputs: dict[str, Array] = {}
    for tensor in spec.inputs:
        shape = shape_of(tensor.dims, sizes)
        if tensor.name == model.mask:
            inputs[tensor.name] = spread(mask != model.mask_ignores, model.mask_axes, shape).astype(tensor.dtype)
        elif tensor.dtype == "bool":
            inputs[tensor.name] = rng.random(shape) < 0.5
        elif tensor.dtype.startswith("int"):
            low, high = model.ranges[tensor.name]
            inputs[tensor.name] = rng.integers(low, high, shape, dtype=tensor.dtype)
        else:
            inputs[tensor.name] = rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(tensor.dtype))
    return inputs


def spread(mask: Array, axes: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """A mask [batch, seq] along these axes of an array of this shape."""
    batch, tokens = axes
    ordered = mask if batch < tokens else mask.T
    whole = [size if axis in (batch, tokens) else 1 for axis, size in enumerate(shape)]
    return np.ascontiguousarray(np.broadcast_to(ordered.reshape(whole), shape))
