"""`effexport::GatedRMSNorm`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from effexport.plugins.signature import Attribute, Parameter, Signature
from gated_rms_norm import OP

if TYPE_CHECKING:
    import onnx

SIGNATURE = Signature(
    OP.onnx_name,
    "x / rms(x) · weight · silu(gate), where rms is the root of the mean square over the channels.",
    inputs=(
        Parameter("x", "batch seq channels"),
        Parameter("gate", "batch seq channels"),
        Parameter("weight", "channels"),
    ),
    outputs=(Parameter("out", "batch seq channels"),),
    attributes=(Attribute("epsilon", float, at_least=0),),
    op=OP,
)


def reference(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The formula as it is written. Shapes as `gated_rms_norm`; float32, or float64 if x is."""
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = x.to(exact)
    normalised = wide / (wide.square().mean(dim=-1, keepdim=True) + epsilon).sqrt()
    return (normalised * weight.to(exact) * torch.nn.functional.silu(gate.to(exact))).to(x.dtype)


@torch.library.custom_op("effexport::gated_rms_norm", mutates_args=())
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square normalisation (Zhang & Sennrich 2019, eq. 4) with an output gate (RetNet, eq. 8).

    x and gate [batch, seq, channels], weight [channels], of one floating-point type. Returns [batch, seq, channels].
    Raises ValueError for other shapes and dtypes, and for an epsilon below 0.
    """
    SIGNATURE.check(x, gate, weight, epsilon=epsilon)
    return reference(x, gate, weight, epsilon).contiguous()


@gated_rms_norm.register_fake
def _(x: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    SIGNATURE.check(x, gate, weight, epsilon=epsilon)
    return x.new_empty(x.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.epsilon = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of the reference, so that models with this operator can be trained as they are."""
    tensors = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
    with torch.enable_grad():
        out = reference(*tensors, ctx.epsilon)
    return (*torch.autograd.grad(out, tensors, gradient), None)


gated_rms_norm.register_autograd(_backward, setup_context=_keep_inputs)


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators, in float32.

    One body serves all nodes of a model. Raises ValueError when they differ in `epsilon`.
    """
    epsilon = SIGNATURE.common_attributes(nodes)["epsilon"]
    body = f"""
        epsilon = {epsilon:.9e}
        axis2 = [2]
        x_float = Cast <to = 1> (x)
        square = Mul (x_float, x_float)
        mean = ReduceMean <keepdims = 1> (square, axis2)
        shifted = Add (mean, epsilon)
        rms = Sqrt (shifted)
        normalised = Div (x_float, rms)
        weight_float = Cast <to = 1> (weight)
        scaled = Mul (normalised, weight_float)
        gate_float = Cast <to = 1> (gate)
        opened = Sigmoid (gate_float)
        silu = Mul (gate_float, opened)
        product = Mul (scaled, silu)
        out = CastLike (product, x)
    """
    return SIGNATURE.function_body(opset, body)


def proof_inputs(
    rng: np.random.Generator, attributes: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, np.ndarray[Any, Any]]]]:
    """Name and inputs of each case with which `effexport verify` calls the body alone. float64 stands for T.

    Sizes differ from each other, so that exchanged axes do not fit.
    """
    weight = rng.standard_normal(37)
    x, gate = (rng.standard_normal((3, 5, 37)) for _ in range(2))
    yield "normal numbers", {"x": x, "gate": gate, "weight": weight}
    # rows whose mean square is as small as epsilon, and gates at which the sigmoid is 0 or 1
    yield "small rows, large gates", {"x": x * attributes["epsilon"] ** 0.5, "gate": 40 * gate, "weight": weight}
    yield "one channel", {"x": x[:, :, :1], "gate": gate[:, :, :1], "weight": weight[:1]}
    yield "no tokens", {"x": x[:, :0], "gate": gate[:, :0], "weight": weight}
