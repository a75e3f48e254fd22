"""Requests for a build and for a refit, as options, flags or arguments name them; a refit becomes a build."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.artifact import ARTIFACT_FOLDER, MANIFEST, MODEL, Artifact, files_of_folder
from effexport.base.environment import versions
from effexport.base.errors import EngineWarning, StageError, UserError
from effexport.base.formatting import bytes_from_text, command_line
from effexport.base.option_fields import given, optional_path, options_of
from effexport.base.quiet import quiet
from effexport.base.records import read_toml
from effexport.base.runtimes import ENGINE_RUNTIMES, engine_name
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
from effexport.export.module_source import check_memory, weights_digest
from effexport.export.onnx_graph import graph_inputs, operators_of_model, why_not_readable
from effexport.models.attention_spec import field_names
from effexport.models.checkpoints.spec import check_weights_file
from effexport.models.contract import ModelContract
from effexport.models.sources import (
    OF_OPTIONS,
    ModelSource,
    loaded_module,
    source_from_path,
    source_from_user,
    source_of_new_weights,
)
from effexport.models.validation import did_you_mean, require, shown_name
from effexport.models.variants import ATTENTION_SPECS
from effexport.options import BuildOptions, EngineOptions, SpecOptions
from effexport.tensorrt.engine_from_onnx import spec_of_engine, why_not_renewed
from effexport.tensorrt.sidecar import read_sidecar
from effexport.tensorrt.spec import EngineSpec, check_target, options_of_others, profiles_from_texts
from effexport.text.attaching import TokenizerSource, tokenizer_of_build

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from effexport.proof.rebuilt_module import NamedModule


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


# Characters of a node in a message.
LONGEST_NODE = 120
# How notes begin that are about one build and not about the model.
REFITTED = "refitted from"
LEFT_OUT = "left out:"
OF_ONE_BUILD = (REFITTED, LEFT_OUT, "--trace:")


@dataclass(frozen=True)
class RefitRequest:
    """An artifact and where its new weights come from; one of `weights`, `checkpoint` and `named` is given.

    named: of an artifact that came from a module of the user's own, the module with the new weights. output: the folder
    to write; None replaces the artifact. force: whether another artifact at `output` is replaced.
    """

    artifact: Artifact
    weights: Path | None = None
    checkpoint: Path | None = None
    output: Path | None = None
    force: bool = False
    named: NamedModule | None = None

    @property
    def place(self) -> Path:
        """The folder to write."""
        return self.artifact.path if self.output is None else self.output

    @property
    def replaces(self) -> bool:
        """True if an existing folder may be replaced."""
        return self.force or self.output is None

    def resolve(self) -> tuple[ModelSource, list[EngineSpec]]:
        """The source of the module, with notes for the report, and the engines to rebuild.

        An engine that cannot be rebuilt on this machine is left out: a note says so, and an EngineWarning.
        Raises UserError and SpecError for weights that cannot fit and folders that may not be written.
        """
        self.check_output()
        source = source_for_artifact(self.artifact, self.weights, self.checkpoint, self.named)
        given = self.weights or self.checkpoint
        if given is not None and given.resolve().is_relative_to(self.place.resolve()):
            raise UserError(f"{given} lies in {self.place}, which is to be replaced; move it out, or choose another -o")
        engines, left_out = engines_of_artifact(self.artifact)
        for note in left_out:
            warnings.warn(note, EngineWarning, stacklevel=2)
        # those of a module are in its spec, or are found again
        notes = [] if self.named else [n for n in self.artifact.manifest.notes if not n.startswith(OF_ONE_BUILD)]
        return replace(source, notes=(*notes, *left_out)), engines

    def check_output(self) -> None:
        """Refuse, before any work, a folder that may not be written or that lies in the artifact. Raises UserError."""
        place, old = self.place.resolve(), self.artifact.path.resolve()
        if place != old and place.is_relative_to(old):
            raise UserError(f"{self.place} would change the artifact {old}; choose a folder outside it with -o")
        ARTIFACT_FOLDER.check(self.place, force=self.replaces)
        others = files_of_folder(old).keys() - self.artifact.manifest.files.keys() - {MANIFEST}
        if self.output is None and others:
            raise UserError(
                f"{old} also holds {min(others)}, which refitting in place would remove; move it out, or write another "
                "artifact with -o"
            )


def refit_note(previous: Artifact, origin: str, weights_sha256: str) -> str:
    """The sentence by which a report says where its graphs are from. origin: of the new weights."""
    name, old = previous.path.resolve().name, previous.manifest.weights_sha256
    return f"{REFITTED} {name} (weights sha256 {old[:12]}…) with {origin}, weights sha256 {weights_sha256}"


def source_for_artifact(
    artifact: Artifact, weights: Path | None, checkpoint: Path | None, named: NamedModule | None
) -> ModelSource:
    """The source of the module with the new weights. Raises UserError and SpecError for weights that cannot fit."""
    model = artifact.spec.model
    wanted = model.new_weights.format(origin=artifact.manifest.weights_from, variant=model.attention.variant)
    if model.why_not_alone and (named is None or checkpoint is not None):
        raise UserError(f"{artifact.path} {wanted}")
    record = artifact.manifest.quantization
    if record is not None and (record.scales == "static" or record.smooth is not None or record.max_loss is not None):
        raise UserError(
            f"{artifact.path} is quantised by what samples said about its weights, and these would be others; build it "
            "again with effexport build and --calibration"
        )
    if named is not None:
        return other_than_before(artifact, named.source_for(artifact))
    if (weights is None) == (checkpoint is None):
        raise UserError("expected new weights as either --weights FILE or --checkpoint DIR")
    path = {"--weights": weights, "--checkpoint": checkpoint}[model.weights_option]
    if path is None:
        raise UserError(f"{artifact.path} {wanted}")
    source = source_of_new_weights(path, model)
    check_architecture(artifact, source.contract, path)
    return other_than_before(artifact, source)


def check_architecture(artifact: Artifact, found: ModelContract, path: Path) -> None:
    """Raise UserError unless config.json of a checkpoint, with the options of the build, describes the artifact."""
    model = artifact.spec.model
    if found == model:
        return
    if found.family != model.family:
        raise UserError(f"{path} is a {found.family}; {artifact.path} was built from a {model.family}")
    old, new = model.to_dict(), found.to_dict()
    differ = ", ".join(f"{name} is {new[name]!r}, not {old[name]!r}" for name in old if old[name] != new[name])
    raise UserError(
        f"{path} is of another architecture than {artifact.path}: {differ}; export it with: "
        f"{command_line('effexport', 'build', '--checkpoint', path)}"
    )


def other_than_before(artifact: Artifact, source: ModelSource) -> ModelSource:
    """A source of weights that refuses those that the artifact has already."""

    def make(contract: ModelContract, seed: int) -> nn.Module:
        module = source.make(contract, seed)
        if weights_digest(module) == artifact.manifest.weights_sha256:
            named = source.path or source.origin
            raise UserError(f"{named} holds the weights that {artifact.path} has already; expected other ones")
        return module

    return replace(source, make=make)


def engines_of_artifact(artifact: Artifact) -> tuple[list[EngineSpec], list[str]]:
    """The engines that can be made again on this machine, and a sentence on each of the others."""
    specs, left_out = [], []
    for target in dict.fromkeys(engine.target for engine in artifact.manifest.engines):
        # the engines of a decode step and a prefill have the spec of the model's
        spec = spec_of_engine(read_sidecar(artifact.engine_path(target)))
        reason = why_not_renewed(spec)
        if reason:
            name = engine_name(target)
            left_out.append(f"{LEFT_OUT} {name}: it has the old weights and cannot be made again here: {reason}")
        else:
            specs.append(spec)
    return specs, left_out


@contextmanager
def held_to_previous(previous: Artifact | None, source: ModelSource, model: Path, traced: Path) -> Iterator[None]:
    """Raise UserError if the graph that is written in the block is of another architecture than that of the artifact
    whose user's own module gets other weights."""
    try:
        yield
    except StageError:
        check_same_graph(previous, source, model, traced)
        raise
    check_same_graph(previous, source, model, traced)


