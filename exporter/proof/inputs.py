"""The inputs of every case: drawn ones of many shapes, those at which a correct formula and a careless implementation
part, and those whose padding holds something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.base.dtypes import Array, TensorInfo, numpy_dtype
from effexport.base.spec import MASK_NAME, BuildSpec
from effexport.models.contract import NONE, longer_length
from effexport.models.encoder.spec import POSITIONS
from effexport.models.size_formula import shape_of
from effexport.proof.cases import Case

if TYPE_CHECKING:
    import torch
    from torch import nn

# Golden inputs are drawn from a seed of their own, so that they do not repeat the stream that made the weights.
REFERENCE_SEED_OFFSET = 7919
# The case that has the shape of the export.
EXPORT = "export"
# The case of the inputs that the user has given.
EXAMPLE = "example"
# The case of a sample without any token that counts: a mask hides all, or a length is 0. Not every model has an answer.
NOTHING_KEPT = "nothing kept"
# Batch, length, and how many tokens of each sample are kept: all for None.
Shape = tuple[int, int, Sequence[int] | None]
# Answers per question in the cases of a multiple-choice model.
CHOICES = 3
# The seed of other content in padded places.
CONTENT_SEED = 1_000_003
# Of a case as long as the model takes, in tokens: attention costs their square.
LONGEST = 1024
# Long enough for several chunks and segments, short enough to cost nothing.
LENGTH = 200
TOKEN = 3
# Cutoffs of `hidden_for_keys`. A softmax over keys magnifies their rounding, which grows with the hidden states. With
# all singular values of a square projection, states reach 10,000, and float32 has too few digits for their keys. A
# tenth keeps them below 500; the gaps of single channels then vary around the one that is asked for.
WELL_CONDITIONED = 0.1
NEARLY_EXACT = 1e-3


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
    if model.hides_first:
        cases["padding at the beginning"] = inputs = random_inputs(spec, rng, 1, padded_len, None)
        inputs[model.mask][:, : padded_len // 3] = 0
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
    # code of the user's may have tables of positions, and branches on the length, that shorter cases do not reach
    longest = min(model.max_seq_len or 0, LONGEST)
    if model.is_traced_as_found and model.fixed_seq_len is None and longest > model.seq_len:
        cases["longest"] = random_inputs(spec, rng, 1, taken_length(spec, longest), None)
    return cases


def case_shapes(spec: BuildSpec) -> dict[str, Shape]:
    """Batch, length and kept tokens of each sample, by case, in the order in which they are drawn."""
    model, seq_len, fixed = spec.model, spec.model.seq_len, spec.model.fixed_seq_len
    whole: dict[str, Shape] = {EXPORT: (spec.batch, fixed or seq_len, None)}
    others: dict[str, Shape] = {}
    if fixed is not None:
        whole["single"] = (1, fixed, None)
    else:
        others["odd length"] = (1, taken_length(spec, max(1, seq_len * 5 // 8 - 1)), None)
        others["short"] = (2, taken_length(spec, min(seq_len, 7)), None)
        if model.length_multiple == model.shortest == 1:
            others["single token"] = (1, 1, None)
        if spec.model.max_seq_len is None and seq_len <= 4096:
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
    return spec.model.fixed_seq_len or taken_length(spec, min(spec.model.seq_len, 300))


def marks_tokens(tensor: TensorInfo, spec: BuildSpec) -> bool:
    """True for an input of one boolean for each token that is not known as a mask."""
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

    lengths: counts the kept tokens of each sample.
    sizes: of other axes, if not those of the example.
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
            for value, share in model.drawn_shares.get(name, NONE).items():
                drawn[rng.random(shape) < share] = value
            padding = model.padded_with.get(name)
            inputs[name] = drawn if padding is None else np.where(spread(keep, model.mask_axes, shape), drawn, padding)
        else:
            inputs[name] = rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(tensor.dtype))
    return with_positions(dict(model.within_limits(inputs)), spec, rng)


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


def adversarial_inputs(module: nn.Module, spec: BuildSpec) -> dict[str, dict[str, Array]]:
    """Inputs by the name of their case, each one sample without padding.

    Every model gets the same token everywhere, so that landmarks are nearly singular, softmaxes uniform, and all hashes
    equal. A bare attention layer, which takes any hidden states, also gets the hostile inputs that its spec declares.
    """
    hostile, limit = spec.model.hostile_inputs, spec.model.input_limits.get("input_ids")
    if hostile is None:
        return {}  # see the sweeps of the tests
    rng = np.random.default_rng(LENGTH)
    length = spec.model.fixed_seq_len or min(spec.model.seq_len, LENGTH)
    if limit is not None:
        tokens = np.full((1, length), min(TOKEN, limit - 1), dtype=np.int64)
        inputs = {"input_ids": tokens, "attention_mask": ones(length)}
        return {"identical tokens": with_positions(inputs, spec, rng)}
    plain = rng.standard_normal((length, spec.attention.dim))
    found = {"identical tokens": np.broadcast_to(plain[:1], plain.shape)}
    if hostile.zero_tokens:
        found["zero tokens"] = np.where(np.arange(length)[:, None] % 3 == 0, 0.0, plain)
    for gap in hostile.key_gaps:
        # from zero up, where exp overflows if the largest key is not subtracted
        places = (rng.random((length, 1)) < 0.5).astype(np.float64)
        found[f"key gap {gap}"] = plain + hidden_for_keys(module, gap * places, WELL_CONDITIONED)
    if hostile.small_key is not None:
        keys = np.full((length, 1), hostile.small_key)
        found["small denominators"] = plain + hidden_for_keys(module, keys, NEARLY_EXACT)
    return {name: hidden_inputs(hidden, spec) for name, hidden in found.items()}


def hidden_inputs(hidden: Array, spec: BuildSpec) -> dict[str, Array]:
    states = np.ascontiguousarray(hidden[None], dtype=np.float32).astype(numpy_dtype(spec.dtype))
    return {"hidden_states": states, "attention_mask": ones(hidden.shape[0])}


def ones(length: int) -> Array:
    return np.ones((1, length), dtype=np.int64)


def hidden_for_keys(module: Any, keys: Array, cutoff: float) -> Array:
    """Hidden states [tokens, dim] that the key projection takes to `keys` [tokens, 1], the same for every channel, as
    nearly as least squares can; where keys have fewer channels than states, exactly.

    cutoff: singular values of the projection below this share of the largest are not used."""
    weight: torch.Tensor = module.key.weight.detach().double()
    wanted = np.broadcast_to(keys, (len(keys), weight.shape[0]))
    if module.key.bias is not None:
        wanted = wanted - module.key.bias.detach().double().numpy()
    solution, *_ = np.linalg.lstsq(weight.numpy(), wanted.T, rcond=cutoff)
    hidden: Array = solution.T
    return hidden


def has_axes_of_tokens(tensor: TensorInfo, spec: BuildSpec) -> bool:
    """True for an input with the axes of the mask first, and so with padding."""
    axes = spec.model.kept_dims
    return tensor.dims[: len(axes)] == axes


def padding_of_other_content(case: Case, spec: BuildSpec) -> dict[str, Array]:
    """The inputs of a case with other, valid content where its mask is 0."""
    rng = np.random.default_rng(CONTENT_SEED)
    limits = spec.model.input_limits
    has_padding = {tensor.name: has_axes_of_tokens(tensor, spec) for tensor in spec.inputs}
    changed: dict[str, Array] = {}
    for name, array in case.inputs.items():
        if name == MASK_NAME or not has_padding[name]:
            changed[name] = array
            continue
        if array.dtype.kind in "iu":
            other = rng.integers(0, limits[name], array.shape, dtype=array.dtype)
        else:
            other = (3 * rng.standard_normal(array.shape)).astype(array.dtype)
        kept = case.keep.reshape(case.keep.shape + (1,) * (array.ndim - case.keep.ndim))
        changed[name] = np.where(kept, array, other)
    return changed
