"""`effexport::SequenceConv`: the torch operator, its schema, its body of standard nodes and its kernel."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernel_sessions import session
from one_node import one_node_model, run_body, run_kernel

from effexport.plugins.ops import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE
from effexport.plugins.sequence_conv.op import sequence_conv

OP = "SequenceConv"
# A sum of up to 201 products of about 1: partial sums stay below 64, each addition rounds by 2**-24 of them at most,
# and the errors add up like a random walk.
FP32 = 1e-4
# Inputs are exact and sums are float32: what remains is one rounding of results below 64.
HALF = {"float16": 64 * 2**-11, "bfloat16": 64 * 2**-8}
# The body rounds the convolution to 11 bits as well.
BODY_FP16 = 2 * 64 * 2**-11
# tokens, taps: one tap, a filter longer than the sequence, whole and partial units, taps beyond a block of the body
SIZES = [(1, 1), (1, 65), (5, 3), (63, 65), (64, 65), (65, 65), (100, 5), (100, 7), (1000, 65), (1000, 1), (300, 201)]


def random_feeds(
    n: int, taps: int, channels: int = 24, *, batch: int = 3, heads: int = 2, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """The last sample keeps no token, the others some."""
    random = np.random.default_rng((n, taps, channels))
    keep = random.random((batch, n)) > 0.3
    keep[2:3] = False
    x, residual = (random.standard_normal((batch, heads, n, channels)).astype(dtype) for _ in range(2))
    weight = random.standard_normal((heads, 1, taps, 1)).astype(dtype)
    return {"x": x, "weight": weight, "keep": keep, "residual": residual}


def exact_sums(feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The formula in float64, through PyTorch's convolution."""
    x, weight, residual = (torch.from_numpy(feeds[name].astype(np.float64)) for name in ("x", "weight", "residual"))
    masked = torch.where(torch.from_numpy(feeds["keep"])[:, None, :, None], x, 0.0)
    convolved = F.conv2d(masked, weight, padding=(weight.shape[2] // 2, 0), groups=weight.shape[0])
    return (residual + convolved).numpy()


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


@pytest.mark.parametrize(("n", "taps"), SIZES)
def test_the_operator_computes_the_formula(n: int, taps: int) -> None:
    feeds = random_feeds(n, taps)
    assert_close(sequence_conv(*tensors(feeds)).numpy(), exact_sums(feeds), FP32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_operator_is_registered_as_pytorch_asks(dtype: torch.dtype) -> None:
    x, weight, keep, residual = tensors(random_feeds(7, 3))
    # a custom operator's result is new memory, also for the strides of split heads
    split = x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    args = (split, weight.to(dtype), keep, residual.to(dtype))
    torch.library.opcheck(torch.ops.effexport.sequence_conv.default, args)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("n", "taps"), SIZES)
def test_kernel_and_body_compute_the_formula(n: int, taps: int) -> None:
    feeds = random_feeds(n, taps)
    expected = exact_sums(feeds)
    assert_close(run_kernel(OP, feeds, expected.shape), expected, FP32)
    assert_close(run_body(OP, feeds, expected.shape), expected, FP32)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("channels", [1, 15, 16, 33, 48, 64, 100, 130])
def test_channels_may_be_any_number(channels: int) -> None:
    feeds = random_feeds(80, 65, channels)
    expected = exact_sums(feeds)
    assert_close(run_kernel(OP, feeds, expected.shape), expected, FP32)
    assert_close(run_body(OP, feeds, expected.shape), expected, FP32)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("dtype", list(HALF))
@pytest.mark.parametrize(("n", "taps"), [(5, 65), (300, 65)])
def test_half_precision_computes_in_float32(n: int, taps: int, dtype: str) -> None:
    feeds = random_feeds(n, taps, 64, dtype=dtype)
    expected = exact_sums(feeds)
    assert_close(run_kernel(OP, feeds, expected.shape), expected, HALF[dtype] + FP32)
    assert_close(sequence_conv(*tensors(feeds)).float().numpy(), expected, HALF[dtype] + FP32)
    if dtype == "float16":  # ONNX Runtime has no products in bfloat16
        assert_close(run_body(OP, feeds, expected.shape), expected, BODY_FP16)


@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize("opset", [18, 20, 23, 24])
def test_the_body_works_in_every_opset(opset: int) -> None:
    feeds = random_feeds(70, 65)
    assert_close(run_body(OP, feeds, feeds["x"].shape, opset=opset), exact_sums(feeds), FP32)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("channels", [24, 64])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_hidden_tokens_change_nothing_whatever_they_hold(value: float, channels: int) -> None:
    feeds = random_feeds(300, 65, channels)
    other = {**feeds, "x": np.where(feeds["keep"][:, None, :, None], feeds["x"], np.float32(value))}
    for run in (run_kernel, run_body):
        assert np.array_equal(run(OP, feeds, feeds["x"].shape), run(OP, other, feeds["x"].shape))


@pytest.mark.requires("native", "onnx", "ort")
def test_what_is_not_finite_reaches_as_far_as_the_filter() -> None:
    feeds = random_feeds(100, 5, batch=1)
    feeds["keep"][...] = True
    feeds["x"][0, 1, 50] = np.inf
    touched = ~np.isfinite(run_kernel(OP, feeds, feeds["x"].shape)).all(axis=-1)
    assert np.argwhere(touched).tolist() == [[0, 1, token] for token in range(48, 53)]


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("n", [1, 100, 1000])
def test_the_kernel_gives_the_same_bits_for_any_threads_and_batch_mates(n: int) -> None:
    feeds = random_feeds(n, 65)
    together = run_kernel(OP, feeds, feeds["x"].shape, threads=1)
    for threads in (2, 5):
        assert np.array_equal(together, run_kernel(OP, feeds, feeds["x"].shape, threads=threads))
    for sample in range(3):
        alone = {
            name: array if name == "weight" else array[sample : sample + 1].copy() for name, array in feeds.items()
        }
        assert np.array_equal(together[sample : sample + 1], run_kernel(OP, alone, alone["x"].shape))


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty_inputs_give_empty_outputs(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, n, channels = sizes
    feeds = random_feeds(n, 5, channels, batch=batch, heads=heads)
    for library in (True, False):
        assert session(one_node_model(OP, feeds, body=True), library=library).run(None, feeds)[0].shape == sizes
    assert sequence_conv(*tensors(feeds)).shape == sizes


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"x": (2, 3, 4)}, "x and residual have shapes"),
    ({"residual": (2, 3, 4, 9)}, "x and residual have shapes"),
    ({"weight": (2, 1, 5, 1)}, "weight has shape"),
    ({"weight": (3, 1, 4, 1)}, "weight has shape"),
    ({"weight": (3, 1, 0, 1)}, "weight has shape"),
    ({"weight": (3, 1, 5)}, "weight has shape"),
    ({"weight": (3, 1, 5, 2)}, "weight has shape"),
    ({"keep": (2, 5)}, "keep "),
    ({"keep": (1, 4)}, "keep "),
]


