"""A decode step against the answer to a whole sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from effexport.dtypes import numpy_dtype
from effexport.proof.cases import Case
from effexport.proof.checks.arithmetic import check_arithmetic
from effexport.proof.checks.result import Check, Kind
from effexport.proof.tolerances import arithmetic_limit
from effexport.runners.ort.decode import DecodeRunner
from effexport.runners.ort.settings import OrtSettings
from effexport.spec import BuildSpec

# Tokens of the export case that are decoded one by one.
CHECKED_TOKENS = 48


def check_decode_step(path: Path, case: Case, spec: BuildSpec, settings: OrtSettings | None = None) -> Check:
    """Decoding token by token equals the reference's answer to the whole sequence."""
    seq_len = min(CHECKED_TOKENS, case.keep.shape[1])
    name, output = spec.inputs[0].name, spec.outputs[0].name
    with DecodeRunner(path, settings=settings) as decoder:
        steps = [decoder.step({name: case.inputs[name][:, t : t + 1]})[output] for t in range(seq_len)]
    prefix = Case(
        f"first {seq_len} tokens",
        {key: value[:, :seq_len] for key, value in case.inputs.items()},
        {output: case.outputs[output][:, :seq_len]},
    )
    actual = {output: np.concatenate(steps, axis=1).astype(numpy_dtype(spec.dtype))}
    return check_arithmetic(prefix, actual, arithmetic_limit(spec), Kind.DECODE_STEP)
