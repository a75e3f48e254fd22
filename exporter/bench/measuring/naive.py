"""Export a model with PyTorch's own exporter, without our operators: what users get without effexport."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.bench.grid import spec_from_case
from effexport.bench.measuring.models import example_of_case, module_from_case, signature_of_case
from effexport.bench.results import Case
from effexport.errors import StageError
from effexport.plugins.ops import DOMAIN, OPS

if TYPE_CHECKING:
    import torch
    from torch import nn

STAGE = "plain export"


def naive_onnx_from_case(case: Case, path: Path) -> None:
    """Export the formulas as PyTorch runs them to `path`: only standard operators, with dynamic batch and length.

    Raises StageError when the exporter fails, or one of our operators is left.
    """
    import torch

    from effexport.export.onnx_from_module import at_precision
    from effexport.quiet import quiet

    spec, signature = spec_from_case(case), signature_of_case(case)
    with quiet(streams=True):
        try:
            program = plain_program(at_precision(module_from_case(case), spec.precision), case)
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=spec.opset,
                input_names=[tensor.name for tensor in signature.inputs],
                output_names=[tensor.name for tensor in signature.outputs],
                verbose=False,
            )
        except Exception as error:  # the exporter has no common base class for its errors
            cause = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise StageError(STAGE, f"torch.onnx could not export the module: {cause[0]}") from error
    assert exported is not None
    left = sorted({node.op_type for node in exported.model.graph.all_nodes() if node.domain == DOMAIN})
    if left:
        raise StageError(STAGE, f"our operators are left in the graph: {', '.join(left)}")
    exported.save(path)


def plain_program(module: nn.Module, case: Case) -> torch.export.ExportedProgram:
    """The traced module, with our operators replaced by the PyTorch code of their references."""
    import torch

    from effexport.export.user_program import takes_star_args
    from effexport.models.layers import fused_operators

    dynamic: Any = tuple(
        {i: torch.export.Dim.DYNAMIC for i, dim in enumerate(tensor.dims) if isinstance(dim, str)}
        for tensor in signature_of_case(case).inputs
    )
    shapes = (dynamic,) if takes_star_args(module) else dynamic
    with torch.no_grad(), fused_operators(module, False):
        program = torch.export.export(module, example_of_case(case), dynamic_shapes=shapes, strict=False)
        table: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions().items())
        table.update(reference_of_operator())
        plain: torch.export.ExportedProgram = program.run_decompositions(table)
        return plain


def reference_of_operator() -> dict[Any, Callable[..., Any]]:
    """Torch operator → its reference, for each of our operators."""
    import torch

    references: dict[Any, Callable[..., Any]] = {}
    for op in OPS.values():
        module = op.load()  # which declares the operator
        reference = getattr(module, "exportable_reference", module.reference)
        overload = getattr(torch.ops.effexport, op.torch_name).default
        # a traced call leaves out arguments that have their default
        defaults = {argument.name: argument.default_value for argument in overload._schema.arguments}
        references[overload] = with_defaults(reference, defaults)
    return references


def with_defaults(function: Callable[..., Any], defaults: dict[str, Any]) -> Callable[..., Any]:
    """The function, with defaults for arguments that are left out at the end."""
    names = list(defaults)

    def call(*given: Any, **named: Any) -> Any:
        return function(*given, **{name: defaults[name] for name in names[len(given) :]} | named)

    return call
