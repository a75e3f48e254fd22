"""The options of `effexport build` that ask for TensorRT engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.commands._types import OneOf
from effexport.runtimes import ENGINE_RUNTIMES
from effexport.tensorrt.spec import HARDWARE_COMPATIBILITIES, PLUGIN_CHOICES
from effexport.units import bytes_from_text

if TYPE_CHECKING:
    from effexport.spec import BuildSpec
    from effexport.tensorrt.spec import EngineSpec

_OPTIONS = (
    click.option(
        "--target",
        "targets",
        type=OneOf((*ENGINE_RUNTIMES, "none")),
        multiple=True,
        help="Also build a TensorRT engine; trt-rtx needs no GPU; default: none. Repeatable: an option that only one "
        "target has is for that one.",
    ),
    click.option(
        "--profile",
        "profiles",
        multiple=True,
        metavar="DIM=MIN:OPT:MAX,…",
        help="Sizes that the engine accepts (MIN to MAX) and is tuned for (OPT), such as "
        "batch=1:4:16,seq=128:1024:4096. Repeatable; naming a dimension again starts another profile.",
    ),
    click.option(
        "--optimization-level",
        type=int,
        help="How long TensorRT searches for fast kernels, 0 to 5; default: TensorRT's own.",
    ),
    click.option(
        "--workspace",
        metavar="SIZE",
        help="Most scratch memory on the GPU, such as 500MB (10^6 bytes) or 2GiB (2^30); default: all of it.",
    ),
    click.option("--tf32/--no-tf32", default=False, help="Allow TF32 in float32 matrix products (off by default)."),
    click.option(
        "--compute-capabilities",
        metavar="SM,…",
        help="trt-rtx: compute capabilities to build for, such as 86,89; default: SM 80 and later.",
    ),
    click.option(
        "--timing-cache",
        type=click.Path(path_type=Path),
        help="trt: file of measured kernel times, which makes the next build faster.",
    ),
    click.option(
        "--version-compatible", is_flag=True, help="trt: build an engine that later TensorRT releases can load."
    ),
    click.option(
        "--hardware-compatibility",
        type=OneOf(HARDWARE_COMPATIBILITIES),
        default="none",
        help="trt: other GPUs that can run the engine; default: none.",
    ),
    click.option(
        "--weight-streaming",
        is_flag=True,
        help="Keep the weights in host memory, for models that do not fit into GPU memory.",
    ),
    click.option("--refittable", is_flag=True, help="trt: allow replacing the weights without a rebuild."),
    click.option(
        "--plugins",
        type=OneOf(PLUGIN_CHOICES),
        default="auto",
        help="trt: plugins for custom operators where possible, and Attention where TensorRT fuses it (auto), or "
        "plugins only, failing with the reason where there is none (require), or function bodies only (never); "
        "default: auto.",
    ),
    click.option("--require-plugins", "plugins", flag_value="require", help="trt: the same as --plugins require."),
)


# The options as click names them; most are fields of EngineSpec.
ENGINE_FLAGS = (
    *("targets", "profiles", "optimization_level", "workspace", "tf32", "compute_capabilities", "timing_cache"),
    *("version_compatible", "hardware_compatibility", "weight_streaming", "refittable", "plugins"),
)


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add all engine options to a command; `engines_from_flags` reads their values."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def engines_from_flags(flags: dict[str, Any], spec: BuildSpec) -> tuple[EngineSpec, ...]:
    """One engine for each target. flags: the values of ENGINE_FLAGS.

    With several targets, an option that only one of them has is for that one.
    Raises SpecError for what cannot be built, and for options without a target.
    """
    from effexport.models.validation import require
    from effexport.tensorrt.spec import EngineSpec, check_target, options_of_others, profiles_from_texts

    options = {name: value for name, value in flags.items() if name != "targets"}
    targets = [target for target in dict.fromkeys(flags["targets"]) if target != "none"]
    for target in targets:
        check_target(target)
    given = [name for name, value in options.items() if value not in (None, False, (), "none", "auto")]
    words = ["--profile" if name == "profiles" else f"--{name.replace('_', '-')}" for name in given]
    require(
        bool(targets) or not given,
        f"{', '.join(words)}: only for engines, and none was requested; add --target trt-rtx or --target trt",
    )
    if not targets:
        return ()
    options["profiles"] = profiles_from_texts(options["profiles"], spec)
    workspace = options.pop("workspace")
    options["workspace_bytes"] = None if workspace is None else bytes_from_text(workspace, "--workspace")
    options["compute_capabilities"] = numbers_from_text(options["compute_capabilities"])

    def options_for(target: str) -> dict[str, Any]:
        others = options_of_others(target) if len(targets) > 1 else frozenset()
        return {name: value for name, value in options.items() if name not in others}

    return tuple(EngineSpec(target=target, **options_for(target)) for target in targets)


def numbers_from_text(text: str | None) -> tuple[int, ...]:
    """`86,89` or `8.6,8.9` → (86, 89). Raises SpecError for anything else."""
    from effexport.models.validation import require

    if text is None:
        return ()
    words = [word.strip().lower().removeprefix("sm").removeprefix("_").replace(".", "") for word in text.split(",")]
    require(
        all(word.isdecimal() for word in words),
        f"cannot read the compute capabilities {text!r}; expected numbers such as 86,89",
    )
    return tuple(dict.fromkeys(int(word) for word in words))
