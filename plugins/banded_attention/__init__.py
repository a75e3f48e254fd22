"""`effexport::BandedAttention`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Attribute, Parameter, Signature

OP = Op("banded_attention", "BandedAttention", place=10, in_float="a softmax turns rounded logits into wrong weights")
SIGNATURE = Signature(
    "BandedAttention",
    "softmax(scale · q kᵀ + bias) v over the keys near a query and over global keys; global queries see all keys.",
    inputs=(
        Parameter("q", "batch heads n d"),
        Parameter("k", "batch heads n d"),
        Parameter("v", "batch heads n e"),
        Parameter("q_global", "batch heads n d", note=", queries of global tokens"),
        Parameter("k_global", "batch heads n d", note=", what these see"),
        Parameter("v_global", "batch heads n e"),
        Parameter("keep", "batch n", "bool", ", false for keys that nobody sees"),
        Parameter("is_global", "batch n", "bool", ", read if `with_globals` is 1"),
        Parameter(
            "bias", "heads offsets", note=", of each distance from the leftmost key on, read if `with_bias` is 1"
        ),
    ),
    outputs=(Parameter("out", "batch heads n e"),),
    attributes=(
        Attribute("scale", float),
        Attribute("left", int, at_least=0),
        Attribute("right", int, at_least=0),
        Attribute("block", int, default=1, at_least=1),
        Attribute("causal", int, default=0),
        Attribute("with_globals", int, default=0),
        Attribute("with_bias", int, default=0),
        Attribute("most_globals", int, default=0, at_least=0),
        Attribute("all_up_to", int, default=0, at_least=0),
    ),
)
