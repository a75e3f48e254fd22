"""`effexport::IterativePinv`: torch operator, obvious reference, ONNX schema, translation and function body.

The contract is in README.md beside this file. onnx and onnxscript are imported only by the functions that need
them, so that models can use the torch operator without either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from effexport.plugins import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE

if TYPE_CHECKING:
    import onnx


def reference(a: Tensor, scale: Tensor, iterations: int) -> Tensor:
    """Z0 = Aᵀ / scale, then `iterations` times Z ← Z/4 · (13 I − P (15 I − P (7 I − P))) with P = A Z."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    z = (1 / scale) * a.transpose(-1, -2)
    for _ in range(iterations):
        p = a @ z
        z = (0.25 * z) @ (13 * identity - p @ (15 * identity - p @ (7 * identity - p)))
    return z


@torch.library.custom_op("effexport::iterative_pinv", mutates_args=())
def iterative_pinv(a: Tensor, scale: Tensor, iterations: int = 6) -> Tensor:
    """The iteration of Nyströmformer towards the pseudo-inverse (arXiv 2102.03902, eq. 15).

    a [N, m, m]; scale [N, 1, 1], the divisor of the start value Aᵀ; same dtype. Returns Z [N, m, m].
    Raises ValueError for other shapes.
    """
    check_shapes(a, scale, iterations)
    return reference(a, scale, iterations)


@iterative_pinv.register_fake
def _(a: Tensor, scale: Tensor, iterations: int = 6) -> Tensor:
    check_shapes(a, scale, iterations)
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def check_shapes(a: Tensor, scale: Tensor, iterations: int) -> None:
    if a.dim() != 3 or a.shape[1] != a.shape[2]:
        raise ValueError(f"iterative_pinv: a has shape {tuple(a.shape)}; expected [N, m, m]")
    if scale.dim() != 3 or tuple(scale.shape[1:]) != (1, 1) or scale.shape[0] != a.shape[0]:
        raise ValueError(f"iterative_pinv: scale has shape {tuple(scale.shape)}; expected [{a.shape[0]}, 1, 1]")
    if scale.dtype != a.dtype:
        raise ValueError(f"iterative_pinv: scale is {scale.dtype} but a is {a.dtype}; expected one dtype")
    if iterations < 1:
        raise ValueError(f"iterative_pinv: iterations is {iterations}; expected at least 1")


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    a, scale, ctx.iterations = inputs
    ctx.save_for_backward(a, scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """Recompute the iteration and differentiate it: m is small, so nothing is kept from the forward pass."""
    with torch.enable_grad():
        a, scale = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        z = reference(a, scale, ctx.iterations)
    grad_a, grad_scale = torch.autograd.grad(z, (a, scale), grad)
    return grad_a, grad_scale, None


iterative_pinv.register_autograd(_backward, setup_context=_save_inputs)


def onnx_schema() -> onnx.defs.OpSchema:
    """Schema of the ONNX operator, with type and shape inference."""
    import onnx

    parameter, attribute = onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.Attribute
    schema = onnx.defs.OpSchema(
        "IterativePinv",
        DOMAIN,
        OPSET_VERSION,
        doc="Z0 = Aᵀ/scale; Z ← Z/4 · (13I − P(15I − P(7I − P))), P = A Z, a fixed number of times.",
        inputs=[
            parameter("A", "T", "[N, m, m]"),
            parameter("scale", "T", "[N, 1, 1], divisor of the start value"),
        ],
        outputs=[parameter("Z", "T", "[N, m, m]")],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
        attributes=[
            attribute("iterations", onnx.helper.make_attribute("iterations", 6), ""),
            attribute(PLUGIN_NAMESPACE, onnx.defs.OpSchema.AttrType.STRING, required=False),
        ],
    )

    def infer(context: onnx.shape_inference.InferenceContext) -> None:
        context.set_output_type(0, context.get_input_type(0))

    schema.set_type_and_shape_inference_function(infer)
    return schema


def onnx_translation(a: Any, scale: Any, iterations: int = 6) -> Any:
    """What torch.onnx.export emits for one call: one node."""
    from onnxscript import values

    return values.Opset(DOMAIN, OPSET_VERSION).IterativePinv(a, scale, iterations=iterations)


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators, iterations unrolled.

    A function is found by name alone, so one body serves every node of a model: they must agree on `iterations`.
    Raises ValueError when they do not.
    """
    import onnx.parser

    counts = {onnx.helper.get_node_attr_value(node, "iterations") for node in nodes}
    if len(counts) != 1:
        raise ValueError(f"IterativePinv nodes with different iterations {sorted(counts)} cannot share one body")
    step = """
        P{i} = MatMul (A, Z{i})
        Inner{i} = Sub (I7, P{i})
        PInner{i} = MatMul (P{i}, Inner{i})
        Middle{i} = Sub (I15, PInner{i})
        PMiddle{i} = MatMul (P{i}, Middle{i})
        Outer{i} = Sub (I13, PMiddle{i})
        Quarter{i} = Mul (quarter, Z{i})
        {z_next} = MatMul (Quarter{i}, Outer{i})
    """
    iterations = counts.pop()
    steps = "".join(step.format(i=i, z_next="Z" if i == iterations - 1 else f"Z{i + 1}") for i in range(iterations))
    return onnx.parser.parse_function(f"""
    <domain: "{DOMAIN}", opset_import: ["" : {opset}]>
    IterativePinv <iterations> (A, scale) => (Z) {{
        size = Shape <start = 1, end = 2> (A)
        zero = Constant <value_int = 0> ()
        one = Constant <value_int = 1> ()
        axis0 = Constant <value_ints = [0]> ()
        axis1 = Constant <value_ints = [1]> ()
        size_scalar = Squeeze (size)
        index = Range (zero, size_scalar, one)
        column = Unsqueeze (index, axis1)
        row = Unsqueeze (index, axis0)
        diagonal = Equal (column, row)
        I = CastLike (diagonal, A)
        seven = Constant <value_float = 7.0> ()
        fifteen = Constant <value_float = 15.0> ()
        thirteen = Constant <value_float = 13.0> ()
        quarter_float = Constant <value_float = 0.25> ()
        seven_like = CastLike (seven, A)
        fifteen_like = CastLike (fifteen, A)
        thirteen_like = CastLike (thirteen, A)
        quarter = CastLike (quarter_float, A)
        I7 = Mul (seven_like, I)
        I15 = Mul (fifteen_like, I)
        I13 = Mul (thirteen_like, I)
        At = Transpose <perm = [0, 2, 1]> (A)
        inverse_scale = Reciprocal (scale)
        Z0 = Mul (inverse_scale, At)
        {steps}
    }}
    """)
