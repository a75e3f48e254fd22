"""`effexport::EluLinearAttention`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Attribute, Parameter, Signature

OP = Op(
    "linear_attention",
    "EluLinearAttention",
    place=1,
    in_float="its sums over the sequence grow with the length",
    body_in_float32=True,
)
SIGNATURE = Signature(
    "EluLinearAttention",
    "φ(q_i)ᵀ S / (φ(q_i)·z + eps) with S = Σ φ(k_j) v_jᵀ, z = Σ φ(k_j) over kept j, and φ(x) = elu(x) + 1 or relu(x).",
    inputs=(
        Parameter("q", "batch heads seq head_dim"),
        Parameter("k", "batch heads seq head_dim"),
        Parameter("v", "batch heads seq value_dim"),
        Parameter("keep", "batch seq", "bool", ", false for positions without weight"),
    ),
    outputs=(Parameter("out", "batch heads seq value_dim"),),
    attributes=(
        Attribute("eps", float, at_least=0),
        Attribute("causal", int, default=0),
        Attribute("chunk_length", int, default=128, at_least=1),
        Attribute("relu", int, default=0),
    ),
)
