"""`effexport::AFTWindowAttention`, beyond its contract (test_contract.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from aft_window_inputs import Sizes, error, made_inputs, slow_attention
from implementations import implementation
from slow_cases import named

from effexport.models.layers import AttentionLayer, fused_operators
from effexport.models.variants.aft_conv import AFTConvSpec
from effexport.models.variants.aft_conv.layer import AFTConvAttention
from effexport.models.variants.aft_local import AFTLocalSpec
from effexport.models.variants.aft_local.layer import AFTLocalAttention
from effexport.plugins.contract import Case

OP = "AFTWindowAttention"
BODY_FP32 = 1e-5

native = pytest.mark.requires("native", "onnx", "ort")
both_forms = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
with_body = pytest.mark.parametrize("how", ["kernel", "body", "cuda"])


def run(how: str, feeds: dict[str, np.ndarray], causal: bool) -> np.ndarray:
    q, k, _, _, bias = feeds.values()
    case = Case((*q.shape, k.shape[3], *bias.shape, int(causal)))
    out: np.ndarray = implementation(OP, how).run(case, {name: torch.from_numpy(x) for name, x in feeds.items()})
    return out


@native
@with_body
@both_forms
def test_keys_far_apart_neither_overflow_nor_vanish(causal: bool, how: str) -> None:
    for gap in (20, 60, 110):
        feeds = made_inputs(Sizes(2, 1, 250, 5, taps=9), bias_scale=0.5)
        # the largest key early in one sample, late in the other
        feeds["k"][0, :, 3] = feeds["k"][1, :, 240] = gap
        feeds["keep"][0, 3] = feeds["keep"][1, 240] = True
        feeds["v"][0, :, 3] = feeds["v"][1, :, 240] = 2
        with named(gap):
            assert error(run(how, feeds, causal), feeds, causal) <= 3e-5  # keys of 110 have a spacing of 8e-6
            if how != "body":
                # all keys low, but none absent; and a bias of −30 on the dominant key
                feeds["k"] -= np.float32(5 * gap)
                feeds["bias"] -= np.float32(30)
                assert error(run(how, feeds, causal), feeds, causal) <= 3e-4  # keys of 550: 6e-5


@native
@pytest.mark.parametrize("how", ["kernel", "cuda"])
@both_forms
def test_a_strongly_negative_bias_keeps_every_weight(causal: bool, how: str) -> None:
    # of all queries, or of one: what others allow must not decide for it
    for queries in (slice(None), 33):
        feeds = made_inputs(Sizes(1, 1, 100, 3, taps=9, positions=100), key_scale=1, bias_scale=0.5)
        feeds["k"][:, :, 30], feeds["v"][:, :, 30], feeds["keep"][:, 30] = 60, 2, True
        feeds["bias"][:, queries] -= 30
        with named(queries):
            # logits of 60 have a spacing of 4e-6
            assert error(run(how, feeds, causal), feeds, causal) <= 3e-5


# The first and the last of a block of 32 or of 64, one between, and those of the row.
@native
@with_body
@both_forms
def test_a_key_far_above_all_others_counts_wherever_it_stands(causal: bool, how: str) -> None:
    """By 120: its e^x is infinite unless its own maximum is taken off, of which every block of tokens has one."""
    for token in (0, 31, 32, 63, 64, 159, 190, 199):
        feeds = made_inputs(Sizes(1, 1, 200, 3, taps=9), key_scale=1, bias_scale=1)
        feeds["k"][:, :, token], feeds["v"][:, :, token], feeds["keep"][:, token] = 128, 2, True
        # in base 2, logits of 185 have a spacing of 1.5e-5, and their weights that of ln 2 times as much
        assert error(run(how, feeds, causal), feeds, causal) <= 2e-5, token


@native
@both_forms
def test_a_key_far_above_all_others_counts_in_long_rows(causal: bool) -> None:
    for token in (190, 250, 500, 599):
        feeds = made_inputs(Sizes(1, 1, 600, 5, taps=9), key_scale=1, bias_scale=1)
        feeds["k"][:, :, token], feeds["v"][:, :, token], feeds["keep"][:, token] = 128, 2, True
        for how in ("kernel", "body"):
            # logits of 128 have a spacing of 1.5e-5
            assert error(run(how, feeds, causal), feeds, causal) <= 3e-5, (token, how)


@native
@pytest.mark.parametrize(("how", "seq"), [("kernel", 300), ("cuda", 130)])
@both_forms
@pytest.mark.parametrize("taps", [1, 101])
def test_a_bias_far_above_all_others_counts(taps: int, causal: bool, how: str, seq: int) -> None:
    feeds = made_inputs(Sizes(1, 1, seq, 3, taps=taps), key_scale=1, bias_scale=1)
    # that of the query itself: where the largest bias belongs to no key, the contract leaves results open
    feeds["bias"][..., taps - 1 if causal else taps // 2] = 128
    feeds["keep"][...] = True
    feeds["k"], feeds["v"] = (np.nan_to_num(feeds[x], nan=1, posinf=1, neginf=1) for x in "kv")
    assert error(run(how, feeds, causal), feeds, causal) <= 2e-5


@native
@with_body
@both_forms
def test_a_query_that_sees_no_token_is_zero(causal: bool, how: str) -> None:
    feeds = made_inputs(Sizes(2, 1, 100, 20, taps=7))
    feeds["keep"][1] = False
    feeds["keep"][0, :50] = False
    out = run(how, feeds, causal)
    assert (out[1] == 0).all()
    assert (out[0, 0, :50] == 0).all() == causal
    assert error(out, feeds, causal) <= BODY_FP32


@native
@pytest.mark.parametrize(("how", "seq", "first"), [("kernel", 300, 211), ("cuda", 150, 77)])
def test_later_tokens_change_no_bit_of_earlier_results(how: str, seq: int, first: int) -> None:
    feeds = made_inputs(Sizes(1, 2, seq, 7, taps=40, shared=True))
    feeds["keep"][...] = True
    feeds["k"], feeds["v"] = (np.nan_to_num(feeds[name], nan=1, posinf=1, neginf=1) for name in "kv")
    before = run(how, feeds, True)
    for token, key in ((first, 50), (first + 1, 1e30), (first + 2, np.inf), (first + 3, np.nan)):
        feeds["k"][:, :, token] = key
    after = run(how, feeds, True)
    np.testing.assert_array_equal(after[:, :, :first], before[:, :, :first])
    assert np.isnan(after[:, :, first + 3 :]).all()


@native
@pytest.mark.parametrize("how", ["torch", "kernel", "cuda"])
def test_nan_spreads_over_its_channel_and_no_further(how: str) -> None:
    for name in "qkv":
        feeds = made_inputs(Sizes(2, 1, 80 if how == "cuda" else 300, 20, taps=5))
        feeds["keep"][1, -1] = True
        feeds["k"][1, 0, -1] = feeds["v"][1, 0, -1] = 1
        feeds[name][1, 0, -1, 7] = np.nan
        expected = np.zeros(feeds["q"].shape, bool)
        expected[1, 0, -1 if name == "q" else slice(None), 7] = True
        np.testing.assert_array_equal(np.isnan(run(how, feeds, False)), expected, name)


@native
@pytest.mark.parametrize("how", ["torch", "kernel", "cuda"])
def test_an_infinite_value_is_one_in_its_channel_and_no_further(how: str) -> None:
    feeds = made_inputs(Sizes(1, 1, 80, 20, taps=5), key_scale=1, bias_scale=0.5)
    feeds["v"][0, 0, 40, 7], feeds["keep"][0, 40], feeds["k"][0, 0, 40] = np.inf, True, 1
    expected = np.zeros(feeds["q"].shape, bool)
    expected[0, 0, :, 7] = True
    out = run(how, feeds, False)
    np.testing.assert_array_equal(np.isposinf(out), expected)
    feeds["v"][0, 0, 40, 7] = 0
    np.testing.assert_allclose(out[~expected], run(how, feeds, False)[~expected], rtol=0, atol=1e-5)


@native
@both_forms
@pytest.mark.parametrize("how", ["kernel", "cuda"])
def test_values_near_the_smallest_of_float32_keep_their_bits(causal: bool, how: str) -> None:
    """Some channels or all: halves of them, or their scale, would be subnormal."""
    for channels in (slice(None), slice(3, 4)):
        feeds = made_inputs(Sizes(1, 1, 100, 8, taps=7), key_scale=1, bias_scale=1)
        feeds["v"] = np.nan_to_num(feeds["v"], nan=1, posinf=1, neginf=1)
        feeds["v"][..., channels] *= np.float32(1e-33)
        difference = np.abs(run(how, feeds, causal) - slow_attention(**feeds, causal=causal))[..., channels]
        # the contract's own limit, of these channels
        assert difference.max() <= 5e-6 * np.abs(feeds["v"][..., channels]).max()


def layers() -> list[AttentionLayer]:
    made: list[AttentionLayer] = []
    for causal in (False, True):
        local = {"dim": 16, "seq_len": 150, "position_dim": 4, "causal": causal}
        made += [AFTLocalAttention(AFTLocalSpec(**local, window=window)) for window in (0, 1, 9, 40, 400)]
        made += [AFTLocalAttention(AFTLocalSpec(**local, window=size, position_bias="full")) for size in (0, 1, 9, 400)]
        conv = {"dim": 16, "heads": 2, "causal": causal}
        made += [AFTConvAttention(AFTConvSpec(**conv, kernel_size=size)) for size in (1, 11, 65)]
    return made


@torch.no_grad()
def test_layers_give_the_same_with_the_operator_as_without() -> None:
    torch.manual_seed(0)
    for layer in layers():
        for name, parameter in layer.eval().named_parameters():
            if name.startswith(("position", "gamma", "beta")):
                parameter.normal_(std=0.7)
        hidden, mask = torch.randn(2, 101, 16), (torch.rand(2, 101) < 0.7).long()
        plain = layer(hidden, mask)
        with fused_operators(layer, True):
            fused = layer(hidden, mask)
        with named(layer.spec):
            # sums of 100 terms of about one, in two orders
            torch.testing.assert_close(fused, plain, rtol=0, atol=1e-5)
