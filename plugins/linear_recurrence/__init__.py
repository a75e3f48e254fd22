"""`effexport::LinearRecurrence`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Attribute, Parameter, Signature

OP = Op(
    "linear_recurrence",
    "LinearRecurrence",
    output_type="T float32",
    place=11,
    in_float="its state is read and written by every token",
    body_in_float32=True,
    carrier="LinearAttention",
)
SIGNATURE = Signature(
    "LinearRecurrence",
    "scale · q_tᵀ S_t with S_t = α_t S_{t-1} + β_t k_t (v_t − delta · (α_t S_{t-1})ᵀ k_t)ᵀ and α_t = exp(decay_t).",
    inputs=(
        Parameter("query", "batch seq heads key_dim", note=", heads a multiple of kv_heads"),
        Parameter("key", "batch seq kv_heads key_dim"),
        Parameter("value", "batch seq kv_heads value_dim"),
        Parameter("past", "batch kv_heads key_dim value_dim", "float32", ", the state before the first token"),
        Parameter("decay", "batch seq kv_heads decay_dim", note=", logarithms; decay_dim is 1, or key_dim per channel"),
        Parameter("beta", "batch seq kv_heads 1", note=", how strongly a token is written"),
    ),
    outputs=(
        Parameter("out", "batch seq heads value_dim"),
        Parameter("present", "batch kv_heads key_dim value_dim", "float32", ", the state after the last token"),
    ),
    attributes=(
        Attribute("scale", float),
        Attribute("delta", int),
        Attribute("per_channel", int, default=0),
        Attribute("chunk_length", int, default=32, at_least=1),
        Attribute("longest", int, default=2**17, at_least=1),
    ),
)
