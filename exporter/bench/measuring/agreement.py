"""The parity check before timing: a candidate must compute what PyTorch computes on the inputs that will be timed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from effexport.bench.grid import spec_from_case
from effexport.bench.measuring.candidates import Candidate
from effexport.bench.measuring.models import module_from_case, signature_of_case, tensors_from_arrays
from effexport.bench.results import Case, Parity

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effexport.dtypes import Array
    from effexport.proof.cases import Case as ReferenceCase
    from effexport.proof.checks.result import Check


@dataclass(frozen=True)
class Reference:
    """The answers of the float32 module to `feeds`, as a case of the proof."""

    feeds: Mapping[str, Array]
    golden: ReferenceCase


def reference_of_case(case: Case, feeds: Mapping[str, Array]) -> Reference:
    """The answers of eager PyTorch in float32, not fused, one sample at a time to save memory.

    Inputs of lower precision are widened, so that both sides see the same numbers.
    """
    from effexport.export.onnx_from_module import at_precision
    from effexport.proof.answers import other_rotations, recorded_hashes
    from effexport.proof.cases import Case as ReferenceCase
    from effexport.proof.metrics import rms_change

    spec, module = spec_from_case(case), module_from_case(case)
    mask = np.ones((case.batch, case.seq_len), dtype=np.int64)
    buckets: dict[str, list[Array]] = {}
    margins: dict[str, list[Array]] = {}
    parts = []
    with recorded_hashes(module) as recorded:
        for part in answers(module, case, feeds, "fp32"):
            parts.append(part)
            for kept, of_sample in zip((buckets, margins), recorded, strict=True):
                for name, array in of_sample.items():
                    kept.setdefault(name, []).append(array)
    golden = ReferenceCase(
        "timed inputs",
        {"attention_mask": mask},
        tokens_first(case, by_name(case, parts)),
        buckets={name: np.concatenate(arrays) for name, arrays in buckets.items()},
        margins={name: np.concatenate(arrays) for name, arrays in margins.items()},
    )
    if not spec.attention.is_hashed:
        return Reference(feeds, golden)
    with other_rotations(module):
        seed_noise = rms_change(golden, tokens_first(case, answer(module, case, feeds, "fp32")))
    precision_noise = 0.0
    if case.precision != "fp32":
        rounded = answer(at_precision(module, case.precision), case, feeds, case.precision)
        precision_noise = rms_change(golden, tokens_first(case, rounded))
    return Reference(feeds, replace(golden, seed_noise=seed_noise, precision_noise=precision_noise))


def answer(module: nn.Module, case: Case, feeds: Mapping[str, Array], precision: str) -> dict[str, Array]:
    """Outputs of a module at a precision, as float32, by name."""
    return by_name(case, [*answers(module, case, feeds, precision)])


def by_name(case: Case, samples: Sequence[torch.Tensor]) -> dict[str, Array]:
    import torch

    return {signature_of_case(case).outputs[0].name: torch.cat([*samples]).numpy()}


def answers(module: nn.Module, case: Case, feeds: Mapping[str, Array], precision: str) -> Iterator[torch.Tensor]:
    """The output of a module at a precision, as float32, sample by sample."""
    import torch

    wide = {name: array if array.dtype.kind == "i" else array.astype(np.float32) for name, array in feeds.items()}
    given = tensors_from_arrays(case, wide)
    if precision == "fp32":
        given = tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in given)
    for i in range(case.batch):
        with torch.inference_mode():
            sample: torch.Tensor = module(*(x[i : i + 1] for x in given)).float()
        yield sample


def tokens_first(case: Case, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """[batch, heads, seq, channels] → [batch, seq, heads · channels], so that errors are judged token by token."""
    if case.scope != "core":
        return dict(outputs)
    return {name: x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1) for name, x in outputs.items()}


def agreement(candidate: Candidate, case: Case, reference: Reference) -> Parity:
    """Compare the outputs of the candidate's last call. Names, types and shapes first, then NaN, then the numbers."""
    outputs = candidate.outputs()
    problem = signature_problem(case, outputs)
    if problem:
        return Parity(passed=False, metric="names, dtypes, shapes", value=None, limit=None, detail=problem)
    plain = tokens_first(case, outputs)
    checks = list(judged_checks(candidate, case, reference, plain))
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
    candidate: Candidate, case: Case, reference: Reference, outputs: Mapping[str, Array]
) -> Iterator[Check]:
    """The checks of `effexport verify` that apply to a single answer.

    A model that hashes runs again with the buckets of the reference, so that small faults show. If its buckets cannot
    be set, only the free run is judged, with a wider limit: one bucket that rounding flips shifts chunk boundaries, and
    changes a third of all tokens a little.
    """
    from effexport.proof.checks.arithmetic import check_arithmetic, check_finite, check_overall
    from effexport.proof.checks.hashed import check_free_run, check_given_buckets
    from effexport.proof.tolerances import case_limit, overall_limit

    spec, golden = spec_from_case(case), reference.golden
    yield check_finite(golden, outputs)
    if spec.attention.is_hashed:
        given = candidate.with_buckets(reference.feeds, golden.buckets)
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
    expected = {
        tensor.name: (tensor.dtype, tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.dims))
        for tensor in signature_of_case(case).outputs
    }
    actual = {name: (array.dtype.name, array.shape) for name, array in outputs.items()}
    return "" if actual == expected else f"outputs are {actual}; expected {expected}"
