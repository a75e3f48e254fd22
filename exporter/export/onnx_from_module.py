"""module → onnx: one file with one node per custom operator, function bodies attached, and its signature checked.

Also graphs that run token by token: of a causal model with constant memory, one decodes a token, and the other reads a
whole prompt; of an encoder-decoder, one reads the source, and the other decodes a token.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from effexport.base.dtypes import DTYPE_OF_PRECISION, QUANTIZED, TensorInfo
from effexport.base.errors import StageError, UserError
from effexport.base.quiet import few_lookups, quiet
from effexport.base.spec import INPUT_DEFAULTS, BuildSpec
from effexport.export.custom_nodes import attach_function_bodies, inline_functions, save, use_carriers
from effexport.export.failures import STAGE, place_of, reason_of
from effexport.export.onnx_graph import (
    RANDOM_OPS,
    GraphSignature,
    check_graph,
    check_portable,
    signature_with_state,
    why_not_traced,
)
from effexport.export.quantized_graph import float_products, quantize_graph
from effexport.export.sizes_of_code import NO_CHANGES, SpecChanges
from effexport.export.torch_onnx import avoid_missing_bfloat16, make_portable, recurrent_translation, size_translation
from effexport.export.traced_graphs import (
    REMEDY,
    add_traced,
    blaming_traced,
    clear_metadata,
    graph_without_numbers,
    graph_without_weights,
    optimized_graph,
    read_traced,
    traced_weights,
)
from effexport.models.encoder.module import DecodeStep, Prefill
from effexport.models.encoder.spec import MASKS
from effexport.models.layers import fused_operators
from effexport.models.size_formula import shape_of
from effexport.plugins.building.library import known_ops
from effexport.plugins.ops import BUCKETS, DOMAIN, MODULE_KEY, OPS, OPSET_VERSION, PLUGIN_NAMESPACE, SCOPES_KEY, Op
from effexport.plugins.user_operators import loaded
from effexport.quantize.modules import first_paths, reason_of_product
from effexport.quantize.record import FloatProduct, Quantization

# Of a model in memory: the operators that stand for what the code of a module writes out, and `SpecChanges`.
OPERATORS, CHANGES = "operators of the program", "changes of the spec"


@dataclass(frozen=True)
class GraphFile:
    """An ONNX file to write.

    traced: an archive of traced graphs. If it has that of `path`, the module is not traced; otherwise it is added.
    quantization: which layers are quantised; None for a graph that is not.
    """

    path: Path
    spec: BuildSpec
    traced: Path | None = None
    quantization: Quantization | None = None


def onnx_from_module(
    module: nn.Module,
    spec: BuildSpec,
    path: Path,
    traced: Path | None = None,
    quantization: Quantization | None = None,
) -> Written:
    """Export `module`, which must be in evaluation mode and float32, to `path`.

    Lower precision is reached in a copy of the module. Weights go to `<path>.data` beside the file when
    they exceed EXTERNAL_DATA_THRESHOLD_BYTES or the spec asks for it. traced, quantization: see `GraphFile`.
    Raises StageError if the exporter fails or the graph does not have the signature of the spec.
    """
    signature = GraphSignature(spec.inputs, spec.outputs, spec.model.custom_ops(spec.fused))
    module = at_precision(module, spec.arithmetic)
    return write_graph(module, example_inputs(spec), signature, GraphFile(path, spec, traced, quantization))


@dataclass(frozen=True)
class Written:
    """Differences of a written graph from the traced one. replaced: see `attach_function_bodies`. carried: see
    `use_carriers`.

    linear: the number of nodes of each operator that stands for linear layers.
    unrounded: values that are rounded before a quantised product, in the order of the graph.
    products: every product that stays float beside quantised ones, with the reason.
    changes: facts that the trace of a user's own module shows, and its spec lacks.
    """

    replaced: Counter[str]
    carried: Counter[str] = field(default_factory=Counter)
    linear: dict[str, int] = field(default_factory=dict)
    unrounded: tuple[str, ...] = ()
    products: tuple[FloatProduct, ...] = ()
    changes: SpecChanges = NO_CHANGES


def write_graph(
    module: nn.Module, example: tuple[torch.Tensor, ...], signature: GraphSignature, file: GraphFile
) -> Written:
    """Trace `module` on `example`, complete the graph, save it and check its signature.

    A graph of our own layers must also be portable. What a module of the user computes is the user's to decide.
    """
    spec, traced, changes = file.spec, file.traced, NO_CHANGES
    graph = None if traced is None else read_traced(traced, file.path.name)
    is_read = graph is not None
    if graph is not None:
        register_schemas()
        if problem := why_not_traced(graph, signature, spec.opset, traced_weights(module)):
            raise UserError(f"a traced graph of the artifact is damaged: {problem}; {REMEDY}")
    else:
        graph, signature, changes = traced_graph(module, example, signature, spec)
        if traced is not None:
            # without its whole state, a module is always traced anew
            add_traced(traced, file.path.name, graph if spec.model.has_whole_state else graph_without_numbers(graph))
    with blaming_traced(is_read):
        return replace(finish_graph(graph, module, signature, file), changes=changes)


def traced_graph(
    module: nn.Module, example: tuple[torch.Tensor, ...], signature: GraphSignature, spec: BuildSpec
) -> tuple[bytes, GraphSignature, SpecChanges]:
    """The graph of a module without its weights, the signature that the code of a user's own module has shown, and
    what that changes in its spec."""
    program = program_from_module(module, example, signature, spec, optimize=False)
    changes: SpecChanges = program.model.meta[CHANGES]
    if (operators := program.model.meta[OPERATORS]) is not None:
        signature = replace(signature, custom_ops=operators)
    if changes.outputs:
        signature = replace(signature, outputs=changes.applied(spec).outputs)
    return graph_without_weights(program.model, module), signature, changes


def finish_graph(traced: bytes, module: nn.Module, signature: GraphSignature, file: GraphFile) -> Written:
    """Put the weights of a module into its traced graph, complete it, save it and check its signature."""
    spec, path, quantization = file.spec, file.path, file.quantization
    layers = () if quantization is None else quantization.layers
    model = optimized_graph(traced, module, [layer.layer for layer in layers])
    make_portable(model)
    if spec.arithmetic == "bf16":
        avoid_missing_bfloat16(model)
    mark_custom_nodes(model)
    carried = use_carriers(model, spec.carrier) if spec.is_carried else Counter[str]()
    name_output_axes(model, signature)
    unrounded: tuple[str, ...] = ()
    products: tuple[FloatProduct, ...] = ()
    linear: dict[str, int] = {}
    if quantization is not None:
        use_first_paths(model, module)
        unrounded = quantize_graph(model, quantization, {node: module_path(node) for node in model.graph})
        found = Counter(node.op_type for node in model.graph if node.domain == DOMAIN)
        linear = {name: found[name] for name, op in OPS.items() if op.linear and found[name]}
    replaced = attach_function_bodies(model, spec.opset_of_file)
    clear_metadata(model, lambda node: (MODULE_KEY, module_path(node)))
    model.graph.name = model.producer_name = "effexport"
    if spec.inline:
        inline_functions(model)
    if quantization is not None:
        products = float_products(model, partial(reason_of_product, module))
    save(model, spec, path)
    # of a user's module, the number before that is known
    gone = replaced if spec.model.is_traced_as_found else Counter[str]()
    left: Counter[str] = Counter() if spec.inline else Counter(signature.custom_ops) - gone - carried
    signature = replace(signature, custom_ops=left)
    if spec.model.is_portable:
        check_graph(path, signature)
        check_portable(path)
    else:
        check_graph(path, signature, RANDOM_OPS)
    return Written(replaced, carried, {} if spec.inline else linear, unrounded, products)


def at_precision(module: nn.Module, precision: str) -> nn.Module:
    """A float32 module in the given precision, as a copy unless it is float32. A graph is quantised after it is traced,
    so its module is float32.

    Layers keep what must stay float32 in float32; for the user's own code, see `OnePrecision`. Raises UserError for a
    weight that is too large for the precision.
    """
    from effexport.models.user.model import CalledByPosition

    if precision == "fp32" or precision in QUANTIZED:
        return module
    dtype = getattr(torch, DTYPE_OF_PRECISION[precision])
    lower = copy.deepcopy(module)
    if isinstance(lower, CalledByPosition):
        lower.to_half(dtype)
    else:
        lower.to(dtype)
    for (name, exact), rounded in zip(module.named_parameters(), lower.parameters(), strict=True):
        overflown = exact[exact.isfinite() & ~rounded.isfinite()]
        if len(overflown):
            raise UserError(
                f"{name} contains {overflown[overflown.abs().argmax()]:g}, and the largest number of "
                f"{DTYPE_OF_PRECISION[precision]} is {torch.finfo(dtype).max:g}; check the weights, or build the "
                f"artifact with --precision {'fp32' if precision == 'bf16' else 'bf16 or fp32'}"
            )
    return lower


def program_from_module(
    module: nn.Module,
    example: tuple[torch.Tensor, ...],
    signature: GraphSignature,
    spec: BuildSpec,
    *,
    optimize: bool = True,
) -> torch.onnx.ONNXProgram:
    """The traced graph, as ONNX and as PyTorch's program, with the names and dynamic dimensions of the signature."""
    # which load PyTorch's arithmetic of symbols
    from effexport.export.user_program import NotTracedError, UserProgram, free_axes

    dynamic = free_axes(module, signature.inputs, lambda axis: axis)
    register_schemas()
    table: dict[Any, Any] = {
        getattr(torch.ops.effexport, op.torch_name).default: loaded(op).SIGNATURE.onnx_translation()
        for op in declared_ops()
    }
    if spec.model.is_traced_as_found:
        table |= recurrent_translation(spec.opset) | size_translation(spec.opset)
    operators, changes = None, NO_CHANGES
    with (
        quiet(streams=True),
        few_lookups(),
        fused_operators(module, spec.fused),
        modes_of_users_code(module, spec),
    ):
        try:
            traced: Any = module
            if spec.model.is_traced_as_found:
                traced, changes, operators = UserProgram(module, example, signature.inputs, spec).finished()
            program = torch.onnx.export(
                traced,
                example,
                dynamo=True,
                opset_version=spec.opset,
                input_names=[tensor.name for tensor in signature.inputs],
                output_names=[tensor.name for tensor in signature.outputs],
                dynamic_shapes=dynamic,
                custom_translation_table=table,
                optimize=optimize,
                verbose=False,
            )
        except NotTracedError as error:
            raise failure(error.reason, module) from error.reason
        except torch.onnx.OnnxExporterError as error:
            raise failure(error, module) from error
    if program is None:
        raise StageError(STAGE, "torch.onnx returned no program")
    for value in [value for node in program.model.graph for value in node.outputs]:
        if not value.is_graph_output():
            value.name = inner_name(value.name, (*signature.inputs, *signature.outputs))
    program.model.meta[OPERATORS], program.model.meta[CHANGES] = operators, changes
    return program


