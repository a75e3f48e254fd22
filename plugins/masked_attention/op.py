"""`effexport::MaskedAttention`: torch operator, obvious reference, ONNX schema, translation and function body.

The contract is in README.md beside this file. onnx and onnxscript are imported only by the functions that need
them, so that models can use the torch operator without either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from effexport.plugins import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE

if TYPE_CHECKING:
    import onnx

# Logit of a hidden key: finite, so that a sample that sees nothing averages over all of its keys.
HIDDEN_LOGIT = torch.finfo(torch.float32).min


def reference(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v over the visible keys. Shapes as `masked_attention`; float32, or float64 if q is."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    logits = (scale * q.to(exact)) @ k.to(exact).transpose(-1, -2)
    logits = logits.masked_fill(~keep[:, None, None, :], HIDDEN_LOGIT)
    return (torch.softmax(logits, dim=-1) @ v.to(exact)).to(q.dtype)


@torch.library.custom_op("effexport::masked_attention", mutates_args=())
def masked_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Softmax attention over the visible keys.

    q [batch, heads, n, d]; k [batch, heads, m, d]; v [batch, heads, m, e]; one floating-point type. keep: boolean
    [batch, m]; a sample without any visible key averages over all of its keys. Returns [batch, heads, n, e].
    It has no gradient; the layers of `effexport.models` use plain formulas except while they are exported.
    Raises ValueError for other shapes and dtypes.
    """
    check_shapes(q, k, v, keep, scale)
    return reference(q, k, v, keep, scale).contiguous()


@masked_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    check_shapes(q, k, v, keep, scale)
    return q.new_empty((*q.shape[:3], v.shape[3]))


def check_shapes(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> None:
    shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    fits = q.dim() == 4 and k.dim() == 4 and v.dim() == 4
    if not fits or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3] or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"masked_attention: q, k and v have shapes {shapes}; expected [batch, heads, n, d], [batch, heads, m, d] "
            "and [batch, heads, m, e]"
        )
    if not q.is_floating_point() or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"masked_attention: q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; expected one floating-point type"
        )
    if keep.dtype != torch.bool or keep.dim() != 2 or keep.shape[0] != q.shape[0] or keep.shape[1] != k.shape[2]:
        raise ValueError(
            f"masked_attention: keep is {keep.dtype} {tuple(keep.shape)}; "
            f"expected torch.bool {(q.shape[0], k.shape[2])}"
        )
    if not math.isfinite(scale):
        raise ValueError(f"masked_attention: scale is {scale}; expected a finite number")


def onnx_schema() -> onnx.defs.OpSchema:
    """Schema of the ONNX operator, with type and shape inference."""
    import onnx

    parameter, attribute = onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.Attribute
    schema = onnx.defs.OpSchema(
        "MaskedAttention",
        DOMAIN,
        OPSET_VERSION,
        doc="softmax(scale · q kᵀ) v over the keys that `keep` leaves.",
        inputs=[
            parameter("q", "T", "[batch, heads, n, d]"),
            parameter("k", "T", "[batch, heads, m, d]"),
            parameter("v", "T", "[batch, heads, m, e]"),
            parameter("keep", "tensor(bool)", "[batch, m]"),
        ],
        outputs=[parameter("out", "T", "[batch, heads, n, e]")],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
        attributes=[
            attribute("scale", onnx.defs.OpSchema.AttrType.FLOAT, required=True),
            attribute(PLUGIN_NAMESPACE, onnx.defs.OpSchema.AttrType.STRING, required=False),
        ],
    )

    def infer(context: onnx.shape_inference.InferenceContext) -> None:
        q, v = context.get_input_type(0), context.get_input_type(2)
        if not (q and v):
            return  # inputs of a type that is not known
        out = onnx.TypeProto()
        out.CopyFrom(q)
        dims, value_dims = out.tensor_type.shape.dim, v.tensor_type.shape.dim
        if len(dims) == 4:
            dims[3].Clear()
            if len(value_dims) == 4:
                dims[3].CopyFrom(value_dims[3])
        context.set_output_type(0, out)

    schema.set_type_and_shape_inference_function(infer)
    return schema


def onnx_translation(q: Any, k: Any, v: Any, keep: Any, scale: float) -> Any:
    """What torch.onnx.export emits for one call: one node."""
    from onnxscript import values

    return values.Opset(DOMAIN, OPSET_VERSION).MaskedAttention(q, k, v, keep, scale=scale)


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators. Products are in T, the softmax in float32.

    A function is found by name alone, so one body serves every node of a model: they must agree on `scale`.
    Raises ValueError when they do not.
    """
    import onnx.parser

    scales = {float(onnx.helper.get_node_attr_value(node, "scale")) for node in nodes}
    if len(scales) != 1:
        raise ValueError(f"MaskedAttention nodes with different scales {sorted(scales)} cannot share one body")
    return onnx.parser.parse_function(f"""
    <domain: "{DOMAIN}", opset_import: ["" : {opset}]>
    MaskedAttention <scale> (q, k, v, keep) => (out) {{
        scale_float = Constant <value_float = {scales.pop():.9e}> ()
        hidden_logit = Constant <value_float = {HIDDEN_LOGIT:.9e}> ()
        axes12 = Constant <value_ints = [1, 2]> ()
        scale_like = CastLike (scale_float, q)
        scaled = Mul (q, scale_like)
        k_transposed = Transpose <perm = [0, 1, 3, 2]> (k)
        products = MatMul (scaled, k_transposed)
        logits = Cast <to = 1> (products)
        visible = Unsqueeze (keep, axes12)
        masked = Where (visible, logits, hidden_logit)
        weights = Softmax <axis = -1> (masked)
        weights_like = CastLike (weights, v)
        out = MatMul (weights_like, v)
    }}
    """)
