"""`effexport::SegmentMeans`: the torch operator, its schema, its body of standard nodes and its kernel."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from kernel_sessions import session
from one_node import one_node_model, run_body, run_kernel

from effexport.models.variants.nystrom.layer import landmark_weights
from effexport.plugins.ops import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE
from effexport.plugins.segment_means.op import onnx_function_body, segment_means

OP = "SegmentMeans"
# Sums of up to 1000 values of about 1: partial sums stay below 128, each addition rounds by 2**-24 of them at most.
# Means of many values have such an error divided by their number.
FP32 = 1e-5
# Inputs are exact and sums are float32: what remains is one rounding of means below 8.
HALF = {"float16": 8 * 2**-11, "bfloat16": 8 * 2**-8}
# tokens, segments: one of either, more segments than tokens, tokens that no number of segments divides
SIZES = [(1, 1), (1, 5), (5, 1), (5, 3), (7, 16), (63, 16), (64, 16), (65, 16), (100, 7), (1000, 64), (1000, 1)]


def random_feeds(
    n: int, channels: int = 24, *, batch: int = 4, heads: int = 2, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """The second sample ends early, the third keeps no token, the others some of all."""
    random = np.random.default_rng((n, channels))
    keep = random.random((batch, n)) > 0.3
    keep[1:2, n // 2 :] = False
    keep[2:3] = False
    return {"x": random.standard_normal((batch, heads, n, channels)).astype(dtype), "keep": keep}


def exact_means(feeds: dict[str, np.ndarray], count: int) -> np.ndarray:
    """The layer's formula in float64."""
    x, keep = feeds["x"].astype(np.float64), torch.from_numpy(feeds["keep"])
    used = landmark_weights(keep, count).numpy() > 0
    weights = used / np.maximum(used.sum(axis=-1, keepdims=True), 1)
    return np.asarray(weights[:, None] @ x)


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


@pytest.mark.parametrize(("n", "count"), SIZES)
def test_the_operator_computes_the_formula(n: int, count: int) -> None:
    feeds = random_feeds(n)
    assert_close(segment_means(*tensors(feeds), count).numpy(), exact_means(feeds, count), FP32)


def test_segments_are_as_long_as_the_kept_part_of_the_sample_wants() -> None:
    x = torch.arange(1.0, 9.0).reshape(1, 1, 8, 1)
    keep = torch.tensor([[True, False, True, True, True, False, False, False]])
    # 5 tokens up to the last kept one, so segments of 2: {1}, {3, 4}, {5}, and none
    assert segment_means(x, keep, 4).flatten().tolist() == [1.0, 3.5, 5.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_operator_is_registered_as_pytorch_asks(dtype: torch.dtype) -> None:
    x, keep = tensors(random_feeds(7))
    # a custom operator's result is new memory, also for the strides of split heads
    split = x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(torch.ops.effexport.segment_means.default, (split, keep, 3))


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("n", "count"), SIZES)
def test_kernel_and_body_compute_the_formula(n: int, count: int) -> None:
    feeds = random_feeds(n)
    expected = exact_means(feeds, count)
    assert_close(run_kernel(OP, feeds, expected.shape, num_segments=count), expected, FP32)
    assert_close(run_body(OP, feeds, expected.shape, num_segments=count), expected, FP32)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("channels", [1, 15, 16, 33, 48, 64, 100, 130, 200])
def test_channels_may_be_any_number(channels: int) -> None:
    feeds = random_feeds(80, channels)
    expected = exact_means(feeds, 16)
    assert_close(run_kernel(OP, feeds, expected.shape, num_segments=16), expected, FP32)
    assert_close(run_body(OP, feeds, expected.shape, num_segments=16), expected, FP32)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("dtype", list(HALF))
