"""`effexport::MaskedAttention`: the torch operator, its schema, its body of standard nodes and its kernel."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from kernel_sessions import session
from one_node import one_node_model, run_body, run_kernel, run_poisoned

from effexport.export.inlined import inlined
from effexport.plugins.masked_attention.op import masked_attention, onnx_function_body
from effexport.plugins.ops import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE

OP = "MaskedAttention"
SCALE = 0.37
# Values are about 1 and weights add up to one. A logit is a float32 sum of up to 100 terms and at most about 30, so its
# error is about 1e-5 at worst, which is the relative error of its weight.
FP32 = 2e-5
# Inputs are exact and arithmetic is float32: what remains is one rounding of results of at most about 4.
HALF = {"float16": 4 * 2**-11, "bfloat16": 4 * 2**-8}
# The body also rounds logits of up to about 16 to 11 bits, which shifts weights by up to 2**-7.
BODY_FP16 = 4 * 2**-7
# queries, keys: odd ones, whole tiles, more than a slice of keys, more than one block of queries
SIZES = [(1, 1), (5, 63), (63, 5), (64, 64), (100, 1000), (1000, 100), (3, 2500), (256, 1025), (257, 1025)]


def random_feeds(
    n: int, m: int, d: int = 40, e: int = 24, *, batch: int = 3, heads: int = 2, dtype: str = "float32", seed: int = 0
) -> dict[str, np.ndarray]:
    """The first sample sees some of its keys, the second only some of its last, the third none."""
    random = np.random.default_rng((n, m, seed))
    keep = random.random((batch, m)) > 0.3
    keep[1:2, : m // 2] = False
    keep[2:3] = False
    shapes = {"q": (batch, heads, n, d), "k": (batch, heads, m, d), "v": (batch, heads, m, e)}
    return {**{name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}, "keep": keep}


def exact_attention(feeds: dict[str, np.ndarray], scale: float = SCALE) -> np.ndarray:
    """The formula in float64, one head at a time."""
    q, k, v = (feeds[name].astype(np.float64) for name in ("q", "k", "v"))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for sample, head in np.ndindex(*q.shape[:2]):
        keep = feeds["keep"][sample]
        seen = keep if keep.any() else np.ones_like(keep)
        logits = scale * q[sample, head] @ k[sample, head][seen].T
        if not keep.any():
            logits = np.zeros_like(logits)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True, initial=-np.inf))
        out[sample, head] = (weights / weights.sum(axis=-1, keepdims=True)) @ v[sample, head][seen]
    return out


def shape_of(feeds: dict[str, np.ndarray]) -> tuple[int, ...]:
    return (*feeds["q"].shape[:3], feeds["v"].shape[3])


def tensors(feeds: dict[str, np.ndarray]) -> list[torch.Tensor]:
    return [
        torch.from_numpy(array.astype(np.float32)).bfloat16()
        if array.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(array)
        for array in feeds.values()
    ]


def assert_close(actual: np.ndarray, expected: np.ndarray, limit: float) -> None:
    assert actual.shape == expected.shape
    difference = np.abs(actual.astype(np.float64) - expected)
    assert np.isfinite(difference).all()
    assert difference.max(initial=0) <= limit


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_the_operator_computes_the_formula(n: int, m: int) -> None:
    feeds = random_feeds(n, m)
    assert_close(masked_attention(*tensors(feeds), SCALE).numpy(), exact_attention(feeds), FP32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_operator_is_registered_as_pytorch_asks(dtype: torch.dtype) -> None:
    q, k, v, keep = tensors(random_feeds(5, 7))
    # a custom operator's result is new memory, also for the strides of split heads
    args = (q.to(dtype).transpose(1, 2).contiguous().transpose(1, 2), k.to(dtype), v.to(dtype), keep, SCALE)
    torch.library.opcheck(torch.ops.effexport.masked_attention.default, args)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("n", "m"), SIZES)
def test_kernel_and_body_compute_the_formula(n: int, m: int) -> None:
    feeds = random_feeds(n, m)
    expected = exact_attention(feeds)
    assert_close(run_kernel(OP, feeds, expected.shape, scale=SCALE), expected, FP32)
    assert_close(run_body(OP, feeds, expected.shape, scale=SCALE), expected, FP32)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("d", "e"), [(1, 1), (3, 5), (16, 80), (63, 33), (64, 64), (100, 16), (130, 129)])
def test_channels_may_be_any_number(d: int, e: int) -> None:
    feeds = random_feeds(70, 130, d, e)
    expected = exact_attention(feeds)
    assert_close(run_kernel(OP, feeds, expected.shape, scale=SCALE), expected, FP32)
    assert_close(run_body(OP, feeds, expected.shape, scale=SCALE), expected, FP32)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("dtype", list(HALF))
@pytest.mark.parametrize(("n", "m"), [(5, 63), (100, 1000), (3, 2500)])
def test_half_precision_computes_in_float32(n: int, m: int, dtype: str) -> None:
    feeds = random_feeds(n, m, 64, 64, dtype=dtype)
    expected = exact_attention(feeds)
    assert_close(run_kernel(OP, feeds, expected.shape, scale=SCALE), expected, HALF[dtype] + FP32)
    assert_close(masked_attention(*tensors(feeds), SCALE).float().numpy(), expected, HALF[dtype] + FP32)
    if dtype == "float16":  # ONNX Runtime has no products in bfloat16
        assert_close(run_body(OP, feeds, expected.shape, scale=SCALE), expected, BODY_FP16)


@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize("opset", [18, 20, 23, 24])
def test_the_body_works_in_every_opset(opset: int) -> None:
    feeds = random_feeds(20, 30)
    assert_close(run_body(OP, feeds, shape_of(feeds), opset=opset, scale=SCALE), exact_attention(feeds), FP32)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("m", [7, 100, 2100])
def test_huge_logits_do_not_overflow(m: int) -> None:
    feeds = random_feeds(20, m)
    feeds["q"] *= 1e3
    feeds["k"] *= 10
    logits = SCALE * feeds["q"][0, 0] @ feeds["k"][0, 0].T
    assert np.abs(logits).max() > 1e4
    expected = exact_attention(feeds)
    # the error of a logit of 5e4 in float32 is up to 2e-2, so weights of a close second are uncertain by as much
    for run in (run_kernel, run_body):
        assert_close(run(OP, feeds, expected.shape, scale=SCALE), expected, 0.05)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("first", [0, 1200, 2490])
def test_logits_far_above_all_others_count_wherever_their_keys_are(first: int) -> None:
    """In the first, a middle or the last slice. By 128, exactly: their e^x is infinite unless their maximum is taken
    off."""
    feeds = random_feeds(3, 2500, batch=1)
    feeds["q"][..., 0], feeds["k"][..., 0] = 16, 0
    feeds["k"][:, :, first : first + 10] = 0
    feeds["k"][:, :, first : first + 10, 0] = 16
    feeds["keep"][:, first] = True
    expected = exact_attention(feeds, 0.5)
    for run in (run_kernel, run_body):
        assert_close(run(OP, feeds, expected.shape, scale=0.5), expected, FP32)


@pytest.mark.requires("native", "onnx", "ort")
def test_a_slice_without_a_visible_key_adds_nothing_to_the_merge() -> None:
    """Whatever lies in the memory of its sums: here infinity, from the sample before."""
    feeds = random_feeds(3, 2500, batch=2)
    feeds["v"][0], feeds["keep"][1, :2048] = np.inf, False
    expected = exact_attention({name: array[1:] for name, array in feeds.items()})
    assert_close(run_kernel(OP, feeds, shape_of(feeds), threads=1, scale=SCALE)[1:], expected, FP32)


@pytest.mark.requires("native", "onnx", "ort")
def test_logits_far_below_zero_count_like_any_others() -> None:
    feeds = random_feeds(9, 1500)
    feeds["q"][...] = 100
    feeds["k"][...] = -100
    expected = exact_attention(feeds)
    for run in (run_kernel, run_body):
        assert_close(run(OP, feeds, expected.shape, scale=SCALE), expected, FP32)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("n", "m"), [(20, 90), (20, 3000), (300, 1100)])
def test_hidden_keys_and_values_change_nothing(n: int, m: int) -> None:
    feeds = random_feeds(n, m, batch=2)
    hidden = ~feeds["keep"][:, None, :, None]
    other = {
        **feeds,
        "k": np.where(hidden, np.float32(1e4), feeds["k"]),
        "v": np.where(hidden, np.float32(1e4), feeds["v"]),
    }
    first, second = (run_kernel(OP, x, shape_of(feeds), scale=SCALE) for x in (feeds, other))
    assert np.array_equal(first, second)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("n", "m"), [(1, 1), (20, 90), (20, 3000), (300, 1100)])
def test_the_kernel_gives_the_same_bits_for_any_threads_and_batch_mates(n: int, m: int) -> None:
    feeds = random_feeds(n, m)
    together = run_kernel(OP, feeds, shape_of(feeds), threads=1, scale=SCALE)
    for threads in (2, 5):
        assert np.array_equal(together, run_kernel(OP, feeds, shape_of(feeds), threads=threads, scale=SCALE))
    for sample in range(3):
        alone = {name: array[sample : sample + 1] for name, array in feeds.items()}
        assert np.array_equal(together[sample : sample + 1], run_kernel(OP, alone, shape_of(alone), scale=SCALE))


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("m", [50, 1500])
def test_what_is_not_finite_shows_in_the_result(m: int, value: float, name: str) -> None:
    feeds = random_feeds(20, m, batch=1)
    feeds["keep"][...] = True
    feeds[name][0, 1, 4, 2] = value
    result = run_kernel(OP, feeds, shape_of(feeds), scale=SCALE)
    assert np.isfinite(result[0, 0]).all()
    touched = result[0, 1, 4] if name == "q" else result[0, 1, :, 2]
    # a query times an infinite key is −∞ for about half of the queries, whose weight is zero
    assert not np.isfinite(touched).any() if name == "q" or np.isnan(value) else not np.isfinite(touched).all()


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)])
def test_empty_inputs_give_empty_outputs(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, n, m = sizes
    feeds = random_feeds(n, m, batch=batch, heads=heads)
    for library in (True, False):
        run = session(one_node_model(OP, feeds, body=True, scale=SCALE), library=library)
        assert run.run(None, feeds)[0].shape == shape_of(feeds)
    assert masked_attention(*tensors(feeds), SCALE).shape == shape_of(feeds)


@pytest.mark.requires("native", "onnx", "ort")
def test_without_keys_the_result_is_zero_and_without_channels_it_is_the_mean() -> None:
    no_keys = random_feeds(4, 0)
    assert not run_kernel(OP, no_keys, shape_of(no_keys), scale=SCALE).any()
    assert not masked_attention(*tensors(no_keys), SCALE).any()
    no_channels = random_feeds(4, 9, d=0)
    assert_close(run_kernel(OP, no_channels, shape_of(no_channels), scale=SCALE), exact_attention(no_channels), FP32)


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"q": (2, 3, 4)}, "q, k and v have shapes"),
    ({"k": (2, 3, 6, 9)}, "q, k and v have shapes"),
    ({"k": (1, 3, 6, 8)}, "q, k and v have shapes"),
    ({"v": (2, 3, 5, 8)}, "q, k and v have shapes"),
    ({"keep": (2, 5)}, "keep "),
    ({"keep": (1, 6)}, "keep "),
]


@pytest.mark.parametrize("given", [given for given, _ in ERRORS])
def test_wrong_shapes_are_errors_of_the_operator(given: dict[str, tuple[int, ...]]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"masked_attention: {name} has shape .*; expected "):
        masked_attention(*tensors(wrong_feeds(given)), SCALE)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("given", "message"), ERRORS)
def test_wrong_shapes_are_errors_of_the_kernel(given: dict[str, tuple[int, ...]], message: str) -> None:
    feeds = wrong_feeds(given)
    with pytest.raises(Exception, match=f"MaskedAttention: {message}.*expected"):
        session(one_node_model(OP, feeds, body=False, scale=SCALE), library=True).run(None, feeds)


def wrong_feeds(given: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    shapes = {"q": (2, 3, 4, 8), "k": (2, 3, 6, 8), "v": (2, 3, 6, 8), "keep": (2, 6), **given}
    return {name: np.ones(shape, bool if name == "keep" else np.float32) for name, shape in shapes.items()}


def test_wrong_dtypes_and_scales_are_errors_of_the_operator() -> None:
    q, k, v, keep = tensors(random_feeds(4, 6))
    with pytest.raises(ValueError, match="expected one dtype"):
        masked_attention(q, k.half(), v, keep, SCALE)
    with pytest.raises(ValueError, match="expected a floating-point dtype"):
        masked_attention(q.int(), k.int(), v.int(), keep, SCALE)
    with pytest.raises(ValueError, match=r"keep is torch.int64"):
        masked_attention(q, k, v, keep.long(), SCALE)
    with pytest.raises(ValueError, match="scale is nan; expected a finite number"):
        masked_attention(q, k, v, keep, float("nan"))


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"scale": "1"}, "scale has another type; expected a float"),
        ({"scale": 1}, "scale has another type; expected a float"),
        ({"scale": float("inf")}, "scale is inf; expected a finite number"),
        ({}, "scale is missing; expected a float"),
    ],
)
def test_wrong_attributes_are_errors_of_the_kernel(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        session(one_node_model(OP, random_feeds(4, 6), body=False, **attributes), library=True)


@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize("inline", [False, True])
def test_nodes_with_different_scales_share_a_body(inline: bool) -> None:
    from onnx import helper

    feeds = random_feeds(5, 63)
    model = onnx.load_from_string(one_node_model(OP, feeds, body=True, scale=0.5))
    second = helper.make_node(OP, list(feeds), ["other"], domain=DOMAIN, scale=0.25)
    model.graph.node.append(second)
    model.graph.output.append(helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, None))
    model.functions[0].CopyFrom(onnx_function_body(model.graph.node, 20))
    outputs = session(inlined(model) if inline else model, library=False).run(None, feeds)
    for output, scale in zip(outputs, (0.5, 0.25), strict=True):
        assert_close(output, exact_attention(feeds, scale), FP32)


@pytest.mark.requires("onnx")
def test_the_schema_infers_the_shape_of_queries_by_channels_of_values() -> None:
    import onnx
    from onnx import helper

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    node = helper.make_node(
        OP, ["q", "k", "v", "keep"], ["out"], domain=DOMAIN, scale=1.0, **{PLUGIN_NAMESPACE: DOMAIN}
    )
    half = onnx.TensorProto.FLOAT16
    dims = {"q": ["b", 2, "n", 8], "k": ["b", 2, "m", 8], "v": ["b", 2, "m", "e"]}
    inputs = [helper.make_tensor_value_info(name, half, shape) for name, shape in dims.items()]
    inputs.append(helper.make_tensor_value_info("keep", onnx.TensorProto.BOOL, ["b", "m"]))
    graph = helper.make_graph([node], "one", inputs, [helper.make_empty_tensor_value_info("out")])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets), strict_mode=True)
    out = model.graph.output[0].type.tensor_type
    assert [dim.dim_param or dim.dim_value for dim in out.shape.dim] == ["b", 2, "n", "e"]
    assert out.elem_type == half


@pytest.mark.requires("native", "onnx", "ort")
def test_outputs_may_be_reused_between_runs() -> None:
    feeds = random_feeds(10, 1300)
    run = session(one_node_model(OP, feeds, body=False, scale=SCALE), library=True)
    first = run_poisoned(run, feeds, shape_of(feeds))
    assert np.array_equal(first, run_poisoned(run, feeds, shape_of(feeds)))
