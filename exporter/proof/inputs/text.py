"""Real text as model input: bytes, shifted past the padding token, in windows of the model's length."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import UserError
from effexport.models.encoder_spec import EncoderSpec
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array

# Tokens 0 and 1 are padding and a spare; byte b is token b + 2.
BYTE_OFFSET = 2
STDIN = Path("-")


def windows_from_text(path: Path, spec: BuildSpec) -> dict[str, Array]:
    """`input_ids` and `attention_mask`, int64 [windows, seq]: the file's bytes in order, the last window padded.

    path: a file, or STDIN.

    Raises UserError for a missing or empty file, or a model that does not read bytes.
    """
    model = spec.model
    if not isinstance(model, EncoderSpec):
        raise UserError("this artifact does not read the bytes of a text; give --input FILE.npz instead")
    if model.vocab_size < 256 + BYTE_OFFSET:
        raise UserError(f"this model has {model.vocab_size} tokens; text needs {256 + BYTE_OFFSET}, one per byte value")
    try:
        data = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no text file at {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not data:
        name = "standard input" if path == STDIN else path
        raise UserError(f"{name} is empty; expected at least one byte of text")
    seq_len = spec.attention.fixed_seq_len or min(model.max_seq_len, len(data))
    count = -(-len(data) // seq_len)
    tokens = np.full(count * seq_len, model.pad_token_id, dtype=np.int64)
    tokens[: len(data)] = np.frombuffer(data, dtype=np.uint8).astype(np.int64) + BYTE_OFFSET
    mask = (np.arange(count * seq_len) < len(data)).astype(np.int64)
    return {"input_ids": tokens.reshape(count, seq_len), "attention_mask": mask.reshape(count, seq_len)}
