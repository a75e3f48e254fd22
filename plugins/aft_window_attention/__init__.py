"""`effexport::AFTWindowAttention`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Attribute, Parameter, Signature

OP = Op(
    "aft_window_attention",
    "AFTWindowAttention",
    place=9,
    in_float="its sums of exponentials span many magnitudes",
    body_in_float32=True,
)
SIGNATURE = Signature(
    "AFTWindowAttention",
    "out = σ(q) ⊙ Σ softmax(k + w) ⊙ v over the visible tokens of a sequence, with biases w for near keys only.",
    inputs=(
        Parameter("q", "batch heads seq channels"),
        Parameter("k", "batch heads seq key_channels", note=", one channel or all"),
        Parameter("v", "batch heads seq channels"),
        Parameter("keep", "batch seq", "bool", ", false for padding"),
        Parameter("bias", "bias_heads positions taps", "float32", ", heads and positions may be 1"),
    ),
    outputs=(Parameter("out", "batch heads seq channels"),),
    attributes=(Attribute("causal", int, default=0),),
)
