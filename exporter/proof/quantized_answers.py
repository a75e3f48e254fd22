"""The answers of PyTorch's quantised model: the reference of a quantised build, beside the float model's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from effexport.errors import StageError
from effexport.proof.answers import Answers, with_rounded_weights
from effexport.proof.cases import Case
from effexport.proof.metrics import rms_change
from effexport.proof.module_runs import (
    recorded_hashes,
    run_module,
    scores_of_indices,
)
from effexport.proof.repeated_runs import Answer, RepeatedRuns
from effexport.quantize.modules import quantized_module, recorded_inputs, smoothed
from effexport.quantize.rounding import codes_of, rounded_rows

if TYPE_CHECKING:
    from torch import nn

    from effexport.dtypes import Array
    from effexport.quantize.record import Quantization
    from effexport.spec import BuildSpec

STAGE = "quantization"
# What the roundings of all cases in a golden file may take. Beyond it, larger cases are compared by their free run.
LARGEST_ROUNDINGS_BYTES = 16 * 2**20
# Draws of the noise: of a short case, one may flip nothing.
NOISE_DRAWS = 2


def run_with_buckets(
    module: nn.Module, spec: BuildSpec, inputs: Mapping[str, Array]
) -> tuple[Mapping[str, Array], Mapping[str, Array]]:
    """The outputs of a module and the buckets of its hashes."""
    with recorded_hashes(module) as (buckets, _):
        outputs = run_module(module, spec, inputs)
    return {name: array for name, array in outputs.items() if name not in spec.ranked_outputs}, buckets


def quantized_answers(answers: Answers, module: nn.Module, spec: BuildSpec, record: Quantization) -> Answers:
    """The answers of the quantised model to the cases of the float model, with its roundings; the float model's become
    the part `exact`. module: float32, as `answers` are of it, without smoothing.

    Raises StageError if it does not give the same answer twice.
    """
    runs = RepeatedRuns("PyTorch's quantised model")
    smooth = smoothed(module, record.smoothing) if record.smoothing else module
    quantized = quantized_module(smooth, record)
    noisy = [quantized_module(with_rounded_weights(smooth, "fp32", draw), record) for draw in range(NOISE_DRAWS)]
    cases = [quantized_case(case, quantized, noisy, spec, record, runs) for case in answers.cases]
    return Answers(with_fitting_roundings(cases), [*answers.checks, runs.check])


def quantized_case(
    case: Case,
    quantized: nn.Module,
    noisy: Sequence[nn.Module],
    spec: BuildSpec,
    record: Quantization,
    runs: RepeatedRuns,
) -> Case:
    """One case with the outputs, buckets, roundings and noise of the quantised model."""

    def compute() -> Answer:
        with recorded_hashes(quantized) as (buckets, margins), recorded_inputs(quantized) as unrounded:
            outputs = run_module(quantized, spec, case.inputs)
        ranked = scores_of_indices(quantized, spec, case.inputs)
        numbers = {name: x.detach().numpy() for name, x in unrounded.items()}
        return {"outputs": outputs, "buckets": buckets, "margins": margins, "ranked": ranked, "unrounded": numbers}

    answer = runs.answer(case.label, compute)
    numbers = answer["unrounded"]
    scales: dict[str, Array] = {}
    codes: dict[str, Array] = {}
    if missing := [name for name in record.unrounded if name not in numbers]:
        layer_path = missing[0].rpartition(".")[0]
        raise StageError(
            STAGE,
            f"PyTorch's quantised model does not round the input of {layer_path}, and the graph does, so the two "
            f"cannot be compared; leave it float with --keep-float {layer_path}",
        )
    for name in record.unrounded:
        layer = record.layer(name.rpartition(".")[0])
        assert layer is not None
        if layer.input_scale is None:
            codes[name], scales[name] = rounded_rows(numbers[name])
        else:
            scales[name] = np.array(layer.input_scale, dtype=np.float32)
            codes[name] = codes_of(numbers[name], record.precision, scales[name])
    exact = {**case.outputs, **case.buckets}
    found = dataclasses.replace(
        case,
        outputs=answer["outputs"],
        buckets=answer["buckets"],
        margins=answer["margins"],
        ranked=answer["ranked"],
        codes=codes,
        scales=scales,
        exact=exact,
    )
    changes = [rms_change(found, run_module(other, spec, case.inputs)) for other in noisy]
    return dataclasses.replace(found, precision_noise=float(np.max(changes)))


def with_fitting_roundings(cases: Sequence[Case]) -> list[Case]:
    """The cases, of which the smallest keep their roundings: as many as fit, at least one."""
    by_size = sorted(cases, key=roundings_bytes)
    kept: set[str] = set()
    total = 0
    for case in by_size:
        total += roundings_bytes(case)
        if kept and total > LARGEST_ROUNDINGS_BYTES:
            break
        kept.add(case.name)
    return [case if case.name in kept else dataclasses.replace(case, codes={}, scales={}) for case in cases]


def roundings_bytes(case: Case) -> int:
    return sum(array.nbytes for part in (case.codes, case.scales) for array in part.values())
