"""An ONNX file of any exporter beside another model: the comparison of `effexport prove`, made for `verify_artifact`.

The file and the contract of the other model are an artifact in memory, which is judged like one that was built.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from effexport.artifact import MODEL, Artifact, manifest_of_spec, open_artifact
from effexport.base.dtypes import DTYPES, UNIT_ROUNDOFF, Array, TensorInfo, numpy_dtype
from effexport.base.environment import require_torch
from effexport.base.errors import UserError
from effexport.base.quiet import quiet
from effexport.base.runtimes import engine_name
from effexport.base.spec import OPSETS, BuildSpec, Precision
from effexport.export.onnx_graph import (
    STANDARD_DOMAINS,
    all_nodes,
    all_tensors,
    graph_inputs,
    graph_outline,
    graph_tensors,
    operators_of_model,
    opset_of,
)
from effexport.models.sources import loaded_module, source_from_user
from effexport.models.user.inputs import ELEMENTS
from effexport.models.validation import near_path
from effexport.plugins.building.library import known_ops
from effexport.plugins.ops import DOMAIN
from effexport.proof.cases import Case
from effexport.proof.check import OUTSIDE, Kind, not_run
from effexport.proof.matching import (
    Match,
    Offer,
    guessed_inputs,
    kind_of,
    matched_inputs,
    matched_outputs,
    notes_on_sizes,
    offers_of,
    with_sizes_of_both,
    with_sizes_of_module,
    with_sums,
)
from effexport.proof.verify import ArtifactCandidate, Verification, verify_in_runtime
from effexport.proof.verify_artifact import ReferenceChoice, VerifyRequest
from effexport.runners.artifact_runner import OpenModel, check_precision_of_model, model_opener
from effexport.runners.options import RunOptions
from effexport.runners.runner import Closeable, FeedLimits, Runner, tensors_text

if TYPE_CHECKING:
    import onnx
    from torch import Tensor, nn

    from effexport.models.user.model import UserModel
    from effexport.models.user.spec import ModuleSpec

EXPECTED = "expected package.module:factory or file.py:factory, the folder of an artifact, or an ONNX file"
# Domains of operators that runtimes bring along.
KNOWN_DOMAINS = (*STANDARD_DOMAINS, "ai.onnx.ml", "com.microsoft", "com.ms.internal.nhwc")
# Nodes that round to 8 bits or less, in files of quantisers.
ROUNDING_OPS = ("DynamicQuantizeLinear", "QuantizeLinear", "MatMulInteger", "QLinearMatMul", "MatMulNBits")
OnStage = Callable[[str], None]
Subject = tuple[ArtifactCandidate, VerifyRequest]


@dataclass(frozen=True)
class FileArtifact(Artifact):
    """A single ONNX file, with the contract of the model that it is compared with. path: of the file."""

    @property
    def model_path(self) -> Path:
        return self.path

    def engine_path(self, target: str, model: str = MODEL) -> Path:
        """An engine in the place where an artifact has it. Raises UserError if there is none."""
        engine = self.path.parent / engine_name(target, self.path.name)
        if not engine.is_file():
            raise UserError(f"there is no {target} engine of {self.path}; expected {engine}, with its sidecar")
        return engine


@dataclass(frozen=True)
class RenamedCandidate(ArtifactCandidate):
    """A file beside the stored answers of an artifact. names: in the artifact, of inputs and outputs by those in the
    file. precision: in which the file computes."""

    names: Mapping[str, str] = field(default_factory=dict)
    precision: str = ""

    @property
    def own_precision(self) -> str:
        spec = self.artifact.spec
        # a quantised artifact's file has numbers of both; and no file is closer to the answers than these are exact
        is_own = self.precision in (spec.precision, spec.arithmetic)
        return "" if is_own or UNIT_ROUNDOFF[self.precision] < UNIT_ROUNDOFF[spec.arithmetic] else self.precision

    def check(self) -> None:
        """Raises UserError for options that the runtime does not have."""
        check_precision_of_model(self.artifact.spec, self.options)

    def verify(self, cases: Sequence[Case]) -> Verification:
        """Cases of other sizes than the file has are reported as not run."""
        spec, hashes = self.artifact.spec, self.artifact.manifest.decisions
        dims = {self.names[tensor.name]: tensor.dims for tensor in graph_inputs(graph_outline(self.path))}
        fitting, result = [], Verification()
        for case in cases:
            if all(has_sizes(case.inputs[name], own) for name, own in dims.items()):
                fitting.append(case)
            else:
                result.checks.append(not_run(Kind.SHAPES, f"this case {OUTSIDE}", case.label))
        hint = self.options.precision_hint or self.own_precision
        result += verify_in_runtime(self.path, fitting, spec, hashes, self.opener(self.options), hint)
        return result

    def opener(self, options: RunOptions) -> OpenModel:
        def open_model(model: Path | bytes, limits: FeedLimits, external_folder: Path | None) -> Runner:
            runner = model_opener(options)(model, FeedLimits(mask="", defaults={}), external_folder)
            return RenamedRunner(runner, self.names, self.artifact.spec)

        return open_model


def has_sizes(array: Array, dims: Sequence[int | str]) -> bool:
    """True if an array has the sizes of a file, which may be free."""
    fixed = [(size, dim) for size, dim in zip(array.shape, dims, strict=False) if isinstance(dim, int)]
    return array.ndim == len(dims) and all(size == dim for size, dim in fixed)


class RenamedRunner(Closeable):
    """A runner under other names of its inputs and outputs, which also takes and gives numbers of other widths.

    names: the new ones by those of the runner. spec: has the types of the new ones.
    """

    def __init__(self, runner: Runner, names: Mapping[str, str], spec: BuildSpec) -> None:
        self._runner, self._names = runner, dict(names)
        self._types = {tensor.name: tensor.dtype for tensor in (*spec.inputs, *spec.outputs)}
        self.implementation = runner.implementation
        self.inputs, self.outputs = (tuple(map(self._renamed, part)) for part in (runner.inputs, runner.outputs))

    def _renamed(self, tensor: TensorInfo) -> TensorInfo:
        name = self._names.get(tensor.name, tensor.name)
        return TensorInfo(name, self._types.get(name, tensor.dtype), tensor.dims)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        given = {}
        for tensor in self._runner.inputs:
            name = self._names.get(tensor.name, tensor.name)
            if name in feeds:
                given[tensor.name] = feeds[name].astype(numpy_dtype(tensor.dtype), copy=False)
        found = self._runner.run(given)
        renamed = {self._names.get(name, name): array for name, array in found.items()}
        return {name: self._widened(name, array) for name, array in renamed.items()}

    def run_complete(self, feeds: dict[str, Array]) -> dict[str, Array]:
        return self.run(feeds)

    def _widened(self, name: str, array: Array) -> Array:
        wanted = self._types.get(name, array.dtype.name)
        is_same_kind = kind_of(wanted) == kind_of(array.dtype.name)
        return array.astype(numpy_dtype(wanted), copy=False) if is_same_kind else array

    def close(self) -> None:
        self._runner.close()


@dataclass(frozen=True)
class ProofRequest:
    """A comparison that the user asks for. against: the other model. examples, seq_len: what it is called with."""

    model: Path
    against: nn.Module | str | Path
    examples: object
    seq_len: int | None
    trace: bool
    options: RunOptions
    on_stage: OnStage

    @property
    def name(self) -> str:
        """The other model as the user names it."""
        return str(self.against) if isinstance(self.against, str | Path) else type(self.against).__name__

    def subject(self) -> Subject:
        """The file as a candidate, and how it is compared with the other model.

        Raises UserError and SpecError for a file or a model that cannot be compared.
        """
        check_operators_known(self.model)
        candidate, request = self._subject()
        return candidate, replace(request, trace=self.trace, against=self.name)

    def _subject(self) -> Subject:
        path = Path(self.name)
        if not isinstance(self.against, str | Path):
            return subject_of_module(self, self.against)
        if path.is_dir() or path.is_file() or path.suffix == ".onnx":
            if self.examples is not None:
                raise UserError(f"examples were given, but {path} has inputs of its own; leave them out")
            return subject_of_artifact(self, path) if path.is_dir() else subject_of_file(self, path)
        if isinstance(self.against, Path) or ":" not in self.against:
            raise UserError(f"--against {path}: there is no such path{near_path(path) or ''}; {EXPECTED}")
        return subject_of_module(self, self.against)


def check_operators_known(path: Path) -> None:
    """Raise UserError for a file with operators that neither a runtime, nor the file, nor effexport defines."""
    model = graph_outline(path)
    bodies = {(function.domain, function.name) for function in model.functions}
    ours = {(DOMAIN, name) for name in known_ops()}
    unknown = dict.fromkeys(
        f"{node.domain}::{node.op_type}"
        for node in all_nodes(model)
        if node.domain not in KNOWN_DOMAINS and (node.domain, node.op_type) not in bodies | ours
    )
    if unknown:
        raise UserError(
            f"{path} has operators that nothing here can run: {', '.join(unknown)}; expected standard operators, those "
            "of onnxruntime or effexport, or a function body in the file for each: export it with bodies, or add the "
            "operators to the kernel library with effexport plugins build --ops DIR"
        )


def subject_of_artifact(asked: ProofRequest, folder: Path) -> Subject:
    """The file beside the stored answers of an artifact, without PyTorch."""
    artifact, model = open_artifact(folder), asked.model
    outline, spec = graph_outline(model), artifact.spec
    inputs = matched_inputs(model, graph_inputs(outline), offers_of(spec.inputs), str(folder))
    outputs = matched_outputs(model, graph_tensors(outline.graph.output), offers_of(spec.outputs), str(folder))
    if len(outputs.names) < len(spec.outputs):
        expected = tensors_text(spec.outputs)
        raise UserError(f"{model} returns {', '.join(outputs.names)}; {folder} has answers for {expected}")
    precision = precision_of_file(outline)
    candidate = RenamedCandidate(artifact, asked.options, model, {**inputs.names, **outputs.names}, precision)
    decisive: tuple[str, ...] = ()
    if not spec.is_quantized:  # which has limits of its own
        decisive = notes_on_file(
            outline, precision if precision in (candidate.own_precision, spec.precision) else "fp32"
        )
        if UNIT_ROUNDOFF[precision] < UNIT_ROUNDOFF[spec.precision]:
            decisive += (
                f"The answers of {folder} are in {spec.precision}, so the limits are those of {spec.precision}.",
            )
    notes = (*inputs.notes, *outputs.notes, *decisive)
    return candidate, VerifyRequest(ReferenceChoice("golden"), notes=notes)


def subject_of_file(asked: ProofRequest, other: Path) -> Subject:
    """The file beside another file, which ONNX Runtime runs in the place of a module."""
    require_torch("--against an ONNX file")
    from effexport.models.user.model import FileModule

    check_operators_known(other)
    outline, plain = graph_outline(other), RunOptions(memory_arena=False)
    runner = model_opener(plain)(other, FeedLimits(mask="", defaults={}), None)

    def run(arrays: Mapping[str, Array]) -> dict[str, Array]:
        given = {tensor.name: arrays[tensor.name].astype(numpy_dtype(tensor.dtype)) for tensor in runner.inputs}
        found = runner.run(given).items()
        return {name: array.astype(np.float32) if kind_of(array.dtype.name) == "f" else array for name, array in found}

    called = Called(FileModule(run), str(other), offers_of(runner.inputs), ranges=rows_of_tables(outline))
    return subject_of_call(asked, called, ReferenceChoice("torch", other))


def subject_of_module(asked: ProofRequest, module: nn.Module | str) -> Subject:
    """The file beside a module of the user's own, which stays as it is."""
    require_torch("--against a module")
    from effexport.models.user.inputs import by_name, is_tensor
    from effexport.models.user.model import unwrapped

    found, origin, of_factory, _ = loaded_module(module, "--against")
    found, examples = unwrapped(found), of_factory if asked.examples is None else asked.examples
    given = {} if examples is None else by_name(found, origin, examples)
    tensors = {name: value for name, value in given.items() if is_tensor(value)}
    constants = {name: value for name, value in given.items() if name not in tensors}
    offers = offers_of_examples(tensors) if tensors else offers_of_signature(found, asked.model)
    called = Called(found, origin, offers, tensors, constants)
    return subject_of_call(asked, called, ReferenceChoice("torch"))


