"""Models of one attention, with the profile that they are built for."""

from __future__ import annotations

import onnx
import onnx.parser

from effexport.base.dtypes import DTYPES
from effexport.plugins.ops import DOMAIN, OPS, PLUGIN_NAMESPACE
from effexport.tensorrt.spec import Profile, Range

SIZES = Profile({"batch": Range(1, 2, 4), "n": Range(1, 256, 4096), "m": Range(1, 256, 4096)})
PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def inputs(dtype: str, d: int, e: int) -> tuple[str, str]:
    """Inputs and output in ONNX's text form."""
    t = DTYPES[dtype].onnx.lower()
    return (
        f"{t}[batch,4,n,{d}] q, {t}[batch,4,m,{d}] k, {t}[batch,4,m,{e}] v, bool[batch,m] keep",
        f"{t}[batch,4,n,{e}]",
    )


def our_attention(dtype: str, d: int, e: int | None = None, opset: int = 20) -> onnx.ModelProto:
    """One node of MaskedAttention with its function body."""
    given, result = inputs(dtype, d, e or d)
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}, "{DOMAIN}" : 1]> g ({given}) => ({result} out) {{'
        f'out = {DOMAIN}.MaskedAttention <scale = 0.125, {PLUGIN_NAMESPACE} = "{DOMAIN}"> (q, k, v, keep) }}'
    )
    model.functions.append(OPS["MaskedAttention"].load().onnx_function_body(model.graph.node, opset))
    return model
