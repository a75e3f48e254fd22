"""A user's own model → its spec and what is exported of it, by looking at the model and running it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapted, frozen, qualified_name
from effexport.models.adapters.fla_functions import recurrences_as_operators
from effexport.models.adapters.folding import detached_copy
from effexport.models.adapters.replace import (
    NotAsOriginalError,
    check_folded,
    layers_at_fault,
    remarks_on,
    with_our_layers,
)
from effexport.models.adapters.torch_layers import attention_calls_as_operators
from effexport.models.attention_spec import AttentionSpec
from effexport.models.layers import AttentionLayer
from effexport.models.shapes import Dims
from effexport.models.size_formula import with_fixed_axis
from effexport.models.user.calls import check_repeatable, draw_notes, operator_calls, with_mask, with_range
from effexport.models.user.inputs import (
    ModuleInput,
    ModuleInputs,
    inputs_from_examples,
    inputs_from_signature,
    inputs_from_table,
)
from effexport.models.user.model import (
    CalledByPosition,
    UserModel,
    called_by_position,
    check_model,
    check_weights,
    precision_note,
    shared_note,
    training_note,
    unwrapped,
)
from effexport.models.user.modes import FloatTypes, code_as_exported
from effexport.models.user.probe import (
    PROBE_SEQ_LEN,
    ModuleFailedError,
    Probe,
    UnknownAxesError,
    formula_of,
    probe_length,
)
from effexport.models.user.spec import ModuleSpec, is_constant
from effexport.models.validation import SpecError, require
from effexport.models.variants.pytorch import PyTorchSpec

# The length to export for if neither the user nor a layer says one.
DEFAULT_SEQ_LEN = 1024
SHORTER_LENGTHS = (DEFAULT_SEQ_LEN, 512, 256, 128, 64)
# Shapes of inputs, and of outputs by name, with free sizes as symbols.
Shapes = tuple[list[torch.Size], dict[str, torch.Size]]


@dataclass(frozen=True, kw_only=True)
class Calling:
    """The calling convention of a model. At most one of examples and table is given.

    examples: arguments of a call; dynamic: the free axes of these; see `inputs_from_examples`. table: see
    `inputs_from_table`. inputs, replaced: those of an artifact, see `inputs_from_spec`, and which layers are ours.
    guesses: inputs to try, the most likely first. as_it_stands: no layer is replaced by ours.
    """

    examples: object = None
    dynamic: Mapping[str, object] | None = None
    table: Mapping[str, Any] | None = None
    inputs: ModuleInputs | None = None
    replaced: Collection[str] | None = None
    guesses: Sequence[ModuleInputs] = ()
    as_it_stands: bool = False

    @property
    def is_guess(self) -> bool:
        """True if the signature of `forward` is the only source."""
        return self.examples is None and self.table is None and self.inputs is None and not self.guesses

    def candidates(self, model: nn.Module, name: str, widths: Sequence[int]) -> Iterator[ModuleInputs]:
        """The inputs, or several guesses, the most likely first."""
        if self.inputs is not None:
            yield self.inputs
        elif self.guesses:
            yield from self.guesses
        elif self.table is not None:
            yield inputs_from_table(model, name, self.table)
        elif self.examples is not None:
            yield inputs_from_examples(model, name, self.examples, self.dynamic)
        else:
            require(self.dynamic is None, "dynamic axes were given without example inputs; give both")
            yield from inputs_from_signature(model, name, widths)


def spec_from_module(module: nn.Module, name: str, seq_len: int | None = None) -> ModuleSpec:
    """The spec of a model whose inputs its signature tells; see `model_and_spec`."""
    return model_and_spec(module, name, seq_len)[1]


@torch.random.fork_rng(devices=[])
def model_and_spec(
    module: nn.Module, name: str, seq_len: int | None = None, calling: Calling | None = None
) -> tuple[UserModel, ModuleSpec]:
    """Replace the known layers in a copy of a model, and run both on a few short batches.

    name: for reports. seq_len: the length to export for, in tokens; None for that of the examples or of the layers.
    Raises SpecError for a model that fails, that cannot be exported, or whose outputs have sizes of another rule.
    """
    require(seq_len is None or seq_len >= 1, f"seq_len is {seq_len}; expected a positive integer")
    check_model(module, name)
    check_weights(module, name)
    original = copied(unwrapped(module), name)
    notes = (*training_note(unwrapped(module), original, name), *precision_note(module, name))
    calling = calling or Calling()
    given = None if calling.is_guess else next(calling.candidates(original, name, ()))
    wanted = seq_len or (given.sizes.get("seq") if given is not None else None)
    subject = subject_with(original, name, notes, wanted, None if calling.as_it_stands else {})
    if calling.replaced is not None:
        subject = subject_again(subject, calling.replaced)
    failures: list[ModuleFailedError] = []
    while True:
        try:
            return probed_as_called(subject, calling, has_length=given is not None or wanted is not None)
        except (ModuleFailedError, NotAsOriginalError) as error:
            failures += [error] if isinstance(error, ModuleFailedError) else []
            keep = layers_at_fault(error, subject.adapted)
        except SpecError:
            if failures:  # keeping layers did not help, and led to another refusal
                raise failures[0] from failures[0].__cause__
            raise
        if not keep:
            raise failures[0]
        subject = subject_with(original, name, notes, wanted, {**subject.adapted.kept, **keep})


def subject_with(
    original: nn.Module, name: str, notes: tuple[str, ...], wanted: int | None, keep: Mapping[str, str] | None
) -> Subject:
    """A model with our layers, except in the places of `keep`; see `with_our_layers`. None keeps all, without a copy.

    wanted: the length to export for, None if nobody says one.
    """
    whole = Adapted(original, {}, {})
    adapted = whole if keep is None else with_our_layers(original, wanted or DEFAULT_SEQ_LEN, keep)
    adapted.module.requires_grad_(False)
    specs = [layer.spec for layer in attention_layers(adapted.module)]
    limit = min((spec.max_seq_len for spec in specs if spec.max_seq_len is not None), default=None)
    notes += shared_note(original, adapted.replaced)
    tuned = tuned_length(specs, name, wanted, limit)
    return Subject(original, adapted, name, specs, notes, tuned, limit, as_it_stands=keep is None)


def subject_again(subject: Subject, replaced: Collection[str]) -> Subject:
    """The same with those layers of ours only that an artifact has, which an older effexport may have built; no other
    length is looked for."""
    others = dict.fromkeys(subject.adapted.replaced.keys() - set(replaced), "the artifact has it as it stands")
    if others:
        subject = subject_with(subject.original, subject.name, subject.notes, subject.tuned, others)
    return replace(subject, limit=max(2, subject.tuned))


def probed_as_called(subject: Subject, calling: Calling, has_length: bool) -> tuple[UserModel, ModuleSpec]:
    """The model and its spec for the first guess of its inputs that works. has_length: whether the user has given one.

    Raises ModuleFailedError if none does.
    """
    original, name, specs = subject.original, subject.name, subject.specs
    # if nobody and no layer has said a length, a shorter one may do
    lengths = (subject.tuned,) if has_length or specs else SHORTER_LENGTHS
    failures: list[ModuleFailedError] = []
    for length in lengths:
        for inputs in calling.candidates(original, name, [spec.dim for spec in specs]):
            try:
                return probed(replace(subject, tuned=length), inputs)
            except ModuleFailedError as error:
                failures.append(error)
    raise failures[0]


@dataclass(frozen=True)
class Subject:
    """A model under the probe, and what its layers say. tuned: the length to export for. limit: the most tokens that
    all layers take, None if there is no limit. as_it_stands: it is not exported by us, but compared with a file."""

    original: nn.Module
    adapted: Adapted
    name: str
    specs: list[AttentionSpec]
    notes: tuple[str, ...]
    tuned: int
    limit: int | None
    as_it_stands: bool = False


def probed(subject: Subject, inputs: ModuleInputs) -> tuple[UserModel, ModuleSpec]:
    """The model and its spec for one guess of its inputs. Raises ModuleFailedError if the model does not take them."""
    names, constants = [one.name for one in inputs.inputs], inputs.constants
    original = called_by_position(subject.original, names, constants)
    module = called_by_position(subject.adapted.module, names, constants)
    adapted = replace(subject.adapted, module=module)
    sizes = {axis: subject.tuned if axis == "seq" else inputs.sizes.get(axis, batch_of(inputs)) for axis in inputs.axes}
    as_given = list(inputs.tensors(sizes))
    original.drawn = module.drawn = module.draws_for(as_given)
    Probe(original, subject.name, inputs).check_examples()
    module.precision = own_precision(Probe(original, subject.name, inputs), subject.tuned)
    traced = Probe(module, subject.name, inputs, output_formulas)
    lengths = lengths_of(subject, traced, Probe(original, subject.name, inputs))
    tuned = lengths.tuned
    marked = marked_inputs(replace(lengths.inputs, inputs=inputs.inputs), (original, module), lengths, subject.name)
    tried = {one.name: one.constant for one in inputs.inputs if one.name not in inputs.examples}
    if any(one.padding is not None and one.padding == tried.get(one.name) for one in marked):
        # nor do positions of padding count in every model
        known = replace(inputs, inputs=marked)
        traced, plain = Probe(module, subject.name, known, output_formulas), Probe(original, subject.name, known)
        lengths = lengths_of(subject, traced, plain)
        tuned = lengths.tuned
    inputs = replace(
        lengths.inputs,
        inputs=tuple(replace(new, dims=old.dims) for new, old in zip(marked, lengths.inputs.inputs, strict=True)),
    )
    probe = Probe(module, subject.name, inputs)
    check_folded(original, adapted, list(inputs.tensors(probe.sizes(1, tuned))))
    calls = {fused: operator_calls(module, probe, tuned, fused) for fused in (True, False)}
    check_repeatable(original, adapted, Probe(original, subject.name, inputs), tuned)
    found = probe.run(1, tuned)
    mask = next((one for one in inputs.inputs if one.mask), None)
    specs = subject.specs or [PyTorchSpec(seq_len=tuned)]
    attention = next((spec for spec in specs if spec.is_hashed), specs[0])
    spec = ModuleSpec(
        vocab_size=max([2, *(one.high or 0 for one in inputs.inputs if one.name == "input_ids")]),
        seq_len=tuned,
        module=subject.name,
        attention_fields=attention.to_dict(),
        attention_layers=len(specs),
        fused_op_counts=calls[True].operators,
        unfused_op_counts=calls[False].operators,
        input_dims={one.name: one.dims for one in inputs.inputs},
        output_dims=lengths.outputs,
        longest=lengths.longest,
        shortest=lengths.shortest,
        size_notes={"seq": lengths.note} if lengths.note else {},
        has_seq=lengths.has_seq,
        tensor_types={one.name: one.dtype for one in inputs.inputs} | element_types(found),
        ranges={one.name: [one.low, one.high] for one in inputs.inputs if one.dtype.startswith("int") and not one.mask},
        axis_sizes={axis: size for axis, size in inputs.sizes.items() if axis != "seq" and axis in inputs.axes},
        length_multiple=lengths.multiple,
        guesses=tuple(one.name for one in inputs.inputs if one.is_guess and not one.mask),
        padding={one.name: one.padding for one in inputs.inputs if one.padding is not None},
        constants={name: value for name, value in constants.items() if is_constant(value)},
        mask="" if mask is None else mask.name,
        mask_ignores=mask is not None and mask.mask == "ignore",
        replaced={path: qualified_name(subject.original.get_submodule(path)) for path in adapted.replaced},
        remarks=(
            *subject.notes,
            *remarks_on(subject.original, adapted, {} if subject.as_it_stands else calls[True].turned),
            *draw_notes(subject.name, module, as_given),
            *fixed_notes(subject.name, inputs),
            *guess_notes(inputs),
        ),
    )
    return UserModel(original, adapted, inputs.examples, inputs.declared), spec


def output_formulas(
    module: CalledByPosition, tensors: Sequence[Tensor], dims: Sequence[Dims]
) -> dict[str, tuple[int | str | None, ...]]:
    """The axes of the outputs of a module by name: sizes, names of free axes and formulas; None where there is none.

    tensors, dims: of each input; free axes of other names have other sizes. Empty if the module cannot be traced.
    """
    notes: list[Shapes] = []
    free = torch.export.Dim.AUTO
    axes = [{i: free for i, dim in enumerate(one) if isinstance(dim, str)} for one in dims]
    patch = torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    # the user's code may raise anything, and keep symbols in its attributes; weights stay the same tensors
    attention, recurrences = attention_calls_as_operators(), recurrences_as_operators()
    with contextlib.suppress(Exception), attention, recurrences, code_as_exported(module), patch:
        weights = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        recorder = Recorder(copy.deepcopy(module, weights), notes.append)
        torch.export.export(recorder, tuple(tensors), dynamic_shapes=(tuple(axes),), strict=False)
    if not notes:
        return {}
    shapes, outputs = notes[0]
    pairs: list[tuple[Any, int | str]] = [
        pair for shape, one in zip(shapes, dims, strict=True) for pair in zip(shape, one, strict=True)
    ]
    names = {size.node.expr: axis for size, axis in pairs if isinstance(size, torch.SymInt)}
    return {name: tuple(formula_of(size, names) for size in shape) for name, shape in outputs.items()}


class Recorder(nn.Module):
    """A module that reports the shapes of its inputs and outputs. report: attributes are reset after a trace."""

    def __init__(self, module: CalledByPosition, report: Callable[[Shapes], None]) -> None:
        super().__init__()
        self.module, self.report = module, report

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        shapes = [tensor.shape for tensor in tensors]
        outputs = self.module.by_name(*tensors)
        self.report((shapes, {name: value.shape for name, value in outputs.items()}))
        return tuple(outputs.values())


def batch_of(inputs: ModuleInputs) -> int:
    """The batch of the examples; 1 without them."""
    found = (
        inputs.examples[one.name].shape[one.dims.index("batch")]
        for one in inputs.inputs
        if one.name in inputs.examples and "batch" in one.dims
    )
    return next(found, 1)


def marked_inputs(
    inputs: ModuleInputs, models: Sequence[CalledByPosition], lengths: Lengths, name: str
) -> tuple[ModuleInput, ...]:
    """The inputs with the ranges of integers, and with what those of 0 and 1 tell of tokens. models: the original and
    our copy."""
    inputs = replace(inputs, inputs=tuple(with_range(one, inputs, models) for one in inputs.inputs))
    probe = Probe(models[0], name, inputs)
    return tuple(with_mask(one, inputs, probe, lengths.outputs, lengths.tuned) for one in inputs.inputs)


def guess_notes(inputs: ModuleInputs) -> tuple[str, ...]:
    """A sentence on each input of integers whose range is that of the example; none if tables tell all."""
    return tuple(
        f"{one.name}: values from {one.low} to {(one.high or 1) - 1} were tried, as no table of the model limits them; "
        "others are passed on as they are. An inputs file can give a range."
        for one in inputs.inputs
        if one.is_guess and not one.mask
    )


def own_precision(probe: Probe, tuned: int) -> torch.dtype | None:
    """The type for `CalledByPosition.precision`: float32 for a model that computes in other types, too, such as those
    of autocast."""
    # what it raises is reported where lengths are tried
    with FloatTypes() as types, contextlib.suppress(SpecError):
        probe.run(1, tuned)
    return torch.float32 if types.found - {torch.float32} else None


def fixed_notes(name: str, inputs: ModuleInputs) -> tuple[str, ...]:
    """A sentence on guessed axes that became numbers, although those of tokens usually are free; none if all are."""
    fixed = [one.name for one in inputs.inputs if one.name in inputs.examples and is_fixed_sequence(one)]
    if not inputs.is_guess or not fixed:
        return ()
    return (
        f"The second axis of {', '.join(fixed)} has one size in the exported file, that of the example; if {name} "
        "takes others, name the axis with dynamic, or in --inputs.",
    )


def is_fixed_sequence(one: ModuleInput) -> bool:
    """True if an input has the form of tokens or vectors, with a number for their count."""
    return len(one.dims) == (3 if one.dtype == "float" else 2) and isinstance(one.dims[1], int)


@dataclass(frozen=True)
class Lengths:
    """The lengths that a model takes. inputs: with a number in the place of a length that is not free.

    tuned: the length to export for; 1 without an axis of tokens (has_seq). outputs: axes by name. longest, shortest,
    multiple: see `ModuleSpec`. note: why the length is not free, or has a smallest value; "" if nothing is to be said.
    """

    inputs: ModuleInputs
    tuned: int
    has_seq: bool
    outputs: dict[str, Dims]
    longest: int | None = None
    multiple: int = 1
    shortest: int = 1
    note: str = ""


def lengths_of(subject: Subject, probe: Probe, original: Probe) -> Lengths:
    """Run our copy of a model, and the original, at several lengths. Raises ModuleFailedError and SpecError."""
    inputs = probe.inputs
    if not probe.is_free:
        outputs, _ = probe.output_dims(1, 1)
        return Lengths(inputs, 1, False, outputs)
    tuned, note = subject.tuned, ""
    try:
        # an axis of one token does not tell itself from a constant
        below = PROBE_SEQ_LEN + 1 if tuned == 1 and subject.limit is None else tuned
        outputs, short = probe.output_dims(probe_length(probe.module, below), tuned, subject.limit)
    except UnknownAxesError as error:
        if "seq" in inputs.declared:
            raise
        note = f"The file takes {tuned} tokens only: {error.reason}. For other lengths, build an artifact for each."
        outputs, short = probe.axes_of([probe.seen(probe.batch, tuned), probe.seen(1, tuned)]), None
    # a length that the parameters do not have may be the only one, and a shorter one may fit by chance
    if short is not None and subject.limit != 1 and (tuned == 1 or probe.length_multiple(tuned) == 1):
        longest, multiple = probe.longest(outputs, tuned, subject.limit), 1
        if subject.adapted.replaced:
            # with our numbers, at the lengths for which they replace those of the original
            with frozen(subject.original, subject.adapted):
                multiple = original.length_multiple(tuned)
        shortest = probe.shortest(outputs, tuned)
        if shortest > 1:
            note = f"The file takes {shortest} tokens and more; of fewer, an output would have no elements."
        return Lengths(inputs, tuned, True, outputs, longest, multiple, shortest, note)
    has_seq = not inputs.is_guess or is_sequence_of(inputs)
    fixed = replace(inputs, sizes={**inputs.sizes, "seq": tuned}).without_seq()
    at_tuned: dict[str, Dims] = {
        name: tuple(with_fixed_axis(dim, "seq", tuned, inputs.axes) for dim in dims) for name, dims in outputs.items()
    }
    return Lengths(fixed, tuned, has_seq, at_tuned, tuned, note=note)


def copied(model: nn.Module, name: str) -> nn.Module:
    """A copy in float32 and in evaluation mode. Raises SpecError for a model that cannot be copied."""
    try:
        return detached_copy(model).float().eval().requires_grad_(False)
    except Exception as error:  # whatever the user's code raises
        raise SpecError(
            f"{name} cannot be copied ({type(error).__name__}: {' '.join(str(error).split())}); expected a module "
            "that copy.deepcopy takes: keep results of a run, such as tensors with gradients, out of its attributes"
        ) from error


def is_sequence_of(inputs: ModuleInputs) -> bool:
    """True if a guessed axis of tokens, which turned out to have one size only, is one: indices and masks have it."""
    return any(one.mask or one.dtype.startswith("int") for one in inputs.inputs)


def element_types(outputs: Mapping[str, Tensor]) -> dict[str, str]:
    """Element types of outputs by name."""
    return {
        name: "float" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")
        for name, value in outputs.items()
    }


def tuned_length(specs: Sequence[AttentionSpec], name: str, seq_len: int | None, limit: int | None) -> int:
    """The length to export for: the one that was asked for, that of a layer of one length, or the longest of a layer.

    limit: the most tokens that all layers take. Raises SpecError if more were asked for.
    """
    require(
        seq_len is None or limit is None or seq_len <= limit,
        f"seq_len is {seq_len}, but a layer of {name} has learned positions for a seq_len of {limit}; use at most that",
    )
    fixed = next((spec.fixed_seq_len for spec in specs if spec.fixed_seq_len is not None), None)
    tuned = seq_len or fixed or max((spec.seq_len for spec in specs), default=DEFAULT_SEQ_LEN)
    return tuned if limit is None else min(tuned, limit)


def attention_layers(module: nn.Module) -> list[Any]:
    return [child for child in module.modules() if isinstance(child, AttentionLayer)]
