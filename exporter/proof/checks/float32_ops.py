"""In half precision, operators that overflow or cancel are kept in float32: the file must say so.

A CPU computes float16 in float32 anyway, so running the model there would not show a missing cast.
"""

from __future__ import annotations

from pathlib import Path

from effexport.export.onnx_graph import load_graph, value_types
from effexport.plugins.ops import DOMAIN, OPS
from effexport.proof.case_label import CaseLabel
from effexport.proof.checks.result import Check, Kind, not_run
from effexport.spec import BuildSpec

# Exponentials, sums over the sequence, iterations and hashes. Not operators that compute in float32 whatever they read:
# EluLinearAttention casts inside its body.
OURS = tuple(name for name, op in OPS.items() if op.around_in_float32 and "float32" in op.element_types)
FLOAT32_OPS = ("Softmax", "Exp", "Log", "ReduceSum", "ArgMax", *OURS)
LISTED = 5


def check_float32_ops(model: Path, spec: BuildSpec) -> list[Check]:
    """Empty for float32 models, and for users' own modules, which choose themselves what stays in float32."""
    if spec.arithmetic == "fp32" or not spec.model.keeps_float32:
        return []
    kind, case, metric = Kind.FLOAT32_OPS, CaseLabel("the graph"), "operators that read half precision"
    proto = load_graph(model)
    types = value_types(proto)
    inside = [node for node in proto.graph.node if node.op_type in FLOAT32_OPS and node.domain in ("", DOMAIN)]
    known = [(node, types[node.input[0]][0]) for node in inside if node.input[0] in types]
    lowered = [node for node, dtype in known if dtype in ("float16", "bfloat16")]
    if inside and not known:
        return [not_run(kind, "the element types of this file cannot be inferred", case, metric)]
    shown = ", ".join(f"{node.op_type} {node.name or node.output[0]}" for node in lowered[:LISTED])
    return [
        Check(
            kind,
            case,
            metric,
            "failed" if lowered else "passed",
            len(lowered),
            0,
            "these overflow or cancel in half precision on a GPU",
            f"they are: {shown}" if lowered else "",
        )
    ]
