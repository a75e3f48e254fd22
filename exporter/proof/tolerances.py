"""Measures of errors, and every limit of the parity check, by precision and scope, each with its reason.

Errors are relative to the RMS of the expected numbers, so that one limit serves every scale: those of outputs are
max |candidate − reference| / RMS(reference). `relative_error` and `rms` judge the outputs of a model; `value_error` and
`magnitude` the values inside its graph, whatever their axes mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.base.dtypes import UNIT_ROUNDOFF, Array
from effexport.base.spec import BuildSpec
from effexport.proof.check import Limit

if TYPE_CHECKING:
    from effexport.proof.cases import Case


# Elements that a comparison works on at once, so that its float64 temporaries stay in the cache of a core.
SLICE_ELEMENTS = 2**16
# Logits of hidden keys are −1e9 or −3e38. They must agree too, but do not count for the scale of the others.
MASK_CONSTANT = 1e8


def rms(x: Array) -> float:
    """Root mean square, in float64."""
    flat = x.reshape(-1)
    total = sum(float(np.sum(np.square(flat[part], dtype=np.float64))) for part in slices(len(flat), 1))
    return float(np.sqrt(total / max(1, len(flat))))


def slices(rows: int, width: int) -> Iterator[slice]:
    """Parts of rows of this width, each small enough for a cache; a row is never cut."""
    step = max(1, SLICE_ELEMENTS // max(1, width))
    yield from (slice(start, start + step) for start in range(0, rows, step))


def relative_error(actual: Array, expected: Array) -> tuple[float, tuple[int, int]]:
    """max |actual − expected| / scale over [tokens, channels], and its place; NaN counts as the largest.

    The scale of a token is the RMS of its sample, or its own RMS if that is larger: the first tokens of a causal model,
    which average over few keys, are ten times larger than the rest, and so is their rounding.
    """
    return largest(relative for _, _, relative in relative_errors(actual, expected))


def largest_error(actual: Array, expected: Array) -> float:
    """The first of `relative_error`."""
    return relative_error(actual, expected)[0]


def relative_errors(actual: Array, expected: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Some rows of both in float64, and |actual − expected| / scale of them, part after part; see `relative_error`."""
    if not expected.size:
        return
    actual, expected = comparable(actual, expected)
    ordinary = is_ordinary(expected)
    whole = rms(expected) if ordinary else mean_root(*square_sums(expected).sum(axis=1))
    for rows in slices(*expected.shape):
        ours, wanted = actual[rows].astype(np.float64), expected[rows].astype(np.float64)
        if ordinary:
            own = np.sqrt(np.mean(np.square(wanted), axis=-1, keepdims=True))
            scale = np.maximum(np.maximum(own, whole), np.finfo(np.float32).tiny)
        else:
            scale = scales(wanted, whole)
        with np.errstate(invalid="ignore"):  # inf − inf is NaN, which is what it should be
            relative = np.abs(ours - wanted) / scale
        yield ours, wanted, relative


def comparable(actual: Array, expected: Array) -> tuple[Array, Array]:
    """Both with zeros where there is no number to compare, because both are infinite alike."""
    if is_ordinary(expected):
        return actual, expected
    alike = np.isinf(expected) & (actual == expected)
    return np.where(alike, 0, actual), np.where(alike, 0, expected)


def is_ordinary(x: Array) -> bool:
    """True if all elements are finite, and none is a mask constant."""
    return float(np.abs(x).max(initial=0)) < MASK_CONSTANT  # not if it is NaN


def scales(expected: Array, whole: float) -> Array:
    """The scale of the errors of each element, float64 [rows, channels]: the RMS of its row, or `whole` if that is
    larger; of a mask constant, its own size, which then does not count for the others."""
    own = mean_root(*square_sums(expected))[:, None]
    scale = np.maximum(np.maximum(own, whole), np.finfo(np.float32).tiny)
    return np.where(np.abs(expected) < MASK_CONSTANT, scale, np.abs(expected))


def largest(parts: Iterable[Array]) -> tuple[float, tuple[int, int]]:
    """The largest element of rows that come in parts, and its place; NaN counts as the largest. 0 without elements."""
    value, place, first = -1.0, (0, 0), 0
    for part in parts:
        row, column = np.unravel_index(int(np.argmax(part)), part.shape)
        # NaN wins over every number, and stays
        if value == value and not part[row, column] <= value:
            value, place = float(part[row, column]), (first + int(row), int(column))
        first += len(part)
    return max(value, 0.0), place  # NaN stays


