"""onnx → engine: a TensorRT or TensorRT-RTX engine with its sidecar, or one refitted with other weights."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from effexport.base.disk import ANOTHER_FOLDER, write_error
from effexport.base.errors import StageError, UserError
from effexport.base.files import replacing, write_file
from effexport.base.runtimes import ENGINE_RUNTIMES
from effexport.base.version import __version__
from effexport.export.onnx_graph import graph_tensors, load_graph, model_digest, value_types
from effexport.plugins.masked_attention.trt import OPERATOR
from effexport.runners.cuda import current_compute_capability
from effexport.tensorrt.bindings import (
    BuildLog,
    OnProgress,
    explain,
    import_api,
    interrupting,
    make_monitor,
    make_runtime,
    plain,
)
from effexport.tensorrt.preparation import ATTENTION, STAGE, attention_form, prepared_model
from effexport.tensorrt.sidecar import (
    AttentionForm,
    EngineInfo,
    ShapeRange,
    attention_kernels,
    check_dtypes,
    check_engine_file,
    check_precision,
    check_runs_here,
    kernels_from_log,
    layers_of_engine,
    layers_of_network,
    read_sidecar,
    write_sidecar,
)
from effexport.tensorrt.spec import EngineSpec, profile_from_shapes

if TYPE_CHECKING:
    import onnx
    from tensorrt import Api, Builder, IAttentionInputLayer, IBuilderConfig, INetworkDefinition, OnnxParser


def engine_from_onnx(
    model: Path,
    spec: EngineSpec,
    output: Path,
    *,
    precision: str = "fp32",
    remarks: tuple[str, ...] = (),
    on_progress: OnProgress = lambda phase, share: None,
) -> EngineInfo:
    """Build an engine and write it to `output` with its sidecar beside it; on failure, write neither.

    model: a model.onnx with its external weights beside it. precision: that of its matrix products, which is checked,
    because the graph decides it. remarks: sentences for the sidecar.
    Raises MissingExtraError without TensorRT, UserError for a model or a file that cannot be used, SpecError for a
    profile that does not fit, and StageError if the parser, the builder or the check of element types fails.
    """
    api = import_api(spec.target)
    graph = load_graph(model)
    form = attention_form(graph, spec, api.__version__)
    build = partial(_engine_in_form, api, graph, model, spec, output, precision, remarks, on_progress)
    try:
        return build(form)
    except StageError as error:
        if form is None or form.form != ATTENTION:
            raise
        return build(attention_form(graph, spec, api.__version__, refusal=str(error)))


def _engine_in_form(
    api: Api,
    graph: onnx.ModelProto,
    model: Path,
    spec: EngineSpec,
    output: Path,
    precision: str,
    remarks: tuple[str, ...],
    on_progress: OnProgress,
    attention: AttentionForm | None,
) -> EngineInfo:
    """`engine_from_onnx` of a graph that has been read, with MaskedAttention in one form."""
    built_for = compute_capabilities(spec)
    use_attention = attention is not None and attention.form == ATTENTION
    prepared = prepared_model(graph, spec, built_for, use_attention=use_attention)
    inputs, outputs = graph_tensors(prepared.model.graph.input), graph_tensors(prepared.model.graph.output)
    shapes: list[Mapping[str, ShapeRange]] = []
    for profile in spec.profiles:
        # those that only differ in the length are one for a graph of single tokens
        if (wanted := profile.shapes(inputs)) not in shapes:
            shapes.append(wanted)

    log, monitor = BuildLog(api), make_monitor(api, on_progress)
    with interrupting(monitor):
        builder = make_builder(api, log, spec)
        network, _parser = network_from_model(api, builder, log, spec, prepared.model.SerializeToString(), model)
        if use_attention:
            keep_attention_whole(api, network)
        layers = list(layers_of_network(network))
        dtypes = {name: dtype for name, (dtype, _) in value_types(prepared.model).items()}
        compared = check_dtypes(layers, dtypes)
        check_precision(layers, precision)

        config = config_from_spec(api, builder, spec, shapes)
        started = time.perf_counter()
        config.progress_monitor = monitor
        engine = built(builder, network, config, log)
        seconds = time.perf_counter() - started
    kernels = kernels_from_log(log.kernels)
    info = EngineInfo(
        target=spec.target,
        tensorrt_version=api.__version__,
        precision=precision,
        inputs=inputs,
        outputs=outputs,
        profiles=tuple(shapes),
        options=spec.options(),
        compute_capabilities=built_for,
        hardware_compatibility=spec.hardware_compatibility,
        version_compatible=spec.version_compatible,
        implementation=prepared.implementation,
        ptx=prepared.ptx,
        layers=tuple(layers),
        kernels=kernels,
        attention=attention_kernels(prepared.model, dtypes, kernels),
        # a body where no plugin is possible
        attention_form=attention and replace(attention, form=prepared.implementation[OPERATOR]),
        tensors_compared=compared,
        remarks=(*remarks, *prepared.remarks),
        model=model.name,
        **facts_of(engine, model, seconds),
    )
    info = inspected(api, info, engine, dtypes)
    write_engine(output, engine, info)
    save_timing_cache(spec, config)
    return info


def facts_of(engine: bytes, model: Path, seconds: float) -> dict[str, Any]:
    """The fields of a sidecar that tell one file of an engine from another. seconds: to build or to refit it."""
    return {
        "effexport_version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "onnx_sha256": model_digest(model),
        "onnx_bytes": model.stat().st_size,
        "engine_sha256": hashlib.sha256(engine).hexdigest(),
        "engine_bytes": len(engine),
        "build_seconds": round(seconds, 3),
    }


def make_builder(api: Api, log: BuildLog, spec: EngineSpec) -> Builder:
    try:
        return log.made(api.Builder)
    except (TypeError, RuntimeError) as error:  # the factory of the library returned nothing
        raise StageError(STAGE, f"{spec.row.label} {api.__version__} does not start: {explain(log.errors)}") from error


def built(builder: Builder, network: INetworkDefinition, config: IBuilderConfig, log: BuildLog) -> bytes:
    """Run the builder. Raises StageError with the reason and the remedy."""
    serialised = builder.build_serialized_network(network, config)
    if serialised is None:
        raise StageError(STAGE, explain(log.errors))
    return bytes(serialised)


def compute_capabilities(spec: EngineSpec) -> tuple[int, ...]:
    """The GPUs that the engine is for. Raises UserError for target trt on a machine without a GPU."""
    if not spec.row.built_where_it_runs:
        return spec.compute_capabilities
    return (current_compute_capability(spec.row.package.extra),)


def inspected(api: Api, info: EngineInfo, engine: bytes, expected: Mapping[str, str]) -> EngineInfo:
    """Add the layers, tactics and memory that the engine itself reports, if the GPU of this machine can load it."""
    try:
        current_compute_capability(ENGINE_RUNTIMES[info.target].package.extra)
    except UserError:
        return info  # without a GPU, the layers of the network remain
    log = BuildLog(api)
    runtime = make_runtime(api, log, info.version_compatible)  # the engine was built a moment ago
    loaded = runtime.deserialize_cuda_engine(engine)
    if loaded is None:
        # it is for other GPUs than this one, or refused; loading it later reports the reason
        return replace(info, remarks=(*info.remarks, f"not loaded on this machine: {explain(log.errors)}"))
    layers = layers_of_engine(loaded.create_engine_inspector().get_engine_information(api.LayerInformationFormat.JSON))
    compared = info.tensors_compared + check_dtypes(layers, expected)
    return replace(
        info,
        layers=tuple(layers),
        layers_from="engine",
        tensors_compared=compared,
        device_memory_bytes=int(loaded.device_memory_size_v2),
    )


def write_engine(output: Path, engine: bytes, info: EngineInfo) -> None:
    """Write both files or neither; the sidecar gets its name first. Raises as `write_error`."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as partial:
            partial.write_bytes(engine)
            write_sidecar(output, info)
    except OSError as error:
        raise write_error(output, error, ANOTHER_FOLDER) from error


