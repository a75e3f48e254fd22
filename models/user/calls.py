"""Observations of a run of a user's model: operators that it calls, rows that it selects, and repeatability."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapted, frozen, named
from effexport.models.shapes import Dims
from effexport.models.user.drawn_numbers import SEED, DrawnNumbers, kept_generators
from effexport.models.user.inputs import MaskKind, ModuleInput, ModuleInputs
from effexport.models.user.model import CalledByPosition, recorded_results
from effexport.models.user.modes import Observer, Selections
from effexport.models.user.probe import PROBE_SEQ_LEN, ModuleFailedError, Probe
from effexport.models.validation import SpecError, require
from effexport.plugins.ops import OPS

# The length at which masks are tried, if the model takes it.
MASK_SEQ_LEN = 12
# How often a model draws anew to measure what that changes, and how many draws a sentence lists.
FRESH_DRAWS, LISTED_DRAWS = 8, 4
# Attributes of published models, or of their configs, that say whether they draw in evaluation mode: what to do where
# they are false, or a method.
SWITCHES = {
    "deterministic_eval": "Made or loaded with deterministic_eval=True, it does not redraw in evaluation mode.",
    "fix_projection_matrices_": "After fix_projection_matrices_(), it does not redraw.",
}
DROPOUT_SWITCH = (
    "Dropout is off in evaluation mode if functions of it get training=self.training, and eval() reaches its layers."
)


@dataclass(frozen=True)
class Calls:
    """Numbers of calls of each of our operators, by ONNX name. turned: how many of them were calls of functions that
    others have written, by name."""

    operators: dict[str, int]
    turned: Mapping[str, int]


def operator_calls(module: nn.Module, probe: Probe, seq_len: int, fused: bool) -> Calls:
    """The number of nodes of each of our operators in a model. seq_len: a length that it takes."""
    from effexport.models.adapters.fla_functions import recurrences_as_operators
    from effexport.models.adapters.torch_layers import AttentionCalls, attention_calls_as_operators
    from effexport.models.layers import fused_operators
    from effexport.models.variants.lsh.layer import LSHHash

    names = {op.torch_name: op.onnx_name for op in OPS.values()}
    calls: Counter[str] = Counter()

    class Counting(Observer):
        def see(self, func: Any, arguments: tuple[Any, ...]) -> None:
            name = func._schema.name.partition("::")[2]
            if func.namespace == "effexport" and name in names:
                calls[names[name]] += 1

    hashes = Counter[str]()
    tensors = probe.inputs.tensors(probe.sizes(1, seq_len))
    as_operators = attention_calls_as_operators() if fused else contextlib.nullcontext(AttentionCalls())
    of_fla = recurrences_as_operators() if fused else contextlib.nullcontext(Counter[str]())
    # operators that are a part of the unfused formulas are called only where gradients are wanted
    gradients = torch.set_grad_enabled(not fused)
    ours = fused_operators(module, fused)
    with as_operators as attention, of_fla as functions, ours, gradients, Counting(), ExitStack() as stack:
        for path, child in module.named_modules():
            if isinstance(child, LSHHash):
                hook = functools.partial(lambda path, child, arguments: hashes.update([path]), path)
                stack.callback(child.register_forward_pre_hook(hook).remove)
        module(*tensors)
    for path, count in hashes.items():
        require(
            count == 1,
            f"the LSH layer {path.rpartition('.hash')[0]} of {probe.name} is called {count} times in one run; expected "
            "one call, because the buckets of each are compared by name: give each call a copy of the layer",
        )
    return Calls(dict(calls), {"F.scaled_dot_product_attention": attention.turned, **functions})


def draw_notes(name: str, model: CalledByPosition, tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """Sentences on the numbers that a model draws: which, how much the answer depends on them, and how to switch it
    off; none if it draws none."""
    if model.drawn is None:
        return ()
    draws = model.drawn.draws
    listed = ", ".join(draws[:LISTED_DRAWS]) + f" and {len(draws) - LISTED_DRAWS} more" * (len(draws) > LISTED_DRAWS)
    if not draws_anew(model, tensors):
        return (
            f"{name} draws numbers, and still answers the same in every call, for one because they have a seed of "
            f"their own: {listed}. The file holds these numbers.",
        )
    switches = [text for attribute, text in SWITCHES.items() if is_open(model, attribute)]
    switches += [DROPOUT_SWITCH] * any("dropout" in draw for draw in draws)
    return (
        f"{name} draws random numbers in every call: {listed}. The file holds numbers drawn once, and the reference is "
        f"the original with the same ones. Over {FRESH_DRAWS} other draws, its answer to the same inputs varies by "
        f"{variation(model, tensors):.2g} of its RMS.{''.join(f' {text}' for text in switches)}",
    )


def draws_anew(model: CalledByPosition, tensors: Sequence[Tensor]) -> bool:
    """True if a model that draws its own numbers answers twice in different ways."""
    model = copy.deepcopy(model)
    model.drawn = None
    with kept_generators(), torch.inference_mode():
        first, second = (model(*tensors) for _ in range(2))
    return not all(map(close, first, second))


def is_open(model: nn.Module, attribute: str) -> bool:
    """True if a model, a layer of it, or a config of theirs has an attribute that is false or a method."""
    owners = [owner for child in model.modules() for owner in (child, getattr(child, "config", None))]
    found = [getattr(owner, key) for owner in owners for key in (attribute, f"_{attribute}") if hasattr(owner, key)]
    return any(not value or callable(value) for value in found)


def variation(model: CalledByPosition, tensors: Sequence[Tensor]) -> float:
    """The spread of the answers with other draws around their mean, as a fraction of their own size, both as RMS: that
    of the output for which it is largest."""
    model, answers = copy.deepcopy(model), []  # a model may keep what it has drawn
    for i in range(FRESH_DRAWS):
        model.drawn = DrawnNumbers(SEED + 1 + i)
        with torch.inference_mode():
            answers.append([value.double() for value in model(*tensors)])
    found = [0.0]
    for values in map(torch.stack, zip(*answers, strict=True)):
        values = values[:, values.isfinite().all(0)]
        size = values.square().mean().sqrt()
        found.append(float(values.var(0).mean().sqrt() / size) if size > 0 else 0.0)
    return max(found)


def check_repeatable(original: CalledByPosition, adapted: Adapted, probe: Probe, tuned: int) -> None:
    """Raise SpecError for an original that gives other answers to the same inputs, with the first layer that does."""
    results: list[dict[str, list[Tensor]]] = []
    tensors = list(probe.inputs.tensors(probe.sizes(1, tuned)))
    for _ in range(2):
        # what it raises is reported where lengths are tried
        quiet = contextlib.suppress(Exception)
        with quiet, frozen(original, adapted), recorded_results(original) as found, torch.inference_mode():
            results.append(found)
            original.with_state(*tensors)
    if len(results) < 2:
        return
    for path, first in results[0].items():
        second = results[1].get(path, [])
        if len(first) != len(second) or not all(map(close, first, second)):
            raise SpecError(
                f"{probe.name} gives another answer in every run, and the first layer that does is "
                f"{named(original, path)}: it keeps a state, or draws random numbers from a generator of its own, such "
                "as numpy.random.default_rng(); expected answers that depend on the inputs alone, or draws by functions"
                " of torch, numpy.random or random: use these, or draw the numbers once, and store them in a buffer"
            )


def close(a: Tensor, b: Tensor) -> bool:
    """True if two runs agree but for rounding: PyTorch need not add up in the same order twice.

    1e-4 is a thousand roundings of float32; numbers that were drawn anew differ by their own size.
    """
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = b[b.isfinite()].square().mean().sqrt().nan_to_num()  # of no elements, NaN
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(scale), equal_nan=True)


def with_range(one: ModuleInput, inputs: ModuleInputs, models: Sequence[CalledByPosition]) -> ModuleInput:
    """An input of integers with its range: the rows of the table that it selects from or, as a guess, what the example
    has. models: the original, and our copy, which may select with the input itself where the original pads it."""
    if one.high is not None or one.mask or not one.dtype.startswith("int"):
        return one
    found = (rows_selected(one, inputs, model) for model in models)
    if (rows := next((each for each in found if each is not None), None)) is not None:
        return replace(one, low=max(one.low, rows.low), high=rows.high, padding=rows.padding)
    example = inputs.examples.get(one.name)
    highest = 1 if example is None or not example.numel() else int(example.max())
    return replace(one, high=highest + 1, is_guess=True)


def rows_selected(one: ModuleInput, inputs: ModuleInputs, model: CalledByPosition) -> Rows | None:
    """The smallest table that an input selects from; None if there is none.

    A table is a parameter, a buffer, or computed from them. The model may add a number to the input first.
    """
    sizes = {axis: 2 if axis == "batch" else max(2, inputs.sizes.get(axis, PROBE_SEQ_LEN)) for axis in inputs.axes}
    tensors = patterned(inputs, sizes)
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def is_table(tensor: Tensor, axis: int) -> bool:
        # a computed one, unless it is as long as the input: positions in a sequence have no limit of their own
        return tensor.untyped_storage().data_ptr() in weights or tensor.shape[axis] not in sizes.values()

    # what the run raises is judged elsewhere
    with Selections() as selections, contextlib.suppress(Exception), torch.inference_mode():
        model(*tensors.values())
    pattern = tensors[one.name]
    found: list[Rows] = []
    for table, axis, index, padding in selections.found:
        offsets = (index.flatten() - pattern.flatten()).unique().tolist() if index.numel() == pattern.numel() else []
        if len(offsets) == 1 and is_table(table, axis):
            added = int(offsets[0])
            found.append(Rows(-added, table.shape[axis] - added, None if padding is None else padding - added))
    if not found:
        return None
    rows = min(found, key=lambda rows: rows.high)
    beyond = {**tensors, one.name: torch.full_like(pattern, rows.high)}
    try:
        with torch.inference_mode():
            model(*beyond.values())
    except Exception:  # of any kind, as libraries check indices themselves
        return rows
    return None  # the model brings larger ones into range


@dataclass(frozen=True)
class Rows:
    """The values that select a row of a table, low to high − 1, and the one that stands for padding, if any."""

    low: int
    high: int
    padding: int | None


def patterned(inputs: ModuleInputs, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Inputs of these sizes by name, integers with zeros and ones in a pattern of their own: examples of several inputs
    may be alike, such as all zeros."""
    generator = torch.Generator().manual_seed(0)
    return {
        one.name: torch.randint(0, 2, tensor.shape, generator=generator, dtype=tensor.dtype)
        if one.dtype.startswith("int") and not one.mask
        else tensor
        for one, tensor in zip(inputs.inputs, inputs.tensors(sizes), strict=True)
    }