@contextlib.contextmanager
def modes_of_users_code(module: nn.Module, spec: BuildSpec) -> Iterator[None]:
    """Read the code of a user's own module as we export it while it is traced; nothing to do for modules of ours."""
    from effexport.models.adapters.fla_functions import recurrences_as_operators
    from effexport.models.adapters.torch_layers import attention_calls_as_operators
    from effexport.models.user.modes import code_as_exported

    with contextlib.ExitStack() as stack:
        if spec.model.is_traced_as_found:
            stack.enter_context(attention_calls_as_operators(turns=spec.fused))
            if spec.fused:
                stack.enter_context(recurrences_as_operators())
            stack.enter_context(code_as_exported(module))
        yield


def inner_name(name: str | None, declared: Sequence[TensorInfo]) -> str | None:
    """A name for an inner value that no input and no output has; torch.onnx, which names it after its operation, does
    not check."""
    return f"{name}.inner" if any(name == tensor.name for tensor in declared) else name


def failure(error: Exception, module: nn.Module) -> StageError:
    """An error of torch.export or torch.onnx, whose own message may be a page of general advice; the cause has the
    reason."""
    cause = reason_of(error)
    message = f"torch.onnx could not export the module{place_of(error, module)}: {cause}{unknown_op(cause)}"
    return StageError(STAGE, f"{message}; --debug shows the traceback")


