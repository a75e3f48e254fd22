"""Chooses what computes `MaskedAttention` in an engine, and says why: the operator Attention, plugins, or its body.

Attention is one kernel or nothing: the network forbids TensorRT to take it apart (`network.keep_attention_whole`), so a
builder without a kernel for all of it refuses. Building with it is therefore the measurement. If TensorRT refuses,
`engine_from_onnx` asks again, with what it said, and gets plugins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from effexport.engines.api import version_tuple
from effexport.engines.custom_nodes import ATTENTION, ATTENTION_OPSET, node_facts, nodes_of
from effexport.engines.opset import ops_that_differ
from effexport.engines.sidecar import AttentionForm
from effexport.engines.spec import EngineSpec
from effexport.export.onnx_graph import value_types
from effexport.plugins.masked_attention.trt import AS_ATTENTION, OPERATOR
from effexport.plugins.ops import DOMAIN

if TYPE_CHECKING:
    import onnx

# The first TensorRT whose parser has Attention (its release notes).
RELEASE = (10, 14)
RTX_REASON = (
    "TensorRT-RTX has no plugins, and where it has one kernel for Attention, it makes the same of the body, with fewer "
    "others around it (measured with release 1.7.1)"
)


def attention_form(
    model: onnx.ModelProto, spec: EngineSpec, tensorrt_version: str, refusal: str = ""
) -> AttentionForm | None:
    """What is to compute the MaskedAttention nodes of a model, all of them in one form; None if it has none.

    refusal: what TensorRT said when it was asked to build them as Attention; "" before that.
    """
    nodes = nodes_of(model, OPERATOR)
    if not nodes:
        return None
    if spec.target == "trt-rtx":
        return AttentionForm("body", RTX_REASON)
    if spec.plugins != "auto":
        return AttentionForm("plugin" if spec.plugins == "require" else "body", f"--plugins {spec.plugins} asks for it")
    if refusal:
        return AttentionForm("plugin", f"TensorRT {tensorrt_version} does not build Attention here: {refusal}")
    if version_tuple(tensorrt_version) < RELEASE:
        return AttentionForm("plugin", f"TensorRT {tensorrt_version} does not import Attention; 10.14 and later do")
    for problem in _problems(model, nodes):
        return AttentionForm("plugin", f"not Attention: {problem}")
    return AttentionForm(ATTENTION, f"TensorRT {tensorrt_version} builds it as one kernel")


def _problems(model: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> Iterator[str]:
    """Why nodes cannot be Attention."""
    if not any((function.domain, function.name) == (DOMAIN, OPERATOR) for function in model.functions):
        yield "the model has no function body of it to replace"
    tensors = value_types(model)
    for node in nodes:
        dtypes, dims, attributes = node_facts(node, tensors)
        if problem := AS_ATTENTION.why_not(dtypes, dims, attributes):
            yield problem
        elif any(0 in sizes for sizes in dims):
            yield "a dimension of its inputs is 0"
    if changed := ops_that_differ(model, ATTENTION_OPSET):
        yield f"it needs opset {ATTENTION_OPSET}, where {', '.join(changed)} of this model differ"
