"""`effexport::EluLinearAttention`, beyond its contract (test_contract.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from emulated_plugins import array_of
from implementations import exact, implementation, within_limit
from slow_cases import named
from torch import Tensor

from effexport.models.layers import fused_operators
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.linear.layer import LinearAttention
from effexport.plugins.contract import ROUNDING, Case
from effexport.plugins.linear_attention.contract import CONTRACT
from effexport.plugins.linear_attention.op import onnx_function_body, reference
from effexport.plugins.ops import DOMAIN

OP = "EluLinearAttention"
EPS = 1e-6
# Over the largest value: outputs are means of values with positive weights, so nothing cancels; a sum has at most 512
# terms in a row, with 6e-8 of rounding each and of either sign. Half types round features of queries and of keys, S and
# z (or the weights of a block), and the result, once each.
FP32 = 5e-6
# The CPU kernel sums in more registers, and rounds to half types only once.
CPU_FP32 = 2e-6
HALF = FP32 + 4 * ROUNDING["float16"]

native = pytest.mark.requires("native", "onnx", "ort")
both_forms = pytest.mark.parametrize("causal", [0, 1], ids=["all", "causal"])
both_features = pytest.mark.parametrize("relu", [0, 1], ids=["elu", "relu"])


def made(*sizes: int, causal: int, relu: int = 0, eps: float = EPS, dtype: str = "float32") -> tuple[Case, Any]:
    """A case [batch, heads, seq, head_dim, value_dim], and its inputs."""
    case = Case((*sizes, causal, relu), (eps,), dtype=dtype)
    return case, CONTRACT.inputs(case, "cpu")


def error(how: str, case: Case, inputs: dict[str, Tensor]) -> float:
    """The largest difference from the formula, over the largest visible value."""
    out = implementation(OP, how).run(case, inputs).astype(np.float64)
    assert np.isfinite(out).all()
    visible = inputs["v"].double() * inputs["keep"][:, None, :, None]
    return float(np.abs(out - exact(CONTRACT, case, inputs)).max() / visible.abs().max())


@native
def test_the_kernel_is_exact_beside_the_values() -> None:
    for case in (*CONTRACT.cases, *CONTRACT.small):
        inputs = CONTRACT.inputs(case, "cpu")
        with named(case.name):
            if not inputs["keep"].any():  # of which the contract says what comes out
                assert case.kind == "no token"
                continue
            assert error("kernel", case, inputs) <= CPU_FP32 + (0 if case.dtype == "float32" else ROUNDING[case.dtype])


def test_the_reference_in_float64_is_the_formula() -> None:
    for causal in (0, 1):
        case, inputs = made(2, 2, 100, 32, 24, causal=causal)
        *tensors, keep = inputs.values()
        found = reference(*(x.double() for x in tensors), keep, EPS, bool(causal))
        # the same operations in another order
        np.testing.assert_allclose(found, exact(CONTRACT, case, inputs), rtol=0, atol=1e-12)


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_layer_and_the_operator_compute_the_same(dtype: torch.dtype, causal: int) -> None:
    layer = LinearAttention(LinearSpec(dim=64, heads=2, causal=bool(causal), chunk_length=16)).to(dtype)
    projected = tuple(torch.randn(2, 2, 50, 32, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    keep = torch.arange(50) < torch.tensor([[50], [33]])
    plain = layer.mix(projected, keep)
    with fused_operators(layer, True):
        fused = layer.mix(projected, keep)
    assert fused.dtype == plain.dtype == dtype
    # the same float32 arithmetic in another order, so a result may round to the neighbour: one unit of the dtype
    torch.testing.assert_close(fused.float(), plain.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.requires("onnx")
def test_nodes_that_are_not_causal_may_differ_in_the_length_of_chunks() -> None:
    from onnx import helper

    of = {"inputs": [*"qkv", "keep"], "outputs": ["out"], "domain": DOMAIN, "eps": EPS}
    onnx_function_body([helper.make_node(OP, **of), helper.make_node(OP, **of, chunk_length=16)], 20)


@native
@both_forms
def test_the_exponential_is_exact_to_two_units_in_the_last_place(causal: int) -> None:
    # one key whose features are known: with v = 1 and eps = 1 the output is x / (x + 1), and x = head_dim · exp(k)
    k = -torch.linspace(0, 100, 4001).view(-1, 1, 1, 1)
    case = Case((len(k), 1, 1, 1, 1, causal, 0), (1.0,))
    ones = torch.ones(len(k), 1, dtype=torch.bool)
    # φ(0) = 1
    inputs = {"q": torch.zeros_like(k), "k": k, "v": torch.full_like(k, 2.0**100), "keep": ones}
    out = implementation(OP, "kernel").run(case, inputs).astype(np.float64).ravel()
    feature = np.exp(k.double().numpy().ravel())
    expected = 2.0**100 * feature / (feature + 1)
    normal = feature >= np.finfo(np.float32).tiny
    # two units of the exponential, and the roundings of the sum, the reciprocal and two products
    np.testing.assert_allclose(out[normal], expected[normal], rtol=6 * 2.0**-24)
    # where it would be subnormal it is zero
    assert (out[~normal] <= expected[~normal].max()).all()


@native
@pytest.mark.parametrize(("how", "way"), [("kernel", {}), ("cuda", {"multiprocessors": 1000})], ids=["cpu", "cuda"])
def test_the_future_has_no_influence(how: str, way: dict[str, int]) -> None:
    """On CUDA, one slice is one launch, up to eight add up the states before them, and those of nine are combined."""
    run = partial(implementation(OP, how).run, **way)
    case, inputs = made(1, 2, 2100, 32, 32, causal=1)
    whole = run(case, inputs)
    for length in (1, 65, 1024, 1030, 2048):
        prefix = {name: x[:, :length] if name == "keep" else x[:, :, :length] for name, x in inputs.items()}
        shorter = Case((1, 2, length, 32, 32, 1, 0), (EPS,))
        np.testing.assert_array_equal(run(shorter, prefix), whole[:, :, :length])


@native
@both_features
@both_forms
def test_what_is_not_finite_stays_in_its_head(causal: int, relu: int) -> None:
    run = implementation(OP, "kernel").run
    case, inputs = made(2, 2, 200, 32, 32, causal=causal, relu=relu)
    clean = run(case, inputs)
    for poison in (np.nan, np.inf):
        inputs["k"][0, 1, 5, 3] = poison
        out = run(case, inputs)
        np.testing.assert_array_equal(out[0, 0], clean[0, 0])
        np.testing.assert_array_equal(out[1], clean[1])
        assert np.isnan(out[0, 1, 5:]).any(axis=-1).all()
    inputs["k"][0, 1, 5, 3] = 0
    inputs["q"][0, 1, 7, 0] = np.nan
    assert np.isnan(run(case, inputs)[0, 1, 7]).all(), "a query that is NaN has no output"


@native
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_cuda_gives_the_same_bits_in_one_pass_as_in_two_or_three_launches(dtype: str) -> None:
    """The GPU, the number of heads and that of slices choose between them, and no result may show any of them."""
    cuda = implementation(OP, "cuda")
    for (*sizes, relu), kind, launches in (
        ((2, 2, 600, 64, 64, 0), "random", 2),  # the last slice ends within a tile
        ((2, 1, 513, 24, 72, 1), "random", 2),  # two blocks of values, and a last slice of one position
        ((2, 1, 520, 5, 3, 0), "falling", 2),  # the sums before a slice are far larger than those in it
        ((2, 1, 520, 5, 3, 0), "rising", 2),
        ((1, 3, 257, 16, 8, 1), "random", 2),  # two slices
        ((2, 1, 2040, 8, 72, 0), "falling", 2),  # eight, the most that blocks look back at
        ((1, 2, 2049, 8, 4, 0), "falling", 3),
    ):
        case = Case((*sizes, 1, relu), (EPS,), kind, dtype)
        inputs = CONTRACT.inputs(case, "cpu")
        blocks = sizes[0] * sizes[1] * -(-sizes[4] // 64)
        with named(case.name):
            whole = cuda.run(case, inputs)
            assert cuda.emulated.launch()[0] == blocks
            assert cuda.scratch_bytes(case) == 0
            before = cuda.emulated.library.count_launches()
            np.testing.assert_array_equal(cuda.run(case, inputs, multiprocessors=1000), whole)
            assert cuda.emulated.library.count_launches() - before == launches
            assert cuda.emulated.launch()[0] == blocks * -(-sizes[2] // 256)
            assert within_limit(CONTRACT, case, whole, CONTRACT.exact(case, inputs)["out"], "cuda")


@native
@both_forms
def test_cuda_is_at_most_twice_as_inexact_as_the_formula_in_half_precision(causal: int) -> None:
    for sizes in ((64, 64, 64), (150, 32, 32), (300, 8, 16), (600, 8, 16)):
        for dtype in ("float16", "bfloat16"):
            with named(f"{dtype} {sizes}"):
                assert_at_most_twice_as_inexact_as_the_formula(sizes, dtype, causal)


def assert_at_most_twice_as_inexact_as_the_formula(sizes: tuple[int, ...], dtype: str, causal: int) -> None:
    case, inputs = made(2, 2, *sizes, causal=causal, dtype=dtype)
    q, k, v, keep = inputs.values()
    q, k = torch.nn.functional.elu(q) + 1, (torch.nn.functional.elu(k) + 1) * keep[:, None, :, None]
    if causal:
        weights = (q @ k.mT).tril()
        plain = weights @ v / (weights.sum(dim=-1, keepdim=True) + EPS)
    else:
        plain = q @ (k.mT @ v) / (q @ k.sum(dim=2)[..., None] + EPS)
    expected = exact(CONTRACT, case, inputs)
    kernel = np.abs(implementation(OP, "cuda").run(case, inputs).astype(np.float64) - expected)
    formula = np.abs(array_of(plain).astype(np.float64) - expected)
    assert kernel.max() <= 2 * formula.max()
    assert np.square(kernel).mean() <= 4 * np.square(formula).mean()


# e⁻¹⁶ is 1e-7, the smallest float16 6e-8; sums over 200 · 200 · 64 and of values times 6000 exceed 65504.
@native
@both_forms
def test_features_beyond_the_range_of_float16_keep_their_digits(causal: int) -> None:
    case, inputs = made(2, 2, 150, 64, 8, causal=causal, dtype="float16")
    inputs["v"] = (100 * inputs["v"]).clamp(-6e4)
    for queries, keys in ((0, -16), (-13, -12), (-16, 0), (200, 200)):
        shifted = inputs | {"q": inputs["q"] + queries, "k": inputs["k"] + keys}
        assert error("cuda", case, shifted) <= HALF, (queries, keys)


@native
@both_forms
def test_features_that_grow_from_tile_to_tile_keep_their_digits_in_a_long_state(causal: int) -> None:
    """Beyond those of the contract: of more channels than a tile has."""
    for first, last in ((-12, 0), (0, -12), (-4, 12)):
        case, inputs = made(2, 2, 130, 70, 8, causal=causal, dtype="float16")
        inputs["k"] = (inputs["k"] + torch.linspace(first, last, 130)[:, None]).half()
        assert error("cuda", case, inputs) <= HALF


# In a tile: the first and the last row and channel, those of every warp and of the last value of a chunk.
@native
@both_features
@both_forms
def test_a_feature_far_above_all_others_counts_wherever_it_stands(causal: int, relu: int) -> None:
    """In float16 the largest of a tile chooses its exponent; one that was missed would become infinite."""
    for token, channel in ((0, 0), (15, 40), (63, 63), (64, 31), (149, 7)):
        case, inputs = made(2, 2, 150, 64, 8, causal=causal, relu=relu, dtype="float16")
        inputs["q"][:, :, token, channel] = inputs["k"][:, :, token, channel] = 1000
        inputs["v"] = inputs["v"].clamp(-10)
        inputs["keep"][:, token] = True
        # the sums of values are the largest of a state, or of features
        for values in (inputs["v"], inputs["v"] / 1000):
            assert error("cuda", case, inputs | {"v": values}) <= HALF, (token, channel)


@native
@both_forms
def test_rectified_features_of_any_magnitude_keep_their_digits(causal: int) -> None:
    """Sums over products of the smallest numbers of float16 with all their digits, and beyond the largest."""
    case, inputs = made(2, 2, 150, 64, 8, causal=causal, relu=1, dtype="float16")
    for queries, keys in ((2.0**-14, 2.0**-14), (2.0**-14, 2.0**6), (2.0**8, 2.0**8)):
        scaled = inputs | {"q": queries * inputs["q"], "k": keys * inputs["k"]}
        assert error("cuda", case, scaled) <= HALF, (queries, keys)


@native
@both_forms
def test_rectified_features_may_all_be_zero(causal: int) -> None:
    """Those of a query, of a tile of keys or of a channel, between rows of other magnitudes."""
    for dims in ((8, 8), (65, 40), (140, 5)):
        case, inputs = made(2, 2, 200, *dims, causal=causal, relu=1, dtype="float16")
        source = torch.Generator().manual_seed(0)
        for name in "qk":
            x = inputs[name]
            x[..., torch.rand(dims[0], generator=source) < 0.5] = -1
            x[:, :, torch.rand(200, generator=source) < 0.3] = 0
            x *= 2.0 ** torch.randint(-12, 8, (2, 2, 200, 1), generator=source)
        inputs["k"][:, :, 64:128] = 0
        assert error("cuda", case, inputs) <= HALF, dims


@native
@both_forms
def test_sums_that_float16_does_not_hold_survive_tiles_of_hidden_or_tiny_keys(causal: int) -> None:
    """Such a tile chooses the largest exponent, by which what was summed up before it is infinite in float16."""
    for tiny in (False, True):
        case, inputs = made(1, 1, 320, 8, 8, causal=causal, dtype="float16")
        inputs["v"], inputs["keep"] = inputs["v"] + 1000, torch.full_like(inputs["keep"], True)
        inputs["k"][:, :, 128:192] = -60
        inputs["keep"][:, 128:192] = tiny
        assert error("cuda", case, inputs) <= HALF