def unknown_op(cause: str) -> str:
    """The remedy if torch.onnx does not know a user's operator, because nothing declares it; "" otherwise."""
    called = re.search(r"\beffexport(?:::|\.)(\w+)", cause)
    if called is None or any(op.torch_name == called[1] for op in known_ops().values()):
        return ""
    return (
        f". No installed package declares effexport::{called[1]}; install the one that does, or compile the operator's "
        "folder with: effexport plugins build --with FOLDER"
    )


def example_inputs(spec: BuildSpec) -> tuple[torch.Tensor, ...]:
    """Small inputs for tracing, whose sizes do not become constants in the graph."""
    model = spec.model
    sizes = {MASKS: 3, **model.trace_sizes}
    fills = {**INPUT_DEFAULTS, **{name: low for name, (low, _) in model.drawn_ranges.items()}}
    fills[model.mask] = int(not model.mask_ignores)
    return tuple(
        torch.full(shape_of(tensor.dims, sizes), fills.get(tensor.name, 0), dtype=getattr(torch, tensor.dtype))
        for tensor in spec.inputs
    )


def declared_ops() -> list[Op]:
    """Our operators, and those of users whose op.py was imported: a module can call no others."""
    return [op for op in known_ops().values() if op.onnx_name in OPS or hasattr(torch.ops.effexport, op.torch_name)]


