"""A request for a build, as flags or arguments name it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.export.module_source import check_memory
from effexport.models.attention_spec import field_names
from effexport.models.checkpoints.spec import check_weights_file
from effexport.models.sources import OF_OPTIONS, ModelSource, loaded_module, source_from_path, source_from_user
from effexport.models.validation import require
from effexport.models.variants import ATTENTION_SPECS
from effexport.quiet import quiet
from effexport.spec import (
    INDEPENDENT,
    BuildSpec,
    build_spec_from_checkpoint,
    build_spec_from_module,
    build_spec_from_options,
)
from effexport.text.attaching import TokenizerSource, tokenizer_of_build
from effexport.toml_file import read_toml

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class BuildRequest:
    """The requested model: a variant, a spec, a checkpoint, or a module of the user's own.

    flags: fields of the spec; None means "not given". spec: a TOML file, or a spec that needs no flags. module: a
    module, or `package.module:factory`. inputs: a TOML file that describes the inputs of the module. examples, dynamic:
    what the module was called with, and the free axes of that. tokenizer: a folder, "none", or None for that of the
    checkpoint.
    """

    flags: Mapping[str, Any]
    spec: BuildSpec | Path | None
    checkpoint: Path | None
    weights: Path | None
    module: nn.Module | str | None
    inputs: Path | None = None
    examples: object = None
    dynamic: Mapping[str, object] | None = None
    tokenizer: str | Path | None = None

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
        resolved = self.resolve_sizes(on_stage)
        check_memory(resolved[0])
        return resolved

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
        for name in ("num_hashes", "pinv_init"):
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
