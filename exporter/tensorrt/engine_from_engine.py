"""engine → engine: the engines of an artifact whose weights change, refitted where TensorRT can, or built again."""

from __future__ import annotations

import hashlib
import time
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from effexport.errors import StageError, UserError
from effexport.export.onnx_graph import load_graph, model_digest
from effexport.runtimes import ENGINE_RUNTIMES
from effexport.tensorrt.bindings import BuildLog, OnProgress, explain, import_api
from effexport.tensorrt.engine_from_onnx import FindGpu, compute_capabilities, engine_from_onnx, write_engine
from effexport.tensorrt.preparation import ATTENTION, prepared_model
from effexport.tensorrt.sidecar import EngineInfo, check_engine_file, check_runs_here, read_sidecar
from effexport.tensorrt.spec import EngineSpec, profile_from_shapes
from effexport.version import __version__

STAGE = "TensorRT refit"
REFITTED = "refitted with other weights, which keeps the kernels that were chosen for the first ones"


def engine_from_engine(
    previous: Path | None,
    model: Path,
    spec: EngineSpec,
    output: Path,
    find_gpu: FindGpu,
    *,
    precision: str = "fp32",
    remarks: tuple[str, ...] = (),
    on_progress: OnProgress = lambda phase, share: None,
) -> EngineInfo:
    """Write the engine of `spec` for a model, as `engine_from_onnx` does.

    previous: an engine for the same graph with other weights, if there is one. If the spec is refittable it is
    refitted, and if TensorRT cannot do that, another engine is built and a remark says why.
    """
    if previous is not None and previous.is_file() and spec.refittable:
        try:
            return refitted_engine(previous, model, spec, output, find_gpu)
        except (StageError, UserError) as error:
            remarks = (*remarks, f"built again, because the engine could not be refitted: {error}")
    return engine_from_onnx(
        model, spec, output, find_gpu, precision=precision, remarks=remarks, on_progress=on_progress
    )


def refitted_engine(previous: Path, model: Path, spec: EngineSpec, output: Path, find_gpu: FindGpu) -> EngineInfo:
    """Write a copy of an engine with the weights of a model, and its sidecar.

    Raises UserError if the engine cannot be loaded here, and StageError if TensorRT refuses the weights.
    """
    api, info = import_api(spec.target), read_sidecar(previous)
    check_engine_file(previous, info)
    check_runs_here(previous, info, api.__version__, find_gpu(ENGINE_RUNTIMES[spec.target].package.extra))
    # registers the plugins, too
    capabilities = compute_capabilities(spec, find_gpu)
    use_attention = ATTENTION in info.implementation.values()
    prepared = prepared_model(load_graph(model), spec, capabilities, use_attention=use_attention)
    started = time.perf_counter()
    log = BuildLog(api)
    runtime = log.made(api.Runtime)
    if info.version_compatible:
        runtime.engine_host_code_allowed = True  # the checksum says that it is the engine that was built
    engine = runtime.deserialize_cuda_engine(previous.read_bytes())
    if engine is None:
        raise StageError(STAGE, explain(log.errors))
    refitter = log.made(partial(api.Refitter, engine))
    parser = api.OnnxParserRefitter(refitter, log.logger)
    if not parser.refit_from_bytes(prepared.model.SerializeToString(), str(model)):
        raise StageError(STAGE, explain(log.errors))
    if missing := list(refitter.get_missing_weights()):
        raise StageError(STAGE, f"the model has no weights for {', '.join(missing[:5])}")
    if not refitter.refit_cuda_engine():
        raise StageError(STAGE, explain(log.errors))
    content = bytes(engine.serialize())
    refitted = replace(
        info,
        effexport_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        onnx_sha256=model_digest(model),
        onnx_bytes=model.stat().st_size,
        engine_sha256=hashlib.sha256(content).hexdigest(),
        engine_bytes=len(content),
        build_seconds=round(time.perf_counter() - started, 3),
        remarks=(*(remark for remark in info.remarks if remark != REFITTED), REFITTED),
    )
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


def why_not_renewed(spec: EngineSpec, find_gpu: FindGpu) -> str:
    """The reason why this machine can neither refit nor build the engine of a spec; "" if it can."""
    try:
        import_api(spec.target)
        if spec.row.built_where_it_runs:
            find_gpu(ENGINE_RUNTIMES[spec.target].package.extra)
    except UserError as error:
        return str(error)
    return ""