def with_mask(
    one: ModuleInput, inputs: ModuleInputs, original: Probe, outputs: Mapping[str, Dims], tuned: int
) -> ModuleInput:
    """An input with what it tells of tokens: what the model does with it decides, and its name where that says nothing.

    outputs: axes by name, of which those of tokens are "seq", or `tuned` if that is the only length.
    """
    example = inputs.examples.get(one.name)
    is_mark = one.dtype == "bool" or one.mask or (example is not None and bool(((example == 0) | (example == 1)).all()))
    if one.dtype == "float" or not is_mark or not one.is_of_tokens:
        return one
    both: tuple[MaskKind, ...] = ("keep", "ignore")
    kinds = [kind for kind in both if hides(kind, one, original, outputs, tuned)]
    return replace(one, mask=kinds[0]) if len(kinds) == 1 else one


def hides(kind: MaskKind, one: ModuleInput, original: Probe, outputs: Mapping[str, Dims], tuned: int) -> bool:
    """True if a token no longer affects any other where an input is 0 ("keep"), or 1 ("ignore"), and only there.

    False where the tokens of a model do not affect each other, and where its answer has NaN.
    """
    for seq_len in dict.fromkeys((min(tuned, MASK_SEQ_LEN), tuned)):
        with contextlib.suppress(ModuleFailedError):
            place = seq_len // 3
            answers = [
                without_token(original.outputs_of(tensors, "a mask"), outputs, place, tuned)
                for tensors in masked_inputs(kind, one, original, seq_len, place)
            ]
            if any(value.isnan().any() for answer in answers for value in answer):
                return False
            hidden, hidden_other, shown, shown_other = answers
            return all(map(close, hidden, hidden_other)) and not all(map(close, shown, shown_other))
    return False


