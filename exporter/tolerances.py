"""Every limit of the parity check, each with its reason.

Errors of outputs are max |candidate − reference| / RMS(reference), see `parity.relative_error`.
"""

from __future__ import annotations

from dataclasses import dataclass

from effexport.spec import BuildSpec


@dataclass(frozen=True)
class Limit:
    """The largest value that passes, and why it is that large."""

    value: float
    reason: str


# (precision, scope) → limit of the arithmetic, whatever the variant
ARITHMETIC: dict[tuple[str, str], Limit] = {
    ("fp32", "attention"): Limit(2e-5, "float32 sums in another order: about 300 roundings of 6e-8"),
    ("fp32", "encoder"): Limit(2e-4, "float32 sums in another order, amplified by each layer's norm and softmax"),
    ("fp16", "attention"): Limit(1e-2, "weights and activations rounded to float16 (5e-4 each), islands in float32"),
    ("fp16", "encoder"): Limit(1e-2, "weights and activations rounded to float16 (5e-4 each), islands in float32"),
    ("bf16", "attention"): Limit(8e-2, "bfloat16 has 3 bits less than float16: 8 times its limit"),
    ("bf16", "encoder"): Limit(8e-2, "bfloat16 has 3 bits less than float16: 8 times its limit"),
}

# Share of tokens whose bucket may differ when a layer gets the same input, per precision of that input
# (measured: 0 in float32, up to 1.6e-3 in float16, 1.3e-2 in bfloat16; at least one flip is always allowed).
BUCKET_FLIPS: dict[str, Limit] = {
    "fp32": Limit(1e-5, "equal hashes in float32 but for vectors within rounding of a boundary"),
    "fp16": Limit(2e-3, "float16 rounding upstream of the hash moves up to 1.6e-3 of all vectors"),
    "bf16": Limit(2e-2, "bfloat16 rounding upstream of the hash moves up to 1.3e-2 of all vectors"),
}

UNIT_ROUNDOFF: dict[str, float] = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}

# A free-running hash model is judged against what other rotations would have done to it.
SEED_NOISE_SHARE = Limit(0.25, "a quarter of the change that other rotation seeds make to the same model")


def arithmetic_limit(spec: BuildSpec) -> Limit:
    return ARITHMETIC[spec.precision, spec.scope]


def near_tie_limit(spec: BuildSpec) -> Limit:
    """How far apart two buckets may be, relative to the largest projection, and still be exchanged by rounding."""
    value = 8 * UNIT_ROUNDOFF[spec.precision] * spec.attention.head_size**0.5
    return Limit(value, f"8 unit roundoffs of {spec.precision} times √head_dim: the error of one projection")
