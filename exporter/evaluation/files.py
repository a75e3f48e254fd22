"""Labelled data from files: a text, lines of JSON, or arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.errors import UserError
from effexport.evaluation.labelled import (
    IGNORED,
    LabelledRows,
    Windows,
    objective_of,
    rows_of_arrays,
    rows_of_text,
    rows_of_texts,
)
from effexport.evaluation.results import LANGUAGE, Objective
from effexport.files import load_npz
from effexport.models.checkpoints.spec import CONFIG
from effexport.text.classification import Labels, labels_from_config
from effexport.text.reading import bytes_of_file, decoded, objects_of_lines
from effexport.text.task import reader_from_spec
from effexport.text.tokenizer import ByteTokenizer, tokenizer_from_artifact
from effexport.text.tokenizer_files import json_of

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.dtypes import Array

ARRAYS, JSON_LINES = ".npz", ".jsonl"


def rows_of_data(data: Path | Mapping[str, Array], artifact: Artifact, windows: Windows) -> list[LabelledRows]:
    """The labelled rows of arrays with `labels`, or of a file: .npz has such arrays, .jsonl an object with text and
    label in each line, and any other file is a text that a language model is asked for.

    Raises UserError for a file that cannot be read, or for data that does not fit the model.
    """
    spec, objective = artifact.spec, objective_of(artifact.spec)
    batch = 1 if spec.model.why_not_invariant else spec.batch
    if not isinstance(data, Path) or data.suffix == ARRAYS:
        arrays = load_npz(data) if isinstance(data, Path) else data
        rows = rows_of_arrays(arrays, spec, objective, batch, windows.limit)
    else:
        rows = rows_of_text_file(data, artifact, objective, windows, batch)
    if not any((some.labels != IGNORED).any() for some in rows):
        raise UserError("the data asks for no answer; expected labels, or a text of several tokens")
    return rows


def rows_of_text_file(
    path: Path, artifact: Artifact, objective: Objective, windows: Windows, batch: int
) -> list[LabelledRows]:
    spec = artifact.spec
    tokenizer = tokenizer_from_artifact(artifact)
    reader = reader_from_spec(spec, tokenizer)
    if path.suffix == JSON_LINES:
        if objective != Objective.CLASSIFICATION:
            raise UserError(f"{path} has texts with a class each; {spec.model.title} is a {objective}: give a text")
        classes = spec.outputs[0].dims[-1]
        assert isinstance(classes, int), "a classifier has a fixed number of classes"
        names = class_names(labels_from_config(json_of(artifact.path / CONFIG), classes))
        examples = examples_of_lines(path, names, windows.limit)
        prepared = [reader.whole(text, pair, str(objective)) for text, pair, _ in examples]
        return rows_of_texts(prepared, [label for *_, label in examples], batch)
    if objective not in LANGUAGE:
        raise UserError(
            f"{path} is a text without labels; for {objective}, expected {ARRAYS} with the inputs and labels"
            + (f", or {JSON_LINES} with text and label in each line" if objective == Objective.CLASSIFICATION else "")
        )
    data = bytes_of_file(path)
    if isinstance(tokenizer, ByteTokenizer):
        return list(rows_of_text(reader, tokenizer.encode_bytes(data), "", objective, windows, batch))
    text = decoded(data, path)
    return list(rows_of_text(reader, reader.encode(text, None), text, objective, windows, batch))


def class_names(labels: Labels) -> tuple[str, ...]:
    """Raises UserError for a model whose logits are not one class of several."""
    if labels.problem_type not in (None, "single_label_classification") or len(labels.names) < 2:
        raise UserError(
            f"the model does {labels.problem_type or 'regression'} (problem_type in {CONFIG}); expected one class of "
            "several for each text"
        )
    return labels.names


def examples_of_lines(path: Path, names: Sequence[str], limit: int | None) -> list[tuple[str, str | None, int]]:
    """(text, second text or None, number of the class) of each line. names: of the classes.

    Raises UserError with the number of the line that is not {"text": …, "label": …}.
    """
    examples = []
    for where, text, pair, fields in objects_of_lines(path, f'{{"text": "…", "label": "{names[0]}"}}'):
        examples.append((text, pair, class_of(fields.get("label"), names, where)))
        if limit is not None and len(examples) == limit:
            break
    if not examples:
        raise UserError(f"{path} has no lines with text and label")
    return examples


def class_of(label: Any, names: Sequence[str], where: str) -> int:
    if isinstance(label, str) and label in names:
        return list(names).index(label)
    if type(label) is int and 0 <= label < len(names):
        return label
    raise UserError(f"{where} has the label {label!r}; expected 0 to {len(names) - 1}, or one of: {', '.join(names)}")