def overall_error(actual: Array, expected: Array) -> float:
    """RMS(actual − expected) / RMS(expected); NaN if there is one."""
    actual, expected = comparable(actual, expected)
    return rms(actual.astype(np.float32) - expected) / max(rms(expected), float(np.finfo(np.float32).tiny))


def largest_change(case: Case, outputs: Mapping[str, Array]) -> float:
    """The largest change of any element that is compared, relative to the scale of its token."""
    return float(np.max([largest_error(actual, expected) for *_, actual, expected in case.pairs(outputs)]))


def rms_change(case: Case, outputs: Mapping[str, Array]) -> float:
    """RMS(outputs − reference) / RMS(reference) of what is compared, for the output that changes most."""
    changes = []
    for name, expected in case.outputs.items():
        actual, wanted = (
            np.concatenate([case.kept(name, array, sample) for sample in case.samples(array)])
            for array in (outputs[name].astype(np.float32), expected)
        )
        actual, wanted = comparable(actual, wanted)
        # a reference of zeros, as a layer without biases makes of zero tokens, must be met exactly
        changes.append(rms(actual - wanted) / max(rms(wanted), float(np.finfo(np.float32).tiny)))
    return float(np.max(changes))  # not the built-in max, which may drop NaN


def value_error(actual: Array, expected: Array) -> float:
    """max |actual − expected| / RMS, as in `relative_error`: a row of the last axis that is larger than the
    RMS of the whole has a scale of its own. For integers and booleans, the share that differs."""
    if actual.shape != expected.shape:
        return float("inf")
    if expected.size == 0:
        return 0.0
    if expected.dtype.kind in "biu":
        return float(np.mean(actual != expected))
    width = expected.shape[-1] if expected.ndim else 1
    actual, expected = actual.reshape(-1, width), expected.reshape(-1, width)
    if not is_ordinary(expected):
        # without an error, and of no weight in the scale of the others
        same = (np.isinf(expected) & (actual == expected)) | (np.isnan(actual) & np.isnan(expected))
        actual, expected = (np.where(same, np.float64(2 * MASK_CONSTANT), x) for x in (actual, expected))
    return largest_error(actual, expected)


def magnitude(x: Array) -> tuple[float, float]:
    """The largest absolute value and the RMS of all elements except mask constants; zeros if there are no others."""
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    highest, sums = 0.0, np.zeros(2)
    for part_rows in slices(*rows.shape):
        part = np.abs(rows[part_rows].astype(np.float64))
        highest = max(highest, float(np.max(part, where=part < MASK_CONSTANT, initial=0.0)))
        sums += square_sums(part).sum(axis=1)
    return highest, float(mean_root(*sums))


def square_sums(x: Array) -> Array:
    """The sum of the squares and the number of all elements except mask constants, per row, float64 [2, rows]."""
    x = x.astype(np.float64)
    ordinary = np.abs(x) < MASK_CONSTANT  # NaN is not ordinary
    squares = np.square(x, where=ordinary, out=np.zeros(x.shape))
    return np.stack([squares.sum(axis=1), ordinary.sum(axis=1)])


def mean_root(total: Any, count: Any) -> Any:
    return np.sqrt(total / np.maximum(count, 1))


_DEEP = Limit(2e-4, "float32 sums in another order, amplified by each layer's norm and softmax")
_FLOAT16 = Limit(1e-2, "weights and activations rounded to float16 (5e-4 each); what would overflow stays in float32")
_BFLOAT16 = Limit(8e-2, "bfloat16 has 3 bits less than float16: 8 times its limit")
# (precision, scope) → limit of the arithmetic, whatever the variant
ARITHMETIC: dict[tuple[str, str], Limit] = {
    ("fp32", "attention"): Limit(2e-5, "float32 sums in another order: about 300 roundings of 6e-8"),
    ("fp32", "encoder"): _DEEP,
    # PyTorch in float32 was seen as far as 7e-5 from float64 in two layers of very sharp attention
    ("fp32", "checkpoint"): _DEEP,
    ("fp16", "attention"): _FLOAT16,
    ("fp16", "encoder"): _FLOAT16,
    ("fp16", "checkpoint"): _FLOAT16,
    ("bf16", "attention"): _BFLOAT16,
    ("bf16", "encoder"): _BFLOAT16,
    ("bf16", "checkpoint"): _BFLOAT16,
}

