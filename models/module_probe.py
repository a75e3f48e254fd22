"""A user's own model → its spec and what is exported of it, by looking at the model and running it."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from effexport.models.adapters.adapter import qualified_name
from effexport.models.adapters.remarks import named, remarks_on
from effexport.models.adapters.replace import Adapted, frozen, with_our_layers
from effexport.models.model_spec import Dims, longer_length, shape_of
from effexport.models.module_inputs import (
    ModuleInput,
    ModuleInputs,
    inputs_from_examples,
    inputs_from_signature,
    inputs_from_table,
)
from effexport.models.module_spec import ModuleSpec
from effexport.models.spec import PyTorchSpec
from effexport.models.user_model import (
    CalledByPosition,
    UnexpectedOutputError,
    UserModel,
    called_by_position,
    check_model,
    recorded_results,
    shared_note,
    training_note,
    unwrapped,
)
from effexport.models.validation import SpecError, require
from effexport.plugins.ops import OPS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from effexport.models.spec import AttentionSpec

# Sizes that tell the axes of an output apart; others are taken where a parameter has the same.
PROBE_BATCH, PROBE_SEQ_LEN = 3, 37
# The length to export for if neither the user nor a layer says one.
DEFAULT_SEQ_LEN = 1024
# The longest sequence that is tried in search of a limit: attention may need memory that is quadratic in it.
FURTHEST = 4096


@dataclass(frozen=True, kw_only=True)
class Calling:
    """How a model is called. At most one of examples and table is given.

    examples: what it was called with; dynamic: the free axes of these; see `inputs_from_examples`. table: see
    `inputs_from_table`.
    """

    examples: object = None
    dynamic: Mapping[str, object] | None = None
    table: Mapping[str, Any] | None = None

    def candidates(self, model: nn.Module, name: str, widths: Sequence[int]) -> Iterator[ModuleInputs]:
        """The inputs, or several guesses, the most likely first."""
        if self.table is not None:
            yield inputs_from_table(model, name, self.table)
        elif self.examples is not None:
            yield inputs_from_examples(model, name, self.examples, self.dynamic)
        else:
            require(self.dynamic is None, "dynamic axes were given without example inputs; give both")
            yield from inputs_from_signature(model, name, widths)


def spec_from_module(module: nn.Module, name: str, seq_len: int | None = None) -> ModuleSpec:
    """The spec of a model whose inputs its signature tells; see `model_and_spec`."""
    return model_and_spec(module, name, seq_len)[1]


def model_and_spec(
    module: nn.Module, name: str, seq_len: int | None = None, calling: Calling | None = None
) -> tuple[UserModel, ModuleSpec]:
    """Replace the known layers in a copy of a model, and run both on a few short batches.

    name: for reports. seq_len: the length to export for, in tokens; None for that of the examples or of the layers.
    Raises SpecError for a model that fails, that cannot be exported, or whose outputs have sizes of another rule.
    """
    check_model(module, name)
    notes = training_note(module, name)
    original = copied(unwrapped(module), name)
    calling = calling or Calling()
    given = next(calling.candidates(original, name, (1,)), None) if calling != Calling() else None
    wanted = seq_len or (given.sizes.get("seq") if given is not None else None)
    adapted = with_our_layers(original, wanted or DEFAULT_SEQ_LEN)
    adapted.module.requires_grad_(False)
    notes += shared_note(original, adapted.replaced)
    specs = [layer.spec for layer in attention_layers(adapted.module)]
    limit = min((spec.max_seq_len for spec in specs if spec.max_seq_len is not None), default=None)
    tuned = tuned_length(specs, name, wanted, limit)
    failures: list[SpecError] = []
    for inputs in calling.candidates(original, name, [spec.dim for spec in specs]):
        try:
            return probed(Subject(original, adapted, name, specs, notes, tuned, limit), inputs)
        except ModuleFailedError as error:
            failures.append(error)
    raise failures[0]


@dataclass(frozen=True)
class Subject:
    """A model under the probe, and what its layers say. tuned: the length to export for. limit: the most tokens that
    all layers take, None if there is no limit."""

    original: nn.Module
    adapted: Adapted
    name: str
    specs: list[AttentionSpec]
    notes: tuple[str, ...]
    tuned: int
    limit: int | None


def probed(subject: Subject, inputs: ModuleInputs) -> tuple[UserModel, ModuleSpec]:
    """The model and its spec for one guess of its inputs. Raises ModuleFailedError if the model does not take them."""
    name, tuned = subject.name, subject.tuned if "seq" in inputs.axes else 1
    names, constants = [one.name for one in inputs.inputs], inputs.constants
    original = called_by_position(subject.original, names, constants)
    module = called_by_position(subject.adapted.module, names, constants)
    adapted = replace(subject.adapted, module=module)
    has_seq = "seq" in inputs.axes
    probe = Probe(module, name, inputs)
    outputs, is_free = probe.output_dims(probe_length(module, tuned), tuned)
    longest: int | None = None
    multiple = 1
    if has_seq and is_free and subject.limit != 1:
        longest = probe.longest(outputs, tuned, subject.limit)
        if adapted.replaced:
            # with our numbers, at the lengths for which they replace those of the original
            with frozen(subject.original, subject.adapted):
                multiple = replace(probe, module=original).length_multiple(tuned)
    elif has_seq:
        if inputs.is_guess:
            has_seq = is_sequence_of(inputs)
        longest, inputs = tuned, replace(inputs, sizes={**inputs.sizes, "seq": tuned}).without_seq()
        outputs = {key: at_length(dims, tuned) for key, dims in outputs.items()}
        probe = Probe(module, name, inputs)
    check_repeatable(original, adapted, Probe(original, name, inputs), tuned)
    found = probe.run(1, probe_length(module, tuned) if is_free else tuned)
    inputs = replace(inputs, inputs=tuple(with_range(one, inputs, original) for one in inputs.inputs))
    mask = next((one for one in inputs.inputs if one.mask), None)
    attention = next(
        (spec for spec in subject.specs if spec.is_hashed), (*subject.specs, PyTorchSpec(seq_len=tuned))[0]
    )
    types = {one.name: one.dtype for one in inputs.inputs} | element_types(found)
    calls = {fused: operator_calls(module, probe, tuned, fused) for fused in (True, False)}
    remarks = (*subject.notes, *remarks_on(subject.original, adapted, calls[True].turned))
    spec = ModuleSpec(
        vocab_size=max([2, *(one.high or 0 for one in inputs.inputs if one.name == "input_ids")]),
        seq_len=tuned,
        module=name,
        attention_fields=attention.to_dict(),
        attention_layers=max(1, len(subject.specs)),
        fused_op_counts=calls[True].operators,
        unfused_op_counts=calls[False].operators,
        input_dims={one.name: one.dims for one in inputs.inputs},
        output_dims=outputs,
        longest=longest,
        has_seq=has_seq,
        tensor_types=types,
        ranges={one.name: [one.low, one.high] for one in inputs.inputs if one.dtype.startswith("int") and not one.mask},
        axis_sizes={axis: size for axis, size in inputs.sizes.items() if axis != "seq" and axis in inputs.axes},
        length_multiple=multiple,
        mask="" if mask is None else mask.name,
        mask_ignores=mask is not None and mask.mask == "ignore",
        replaced={path: qualified_name(subject.original.get_submodule(path)) for path in adapted.replaced},
        remarks=remarks,
    )
    return UserModel(original, adapted, inputs.examples), spec


def check_repeatable(original: CalledByPosition, adapted: Adapted, probe: Probe, tuned: int) -> None:
    """Raise SpecError for an original that gives other answers to the same inputs, with the first layer that does."""
    import torch

    results: list[dict[str, list[Tensor]]] = []
    tensors = list(probe.inputs.tensors(probe.sizes(1, tuned)))
    for _ in range(2):
        # what it raises is reported where lengths are tried
        quiet = contextlib.suppress(Exception)
        with quiet, frozen(original, adapted), recorded_results(original) as found, torch.inference_mode():
            results.append(found)
            original(*tensors)
    for path, first in results[0].items():
        second = results[1].get(path, [])
        if not all(close(a, b) for a, b in zip(first, second, strict=False)):
            raise SpecError(
                f"{probe.name} gives another answer in every run, and the first layer that does is "
                f"{named(original, path)}: it draws random numbers or keeps a state; expected answers that depend on "
                "the inputs alone: draw the numbers once, and store them in a buffer"
            )


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two runs gave the same, but for rounding: PyTorch need not add up in the same order twice."""
    import torch

    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = float(b.square().mean().sqrt()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4 * scale, equal_nan=True)