PARSER_STAGE = "TensorRT's parser"


def network_from_model(
    api: Api, builder: Builder, log: BuildLog, spec: EngineSpec, model: bytes, path: Path
) -> tuple[INetworkDefinition, OnnxParser]:
    """Parse a serialised model. path: its file, beside which external weights are looked for.

    Returns the parser, too, because it owns weights that the network refers to.
    Raises StageError with the node, the reason and the remedy.
    """
    known = api.NetworkDefinitionCreationFlag
    flags = 1 << int(known.STRONGLY_TYPED)
    if spec.row.engine_plugins:
        # by default, TensorRT makes plugins that call Python at run time; ours are compiled ahead of time
        flags |= 1 << int(known.PREFER_AOT_PYTHON_PLUGINS)
    network = builder.create_network(flags)
    parser = api.OnnxParser(network, log.logger)
    if not parser.parse(model, str(path)):
        raise StageError(PARSER_STAGE, parse_failure(parser, log))
    return network, parser


def keep_attention_whole(api: Api, definition: INetworkDefinition) -> None:
    """Forbid the builder to take Attention apart, so that it makes one kernel of each or refuses to build."""
    for layer in map(definition.get_layer, range(definition.num_layers)):
        if layer.type == api.LayerType.ATTENTION_INPUT:
            whole: Any = layer
            whole.__class__ = api.IAttentionInputLayer  # get_layer returns the base class
            cast("IAttentionInputLayer", whole).attention.decomposable = False


