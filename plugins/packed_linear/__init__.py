"""`effexport::PackedLinear`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Attribute, Parameter, Signature

OP = Op(
    "packed_linear",
    "PackedLinear",
    element_types=("float32", "bfloat16"),
    cuda_up_to=0,
    cuda=False,
    in_float="its product is in bfloat16",
    body_in_float32=True,
    linear=True,
    place=13,
)
SIGNATURE = Signature(
    "PackedLinear",
    "x in bfloat16 times a weight in bfloat16, summed in float32, with bias, activation, a residual and a rounding.",
    inputs=(
        Parameter("x", "batch seq inputs"),
        Parameter("weight", "inputs outputs", "bfloat16"),
        Parameter("bias", "outputs", "float32"),
        Parameter("residual", "samples tokens outputs", note=", of the shape of y, or [1, 1, outputs]"),
    ),
    outputs=(Parameter("y", "batch seq outputs"),),
    attributes=(Attribute("activation", int, default=0), Attribute("round_output", int, default=0)),
)
