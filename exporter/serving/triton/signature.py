"""What a Triton model takes and returns: the tensors of its artifact, and texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from effexport.dtypes import DTYPES, TensorInfo
from effexport.errors import UserError
from effexport.serving.engine.settings import MAX_TEXT_BYTES

# The element type of texts, bytes in UTF-8; no tensor of an artifact has it.
STRING = "string"
TEXT, CONTEXT, ANSWER = "text", "context", "answer"
# Of models that generate, as in Triton's own backends for language models.
TEXT_INPUT, TEXT_OUTPUT, FINISH_REASON = "text_input", "text_output", "finish_reason"
STREAM = "stream"
# Field of Triton's `generate` that tritonserver 2.51.0 hands over as a parameter.
REQUEST_ID = "id"


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a model. optional: names of inputs that a request may leave out."""

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    optional: frozenset[str] = frozenset()

    def with_texts(self, max_batch: int) -> Signature:
        """Also takes a text for each row of a batch, in place of the tensors, and returns its answer.

        max_batch: of the model; 0 if Triton does not batch its requests.
        """
        dims: tuple[int | str, ...] = ("batch", 1) if max_batch else ("batch",)
        text, context, answer = (TensorInfo(name, STRING, dims) for name in (TEXT, CONTEXT, ANSWER))
        inputs = (*self.inputs, text, context)
        return Signature(inputs, (*self.outputs, answer), frozenset(tensor.name for tensor in inputs))


OPTIONS = (
    TensorInfo(STREAM, "bool", (1,)),
    # the fields of Sampling
    TensorInfo("max_new_tokens", "int32", (1,)),
    TensorInfo("temperature", "float32", (1,)),
    TensorInfo("top_k", "int32", (1,)),
    TensorInfo("seed", "int64", (1,)),
    TensorInfo("stop_at_eos", "bool", (1,)),
)
# A request is one prompt. The text comes at once, or with `stream` in pieces; only the last has the other outputs.
GENERATION = Signature(
    (TensorInfo(TEXT_INPUT, STRING, (1,)), *OPTIONS),
    (
        TensorInfo(TEXT_OUTPUT, STRING, (1,)),
        TensorInfo(FINISH_REASON, STRING, (1,)),
        TensorInfo("prompt_tokens", "int64", (1,)),
        TensorInfo("seed", "int64", (1,)),
    ),
    frozenset(tensor.name for tensor in OPTIONS),
)


def triton_type(dtype: str) -> str:
    """The type in config.pbtxt."""
    return "TYPE_STRING" if dtype == STRING else DTYPES[dtype].triton


def protocol_type(dtype: str) -> str:
    """The type in a request."""
    return "BYTES" if dtype == STRING else DTYPES[dtype].protocol


def tensors_of(values: Sequence[TensorInfo]) -> list[TensorInfo]:
    """The inputs or outputs that are not texts."""
    return [tensor for tensor in values if tensor.dtype != STRING]


def decoded(data: bytes, name: str) -> str:
    """The text of an input. Raises UserError if it is not UTF-8, or too long to be tokenised beside other requests."""
    if len(data) > MAX_TEXT_BYTES:
        raise UserError(f"{name} has {len(data)} bytes; expected at most {MAX_TEXT_BYTES}: send it in parts")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from error
