"""`effexport::AFTSimpleAttention`: torch operator, schema, body of standard nodes and kernel, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_sessions import ort_value, run_poisoned, session
from torch import Tensor

from effexport.models.layers import fused_operators
from effexport.models.variants.aft_simple.layer import AFTSimpleAttention
from effexport.models.variants.aft_simple.spec import AFTSimpleSpec
from effexport.plugins.aft_simple_attention.op import aft_simple_attention, onnx_function_body, reference
from effexport.plugins.ops import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE

# As a share of the largest |v|, which no average exceeds. The kernel adds 8 rows, then 32 of those sums, then the
# slices: 44 roundings of 6e-8 for 1000 tokens, and a few more of e^x, the quotient and σ.
KERNEL_FP32 = 4e-6
# One sum after another over 1000 tokens: 6e-5 if no rounding cancelled another, a thirtieth of it when they do.
BODY_FP32 = 1e-5
# The result is rounded to 11 or 8 bits; everything before it is float32.
ROUNDING = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}
LENGTHS = [1, 63, 100, 1000]
CHANNELS = [1, 63, 100, 512]
FORBIDDEN = {"TopK", "Loop", "CumSum", "Scan", "Sort", "If", "MatMul"}

native = pytest.mark.requires("native", "onnx", "ort")
in_ort = pytest.mark.requires("onnx", "ort")


def slow_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """σ(q_t) Σ e^k v / Σ e^k over the visible tokens, a head of a sample at a time in float64."""
    out = np.zeros(q.shape, np.float64)
    for sample, head in np.ndindex(q.shape[:2]):
        seen = keep[sample]
        if not seen.any():
            continue
        key, value = (x[sample, head][seen].astype(np.float64) for x in (k, v))
        weight = np.exp(key - key.max(axis=0))
        context = (weight * value).sum(axis=0) / weight.sum(axis=0)
        with np.errstate(over="ignore"):
            out[sample, head] = context / (1 + np.exp(-q[sample, head].astype(np.float64)))
    return out


def made_inputs(
    shape: tuple[int, int, int, int], dtype: str = "float32", *, key_scale: float = 3.0
) -> dict[str, np.ndarray]:
    """Random inputs, a third of whose tokens are padding that holds NaN and infinities; the last token is visible."""
    batch, _, seq, _ = shape
    random = np.random.default_rng(shape[2] * 1000 + shape[3])
    q, k, v = (random.standard_normal(shape) for _ in range(3))
    keep = random.random((batch, seq)) < 0.66
    keep[:, -1:] = True
    hidden = np.broadcast_to(~keep[:, None, :, None], shape)
    k = np.where(hidden, random.choice([np.nan, np.inf, -np.inf], shape), k * key_scale)
    v = np.where(hidden, random.choice([np.nan, np.inf, -np.inf], shape), v)
    return {"q": (3 * q).astype(dtype), "k": k.astype(dtype), "v": v.astype(dtype), "keep": keep}


def assert_close(actual: np.ndarray, feeds: dict[str, np.ndarray], limit: float) -> None:
    """Within a share of the largest |v| of what float64 gives for the same inputs."""
    expected = slow_attention(**feeds)
    assert actual.shape == expected.shape
    assert actual.dtype == feeds["v"].dtype
    visible = feeds["v"].astype(np.float64)[np.broadcast_to(feeds["keep"][:, None, :, None], expected.shape)]
    largest = np.abs(visible).max() if visible.size else 1.0
    difference = np.abs(actual.astype(np.float64) - expected)
    assert np.isfinite(difference).all()
    assert difference.max(initial=0.0) <= limit * largest, difference.max() / largest


def aft_model(
    dtype: str = "float32", *, body: bool, opset: int = 20, dims: Any = ("batch", "heads", "seq", "channels")
) -> Any:
    """A model of one custom node, with its body or without it. dims None: inputs of unknown shape."""
    from onnx import TensorProto, helper

    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = helper.make_node(
        "AFTSimpleAttention", ["q", "k", "v", "keep"], ["out"], domain=DOMAIN, **{PLUGIN_NAMESPACE: DOMAIN}
    )
    keep_dims = None if dims is None else (dims[0], dims[2])
    graph = helper.make_graph(
        [node],
        "one",
        [
            *(helper.make_tensor_value_info(name, element, dims) for name in "qkv"),
            helper.make_tensor_value_info("keep", TensorProto.BOOL, keep_dims),
        ],
        [helper.make_tensor_value_info("out", element, dims)],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    return helper.make_model(
        graph,
        functions=[onnx_function_body([node], opset)] if body else [],
        opset_imports=opsets,
        ir_version=helper.find_min_ir_version_for(opsets[:1], ignore_unknown=True),
    )


def kernel_session(dtype: str = "float32", threads: int = 2, dims: Any = ("batch", "heads", "seq", "channels")) -> Any:
    return session(aft_model(dtype, body=False, dims=dims).SerializeToString(), threads=threads)


def body_session(dtype: str = "float32", opset: int = 20) -> Any:
    return session(aft_model(dtype, body=True, opset=opset).SerializeToString(), library=False)


def tensors(feeds: dict[str, np.ndarray]) -> list[Tensor]:
    return [torch.from_numpy(x) for x in feeds.values()]


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("seq", LENGTHS)
def test_the_torch_operator_computes_the_formula(seq: int, channels: int) -> None:
    feeds = made_inputs((2, 1, seq, channels))
    assert_close(aft_simple_attention(*tensors(feeds)).numpy(), feeds, KERNEL_FP32)
    in_double = {name: x if name == "keep" else x.astype(np.float64) for name, x in feeds.items()}
    # 1e-16 for each of 1000 roundings
    assert_close(reference(*tensors(in_double)).numpy(), in_double, 1e-13)


def test_the_layer_gives_the_same_with_the_operator_as_without() -> None:
    torch.manual_seed(0)
    layer = AFTSimpleAttention(AFTSimpleSpec(dim=48)).eval()
    hidden = torch.randn(2, 100, 48)
    mask = torch.ones(2, 100, dtype=torch.int64)
    mask[1, 40:] = 0
    with torch.inference_mode():
        plain = layer(hidden, mask)
        with fused_operators(layer, True):
            fused = layer(hidden, mask)
    # sums of 100 terms of about one, in two orders
    torch.testing.assert_close(fused, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "feeds",
    [
        made_inputs((2, 1, 5, 7)),
        made_inputs((2, 3, 5, 1), "float16"),
        {name: x[:, :, ::2] if name != "keep" else x[:, ::2] for name, x in made_inputs((1, 2, 6, 4)).items()},
        made_inputs((0, 1, 5, 7)),
        made_inputs((2, 1, 0, 7)),
    ],
)
def test_the_operator_keeps_the_rules_of_torch_library(feeds: dict[str, np.ndarray]) -> None:
    torch.library.opcheck(torch.ops.effexport.aft_simple_attention.default, tuple(tensors(feeds)))


ONES = torch.ones(2, 1, 4, 3)
KEEP = torch.ones(2, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((ONES[0], ONES, ONES, KEEP), r"q has shape \(1, 4, 3\); expected \[batch, heads, seq, channels\]"),
        ((ONES, ONES[:1], ONES, KEEP), r"k has shape \(1, 1, 4, 3\); expected \[2, 1, 4, 3\]"),
        ((ONES, ONES, ONES[..., :1], KEEP), r"v has shape \(2, 1, 4, 1\); expected \[2, 1, 4, 3\]"),
        ((ONES, ONES, ONES.half(), KEEP), "v is torch.float16 but q is torch.float32; expected one dtype"),
        ((ONES, ONES, ONES, KEEP.T), r"keep has shape \(4, 2\); expected \[2, 4\]"),
        ((ONES, ONES, ONES, KEEP.long()), "keep is torch.int64; expected torch.bool"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Tensor, ...], text: str) -> None:
    with pytest.raises(ValueError, match="aft_simple_attention: " + text):
        aft_simple_attention(*arguments)


@in_ort
@pytest.mark.parametrize("opset", [18, 20, 24])
@pytest.mark.parametrize("seq", LENGTHS)
def test_the_body_computes_the_formula(seq: int, opset: int) -> None:
    import onnx

    onnx.checker.check_model(aft_model(body=True, opset=opset))
    opened = body_session(opset=opset)
    for channels in CHANNELS:
        feeds = made_inputs((2, 1, seq, channels))
        assert_close(opened.run(None, feeds)[0], feeds, BODY_FP32)


@native
@pytest.mark.parametrize("seq", LENGTHS)
def test_the_kernel_computes_the_formula(seq: int) -> None:
    opened = kernel_session()
    for heads, channels in ((1, 1), (1, 63), (3, 100), (1, 512), (2, 15), (2, 17)):
        feeds = made_inputs((2, heads, seq, channels))
        (out,) = run_poisoned(opened, feeds, "float32", feeds["v"].shape)
        assert_close(out, feeds, KERNEL_FP32)


@native
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("seq", LENGTHS)
def test_half_precision_is_rounded_only_at_the_end(seq: int, dtype: str) -> None:
    # bfloat16 has no arithmetic in ONNX Runtime's CPU provider, which the body would need
    opened = [kernel_session(dtype)] + ([body_session(dtype)] if dtype == "float16" else [])
    for channels in CHANNELS:
        feeds = made_inputs((2, 1, seq, channels), dtype)
        for one in opened:
            (out,) = run_poisoned(one, feeds, dtype, feeds["v"].shape)
            assert_close(out, feeds, ROUNDING[dtype] + BODY_FP32)


@native
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("gap", [20, 60, 110])
def test_keys_far_apart_neither_overflow_nor_vanish(gap: float, dtype: str) -> None:
    feeds = made_inputs((2, 1, 600, 33), dtype)
    # the largest key early in one sample, late in the other: slices have maxima that differ by the gap
    feeds["k"][0, :, 3] = gap
    feeds["k"][1, :, 597] = gap
    feeds["keep"][0, 3] = feeds["keep"][1, 597] = True
    feeds["v"][0, :, 3] = feeds["v"][1, :, 597] = 2
    for opened in (kernel_session(dtype), body_session(dtype)):
        (out,) = run_poisoned(opened, feeds, dtype, feeds["v"].shape)
        assert_close(out, feeds, ROUNDING[dtype] + BODY_FP32)
    # all keys low, but none absent
    feeds["k"] -= np.array(5 * gap, dtype)
    (out,) = run_poisoned(kernel_session(dtype), feeds, dtype, feeds["v"].shape)
    assert_close(out, feeds, ROUNDING[dtype] + BODY_FP32)


@native
@pytest.mark.parametrize("token", [0, 7, 255, 256, 300, 599])
def test_a_key_far_above_all_others_counts_wherever_it_stands(token: int) -> None:
    """By 120: its e^x is infinite unless its own maximum is taken off, of which every slice of 256 tokens has one."""
    feeds = made_inputs((1, 1, 600, 33), key_scale=1)
    feeds["k"][:, :, token], feeds["v"][:, :, token], feeds["keep"][:, token] = 128, 2, True
    for opened in (kernel_session("float32"), body_session("float32")):
        (out,) = run_poisoned(opened, feeds, "float32", feeds["v"].shape)
        assert_close(out, feeds, BODY_FP32)


def special_cases() -> dict[str, dict[str, np.ndarray]]:
    nothing = made_inputs((3, 1, 300, 20))
    nothing["keep"][1] = False
    huge = made_inputs((2, 1, 40, 5))
    huge["q"][...] = np.where(huge["q"] > 0, 3e38, -3e38).astype(np.float32)
    huge["k"][0, 0, -1] = 3e38
    one = made_inputs((2, 1, 1000, 9))
    one["keep"][...] = False
    one["keep"][:, 700] = True
    one["v"][:, :, 700] = 1
    one["k"][:, :, 700] = -1000
    return {"nothing visible in a sample": nothing, "huge numbers": huge, "one token visible": one}


@native
@pytest.mark.parametrize("case", list(special_cases()))
def test_special_cases_are_finite_and_right(case: str) -> None:
    feeds = special_cases()[case]
    assert_close(aft_simple_attention(*tensors(feeds)).numpy(), feeds, BODY_FP32)
    for opened in (kernel_session(), body_session()):
        (out,) = run_poisoned(opened, feeds, "float32", feeds["v"].shape)
        assert_close(out, feeds, BODY_FP32)


@native
def test_a_channel_whose_visible_keys_are_all_minus_infinity_is_zero() -> None:
    feeds = {name: np.ones((1, 1, 3, 2), np.float32) for name in "qkv"} | {"keep": np.ones((1, 3), bool)}
    feeds["k"][..., 0] = -np.inf
    for out in (
        aft_simple_attention(*tensors(feeds)).numpy(),
        kernel_session().run(None, feeds)[0],
        body_session().run(None, feeds)[0],
    ):
        assert (out[..., 0] == 0).all()
        np.testing.assert_allclose(out[..., 1], 1 / (1 + np.exp(-1)), rtol=1e-6)  # one average, one σ


@native
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_spreads_over_its_channel_and_no_further(name: str) -> None:
    feeds = made_inputs((2, 1, 300, 20))
    feeds[name][1, 0, 299, 7] = np.nan
    out = kernel_session().run(None, feeds)[0]
    expected = np.zeros(out.shape, bool)
    expected[1, 0, 299 if name == "q" else slice(None), 7] = True
    np.testing.assert_array_equal(np.isnan(out), expected)
    np.testing.assert_array_equal(np.isnan(aft_simple_attention(*tensors(feeds)).numpy()), expected)


@native
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_results_do_not_depend_on_threads_or_batch_mates(dtype: str) -> None:
    feeds = made_inputs((3, 2, 1000, 70), dtype)
    (expected,) = run_poisoned(kernel_session(dtype, threads=1), feeds, dtype, feeds["v"].shape)
    for threads in (2, 5):
        (again,) = run_poisoned(kernel_session(dtype, threads), feeds, dtype, feeds["v"].shape)
        assert np.array_equal(expected, again)
    for i in range(3):
        alone = {name: x[i : i + 1] for name, x in feeds.items()}
        (out,) = run_poisoned(kernel_session(dtype), alone, dtype, alone["v"].shape)
        assert np.array_equal(out[0], expected[i])


@native
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("shape", [(0, 1, 4, 8), (2, 1, 0, 8), (2, 1, 4, 0), (2, 0, 4, 8)])
def test_empty_inputs_give_empty_outputs(shape: tuple[int, int, int, int], dtype: str) -> None:
    feeds = {name: ort_value(np.zeros(shape, dtype)) for name in "qkv"}
    feeds["keep"] = ort_value(np.ones((shape[0], shape[2]), bool))
    opened = [kernel_session(dtype)] + ([body_session(dtype)] if dtype != "bfloat16" else [])
    for one in opened:
        (out,) = one.run_with_ort_values(None, feeds)
        assert tuple(out.shape()) == shape


WRONG_SHAPES = [
    ("q", (4, 3), r"q has shape \[4, 3\]; expected \[batch, heads, seq, channels\]"),
    ("k", (2, 1, 4, 1), r"k has shape \[2, 1, 4, 1\]; expected that of q, \[2, 1, 4, 3\]"),
    ("v", (2, 4, 3), r"v has shape \[2, 4, 3\]; expected that of q, \[2, 1, 4, 3\]"),
    ("keep", (4, 2), r"keep has shape \[4, 2\]; expected \[2, 4\], batch and seq of q \[2, 1, 4, 3\]"),
    ("keep", (2, 1, 4), r"keep has shape \[2, 1, 4\]; expected \[2, 4\]"),
]


@native
@pytest.mark.parametrize(("name", "shape", "message"), WRONG_SHAPES)
def test_the_kernel_says_what_is_wrong_with_its_input(name: str, shape: tuple[int, ...], message: str) -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    opened = kernel_session(dims=None)
    good = {x: np.ones((2, 1, 4, 3), np.float32) for x in "qkv"} | {"keep": np.ones((2, 4), bool)}
    with pytest.raises(InvalidArgument, match="AFTSimpleAttention: " + message):
        opened.run(None, {**good, name: np.ones(shape, good[name].dtype)})
    assert np.isfinite(opened.run(None, good)[0]).all(), "a refused input does not spoil the session"


@native
def test_inputs_of_other_types_are_refused_when_the_model_is_loaded() -> None:
    from onnx import TensorProto

    model = aft_model(body=False)
    model.graph.input[3].type.tensor_type.elem_type = TensorProto.FLOAT
    with pytest.raises(Exception, match="AFTSimpleAttention"):
        session(model.SerializeToString())
    model = aft_model(body=False)
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.FLOAT16
    with pytest.raises(Exception, match="AFTSimpleAttention"):
        session(model.SerializeToString())


@native
def test_the_kernel_passes_on_the_shape_of_v() -> None:
    from onnx import TensorProto, helper

    model = aft_model(body=False)
    model.graph.node.append(helper.make_node("Identity", ["out"], ["copy"]))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("copy", TensorProto.FLOAT, None))
    (output,) = session(model.SerializeToString()).get_outputs()
    assert output.shape == ["batch", "heads", "seq", "channels"]


@pytest.mark.requires("onnx")
@pytest.mark.parametrize("opset", [18, 20, 24])
def test_the_body_holds_no_node_that_a_runtime_lacks_or_runs_serially(opset: int) -> None:
    (body,) = aft_model(body=True, opset=opset).functions
    kinds = [node.op_type for node in body.node]
    # a MatMul would be a sum in TF32 on a GPU
    assert not set(kinds) & FORBIDDEN
    assert {node.domain for node in body.node} == {""}
    assert [(entry.domain, entry.version) for entry in body.opset_import] == [("", opset)]
    constants = [node.attribute[0].f for node in body.node if node.op_type == "Constant"]
    assert np.isfinite(constants).all()


@pytest.mark.requires("onnx")
@pytest.mark.parametrize("dims", [("N", 1, "n", 512), (2, 8, 100, 64), ("N", "h", "n", "c")])
def test_shape_inference_keeps_symbolic_dimensions(dims: tuple[Any, ...]) -> None:
    import onnx

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    model = aft_model("float16", body=True, dims=dims)
    onnx.checker.check_model(model, full_check=True)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    tensor = inferred.graph.output[0].type.tensor_type
    assert tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim) == dims
    assert tensor.elem_type == onnx.TensorProto.FLOAT16


@pytest.mark.requires("onnx")
def test_the_schema_says_what_the_operator_takes() -> None:
    import onnx

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    schema = onnx.defs.get_schema("AFTSimpleAttention", OPSET_VERSION, DOMAIN)
    assert [p.name for p in schema.inputs] == ["q", "k", "v", "keep"]
    assert [p.type_str for p in schema.inputs] == ["T", "T", "T", "tensor(bool)"]
    assert [p.name for p in schema.outputs] == ["out"]
    assert not schema.attributes[PLUGIN_NAMESPACE].required
