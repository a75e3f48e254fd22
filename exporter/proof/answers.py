"""PyTorch's answers to the inputs of every case, each given twice, and the size of PyTorch's own noise and error."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import StageError
from effexport.export.onnx_from_module import at_precision
from effexport.proof.cases import Case
from effexport.proof.checks.result import Check
from effexport.proof.inputs.adversarial import adversarial_inputs
from effexport.proof.inputs.random import EXPORT, case_inputs
from effexport.proof.metrics import largest_change, rms_change
from effexport.proof.module_runs import (
    NOISE_SEED_OFFSET,
    other_rotations,
    recorded_hashes,
    run_module,
    scores_of_indices,
)
from effexport.proof.repeated_runs import Answer, RepeatedRuns
from effexport.proof.tolerances import UNIT_ROUNDOFF
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from effexport.dtypes import Array

# The cases that also run in float64: the shape of the export, and one in which the mask hides tokens.
FLOAT64_CASES = (EXPORT, "padded batch")


@dataclass(frozen=True)
class Answers:
    """PyTorch's answers to every case, and the checks that PyTorch itself had to pass."""

    cases: list[Case]
    checks: list[Check]


def reference_from_module(module: nn.Module, spec: BuildSpec, seed: int, names: Sequence[str] = ()) -> Answers:
    """The answers of the float32 module to every case, or to those with these names, and checks of these answers.

    Inputs of lower precision are rounded first, so that the reference and the candidate see the same numbers.
    Raises StageError if the module does not give the same answer twice.
    """
    from effexport.proof.float64 import Float64Module, PeakMemory
    from effexport.proof.warm_up import warm_up

    warm_up()
    runs = RepeatedRuns("PyTorch")
    exact = Float64Module(module, spec, runs)
    cases: list[Case] = []
    checks: list[Check] = []
    hashed = spec.attention.is_hashed
    rounded = at_precision(module, spec.precision) if hashed else module
    hostile = adversarial_inputs(module, spec)
    for name, inputs in (case_inputs(spec, seed) | hostile).items():
        if names and name not in names:
            continue
        with PeakMemory() if name in FLOAT64_CASES else nullcontext() as peak:
            case = answered_case(Case(name, inputs, {}, pooled=spec.pooled_outputs), module, spec, runs)
        check_finite_reference(case)
        if hashed:
            case = with_hash_noise(case, module, rounded, spec, runs)
        elif name in hostile:
            case = dataclasses.replace(case, own_error=change_by_rounding(case, module, spec, runs))
        if peak is not None:
            checks.append(exact.check(case, peak.size_bytes))
        cases.append(case)
    return Answers(cases, [runs.check, *checks])


def check_finite_reference(case: Case) -> None:
    """Raise StageError for an answer of our own modules that is not made of numbers: it could judge nothing."""
    for name, array in case.outputs.items():
        if bad := int(np.count_nonzero(~np.isfinite(array))):
            raise StageError(
                "reference",
                f"PyTorch's own answer to {case.label} has {bad:,} NaN or infinite elements in {name}; expected "
                "numbers: check the weights",
            )


def answered_case(case: Case, module: nn.Module, spec: BuildSpec, runs: RepeatedRuns) -> Case:
    """The case with the module's outputs and the buckets and margins of its hashes."""

    def compute() -> Answer:
        with recorded_hashes(module) as (buckets, margins):
            outputs = run_module(module, spec, case.inputs)
        ranked = scores_of_indices(module, spec, case.inputs)
        return {"outputs": outputs, "buckets": dict(buckets), "margins": dict(margins), "ranked": ranked}

    return case.with_parts(runs.answer(case.label, compute))


def repeated_outputs(case: Case, module: nn.Module, spec: BuildSpec, runs: RepeatedRuns) -> Mapping[str, Array]:
    """The outputs that a module gives twice to the inputs of a case."""
    return runs.answer(case.label, lambda: {"outputs": run_module(module, spec, case.inputs)})["outputs"]


def with_hash_noise(case: Case, module: nn.Module, rounded: nn.Module, spec: BuildSpec, runs: RepeatedRuns) -> Case:
    """The case with its noise: how much the outputs change with other rotations, and in `rounded`, the module in lower
    precision."""
    with other_rotations(module):
        by_seed = rms_change(case, repeated_outputs(case, module, spec, runs))
    by_precision = 0.0 if rounded is module else rms_change(case, repeated_outputs(case, rounded, spec, runs))
    return dataclasses.replace(case, seed_noise=by_seed, precision_noise=by_precision)


def change_by_rounding(case: Case, module: nn.Module, spec: BuildSpec, runs: RepeatedRuns) -> float:
    """How much rounding changes PyTorch's own answer: the largest relative change of the outputs if every weight is off
    by one rounding at the spec's precision, or if the module runs in that precision, whichever is larger."""
    other = with_rounded_weights(module, spec.arithmetic)
    changes = [largest_change(case, repeated_outputs(case, other, spec, runs))]
    if spec.arithmetic != "fp32":
        lower = at_precision(module, spec.precision)
        changes.append(largest_change(case, repeated_outputs(case, lower, spec, runs)))
    return float(np.max(changes))


def with_rounded_weights(module: nn.Module, precision: str, draw: int = 0) -> nn.Module:
    """A copy in which every weight is off by up to one rounding of a precision. draw: which of several."""
    import torch

    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(NOISE_SEED_OFFSET + draw)
    with torch.no_grad():
        for weight in other.parameters():
            noise = torch.rand(weight.shape, generator=generator) * 2 - 1
            weight.mul_(1 + UNIT_ROUNDOFF[precision] * noise)
    return other