def parse_failure(parser: OnnxParser, log: BuildLog) -> str:
    if not parser.num_errors:
        return explain(log.errors)
    error = parser.get_error(0)
    said = error.desc()
    if not error.node_operator():
        return f"the model cannot be read: {plain(said)}"
    where = f"node {error.node_name() or '(without a name)'} ({error.node_operator()})"
    if "Plugin not found" in said:
        return (
            f"{where} is an operator that TensorRT does not have, without a function body or a plugin; attach a body "
            "to the model, or use another operator"
        )
    if "was not found in plugin registry" in said:
        return f"{where} is an operator that this TensorRT does not have; use another one, or another --target"
    if said in ("false", "unsupported"):
        return f"{where} is an operator that TensorRT does not import; use another one"
    return f"{where}: {plain(said)}; build an artifact with effexport, or report this graph"


def config_from_spec(
    api: Api, builder: Builder, spec: EngineSpec, shapes: Sequence[Mapping[str, ShapeRange]]
) -> IBuilderConfig:
    """The configuration of a build. shapes: those of every input, one entry per profile."""
    config = builder.create_builder_config()
    for profile in shapes:
        added = builder.create_optimization_profile()
        for name, (smallest, optimum, largest) in profile.items():
            added.set_shape(name, smallest, optimum, largest)
        config.add_optimization_profile(added)
    flags = {
        api.BuilderFlag.TF32: spec.tf32,
        api.BuilderFlag.VERSION_COMPATIBLE: spec.version_compatible,
        api.BuilderFlag.WEIGHT_STREAMING: spec.weight_streaming,
        api.BuilderFlag.REFIT: spec.refittable,
    }
    for flag, wanted in flags.items():
        (config.set_flag if wanted else config.clear_flag)(flag)
    config.profiling_verbosity = api.ProfilingVerbosity.DETAILED
    if spec.optimization_level is not None:
        config.builder_optimization_level = spec.optimization_level
    if spec.workspace_bytes is not None:
        config.set_memory_pool_limit(api.MemoryPoolType.WORKSPACE, spec.workspace_bytes)
    if spec.row.built_where_it_runs:
        levels = api.HardwareCompatibilityLevel
        config.hardware_compatibility_level = {
            "none": levels.NONE,
            "ampere+": levels.AMPERE_PLUS,
            "same-compute-capability": levels.SAME_COMPUTE_CAPABILITY,
        }[spec.hardware_compatibility]
    if spec.timing_cache is not None:
        known = [spec.timing_cache.read_bytes()] if spec.timing_cache.is_file() else []
        # a cache of another GPU or release is replaced by a new one. Reading it makes TensorRT-RTX look for a GPU
        for contents in (*known, b""):
            cache = config.create_timing_cache(contents)
            if cache is not None and config.set_timing_cache(cache, False):
                break
    if spec.compute_capabilities:  # of TensorRT-RTX
        config.num_compute_capabilities = len(spec.compute_capabilities)
        for index, number in enumerate(spec.compute_capabilities):
            config.set_compute_capability(getattr(api.ComputeCapability, f"SM{number}"), index)
    return config


