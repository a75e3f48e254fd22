"""Half precision keeps float32 islands: the operators that overflow or cancel must read float32, whatever runs them.

A CPU computes float16 in float32 anyway, so a lost island changes nothing there and everything on a GPU: it is looked
for in the file.
"""

from __future__ import annotations

from pathlib import Path

from effexport.export.onnx_graph import load_graph, value_types
from effexport.models.module_spec import ModuleSpec
from effexport.plugins import DOMAIN
from effexport.proof.case_label import CaseLabel
from effexport.proof.checks.result import Check, Kind, not_run
from effexport.spec import BuildSpec

# Exponentials and sums over the sequence, and what iterates or hashes. Operators that compute in float32 whatever they
# read are left out: EluLinearAttention casts inside its body.
ISLANDS = ("Softmax", "Exp", "Log", "ReduceSum", "ArgMax", "IterativePinv")
LISTED = 5


def check_islands(model: Path, spec: BuildSpec) -> list[Check]:
    """Empty for float32 models, and for somebody's own module, whose islands are its own."""
    if spec.precision == "fp32" or isinstance(spec.model, ModuleSpec):
        return []
    kind, case, metric = Kind.FLOAT32_OPS, CaseLabel("the graph"), "operators that read half precision"
    proto = load_graph(model)
    types = value_types(proto)
    inside = [node for node in proto.graph.node if node.op_type in ISLANDS and node.domain in ("", DOMAIN)]
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
