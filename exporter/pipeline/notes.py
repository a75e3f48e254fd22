"""Notes of a report: sentences on what a build did with a model."""

from __future__ import annotations

from collections.abc import Sequence

from effexport.base.environment import versions
from effexport.base.spec import BuildSpec
from effexport.plugins.ops import CONTRIB_DOMAIN, OPS
from effexport.proof.cases import Case
from effexport.runners.ort.session import ANY_OPSET


def replaced_note(op: str, count: int) -> str:
    """For the report: why some nodes of an operator are not in the graph."""
    return (
        f"{op}: {count} node{'s' * (count > 1)} whose attributes differ from those of other nodes became standard "
        "operators, because one function body serves all nodes of an operator."
    )


def carried_note(op: str, count: int, spec: BuildSpec) -> str:
    """For the report: which operator stands for one of ours, and what it takes to run it."""
    nodes = f"{op}: {count} node{'s' * (count > 1)} became"
    if spec.carrier == "contrib":
        return f"{nodes} {CONTRIB_DOMAIN}::{OPS[op].carrier}, which ONNX Runtime runs without the kernel library."
    return (
        f"{nodes} ONNX's {OPS[op].carrier}, so the file has opset {spec.opset_of_file}. ONNX Runtime "
        f"{versions()['onnxruntime']} opens it where {ANY_OPSET} is 0, and runs the operator's function body."
    )


def undefined_notes(cases: Sequence[Case], spec: BuildSpec) -> list[str]:
    """A sentence on answers of a user's own module that are not numbers; none if all are."""
    found = [
        f"{undefined:,} of {all_:,} elements in {c.label}"
        for c in cases
        for undefined, all_ in [c.undefined]
        if undefined
    ]
    text = f"{spec.model.title} itself answers with NaN, which was not compared: {'; '.join(found)}."
    return [text] if found else []
