"""References and baselines of the checks on a GPU, against the references of the operators' op.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from effexport.plugins.contract import Case, load_contract
from effexport.plugins.ops import CUDA_OPS, Op

# baselines that compute something else, nearly the same work
OTHER_RESULTS = {"mean", "SDPA flash", "SDPA cuDNN", "SDPA memory-efficient", "torch.sort"}

every_operator = pytest.mark.parametrize("op", CUDA_OPS.values(), ids=lambda op: op.torch_name)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-300))


def is_rounded(op: Op, case: Case) -> bool:
    """True if the case is one whose logarithms are float32 by definition."""
    return op.torch_name == "lsh_attention" and bool(case.sizes[-1])


@every_operator
def test_references_agree_with_those_of_the_operators(op: Op) -> None:
    check, reference = load_contract(op), op.load().reference
    for case in check.small:
        inputs = check.inputs(case, "cpu")
        answers = check.exact(case, inputs)
        attributes = dict(check.attributes(case))
        if op.torch_name == "linear_attention":
            del attributes["chunk_length"]  # of its body alone
        if op.torch_name == "linear_recurrence":
            attributes = {name: attributes[name] for name in ("scale", "delta")}  # shapes and the body have the others
        # op.py's reference makes float32 of half precision, and then float32 decides how it rounds
        wide = torch.float32 if is_rounded(op, case) else torch.float64
        inputs.pop("rank", None)  # which is redundant
        exact = [x.to(wide) if x.is_floating_point() else x for x in inputs.values()]
        results = reference(*exact, *attributes.values())
        # logits of −1e5 have a spacing of 1.5e-11 in float64
        limit = check.limit(replace(case, dtype="float32")).value if is_rounded(op, case) else 1e-10
        results = results if isinstance(results, tuple) else (results,)
        for own, (output, expected) in zip(results, answers.items(), strict=True):
            assert expected.dtype in (torch.float64, torch.int32)
            assert expected.shape == check.outputs(case)[output].shape
            assert relative_error(own, expected) <= limit, case.name


@every_operator
def test_baselines_compute_what_the_operator_does(op: Op) -> None:
    check = load_contract(op)
    for case in (timed.small for timed in check.timed):
        inputs = check.inputs(case, "cpu")
        expected, baselines = next(iter(check.exact(case, inputs).values())), check.baselines(case, inputs)
        for name in baselines.keys() - OTHER_RESULTS:
            found = baselines[name]()
            result = found[0] if isinstance(found, tuple) else found
            # standard operators round several times to the inputs' type, and to float32
            limit = 0 if case.dtype == "int32" else 2e-5 if case.dtype == "float32" else 2e-2
            assert relative_error(result, expected) <= limit, f"{case.name}, {name}"
