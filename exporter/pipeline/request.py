"""A request for a build, as its options name it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.base.errors import UserError
from effexport.base.formatting import bytes_from_text
from effexport.base.option_fields import given, optional_path, options_of
from effexport.base.quiet import quiet
from effexport.base.records import read_toml
from effexport.base.runtimes import ENGINE_RUNTIMES
from effexport.base.spec import (
    INDEPENDENT,
    VARIANT_OPTIONS,
    BuildSpec,
    SpecFile,
    build_spec_from_checkpoint,
    build_spec_from_module,
    build_spec_from_options,
    read_spec_file,
)
from effexport.export.module_source import check_memory
from effexport.models.attention_spec import field_names
from effexport.models.checkpoints.spec import check_weights_file
from effexport.models.sources import OF_OPTIONS, ModelSource, loaded_module, source_from_path, source_from_user
from effexport.models.validation import did_you_mean, require, shown_name
from effexport.models.variants import ATTENTION_SPECS
from effexport.options import BuildOptions, EngineOptions, SpecOptions
from effexport.tasks.texts import TokenizerSource, tokenizer_of_build
from effexport.tensorrt.spec import EngineSpec, check_target, options_of_others, profiles_from_texts

if TYPE_CHECKING:
    from torch import nn

# Of --target.
NO_ENGINE = "none"
NOTHING_TO_EXPORT = (
    "nothing to export is given; expected one of:",
    "  --module MODULE:FUNCTION  a model of your own",
    "  --checkpoint DIR          a trained BigBird, LED, Longformer, ModernBERT, Nyströmformer, Reformer",
    f"  --variant NAME            an encoder of ours: {', '.join(ATTENTION_SPECS)}",
)


@dataclass(frozen=True)
class BuildRequest:
    """The requested model: a variant, a spec, a checkpoint, or a module of the user's own.

    flags: fields of the spec; None means "not given". spec: options of a file, or a spec that needs no flags. module: a
    module, or `package.module:factory`. inputs: a TOML file that describes the inputs of the module. examples, dynamic:
    what the module was called with, and the free axes of that. tokenizer: a folder, "none", or None for that of the
    checkpoint. has_engines: an engine is asked for, too.
    """

    flags: Mapping[str, Any]
    spec: BuildSpec | SpecFile | None = None
    checkpoint: Path | None = None
    weights: Path | None = None
    module: nn.Module | str | None = None
    inputs: Path | None = None
    examples: object = None
    dynamic: Mapping[str, object] | None = None
    tokenizer: str | Path | None = None
    has_engines: bool = False

    @classmethod
    def of(cls, options: BuildOptions) -> BuildRequest:
        """The request of options. A spec file sets those that are not given, also of a checkpoint and of a module.

        Raises UserError if nothing is given, and for a file that cannot be read.
        """
        if options.spec is None and options.variant is None and options.checkpoint is None and options.module is None:
            raise UserError(*NOTHING_TO_EXPORT)
        flags = given(options, SpecOptions)
        named = {name: getattr(options, name) for name in ("variant", "task", INDEPENDENT)}
        flags |= {name: value for name, value in named.items() if value is not None}
        flags |= options.others
        spec = None if isinstance(options.spec, BuildSpec) or options.spec is None else read_spec_file(options.spec)
        if spec is not None and (options.checkpoint is not None or options.module is not None):
            flags, spec = spec.values | flags, None
        engines = (*(one for one in options.targets if one != NO_ENGINE), *options.engines)
        return cls(
            with_scales_for_engines(flags, engines),
            options.spec if isinstance(options.spec, BuildSpec) else spec,
            optional_path("checkpoint", options.checkpoint),
            optional_path("weights", options.weights),
            options.module,
            optional_path("inputs", options.inputs),
            options.examples,
            options.dynamic,
            options.tokenizer,
            bool(engines),
        )

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """The source of the tokenizer. Raises UserError for a path that is not a folder."""
        return tokenizer_of_build(self.tokenizer, self.checkpoint)

    def resolve(self, on_stage: Callable[[str], None] = lambda name: None) -> tuple[BuildSpec, ModelSource]:
        """The spec, and where its module comes from.

        on_stage: called before a module is run to learn its spec.
        Raises SpecError and UserError for requests that contradict themselves or cannot work, and for models that this
        machine has no memory for.
        """
        spec, source = self.resolve_sizes(on_stage)
        spec = spec.decided(has_engines=self.has_engines)
        check_memory(spec)
        return spec, source

    def resolve_sizes(self, on_stage: Callable[[str], None] = lambda name: None) -> tuple[BuildSpec, ModelSource]:
        """As `resolve`, for models of any size."""
        given = [f"--{name}" for name in ("checkpoint", "weights") if getattr(self, name) is not None]
        given += ["--module"] * (self.module is not None) + ["--spec"] * (self.spec is not None)
        if self.checkpoint is not None:
            require(
                given == ["--checkpoint"],
                f"{' and '.join(given)} cannot be combined; a checkpoint includes its spec and weights",
            )
            spec, notes = build_spec_from_checkpoint(self.flags, self.checkpoint)
            return spec, source_from_path(spec.model, self.checkpoint, notes=notes)
        if self.module is not None:
            require(
                given == ["--module"],
                f"{' and '.join(given)} cannot be combined; the module includes its spec and weights",
            )
            return self.resolve_module(self.module, on_stage)
        require(self.inputs is None, "--inputs describes the inputs of a --module; without one, leave it out")
        if isinstance(self.spec, BuildSpec):
            flags = [name for name, value in self.flags.items() if value is not None]
            require(not flags, f"{', '.join(flags)} cannot be combined with a BuildSpec, which has all fields")
            return self.spec, source_from_path(self.spec.model, self.weights, OF_OPTIONS)
        require(self.flags.get("task") is None, "--task only works with --checkpoint")
        require(self.flags.get(INDEPENDENT) is None, "--independent-samples only works with --module")
        if self.weights is not None:
            check_weights_file(self.weights)
        attention = ATTENTION_SPECS.get(self.flags.get("variant", ""))
        for name in VARIANT_OPTIONS:
            applies = attention is None or name in field_names(attention) or self.flags.get(name) is None
            require(applies, f"--{name.replace('_', '-')} does not apply to {self.flags.get('variant')}")
        spec = build_spec_from_options({k: v for k, v in self.flags.items() if k != "task"}, self.spec)
        return spec, source_from_path(spec.model, self.weights, OF_OPTIONS)

    def resolve_module(self, module: nn.Module | str, on_stage: Callable[[str], None]) -> tuple[BuildSpec, ModelSource]:
        """As `resolve`, for a module. The caller's own module stays as it is."""
        from effexport.models.user.spec_from_module import Calling, model_and_spec

        found, origin, examples, dynamic = loaded_module(module)
        if not isinstance(module, str):
            examples, dynamic = self.examples, self.dynamic
        table = None
        if self.inputs is not None:
            table = read_toml(self.inputs, "inputs", "expected a TOML file with a table for each input: [inputs.x]")
            require(
                examples is None, f"--inputs {self.inputs} and example inputs of {origin} were both given; give one"
            )
        calling = Calling(examples=examples, dynamic=dynamic, table=table)
        on_stage("running the module, to see what it takes and which of its sizes are free")
        with quiet(streams=True):
            user, model = model_and_spec(found, origin, self.flags.get("seq_len"), calling)
        spec = build_spec_from_module(self.flags, model)
        return spec, source_from_user(user, spec.model, origin)


