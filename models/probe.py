"""Runs a model on short batches, to find the axes of its outputs and the lengths that it takes."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from effexport.models.model_spec import Dims, longer_length, shape_of
from effexport.models.module_inputs import ModuleInputs
from effexport.models.user_model import CalledByPosition, UnexpectedOutputError, failing_module
from effexport.models.validation import SpecError, require

if TYPE_CHECKING:
    from torch import Tensor, nn

# Sizes that tell the axes of an output apart; others are taken where a parameter has the same.
PROBE_BATCH, PROBE_SEQ_LEN = 3, 37
# The longest sequence that is tried in search of a limit: attention may need memory that is quadratic in it.
FURTHEST = 4096


class ModuleFailedError(SpecError):
    """The user's module raised an error at some length."""


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
                return self.axes_of(self.run(self.batch, tuned), tuned, self.run(1, tuned), tuned), False
            except ModuleFailedError as last:
                remedy = "; if it takes other lengths, give one with --seq-len" * self.is_free
                raise ModuleFailedError(f"{last}{remedy}") from last.__cause__
        try:
            found = self.axes_of(values, some, self.run(1, tuned), tuned)
        except ModuleFailedError as error:
            remedy = f"{some} tokens work: give a length that the module takes with --seq-len"
            raise ModuleFailedError(f"{error}; {remedy}") from error.__cause__
        with contextlib.suppress(ModuleFailedError):
            self.axes_of(values, some, self.run(1, 1), 1)
        return found, True

    def longest(self, outputs: dict[str, Dims], tuned: int, limit: int | None) -> int | None:
        """The most tokens that the module takes, at least `tuned`; None if no limit was found.

        limit: that of its layers. Without one, a longer sequence than `tuned` is tried, one token more than each size
        of a parameter or buffer, which may be a number of positions, and four times as many tokens.
        """
        works, fails = tuned, longer_length(tuned) if limit is None else limit
        if works == fails or self.follows(outputs, fails):
            if limit is not None:
                return limit
            sizes = {size + 1 for size in self.sizes_of_weights() if fails <= size < FURTHEST}
            sizes |= {4 * tuned} if 4 * tuned <= FURTHEST else set()
            if not sizes or self.follows(outputs, max(sizes)):
                return None
            tried = sorted(sizes)
            # whoever takes a length takes the shorter ones
            first = bisect.bisect_left(tried[:-1], True, key=lambda size: not self.follows(outputs, size))
            works, fails = (tried[first - 1] if first else fails), tried[first]
            if self.follows(outputs, fails - 1):
                return fails - 1
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

    def check_examples(self) -> None:
        """Raise ModuleFailedError if the model does not take its own examples."""
        examples = [self.inputs.examples.get(one.name) for one in self.inputs.inputs]
        given = [example for example in examples if example is not None]
        if len(given) == len(examples):
            self.outputs_of(given, "its example inputs")

    def outputs_of(self, tensors: Sequence[Tensor], what: str) -> dict[str, Tensor]:
        """What the module returns, by name. what: the tensors, for errors.

        Raises ModuleFailedError if the user's code fails, and SpecError for outputs that no file can have.
        """
        import torch

        try:
            with torch.inference_mode():
                outputs = self.module.by_name(*tensors)
        except UnexpectedOutputError:
            raise
        except Exception as error:  # whatever the user's code raises
            owner = failing_module(error, self.module)
            text = " ".join(str(error).split()) or type(error).__name__
            place = f" (in {owner})" if owner else ""
            raise ModuleFailedError(f"{self.name} fails on {what}: {text}{place}") from error
        require(bool(outputs), f"{self.name} returns no tensor; expected at least one")
        for name, value in outputs.items():
            require(
                not value.is_complex(),
                f"{name} of {self.name} is {str(value.dtype).removeprefix('torch.')}; expected real numbers: return "
                "torch.view_as_real of it",
            )
        return outputs

    def follows(self, outputs: dict[str, Dims], seq_len: int) -> bool:
        """Whether the module takes that many tokens, and its outputs have the expected sizes."""
        try:
            values = self.run(1, seq_len)
        except ModuleFailedError:
            return False
        sizes = self.sizes(1, seq_len)
        return [tuple(value.shape) for value in values.values()] == [shape_of(d, sizes) for d in outputs.values()]

    def axes_of(
        self, values: Mapping[str, Tensor], seq_len: int, others: Mapping[str, Tensor], other_seq_len: int
    ) -> dict[str, Dims]:
        """Axes of the outputs by name, from their sizes for `batch` sequences of one length and for one of another.

        An axis is free if its size is that of a free axis both times, and constant if it is the same both times.
        Raises SpecError for an output with any other axis.
        """
        sizes, other_sizes = self.sizes(self.batch, seq_len), self.sizes(1, other_seq_len)
        names = {(sizes[axis], other_sizes[axis]): axis for axis in sizes}
        found: dict[str, Dims] = {}
        for name, value in values.items():
            before, after = list(value.shape), list(others[name].shape) if name in others else None
            pairs = list(zip(before, after or (), strict=False))
            what = f"for 1 × {other_seq_len} tokens" if self.is_free else "for 1 sample"
            before_what = f"{self.batch} samples{' of another length' * (self.is_free and seq_len != other_seq_len)}"
            require(
                after is not None and len(before) == len(after) and all(a == b or (a, b) in names for a, b in pairs),
                f"{name} of {self.name} is {after} {what}, but {before} for {before_what}; expected axes "
                "whose size is that of the batch, the number of tokens, or constant: return one value for each token, "
                "or an average over them",
            )
            found[name] = tuple(names.get(pair, pair[0]) for pair in pairs)
        return found

    def run(self, batch: int, seq_len: int) -> dict[str, Tensor]:
        """What the module returns for these sizes, by name. Raises as `outputs_of`."""
        tokens = f" × {seq_len} tokens" * self.is_free
        what = f"a batch of {batch}{tokens}" if batch > 1 or not tokens else f"{batch}{tokens}"
        return self.outputs_of(list(self.inputs.tensors(self.sizes(batch, seq_len))), what)


def probe_length(module: nn.Module, longest: int) -> int:
    """A length below `longest` that is not the size of a parameter, so that it tells the axes of an output apart."""
    sizes = parameter_sizes(module)
    lengths = (length for length in range(min(PROBE_SEQ_LEN, longest - 1), 0, -1) if length not in sizes)
    return next(lengths, longest)


def parameter_sizes(module: nn.Module) -> set[int]:
    return {size for parameter in module.parameters() for size in parameter.shape}
