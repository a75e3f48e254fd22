"""Turns an EngineSpec into the configuration of TensorRT's builder. The precision is not in it, but in the graph."""

from __future__ import annotations

from collections.abc import Mapping

from effexport.engines.api import Api, Builder, IBuilderConfig, bytes_of
from effexport.engines.sidecar import ShapeRange
from effexport.engines.spec import EngineSpec
from effexport.errors import UserError
from effexport.files import write_file


def config_from_spec(
    api: Api, builder: Builder, spec: EngineSpec, shapes: tuple[Mapping[str, ShapeRange], ...]
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
        if wanted:
            config.set_flag(flag)
        else:
            config.clear_flag(flag)
    config.profiling_verbosity = api.ProfilingVerbosity.DETAILED
    if spec.optimization_level is not None:
        config.builder_optimization_level = spec.optimization_level
    if spec.workspace_bytes is not None:
        config.set_memory_pool_limit(api.MemoryPoolType.WORKSPACE, spec.workspace_bytes)
    if spec.target == "trt":
        configure_trt(api, config, spec)
    else:
        configure_rtx(api, config, spec)
    return config


def configure_trt(api: Api, config: IBuilderConfig, spec: EngineSpec) -> None:
    levels = api.HardwareCompatibilityLevel
    config.hardware_compatibility_level = {
        "none": levels.NONE,
        "ampere+": levels.AMPERE_PLUS,
        "same-compute-capability": levels.SAME_COMPUTE_CAPABILITY,
    }[spec.hardware_compatibility]
    if spec.timing_cache is not None:
        known = spec.timing_cache.read_bytes() if spec.timing_cache.is_file() else b""
        cache = config.create_timing_cache(known)
        # a cache of another GPU or release is replaced by a new one
        if cache is None or not config.set_timing_cache(cache, False):
            empty = config.create_timing_cache(b"")
            if empty is not None:
                config.set_timing_cache(empty, False)


def configure_rtx(api: Api, config: IBuilderConfig, spec: EngineSpec) -> None:
    """Does not touch the timing cache, because reading it makes TensorRT-RTX look for a GPU."""
    if spec.compute_capabilities:
        config.num_compute_capabilities = len(spec.compute_capabilities)
        for index, number in enumerate(spec.compute_capabilities):
            config.set_compute_capability(getattr(api.ComputeCapability, f"SM{number}"), index)


def save_timing_cache(spec: EngineSpec, config: IBuilderConfig) -> None:
    if spec.timing_cache is None:
        return
    path = spec.timing_cache
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, bytes_of(config.get_timing_cache().serialize()))
    except OSError as error:
        raise UserError(
            f"the engine is built, but the timing cache {path} cannot be written: {error.strerror}"
        ) from error
