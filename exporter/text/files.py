"""A file as inputs of an artifact."""

from __future__ import annotations

from pathlib import Path

from effexport.artifact import Artifact
from effexport.text.reading import bytes_of_file, decoded
from effexport.text.task import Prepared, TextOptions, reader_from_spec
from effexport.text.tokenizer import ByteTokenizer, tokenizer_from_artifact


def windows_of_file(path: Path, artifact: Artifact, options: TextOptions) -> Prepared:
    """A file as inputs of an artifact, in windows if it is longer than the model allows.

    A byte-level model also reads files that are not text.
    Raises UserError for a file that cannot be read, and for a model that reads no text.
    """
    tokenizer = tokenizer_from_artifact(artifact)
    reader = reader_from_spec(artifact.spec, tokenizer)
    data, limit, stride = bytes_of_file(path), options.max_window, options.stride or 0
    if isinstance(tokenizer, ByteTokenizer):
        return reader.cut("", None, tokenizer.encode_bytes(data), limit, stride)
    return reader.split(decoded(data, path), None, limit=limit, stride=stride)