@pytest.mark.parametrize("n", [5, 300])
def test_half_precision_computes_in_float32(n: int, dtype: str) -> None:
    feeds = random_feeds(n, 70, dtype=dtype)
    expected = exact_means(feeds, 16)
    assert_close(run_kernel(OP, feeds, expected.shape, num_segments=16), expected, HALF[dtype] + FP32)
    assert_close(segment_means(*tensors(feeds), 16).float().numpy(), expected, HALF[dtype] + FP32)
    assert_close(run_body(OP, feeds, expected.shape, num_segments=16), expected, HALF[dtype] + FP32)


@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize("opset", [18, 20, 23, 24])
def test_the_body_works_in_every_opset(opset: int) -> None:
    feeds = random_feeds(70)
    expected = exact_means(feeds, 16)
    assert_close(run_body(OP, feeds, expected.shape, opset=opset, num_segments=16), expected, FP32)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("channels", [24, 64])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_hidden_tokens_change_nothing_in_the_kernel_whatever_they_hold(value: float, channels: int) -> None:
    feeds = random_feeds(300, channels)
    other = {**feeds, "x": np.where(feeds["keep"][:, None, :, None], feeds["x"], np.float32(value))}
    expected = exact_means(feeds, 16)
    runs = [run_kernel(OP, given, expected.shape, num_segments=16) for given in (feeds, other)]
    assert np.array_equal(*runs)
    operator = [segment_means(*tensors(given), 16) for given in (feeds, other)]
    assert torch.equal(*operator)
    if np.isfinite(value):  # the body multiplies it by zero
        bodies = [run_body(OP, given, expected.shape, num_segments=16) for given in (feeds, other)]
        assert np.array_equal(*bodies)


@pytest.mark.requires("native", "onnx", "ort")
def test_what_is_not_finite_reaches_its_own_segment_alone() -> None:
    feeds = random_feeds(100, batch=1)
    feeds["keep"][...] = True
    feeds["x"][0, 1, 50, 3] = np.nan
    means = run_kernel(OP, feeds, (1, 2, 10, 24), num_segments=10)
    assert np.argwhere(np.isnan(means)).tolist() == [[0, 1, 5, 3]]


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("n", [1, 100, 1000])
def test_the_kernel_gives_the_same_bits_for_any_threads_and_batch_mates(n: int) -> None:
    feeds = random_feeds(n)
    shape = (4, 2, 16, 24)
    together = run_kernel(OP, feeds, shape, threads=1, num_segments=16)
    for threads in (2, 5):
        assert np.array_equal(together, run_kernel(OP, feeds, shape, threads=threads, num_segments=16))
    for sample in range(4):
        alone = {name: array[sample : sample + 1].copy() for name, array in feeds.items()}
        assert np.array_equal(together[sample : sample + 1], run_kernel(OP, alone, (1, *shape[1:]), num_segments=16))


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty_inputs_give_empty_outputs_or_zeros(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, n, channels = sizes
    feeds = random_feeds(n, channels, batch=batch, heads=heads)
    shape = (batch, heads, 5, channels)
    outputs = [segment_means(*tensors(feeds), 5).numpy()]
    # ONNX Runtime's products do not spread one matrix over no heads
    for run in (run_kernel, run_body) if heads > 0 else (run_kernel,):
        outputs.append(run(OP, feeds, shape, num_segments=5))
    for output in outputs:
        assert output.shape == shape
        assert n > 0 or not output.any()


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"x": (2, 3, 4)}, "x has shape"),
    ({"x": (2, 3, 4, 8, 1)}, "x has shape"),
    ({"keep": (2, 5)}, "keep "),
    ({"keep": (1, 4)}, "keep "),
]


