"""`effexport::LSHSort`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Attribute, Parameter, Signature

OP = Op(
    "lsh_sort",
    "LSHSort",
    place=2,
    element_types=("int32",),
    in_float="it sorts integers",
    around_in_float32="rounding its hashes changes which tokens attend to each other",
    decides=True,
)
SIGNATURE = Signature(
    "LSHSort",
    "Stable counting sort of every row. order lists the tokens by bucket, rank is the inverse permutation.",
    inputs=(Parameter("buckets", "N n", note=", values in [0, num_buckets)"),),
    outputs=(Parameter("order", "N n"), Parameter("rank", "N n")),
    attributes=(Attribute("num_buckets", int, at_least=1),),
)
