"""A user's own module → its spec, by looking at the module and running it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effexport.models.model_spec import Dims, counted, shape_of
from effexport.models.module_spec import ModuleSpec
from effexport.models.validation import SpecError, require

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effexport.models.spec import AttentionSpec

KNOWN_INPUTS = ("input_ids", "hidden_states", "attention_mask", "token_type_ids")
# Sizes that tell the axes of an output apart.
PROBE_BATCH, PROBE_SEQ_LEN = 3, 37


def spec_from_module(module: nn.Module, name: str, seq_len: int | None = None) -> ModuleSpec:
    """Look at a module and run it on a few short batches.

    module: takes some of input_ids, hidden_states, attention_mask and token_type_ids, in any order, and returns a
    tensor or a tuple of tensors whose first axis is the batch. name: for reports.
    Raises SpecError for a module without a layer of effexport.models, with other arguments, or that fails.
    """
    layers = attention_layers(module)
    require(bool(layers), f"{name} contains no layer of effexport.models; build it with attention_from_spec(…)")
    specs = [layer.spec for layer in layers]
    attention = next((spec for spec in specs if spec.is_hashed), specs[0])
    limit = min((spec.max_seq_len for spec in specs if spec.max_seq_len is not None), default=None)
    tuned = tuned_length(specs, name, seq_len, limit)
    inputs = input_dims(module, name, attention.dim)
    probe = Probe(module, name, inputs)
    outputs, is_free = probe.output_dims(probe_length(module, tuned), tuned)
    if is_free and limit != 1:
        longest = probe.longest(outputs, tuned, limit)
    else:
        longest = tuned
        inputs, outputs = ({name: at_length(dims, tuned) for name, dims in axes.items()} for axes in (inputs, outputs))
    return ModuleSpec(
        vocab_size=vocabulary(module) if "input_ids" in inputs else 2,
        seq_len=tuned,
        module=name,
        attention_fields=attention.to_dict(),
        attention_layers=len(layers),
        fused_op_counts=counted(specs, fused=True),
        unfused_op_counts=counted(specs, fused=False),
        input_dims=inputs,
        output_dims=outputs,
        longest=longest,
    )


def tuned_length(specs: Sequence[AttentionSpec], name: str, seq_len: int | None, limit: int | None) -> int:
    """The length to export for: the one that was asked for, that of a layer of one length, or the longest of a layer.

    limit: the most tokens that all layers take. Raises SpecError if more were asked for.
    """
    require(
        seq_len is None or limit is None or seq_len <= limit,
        f"seq_len is {seq_len}, but a layer of {name} has learned positions for a seq_len of {limit}; use at most that",
    )
    fixed = next((spec.fixed_seq_len for spec in specs if spec.fixed_seq_len is not None), None)
    tuned = seq_len or fixed or max(spec.seq_len for spec in specs)
    return tuned if limit is None else min(tuned, limit)


def probe_length(module: nn.Module, longest: int) -> int:
    """A length up to `longest` that is not the size of a parameter, so that it tells the axes of an output apart."""
    sizes = {size for parameter in module.parameters() for size in parameter.shape}
    lengths = (length for length in range(min(PROBE_SEQ_LEN, longest), 0, -1) if length not in sizes)
    return next(lengths, longest)


def longer_length(seq_len: int) -> int:
    """A length beyond the one that a model is exported for, at which it is run if nothing limits it."""
    return seq_len + seq_len // 4 + 1


def at_length(dims: Dims, seq_len: int) -> Dims:
    """The axes of an input or output at one length."""
    return tuple(seq_len if dim == "seq" else dim for dim in dims)


def attention_layers(module: nn.Module) -> list[Any]:
    from effexport.models.layers import AttentionLayer

    return [child for child in module.modules() if isinstance(child, AttentionLayer)]


def input_dims(module: nn.Module, name: str, dim: int) -> dict[str, Dims]:
    """Dims of the arguments of `forward`, in their order."""
    parameters = list(inspect.signature(module.forward).parameters)
    for parameter in parameters:
        require(
            parameter in KNOWN_INPUTS,
            f"forward of {name} takes {parameter!r}; expected only {', '.join(KNOWN_INPUTS)}: wrap the module",
        )
    data = [parameter for parameter in parameters if parameter in ("input_ids", "hidden_states")]
    require(
        len(data) == 1 and parameters[0] == data[0] and "attention_mask" in parameters,
        f"forward of {name} takes {', '.join(parameters)}; expected input_ids or hidden_states first, and an "
        "attention_mask",
    )
    dims: Dims = ("batch", "seq")
    return {parameter: (*dims, dim) if parameter == "hidden_states" else dims for parameter in parameters}


def vocabulary(module: nn.Module) -> int:
    """Rows of the first embedding, which is assumed to be that of the tokens."""
    from torch import nn

    for child in module.modules():
        if isinstance(child, nn.Embedding):
            return child.num_embeddings
    raise SpecError("the module takes input_ids but has no nn.Embedding, whose rows would be the number of tokens")


@dataclass(frozen=True)
class Probe:
    """Runs a module on batches of tokens that are all alike. inputs: axes of its arguments."""

    module: nn.Module
    name: str
    inputs: dict[str, Dims]

    def output_dims(self, some: int, tuned: int) -> tuple[dict[str, Dims], bool]:
        """Axes of the outputs by name, and whether the length is free: whether the module takes `some` tokens, not only
        the `tuned` ones that it is exported for.

        Raises SpecError for a module that fails at both lengths, or that returns something else than tensors.
        """
        try:
            values = self.run(PROBE_BATCH, some)
        except ModuleFailedError:
            try:
                return self.axes_of(self.run(PROBE_BATCH, tuned), tuned), False
            except ModuleFailedError as last:
                raise SpecError(f"{last}; if it takes other lengths, give one with --seq-len") from last.__cause__
        found = self.axes_of(values, some)
        try:
            self.check_sizes(found, values, tuned)
        except ModuleFailedError as error:
            remedy = f"{some} tokens work: give a length that the module takes with --seq-len"
            raise SpecError(f"{error}; {remedy}") from error.__cause__
        with contextlib.suppress(ModuleFailedError):
            self.check_sizes(found, values, 1)
        return found, True

    def check_sizes(self, outputs: dict[str, Dims], values: Sequence[Any], seq_len: int) -> None:
        """Raise SpecError if an output at another length does not have the axes that were found, for the error: from
        `values`; and ModuleFailedError if there is none."""
        for (name, dims), before, after in zip(outputs.items(), values, self.run(1, seq_len), strict=False):
            require(
                tuple(after.shape) == shape_of(dims, {"batch": 1, "seq": seq_len}),
                f"{name} of {self.name} is {list(after.shape)} for 1 × {seq_len} tokens, but {list(before.shape)} for "
                f"{PROBE_BATCH} samples of another length; expected axes whose size is that of the batch, the number "
                "of tokens, or constant: return one value for each token, or an average over them",
            )

    def longest(self, outputs: dict[str, Dims], tuned: int, limit: int | None) -> int | None:
        """The most tokens that the module takes, at least `tuned`; None if no limit was found.

        limit: that of its layers; without one, a longer sequence than `tuned` stands for all.
        """
        works, fails = tuned, longer_length(tuned) if limit is None else limit
        if works == fails or self.follows(outputs, fails):
            return limit
        while fails - works > 1:
            middle = (works + fails) // 2
            works, fails = (middle, fails) if self.follows(outputs, middle) else (works, middle)
        return works

    def follows(self, outputs: dict[str, Dims], seq_len: int) -> bool:
        """Whether the module takes that many tokens, and its outputs have the expected sizes."""
        try:
            values = self.run(1, seq_len)
        except ModuleFailedError:
            return False
        expected = [shape_of(dims, {"batch": 1, "seq": seq_len}) for dims in outputs.values()]
        return [tuple(value.shape) for value in values] == expected

    def axes_of(self, values: Sequence[Any], seq_len: int) -> dict[str, Dims]:
        """Axes of the outputs by name, inferred from their sizes for a batch of PROBE_BATCH."""
        sizes = {"batch": PROBE_BATCH, "seq": seq_len}
        return {
            output_name(self.name, i, value, len(values)): axes(self.name, value, sizes)
            for i, value in enumerate(values)
        }

    def run(self, batch: int, seq_len: int) -> Sequence[Any]:
        """What the module returns. Raises ModuleFailedError."""
        import torch

        sizes, given = {"batch": batch, "seq": seq_len}, []
        for argument, dims in self.inputs.items():
            dtype = torch.float32 if argument == "hidden_states" else torch.int64
            given.append(torch.full(shape_of(dims, sizes), int(argument == "attention_mask"), dtype=dtype))
        try:
            with torch.inference_mode():
                result = self.module.eval()(*given)
        except Exception as error:  # whatever the user's code raises
            what = "a batch of " * (batch > 1) + f"{batch} × {seq_len} tokens"
            raise ModuleFailedError(f"{self.name} fails on {what}: {error}") from error
        return result if isinstance(result, tuple) else (result,)


class ModuleFailedError(SpecError):
    """The user's module raised an error at some length."""


def output_name(name: str, index: int, value: Any, count: int) -> str:
    import torch

    require(isinstance(value, torch.Tensor), f"{name} returns {type(value).__name__}; expected tensors")
    return "output" if count == 1 else f"output{index}"


def axes(name: str, value: torch.Tensor, sizes: Mapping[str, int]) -> Dims:
    shape = list(value.shape)
    require(
        len(shape) >= 2 and shape[0] == sizes["batch"] and value.is_floating_point(),
        f"{name} returns {value.dtype} {shape} for a batch of {sizes['batch']}; expected floats [batch, …]",
    )
    return ("batch", *("seq" if size == sizes["seq"] else size for size in shape[1:]))
