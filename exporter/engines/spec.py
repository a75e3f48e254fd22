"""The engine to build: target, optimisation profiles and options of the builder."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from effexport.engines.profile import EXAMPLE, Profile
from effexport.models.validation import did_you_mean, require
from effexport.runtimes import ENGINE_RUNTIMES

# The GPUs that TensorRT-RTX accepts as a target. It does not accept SM 90 and SM 100.
RTX_COMPUTE_CAPABILITIES = (75, 80, 86, 89, 120, 121)
HARDWARE_COMPATIBILITIES = ("none", "ampere+", "same-compute-capability")
PLUGIN_CHOICES = ("auto", "require", "never")
# The options that only one target has.
OWN_OPTIONS: dict[str, tuple[str, ...]] = {
    "trt": ("timing_cache", "version_compatible", "hardware_compatibility", "refittable", "plugins"),
    "trt-rtx": ("compute_capabilities",),
}
# Those of them that are on the command line; spec files have the others.
WITH_FLAG = ("timing_cache", "refittable", "plugins")


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine to build.

    profiles: at least one; an engine with several is tuned for the optimum of each.
    optimization_level: 0 (builds fastest) to 5 (searches longest); None leaves it to TensorRT.
    workspace_bytes: the most scratch memory that the engine may need on the GPU; None sets no limit.
    tf32: round the inputs of float32 products to 11 bits. Faster, but outside the limits of fp32 parity.
    compute_capabilities: trt-rtx only: the GPUs to build for, such as 89; empty for Ampere and later.
    timing_cache: trt only: a file that keeps measurements for later builds.
    version_compatible, hardware_compatibility: trt only: make an engine for later releases, for other GPUs.
    weight_streaming: keep weights in host memory and stream them, for models larger than the GPU's memory.
    refittable: trt only: allow weights to be replaced without another build.
    plugins: trt only: what runs custom operators. "auto": plugins where there are any, and function bodies elsewhere,
    and the standard operator Attention where TensorRT makes one kernel of it (`attention_form`); "require": plugins
    only, fail where a body would be used; "never": bodies only, for comparisons.
    """

    target: str
    profiles: tuple[Profile, ...]
    optimization_level: int | None = None
    workspace_bytes: int | None = None
    tf32: bool = False
    compute_capabilities: tuple[int, ...] = ()
    timing_cache: Path | None = None
    version_compatible: bool = False
    hardware_compatibility: Literal["none", "ampere+", "same-compute-capability"] = "none"
    weight_streaming: bool = False
    refittable: bool = False
    plugins: Literal["auto", "require", "never"] = "auto"

    def __post_init__(self) -> None:
        check_target(self.target)
        require(bool(self.profiles), f"an engine needs at least one profile, such as {EXAMPLE}")
        level = self.optimization_level
        require(level is None or 0 <= level <= 5, f"the optimisation level is {level}; expected 0 to 5")
        workspace = self.workspace_bytes
        require(workspace is None or workspace >= 1, f"the workspace is {workspace} bytes; expected at least 1")
        require(
            self.hardware_compatibility in HARDWARE_COMPATIBILITIES,
            f"unknown hardware compatibility {self.hardware_compatibility!r}; expected one of: "
            f"{', '.join(HARDWARE_COMPATIBILITIES)}",
        )
        require(
            self.plugins in PLUGIN_CHOICES,
            f"plugins is {self.plugins!r}; expected one of: {', '.join(PLUGIN_CHOICES)}",
        )
        if self.target == "trt":
            require(
                not self.compute_capabilities,
                "an engine of target trt is built for the GPU of this machine; for other GPUs use --target trt-rtx, "
                "or hardware_compatibility = 'ampere+' for Ampere and later",
            )
            return
        for name, given in self._trt_only().items():
            reason = "whose engines run on several GPUs and are tuned where they run"
            if name == "--plugins":
                reason = "because TensorRT-RTX has no plugins"
            require(not given, f"{name} does not apply to target trt-rtx, {reason}; leave it out, or use --target trt")
        for number in self.compute_capabilities:
            require(
                number in RTX_COMPUTE_CAPABILITIES,
                f"TensorRT-RTX does not build for SM {number}; expected some of: "
                f"{', '.join(map(str, RTX_COMPUTE_CAPABILITIES))}. For other GPUs use --target trt on such a machine",
            )

    def _trt_only(self) -> dict[str, bool]:
        """The options that only target trt has, as users name them, and whether each was given."""
        defaults = {field.name: field.default for field in fields(self)}
        return {
            f"--{name.replace('_', '-')}" if name in WITH_FLAG else name: getattr(self, name) != defaults[name]
            for name in OWN_OPTIONS["trt"]
        }

    def options(self) -> dict[str, Any]:
        """All options except target and profiles, ready for JSON."""
        values = {name: getattr(self, name) for name in (field.name for field in fields(self))}
        del values["target"], values["profiles"]
        values["compute_capabilities"] = list(self.compute_capabilities)
        values["timing_cache"] = str(self.timing_cache) if self.timing_cache else None
        return values


def options_of_others(target: str) -> frozenset[str]:
    """The names of the options that only other targets have."""
    return frozenset(name for other, names in OWN_OPTIONS.items() if other != target for name in names)


def check_target(target: str) -> None:
    known = tuple(ENGINE_RUNTIMES)
    require(
        target in known,
        f"unknown target {target!r}{did_you_mean(target, (*known, 'none'))} Expected: {', '.join(known)} or none",
    )
