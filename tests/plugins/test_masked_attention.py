"""`effexport::MaskedAttention` and the attention core in native/attention.h, beyond the contract (test_contract.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from emulated_plugins import array_of
from implementations import exact, implementation, within_limit
from kernel_sessions import session
from one_node import one_node_model, run_poisoned
from slow_cases import named, slow
from torch import Tensor

from effexport.export.custom_nodes import inlined
from effexport.plugins.contract import Case
from effexport.plugins.masked_attention import op
from effexport.plugins.masked_attention.contract import CONTRACT
from effexport.plugins.ops import DOMAIN

OP = "MaskedAttention"
SCALE = 0.37
FP32 = 2e-5
KERNELS = ("kernel", "cuda")

pytestmark = pytest.mark.requires("native", "onnx", "ort")


def made(
    *sizes: int, scale: float = SCALE, kind: str = "random", dtype: str = "float32"
) -> tuple[Case, dict[str, Tensor]]:
    """A case [batch, heads, n, m, d, e], and its inputs."""
    case = Case(sizes, (scale,), kind, dtype)
    return case, CONTRACT.inputs(case, "cpu")


def feeds_of(inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: array_of(x) for name, x in inputs.items()}


def assert_close(actual: np.ndarray, expected: np.ndarray, limit: float = FP32) -> None:
    assert actual.shape == expected.shape
    difference = np.abs(actual.astype(np.float64) - expected)
    assert np.isfinite(difference).all()
    assert difference.max(initial=0) <= limit


@pytest.mark.parametrize("m", [7, 100, 2100])
def test_huge_logits_do_not_overflow(m: int) -> None:
    case, inputs = made(3, 2, 20, m, 40, 24)
    inputs["q"] *= 1e3
    inputs["k"] *= 10
    assert (SCALE * inputs["q"][0, 0] @ inputs["k"][0, 0].T).abs().max() > 1e4
    # the error of a logit of 5e4 in float32 is up to 2e-2, so weights of a close second are uncertain by as much
    for how in ("kernel", "body"):
        assert_close(implementation(OP, how).run(case, inputs), exact(CONTRACT, case, inputs), 0.05)


@pytest.mark.parametrize("how", [*KERNELS, slow("cuda sm_75")])
def test_huge_logits_that_are_alike_weigh_alike(how: str) -> None:
    """Their own rounding, of up to 2¹¹, must not show: neither in a weight nor in the sum of all."""
    for dtype in ("float32", "float16", "bfloat16"):
        for keys in (64, 70, 600):
            case, inputs = made(1, 1, 3, keys, 64, 8, kind="visible", dtype=dtype)
            inputs["q"].fill_(30_000)
            inputs["k"].fill_(30_000)
            with named(case.name):
                out = implementation(OP, how).run(case, inputs)
                assert within_limit(CONTRACT, case, out, CONTRACT.exact(case, inputs)["out"], how)


def test_a_slice_without_a_visible_key_adds_nothing_to_the_merge() -> None:
    """Whatever lies in the memory of its sums: here infinity, of a sample in the same range of work."""
    case, inputs = made(32, 2, 3, 2500, 40, 24, kind="visible")
    inputs["v"][::2], inputs["keep"][1::2, :2048] = torch.inf, False
    expected = exact(CONTRACT, case, {name: x[1::2] for name, x in inputs.items()})
    assert_close(implementation(OP, "kernel").run(case, inputs, threads=1)[1::2], expected)


@pytest.mark.parametrize("how", [*KERNELS, "body"])
def test_logits_far_below_zero_count_like_any_others(how: str) -> None:
    case, inputs = made(3, 2, 9, 1500, 40, 24)
    inputs["q"].fill_(100)
    inputs["k"].fill_(-100)
    assert_close(implementation(OP, how).run(case, inputs), exact(CONTRACT, case, inputs))


@pytest.mark.parametrize("scale", [-SCALE, 1e30])
@pytest.mark.parametrize("how", ["cuda", "cuda sm_75"])
def test_any_finite_scale_gives_the_formula(how: str, scale: float) -> None:
    case, inputs = made(2, 2, 5, 70, 16, 8, scale=scale)
    limit = FP32 * float(inputs["v"].abs().max())
    assert_close(implementation(OP, how).run(case, inputs), exact(CONTRACT, case, inputs), limit)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sizes", [(64, 64, 64, 64), (16, 500, 64, 32), (40, 200, 96, 64)], ids=str)
def test_half_types_err_at_most_twice_as_much_as_the_formula_in_half_precision(
    sizes: tuple[int, ...], dtype: str
) -> None:
    case, inputs = made(2, 2, *sizes, scale=0.125, dtype=dtype)
    expected = exact(CONTRACT, case, inputs)
    *tensors, keep = inputs.values()
    q, k, v = tensors
    logits = ((q * 0.125) @ k.transpose(-1, -2)).float().masked_fill(~keep[:, None, None], op.HIDDEN_LOGIT)
    plain = np.abs((logits.softmax(dim=-1).to(v.dtype) @ v).double().numpy() - expected)
    own = np.abs(implementation(OP, "cuda").run(case, inputs).astype(np.float64) - expected)
    assert own.max() <= 2 * plain.max()
    # both round to the nearest number once, which is most of the error; on average it is smaller
    assert own.mean() <= 2 * plain.mean()


def test_few_queries_of_many_keys_are_cut_along_their_keys() -> None:
    kernels = implementation(OP, "cuda")
    kernels.run(*made(2, 2, 64, 1100, 8, 8))
    slices = 5  # of 4 · 64 keys
    assert kernels.emulated.launch(before_last=1)[0] == 4 * slices
    assert kernels.emulated.launch()[0] == 4 * 64 // 8, "a warp for each row of results, of at most 32 columns"
    kernels.run(*made(2, 2, 65, 300, 8, 8))
    assert kernels.emulated.launch()[0] == 4 * 2
    kernels.run(*made(2, 2, 4, 0, 8, 6))
    assert kernels.emulated.launch()[2] == 0


@pytest.mark.parametrize("how", KERNELS)
@pytest.mark.parametrize("keys", [100, 700])
def test_a_sample_without_a_visible_key_averages_over_all(how: str, keys: int) -> None:
    case, inputs = made(2, 2, 3, keys, 8, 8)
    mean = inputs["v"][1].double().mean(dim=1, keepdim=True).expand(2, 3, 8)
    for queries, hidden_keys in ((1e4 * inputs["q"], inputs["k"]), (1e30 + inputs["q"], -1e30 + inputs["k"])):
        inputs["q"], inputs["k"][1] = queries, hidden_keys[1]
        out = implementation(OP, how).run(case, inputs)
        # sums of up to 700 values of about 1
        np.testing.assert_allclose(out[1], mean, atol=1e-6)


@pytest.mark.parametrize("how", KERNELS)
def test_without_channels_the_result_is_the_mean_of_what_is_visible(how: str) -> None:
    case, inputs = made(2, 2, 20, 9, 0, 6)
    assert_close(implementation(OP, how).run(case, inputs), exact(CONTRACT, case, inputs))


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("m", [50, 1500])
def test_what_is_not_finite_shows_in_the_result(m: int, value: float, name: str) -> None:
    case, inputs = made(1, 2, 20, m, 40, 24, kind="visible")
    inputs[name][0, 1, 4, 2] = value
    result = implementation(OP, "kernel").run(case, inputs)
    assert np.isfinite(result[0, 0]).all()
    touched = result[0, 1, 4] if name == "q" else result[0, 1, :, 2]
    # a query times an infinite key is −∞ for about half of the queries, whose weight is zero
    assert not np.isfinite(touched).any() if name == "q" or np.isnan(value) else not np.isfinite(touched).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nan_reaches_the_rows_that_see_it_and_no_others(dtype: str) -> None:
    case, inputs = made(2, 2, 20, 150, 16, 8, dtype=dtype)
    run = implementation(OP, "cuda").run
    inputs["keep"][0, :2] = torch.tensor([True, False])
    clean = run(case, inputs)
    hidden = inputs["k"].clone()
    hidden[0, 0, 1] = hidden[1, 1, 7] = torch.nan
    np.testing.assert_array_equal(run(case, inputs | {"k": hidden}), clean)
    for name, place, reached in (
        ("q", (0, 1, 4, 3), np.s_[0, 1, 4]),
        ("k", (0, 1, 0, 3), np.s_[0, 1]),
        ("v", (0, 1, 0, 3), np.s_[0, 1, :, 3]),
    ):
        wrong = inputs[name].clone()
        wrong[place] = torch.nan
        out = run(case, inputs | {name: wrong})
        expected = np.zeros(out.shape, bool)
        expected[reached] = True
        np.testing.assert_array_equal(np.isnan(out), expected)
        np.testing.assert_array_equal(out[~expected], clean[~expected])


@pytest.mark.parametrize("inline", [False, True])
def test_nodes_with_different_scales_share_a_body(inline: bool) -> None:
    from onnx import helper

    case, inputs = made(3, 2, 5, 63, 40, 24, scale=0.5)
    feeds = feeds_of(inputs)
    model = onnx.load_from_string(one_node_model(OP, feeds, body=True, scale=0.5))
    second = helper.make_node(OP, list(feeds), ["other"], domain=DOMAIN, scale=0.25)
    model.graph.node.append(second)
    model.graph.output.append(helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, None))
    model.functions[0].CopyFrom(op.onnx_function_body(model.graph.node, 20))
    outputs: list[Any] = session(inlined(model) if inline else model, library=False).run(None, feeds)
    for output, scale in zip(outputs, (0.5, 0.25), strict=True):
        assert_close(output, exact(CONTRACT, Case(case.sizes, (scale,)), inputs))


def test_outputs_may_be_reused_between_runs() -> None:
    _, inputs = made(3, 2, 10, 1300, 40, 24)
    feeds, shape = feeds_of(inputs), (3, 2, 10, 24)
    run = session(one_node_model(OP, feeds, body=False, scale=SCALE), library=True)
    assert np.array_equal(run_poisoned(run, feeds, shape), run_poisoned(run, feeds, shape))
