"""`effexport::MaskedAttention`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Attribute, Parameter, Signature

OP = Op("masked_attention", "MaskedAttention", place=5, in_float="a softmax turns rounded logits into wrong weights")
SIGNATURE = Signature(
    "MaskedAttention",
    "softmax(scale · q kᵀ) v over the keys that `keep` leaves.",
    inputs=(
        Parameter("q", "batch heads n d"),
        Parameter("k", "batch heads m d"),
        Parameter("v", "batch heads m e"),
        Parameter("keep", "batch m", "bool"),
    ),
    outputs=(Parameter("out", "batch heads n e"),),
    attributes=(Attribute("scale", float),),
)