def with_range(one: ModuleInput, inputs: ModuleInputs, original: CalledByPosition) -> ModuleInput:
    """An input of integers with its range: the rows of the embedding that it selects from, or what the example has."""
    if one.high is not None or one.mask or not one.dtype.startswith("int"):
        return one
    rows = rows_selected(one.name, inputs, original)
    example = inputs.examples.get(one.name)
    highest = 1 if example is None or not example.numel() else int(example.max())
    return replace(one, high=max(rows, highest + 1))


def rows_selected(name: str, inputs: ModuleInputs, original: CalledByPosition) -> int:
    """Rows of the smallest embedding that gets an input as it is; 0 if there is none."""
    import torch
    from torch import nn

    sizes = {axis: 2 if axis == "batch" else max(2, inputs.sizes.get(axis, PROBE_SEQ_LEN)) for axis in inputs.axes}
    tensors = list(inputs.tensors(sizes))
    given = tensors[[one.name for one in inputs.inputs].index(name)]
    found: list[int] = []

    def record(embedding: nn.Embedding, arguments: tuple[Any, ...]) -> None:
        if arguments and torch.equal(arguments[0], given):
            found.append(embedding.num_embeddings)

    embeddings = [child for child in original.modules() if isinstance(child, nn.Embedding)]
    handles = [child.register_forward_pre_hook(record) for child in embeddings]
    # what the run raises is judged elsewhere
    with contextlib.suppress(Exception), torch.inference_mode():
        original(*tensors)
    for handle in handles:
        handle.remove()
    return min(found, default=0)


