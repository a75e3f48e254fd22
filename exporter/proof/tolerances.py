"""Every limit of the parity check, by precision and scope, each with its reason.

Errors of outputs are max |candidate − reference| / RMS(reference), see `metrics.relative_error`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from effexport.base.dtypes import UNIT_ROUNDOFF
from effexport.base.spec import BuildSpec
from effexport.proof.cases import Case
from effexport.proof.check import Limit
from effexport.proof.metrics import rms_change

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