def check_same_graph(previous: Artifact | None, source: ModelSource, model: Path, traced: Path) -> None:
    """The error of `held_to_previous`, as far as something was written."""
    from effexport.export.traced_graphs import read_traced

    if previous is None or previous.spec.model.has_whole_state:
        return
    problem = ""
    old, new = (read_traced(path, MODEL) for path in (previous.traced_path, traced))
    if old is not None and new is not None:
        here, there = versions(), previous.manifest.environment
        whole = all(here[name] == there.get(name) for name in ("effexport", "torch", "onnxscript"))
        problem = why_other_graph(old, new, whole=whole)
    if not problem and model.is_file() and (found := operators_of_model(model)) != previous.spec.custom_ops:
        problem = f"it calls the operators {found}; the artifact has {previous.spec.custom_ops}"
    if problem:
        raise UserError(other_architecture(source, previous, problem))


def other_architecture(source: ModelSource, previous: Artifact, problem: str) -> str:
    build = "export it with effexport build --module"
    return f"{source.origin} is of another architecture than {previous.path}: {problem}; {build}"


def why_other_graph(old: bytes, new: bytes, *, whole: bool) -> str:
    """The difference of two graphs of a user's own module, see `graph_without_numbers`; "" if there is none.

    whole: whether the nodes are compared, too: another release of PyTorch may write others for the same code. Raises
    UserError for a first graph, which may come from anybody, that is not a graph.
    """
    import onnx
    from google.protobuf.message import DecodeError

    from effexport.export.traced_graphs import REMEDY

    try:
        models = [onnx.ModelProto.FromString(graph) for graph in (old, new)]
        problem = why_not_readable(models[0])
    except DecodeError:
        problem = "it is not an ONNX model"
    if problem:
        raise UserError(f"a traced graph of the artifact is damaged: {problem}; {REMEDY}")
    weights = [{tensor.name: tensor for tensor in graph_inputs(model)} for model in models]
    for name in dict.fromkeys([*weights[0], *weights[1]]):
        before, now = (str(table.get(name, f"no {name}")) for table in weights)
        if now != before:
            return f"it has {now}; the artifact has {before}"
    if not whole or old == new:
        return ""
    for steps in itertools.zip_longest(*(map(node_text, model.graph.node) for model in models), fillvalue="none"):
        if steps[0] != steps[1]:
            expected, own = (f"{text[:LONGEST_NODE]}{'…' * (len(text) > LONGEST_NODE)}" for text in steps)
            return f"its graph has the step {own}; the artifact has {expected}"
    constants = [[(t.name, t.data_type, list(t.dims)) for t in model.graph.initializer] for model in models]
    return "" if constants[0] == constants[1] else "the constants in its graph have other shapes"


def node_text(node: onnx.NodeProto) -> str:
    """A node as ONNX writes it: `y = Relu (x)`."""
    from onnx.printer import to_text

    text: str = to_text(node).strip()
    return text.removeprefix(f"[{node.name}] ")