def wrong_feeds(given: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    shapes = {"x": (2, 3, 4, 8), "weight": (3, 1, 5, 1), "keep": (2, 4), "residual": (2, 3, 4, 8), **given}
    return {name: np.ones(shape, bool if name == "keep" else np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("given", [given for given, _ in ERRORS])
def test_wrong_shapes_are_errors_of_the_operator(given: dict[str, tuple[int, ...]]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"sequence_conv: {name} has .*; expected "):
        sequence_conv(*tensors(wrong_feeds(given)))


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("given", "message"), ERRORS)
def test_wrong_shapes_are_errors_of_the_kernel(given: dict[str, tuple[int, ...]], message: str) -> None:
    feeds = wrong_feeds(given)
    with pytest.raises(Exception, match=f"SequenceConv: {message}.*expected"):
        session(one_node_model(OP, feeds, body=False), library=True).run(None, feeds)


def test_wrong_dtypes_are_errors_of_the_operator() -> None:
    x, weight, keep, residual = tensors(random_feeds(4, 5))
    with pytest.raises(ValueError, match="expected one dtype"):
        sequence_conv(x, weight.half(), keep, residual)
    with pytest.raises(ValueError, match="expected a floating-point dtype"):
        sequence_conv(x.int(), weight.int(), keep, residual.int())
    with pytest.raises(ValueError, match=r"keep is torch.uint8"):
        sequence_conv(x, weight, keep.byte(), residual)


@pytest.mark.requires("onnx")
def test_the_schema_infers_the_shape_of_x() -> None:
    import onnx
    from onnx import helper

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    node = helper.make_node(
        OP, ["x", "weight", "keep", "residual"], ["out"], domain=DOMAIN, **{PLUGIN_NAMESPACE: DOMAIN}
    )
    half, dims = onnx.TensorProto.FLOAT16, ["b", 2, "n", 8]
    shapes = {"x": dims, "weight": [2, 1, 5, 1], "keep": ["b", "n"], "residual": dims}
    inputs = [
        helper.make_tensor_value_info(name, onnx.TensorProto.BOOL if name == "keep" else half, shape)
        for name, shape in shapes.items()
    ]
    graph = helper.make_graph([node], "one", inputs, [helper.make_empty_tensor_value_info("out")])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets), strict_mode=True)
    out = model.graph.output[0].type.tensor_type
    assert [dim.dim_param or dim.dim_value for dim in out.shape.dim] == dims
    assert out.elem_type == half
