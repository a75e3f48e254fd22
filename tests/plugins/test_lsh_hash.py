"""`effexport::LSHHash`, beyond its contract (test_contract.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from implementations import exact, implementation
from torch import Tensor

from effexport.models.variants.lsh import LSHSpec
from effexport.models.variants.lsh.layer import LSHHash
from effexport.plugins.contract import Case
from effexport.plugins.lsh_hash.contract import CONTRACT, case
from effexport.plugins.lsh_hash.op import lsh_hash
from effexport.plugins.ops import FLOAT_TYPES

OP = "LSHHash"
ATTRIBUTES: dict[str, Any] = {"bucket_factors": (4,), "chunk_length": 16}
kernels = pytest.mark.parametrize("how", ["kernel", "cuda"])


@pytest.mark.requires("native", "onnx", "ort")
@kernels
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_a_bucket_of_ordinary_numbers_differs_only_where_projections_nearly_tie(how: str, dtype: str) -> None:
    of = case(1, 2, 250, 64, 4, 8, factors=(16, 16), dtype=dtype)
    source = torch.Generator().manual_seed(0)
    rotations = torch.randn(2, 64, 4, 16, generator=source)
    qk = torch.randn(1, 2, 250, 64, generator=source).to(of.torch_dtype)
    inputs = {"qk": qk, "rotations": rotations, "keep": torch.ones(1, 250, dtype=torch.bool)}
    # sums of 64 products of about 1 are off by about 1e-6; of 4000 pairs of best projections, which are about 1 apart,
    # so few are as close as that
    assert (implementation(OP, how).run(of, inputs) != exact(CONTRACT, of, inputs)).sum() <= 1


def near_ties(of: Case) -> dict[str, Tensor]:
    """Projections that another order of summation would decide in another way."""
    inputs, source = CONTRACT.inputs(of, "cpu"), torch.Generator().manual_seed(of.sizes[2])
    qk = torch.randn(inputs["qk"].shape, generator=source).half().float()
    rotations = 1 + 1e-6 * torch.randn(inputs["rotations"].shape, generator=source)
    return inputs | {"qk": qk, "rotations": rotations}


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("how", "n"), [("kernel", 1), ("kernel", 100), ("kernel", 1000), ("cuda", 100)])
def test_near_ties_are_decided_alike_for_any_threads_schedule_and_batch_mates(how: str, n: int) -> None:
    of, made = case(3, 2, n, 32, 2, 16, factors=(16,)), implementation(OP, how)
    inputs = near_ties(of)
    together = made.run(of, inputs)
    for way in made.ways:
        np.testing.assert_array_equal(made.run(of, inputs, **way), together)
    for i in range(3):
        alone = inputs | {name: inputs[name][i : i + 1] for name in ("qk", "keep")}
        mine = made.run(case(1, 2, n, 32, 2, 16, factors=(16,)), alone)
        np.testing.assert_array_equal(mine, together[4 * i : 4 * i + 4])


@pytest.mark.requires("native", "onnx", "ort")
@kernels
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_leaves_other_tokens_alone_and_stays_in_range(how: str, value: float) -> None:
    of, run = case(1, 2, 100, 24, 2, 16, factors=(4, 6)), implementation(OP, how).run
    inputs = CONTRACT.inputs(of, "cpu")
    inputs = {"qk": inputs["qk"].nan_to_num(1), "rotations": inputs["rotations"], "keep": torch.ones(1, 100).bool()}
    healthy = run(of, inputs)
    inputs["qk"][0, 1, 50, 3] = value
    found = run(of, inputs)
    assert {*np.argwhere(found != healthy)[:, 1]} <= {50}
    assert 0 <= found[:, 50].min() <= found[:, 50].max() < 24


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bucket_factors": (3, 7)}, r"bucket_factors is \[3, 7\]; expected even"),
        ({"bucket_factors": (2,) * 31}, r"bucket_factors is \[2, .*2\^31|bucket_factors is \[2, .*even"),
        ({"bucket_factors": (4, 4)}, "(rotations has shape|bucket_factors is)"),
    ],
)
def test_factors_that_are_odd_or_too_many_or_another_width_are_errors_of_the_operator(
    given: dict[str, Any], message: str
) -> None:
    of = case(2, 3, 4, 8, 2, 2, factors=(4, 6))
    with pytest.raises(ValueError, match=message):
        lsh_hash(*CONTRACT.inputs(of, "cpu").values(), **CONTRACT.attributes(of) | given)


@pytest.mark.parametrize(("num_buckets", "n"), [(8, 100), ((4, 6), 37), (2, 1), ((2, 4, 6), 50), (None, 63)])
def test_the_operator_gives_the_buckets_of_the_layer(num_buckets: Any, n: int) -> None:
    spec = LSHSpec(dim=32, heads=2, seq_len=128, chunk_length=16, num_buckets=num_buckets, num_hashes=3)
    layer, source = LSHHash(spec), torch.Generator().manual_seed(n)
    qk, keep = torch.randn(2, 2, n, 16, generator=source), torch.rand(2, n, generator=source) > 0.3
    assert torch.equal(layer(qk, keep, fused=True), layer(qk, keep))