def offers_of_examples(tensors: Mapping[str, Tensor]) -> list[Offer]:
    """The inputs of a module by its examples, whose first axes may have any size."""
    offers = []
    for name, tensor in tensors.items():
        kind = kind_of(str(tensor.dtype))
        free = min(tensor.ndim, 2 if tensor.ndim == (3 if kind == "f" else 2) else 1)
        dims = (*(f"axis {axis}" for axis in range(free)), *tensor.shape[free:])
        offers.append(Offer(name, kind, dims, is_needed=True))
    return offers


def offers_of_signature(module: nn.Module, model: Path) -> list[Offer]:
    """The inputs of a module by the arguments of `forward`; those of `**kwargs` are called as in the file."""
    parameters = inspect.signature(module.forward).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    offers = [Offer(p.name, is_needed=p.default is p.empty) for p in parameters if p.kind not in several]
    inputs = [tensor.name for tensor in graph_inputs(graph_outline(model))]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if takes_all and all(offer.name in inputs for offer in offers if offer.is_needed):
        known = {offer.name for offer in offers}
        offers += [Offer(name) for name in inputs if name not in known]
    return offers


def rows_of_tables(model: onnx.ModelProto) -> dict[str, int]:
    """The number of rows of the smallest weight that each input selects from, by input."""
    weights = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    source = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type in ("Cast", "Identity")}
    rows: dict[str, int] = {}
    for node in model.graph.node:
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        if node.op_type == "Gather" and axis == 0 and node.input[0] in weights:
            name, size = source.get(node.input[1], node.input[1]), weights[node.input[0]][0]
            rows[name] = min(size, rows.get(name, size))
    return rows


