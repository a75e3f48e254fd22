"""`effexport::LSHAttention`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Attribute, Parameter, Signature

OP = Op("lsh_attention", "LSHAttention", place=3, in_float="both factors of its products are activations")
SIGNATURE = Signature(
    "LSHAttention",
    "Attention of tokens, sorted by hash bucket, within chunks; all hash rounds combined by log-sum-exp.",
    inputs=(
        Parameter("qk", "batch heads seq head_dim", note=", shared queries and keys"),
        Parameter("v", "batch heads seq value_dim"),
        Parameter("order", "rows padded", "int32", ", of LSHSort; rows are batch · heads · rounds"),
        Parameter("rank", "rows padded", "int32", ", of LSHSort"),
        Parameter("keep", "batch seq", "bool"),
    ),
    outputs=(Parameter("out", "batch heads seq value_dim"),),
    attributes=(
        Attribute("chunk_length", int, at_least=1),
        Attribute("chunks_before", int, at_least=0),
        Attribute("chunks_after", int, at_least=0),
        Attribute("causal", int),
        Attribute("circular", int),
        Attribute("rounded", int),
    ),
)
