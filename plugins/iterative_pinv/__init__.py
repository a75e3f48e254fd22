"""`effexport::IterativePinv`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Attribute, Parameter, Signature

# beyond 64 columns, the matrices do not fit into the shared memory of every GPU, and without it the body's products by
# cuBLAS should win
OP = Op(
    "iterative_pinv",
    "IterativePinv",
    place=0,
    cuda_up_to=64,
    in_float="the iteration amplifies rounding",
    around_in_float32="the pseudo-inverse of its landmarks' matrix amplifies rounding",
    body_in_float32=True,
)
SIGNATURE = Signature(
    "IterativePinv",
    "Z0 = Aᵀ/scale; Z ← Z/4 · (13I − P(15I − P(7I − P))), P = A Z, a fixed number of times.",
    inputs=(
        Parameter("A", "N m m"),
        Parameter("scale", "N 1 1", note=", divisor of the start value"),
    ),
    outputs=(Parameter("Z", "N m m"),),
    attributes=(Attribute("iterations", int, default=6, at_least=1),),
)
