"""onnx → engine: a TensorRT or TensorRT-RTX engine with its sidecar."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.disk import ANOTHER_FOLDER, write_error
from effexport.engines.api import Api, Builder, IBuilderConfig, bytes_of, import_api
from effexport.engines.attention_form import attention_form
from effexport.engines.builder_log import BuildLog, OnProgress, explain, interrupting, make_monitor
from effexport.engines.config import config_from_spec, save_timing_cache
from effexport.engines.custom_nodes import ATTENTION
from effexport.engines.kernels import attention_kernels, kernels_from_log
from effexport.engines.layers import check_dtypes, check_precision, layers_of_engine, layers_of_network
from effexport.engines.network import Network, keep_attention_whole, network_from_model
from effexport.engines.preparation import STAGE, prepared_model
from effexport.engines.sidecar import AttentionForm, EngineInfo, ShapeRange, write_sidecar
from effexport.engines.spec import EngineSpec
from effexport.errors import StageError, UserError
from effexport.export.onnx_graph import graph_tensors, load_graph, model_digest, value_types
from effexport.files import replacing
from effexport.plugins.masked_attention.trt import OPERATOR
from effexport.runtimes import ENGINE_RUNTIMES
from effexport.version import __version__

if TYPE_CHECKING:
    import onnx

# Takes the optional part of effexport that runs engines, and returns the compute capability of the GPU of this machine,
# such as 90. Raises UserError without a GPU.
FindGpu = Callable[[str], int]


def engine_from_onnx(
    model: Path,
    spec: EngineSpec,
    output: Path,
    find_gpu: FindGpu,
    *,
    precision: str = "fp32",
    remarks: tuple[str, ...] = (),
    on_progress: OnProgress = lambda phase, share: None,
) -> EngineInfo:
    """Build an engine and write it to `output` with its sidecar beside it; on failure, write neither.

    model: a model.onnx with its external weights beside it. precision: that of its matrix products, which is checked,
    because the graph decides it. find_gpu: `runners.cuda.opening.current_compute_capability`.
    remarks: sentences for the sidecar.
    Raises MissingExtraError without TensorRT, UserError for a model or a file that cannot be used, SpecError for a
    profile that does not fit, and StageError if the parser, the builder or the check of element types fails.
    """
    api = import_api(spec.target)
    graph = load_graph(model)
    form = attention_form(graph, spec, api.__version__)
    build = partial(_engine_in_form, api, graph, model, spec, output, find_gpu, precision, remarks, on_progress)
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
    find_gpu: FindGpu,
    precision: str,
    remarks: tuple[str, ...],
    on_progress: OnProgress,
    attention: AttentionForm | None,
) -> EngineInfo:
    """`engine_from_onnx` of a graph that has been read, with MaskedAttention in one form."""
    built_for = compute_capabilities(spec, find_gpu)
    use_attention = attention is not None and attention.form == ATTENTION
    prepared = prepared_model(graph, spec, built_for, use_attention=use_attention)
    inputs, outputs = graph_tensors(prepared.model.graph.input), graph_tensors(prepared.model.graph.output)
    shapes = distinct([profile.shapes(inputs) for profile in spec.profiles])

    log, monitor = BuildLog(api), make_monitor(api, on_progress)
    with interrupting(monitor):
        builder = make_builder(api, log, spec)
        network = network_from_model(api, builder, log, spec.target, prepared.model.SerializeToString(), model)
        if use_attention:
            keep_attention_whole(api, network.definition)
        layers = list(layers_of_network(network.definition))
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
        effexport_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        precision=precision,
        inputs=inputs,
        outputs=outputs,
        profiles=shapes,
        options=spec.options(),
        onnx_sha256=model_digest(model),
        onnx_bytes=model.stat().st_size,
        engine_sha256=hashlib.sha256(engine).hexdigest(),
        engine_bytes=len(engine),
        build_seconds=round(seconds, 3),
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
    )
    info = inspected(api, info, engine, dtypes, find_gpu)
    write_engine(output, engine, info)
    save_timing_cache(spec, config)
    return info


def distinct(profiles: Sequence[Mapping[str, ShapeRange]]) -> tuple[Mapping[str, ShapeRange], ...]:
    """The profiles without repetitions: those that only differ in the length are one for a graph of single tokens."""
    return tuple(profile for index, profile in enumerate(profiles) if profile not in profiles[:index])


def make_builder(api: Api, log: BuildLog, spec: EngineSpec) -> Builder:
    product = ENGINE_RUNTIMES[spec.target].label
    try:
        return log.made(api.Builder)
    except (TypeError, RuntimeError) as error:  # the factory of the library returned nothing
        raise StageError(STAGE, f"{product} {api.__version__} does not start: {explain(log.errors)}") from error


def built(builder: Builder, network: Network, config: IBuilderConfig, log: BuildLog) -> bytes:
    """Run the builder. Raises StageError with the reason and the remedy."""
    serialised = builder.build_serialized_network(network.definition, config)
    if serialised is None:
        raise StageError(STAGE, explain(log.errors))
    return bytes_of(serialised)


def compute_capabilities(spec: EngineSpec, find_gpu: FindGpu) -> tuple[int, ...]:
    """The GPUs that the engine is for. Raises UserError for target trt on a machine without a GPU."""
    if spec.target == "trt-rtx":
        return spec.compute_capabilities
    return (find_gpu(ENGINE_RUNTIMES[spec.target].package.extra),)


def inspected(api: Api, info: EngineInfo, engine: bytes, expected: Mapping[str, str], find_gpu: FindGpu) -> EngineInfo:
    """Add the layers, tactics and memory that the engine itself reports, if the GPU of this machine can load it."""
    try:
        find_gpu(ENGINE_RUNTIMES[info.target].package.extra)
    except UserError:
        return info  # without a GPU, the layers of the network remain
    log = BuildLog(api)
    runtime = log.made(api.Runtime)
    if info.version_compatible:
        runtime.engine_host_code_allowed = True  # the engine was built a moment ago
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
