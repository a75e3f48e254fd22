"""module → onnx: one file with one node per custom operator, its function bodies attached, and its promises checked."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.errors import StageError
from effexport.models.spec import EncoderSpec, LSHSpec, NystromSpec
from effexport.onnx_graph import check_graph
from effexport.plugins import DOMAIN, OPS, OPSET_VERSION, PLUGIN_NAMESPACE
from effexport.spec import EXTERNAL_DATA_THRESHOLD_BYTES, BuildSpec

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch
    from torch import nn

STAGE = "export"
# Name of the graph value that holds the buckets of an LSH layer: "<module path>.buckets".
BUCKETS_SUFFIX = "buckets"
_SCOPES_KEY = "pkg.torch.onnx.name_scopes"


def onnx_from_module(module: nn.Module, spec: BuildSpec, path: Path) -> None:
    """Export `module`, which must be in evaluation mode and float32, to `path`.

    The module is converted to the precision of the spec in a copy. Weights go to `<path>.data` beside the file when
    they exceed EXTERNAL_DATA_THRESHOLD_BYTES or the spec asks for it.
    Raises StageError when the exporter fails or the graph breaks a promise of the spec.
    """
    model = program_from_module(at_precision(module, spec.precision), spec)
    mark_custom_nodes(model)
    attach_function_bodies(model, spec.opset)
    strip_metadata(model)
    save(model, spec, path)
    check_graph(path, spec, expected_custom_ops(spec))


def expected_custom_ops(spec: BuildSpec) -> dict[str, int]:
    """How many nodes of each custom operator the graph of this spec must contain."""
    layers = spec.model.layers if isinstance(spec.model, EncoderSpec) else 1
    if isinstance(spec.attention, LSHSpec):
        return {"LSHSort": layers}
    if isinstance(spec.attention, NystromSpec) and not spec.attention.is_plain_softmax:
        return {"IterativePinv": layers}
    return {}


def at_precision(module: nn.Module, precision: str) -> nn.Module:
    """A copy of the module in the given precision; what must stay float32 looks after itself."""
    import copy

    import torch

    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    return copy.deepcopy(module).to(dtype)


def program_from_module(module: nn.Module, spec: BuildSpec) -> ir.Model:
    import torch

    dims: dict[int, Any] = {0: "batch"}
    if spec.seq_dim == "seq":
        dims[1] = "seq"
    register_schemas()
    table: dict[Any, Any] = {
        getattr(torch.ops.effexport, op.torch_name).default: op.load().onnx_translation for op in OPS.values()
    }
    with quiet_exporter():
        try:
            program = torch.onnx.export(
                module,
                example_inputs(spec),
                dynamo=True,
                opset_version=spec.opset,
                input_names=[tensor.name for tensor in spec.inputs],
                output_names=[tensor.name for tensor in spec.outputs],
                dynamic_shapes=[dims, dims],
                custom_translation_table=table,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            raise StageError(STAGE, f"torch.onnx could not export {spec.variant}: {error}") from error
    if program is None:
        raise StageError(STAGE, f"torch.onnx returned no program for {spec.variant}")
    return program.model


def example_inputs(spec: BuildSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Small inputs for tracing. Sizes of two and more, none equal to a constant of the spec, so that no dimension
    is mistaken for a fixed one; the traced lengths leave no mark on the graph."""
    import torch

    batch, seq_len = 2, spec.attention.fixed_seq_len or min(spec.max_seq_len or 200, 200)
    mask = torch.ones(batch, seq_len, dtype=torch.int64)
    if spec.scope == "encoder":
        return torch.zeros(batch, seq_len, dtype=torch.int64), mask
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return torch.zeros(batch, seq_len, spec.attention.dim, dtype=dtype), mask


@contextlib.contextmanager
def quiet_exporter() -> Iterator[None]:
    """The exporter's own notices say nothing to our users; its errors are exceptions."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def register_schemas() -> None:
    """Make onnx know the custom operators. The registry belongs to the process, so a second call is a no-op."""
    import onnx.defs

    for op in OPS.values():
        if not onnx.defs.has(op.onnx_name, DOMAIN):
            onnx.defs.register_schema(op.load().onnx_schema())


def mark_custom_nodes(model: ir.Model) -> None:
    """Name custom nodes after their module, and mark them for TensorRT."""
    import onnx_ir as ir

    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        owner = module_path(node)
        node.name = f"{owner}/{node.op_type}" if owner else node.op_type
        node.attributes[PLUGIN_NAMESPACE] = ir.AttrString(PLUGIN_NAMESPACE, DOMAIN)
        if node.op_type == "LSHSort" and node.inputs[0] is not None:
            node.inputs[0].name = f"{owner}.{BUCKETS_SUFFIX}" if owner else BUCKETS_SUFFIX
    model.graph.opset_imports.setdefault(DOMAIN, OPSET_VERSION)


def module_path(node: ir.Node) -> str:
    """Path of the attention module that a node came from, "" for the root: "blocks.0.attention"."""
    import ast

    scopes: list[str] = ast.literal_eval(node.metadata_props.get(_SCOPES_KEY, "[]"))
    # the last scope is the operator itself
    return scopes[-2] if len(scopes) > 1 else ""


def attach_function_bodies(model: ir.Model, opset: int) -> None:
    """Give every custom operator in the graph its body of standard operators."""
    import onnx_ir as ir

    for op in OPS.values():
        nodes = [n for n in model.graph if n.domain == DOMAIN and n.op_type == op.onnx_name]
        if nodes:
            protos = [ir.serde.serialize_node(node) for node in nodes]
            function = ir.serde.deserialize_function(op.load().onnx_function_body(protos, opset))
            model.functions[function.identifier()] = function


def strip_metadata(model: ir.Model) -> None:
    """Drop the exporter's notes, which carry stack traces with the paths of this machine; keep the module path."""
    for node in model.graph.all_nodes():
        scopes = node.metadata_props.get(_SCOPES_KEY)
        path = module_path(node) if scopes else ""
        node.metadata_props.clear()
        node.doc_string = None
        if path:
            node.metadata_props["effexport.module"] = path
    for value in [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.name = "effexport"
    model.producer_name = "effexport"


def save(model: ir.Model, spec: BuildSpec, path: Path) -> None:
    import onnx_ir as ir

    weight_bytes = sum(
        value.const_value.nbytes
        for value in model.graph.initializers.values()
        if value.const_value is not None
    )
    external = spec.external_data or weight_bytes > EXTERNAL_DATA_THRESHOLD_BYTES
    ir.save(model, path, external_data=f"{path.name}.data" if external else None)