def save_timing_cache(spec: EngineSpec, config: IBuilderConfig) -> None:
    if spec.timing_cache is None:
        return
    path = spec.timing_cache
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, bytes(config.get_timing_cache().serialize()))
    except OSError as error:
        raise UserError(
            f"the engine is built, but the timing cache {path} cannot be written: {error.strerror}"
        ) from error


REFIT_STAGE = "TensorRT refit"
REFITTED = "refitted with other weights, which keeps the kernels that were chosen for the first ones"


def engine_from_engine(
    previous: Path | None,
    model: Path,
    spec: EngineSpec,
    output: Path,
    *,
    precision: str,
    remarks: tuple[str, ...],
    on_progress: OnProgress,
) -> EngineInfo:
    """Write the engine of `spec` for a model, as `engine_from_onnx` does.

    previous: an engine for the same graph with other weights, if there is one. If the spec is refittable it is
    refitted, and if TensorRT cannot do that, another engine is built and a remark says why.
    """
    if previous is not None and previous.is_file() and spec.refittable:
        try:
            return refitted_engine(previous, model, spec, output)
        except (StageError, UserError) as error:
            remarks = (*remarks, f"built again, because the engine could not be refitted: {error}")
    return engine_from_onnx(model, spec, output, precision=precision, remarks=remarks, on_progress=on_progress)


def refitted_engine(previous: Path, model: Path, spec: EngineSpec, output: Path) -> EngineInfo:
    """Write a copy of an engine with the weights of a model, and its sidecar.

    Raises UserError if the engine cannot be loaded here, and StageError if TensorRT refuses the weights.
    """
    api, info = import_api(spec.target), read_sidecar(previous)
    check_engine_file(previous, info)
    check_runs_here(previous, info, api.__version__, current_compute_capability(spec.row.package.extra))
    # registers the plugins, too
    use_attention = ATTENTION in info.implementation.values()
    prepared = prepared_model(load_graph(model), spec, compute_capabilities(spec), use_attention=use_attention)
    started = time.perf_counter()
    log = BuildLog(api)
    runtime = make_runtime(api, log, info.version_compatible)  # the checksum says that it is the engine that was built
    engine = runtime.deserialize_cuda_engine(previous.read_bytes())
    if engine is None:
        raise StageError(REFIT_STAGE, explain(log.errors))
    refitter = log.made(partial(api.Refitter, engine))
    parser = api.OnnxParserRefitter(refitter, log.logger)
    if not parser.refit_from_bytes(prepared.model.SerializeToString(), str(model)):
        raise StageError(REFIT_STAGE, explain(log.errors))
    if missing := list(refitter.get_missing_weights()):
        raise StageError(REFIT_STAGE, f"the model has no weights for {', '.join(missing[:5])}")
    if not refitter.refit_cuda_engine():
        raise StageError(REFIT_STAGE, explain(log.errors))
    content = bytes(engine.serialize())
    remarks = (*(remark for remark in info.remarks if remark != REFITTED), REFITTED)
    refitted = replace(info, remarks=remarks, **facts_of(content, model, time.perf_counter() - started))
    write_engine(output, content, refitted)
    return refitted


def spec_of_engine(info: EngineInfo) -> EngineSpec:
    """The spec that an engine was built from. A timing cache that is not on this machine is left out.

    Raises UserError for an option that this release does not know.
    """
    options: dict[str, Any] = dict(info.options)
    if unknown := sorted(set(options) - {field.name for field in fields(EngineSpec)}):
        given = ", ".join(f"{name}={options[name]!r}" for name in unknown)
        raise UserError(
            f"the {info.target} engine was built by effexport {info.effexport_version} with {given}, which effexport "
            f"{__version__} does not know; upgrade effexport, or build the artifact again with --target {info.target}"
        )
    cache = options.pop("timing_cache", None)
    return EngineSpec(
        target=info.target,
        profiles=tuple(profile_from_shapes(info.inputs, shapes) for shapes in info.profiles),
        timing_cache=Path(cache) if cache and Path(cache).is_file() else None,
        **{**options, "compute_capabilities": tuple(options.get("compute_capabilities", ()))},
    )


def why_not_renewed(spec: EngineSpec) -> str:
    """The reason why this machine can neither refit nor build the engine of a spec; "" if it can."""
    try:
        import_api(spec.target)
        if spec.row.built_where_it_runs:
            current_compute_capability(spec.row.package.extra)
    except UserError as error:
        return str(error)
    return ""
