"""`effexport::AFTWindowAttention`: torch operator, schema, body of standard nodes and kernel, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from aft_window_inputs import Sizes, error, made_inputs
from kernel_sessions import ort_value, run_poisoned, session
from slow_cases import slow_after
from torch import Tensor

from effexport.models.layers import AttentionLayer, fused_operators
from effexport.models.variants.aft_conv.layer import AFTConvAttention
from effexport.models.variants.aft_conv.spec import AFTConvSpec
from effexport.models.variants.aft_local.layer import AFTLocalAttention
from effexport.models.variants.aft_local.spec import AFTLocalSpec
from effexport.plugins.aft_window_attention.op import aft_window_attention, onnx_function_body, reference
from effexport.plugins.ops import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE

# As a share of the largest |v|, which no average exceeds. The kernel adds 32 keys of a block, then blocks, and the taps
# of a query: about 100 roundings of 6e-8, most of which cancel.
KERNEL_FP32 = 5e-6
BODY_FP32 = 1e-5
# The result is rounded to 11 or 8 bits; everything before it is float32.
ROUNDING = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}
FORBIDDEN = {"TopK", "Loop", "CumSum", "Scan", "Sort", "If"}

native = pytest.mark.requires("native", "onnx", "ort")
in_ort = pytest.mark.requires("onnx", "ort")
both_forms = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])

# The kernel's sizes are 32 and 192 tokens, 6 queries, 16 and 64 channels; the body's 32, or 8 and 64 tokens.
CASES = [
    Sizes(1, 2, 400, 20, taps=11, shared=True),
    Sizes(1, 1, 300, 100, taps=63, positions=320),
    Sizes(2, 1, 1, 1, taps=1),
    Sizes(2, 1, 63, 17, taps=5, positions=63),
    Sizes(1, 2, 100, 9, taps=301, positions=100),
    Sizes(1, 2, 193, 65, taps=3, shared=True),
    Sizes(1, 1, 1000, 8, taps=131),
]


def window_model(
    causal: bool, dtype: str = "float32", *, body: bool, opset: int = 20, dims: Any = ("batch", "heads", "seq", None)
) -> Any:
    """A model of one custom node, with its body or without it. dims None: inputs of unknown shape."""
    from onnx import TensorProto, helper

    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = helper.make_node(
        "AFTWindowAttention",
        ["q", "k", "v", "keep", "bias"],
        ["out"],
        domain=DOMAIN,
        causal=int(causal),
        **{PLUGIN_NAMESPACE: DOMAIN},
    )
    keep_dims = None if dims is None else (dims[0], dims[2])
    graph = helper.make_graph(
        [node],
        "one",
        [
            *(helper.make_tensor_value_info(name, element, dims) for name in "qkv"),
            helper.make_tensor_value_info("keep", TensorProto.BOOL, keep_dims),
            helper.make_tensor_value_info("bias", TensorProto.FLOAT, None if dims is None else (None, None, None)),
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


def kernel_session(causal: bool, dtype: str = "float32", threads: int = 2) -> Any:
    return session(window_model(causal, dtype, body=False, dims=None).SerializeToString(), threads=threads)


def body_session(causal: bool, dtype: str = "float32", opset: int = 20) -> Any:
    return session(window_model(causal, dtype, body=True, opset=opset).SerializeToString(), library=False)


def tensors(feeds: dict[str, np.ndarray]) -> list[Tensor]:
    return [torch.from_numpy(x) for x in feeds.values()]


@both_forms
@pytest.mark.parametrize("sizes", slow_after(4, CASES))
def test_the_torch_operator_computes_the_formula(sizes: Sizes, causal: bool) -> None:
    feeds = made_inputs(sizes)
    assert error(aft_window_attention(*tensors(feeds), causal).numpy(), feeds, causal) <= KERNEL_FP32
    in_double = {name: x if x.dtype == bool else x.astype(np.float64) for name, x in feeds.items()}
    # 1e-16 for each of 1000 roundings
    assert error(reference(*tensors(in_double), causal).numpy(), in_double, causal) <= 1e-13


@in_ort
@both_forms
@pytest.mark.parametrize("sizes", slow_after(4, CASES))
def test_the_body_computes_the_formula(sizes: Sizes, causal: bool) -> None:
    import onnx

    feeds = made_inputs(sizes)
    for opset in (18, 24):
        onnx.checker.check_model(window_model(causal, body=True, opset=opset))
        assert error(body_session(causal, opset=opset).run(None, feeds)[0], feeds, causal) <= BODY_FP32


@in_ort
@both_forms
def test_the_body_is_made_of_operators_that_runtimes_have(causal: bool) -> None:
    (body,) = window_model(causal, body=True).functions
    assert not FORBIDDEN & {node.op_type for node in body.node}


@native
@both_forms
@pytest.mark.parametrize("sizes", CASES)
def test_the_kernel_computes_the_formula(sizes: Sizes, causal: bool) -> None:
    feeds = made_inputs(sizes)
    (out,) = run_poisoned(kernel_session(causal), feeds, "float32", feeds["v"].shape)
    assert error(out, feeds, causal) <= KERNEL_FP32


@native
@both_forms
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_rounded_only_at_the_end(dtype: str, causal: bool) -> None:
    feeds = made_inputs(Sizes(2, 2, 250, 21, taps=9, shared=True), np.dtype(dtype))
    # bfloat16 has no arithmetic in ONNX Runtime's CPU provider, which the body would need
    opened = [kernel_session(causal, dtype)] + ([body_session(causal, dtype)] if dtype == "float16" else [])
    for one in opened:
        (out,) = run_poisoned(one, feeds, dtype, feeds["v"].shape)
        assert error(out, feeds, causal) <= ROUNDING[dtype] + BODY_FP32


def layers() -> list[AttentionLayer]:
    made: list[AttentionLayer] = []
    for causal in (False, True):
        local = {"dim": 16, "seq_len": 150, "position_dim": 4, "causal": causal}
        made += [AFTLocalAttention(AFTLocalSpec(**local, window=window)) for window in (0, 1, 9, 40, 400)]
        made += [AFTLocalAttention(AFTLocalSpec(**local, window=size, position_bias="full")) for size in (0, 1, 9, 400)]
        conv = {"dim": 16, "heads": 2, "causal": causal}
        made += [AFTConvAttention(AFTConvSpec(**conv, kernel_size=size)) for size in (1, 11, 65)]
    return made


@pytest.mark.parametrize("number", range(len(layers())))
def test_layers_give_the_same_with_the_operator_as_without(number: int) -> None:
    torch.manual_seed(number)
    layer = layers()[number].eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith(("position", "gamma", "beta")):
                parameter.normal_(std=0.7)
    hidden, mask = torch.randn(2, 101, 16), (torch.rand(2, 101) < 0.7).long()
    with torch.inference_mode():
        plain = layer(hidden, mask)
        with fused_operators(layer, True):
            fused = layer(hidden, mask)
    # sums of 100 terms of about one, in two orders
    torch.testing.assert_close(fused, plain, rtol=0, atol=1e-5)


@native
@both_forms
@pytest.mark.parametrize("gap", [20, 60, 110])
def test_keys_far_apart_neither_overflow_nor_vanish(gap: float, causal: bool) -> None:
    feeds = made_inputs(Sizes(2, 1, 250, 5, taps=9), bias_scale=0.5)
    # the largest key early in one sample, late in the other
    feeds["k"][0, :, 3] = gap
    feeds["k"][1, :, 240] = gap
    feeds["keep"][0, 3] = feeds["keep"][1, 240] = True
    feeds["v"][0, :, 3] = feeds["v"][1, :, 240] = 2
    for opened in (kernel_session(causal), body_session(causal)):
        assert error(opened.run(None, feeds)[0], feeds, causal) <= 3e-5  # keys of 110 have a spacing of 8e-6
    # all keys low, but none absent; and a bias of −30 on the dominant key
    feeds["k"] -= np.float32(5 * gap)
    feeds["bias"] -= np.float32(30)
    assert error(kernel_session(causal).run(None, feeds)[0], feeds, causal) <= 3e-4  # keys of 550: 6e-5


@native
@both_forms
@pytest.mark.parametrize("token", [0, 63, 64, 190, 250, 500, 599])
def test_a_key_far_above_all_others_counts_wherever_it_stands(token: int, causal: bool) -> None:
    """By 120: its e^x is infinite unless its own maximum is taken off, of which every block of tokens has one."""
    feeds = made_inputs(Sizes(1, 1, 600, 5, taps=9), key_scale=1, bias_scale=1)
    feeds["k"][:, :, token], feeds["v"][:, :, token], feeds["keep"][:, token] = 128, 2, True
    for opened in (kernel_session(causal), body_session(causal)):
        assert error(opened.run(None, feeds)[0], feeds, causal) <= 3e-5  # logits of 128 have a spacing of 1.5e-5


@native
@both_forms
@pytest.mark.parametrize("taps", [1, 101])
def test_a_bias_far_above_all_others_counts(taps: int, causal: bool) -> None:
    feeds = made_inputs(Sizes(1, 1, 300, 5, taps=taps), key_scale=1, bias_scale=1)
    # that of the query itself: where the largest bias belongs to no key, the contract leaves results open
    feeds["bias"][..., taps - 1 if causal else taps // 2] = 128
    feeds["keep"][...] = True
    feeds["k"], feeds["v"] = (np.nan_to_num(feeds[x], nan=1, posinf=1, neginf=1) for x in "kv")
    assert error(kernel_session(causal).run(None, feeds)[0], feeds, causal) <= 3e-5


@native
@both_forms
def test_a_query_that_sees_no_token_is_zero(causal: bool) -> None:
    feeds = made_inputs(Sizes(2, 1, 100, 20, taps=7))
    feeds["keep"][1] = False
    feeds["keep"][0, :50] = False
    for opened in (kernel_session(causal), body_session(causal)):
        out = opened.run(None, feeds)[0]
        assert (out[1] == 0).all()
        assert (out[0, 0, :50] == 0).all() == causal
        assert error(out, feeds, causal) <= BODY_FP32


@native
def test_later_tokens_change_no_bit_of_earlier_results() -> None:
    feeds = made_inputs(Sizes(1, 2, 300, 7, taps=40, shared=True))
    feeds["keep"][...] = True
    feeds["k"], feeds["v"] = (np.nan_to_num(feeds[name], nan=1, posinf=1, neginf=1) for name in "kv")
    opened = kernel_session(True)
    before = opened.run(None, feeds)[0]
    for token, key in ((211, 50), (213, 1e30), (214, np.inf), (217, np.nan)):
        feeds["k"][:, :, token] = key
    after = opened.run(None, feeds)[0]
    np.testing.assert_array_equal(after[:, :, :211], before[:, :, :211])
    assert np.isnan(after[:, :, 217:]).all()


@native
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_spreads_over_its_channel_and_no_further(name: str) -> None:
    feeds = made_inputs(Sizes(2, 1, 300, 20, taps=5))
    feeds["keep"][1, 299] = True
    feeds["k"][1, 0, 299] = feeds["v"][1, 0, 299] = 1
    feeds[name][1, 0, 299, 7] = np.nan
    expected = np.zeros(feeds["q"].shape, bool)
    expected[1, 0, 299 if name == "q" else slice(None), 7] = True
    np.testing.assert_array_equal(np.isnan(kernel_session(False).run(None, feeds)[0]), expected)
    np.testing.assert_array_equal(np.isnan(aft_window_attention(*tensors(feeds)).numpy()), expected)


@native
@both_forms
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_results_do_not_depend_on_threads_or_batch_mates(dtype: str, causal: bool) -> None:
    feeds = made_inputs(Sizes(3, 2, 500, 70, taps=21, shared=True), np.dtype(dtype))
    (expected,) = run_poisoned(kernel_session(causal, dtype, threads=1), feeds, dtype, feeds["v"].shape)
    for threads in (2, 5):
        (again,) = run_poisoned(kernel_session(causal, dtype, threads), feeds, dtype, feeds["v"].shape)
        assert np.array_equal(expected, again)
    for i in range(3):
        alone = {name: x if name == "bias" else x[i : i + 1] for name, x in feeds.items()}
        (out,) = run_poisoned(kernel_session(causal, dtype), alone, dtype, alone["v"].shape)
        assert np.array_equal(out[0], expected[i])


@native
@both_forms
@pytest.mark.parametrize("shape", [(0, 1, 4, 8), (2, 1, 0, 8), (2, 1, 4, 0), (2, 0, 4, 8)])
def test_empty_inputs_give_empty_outputs(shape: tuple[int, int, int, int], causal: bool) -> None:
    feeds = {name: ort_value(np.zeros(shape, np.float32)) for name in "qkv"}
    feeds["keep"] = ort_value(np.ones((shape[0], shape[2]), bool))
    feeds["bias"] = ort_value(np.zeros((1, 4, 3), np.float32))
    for one in (kernel_session(causal), body_session(causal)):
        (out,) = one.run_with_ort_values(None, feeds)
        assert tuple(out.shape()) == shape


ONES = torch.ones(2, 2, 4, 3)
KEEP = torch.ones(2, 4, dtype=torch.bool)
BIAS = torch.ones(2, 4, 5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((ONES[0], ONES, ONES, KEEP, BIAS), r"q has shape \(2, 4, 3\); expected \[batch, heads, seq, channels\]"),
        ((ONES, ONES[..., :2], ONES, KEEP, BIAS), "k has 2 channels; expected 1 or 3"),
        ((ONES, ONES, ONES[..., :1], KEEP, BIAS), r"v has shape \(2, 2, 4, 1\); expected \[2, 2, 4, 3\]"),
        ((ONES, ONES, ONES.half(), KEEP, BIAS), "v is torch.float16 but q is torch.float32; expected one dtype"),
        ((ONES, ONES, ONES, KEEP.T, BIAS), r"keep has shape \(4, 2\); expected \[2, 4\]"),
        ((ONES, ONES, ONES, KEEP, BIAS.half()), "bias is torch.float16; expected torch.float32"),
        ((ONES, ONES, ONES, KEEP, BIAS[[0, 1, 0]]), "bias has 3 heads; expected 1 or 2"),
        ((ONES, ONES, ONES, KEEP, BIAS[:, :3]), "bias has 3 positions; expected 1, or at least 4"),
        ((ONES, ONES, ONES, KEEP, BIAS[..., :4]), "bias has 4 taps; expected an odd number"),
        ((ONES, ONES, ONES, KEEP, BIAS[..., :0], True), "bias has 0 taps; expected at least one"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match="aft_window_attention: " + text):
        aft_window_attention(*arguments)


@native
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", (4, 3), r"q has shape \[4, 3\]; expected \[batch, heads, seq, channels\]"),
        ("k", (2, 2, 4, 2), r"k has shape \[2, 2, 4, 2\]; expected that of q, \[2, 2, 4, 3\], or one channel"),
        ("v", (2, 4, 3), r"v has shape \[2, 4, 3\]; expected that of q, \[2, 2, 4, 3\]"),
        ("keep", (4, 2), r"keep has shape \[4, 2\]; expected \[2, 4\]"),
        (
            "bias",
            (2, 3, 5),
            r"bias has shape \[2, 3, 5\]; expected \[1 or 2, 1 or at least 4, taps\] with an odd number",
        ),
        (
            "bias",
            (2, 4, 4),
            r"bias has shape \[2, 4, 4\]; expected \[1 or 2, 1 or at least 4, taps\] with an odd number",
        ),
    ],
)
def test_the_kernel_says_what_is_wrong_with_its_input(name: str, shape: tuple[int, ...], message: str) -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    opened = kernel_session(False)
    good = {
        name: x.numpy() for name, x in zip(("q", "k", "v", "keep", "bias"), (ONES, ONES, ONES, KEEP, BIAS), strict=True)
    }
    with pytest.raises(InvalidArgument, match="AFTWindowAttention: " + message):
        opened.run(None, {**good, name: np.ones(shape, good[name].dtype)})
    assert np.isfinite(opened.run(None, good)[0]).all(), "a refused input does not spoil the session"


@both_forms
def test_the_operator_keeps_the_rules_of_torch_library(causal: bool) -> None:
    feeds = made_inputs(Sizes(2, 2, 5, 3, taps=3, shared=True))
    torch.library.opcheck(torch.ops.effexport.aft_window_attention.default, (*tensors(feeds), causal))
