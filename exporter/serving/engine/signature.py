"""Inputs and outputs of a model, with the limits that a request must meet before memory is allocated for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effexport.dtypes import DTYPES, TensorInfo
from effexport.errors import UserError
from effexport.models.validation import did_you_mean, shown
from effexport.runners.feeds import FeedLimits, checked_feeds, limits_from_spec, longest_text
from effexport.serving.engine.errors import RequestError
from effexport.serving.engine.settings import DEFAULT_MAX_SEQ_LEN, ServingSettings
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from effexport.dtypes import Array

# The protocol has no JSON for these: they travel as binary data only.
BINARY_ONLY = ("FP16", "BF16")


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a model. max_sizes: the largest size of every dimension that has a limit, by name."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    limits: FeedLimits
    max_sizes: Mapping[str, int]

    def checked_shape(self, tensor: TensorInfo, shape: Any) -> tuple[int, ...]:
        """The shape in a request. Raises RequestError if it does not fit the dims and limits of the input."""
        given = f"input {tensor.name!r} has shape {shown(shape)}"
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise RequestError(f"{given}; expected a list of integers: {tensor}")
        if len(shape) != len(tensor.dims):
            raise RequestError(f"{given}, of rank {len(shape)}; expected rank {len(tensor.dims)}: {tensor}")
        for dim, size in zip(tensor.dims, shape, strict=True):
            if size < 1 or (isinstance(dim, int) and size != dim):
                raise RequestError(f"{given}; expected {tensor}, every size at least 1")
            if isinstance(dim, int):
                continue
            self.check_size(dim, size, f"{given}: ")
        return tuple(shape)

    def check_size(self, dim: str, size: int, given: str = "") -> None:
        """Raises RequestError for a size of a named dimension that is beyond its limit."""
        largest = self.max_sizes.get(dim)
        if largest is not None and size > largest:
            raise RequestError(f"{given}{dim} is {size}; this server takes at most {largest}{_REMEDY[dim]}")

    def complete(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The feeds, with defaults for optional inputs. Raises RequestError for feeds that do not fit."""
        try:
            return checked_feeds(feeds, self.inputs, self.limits)
        except UserError as error:
            raise RequestError(str(error)) from error

    def metadata(self) -> dict[str, Any]:
        """`inputs` and `outputs` of the V2 model metadata; −1 stands for a dynamic dimension."""
        return {
            "inputs": [tensor_metadata(t) for t in self.inputs],
            "outputs": [tensor_metadata(t) for t in self.outputs],
        }


# Remedies for a dimension that is too large.
_REMEDY = {
    "batch": " rows in a request: send several requests, which are joined, or start it with a larger --max-batch",
    "seq": " tokens: shorten or split the input, or start it with a larger --max-seq-len if the model takes more",
}


def signature_from_spec(spec: BuildSpec, settings: ServingSettings) -> Signature:
    """Raises UserError for a --max-seq-len that the model has no positions for."""
    limits, own, wanted = limits_from_spec(spec), spec.model.max_seq_len, settings.max_seq_len
    if own is not None and wanted is not None and wanted > own:
        raise UserError(f"--max-seq-len is {wanted}; {longest_text(limits)}")
    longest = wanted or own or max(DEFAULT_MAX_SEQ_LEN, spec.model.seq_len)
    return Signature(spec.inputs, spec.outputs, limits, {"batch": settings.max_batch, "seq": longest})


def named(tensors: tuple[TensorInfo, ...], name: str, kind: str) -> TensorInfo:
    """The tensor of this name. Raises RequestError, which calls it `kind`."""
    for tensor in tensors:
        if tensor.name == name:
            return tensor
    raise unknown_name(name, [tensor.name for tensor in tensors], kind)


def unknown_name(name: str, names: list[str], kind: str) -> RequestError:
    return RequestError(f"unknown {kind} {shown(name)}{did_you_mean(name, names)} Expected: {', '.join(names)}")


def tensor_metadata(tensor: TensorInfo) -> dict[str, Any]:
    shape = [dim if isinstance(dim, int) else -1 for dim in tensor.dims]
    return {"name": tensor.name, "datatype": DTYPES[tensor.dtype].protocol, "shape": shape}
