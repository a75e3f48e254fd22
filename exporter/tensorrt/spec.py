"""The engine to build: optimisation profiles, target, and options of the builder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from effexport.base.errors import UserError
from effexport.base.runtimes import ENGINE_RUNTIMES, REBUILD_ENGINE, Runtime
from effexport.models.encoder.spec import MASKS
from effexport.models.size_formula import shape_of
from effexport.models.validation import LARGEST_SIZE, SpecError, check_type, did_you_mean, require

if TYPE_CHECKING:
    from effexport.base.dtypes import TensorInfo
    from effexport.base.spec import BuildSpec
    from effexport.tensorrt.sidecar import EngineInfo, Shape, ShapeRange


# The dimensions that a profile sets; all others of a model are numbers.
PROFILE_DIMS = ("batch", "seq", "choices", MASKS)
# Room for small batches if --profile does not set the batch size.
DEFAULT_MAX_BATCH = 4
DEFAULT_CHOICES = 4
# Tokens to predict in a sequence, and their most.
DEFAULT_MASKS, DEFAULT_MAX_MASKS = 4, 32
EXAMPLE = "--profile batch=1:4:16,seq=128:1024:4096"


@dataclass(frozen=True)
class Range:
    """The sizes of one dimension: from `min` to `max`, tuned for `opt`."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        require(self.max <= LARGEST_SIZE, f"the range {self} ends at {self.max}; expected at most {LARGEST_SIZE}")
        require(self.min >= 1, f"the range {self} begins at {self.min}; expected at least 1")
        require(
            self.min <= self.opt <= self.max, f"the range {self} is out of order; expected min:opt:max, such as 1:4:16"
        )

    def __str__(self) -> str:
        return f"{self.min}:{self.opt}:{self.max}"

    def __iter__(self) -> Iterator[int]:
        return iter((self.min, self.opt, self.max))


@dataclass(frozen=True)
class Profile:
    """The sizes that an engine accepts, by the names of the dynamic dimensions of the model: "batch", "seq"."""

    ranges: Mapping[str, Range]

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.ranges.items())

    def shapes(self, inputs: Sequence[TensorInfo]) -> dict[str, ShapeRange]:
        """Smallest, optimal and largest shape of every input.

        Raises SpecError for an input with a dynamic dimension that the profile does not set.
        """
        return {tensor.name: self._shape(tensor) for tensor in inputs}

    def _shape(self, tensor: TensorInfo) -> ShapeRange:
        sizes = []
        for dim in tensor.dims:
            require(
                isinstance(dim, int) or dim in self.ranges,
                f"the dimension {dim!r} of {tensor} has no range in the profile {self}",
            )
            sizes.append((dim, dim, dim) if isinstance(dim, int) else tuple(self.ranges[dim]))
        smallest, optimum, largest = (tuple(size[i] for size in sizes) for i in range(3))
        return smallest, optimum, largest


def profile_from_shapes(inputs: Sequence[TensorInfo], shapes: Mapping[str, ShapeRange]) -> Profile:
    """The inverse of `Profile.shapes`. A dimension without a name is called "input[axis]"."""
    ranges: dict[str, Range] = {}
    for tensor in inputs:
        sizes = zip(*shapes[tensor.name], strict=True)
        for dim, (smallest, optimum, largest) in zip(dim_names(tensor), sizes, strict=True):
            if dim is not None:
                ranges.setdefault(dim, Range(smallest, optimum, largest))
    return Profile(ranges)


def dim_names(tensor: TensorInfo) -> list[str | None]:
    """The names of the dynamic dimensions of a tensor; None for the others."""
    return [
        None if isinstance(dim, int) else f"{tensor.name}[{axis}]" if dim == "?" else dim
        for axis, dim in enumerate(tensor.dims)
    ]


