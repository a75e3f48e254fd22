"""Casts that torch.onnx leaves out: of integers that are subtracted from a number that is not one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def with_casts(program: ExportedProgram) -> ExportedProgram:
    """Write `1.0 - mask` of integers as `1.0 - mask.float()`, in place: torch.onnx makes `sub(1.0, mask)` of it, which
    PyTorch does not have."""
    import torch

    for node in program.graph.nodes:
        if node.target is torch.ops.aten.rsub.Scalar:
            (source, *_), dtype = node.all_input_nodes, node.meta["val"].dtype
            if source.meta["val"].dtype != dtype:
                with program.graph.inserting_before(node):
                    cast = program.graph.call_function(torch.ops.aten.to.dtype, (source, dtype))
                cast.meta = {**node.meta, "val": source.meta["val"].to(dtype)}
                node.replace_input_with(source, cast)
    program.graph_module.recompile()
    return program
