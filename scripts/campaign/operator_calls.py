"""Calls of single operators, drawn at random: valid ones, and the same with damage."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]

FLOATS: tuple[Any, ...] = (np.float32, np.float32, np.float16, ml_dtypes.bfloat16)
TOKENS = (1, 2, 3, 5, 8, 16, 17, 31, 33, 63, 64, 65, 100)
CHANNELS = (1, 2, 3, 7, 8, 16, 17, 24, 33, 64)
# One rounding to T of a number of about 1.
ROUNDING = {np.dtype(np.float32): 0.0, np.dtype(np.float16): 2**-11, np.dtype(ml_dtypes.bfloat16): 2**-8}
# Numbers that no layer hands over. In float16 the largest become infinities.
WILD = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-40, 6e-8, 3e38, -3e38, 65504.0, 1e30, -1e29, 88.8, -104.0, 1.0)
ENDS = (-(2**63), -(2**62), -(2**40), -(2**31), -1, 0, 1, 2, 3, 2**20, 2**20 + 1, 2**31 - 1, 2**31, 2**32)
ENDS += (2**40, 2**62, 2**63 - 1)


@dataclass(frozen=True)
class Call:
    """One call of an operator. outputs: names of its outputs, "" for one that is left out.

    limit: how far the kernel may be from the function body in float32, given what that returns; None if the contract
    does not define the results, or not those of both. harm: what was damaged, in words; "" for a valid call.
    """

    op: str
    feeds: Feeds
    attributes: Mapping[str, Any]
    outputs: tuple[str, ...]
    limit: Callable[[Array], Array] | None = None
    harm: str = ""


@dataclass(frozen=True)
class Dice:
    """Random choices of one case, and arrays that follow from its seed as well."""

    choices: random.Random
    numbers: np.random.Generator

    def normal(self, *shape: int) -> Array:
        return self.numbers.standard_normal(shape)

    def keep(self, batch: int, tokens: int) -> Array:
        """A mask with holes; sometimes all true, or nothing."""
        share = self.choices.choice((0.0, 0.3, 0.7, 0.7, 1.0))
        return self.numbers.random((batch, tokens)) < share

    def sizes(self) -> tuple[int, int, int, int]:
        """Batch, heads, tokens and channels, seldom large."""
        if self.choices.random() < 0.03:
            return 1, 1, self.choices.choice((257, 1000, 1025, 2049)), self.choices.choice((3, 17))
        return (
            self.choices.choice((1, 1, 2, 3)),
            self.choices.choice((1, 2, 3)),
            self.choices.choice(TOKENS),
            self.choices.choice(CHANNELS),
        )


def within(error: float) -> Callable[[Array], Array]:
    """The same limit for every number."""
    return lambda body: np.full(body.shape, error)


def share_of(largest: float, error: float) -> Callable[[Array], Array]:
    return within(largest * error)


def largest_visible(v: Array, keep: Array) -> float:
    return float(np.abs(v.astype(np.float64))[np.broadcast_to(keep[:, None, :, None], v.shape)].max(initial=0.0))


# Limits are those of the operators' README.md ("Determinism"): the kernel's, the body's and one rounding to T.
def iterative_pinv(dice: Dice) -> Call:
    count, m = dice.choices.choice((1, 2, 3)), dice.choices.choice((1, 2, 3, 8, 16, 17, 31, 33))
    dtype = np.dtype(dice.choices.choice(FLOATS))
    logits = np.exp(2 * dice.normal(count, m, m))
    a = (logits / logits.sum(axis=-1, keepdims=True)).astype(dtype)
    scale = a.astype(np.float32).sum(axis=1).max(axis=-1).reshape(-1, 1, 1).astype(dtype)
    iterations = dice.choices.choice((1, 2, 6, 6))

    def limit(body: Array) -> Array:
        largest = np.abs(body).max(axis=(1, 2), keepdims=True)
        return np.broadcast_to((1e-5 + 1e-3 + ROUNDING[dtype]) * largest, body.shape)

    return Call("IterativePinv", {"A": a, "scale": scale}, {"iterations": iterations}, ("Z",), limit)


def linear_attention(dice: Dice) -> Call:
    batch, heads, tokens, channels = dice.sizes()
    dtype = np.dtype(dice.choices.choice(FLOATS))
    width = dice.choices.choice((channels, channels, 5))
    q, k = (dice.normal(batch, heads, tokens, channels).astype(dtype) for _ in range(2))
    v, keep = dice.normal(batch, heads, tokens, width).astype(dtype), dice.keep(batch, tokens)
    attributes = {"eps": dice.choices.choice((1e-6, 1e-3)), "causal": dice.choices.choice((0, 1))}
    attributes |= {"chunk_length": dice.choices.choice((16, 128)), "relu": dice.choices.choice((0, 1))}
    limit = share_of(float(np.abs(v.astype(np.float64)).max()), 2e-6 + 4e-6 + ROUNDING[dtype])
    return Call("EluLinearAttention", {"q": q, "k": k, "v": v, "keep": keep}, attributes, ("out",), limit)


def lsh_sort(dice: Dice) -> Call:
    rows, tokens = dice.choices.choice((1, 2, 5)), dice.choices.choice((*TOKENS, 1000))
    buckets = dice.choices.choice((1, 2, 5, 31, 33, 257, 1300, 2**20 + 1, 2**31 - 1))
    values = dice.numbers.integers(0, buckets, (rows, tokens)).astype(np.int32)
    outputs = dice.choices.choice((("order", "rank"), ("order", "rank"), ("order",), ("order", "")))
    return Call("LSHSort", {"buckets": values}, {"num_buckets": buckets}, outputs, within(0.0))


def lsh_attention(dice: Dice) -> Call:
    from lsh_attention_cases import Case, float64_attention

    batch, heads, tokens, channels = dice.sizes()
    pick = dice.choices.choice
    case = Case(
        seq=min(tokens, 257),
        chunk_length=pick((1, 2, 5, 16, 33, 64)),
        chunks_before=pick((0, 1, 1, 2, 5)),
        chunks_after=pick((0, 0, 1, 3)),
        causal=pick((False, True)),
        circular=pick((False, True)),
        rounded=pick((False, False, True)),
        rounds=pick((1, 2, 3)),
        head_dim=channels,
        value_dim=pick((channels, 5)),
        batch=batch,
        heads=heads,
        padding=min(pick((0, 0, 1, 7)), tokens // 2),
        dtype=str(np.dtype(pick(FLOATS))),
    )
    feeds = case.arrays()
    error = 2e-5 + 2e-5 + ROUNDING[feeds["v"].dtype]
    # the formula does not define what float32 makes of tokens that see only themselves
    alone = float64_attention(case, feeds)[1][..., None] if case.rounded else False

    def limit(body: Array) -> Array:
        return np.where(alone, np.inf, error * np.abs(body).max(initial=0.0)) + np.zeros(body.shape)

    return Call("LSHAttention", feeds, case.attributes, ("out",), limit)


def aft_simple_attention(dice: Dice) -> Call:
    shape = dice.sizes()
    dtype = np.dtype(dice.choices.choice(FLOATS))
    q, k, v = (factor * dice.normal(*shape) for factor in (3, 3, 1))
    keep = dice.keep(shape[0], shape[2])
    feeds = {"q": q.astype(dtype), "k": k.astype(dtype), "v": v.astype(dtype), "keep": keep}
    limit = share_of(largest_visible(feeds["v"], keep), 4e-6 + 1e-5 + ROUNDING[dtype])
    return Call("AFTSimpleAttention", feeds, {}, ("out",), limit)


def aft_window_attention(dice: Dice) -> Call:
    from aft_window_inputs import Sizes, made_inputs

    batch, heads, tokens, channels = dice.sizes()
    pick, causal = dice.choices.choice, dice.choices.choice((0, 1))
    taps = pick((1, 3, 11, 63, 131)) + (pick((0, 1)) if causal else 0)
    positions = pick((1, tokens, tokens + 3))
    sizes = Sizes(batch, heads, tokens, channels, taps, positions, pick((False, True)))
    feeds = made_inputs(sizes, pick(FLOATS))
    error = 5e-6 + 1e-5 + ROUNDING[feeds["v"].dtype]
    limit = share_of(largest_visible(feeds["v"], feeds["keep"]), error)
    return Call("AFTWindowAttention", feeds, {"causal": causal}, ("out",), limit)


def masked_attention(dice: Dice) -> Call:
    batch, heads, queries, channels = dice.sizes()
    dtype = np.dtype(dice.choices.choice(FLOATS))
    keys, width = dice.choices.choice((*TOKENS, 1100)), dice.choices.choice((channels, 5))
    shapes = ((queries, channels), (keys, channels), (keys, width))
    q, k, v = (dice.normal(batch, heads, *shape).astype(dtype) for shape in shapes)
    feeds = {"q": q, "k": k, "v": v, "keep": dice.keep(batch, keys)}
    limit = within(2e-5 + 2e-5 + 4 * ROUNDING[dtype])
    return Call("MaskedAttention", feeds, {"scale": channels**-0.5}, ("out",), limit)


def segment_means(dice: Dice) -> Call:
    shape = dice.sizes()
    dtype = np.dtype(dice.choices.choice(FLOATS))
    feeds = {"x": dice.normal(*shape).astype(dtype), "keep": dice.keep(shape[0], shape[2])}
    count = dice.choices.choice((1, 3, 7, 16, 64))
    return Call("SegmentMeans", feeds, {"num_segments": count}, ("means",), within(2e-5 + 8 * ROUNDING[dtype]))


def sequence_conv(dice: Dice) -> Call:
    shape = dice.sizes()
    dtype = np.dtype(dice.choices.choice(FLOATS))
    x, residual = (dice.normal(*shape).astype(dtype) for _ in range(2))
    weight = dice.normal(shape[1], 1, dice.choices.choice((1, 3, 7, 65, 129)), 1).astype(dtype)
    feeds = {"x": x, "weight": weight, "keep": dice.keep(shape[0], shape[2]), "residual": residual}
    return Call("SequenceConv", feeds, {}, ("out",), within(2e-4 + 64 * ROUNDING[dtype]))


def lsh_hash(dice: Dice) -> Call:
    """Integers whose products are exact in float32, with ties, so that there is one right answer."""
    batch, heads, tokens, channels = dice.sizes()
    factors = dice.choices.choice(((2,), (8,), (4, 6), (2, 4, 6), (16, 32), (70,)))
    rounds, width = dice.choices.choice((1, 2, 3)), sum(factors) // 2
    qk = dice.numbers.integers(-15, 16, (batch, heads, tokens, channels)).astype(dice.choices.choice(FLOATS))
    rotations = dice.numbers.integers(-8191, 8192, (heads, channels, rounds, width)).astype(np.float32)
    rotations[..., -1] = rotations[..., 0]
    feeds = {"qk": qk, "rotations": rotations, "keep": dice.keep(batch, tokens)}
    attributes = {"bucket_factors": list(factors), "chunk_length": dice.choices.choice((1, 7, 16, 64))}
    return Call("LSHHash", feeds, attributes, ("buckets",), within(0.0))


VALID = (
    *(iterative_pinv, linear_attention, lsh_sort, lsh_attention, aft_simple_attention, aft_window_attention),
    *(masked_attention, segment_means, sequence_conv, lsh_hash),
)


def odd_bools(call: Call, dice: Dice) -> Call:
    """True as other bytes than 1, which changes nothing."""
    feeds = dict(call.feeds)
    for name, array in feeds.items():
        if array.dtype == bool:
            bytes_of_true = dice.numbers.integers(1, 256, array.shape).astype(np.uint8)
            feeds[name] = np.where(array, bytes_of_true, 0).astype(np.uint8).view(bool)
    return replace(call, feeds=feeds)


def wild_values(call: Call, dice: Dice) -> Call:
    """Some numbers of one input, or all, are NaN, infinite, subnormal, huge, or indices that do not exist."""
    name = dice.choices.choice(list(call.feeds))
    array = call.feeds[name].copy()
    share = dice.choices.choice((0.02, 0.5, 1.0))
    places = dice.numbers.random(array.shape) < share
    if array.dtype == bool:
        return odd_bools(call, dice)
    if array.dtype == np.int32:
        limits = np.iinfo(np.int32)
        ends = [limits.min, -1, 0, 1, *(int(size) for size in array.shape), 2**20, limits.max]
        values = dice.numbers.choice(np.array(ends), array.shape)
    else:
        values = dice.numbers.choice(np.array(WILD), array.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.where(places, values, array).astype(array.dtype)
    return replace(call, feeds=call.feeds | {name: array}, limit=None, harm=f"wild values in {name}")


def wild_attribute(call: Call, dice: Dice) -> Call:
    """One attribute at the ends of its type or range, of another type, missing, or one that does not exist."""
    attributes: dict[str, Any] = dict(call.attributes)
    name = dice.choices.choice([*attributes] or ["nowhere"]) if dice.choices.random() < 0.9 else "nowhere"
    value = attributes.get(name, 0)
    how = dice.choices.choice(("end", "end", "end", "type", "missing"))
    if how == "missing":
        attributes.pop(name, None)
    elif how == "type":
        attributes[name] = dice.choices.choice((2.5, "text", [1, 2], [0.5], 7))
    elif isinstance(value, list):
        attributes[name] = dice.choices.choice(([], [2] * 31, [2] * 500, [2**31], [2**62, 2**62], [3], [0], [-2, -2]))
    elif isinstance(value, float):
        attributes[name] = dice.choices.choice((*WILD, -1e-9))
    else:
        attributes[name] = dice.choices.choice(ENDS)
        attributes, call = affordable(attributes, call, dice)
    return replace(call, attributes=attributes, limit=None, harm=f"{name} = {attributes.get(name, 'missing')}")


def affordable(attributes: dict[str, Any], call: Call, dice: Dice) -> tuple[dict[str, Any], Call]:
    """A call that the contract defines and that would run for minutes gets a smaller size."""
    if attributes.get("circular") and 2**20 in (attributes.get("chunks_before"), attributes.get("chunks_after")):
        attributes["circular"] = 0
    if attributes.get("iterations") == 2**20:
        call = replace(call, feeds={"A": call.feeds["A"][:1, :1, :1], "scale": call.feeds["scale"][:1]})
    return attributes, call


def wild_shape(call: Call, dice: Dice) -> Call:
    """One input has another rank, or another size in one place; or one size is 0, or huge beside a 0."""
    name = dice.choices.choice(list(call.feeds))
    array = call.feeds[name]
    how = dice.choices.choice(("more", "fewer", "scalar", "size", "zero", "huge", "empty", "one"))
    shape = list(array.shape)
    place = dice.choices.randrange(len(shape))
    if how == "more":
        shape.insert(place, dice.choices.choice((1, 2)))
    elif how == "fewer":
        del shape[place]
    elif how == "scalar":
        shape = []
    elif how == "size":
        shape[place] = max(shape[place] + dice.choices.choice((-1, 1, 2, 13)), 0)
    elif how == "zero":
        shape[place] = 0
    elif how == "one":
        shape[place] = 1
    elif how == "huge":
        shape = [1] * len(shape)
        shape[dice.choices.randrange(len(shape))] = dice.choices.choice((2**20, 2**31, 2**40, 2**44, 2**61))
        shape[place] = 0
    else:
        shape = [0] * len(shape)
    return replace(call, feeds=call.feeds | {name: resized(array, shape)}, limit=None, harm=f"{name} is {shape}")


def common_zero(call: Call, dice: Dice) -> Call:
    """The same size is 0, or huge beside zeros, in all inputs that have it."""
    sizes = sorted({size for array in call.feeds.values() for size in array.shape})
    chosen, huge = dice.choices.choice(sizes), dice.choices.choice((None, None, 2**20, 2**31, 2**44))
    other = dice.choices.choice(sizes)
    feeds = {}
    for name, array in call.feeds.items():
        shape = [0 if size == chosen else size for size in array.shape]
        if huge is not None and 0 in shape and array.dtype != bool:
            shape = [huge if size == other and size != chosen else size for size in shape]
        feeds[name] = resized(array, shape)
    return replace(call, feeds=feeds, limit=None, harm=f"{chosen} → 0 and {other} → {huge}")


def huge_rounds(call: Call, dice: Dice) -> Call:
    """LSHHash: rounds without directions cost no memory, however many there are."""
    if call.op != "LSHHash" or [(name, array.ndim) for name, array in call.feeds.items()] != [
        ("qk", 4),
        ("rotations", 4),
    ]:
        return common_zero(call, dice)
    batch, heads, tokens, _ = call.feeds["qk"].shape
    rounds = dice.choices.choice((2**31, 2**40, 2**44, 2**52))
    rotations = resized(np.zeros(0, np.float32), [heads, 0, rounds, call.feeds["rotations"].shape[3]])
    qk = resized(np.zeros(0, call.feeds["qk"].dtype), [batch, heads, tokens, 0])
    feeds = call.feeds | {"qk": qk, "rotations": rotations}
    return replace(call, feeds=feeds, limit=None, harm=f"{rounds} rounds of no channels")


def wild_type(call: Call, dice: Dice) -> Call:
    """One input has another element type."""
    name = dice.choices.choice(list(call.feeds))
    types = (np.float64, np.float32, np.float16, np.int64, np.int32, np.uint8, np.bool_, np.int8)
    dtype = dice.choices.choice(types)
    with np.errstate(invalid="ignore", over="ignore"):
        array = call.feeds[name].astype(np.float32).astype(dtype)
    return replace(call, feeds=call.feeds | {name: array}, limit=None, harm=f"{name} is {np.dtype(dtype)}")


def wild_arity(call: Call, dice: Dice) -> Call:
    """An input or an output is missing, left empty, or there is one too many, or inputs are swapped."""
    feeds, outputs = dict(call.feeds), call.outputs
    how = dice.choices.choice(("missing", "empty", "more", "no output", "more outputs", "empty output", "swapped"))
    name = dice.choices.choice(list(feeds))
    if how == "missing":
        del feeds[name]
    elif how == "empty":  # see the model: an input without a value has no name
        feeds = {key: np.zeros((), object) if key == name else array for key, array in feeds.items()}
    elif how == "more":
        feeds["one_more_input"] = feeds[name]
    elif how == "no output":
        outputs = ()
    elif how == "more outputs":
        outputs = (*outputs, "one_more")
    elif how == "empty output":
        outputs = ("", *outputs[1:])
    else:
        feeds = dict(reversed(feeds.items()))
    return replace(call, feeds=feeds, outputs=outputs, limit=None, harm=f"{how} ({name})")


HARMS = (
    *(wild_values, wild_values, wild_values, wild_attribute, wild_attribute, wild_attribute, wild_attribute),
    *(wild_shape, wild_shape, wild_shape, common_zero, common_zero, huge_rounds, wild_type, wild_arity),
)


def resized(array: Array, shape: list[int]) -> Array:
    """An array of another shape with the same numbers over and over."""
    most = 2**58 if 0 in shape else 2**16  # NumPy counts no further, zeros or not
    for i, size in enumerate(shape):
        shape[i] = min(size, most)
        most //= shape[i] or 1
    return np.resize(array, shape) if array.size and 0 not in shape else np.zeros(shape, array.dtype)


def drawn(seed: int, index: int) -> Call:
    """The call of a case."""
    choices = random.Random(f"{seed}-{index}")
    dice = Dice(choices, np.random.default_rng(choices.getrandbits(64)))
    call = choices.choice(VALID)(dice)
    kind = choices.random()
    if kind < 0.35:
        return call
    if kind < 0.45:
        return odd_bools(call, dice)
    call = choices.choice(HARMS)(call, dice)
    is_whole = call.feeds and all(array.dtype != object and array.ndim for array in call.feeds.values())
    return choices.choice(HARMS)(call, dice) if kind > 0.9 and is_whole else call
