"""`effexport::CausalConv`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Attribute, Parameter, Signature

OP = Op(
    "causal_conv",
    "CausalConv",
    place=12,
    in_float="a few multiplications for each number: nothing to gain",
    body_in_float32=True,
)
SIGNATURE = Signature(
    "CausalConv",
    "A depth-wise convolution of the kept tokens of x with those before them, bias, and SiLU if asked for.",
    inputs=(
        Parameter("x", "batch seq channels"),
        Parameter("weight", "channels taps", note=", the last tap for a token itself"),
        Parameter("bias", "channels"),
        Parameter("past", "batch before channels", note=", the kept tokens before x: one fewer than taps"),
        Parameter("keep", "batch seq", "bool"),
    ),
    outputs=(
        Parameter("y", "batch seq channels"),
        Parameter("present", "batch before channels", note=", the last kept tokens of past and x"),
    ),
    attributes=(Attribute("silu", int, default=0),),
)
