"""`effexport::SequenceConv`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Parameter, Signature

OP = Op("sequence_conv", "SequenceConv", place=7, in_float="a few multiplications for each number: nothing to gain")
SIGNATURE = Signature(
    "SequenceConv",
    "residual plus a depth-wise convolution of x along its tokens, one filter per head.",
    inputs=(
        Parameter("x", "batch heads seq channels"),
        Parameter("weight", "heads 1 taps 1", note=", taps odd"),
        Parameter("keep", "batch seq", "bool"),
        Parameter("residual", "batch heads seq channels"),
    ),
    outputs=(Parameter("out", "batch heads seq channels"),),
)
