"""The interface of every runtime: a runner, which maps named arrays to named arrays, and checks of both.

Inputs are checked before a runtime sees them, and so are the sizes of outputs.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from effexport.base.dtypes import TensorInfo, named_sizes
from effexport.base.errors import RuntimeFailedError, UserError
from effexport.base.spec import INPUT_DEFAULTS, MASK_NAME, BuildSpec, is_optional
from effexport.models.encoder.spec import MASKS
from effexport.models.size_formula import shape_of
from effexport.models.validation import did_you_mean

if TYPE_CHECKING:
    from effexport.base.dtypes import Array


def tensors_text(tensors: Iterable[TensorInfo]) -> str:
    """Names, element types and axes of inputs or outputs, for people."""
    return ", ".join(map(str, tensors))


class Closeable(Protocol):
    """A resource that a `with` block closes at its end."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Runner(Closeable, Protocol):
    """An open model. Thread-safe. `run` maps input names to arrays, and returns output names with arrays.

    implementation: per custom operator of the model, what runs it: "body", "kernel", "plugin" or "Attention".
    """

    @property
    def inputs(self) -> tuple[TensorInfo, ...]: ...

    @property
    def outputs(self) -> tuple[TensorInfo, ...]: ...

    @property
    def implementation(self) -> Mapping[str, str]: ...

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]: ...

    def run_complete(self, feeds: dict[str, Array]) -> dict[str, Array]:
        """As `run`, for feeds with all inputs that their owner has checked."""


def nothing_refused(feeds: Mapping[str, Array]) -> str:
    """The reason for refusing feeds of a model without such a reason."""
    return ""


@dataclass(frozen=True)
class FeedLimits:
    """Limits that are not in a graph: the longest and the shortest sequence, and per input of indices, how many values
    there are.

    mask: the input that is made of 0 and 1, "" if none is; mask_ignores: whether 1 stands for padding. defaults: values
    of inputs that may be left out. lowest, highest: the smallest and the largest sizes of other axes than that of
    tokens. outputs: what every answer is held to; empty if something else judges it. is_of_code: whether branches of
    the user's code, and no positions, limit the longest sequence. why_refused: as of the model, asked last.
    """

    max_seq_len: int | None = None
    indices: Mapping[str, int] = field(default_factory=dict)
    mask: str = MASK_NAME
    mask_ignores: bool = False
    defaults: Mapping[str, int] = field(default_factory=lambda: INPUT_DEFAULTS)
    min_seq_len: int = 1
    lowest: Mapping[str, int] = field(default_factory=dict)
    highest: Mapping[str, int] = field(default_factory=dict)
    outputs: tuple[TensorInfo, ...] = ()
    is_of_code: bool = False
    why_refused: Callable[[Mapping[str, Array]], str] = nothing_refused


def limits_from_spec(spec: BuildSpec) -> FeedLimits:
    model = spec.model
    defaults = {tensor.name: INPUT_DEFAULTS[tensor.name] for tensor in spec.inputs if is_optional(tensor)}
    if MASK_NAME in defaults and model.mask == MASK_NAME and model.mask_ignores:
        defaults[MASK_NAME] = 0
    return FeedLimits(
        model.max_seq_len,
        model.input_limits,
        model.mask,
        model.mask_ignores,
        defaults,
        model.shortest,
        model.lowest,
        model.highest,
        is_of_code="seq" in model.size_notes,
        why_refused=model.why_refused,
    )


def limits_of_runner(spec: BuildSpec) -> FeedLimits:
    """The limits of a runner whose answers nobody compares with those of PyTorch."""
    return replace(limits_from_spec(spec), outputs=spec.outputs)


def longest_text(limits: FeedLimits) -> str:
    """The most tokens that a model takes, and the way to more."""
    if limits.is_of_code:
        return (
            f"this file takes at most {limits.max_seq_len}, as its report explains: build another one from a longer "
            "example"
        )
    return f"this model has positions for {limits.max_seq_len}: build with a larger --seq-len"


