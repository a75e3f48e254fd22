"""Requests of Triton's generate extension: a text and how to continue it; and the answers, whole or as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import orjson

from effexport.errors import UserError
from effexport.generation.sampling import ALIASES, Sampling
from effexport.generation.text_generator import Piece
from effexport.models.validation import did_you_mean, shown
from effexport.serving.protocol.errors import RequestError
from effexport.serving.protocol.request_fields import parsed_object
from effexport.serving.protocol.text_request import checked_texts

TEXT = "text_input"
STREAM = "stream"


@dataclass(frozen=True)
class GenerateRequest:
    """A text to continue. id: to be returned."""

    id: str | None
    text: str
    sampling: Sampling


def generate_request(body: bytes, *, streaming: bool) -> GenerateRequest:
    """Parse and check a request. Parameters may be in `parameters` or beside the text. Raises RequestError."""
    given = parsed_object(body, f"a JSON object with {TEXT}")
    identifier, text, parameters = given.pop("id", None), given.pop(TEXT, None), given.pop("parameters", None)
    if identifier is not None and not isinstance(identifier, str):
        raise RequestError(f"id is {shown(identifier)}; expected a string")
    if not isinstance(text, str):
        raise RequestError(f"{TEXT} is {'missing' if text is None else shown(text)}; expected the text to continue")
    checked_texts([text], TEXT)
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"parameters are {shown(parameters)}; expected an object")
    return GenerateRequest(identifier, text, sampling_from(given, parameters or {}, streaming=streaming))


def sampling_from(beside: Mapping[str, Any], inside: Mapping[str, Any], *, streaming: bool) -> Sampling:
    """The parameters of a request; None counts as not given. Raises RequestError."""
    known = [field.name for field in fields(Sampling)]
    found: dict[str, Any] = {}
    for name, value in (*beside.items(), *inside.items()):
        if name == STREAM:
            if value not in (streaming, None):
                other = "generate" if streaming else "generate_stream"
                raise RequestError(f"stream is {shown(value)}; send the request to …/{other}, or leave stream out")
            continue
        own = ALIASES.get(name, name)
        if own not in known:
            names = (*known, *ALIASES)
            raise RequestError(f"unknown parameter {shown(name)}{did_you_mean(name, names)} Known: {', '.join(names)}")
        if own in found:
            raise RequestError(f"the parameter {own} is given twice")
        found[own] = value
    try:
        return Sampling(**{name: value for name, value in found.items() if value is not None})
    except UserError as error:
        raise RequestError(str(error)) from error


def answer_fields(
    request: GenerateRequest, name: str, version: str, pieces: Sequence[Piece], prompt_tokens: int, seed: int
) -> dict[str, Any]:
    """The answer with pieces of the text: all of them, or those of one event. The last says how the text ended."""
    answer: dict[str, Any] = {
        "model_name": name,
        "model_version": version,
        "text_output": "".join(piece.text for piece in pieces),
        "tokens": [piece.token for piece in pieces if piece.finish_reason != "eos"],
    }
    if request.id is not None:
        answer["id"] = request.id
    if (reason := pieces[-1].finish_reason) is not None:
        answer |= {"finish_reason": reason, "prompt_tokens": prompt_tokens, "seed": seed}
    return answer


def event(fields: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + orjson.dumps(fields) + b"\n\n"