class Profiles:
    """The sizes that an engine accepts, by the names of its dynamic dimensions.

    Raises UserError for a sidecar whose profiles are not of its inputs.
    """

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        try:
            self._profiles = [profile_from_shapes(info.inputs, shapes) for shapes in info.profiles]
        except (KeyError, ValueError, SpecError) as error:
            raise UserError(f"the profiles of an engine do not fit its inputs: {error}; {REBUILD_ENGINE}") from error

    def sizes(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """The sizes of the dynamic dimensions in the shapes of all inputs."""
        return {
            dim: size
            for tensor in self._info.inputs
            for dim, size in zip(dim_names(tensor), shapes[tensor.name], strict=True)
            if dim is not None
        }

    def index(self, sizes: Mapping[str, int]) -> int | None:
        """The first profile that covers these sizes; None if none does."""
        for index, profile in enumerate(self._profiles):
            if all(size.min <= sizes[dim] <= size.max for dim, size in profile.ranges.items()):
                return index
        return None

    def covering(self, shapes: Mapping[str, Shape]) -> int:
        """The first profile that covers the shapes of all inputs. Raises UserError if none does."""
        given = self.sizes(shapes)
        found = self.index(given)
        if found is not None:
            return found
        sizes = ", ".join(f"{dim} {size}" for dim, size in given.items())
        profiles = "; or ".join(
            ", ".join(f"{dim} {size.min} to {size.max}" for dim, size in profile.ranges.items())
            for profile in self._profiles
        )
        flag = ",".join(f"{dim}=1:{size}:{size}" for dim, size in given.items())
        raise UserError(
            f"the inputs have {sizes}; this engine was built for {profiles}: build it again with a profile that covers "
            f"them, such as --profile {flag}"
        )

    def largest_shapes(self) -> dict[str, Shape]:
        """Per tensor, the shape in any profile that takes the most memory.

        Without outputs that have a dimension which no input has: only a run shows its size.
        """
        largest: dict[str, Shape] = {}
        for profile, shapes in zip(self._profiles, self._info.profiles, strict=True):
            sizes = {dim: size.max for dim, size in profile.ranges.items()}
            for tensor in (*self._info.inputs, *self._info.outputs):
                shape = shapes[tensor.name][2] if tensor.name in shapes else resolved(tensor, sizes)
                if shape is not None and math.prod(shape) > math.prod(largest.get(tensor.name, (0,))):
                    largest[tensor.name] = shape
        return largest


def resolved(tensor: TensorInfo, sizes: Mapping[str, int]) -> Shape | None:
    """The shape of a tensor for these sizes; None with a dimension that no input has, or a name of other tools."""
    try:
        return shape_of(tensor.dims, sizes)
    except (KeyError, SpecError):
        return None


def profiles_from_texts(texts: Sequence[str], spec: BuildSpec) -> tuple[Profile, ...]:
    """The profiles that --profile asks for: `batch=min:opt:max,seq=min:opt:max`, one dimension or more in each text.

    Naming a dimension again begins another profile; a dimension that is left out has the range of `default_profile`.
    Raises SpecError for anything else, and for sizes that the model does not support.
    """
    groups: list[dict[str, Range]] = []
    for text in texts:
        for name, size in parse_profile(text).items():
            if not groups or name in groups[-1]:
                groups.append({})
            groups[-1][name] = size
    default = default_profile(spec)
    profiles = tuple(Profile({**default.ranges, **group}) for group in groups) or (default,)
    for profile in profiles:
        check_profile(profile, spec)
    return profiles


def parse_profile(text: str) -> dict[str, Range]:
    """`batch=1:4:16,seq=512` → ranges by dimension; one number stands for all three."""
    ranges: dict[str, Range] = {}
    for part in text.split(","):
        name, equals, sizes = (word.strip() for word in part.partition("="))
        require(bool(equals), f"cannot read the profile {text!r}; expected dimension=min:opt:max, such as {EXAMPLE}")
        require(
            name in PROFILE_DIMS,
            f"the profile {text!r} names the dimension {name!r}{did_you_mean(name, PROFILE_DIMS)} "
            f"Expected: {', '.join(PROFILE_DIMS)}",
        )
        require(name not in ranges, f"the profile {text!r} names {name} twice")
        numbers = sizes.split(":")
        require(
            len(numbers) in (1, 3) and all(number.isdecimal() for number in numbers),
            f"cannot read the range {sizes!r} of {name}; expected min:opt:max, such as 1:4:16, or one number for all",
        )
        ranges[name] = Range(*(int(number) for number in (numbers * 3 if len(numbers) == 1 else numbers)))
    return ranges


def default_profile(spec: BuildSpec) -> Profile:
    """The profile without --profile: tuned for the batch and length of the spec, for batches up to 4 and lengths up to
    the model's longest, or to 1.5 times the exported length if the model has no limit."""
    fixed, seq_len = spec.model.fixed_seq_len, spec.model.seq_len
    longest = spec.model.max_seq_len or seq_len + seq_len // 2
    seq = Range(fixed, fixed, fixed) if fixed else Range(spec.model.shortest, min(seq_len, longest), longest)
    ranges = {"batch": Range(1, spec.batch, max(spec.batch, DEFAULT_MAX_BATCH)), "seq": seq}
    if "choices" in dynamic_dims(spec):
        ranges["choices"] = Range(1, DEFAULT_CHOICES, DEFAULT_CHOICES)
    if MASKS in dynamic_dims(spec):
        ranges[MASKS] = Range(1, min(DEFAULT_MASKS, seq.max), min(DEFAULT_MAX_MASKS, seq.max))
    # axes that a user's own module has beside these
    own, lowest = spec.model.axis_sizes, spec.model.lowest
    ranges |= {axis: Range(lowest.get(axis, 1), size, size) for axis, size in own.items()}
    return Profile({name: size for name, size in ranges.items() if name in dynamic_dims(spec)})


def within(profile: Profile, spec: BuildSpec) -> Profile:
    """A profile without the sizes that the model does not take, which an export may have found after it was made."""
    limits = {axis: (size, LARGEST_SIZE) for axis, size in spec.model.lowest.items()}
    limits["seq"] = (spec.model.shortest, spec.model.max_seq_len or LARGEST_SIZE)
    ranges = {
        axis: Range(*(min(max(size, limits[axis][0]), limits[axis][1]) for size in sizes)) if axis in limits else sizes
        for axis, sizes in profile.ranges.items()
    }
    return Profile(ranges)


def dynamic_dims(spec: BuildSpec) -> list[str]:
    """Names of the dimensions of a model's inputs that a profile sets, in order."""
    return list(dict.fromkeys(dim for tensor in spec.inputs for dim in tensor.dims if isinstance(dim, str)))


def check_profile(profile: Profile, spec: BuildSpec) -> None:
    """Raises SpecError for sizes that the model does not support: beyond its longest, or not its only length."""
    dims = dynamic_dims(spec)
    fixed, longest = spec.model.fixed_seq_len, spec.model.max_seq_len
    seq = profile.ranges.get("seq")
    if fixed is not None and seq is not None:
        rule = spec.attention.why_fixed
        raise SpecError(
            f"the profile has seq={seq}, but this model takes sequences of {fixed} tokens and no others"
            f"{', because ' * bool(rule)}{rule}; leave seq out of --profile"
        )
    for name in profile.ranges:
        require(
            name in dims,
            f"the profile sets {name}, but the dynamic dimensions of this model are: {', '.join(dims) or 'none'}",
        )
    if seq is not None and longest is not None:
        require(
            seq.max <= longest,
            f"the profile has seq={seq}, but this model has positions for {longest} tokens; expected a maximum of at "
            f"most {longest}: lower it, or build with a larger --seq-len",
        )


def profile_remarks(profiles: Sequence[Profile], spec: BuildSpec) -> list[str]:
    """Remarks on lengths that waste time because the model pads them to whole chunks."""
    chunk = spec.attention.pad_multiple
    remarks = []
    for profile in profiles:
        seq = profile.ranges.get("seq")
        if seq is None or seq.opt % chunk == 0 or seq.opt < chunk:
            continue
        whole = -(-seq.opt // chunk) * chunk
        remarks.append(
            f"the profile {profile} is tuned for {seq.opt} tokens, which {spec.attention.variant} pads to {whole}, a "
            f"multiple of its chunk of {chunk}: sequences of {whole} tokens take no longer"
        )
    return remarks


# The GPUs that TensorRT-RTX accepts as a target. It does not accept SM 90 and SM 100.
RTX_COMPUTE_CAPABILITIES = (75, 80, 86, 89, 120, 121)
# Options of one target that are on the command line; spec files have the others.
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
        for field in fields(self):
            if str(field.type).startswith("Literal"):
                check_type(field.name, getattr(self, field.name), str(field.type))
        if self.row.built_where_it_runs:
            require(
                not self.compute_capabilities,
                "an engine of target trt is built for the GPU of this machine; for other GPUs use --target trt-rtx, "
                "or hardware_compatibility = 'ampere+' for Ampere and later",
            )
            return
        others = options_of_others(self.target)
        for name in (one.name for one in fields(self) if one.name in others and getattr(self, one.name) != one.default):
            reason = "whose engines run on several GPUs and are tuned where they run"
            if name == "plugins":
                reason = "because TensorRT-RTX has no plugins"
            given = f"--{name.replace('_', '-')}" if name in WITH_FLAG else name
            raise SpecError(f"{given} does not apply to target trt-rtx, {reason}; leave it out, or use --target trt")
        for number in self.compute_capabilities:
            require(
                number in RTX_COMPUTE_CAPABILITIES,
                f"TensorRT-RTX does not build for SM {number}; expected some of: "
                f"{', '.join(map(str, RTX_COMPUTE_CAPABILITIES))}. For other GPUs use --target trt on such a machine",
            )

    @property
    def row(self) -> Runtime:
        """The target's row of the table of runtimes."""
        return ENGINE_RUNTIMES[self.target]

    def options(self) -> dict[str, Any]:
        """All options except target and profiles, ready for JSON."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("target", "profiles")}
        cache = str(self.timing_cache) if self.timing_cache else None
        return values | {"compute_capabilities": list(self.compute_capabilities), "timing_cache": cache}


def options_of_others(target: str) -> frozenset[str]:
    """The names of the options that only other targets have."""
    return frozenset(name for other, row in ENGINE_RUNTIMES.items() if other != target for name in row.engine_options)


def check_target(target: str) -> None:
    known = tuple(ENGINE_RUNTIMES)
    require(
        target in known,
        f"unknown target {target!r}{did_you_mean(target, (*known, 'none'))} Expected: {', '.join(known)} or none",
    )
