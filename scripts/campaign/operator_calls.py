"""Calls of single operators, drawn at random: valid ones, and the same with damage."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from effexport.plugins.contract import Case, Contract, load_contract
from effexport.plugins.ops import OPS

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]

SIZES = (1, 1, 2, 2, 3, 3, 5, 7, 8, 16, 17, 31, 33, 63, 64, 65, 100)
# Numbers that no layer hands over. In float16 the largest become infinities.
WILD = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-40, 6e-8, 3e38, -3e38, 65504.0, 1e30, -1e29, 88.8, -104.0, 1.0)
ENDS = (-(2**63), -(2**62), -(2**40), -(2**31), -1, 0, 1, 2, 3, 2**20, 2**20 + 1, 2**31 - 1, 2**31, 2**32)
ENDS += (2**40, 2**62, 2**63 - 1)


@dataclass(frozen=True)
class Call:
    """One call of an operator. outputs: names of its outputs, "" for one that is left out.

    case: of the contract, which says what comes out; None if it leaves the results open. harm: what was damaged, in
    words; "" for a valid call.
    """

    op: str
    feeds: Feeds
    attributes: Mapping[str, Any]
    outputs: tuple[str, ...]
    case: Case | None = None
    harm: str = ""


@dataclass(frozen=True)
class Dice:
    """Random choices of one case, and arrays that follow from its seed as well."""

    choices: random.Random
    numbers: np.random.Generator


def valid(dice: Dice, op: str = "") -> Call:
    """A case of a contract, of any operator if none is named, often with other sizes. Inputs are as the contract makes
    them."""
    from emulated_plugins import array_of

    op = op or dice.choices.choice(list(OPS))
    contract = load_contract(OPS[op])
    case = dice.choices.choice([*contract.small, *contract.cases])
    other = with_other_sizes(contract, case, dice)
    case = other if accepts(op, contract, other) else case
    outputs = tuple(x.name for x in contract.signature.outputs)
    if op == "LSHSort":  # a node may leave out the ranks
        outputs = dice.choices.choice((outputs, outputs, outputs[:1], (outputs[0], "")))
    attributes = {name: list(x) if isinstance(x, tuple) else x for name, x in contract.attributes(case).items()}
    feeds = {name: array_of(x) for name, x in contract.inputs(case, "cpu").items()}
    return Call(op, feeds, attributes, outputs, case)


def with_other_sizes(contract: Contract, case: Case, dice: Dice) -> Case:
    """A third of the dimensions is drawn anew."""
    dims = {dim for x in contract.signature.inputs for dim in x.dims.split()}
    sizes = list(case.sizes)
    for i, name in enumerate(contract.sizes.split()):
        if name in dims and dice.choices.random() < 1 / 3:
            sizes[i] = dice.choices.choice(SIZES[:6] if i < 2 else SIZES)
    return replace(case, sizes=tuple(sizes))


def accepts(op: str, contract: Contract, case: Case) -> bool:
    """True if the torch operator takes inputs of these sizes."""
    try:
        inputs = [x.to("meta") for x in contract.inputs(case, "cpu").values()]
        getattr(OPS[op].load(), OPS[op].torch_name)(*inputs, *contract.attributes(case).values())
    except (ValueError, IndexError, RuntimeError):
        return False
    return True


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
    return replace(call, feeds=call.feeds | {name: array}, case=None, harm=f"wild values in {name}")


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
    return replace(call, attributes=attributes, case=None, harm=f"{name} = {attributes.get(name, 'missing')}")


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
    return replace(call, feeds=call.feeds | {name: resized(array, shape)}, case=None, harm=f"{name} is {shape}")


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
    return replace(call, feeds=feeds, case=None, harm=f"{chosen} → 0 and {other} → {huge}")


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
    return replace(call, feeds=feeds, case=None, harm=f"{rounds} rounds of no channels")


def wild_type(call: Call, dice: Dice) -> Call:
    """One input has another element type."""
    name = dice.choices.choice(list(call.feeds))
    types = (np.float64, np.float32, np.float16, np.int64, np.int32, np.uint8, np.bool_, np.int8)
    dtype = dice.choices.choice(types)
    with np.errstate(invalid="ignore", over="ignore"):
        array = call.feeds[name].astype(np.float32).astype(dtype)
    return replace(call, feeds=call.feeds | {name: array}, case=None, harm=f"{name} is {np.dtype(dtype)}")


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
    return replace(call, feeds=feeds, outputs=outputs, case=None, harm=f"{how} ({name})")


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
    call = valid(dice)
    kind = choices.random()
    if kind < 0.35:
        return call
    if kind < 0.45:
        return odd_bools(call, dice)
    call = choices.choice(HARMS)(call, dice)
    is_whole = call.feeds and all(array.dtype != object and array.ndim for array in call.feeds.values())
    return choices.choice(HARMS)(call, dice) if kind > 0.9 and is_whole else call