def check_answer(
    answer: Mapping[str, Array], feeds: Mapping[str, Array], inputs: tuple[TensorInfo, ...], limits: FeedLimits
) -> None:
    """Raise RuntimeFailedError for an output whose axes have other sizes than the manifest says. feeds: complete."""
    sizes = named_sizes(inputs, feeds) if limits.outputs else {}
    for tensor in limits.outputs:
        shape, expected = answer[tensor.name].shape, shape_of(tensor.dims, sizes)
        if shape != expected:
            raise RuntimeFailedError(
                f"output {tensor.name!r} is {list(shape)}; expected {list(expected)}, as the manifest says: {tensor}. "
                "The model file is not the one that was proven, or does not hold for these sizes: run effexport verify"
            )


class CheckedRunner(Closeable, ABC):
    """A runner whose inputs and answers are checked. Thread-safe; use it as a context manager or call `close`."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    implementation: Mapping[str, str]
    limits: FeedLimits

    def __repr__(self) -> str:
        signature = f"{tensors_text(self.inputs)} → {tensors_text(self.outputs)}"
        ops = "".join(f"; {op}: {what}" for op, what in self.implementation.items())
        return f"<{type(self).__name__}: {signature}{ops}>"

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays by input name → arrays by output name. An absent attention mask means no padding.

        Raises UserError for a wrong name, dtype, rank, size or value, for a shape outside the profiles of an engine,
        and for an engine's outputs without elements; RuntimeFailedError if the graph fails.
        """
        return self._answer(self.opened(), self.complete(feeds))

    def complete(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The feeds with all inputs. Raises UserError as `run` does."""
        return checked_feeds(feeds, self.inputs, self.limits)

    def run_complete(self, feeds: dict[str, Array]) -> dict[str, Array]:
        """As `run`, for feeds that `complete` has returned."""
        return self._answer(self.opened(), feeds)

    def _answer(self, opened: Any, feeds: dict[str, Array]) -> dict[str, Array]:
        answer = self._run(opened, feeds)
        check_answer(answer, feeds, self.inputs, self.limits)
        return answer

    @abstractmethod
    def opened(self) -> Any:
        """The loaded model, which a run holds to its end, whoever calls `close`. Raises EffexportError after that."""

    @abstractmethod
    def _run(self, opened: Any, feeds: dict[str, Array]) -> dict[str, Array]:
        """The outputs by name. opened: see `opened`. feeds: complete."""


def checked_feeds(feeds: object, inputs: tuple[TensorInfo, ...], limits: FeedLimits) -> dict[str, Array]:
    """The feeds with all inputs and the right types; an absent attention mask becomes all ones.

    feeds: a mapping of input names to arrays, or to nested lists.
    Raises UserError for something else, for an unknown or missing input, and for a wrong type, shape or value.
    """
    import numpy as np

    expected = tensors_text(inputs)
    if not isinstance(feeds, Mapping):
        given = type(feeds).__name__
        raise UserError(f"the inputs are given as {given}; expected a dictionary with an array for: {expected}")
    names = [tensor.name for tensor in inputs]
    for name in feeds:
        if name not in names:
            raise UserError(f"unknown input {name!r}{did_you_mean(name, names)} Expected: {expected}")
    complete = {tensor.name: array_of(feeds[tensor.name], tensor) for tensor in inputs if tensor.name in feeds}
    sizes: dict[str, tuple[int, str]] = {}
    for tensor in inputs:
        if tensor.name not in complete and tensor.name in limits.defaults:
            # the data comes first, so its sizes are known and checked
            shape = tuple(sizes[dim][0] if isinstance(dim, str) else dim for dim in tensor.dims)
            complete[tensor.name] = np.full(shape, limits.defaults[tensor.name], dtype=tensor.dtype)
        if tensor.name not in complete:
            raise UserError(f"input {tensor.name!r} is missing; expected: {expected}")
        check_array(complete[tensor.name], tensor, sizes)
    for axis, lowest in limits.lowest.items():
        size, owner = sizes.get(axis, (lowest, ""))
        if size < lowest:
            raise UserError(
                f"{axis} is {size} in {owner!r}; this model takes at least {lowest}: pad the input; its report says why"
            )
    for axis, highest in limits.highest.items():
        size, owner = sizes.get(axis, (highest, ""))
        if size > highest:
            raise UserError(f"{axis} is {size} in {owner!r}; this model has positions for {highest}: shorten the input")
    check_values(complete, inputs, limits)
    if reason := limits.why_refused(complete):
        raise UserError(reason)
    return {name: complete[name] for name in names}


def array_of(value: Any, tensor: TensorInfo, what: str = "input") -> Array:
    """An array, or nested lists as an array.

    Raises UserError for lists of different lengths, and for lists of something that becomes another element type.
    """
    import numpy as np

    try:
        array = np.asarray(value)
    except ValueError as error:  # "inhomogeneous shape"
        raise UserError(
            f"{what} {tensor.name!r} has rows of different lengths; pad them to one length, and mask the padding"
        ) from error
    if not hasattr(value, "dtype") and array.size and array.dtype.name != tensor.dtype:
        given = f"{what} {tensor.name!r} is a {type(value).__name__} that numpy reads as {array.dtype.name}"
        if tensor.dtype.startswith("int"):
            raise UserError(f"{given}; expected {tensor}, as nested lists of integers that fit in {tensor.dtype}")
        raise UserError(f"{given}; expected an array: {tensor}: make one with numpy.array(…, dtype={tensor.dtype!r})")
    return array


def check_array(
    value: Array, tensor: TensorInfo, sizes: dict[str, tuple[int, str]], what: str = "input", growing: str = ""
) -> None:
    """Check dtype, rank and dims of one input. `sizes` collects the named dimensions seen so far. growing: an axis that
    may have no element."""
    expected: str | None = None
    if value.size == 0 and 0 in (size for dim, size in zip_longest(tensor.dims, value.shape) if dim != growing):
        expected = f", which is empty; expected at least one element in every dimension of {tensor}"
    elif dtype_name(value.dtype) != tensor.dtype:
        expected = f"; expected {tensor}: convert it with .astype({tensor.dtype!r})"
    elif value.ndim != len(tensor.dims):
        expected = f", of rank {value.ndim}; expected rank {len(tensor.dims)}: {tensor}"
    else:
        for dim, size in zip(tensor.dims, value.shape, strict=True):
            if isinstance(dim, int) and size != dim:
                expected = f"; expected {tensor}"
                break
            if isinstance(dim, str) and dim != "?":
                known, owner = sizes.setdefault(dim, (size, tensor.name))
                if known != size:
                    expected = f", but {dim} is {known} in {owner!r}; expected the same {dim} in all {what}s"
                    break
    if expected is not None:
        raise UserError(f"{what} {tensor.name!r} is {value.dtype} {list(value.shape)}{expected}")


def checked_state(state: object, states: tuple[TensorInfo, ...], growing: str = "") -> dict[str, Array]:
    """A state as arrays, or {}. growing: an axis that is empty at first. Raises UserError for one that does not fit."""
    if not isinstance(state, dict):
        raise UserError(f"the state is given as {type(state).__name__}; expected a dictionary of arrays")
    names = [tensor.name for tensor in states]
    if state and set(state) != set(names):
        given = ", ".join(map(repr, state))
        raise UserError(f"the state has {given}; expected {', '.join(names)}, or an empty dictionary")
    sizes: dict[str, tuple[int, str]] = {}
    arrays: dict[str, Array] = {}
    for tensor in states if state else ():
        arrays[tensor.name] = array_of(state[tensor.name], tensor, "state")
        check_array(arrays[tensor.name], tensor, sizes, "state", growing)
    return arrays


@functools.cache
def dtype_name(dtype: Any) -> str:
    """The name of a numpy element type, which numpy puts together each time: a decode step asks for dozens."""
    name: str = dtype.name
    return name


def check_mask(mask: Array | None, limits: FeedLimits) -> None:
    """Raise UserError for a mask with other values than the model was proven for; it may compute with them, as with -1
    in the place of padding."""
    if mask is None or mask.dtype.kind == "b":
        return
    known = (mask == 0) | (mask == 1)  # np.isin takes ten times as long
    if not known.all():
        kept, hidden = (0, 1) if limits.mask_ignores else (1, 0)
        raise UserError(
            f"{limits.mask} has values other than 0 and 1; expected {kept} for tokens to keep, {hidden} for padding: "
            f"replace {mask[~known][0]:g} by one of them"
        )


def check_values(feeds: Mapping[str, Array], inputs: tuple[TensorInfo, ...], limits: FeedLimits) -> None:
    import numpy as np

    # other tools rename axes: then tokens are usually the second of the first input
    tensor = next((tensor for tensor in inputs if "seq" in tensor.dims), inputs[0])
    axis = tensor.dims.index("seq") if "seq" in tensor.dims else 1
    seq_len = next(iter(feeds[tensor.name].shape[axis : axis + 1]), 0)
    is_free = not isinstance(next(iter(tensor.dims[axis : axis + 1]), 0), int)
    if is_free and limits.max_seq_len is not None and seq_len > limits.max_seq_len:
        raise UserError(f"the sequence has {seq_len} tokens; {longest_text(limits)}, or shorten or split the input")
    if is_free and seq_len < limits.min_seq_len:
        raise UserError(
            f"the sequence has {seq_len} tokens; this model takes at least {limits.min_seq_len}: pad the input; its "
            "report says why"
        )
    check_mask(feeds.get(limits.mask), limits)
    for tensor in inputs:
        if tensor.dims == ("batch", MASKS):
            check_positions(tensor.name, feeds[tensor.name], seq_len, limits.max_seq_len or seq_len)
    for name, limit in limits.indices.items():
        if name in feeds:
            low, high = int(feeds[name].min()), int(feeds[name].max())
            if low < 0 or high >= limit:
                wrong = low if low < 0 else high
                place = list(map(int, np.argwhere(feeds[name] == wrong)[0]))
                raise UserError(f"{name} contains {wrong}; expected 0 to {limit - 1}; see {name}{place}")


def check_positions(name: str, positions: Array, seq_len: int, most: int) -> None:
    """Raise UserError for places of tokens that are beyond the sequence, or for more of them than any sequence has
    tokens, `most`."""
    low, high, count = int(positions.min()), int(positions.max()), positions.shape[1]
    if low < 0 or high >= seq_len:
        raise UserError(
            f"{name} contains {low if low < 0 else high}; expected 0 to {seq_len - 1}, the places of the tokens"
        )
    if count > most:
        raise UserError(f"{name} has {count} places in each row; expected at most {most}, as many as tokens")


# dtype and shape per input.
Signature = Mapping[str, tuple[Any, tuple[int, ...]]]


def signature_of(feeds: Mapping[str, Array]) -> Signature:
    return {name: (array.dtype, array.shape) for name, array in feeds.items()}


def check_bound_feeds(feeds: Mapping[str, Array], bound: Signature) -> None:
    """Raises UserError for an input that is not bound, or that is bound with another dtype or shape."""
    for name, given in signature_of(feeds).items():
        if name not in bound:
            raise UserError(f"input {name!r} is not bound; expected one of: {', '.join(bound)}")
        if given != bound[name]:
            (dtype, shape), (bound_dtype, bound_shape) = given, bound[name]
            raise UserError(
                f"input {name!r} is {dtype} {list(shape)}, but {bound_dtype} {list(bound_shape)} is bound; "
                "bind the runner again for another shape"
            )