def copied(model: nn.Module, name: str) -> nn.Module:
    """A copy in float32 and in evaluation mode. Raises SpecError for a model that cannot be copied."""
    try:
        return copy.deepcopy(model).float().eval().requires_grad_(False)
    except Exception as error:  # whatever the user's code raises
        raise SpecError(
            f"{name} cannot be copied ({type(error).__name__}: {' '.join(str(error).split())}); expected a module "
            "that copy.deepcopy takes: keep results of a run, such as tensors with gradients, out of its attributes"
        ) from error


def is_sequence_of(inputs: ModuleInputs) -> bool:
    """Whether a guessed axis of tokens, which turned out to have one size only, is one: indices and masks have it."""
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


def probe_length(module: nn.Module, longest: int) -> int:
    """A length up to `longest` that is not the size of a parameter, so that it tells the axes of an output apart."""
    sizes = parameter_sizes(module)
    lengths = (length for length in range(min(PROBE_SEQ_LEN, longest), 0, -1) if length not in sizes)
    return next(lengths, longest)


def parameter_sizes(module: nn.Module) -> set[int]:
    return {size for parameter in module.parameters() for size in parameter.shape}


def at_length(dims: Dims, seq_len: int) -> Dims:
    """The axes of an input or output at one length."""
    return tuple(seq_len if dim == "seq" else dim for dim in dims)


def attention_layers(module: nn.Module) -> list[Any]:
    from effexport.models.layers import AttentionLayer

    return [child for child in module.modules() if isinstance(child, AttentionLayer)]


@dataclass(frozen=True)
class Calls:
    """How often a model calls each of our operators, by ONNX name. turned: how many calls of
    F.scaled_dot_product_attention are among them."""

    operators: dict[str, int]
    turned: int


