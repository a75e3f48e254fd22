"""The parity check before timing: a candidate must compute what PyTorch computes on the inputs that will be timed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from effexport.bench.candidates import Candidate
from effexport.bench.grid import spec_from_case
from effexport.bench.models import module_from_case, signature_of_case, tensors_from_arrays
from effexport.bench.results import Case, Parity
from effexport.models.size_formula import shape_of

if TYPE_CHECKING:
    from torch import nn

    from effexport.dtypes import Array
    from effexport.proof.cases import Case as ReferenceCase
    from effexport.proof.checks.result import Check


def reference_of_case(case: Case, feeds: Mapping[str, Array]) -> ReferenceCase:
    """The answers of the float32 module to the inputs that will be timed, as a case of the proof.

    Raises StageError if the module does not give the same answer twice.
    """
    from effexport.export.onnx_from_module import at_precision
    from effexport.proof.cases import Case as ReferenceCase
    from effexport.proof.metrics import rms_change
    from effexport.proof.module_runs import other_rotations
    from effexport.proof.repeated_runs import RepeatedRuns
    from effexport.proof.warm_up import warm_up

    spec, module = spec_from_case(case), module_from_case(case)
    mask = np.ones((case.batch, case.seq_len), dtype=np.int64)
    golden = ReferenceCase("timed inputs", {**feeds, "attention_mask": mask}, {})
    runs = RepeatedRuns("PyTorch")

    def noise(other: nn.Module) -> float:
        repeated = runs.answer(golden.label, lambda: {"outputs": answer(other, case, feeds)})
        return rms_change(golden, repeated["outputs"])

    warm_up()
    found = runs.answer(golden.label, lambda: answer_with_hashes(module, case, feeds))
    golden = replace(golden, outputs=found["outputs"], buckets=found["buckets"], margins=found["margins"])
    if not spec.attention.is_hashed:
        return golden
    with other_rotations(module):
        seed_noise = noise(module)
    precision_noise = 0.0 if case.precision == "fp32" else noise(at_precision(module, case.precision))
    return replace(golden, seed_noise=seed_noise, precision_noise=precision_noise)


def answer_with_hashes(module: nn.Module, case: Case, feeds: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """`answer`, and the buckets and margins of its hashes."""
    from effexport.proof.module_runs import recorded_hashes

    buckets: dict[str, list[Array]] = defaultdict(list)
    margins: dict[str, list[Array]] = defaultdict(list)
    with recorded_hashes(module) as recorded:

        def keep_hashes() -> None:
            for kept, of_sample in zip((buckets, margins), recorded, strict=True):
                for name, array in of_sample.items():
                    kept[name].append(array)

        outputs = answer(module, case, feeds, keep_hashes)
    return {
        "outputs": outputs,
        "buckets": {name: np.concatenate(arrays) for name, arrays in buckets.items()},
        "margins": {name: np.concatenate(arrays) for name, arrays in margins.items()},
    }


def answer(
    module: nn.Module, case: Case, feeds: Mapping[str, Array], on_sample: Callable[[], None] = lambda: None
) -> dict[str, Array]:
    """Float32 outputs of a module by name, tokens first; one sample at a time, to save memory.

    Inputs of lower precision are widened for a float32 module, so that both sides see the same numbers.
    """
    import torch

    dtype = next(module.parameters()).dtype
    given = [x.to(dtype) if x.is_floating_point() else x for x in tensors_from_arrays(case, feeds)]
    samples = []
    for i in range(case.batch):
        with torch.inference_mode():
            samples.append(module(*(x[i : i + 1] for x in given)).float())
        on_sample()
    (output,) = signature_of_case(case).outputs
    return tokens_first(case, {output.name: torch.cat(samples).numpy()})


def tokens_first(case: Case, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """[batch, heads, seq, channels] → [batch, seq, heads · channels], so that errors are judged token by token."""
    if case.scope != "core":
        return dict(outputs)
    return {name: x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1) for name, x in outputs.items()}


def agreement(candidate: Candidate, case: Case, golden: ReferenceCase) -> Parity:
    """Compare the outputs of the candidate's last call. Names, types and shapes first, then NaN, then the numbers."""
    outputs = candidate.outputs()
    problem = signature_problem(case, outputs)
    if problem:
        return Parity(passed=False, metric="names, dtypes, shapes", value=None, limit=None, detail=problem)
    plain = tokens_first(case, outputs)
    checks = list(judged_checks(candidate, case, golden, plain))
    # the first failure, or the check with the most informative number: the first after finiteness
    shown = next((check for check in checks if check.status != "passed"), checks[1])
    return Parity(
        passed=shown.status == "passed",
        metric=shown.metric,
        value=shown.value if shown.value is None or math.isfinite(shown.value) else None,
        limit=shown.limit,
        detail="; ".join(part for part in (shown.name, shown.reason, shown.detail) if part),
    )


def judged_checks(
    candidate: Candidate, case: Case, golden: ReferenceCase, outputs: Mapping[str, Array]
) -> Iterator[Check]:
    """The checks of `effexport verify` that apply to a single answer.

    A model that hashes runs again with the buckets of the reference, so that small faults show. If its buckets cannot
    be set, only the free run is judged, with a wider limit: one bucket that rounding flips shifts chunk boundaries, and
    changes a third of all tokens a little.
    """
    from effexport.proof.checks.arithmetic import check_arithmetic, check_finite, check_overall
    from effexport.proof.checks.hashed import check_free_run, check_given_buckets
    from effexport.proof.tolerances import case_limit, overall_limit

    spec = spec_from_case(case)
    yield check_finite(golden.label, outputs)
    if spec.attention.is_hashed:
        given = candidate.with_buckets(
            {tensor.name: golden.inputs[tensor.name] for tensor in signature_of_case(case).inputs}, golden.buckets
        )
        if given is not None:
            yield from check_given_buckets(golden, tokens_first(case, given[0]), given[1], spec)
        yield check_free_run(golden, outputs, spec)
        return
    check = check_arithmetic(golden, outputs, case_limit(spec, golden.own_error))
    yield check
    yield from check_overall(golden, check, overall_limit(spec, golden.own_error))


def signature_problem(case: Case, outputs: Mapping[str, Array]) -> str:
    """What is wrong with names, types or shapes; "" if nothing is."""
    sizes = {"batch": case.batch, "seq": case.seq_len}
    expected = {tensor.name: (tensor.dtype, shape_of(tensor.dims, sizes)) for tensor in signature_of_case(case).outputs}
    actual = {name: (array.dtype.name, array.shape) for name, array in outputs.items()}
    return "" if actual == expected else f"outputs are {actual}; expected {expected}"
