"""A request to refit an artifact, as flags or arguments name it: `effexport refit` turns it into a build."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.artifact import ARTIFACT_FOLDER, MANIFEST, MODEL, Artifact, files_of_folder
from effexport.base.environment import versions
from effexport.base.errors import EngineWarning, StageError, UserError
from effexport.base.formatting import command_line
from effexport.base.runtimes import engine_name
from effexport.export.module_source import weights_digest
from effexport.export.onnx_graph import graph_inputs, operators_of_model, why_not_readable
from effexport.models.contract import ModelContract
from effexport.models.sources import ModelSource, source_of_new_weights
from effexport.tensorrt.engine_from_onnx import spec_of_engine, why_not_renewed
from effexport.tensorrt.sidecar import read_sidecar
from effexport.tensorrt.spec import EngineSpec

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from effexport.proof.named_module import NamedModule

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