@dataclass(frozen=True)
class Called:
    """A model beside the file, and what it is called with.

    name: for messages and reports. offers: its inputs. examples, constants: by argument. ranges: how many values there
    are, by argument.
    """

    module: nn.Module
    name: str
    offers: Sequence[Offer]
    examples: Mapping[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    ranges: Mapping[str, int] = field(default_factory=dict)


def subject_of_call(asked: ProofRequest, called: Called, choice: ReferenceChoice) -> Subject:
    """The file beside a model that PyTorch calls, with the names, types and axes of the file."""
    from effexport.models.user.model import CalledAsFile, name_results
    from effexport.models.user.spec_from_module import Calling, model_and_spec

    model, outline = asked.model, graph_outline(asked.model)
    inputs, outputs = graph_inputs(outline), graph_tensors(outline.graph.output)
    arguments = matched_inputs(model, inputs, called.offers, called.name)
    examples = examples_of_file(inputs, arguments, called.examples)
    if examples:
        trial = CalledAsFile(copy.deepcopy(called.module).eval(), arguments.names)
        inputs = with_sizes_of_module(with_sums(inputs, examples), trial, called.constants, examples)
    else:
        inputs = with_sizes_of_both(inputs, arguments, called.offers)
    guesses = [
        replace(
            one,
            constants=called.constants,
            inputs=tuple(replace(i, high=called.ranges.get(arguments.names[i.name])) for i in one.inputs),
        )
        for one in guessed_inputs(inputs, arguments.names, examples)
    ]
    asked.on_stage("running the module, to see what it takes and which of its sizes are free")
    with quiet(streams=True):
        wrapped = CalledAsFile(called.module, arguments.names)
        user, found = model_and_spec(wrapped, called.name, asked.seq_len, Calling(guesses=guesses, as_it_stands=True))
    precision = precision_of_file(outline)
    types = {name: "float32" if kind == "float" else kind for name, kind in found.tensor_types.items()}
    offers = [Offer(name, kind_of(types[name]), dims) for name, dims in found.outputs.items()]
    results = matched_outputs(model, outputs, offers, called.name)
    name_results(user, results.names)
    contract = with_axes_of_file(found, inputs, outputs, results, types)
    ops = operators_of_model(model)
    contract = replace(contract, fused_op_counts=ops, unfused_op_counts=ops)
    opset = min(max(opset_of(outline) or OPSETS.start, OPSETS.start), OPSETS.stop - 1)
    spec = BuildSpec(model=contract, precision=cast(Precision, precision), opset=opset, golden="none")
    asked.on_stage("trying whether samples depend on each other in PyTorch")
    spec = with_independence(user, spec)
    artifact = FileArtifact(model, manifest_of_spec(spec, weights_from=called.name))
    source = source_from_user(user, spec.model, called.name)
    sizes = notes_on_sizes(graph_inputs(outline), spec, called.name)
    notes = (*arguments.notes, *results.notes, *notes_on_file(outline, precision), *sizes, *spec.model.notes)
    return ArtifactCandidate(artifact, asked.options, None), VerifyRequest(choice, source, notes=notes)


def examples_of_file(
    inputs: Sequence[TensorInfo], arguments: Match, examples: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Examples by the inputs of the file, with its types. Raises UserError for a tensor of another kind or rank."""
    import torch

    found = {}
    for tensor in inputs:
        value = examples.get(arguments.names[tensor.name])
        if value is None:
            continue
        value, kind = value.detach().cpu(), kind_of(tensor.dtype)
        if value.ndim != len(tensor.dims) or (kind == "f") != value.is_floating_point():
            raise UserError(
                f"the example of {arguments.names[tensor.name]} is {str(value.dtype).removeprefix('torch.')} "
                f"{list(value.shape)}; the file takes {tensor}: give an example of that type and rank"
            )
        wanted = {"f": "float32", "b": "bool"}.get(kind, tensor.dtype if tensor.dtype in ELEMENTS else "int64")
        found[tensor.name] = value.to(getattr(torch, wanted))
    return found


def with_axes_of_file(
    spec: ModuleSpec,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    results: Match,
    types: Mapping[str, str],
) -> ModuleSpec:
    """The contract of a model under the names of a file, with its types, and the sizes that are fixed there.

    types: of what the model returns. Where the file returns another kind, the type of the model stays, and the check of
    the signature fails.
    """
    kinds = {tensor.name: tensor.dtype for tensor in inputs}
    for tensor in outputs:
        own = types[results.names[tensor.name]]
        kinds[tensor.name] = tensor.dtype if kind_of(tensor.dtype) == kind_of(own) else own
    spec = replace(
        spec,
        output_dims={name: spec.output_dims[result] for name, result in results.names.items()},
        tensor_types=kinds,
    )
    for tensor in inputs:
        for dim, size in zip(spec.input_dims[tensor.name], tensor.dims, strict=True):
            if isinstance(dim, str) and isinstance(size, int):
                spec = spec.with_fixed(dim, size, f"{dim} is {size} in the file, which was compared at that size only.")
    return spec


def with_independence(user: UserModel, spec: BuildSpec) -> BuildSpec:
    """The spec, which holds the file to independent samples if those of the model are independent in PyTorch."""
    from effexport.proof.reference import are_independent

    dims = (*spec.model.inputs.values(), *spec.model.outputs.values())
    if any(own[:1] != ("batch",) for own in dims):
        return spec
    declared = replace(spec, model=replace(cast("ModuleSpec", spec.model), independent_samples=True))
    return declared if are_independent(user, declared) else spec


def precision_of_file(model: onnx.ModelProto) -> str:
    """The lowest precision in which a file keeps numbers, or computes them if it has no weights: fp32, fp16 or bf16."""
    from onnx import TensorProto

    names: dict[int, str] = {
        TensorProto.FLOAT16: "float16",
        TensorProto.BFLOAT16: "bfloat16",
        TensorProto.FLOAT: "float32",
    }
    read = {name for node in all_nodes(model) for name in node.input} | {one.name for one in model.graph.output}
    unread = {one.name for one in model.graph.initializer} - read
    tensors = (one for one in all_tensors(model) if len(one.dims) and one.name not in unread)
    weights = {names[one.data_type] for one in tensors if one.data_type in names}
    casts = {names.get(a.i) for node in all_nodes(model) if node.op_type == "Cast" for a in node.attribute}
    types = {tensor.dtype for tensor in (*graph_inputs(model), *graph_tensors(model.graph.output))}
    # a detour through half precision between weights in float32 may be the exporter's fault
    found = (weights or casts) | types
    return next((DTYPES[name].precision for name in ("bfloat16", "float16") if name in found), "fp32")


def notes_on_file(model: onnx.ModelProto, precision: str) -> tuple[str, ...]:
    """Sentences on what decides the limits of a file: its precision, and numbers of 8 bits."""
    notes = []
    if precision != "fp32":
        notes.append(f"The file has numbers in {precision}, so the limits are those of {precision}.")
    if rounding := dict.fromkeys(node.op_type for node in all_nodes(model) if node.op_type in ROUNDING_OPS):
        notes.append(
            f"The file is quantised ({', '.join(rounding)}) and is held to the limits of a float file: what rounding "
            "to 8 bits may cost is only known of effexport's own builds."
        )
    return tuple(notes)