# RMS of the error over the RMS of the reference, in float32. It was at most 6.8e-7 in 114 healthy builds, and at least
# 3.5e-5 with one weight matrix scaled by 1.001: rounding is spread evenly, damage is not. Attention of trained
# checkpoints is sharper, so they get a quarter of their limit for the largest error.
_EVEN = Limit(1e-5, "float32 rounding, which averages out: 15 times what healthy models show")
OVERALL: dict[str, Limit] = {
    "attention": _EVEN,
    "encoder": _EVEN,
    "checkpoint": Limit(5e-5, "float32 rounding, which averages out, in attention as sharp as trained models have it"),
}

# Share of tokens whose bucket may differ when every layer gets the buckets of the reference from the layers before.
# Measured on encoders of 2 to 12 layers: 0 in float32, up to 2.5e-3 in float16 and 1.7e-2 in bfloat16.
BUCKET_FLIPS: dict[str, Limit] = {
    "fp32": Limit(1e-5, "equal hashes in float32 but for vectors within rounding of a boundary"),
    "fp16": Limit(4e-3, "rounding upstream of the hash moves one to two times its own size, 1e-3 to 2e-3 in float16"),
    "bf16": Limit(4e-2, "rounding upstream of the hash moves one to two times its own size, 1e-2 to 2e-2 in bfloat16"),
}

# A free-running hash model may differ by this share of the change that other rotations make.
SEED_NOISE_SHARE = 0.25
# In low precision PyTorch itself flips buckets: over 72 models its float16 run differed by up to 0.6 of seed noise.
PRECISION_NOISE_FACTOR = 1.5

# Of a quantised model: how far its free run may be from PyTorch's, in units of the change that one rounding of each
# weight makes there. Both are draws of the same cascade of flips; two draws differ by √2. And it may be as far as the
# float model is: if all roundings flipped at random, it would be √2 times as far. Seen were up to 0.6.
ROUNDING_NOISE_FACTOR = 2.0
ROUNDING_LOSS_SHARE = 1.0
# Share of rounded numbers that float32 errors may send to the next step. A number is that near to the middle with a
# probability of 2 errors per step: an error of 1e-6 beside steps of 0.03 σ gives 7e-5. Measured: up to 2e-5; 1e-4
# where all tokens are alike, and flip alike. A small case varies more; faults flip one in ten.
ROUNDING_FLIPS = 1e-3
MOST_FLIPS_OF_FEW = 8

# Adversarial cases amplify rounding: a near-singular iteration, or exp of a large key. Rounding every weight anew, or
# running PyTorch in half precision, shows by how much. Another runtime rounds in a few other places along each path.
OWN_ERROR_FACTOR = 4


def arithmetic_limit(spec: BuildSpec) -> Limit:
    """The limit of one precision and scope."""
    return deepened(ARITHMETIC[spec.arithmetic, spec.model.scope], spec)


def deepened(limit: Limit, spec: BuildSpec) -> Limit:
    """Beyond two layers, rounding adds up like a random walk."""
    if spec.model.layers <= 2:
        return limit
    return Limit(limit.value * (spec.model.layers / 2) ** 0.5, f"{limit.reason}; × √(layers / 2)")


def reference_limit(spec: BuildSpec) -> Limit:
    """The largest distance of PyTorch in float32 from itself in float64, whatever the precision of the spec."""
    limit = deepened(ARITHMETIC["fp32", spec.model.scope], spec)
    return Limit(limit.value, f"a reference that is further off cannot judge others: {limit.reason}")


def case_limit(spec: BuildSpec, own_error: float, spread: float = 1.0) -> Limit:
    """The limit of the arithmetic in one case.

    own_error: how far rounding takes PyTorch itself there.
    spread: of the logits that a softmax has made scores of; see Case.
    """
    limit = arithmetic_limit(spec)
    if spread > 1:
        limit = Limit(limit.value * spread, f"{limit.reason}; × {spread:.2g}, the spread of the logits")
    own = OWN_ERROR_FACTOR * own_error
    if own <= limit.value:
        return limit
    return Limit(own, f"{OWN_ERROR_FACTOR} × what rounding changes in PyTorch itself ({own_error:.2g})")


def function_body_limit(precision: str, own_error: float) -> Limit:
    """The limit of one function body by itself. own_error: how far its definition is off if its inputs are rounded
    anew, or if it is computed in float32, whichever is further."""
    limit, own = ARITHMETIC[precision, "attention"], OWN_ERROR_FACTOR * own_error
    return limit if own <= limit.value else Limit(own, f"{OWN_ERROR_FACTOR} × what rounding changes in its definition")


