"""What a request to a model that generates asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effexport.errors import UserError
from effexport.generation.sampling import ALIASES, Sampling
from effexport.models.validation import did_you_mean
from effexport.triton.signature import OPTIONS, REQUEST_ID, STREAM, TEXT_INPUT, decoded

if TYPE_CHECKING:
    from effexport.dtypes import Array

OPTION_NAMES = tuple(tensor.name for tensor in OPTIONS)


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and how to continue it. in_pieces: whether the text is sent as it arrives."""

    prompt: str
    sampling: Sampling
    in_pieces: bool


def generation_request(inputs: Mapping[str, Array], parameters: Mapping[str, Any]) -> GenerationRequest:
    """inputs: of the model, [1] each. parameters: of the request; they may have the options, too.

    Raises UserError for a missing prompt, and for an option that is unknown or cannot work.
    """
    if TEXT_INPUT not in inputs:
        raise UserError(f"input {TEXT_INPUT!r} is missing; expected the text to continue")
    options = {ALIASES.get(name, name): value for name, value in parameters.items() if name != REQUEST_ID}
    options |= {name: number(array) for name, array in inputs.items() if name != TEXT_INPUT}
    for name in options:
        if name not in OPTION_NAMES:
            known = ", ".join(OPTION_NAMES)
            raise UserError(f"unknown parameter {name!r}{did_you_mean(name, OPTION_NAMES)} Expected: {known}")
    in_pieces = options.pop(STREAM, False)
    if not isinstance(in_pieces, bool):
        raise UserError(f"{STREAM} is {in_pieces!r}; expected true or false")
    return GenerationRequest(decoded(inputs[TEXT_INPUT][0], TEXT_INPUT), Sampling(**options), in_pieces)


def number(array: Array) -> Any:
    """The element of an input: 0.7 for a float32 that the client wrote as 0.7, although float32 is less precise."""
    return float(str(array[0])) if array.dtype.kind == "f" else array.item()
