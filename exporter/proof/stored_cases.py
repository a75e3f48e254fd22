"""The cases of a golden file, held to the spec of the model that they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.dtypes import named_sizes
from effexport.errors import UserError
from effexport.models.size_formula import shape_of
from effexport.proof.cases import EXPECTED, Case, load_reference
from effexport.proof.kept_tokens import has_tokens, kept_tokens
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array


def stored_cases(path: Path, spec: BuildSpec) -> list[Case]:
    """The cases of the golden file of an artifact. Raises UserError for any other file, and for answers that a model of
    this spec cannot give."""
    return checked_cases(load_reference(path), spec, str(path))


def checked_cases(cases: Sequence[Case], spec: BuildSpec, what: str) -> list[Case]:
    """The cases, with what tells which of their tokens count; those of other inputs or outputs, which are another
    model's, as they are.

    what: how errors name the file. Raises UserError for answers that a model of this spec cannot give to the inputs.
    """
    for case in cases:
        if problem := why_not_of_spec(case, spec):
            raise UserError(f"{what} is damaged: in the case {case.name!r}, {problem}; {EXPECTED}")
    return [with_nan(with_tokens(case, spec), spec) if has_names_of(case, spec) else case for case in cases]


def has_names_of(case: Case, spec: BuildSpec) -> bool:
    inputs, outputs = {tensor.name for tensor in spec.inputs}, {tensor.name for tensor in spec.outputs}
    return case.inputs.keys() == inputs and case.outputs.keys() == outputs


def with_tokens(case: Case, spec: BuildSpec) -> Case:
    """The case with the part `tokens`, which earlier artifacts leave out for every mask named `attention_mask`."""
    return replace(case, tokens={**kept_tokens(case.inputs, spec), **case.tokens})


def with_nan(case: Case, spec: BuildSpec) -> Case:
    """The case, which allows NaN where the original of a user has answered so."""
    return replace(case, allows_nan=not spec.model.answers_always and case.undefined[0] > 0)


def why_not_of_spec(case: Case, spec: BuildSpec) -> str:
    """How the arrays of a case contradict each other or the spec; "" if they do not, or if it is another model's."""
    if not has_names_of(case, spec):
        return ""
    if not set(case.pooled) <= set(spec.pooled_outputs):
        return f"the outputs without an axis of tokens are {list(case.pooled)}; expected {list(spec.pooled_outputs)}"
    arrays = {**case.inputs, **case.outputs}
    for tensor in (*spec.inputs, *spec.outputs):
        if arrays[tensor.name].ndim != len(tensor.dims):
            return f"{tensor.name} has the shape {list(arrays[tensor.name].shape)}; expected {tensor}"
    sizes = named_sizes(spec.inputs, arrays)
    for tensor in (*spec.inputs, *spec.outputs):
        shape, expected = arrays[tensor.name].shape, shape_of(tensor.dims, sizes)
        if shape != expected:
            return f"{tensor.name} has the shape {list(shape)}; expected {list(expected)}, as the other arrays say"
    case = with_tokens(case, spec)
    if problem := why_tokens_do_not_count(case.keep, shape_of(spec.model.kept_dims, sizes), spec):
        return problem
    parts = (case.kept(name, array, row) for name, array in case.outputs.items() for row in case.samples(array))
    if spec.model.answers_always and not all(np.isfinite(part).all() for part in parts):
        return "answers are NaN or infinite, which judge nothing"
    return ""


def why_tokens_do_not_count(keep: Array, expected: tuple[int, ...], spec: BuildSpec) -> str:
    """Why a case would not compare every sequence; "" if it does. keep: see `Case.keep`. expected: its shape."""
    if keep.shape != expected or keep.dtype != bool:
        return (
            f"nothing says for every sequence which of its tokens count: {keep.dtype} {list(keep.shape)}; expected "
            f"bool {list(expected)}"
        )
    # without an axis of tokens, everything counts
    counts = keep.any(axis=-1) if has_tokens(spec) else keep
    return "" if counts.all() else "a mask keeps no token of a sequence"
