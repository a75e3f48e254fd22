"""`effexport::AFTSimpleAttention`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Parameter, Signature

OP = Op(
    "aft_simple_attention",
    "AFTSimpleAttention",
    place=4,
    in_float="its sums of exponentials span many magnitudes",
    body_in_float32=True,
)
SIGNATURE = Signature(
    "AFTSimpleAttention",
    "out = σ(q) ⊙ Σ softmax(k) ⊙ v, per channel over the visible tokens of a sequence.",
    inputs=(
        Parameter("q", "batch heads seq channels"),
        Parameter("k", "batch heads seq channels"),
        Parameter("v", "batch heads seq channels"),
        Parameter("keep", "batch seq", "bool", ", false for padding"),
    ),
    outputs=(Parameter("out", "batch heads seq channels"),),
)