def register_schemas() -> None:
    """Register the custom operators with onnx. The registry is global, so a second call does nothing."""
    import onnx.defs

    for op in declared_ops():
        if not onnx.defs.has(op.onnx_name, DOMAIN):
            onnx.defs.register_schema(loaded(op).SIGNATURE.onnx_schema())


def name_output_axes(model: ir.Model, signature: GraphSignature) -> None:
    """Name the axes of outputs that torch.onnx describes by formulas, such as Min(64, seq), as the signature does.

    That the axes have these sizes was seen when the module was run, and the proof compares the shapes of every case.
    """
    for value, tensor in zip(model.graph.outputs, signature.outputs, strict=False):
        if value.shape is None or len(value.shape) != len(tensor.dims):
            continue
        pairs = zip(value.shape, tensor.dims, strict=True)
        dims = [name if isinstance(name, str) and isinstance(dim, ir.SymbolicDim) else dim for dim, name in pairs]
        value.shape = ir.Shape(dims)


def mark_custom_nodes(model: ir.Model) -> None:
    """Name custom nodes after their module, and mark them for TensorRT."""
    seen: Counter[str] = Counter()
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        owner = module_path(node)
        name = f"{owner}/{node.op_type}" if owner else node.op_type
        # a module may contain several nodes of one operator
        node.name = f"{name}_{seen[name]}" if seen[name] else name
        seen[name] += 1
        node.attributes[PLUGIN_NAMESPACE] = ir.AttrString(PLUGIN_NAMESPACE, DOMAIN)
        if node.op_type in OPS and OPS[node.op_type].decides and node.inputs[0] is not None:
            node.inputs[0].name = f"{owner}.{BUCKETS}" if owner else BUCKETS
    model.graph.opset_imports.setdefault(DOMAIN, OPSET_VERSION)


def module_path(node: ir.Node) -> str:
    """Path of the attention module that a node came from, "" for the root: "blocks.0.attention"."""
    scopes: list[str] = ast.literal_eval(node.metadata_props.get(SCOPES_KEY, "[]"))
    # the last scope is the operator itself
    return scopes[-2] if len(scopes) > 1 else ""


def use_first_paths(model: ir.Model, module: nn.Module) -> None:
    """Name the module of each node by the first of its paths, if several lead to it."""
    first = first_paths(module)
    for node in model.graph:
        path = module_path(node)
        if first.get(path, path) != path:
            scopes = ast.literal_eval(node.metadata_props[SCOPES_KEY])
            node.metadata_props[SCOPES_KEY] = repr([*scopes[:-2], first[path], scopes[-1]])


def onnx_with_state(kind: type[DecodeStep | Prefill], module: nn.Module, file: GraphFile) -> None:
    """Export the decode step of a causal module, or its prefill: token or tokens and mask, position (for an encoder)
    and state → output and next state.

    Raises StageError if the graph does not have its signature.
    """
    spec = file.spec
    model: DecodeStep | Prefill = kind(at_precision(module, spec.arithmetic))  # type: ignore[arg-type]
    states = tuple(
        TensorInfo(name, "float32", ("batch", *tensor.shape[1:]))
        for name, tensor in zip(model.state_names, model.initial_state(1), strict=True)
    )
    one_token = kind is DecodeStep
    called = {} if one_token else spec.model.prefill_ops(spec.fused)
    signature = replace(signature_with_state(spec, states, one_token=one_token), custom_ops=called)
    tokens, *others = example_inputs(spec)
    batch = len(tokens)
    # the exporter cannot translate the strides of a view
    example = [tokens[:, :1].contiguous()] if one_token else [tokens, *others]
    if spec.model.counts_positions:
        example.append(torch.zeros(batch, dtype=torch.int64))
    if file.quantization is not None:
        file = replace(file, quantization=file.quantization.below("model"))  # the attribute of ModelWithState
    write_graph(model, (*example, *model.initial_state(batch)), signature, file)


def onnx_of_decoder(
    kinds: tuple[type[nn.Module], type[nn.Module]], module: nn.Module, files: tuple[GraphFile, GraphFile]
) -> None:
    """Export the two graphs of an encoder-decoder, the encoder and its decode step. Raises as `onnx_with_state`."""
    spec = files[0].spec
    module = at_precision(module, spec.arithmetic)
    reading = GraphSignature(*spec.source_tensors, spec.model.custom_ops(spec.fused))
    decoding = GraphSignature(*spec.step_tensors, {})
    for kind, file, signature in zip(kinds, files, (reading, decoding), strict=True):
        example = tuple(
            torch.zeros(shape_of(tensor.dims, spec.model.trace_sizes), dtype=getattr(torch, tensor.dtype))
            for tensor in signature.inputs
        )
        write_graph(kind(module), example, signature, file)