def overall_limit(spec: BuildSpec, own_error: float) -> Limit | None:
    """The limit of the RMS error in one case; None in half precision, whose own rounding is larger than most damage."""
    if spec.arithmetic != "fp32":
        return None
    limit, own = deepened(OVERALL[spec.model.scope], spec), OWN_ERROR_FACTOR * own_error
    return limit if own <= limit.value else Limit(own, case_limit(spec, own_error).reason)


def bucket_flip_limit(spec: BuildSpec, tokens: int) -> Limit:
    """The number of `tokens` buckets that may differ; one near-tie is always possible."""
    share = BUCKET_FLIPS[spec.arithmetic]
    return Limit(max(1, int(share.value * tokens)), f"{share.reason}; {tokens} buckets in all")


def free_run_limit(spec: BuildSpec, seed_noise: float, precision_noise: float) -> Limit:
    """The largest distance of a free-running hash model from the reference, RMS-relative."""
    choices = {
        f"a quarter of the change that other rotation seeds make ({seed_noise:.2g})": SEED_NOISE_SHARE * seed_noise,
        f"1.5 × the change {low_precision(spec)} ({precision_noise:.2g})": PRECISION_NOISE_FACTOR * precision_noise,
        "arithmetic noise, where one chunk covers everything and the hash has no effect": arithmetic_limit(spec).value,
    }
    return widest(choices)


def widest(choices: Mapping[str, float]) -> Limit:
    """The largest of several limits by reason."""
    reason, value = max(choices.items(), key=lambda choice: choice[1])
    return Limit(value, reason)


def low_precision(spec: BuildSpec) -> str:
    """When PyTorch's own answer changes by `Case.precision_noise`."""
    if spec.is_quantized:
        return "that one rounding of each weight makes in PyTorch's quantised model"
    return f"when PyTorch runs in {spec.precision}"


def rounding_limit(spec: BuildSpec, noise: float, loss: float) -> Limit:
    """The largest distance of a quantised model that rounds by itself from PyTorch's, RMS-relative.

    noise: see `Case.precision_noise`.
    loss: the distance of PyTorch's quantised model from the float model.

    float32 sums in another order send some numbers to the next step, and these send others.
    """
    choices = {
        f"{ROUNDING_NOISE_FACTOR:g} × the change {low_precision(spec)} ({noise:.2g})": ROUNDING_NOISE_FACTOR * noise,
        f"as far as the float model is ({loss:.2g})": ROUNDING_LOSS_SHARE * loss,
        "arithmetic noise, where no rounding flips": arithmetic_limit(spec).value,
    }
    return widest(choices)


def rounding_flip_limit(numbers: int) -> Limit:
    """The number of `numbers` rounded numbers that may be at the next step."""
    value = max(MOST_FLIPS_OF_FEW, int(ROUNDING_FLIPS * numbers))
    return Limit(value, f"numbers within rounding of the middle between two steps; {numbers} in all")


def near_tie_limit(spec: BuildSpec) -> Limit:
    """The largest gap of two buckets, relative to the largest projection, that rounding can exchange."""
    value = 8 * UNIT_ROUNDOFF[spec.arithmetic] * spec.attention.head_size**0.5
    return Limit(value, f"8 unit roundoffs of {spec.arithmetic} times √head_dim: the error of one projection")


def free_limit(case: Case, spec: BuildSpec) -> Limit:
    """The limit of one case, RMS-relative. A model that hashes also chooses buckets of its own."""
    limit = rounding_limit(spec, case.precision_noise, rms_change(with_exact_answers(case), case.outputs))
    if case.seed_noise is None:
        return limit
    return max(limit, free_run_limit(spec, case.seed_noise, case.precision_noise), key=lambda one: one.value)


def foreign_limit(case: Case, spec: BuildSpec) -> Limit:
    """The limit of a file that does not show its roundings: another tool may have chosen its scales, and two
    independent roundings of one model are √2 times as far apart as each is from the float model."""
    limit = free_limit(case, spec)
    return Limit(2**0.5 * limit.value, f"√2 × {limit.reason}: the roundings are not known to be PyTorch's")


def with_exact_answers(case: Case) -> Case:
    """The case with the answers of the float model. Without ranked indices, whose scores belong to the quantised."""
    outputs = {name: case.exact[name] for name in case.outputs if name in case.exact and name not in case.ranked}
    return replace(case, outputs=outputs, ranked={})