def masked_inputs(
    kind: MaskKind, one: ModuleInput, original: Probe, seq_len: int, place: int
) -> Iterator[list[Tensor]]:
    """A sequence with one token hidden, and the same with another token there; and both with nothing hidden."""
    inputs = original.inputs
    sizes = original.sizes(1, seq_len)
    plain = dict(zip((other.name for other in inputs.inputs), inputs.tensors(sizes), strict=True))
    for other in inputs.inputs:
        if other.mask and other is not one and other.is_of_tokens:
            plain[other.name] = torch.full_like(plain[other.name], int(other.mask == "keep"))
    changed = dict(plain)
    for other in inputs.inputs:
        if other.dtype != "bool" and not other.mask and other.is_of_tokens:
            changed[other.name] = with_other_token(plain[other.name], other, place)
    shown = torch.full_like(plain[one.name], int(kind == "keep"))
    hidden = shown.clone()
    hidden.select(one.dims.index("seq"), place).fill_(int(kind == "ignore"))
    for mask in (hidden, shown):
        for content in (plain, changed):
            yield [*{**content, one.name: mask}.values()]


def with_other_token(tensor: Tensor, one: ModuleInput, place: int) -> Tensor:
    """Inputs with another value in the place of one token: that of a neighbour or, if it is the same, a new one."""
    axis = one.dims.index("seq")
    token, other = tensor.select(axis, place), tensor.select(axis, max(0, place - 1))
    if torch.equal(token, other):
        other = (
            token + 1 if one.dtype == "float" else one.low + (token - one.low + 1) % max(1, (one.high or 2) - one.low)
        )
    changed = tensor.clone()
    changed.select(axis, place).copy_(other)
    return changed


def without_token(values: Mapping[str, Tensor], outputs: Mapping[str, Dims], place: int, tuned: int) -> list[Tensor]:
    """Outputs without what belongs to one token. outputs, tuned: as in `with_mask`."""
    found = []
    for name, value in values.items():
        for axis, dim in enumerate(outputs[name]):
            if dim in ("seq", tuned):
                others = [index for index in range(value.shape[axis]) if index != place]
                value = value.index_select(axis, torch.tensor(others, dtype=torch.int64))
        found.append(value)
    return found
