"""Linear attention: one function in its explicit, quadratic, chunked and recurrent forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import all_kept, relative_error, tokens
from slow_cases import named
from torch import Tensor

from effexport.models.contract import HostileInputs
from effexport.models.encoder.module import module_from_spec
from effexport.models.layers import State
from effexport.models.validation import SpecError
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.linear.layer import CONTRACT, LinearAttention, exact, feature_map, features

# Sums of positive terms lose nothing by cancellation: every form is some roundings of 6e-8 away from float64.
# The largest of several thousand elements was 9e-7 of the RMS.
FLOAT32 = 3e-6
# A sum of up to 1100 products in another order.
BLOCKING = 1e-5


def linear(seed: int = 0, **fields: object) -> LinearAttention:
    module = module_from_spec(LinearSpec(**({"dim": 32, "heads": 4} | fields)), seed)
    assert isinstance(module, LinearAttention)
    return module


def recurrent(layer: LinearAttention, x: Tensor) -> Tensor:
    state = layer.initial_state(x.shape[0])
    outputs = []
    for t in range(x.shape[1]):
        output, state = layer.step(x[:, t : t + 1], state)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def test_a_step_leaves_the_state_it_was_given_unchanged() -> None:
    layer, x = linear(causal=True), tokens(2, 1, 32)
    state = layer.initial_state(2)
    _, following = layer.step(x, state)
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in state.values())
    assert following["s"].shape == (2, 4, 8, 8)
    assert following["z"].shape == (2, 4, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_the_state_stays_float32_in_half_precision(dtype: torch.dtype) -> None:
    layer = linear(causal=True).to(dtype)
    output, state = layer.step(tokens(2, 1, 32).to(dtype), layer.initial_state(2))
    assert output.dtype == dtype
    assert all(tensor.dtype == torch.float32 for tensor in state.values())


# RMS of the error over RMS of the output: the input and the weights alone are rounded by 2^-11 or 2^-8.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-2), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_1024_tokens_in_half_precision_do_not_overflow_to_zero(
    dtype: torch.dtype, tolerance: float, causal: bool
) -> None:
    # in fp16 the denominator exceeds 65504 for every token here, and 1 / inf is a silent zero
    layer, x = linear(dim=128, heads=2, causal=causal), tokens(2, 1024, 128)
    context = exact(layer, x, all_kept(x))
    expected = context @ layer.out.weight.double().T + layer.out.bias.double()
    q, k = (feature_map(p(x)).unflatten(-1, (2, 64)).transpose(1, 2) for p in (layer.query, layer.key))
    assert float((q @ k.sum(dim=2).unsqueeze(-1)).median()) > torch.finfo(torch.float16).max
    layer.to(dtype)
    attended = layer.attend(x.to(dtype), all_kept(x)).double()
    assert float(attended.square().mean().sqrt() / context.square().mean().sqrt()) > 0.5
    actual = layer(x.to(dtype))
    assert actual.dtype == dtype
    assert torch.isfinite(actual).all()
    error = (actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) <= tolerance


def test_the_feature_map_keeps_its_precision_far_below_zero() -> None:
    x = torch.linspace(-80, 80, 16001)
    actual = feature_map(x)
    assert torch.all(actual > 0)
    # one rounding of exp and one of the sum
    torch.testing.assert_close(actual.double(), features(x.double()), rtol=3e-7, atol=0)


@pytest.mark.parametrize(("dtype", "lowest"), [(torch.float16, -9.5), (torch.bfloat16, -80)])
def test_the_feature_map_does_not_round_to_zero_in_half_precision(dtype: torch.dtype, lowest: float) -> None:
    # elu(x) + 1 is exactly zero from -9 on in fp16 and from -7 on in bf16
    x = torch.linspace(lowest, 5, 300).to(dtype)
    # two roundings; fp16 holds 2.4e-5 of exp(-9.5) 7.5e-5 only to 2^-11 of 6e-5
    rounding = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(feature_map(x).double(), features(x.double()), rtol=rounding, atol=0)


def test_the_feature_map_has_a_finite_gradient_for_large_inputs() -> None:
    x = torch.tensor([-100.0, -1.0, 0.0, 1.0, 100.0, 1000.0], requires_grad=True)
    feature_map(x).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


# The forms of other people's packages, and each option by itself.
FORMS: dict[str, dict[str, Any]] = {"": {}, **CONTRACT.forms, "blindspot 64": {"blindspot": 64, "causal": True}}
RECURRENT = [name for name, options in FORMS.items() if options.get("causal", True) and "blindspot" not in options]


def trained_like(**fields: object) -> LinearAttention:
    """Weights so large that keys and queries differ by several units: every feature map is far from a constant."""
    layer = linear(**fields)
    with torch.no_grad():
        for projection in (layer.query, layer.key):
            projection.weight.mul_(2)
    return layer


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_every_form_is_its_formula_in_chunks_of_the_default_length(form: str, causal: bool) -> None:
    if FORMS[form].get("causal", causal) != causal:
        return
    layer = (trained_like if form else linear)(**FORMS[form] | {"causal": causal})
    # one token, around a chunk of the default length, and many chunks
    for seq_len in (1, 63, 64, 65, 100, 1000):
        x = tokens(2, seq_len, 32)
        keep = all_kept(x)
        keep[1, max(1, seq_len - 5) :] = False
        keep[1, 2:4] = False
        actual, expected = layer.attend(x, keep), exact(layer, x, keep)
        with named(f"{seq_len} tokens"):
            if not expected.any():  # the first block of a blindspot sees nothing
                assert torch.equal(actual, expected.float())
            else:
                assert relative_error(actual, expected) <= (BLOCKING if form else FLOAT32)


@pytest.mark.parametrize("form", RECURRENT)
@torch.no_grad()
def test_decode_steps_and_prefill_agree_with_the_whole_sequence_for_every_option(form: str) -> None:
    layer, x = trained_like(**FORMS[form] | {"causal": True}), tokens(2, 70, 32)
    keep = all_kept(x)
    expected = exact(layer, x, keep) @ layer.out.weight.double().T + layer.out.bias.double()
    assert relative_error(recurrent(layer, x), expected) <= BLOCKING
    state = layer.initial_state(2)
    first, state = layer.prefill(x[:, :40], keep[:, :40], state)
    second, state = layer.prefill(x[:, 40:69], keep[:, 40:69], state)
    last, state = layer.step(x[:, 69:], state)
    assert relative_error(torch.cat([first, second, last], dim=1), expected) <= BLOCKING


@pytest.mark.parametrize("form", RECURRENT)
@torch.no_grad()
def test_hidden_tokens_leave_the_state_of_every_option_as_it_is(form: str) -> None:
    layer, x = trained_like(**FORMS[form] | {"causal": True}), tokens(2, 30, 32)
    kept, padded = x[:, :20], x.clone()
    padded[:, 20:] *= 1000  # keys whose exponential overflows
    keep = all_kept(padded)
    keep[:, 20:] = False

    def state_after(tokens: Tensor, keep: Tensor) -> State:
        return layer.prefill(tokens, keep, layer.initial_state(2))[1]

    for name, expected in state_after(kept, all_kept(kept)).items():
        assert relative_error(state_after(padded, keep)[name], expected) <= BLOCKING


@pytest.mark.parametrize("form", ["exp", "softmax", "softmax and a small denominator"])
@torch.no_grad()
def test_large_keys_do_not_overflow_before_their_sums_do(form: str) -> None:
    # e^75 is 4e32: sums of 100 of them times values and e^q of about 10 still fit into float32
    layer, x = linear(causal=True, **FORMS[form]), tokens(2, 100, 32)
    layer.key.weight.mul_(0.1)
    layer.key.bias.fill_(75.0)
    # e^k of a key that is rounded to 2^-18 is off by as much
    assert relative_error(layer.attend(x, all_kept(x)), exact(layer, x, all_kept(x))) <= 1e-4


def test_a_blindspot_has_no_decode_step() -> None:
    layer = linear(causal=True, blindspot=8)
    assert LinearSpec(causal=True).has_decode_step
    assert not layer.spec.has_decode_step
    with pytest.raises(SpecError, match="blindspot 8 has no decode step; use blindspot 1"):
        layer.initial_state(1)


def test_the_case_of_small_keys_is_left_out_where_its_queries_overflow() -> None:
    assert LinearSpec(feature_map="relu").hostile_inputs == LinearSpec.hostile
    assert LinearSpec(feature_map="exp").hostile_inputs == HostileInputs()


def test_normalized_sums_of_two_feature_maps_have_a_fused_operator() -> None:
    fused = [name for name, fields in FORMS.items() if LinearSpec(**fields).operators(fused=True)]
    assert fused == ["", "relu", "long chunks", "chunks of one"]
    assert LinearSpec(causal=True).operators(fused=True) == ("EluLinearAttention",)