def engines_of(options: BuildOptions, spec: BuildSpec) -> tuple[EngineSpec, ...]:
    """One engine for each target. With several targets, an option that only one of them has is for that one.

    Raises SpecError for what cannot be built, and for options without a target.
    """
    targets = [target for target in dict.fromkeys(options.targets) if target != NO_ENGINE]
    for target in targets:
        check_target(target)
    values = engine_table(options.spec) | given(options, EngineOptions)
    values.pop("targets", None)
    known = options_of(EngineOptions)
    require(
        bool(targets) or not values,
        f"{', '.join((*known[name].flags, name)[0] for name in values)}: only for engines, and none was requested; add "
        "--target trt-rtx or --target trt",
    )
    if not targets:
        return ()
    require(
        spec.model.decoder is None,
        f"--target was given, and TensorRT does not run the decode step of {spec.model.title}, whose cache is empty at "
        "first; leave it out, and run the artifact in ONNX Runtime",
    )
    for target in targets:
        row, values_decide = ENGINE_RUNTIMES[target], spec.model.shapes_of_values
        require(
            not values_decide or row.shapes_of_values,
            f"--target {target} was given, and {row.label} does not run a {spec.model.title} in which {values_decide}",
        )
    values["profiles"] = profiles_from_texts(values.get("profiles", ()), spec)
    if (workspace := values.pop("workspace", None)) is not None:
        values["workspace_bytes"] = bytes_from_text(str(workspace), "workspace")
    if cache := optional_path("timing_cache", values.get("timing_cache")):
        values["timing_cache"] = cache

    def options_for(target: str) -> dict[str, Any]:
        others = options_of_others(target) if len(targets) > 1 else frozenset()
        return {name: value for name, value in values.items() if name not in others}

    return tuple(EngineSpec(target=target, **options_for(target)) for target in targets)


def engine_table(spec: object) -> dict[str, Any]:
    """The table [engine] of a spec file. Raises SpecError for keys that it does not have, and for wrong values."""
    if spec is None or isinstance(spec, BuildSpec):
        return {}
    assert isinstance(spec, (str, Path, Mapping))
    table = read_spec_file(spec).engine
    known = {name: one for name, one in options_of(EngineOptions).items() if one.option.in_file}
    for name in table:
        require(name in known, f"[engine] has {shown_name(name)}{did_you_mean(name, known)} Keys: {', '.join(known)}")
    return {name: known[name].checked(value) for name, value in table.items()}


def with_scales_for_engines(flags: Mapping[str, object], targets: Sequence[object]) -> dict[str, object]:
    """The fields of a spec, with static scales for int8 engines if none were chosen: engines read no others."""
    is_open = flags.get("precision") == "int8" and flags.get("quantization") is None
    return {**flags, "quantization": "static"} if targets and is_open else dict(flags)
