"""`effexport::QuantizedLinear`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Attribute, Parameter, Signature

OP = Op(
    "quantized_linear",
    "QuantizedLinear",
    element_types=("float32",),
    cuda_up_to=0,
    cuda=False,
    in_float="its product is in int8",
    body_in_float32=True,
    linear=True,
    place=14,
)
# So many products of two codes fit into an int32 sum.
MOST_INPUTS = 2**17
SIGNATURE = Signature(
    "QuantizedLinear",
    "x in int8 with a scale for each row, times a weight in int8, with bias, activation, a residual and a rounding.",
    inputs=(
        Parameter("x", "batch seq inputs"),
        Parameter("weight", "inputs outputs", "int8"),
        Parameter("scale", "outputs", "float32"),
        Parameter("bias", "outputs", "float32"),
        Parameter("residual", "samples tokens outputs", note=", of the shape of y, or [1, 1, outputs]"),
    ),
    outputs=(Parameter("y", "batch seq outputs"),),
    attributes=(Attribute("activation", int, default=0), Attribute("round_output", int, default=0)),
)
