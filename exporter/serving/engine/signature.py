"""Inputs and outputs of a model as clients see them: names and types of tensors and texts, and limits of requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from effexport.base.dtypes import DTYPES, Array, TensorInfo
from effexport.base.errors import UserError
from effexport.base.spec import BuildSpec
from effexport.models.size_formula import shape_of
from effexport.models.validation import shown
from effexport.runners.runner import FeedLimits, checked_feeds, limits_from_spec, longest_text
from effexport.serving.engine.errors import RequestError
from effexport.serving.engine.settings import DEFAULT_MAX_SEQ_LEN, MAX_TEXT_BYTES, MAX_TEXTS, ServingSettings
from effexport.tasks.sampling import STREAM, Sampling, sampling_from_options

# The protocol has no JSON for these: they travel as binary data only.
BINARY_ONLY = ("FP16", "BF16")
# The element type of texts, bytes in UTF-8; no tensor of an artifact has it.
STRING = "string"
TEXT, CONTEXT, ANSWER = "text", "context", "answer"
# What a request has in place of tensors; the context is optional.
TEXTS = (TensorInfo(TEXT, STRING, ("batch",)), TensorInfo(CONTEXT, STRING, ("batch",)))
# Of models that generate, as in Triton's own backends for language models.
TEXT_INPUT, TEXT_OUTPUT, FINISH_REASON = "text_input", "text_output", "finish_reason"
# Field of Triton's `generate` that tritonserver 2.51.0 hands over as a parameter.
REQUEST_ID = "id"


@dataclass(frozen=True)
class ServedSignature:
    """Inputs and outputs of a model. max_sizes: the largest size of every dimension that has a limit, by name."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    limits: FeedLimits
    max_sizes: Mapping[str, int]

    def checked_shape(self, tensor: TensorInfo, shape: Any) -> tuple[int, ...]:
        """The shape in a request. Raises RequestError if it does not fit, or is beyond a limit of this server."""
        given = f"input {tensor.name!r} has shape {shown(shape)}"
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise RequestError(f"{given}; expected a list of integers: {tensor}")
        if min(shape, default=1) < 1:
            raise RequestError(f"{given}; expected {tensor}, every size at least 1")
        if len(shape) != len(tensor.dims):
            raise RequestError(f"{given}, of rank {len(shape)}; expected rank {len(tensor.dims)}: {tensor}")
        for dim, size in zip(tensor.dims, shape, strict=True):
            if isinstance(dim, str):
                self.check_size(dim, size, f"{given}: ")
        return tuple(shape)

    def check_size(self, dim: str, size: int, given: str = "") -> None:
        """Raises RequestError for a size of a named dimension that is beyond its limit."""
        largest = self.max_sizes.get(dim)
        if largest is not None and size > largest:
            raise RequestError(f"{given}{dim} is {size}; this server takes at most {largest}{_REMEDY[dim]}")

    def complete(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The feeds, with defaults for optional inputs. Raises UserError for feeds that do not fit."""
        return checked_feeds(feeds, self.inputs, self.limits)

    def metadata(self) -> dict[str, Any]:
        """`inputs` and `outputs` of the V2 model metadata; −1 stands for a dynamic dimension."""

        def described(tensor: TensorInfo) -> dict[str, Any]:
            shape = [dim if isinstance(dim, int) else -1 for dim in tensor.dims]
            return {"name": tensor.name, "datatype": DTYPES[tensor.dtype].protocol, "shape": shape}

        return {"inputs": list(map(described, self.inputs)), "outputs": list(map(described, self.outputs))}


# Remedies for a dimension that is too large.
_REMEDY = {
    "batch": " rows in a request: send several requests, which are joined, or start it with a larger --max-batch",
    "seq": " tokens: shorten or split the input, or start it with a larger --max-seq-len if the model takes more",
}


def signature_from_spec(spec: BuildSpec, settings: ServingSettings) -> ServedSignature:
    """Raises UserError for a --max-seq-len that the model has no positions for."""
    limits, own, wanted = limits_from_spec(spec), spec.model.max_seq_len, settings.max_seq_len
    if own is not None and wanted is not None and wanted > own:
        raise UserError(f"--max-seq-len is {wanted}; {longest_text(limits)}")
    longest = wanted or own or max(DEFAULT_MAX_SEQ_LEN, spec.model.seq_len)
    return ServedSignature(spec.inputs, spec.outputs, limits, {"batch": settings.max_batch, "seq": longest})


@dataclass(frozen=True)
class PackagedSignature:
    """Inputs and outputs of a model of Triton. optional: names of inputs that a request may leave out."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    optional: frozenset[str] = frozenset()


# The fields of Sampling, and how the text comes.
OPTIONS = {
    STREAM: "bool",
    "max_new_tokens": "int32",
    "temperature": "float32",
    "top_k": "int32",
    "seed": "int64",
    "stop_at_eos": "bool",
}
GENERATED = {TEXT_OUTPUT: STRING, FINISH_REASON: STRING, "prompt_tokens": "int64", "seed": "int64"}
# A request is one prompt. The text comes at once, or with `stream` in pieces; only the last has the other outputs.
GENERATION = PackagedSignature(
    tuple(TensorInfo(name, dtype, (1,)) for name, dtype in {TEXT_INPUT: STRING, **OPTIONS}.items()),
    tuple(TensorInfo(name, dtype, (1,)) for name, dtype in GENERATED.items()),
    frozenset(OPTIONS),
)


def example_shape(tensor: TensorInfo, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape that a model takes; sizes: of axes by name, 2 for others."""
    return shape_of(tensor.dims, defaultdict(lambda: 2, sizes))


def triton_type(dtype: str) -> str:
    """The type in config.pbtxt."""
    return "TYPE_STRING" if dtype == STRING else DTYPES[dtype].triton


def protocol_type(dtype: str) -> str:
    """The type in a request."""
    return "BYTES" if dtype == STRING else DTYPES[dtype].protocol


def tensors_of(values: Sequence[TensorInfo]) -> list[TensorInfo]:
    """The inputs or outputs that are not texts."""
    return [tensor for tensor in values if tensor.dtype != STRING]


def objects(values: Sequence[Any]) -> Array:
    """An array of any values, such as texts in UTF-8."""
    import numpy as np

    return np.fromiter(values, object, len(values))


def text_of(value: object, name: str) -> str:
    """A text of a request, which is given as a string or in UTF-8.

    Raises UserError for something else, and for a text that is too long to be tokenised beside other requests.
    """
    if not isinstance(value, str | bytes):
        raise UserError(f"{name} is {shown(value)}; expected a string")
    data = value.encode() if isinstance(value, str) else value
    if len(data) > MAX_TEXT_BYTES:
        raise UserError(f"{name} has {len(data)} bytes; expected at most {MAX_TEXT_BYTES}: send it in parts")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from error


@contextmanager
def named_by(index: int, count: int) -> Iterator[None]:
    """Errors about one of several texts of a request say which. count: of the texts."""
    try:
        yield
    except UserError as error:
        if count == 1 or isinstance(error, RequestError):
            raise
        raise UserError(f"{TEXT} {index}: {error}") from error


def texts_of_inputs(inputs: Mapping[str, Array]) -> list[tuple[str, str | None]]:
    """The texts of a request, each with its context or None.

    Raises UserError unless there are texts that can be read, a context for each of them or none, and nothing else.
    """
    if TEXT not in inputs or inputs.keys() - {TEXT, CONTEXT}:
        given = ", ".join(sorted(inputs)) or "no inputs"
        raise UserError(f"the request has {given}; expected {TEXT}, with or without {CONTEXT}, or the model's tensors")
    texts, contexts = inputs[TEXT], inputs.get(CONTEXT)
    if contexts is not None and contexts.shape != texts.shape:
        raise UserError(
            f"{TEXT} has the shape {list(texts.shape)} and {CONTEXT} {list(contexts.shape)}; expected a {CONTEXT} for "
            f"each {TEXT}"
        )
    if not 1 <= texts.size <= MAX_TEXTS:
        raise UserError(
            f"{TEXT} has the shape {list(texts.shape)}; expected 1 to {MAX_TEXTS} texts: send several requests"
        )
    found = []
    for index, text in enumerate(texts.flat):
        with named_by(index, texts.size):
            context = None if contexts is None else text_of(contexts.flat[index], CONTEXT)
            found.append((text_of(text, TEXT), context))
    return found


def generation_request(text: object, options: Iterable[tuple[str, Any]]) -> tuple[str, Sampling, bool | None]:
    """A prompt, how to continue it, and whether the text is to be sent in pieces, None if the request does not say.

    Raises UserError for a missing prompt, and for an option that is unknown or cannot work.
    """
    if text is None:
        raise UserError(f"{TEXT_INPUT} is missing; expected the text to continue")
    sampling, in_pieces = sampling_from_options(options)
    if not isinstance(in_pieces, bool | None):
        raise UserError(f"{STREAM} is {shown(in_pieces)}; expected true or false")
    return text_of(text, TEXT_INPUT), sampling, in_pieces
