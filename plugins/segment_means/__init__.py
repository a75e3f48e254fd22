"""`effexport::SegmentMeans`: its row and its signature. This file loads no framework."""

from effexport.plugins.ops import Op
from effexport.plugins.signature import Attribute, Parameter, Signature

OP = Op(
    "segment_means",
    "SegmentMeans",
    place=6,
    in_float="landmarks enter a pseudo-inverse, which amplifies rounding",
    body_in_float32=True,
)
SIGNATURE = Signature(
    "SegmentMeans",
    "Means of the kept tokens of x over num_segments segments of each sample.",
    inputs=(Parameter("x", "batch heads seq channels"), Parameter("keep", "batch seq", "bool")),
    outputs=(Parameter("means", "batch heads num_segments channels"),),
    attributes=(Attribute("num_segments", int, at_least=1),),
)