def operator_calls(module: nn.Module, probe: Probe, tuned: int, fused: bool) -> Calls:
    """How many nodes of each of our operators a model becomes."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from effexport.models.adapters.sdpa import AttentionCalls, attention_calls_as_operators
    from effexport.models.layers import fused_operators

    names = {op.torch_name: op.onnx_name for op in OPS.values()}
    calls: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # as in proof/float64.py

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            name = func._schema.name.partition("::")[2]
            if func.namespace == "effexport" and name in names:
                calls[names[name]] += 1
            return func(*args, **(kwargs or {}))

    as_operators = attention_calls_as_operators() if fused else contextlib.nullcontext(AttentionCalls())
    # operators that are a part of the unfused formulas are called only where gradients are wanted
    with as_operators as attention, fused_operators(module, fused), torch.set_grad_enabled(not fused), Counting():  # type: ignore[no-untyped-call]
        module(*probe.inputs.tensors(probe.sizes(1, min(tuned, PROBE_SEQ_LEN) if probe.is_free else tuned)))
    return Calls(dict(calls), attention.turned)


@dataclass(frozen=True)
class Probe:
    """Runs a module, called by position, on short batches. inputs: what it is called with."""

    module: CalledByPosition
    name: str
    inputs: ModuleInputs

    @property
    def is_free(self) -> bool:
        return "seq" in self.inputs.axes

    @property
    def batch(self) -> int:
        """A batch that is not the size of a parameter, such as the number of classes."""
        sizes = parameter_sizes(self.module)
        return next(batch for batch in itertools.count(PROBE_BATCH) if batch not in sizes)

    def sizes(self, batch: int, seq_len: int) -> dict[str, int]:
        """Sizes of the free axes. Those without a name of ours differ from each other, and from run to run."""
        sizes = {axis: size + batch for axis, size in self.inputs.sizes.items()} | {"batch": batch, "seq": seq_len}
        return {axis: sizes[axis] for axis in self.inputs.axes}

    def output_dims(self, some: int, tuned: int) -> tuple[dict[str, Dims], bool]:
        """Axes of the outputs by name, and whether the length is free: whether the module takes `some` tokens, not only
        the `tuned` ones that it is exported for.

        Raises SpecError for a module that fails at both lengths, or that returns something else than tensors.
        """
        try:
            values = self.run(self.batch, some)
        except ModuleFailedError:
            try:
                return self.axes_of(self.run(self.batch, tuned), tuned), False
            except ModuleFailedError as last:
                remedy = "; if it takes other lengths, give one with --seq-len" * self.is_free
                raise ModuleFailedError(f"{last}{remedy}") from last.__cause__
        found = self.axes_of(values, some)
        try:
            self.check_sizes(found, values, tuned)
        except ModuleFailedError as error:
            remedy = f"{some} tokens work: give a length that the module takes with --seq-len"
            raise SpecError(f"{error}; {remedy}") from error.__cause__
        with contextlib.suppress(ModuleFailedError):
            self.check_sizes(found, values, 1)
        return found, True

    def check_sizes(self, outputs: dict[str, Dims], values: Mapping[str, Any], seq_len: int) -> None:
        """Raise SpecError if an output at another length does not have the axes that were found, for the error: from
        `values`; and ModuleFailedError if there is none."""
        others, sizes = self.run(1, seq_len), self.sizes(1, seq_len)
        for (name, dims), before in zip(outputs.items(), values.values(), strict=True):
            after = others.get(name)
            shape = None if after is None else list(after.shape)
            what = f"for 1 × {seq_len} tokens" if self.is_free else "for 1 sample"
            before_what = f"{self.batch} samples{' of another length' * self.is_free}"
            require(
                shape == list(shape_of(dims, sizes)),
                f"{name} of {self.name} is {shape} {what}, but {list(before.shape)} for {before_what}; expected axes "
                "whose size is that of the batch, the number of tokens, or constant: return one value for each token, "
                "or an average over them",
            )

    def longest(self, outputs: dict[str, Dims], tuned: int, limit: int | None) -> int | None:
        """The most tokens that the module takes, at least `tuned`; None if no limit was found.

        limit: that of its layers. Without one, a longer sequence than `tuned` is tried, one token more than each size
        of a parameter or buffer, which may be a number of positions, and four times as many tokens.
        """
        works, fails = tuned, longer_length(tuned) if limit is None else limit
        if works == fails or self.follows(outputs, fails):
            if limit is not None:
                return limit
            sizes = [size + 1 for size in self.sizes_of_weights() if fails <= size < FURTHEST]
            sizes += [4 * tuned] * (4 * tuned <= FURTHEST)
            works, fails = fails, next((size for size in sizes if not self.follows(outputs, size)), 0)
            if not fails:
                return None
        while fails - works > 1:
            middle = (works + fails) // 2
            works, fails = (middle, fails) if self.follows(outputs, middle) else (works, middle)
        return works

    def sizes_of_weights(self) -> list[int]:
        tensors = (*self.module.parameters(), *self.module.buffers())
        return sorted({size for tensor in tensors for size in tensor.shape})

    def length_multiple(self, tuned: int) -> int:
        """The smallest power of two by which `tuned` can be shortened: 1 if it is any, `tuned` if there is none."""
        step = 1
        while step < tuned:
            with contextlib.suppress(ModuleFailedError):
                self.run(1, tuned - step)
                return step
            step *= 2
        return tuned

    def follows(self, outputs: dict[str, Dims], seq_len: int) -> bool:
        """Whether the module takes that many tokens, and its outputs have the expected sizes."""
        try:
            values = self.run(1, seq_len)
        except ModuleFailedError:
            return False
        sizes = self.sizes(1, seq_len)
        return [tuple(value.shape) for value in values.values()] == [shape_of(d, sizes) for d in outputs.values()]

    def axes_of(self, values: Mapping[str, Any], seq_len: int) -> dict[str, Dims]:
        """Axes of the outputs by name, inferred from their sizes for a batch of `batch`."""
        names = {size: axis for axis, size in self.sizes(self.batch, seq_len).items()}
        return {name: tuple(names.get(size, size) for size in value.shape) for name, value in values.items()}

    def run(self, batch: int, seq_len: int) -> dict[str, Tensor]:
        """What the module returns, by name. Raises ModuleFailedError."""
        import torch

        tensors = list(self.inputs.tensors(self.sizes(batch, seq_len)))
        try:
            with torch.inference_mode():
                outputs = self.module.by_name(*tensors)
        except UnexpectedOutputError:
            raise
        except Exception as error:  # whatever the user's code raises
            tokens = f" × {seq_len} tokens" * self.is_free
            what = f"a batch of {batch}{tokens}" if batch > 1 or not tokens else f"{batch}{tokens}"
            text = " ".join(str(error).split()) or type(error).__name__
            raise ModuleFailedError(f"{self.name} fails on {what}: {text}") from error
        require(bool(outputs), f"{self.name} returns no tensor; expected at least one")
        return outputs


class ModuleFailedError(SpecError):
    """The user's module raised an error at some length."""
