"""`effexport::LSHHash`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Attribute, Parameter, Signature

OP = Op(
    "lsh_hash", "LSHHash", place=8, output_type="int32", in_float="rounded projections move tokens to other buckets"
)
SIGNATURE = Signature(
    "LSHHash",
    "Hash buckets of all tokens, one row per round: the largest of their projections and of the negated ones.",
    inputs=(
        Parameter("qk", "batch heads seq head_dim", note=", shared queries and keys"),
        Parameter("rotations", "heads head_dim rounds width", "float32", ", width is half the sum of bucket_factors"),
        Parameter("keep", "batch seq", "bool"),
    ),
    outputs=(Parameter("buckets", "rows padded", "int32", ", rows are batch · heads · rounds"),),
    attributes=(Attribute("bucket_factors", tuple, at_least=2), Attribute("chunk_length", int, at_least=1)),
)