def wrong_feeds(given: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    shapes = {"x": (2, 3, 4, 8), "keep": (2, 4), **given}
    return {name: np.ones(shape, bool if name == "keep" else np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(("given", "message"), ERRORS)
def test_wrong_shapes_are_errors_of_the_operator(given: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segment_means(*tensors(wrong_feeds(given)), 2)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("given", "message"), ERRORS)
def test_wrong_shapes_are_errors_of_the_kernel(given: dict[str, tuple[int, ...]], message: str) -> None:
    feeds = wrong_feeds(given)
    with pytest.raises(Exception, match=f"SegmentMeans: {message}.*expected"):
        session(one_node_model(OP, feeds, body=False, num_segments=2), library=True).run(None, feeds)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({}, "attribute num_segments is missing"),
        ({"num_segments": 2.0}, "attribute num_segments has another type"),
        ({"num_segments": 0}, "num_segments is 0"),
        ({"num_segments": 2**40}, f"num_segments is {2**40}"),
    ],
)
def test_wrong_attributes_are_errors_of_the_kernel(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=f"SegmentMeans: {message}.*expected"):
        session(one_node_model(OP, wrong_feeds({}), body=False, **attributes), library=True)


@pytest.mark.requires("native", "onnx", "ort")
def test_more_means_than_any_machine_holds_are_refused() -> None:
    feeds = wrong_feeds({"x": (1, 1024, 1, 1025), "keep": (1, 1)})
    opened = session(one_node_model(OP, feeds, body=False, num_segments=2**20), library=True)
    with pytest.raises(Exception, match=r"an output of \[1, 1024, 1048576, 1025\] elements was requested"):
        opened.run(None, feeds)


@pytest.mark.requires("native", "onnx", "ort")
def test_every_byte_of_keep_that_is_not_0_is_true() -> None:
    feeds = random_feeds(9)
    opened = session(one_node_model(OP, feeds, body=False, num_segments=5), library=True)
    (expected,) = opened.run(None, feeds)
    feeds["keep"] = (feeds["keep"].view(np.uint8) * np.uint8(2)).view(bool)
    assert np.array_equal(opened.run(None, feeds)[0], expected)


def test_wrong_dtypes_and_counts_are_errors_of_the_operator() -> None:
    x, keep = tensors(random_feeds(4))
    with pytest.raises(ValueError, match="expected a floating-point dtype"):
        segment_means(x.int(), keep, 2)
    with pytest.raises(ValueError, match=r"keep is torch.uint8"):
        segment_means(x, keep.byte(), 2)
    with pytest.raises(ValueError, match="num_segments is 0; expected at least 1"):
        segment_means(x, keep, 0)


@pytest.mark.requires("onnx")
def test_nodes_with_different_counts_cannot_share_a_body() -> None:
    from onnx import helper

    nodes = [helper.make_node(OP, ["x", "keep"], ["out"], domain=DOMAIN, num_segments=count) for count in (4, 2)]
    with pytest.raises(ValueError, match=r"different num_segments \[2, 4\]"):
        onnx_function_body(nodes, 20)


@pytest.mark.requires("native", "onnx", "ort")
def test_the_runtime_infers_the_shape_that_the_kernel_returns(capfd: pytest.CaptureFixture[str]) -> None:
    import onnxruntime

    from effexport.plugins.building.library import get_library_path

    feeds = random_feeds(9)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 2  # it warns about sizes that it did not expect
    options.register_custom_ops_library(str(get_library_path()))
    model = one_node_model(OP, feeds, body=False, num_segments=5)
    run = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    assert run.get_outputs()[0].shape == ["x0", "x1", 5, "x3"]
    assert run.run(None, feeds)[0].shape == (4, 2, 5, 24)
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.requires("onnx")
def test_the_schema_infers_the_shape_of_the_means() -> None:
    import onnx
    from onnx import helper

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    node = helper.make_node(OP, ["x", "keep"], ["out"], domain=DOMAIN, num_segments=5, **{PLUGIN_NAMESPACE: DOMAIN})
    half = onnx.TensorProto.FLOAT16
    inputs = [
        helper.make_tensor_value_info("x", half, ["b", 2, "n", 8]),
        helper.make_tensor_value_info("keep", onnx.TensorProto.BOOL, ["b", "n"]),
    ]
    graph = helper.make_graph([node], "one", inputs, [helper.make_empty_tensor_value_info("out")])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets), strict_mode=True)
    out = model.graph.output[0].type.tensor_type
    assert [dim.dim_param or dim.dim_value for dim in out.shape.dim] == ["b", 2, 5, 8]
    assert out.elem_type == half
