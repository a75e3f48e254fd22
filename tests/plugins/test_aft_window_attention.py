"""`effexport::AFTWindowAttention`, beyond its contract (test_contract.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from implementations import exact, implementation
from slow_cases import named
from torch import Tensor

from effexport.models.layers import AttentionLayer, fused_operators
from effexport.models.variants.aft_conv import AFTConvSpec
from effexport.models.variants.aft_conv.layer import AFTConvAttention
from effexport.models.variants.aft_local import AFTLocalSpec
from effexport.models.variants.aft_local.layer import AFTLocalAttention
from effexport.plugins.aft_window_attention.contract import CONTRACT
from effexport.plugins.contract import Case

OP = "AFTWindowAttention"
BODY_FP32 = 1e-5

native = pytest.mark.requires("native", "onnx", "ort")
both_forms = pytest.mark.parametrize("causal", [0, 1], ids=["all", "causal"])
with_body = pytest.mark.parametrize("how", ["kernel", "body", "cuda"])


def made(*sizes: int, causal: int = 0, shared: bool = False, kind: str = "random") -> tuple[Case, dict[str, Tensor]]:
    """A case [batch, heads, seq, channels, positions, taps], and its inputs; the first token is visible.

    shared: a single channel of keys, and biases of each head.
    """
    batch, heads, seq, channels, positions, taps = sizes
    own = (1, heads) if shared else (channels, 1)
    case = Case((batch, heads, seq, channels, *own, positions, taps, causal), kind=kind)
    inputs = CONTRACT.inputs(case, "cpu")
    set_token(inputs, 0, 1.0)
    return case, inputs


def set_token(inputs: dict[str, Tensor], token: int, key: float, value: float = 1.0) -> None:
    """Make a token visible in all samples."""
    inputs["k"][:, :, token], inputs["v"][:, :, token], inputs["keep"][:, token] = key, value, True


def run(how: str, case: Case, inputs: dict[str, Tensor]) -> np.ndarray:
    out: np.ndarray = implementation(OP, how).run(case, inputs)
    return out


def error(how: str, case: Case, inputs: dict[str, Tensor]) -> float:
    """The largest difference from float64, as a share of the largest visible |v|, which no average exceeds."""
    difference = np.abs(run(how, case, inputs) - exact(CONTRACT, case, inputs))
    assert np.isfinite(difference).all()
    return float(difference.max() / inputs["v"].masked_fill(~inputs["keep"][:, None, :, None], 0).abs().max())


@native
@with_body
@both_forms
def test_keys_far_apart_neither_overflow_nor_vanish(causal: int, how: str) -> None:
    for gap in (20, 60, 110):
        case, inputs = made(2, 1, 250, 5, 1, 9, causal=causal)
        # the largest key early in one sample, late in the other
        for sample, token in ((0, 3), (1, 240)):
            inputs["k"][sample, :, token], inputs["v"][sample, :, token] = gap, 2
            inputs["keep"][sample, token] = True
        with named(gap):
            assert error(how, case, inputs) <= 3e-5  # keys of 110 have a spacing of 8e-6
            if how != "body":
                # all keys low, but none absent; and a bias of −30 on the dominant key
                inputs["k"] -= 5 * gap
                inputs["bias"] -= 30
                assert error(how, case, inputs) <= 3e-4  # keys of 550: 6e-5


@native
@pytest.mark.parametrize("how", ["kernel", "cuda"])
@both_forms
def test_a_strongly_negative_bias_keeps_every_weight(causal: int, how: str) -> None:
    # of all queries, or of one: what others allow must not decide for it
    for queries in (slice(None), 33):
        case, inputs = made(1, 1, 100, 3, 100, 9, causal=causal)
        set_token(inputs, 30, 60, 2)
        inputs["bias"][:, queries] -= 30
        with named(queries):
            # logits of 60 have a spacing of 4e-6
            assert error(how, case, inputs) <= 3e-5


# The first and the last of a block of 32 or of 64, one between, and those of the row.
@native
@with_body
@both_forms
def test_a_key_far_above_all_others_counts_wherever_it_stands(causal: int, how: str) -> None:
    """By 120: its e^x is infinite unless its own maximum is taken off, of which every block of tokens has one."""
    for token in (0, 31, 32, 63, 64, 159, 190, 199):
        case, inputs = made(1, 1, 200, 3, 1, 9, causal=causal)
        set_token(inputs, token, 128, 2)
        # in base 2, logits of 185 have a spacing of 1.5e-5, and their weights that of ln 2 times as much
        assert error(how, case, inputs) <= 2e-5, token


@native
@both_forms
def test_a_key_far_above_all_others_counts_in_long_rows(causal: int) -> None:
    for token in (190, 250, 500, 599):
        case, inputs = made(1, 1, 600, 5, 1, 9, causal=causal)
        set_token(inputs, token, 128, 2)
        for how in ("kernel", "body"):
            # logits of 128 have a spacing of 1.5e-5
            assert error(how, case, inputs) <= 3e-5, (token, how)


@native
@pytest.mark.parametrize(("how", "seq"), [("kernel", 300), ("cuda", 130)])
@both_forms
def test_a_bias_far_above_all_others_counts(causal: int, how: str, seq: int) -> None:
    """That of the query itself: where the largest bias belongs to no key, the contract leaves results open."""
    for taps in (1, 101):
        case, inputs = made(1, 1, seq, 3, 1, taps, causal=causal, kind="own bias")
        assert error(how, case, inputs) <= 2e-5, taps


@native
@with_body
@both_forms
def test_a_query_that_sees_no_token_is_zero(causal: int, how: str) -> None:
    case, inputs = made(2, 1, 100, 20, 1, 7, causal=causal)
    inputs["keep"][1] = False
    inputs["keep"][0, :50] = False
    out = run(how, case, inputs)
    assert (out[1] == 0).all()
    assert (out[0, 0, :50] == 0).all() == bool(causal)
    assert error(how, case, inputs) <= BODY_FP32


@native
@pytest.mark.parametrize(("how", "seq", "first"), [("kernel", 300, 211), ("cuda", 150, 77)])
def test_later_tokens_change_no_bit_of_earlier_results(how: str, seq: int, first: int) -> None:
    case, inputs = made(1, 2, seq, 7, 1, 40, causal=1, shared=True, kind="visible")
    before = run(how, case, inputs)
    for token, key in ((first, 50), (first + 1, 1e30), (first + 2, torch.inf), (first + 3, torch.nan)):
        inputs["k"][:, :, token] = key
    after = run(how, case, inputs)
    np.testing.assert_array_equal(after[:, :, :first], before[:, :, :first])
    assert np.isnan(after[:, :, first + 3 :]).all()


@native
@pytest.mark.parametrize("how", ["torch", "kernel", "cuda"])
def test_nan_spreads_over_its_channel_and_no_further(how: str) -> None:
    for name in "qkv":
        case, inputs = made(2, 1, 80 if how == "cuda" else 300, 20, 1, 5)
        set_token(inputs, -1, 1)
        inputs[name][1, 0, -1, 7] = torch.nan
        expected = np.zeros(case.sizes[:4], bool)
        expected[1, 0, -1 if name == "q" else slice(None), 7] = True
        np.testing.assert_array_equal(np.isnan(run(how, case, inputs)), expected, name)


@native
@pytest.mark.parametrize("how", ["torch", "kernel", "cuda"])
def test_an_infinite_value_is_one_in_its_channel_and_no_further(how: str) -> None:
    case, inputs = made(1, 1, 80, 20, 1, 5)
    set_token(inputs, 40, 1, 0)
    without = run(how, case, inputs)
    inputs["v"][0, 0, 40, 7] = torch.inf
    expected = np.zeros(case.sizes[:4], bool)
    expected[0, 0, :, 7] = True
    out = run(how, case, inputs)
    np.testing.assert_array_equal(np.isposinf(out), expected)
    np.testing.assert_allclose(out[~expected], without[~expected], rtol=0, atol=1e-5)


@native
@both_forms
@pytest.mark.parametrize("how", ["kernel", "cuda"])
def test_values_near_the_smallest_of_float32_keep_their_bits(causal: int, how: str) -> None:
    """Some channels or all: halves of them, or their scale, would be subnormal."""
    for channels in (slice(None), slice(3, 4)):
        case, inputs = made(1, 1, 100, 8, 1, 7, causal=causal, kind="visible")
        inputs["v"][..., channels] *= 1e-33
        difference = np.abs(run(how, case, inputs) - exact(CONTRACT, case, inputs))[..., channels]
        # the contract's own limit, of these channels
        assert difference.max() <= 5e-6 * float(inputs["v"][..., channels].abs().max())


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
