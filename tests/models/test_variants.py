"""Every variant keeps its contract: one table, variants × their forms × lengths × masks × the causal
form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from slow_cases import named
from torch import Tensor

from effexport.models.attention_spec import SPECS
from effexport.models.encoder.module import module_from_spec
from effexport.models.layers import AttentionLayer
from effexport.models.variants import ATTENTION_SPECS
from effexport.models.variants.contract import variant_contract

DIM = 32
# Other lengths cut products into other blocks, and batches into other rows; Nyström's pseudo-inverse multiplies last
# bits.
BLOCKING = 1e-5
# One token, and around the chunks of 8 that small layers have.
LENGTHS = (1, 5, 8, 9, 63, 100)
CONTRACTS = {variant: variant_contract(variant) for variant in (*ATTENTION_SPECS, "local")}


def rows() -> Iterator[tuple[str, bool]]:
    """Each variant in the forms that it has, causal and not."""
    for variant in CONTRACTS:
        if not SPECS[variant].why_always_causal:
            yield variant, False
        if not SPECS[variant].why_not_causal:
            yield variant, True


variants = pytest.mark.parametrize(
    ("variant", "causal"), [pytest.param(*row, id="-".join(map(str, row))) for row in rows()]
)


def formulas() -> Iterator[tuple[str, str, bool]]:
    """Each variant in each of its forms, causal or not."""
    for variant, contract in CONTRACTS.items():
        for form, options in {"": {}, **contract.forms}.items():
            can_be_causal = not SPECS[variant].why_not_causal and "conv_kernel_size" not in options
            has = {bool(SPECS[variant].why_always_causal), can_be_causal}
            for causal in has & {options.get("causal", False), options.get("causal", True)}:
                yield variant, form, causal


def forms_of(variant: str, causal: bool) -> list[str]:
    return [form for name, form, is_causal in formulas() if (name, is_causal) == (variant, causal)]


def layer_of(variant: str, causal: bool, form: str = "", **changes: Any) -> AttentionLayer:
    """A layer of random weights, those of positions too. What a causal form does not have is left out."""
    contract = CONTRACTS[variant]
    options = {**contract.small, **contract.forms.get(form, {}), "causal": causal, **changes}
    options = {name: value for name, value in options.items() if not (causal and name == "conv_kernel_size")}
    layer = module_from_spec(SPECS[variant](**{"dim": DIM, "heads": 4, "seq_len": 128, **options}), 0)
    assert isinstance(layer, AttentionLayer)
    return layer.eval()


def batch(seq_len: int) -> tuple[Tensor, Tensor]:
    """Four samples [batch, seq, dim]: whole, with padding, with padding and holes, and with padding on the left."""
    x = torch.randn(4, seq_len, DIM, generator=torch.Generator().manual_seed(seq_len))
    keep = torch.ones(4, seq_len, dtype=torch.bool)
    keep[1:3, max(1, seq_len - 3) :] = False
    keep[3, : seq_len // 3] = False
    keep[2, 1 : seq_len // 2 : 3] = False
    return x, keep


def assert_close(actual: Tensor, expected: Tensor, limit: float) -> None:
    actual, expected = actual.double(), expected.double()
    assert actual.isfinite().all()
    assert (actual - expected).abs().max() <= limit * expected.square().mean().sqrt()


@pytest.mark.parametrize(("variant", "form", "causal"), formulas())
@torch.no_grad()
def test_the_layer_computes_the_formula_at_every_length(variant: str, form: str, causal: bool) -> None:
    layer, contract = layer_of(variant, causal, form), CONTRACTS[variant]
    for seq_len in LENGTHS:
        x, keep = batch(seq_len)
        with named(f"{seq_len} tokens"):
            assert_close(layer.attend(x, keep)[keep], contract.exact(layer, x, keep)[keep], contract.limit)


@variants
@torch.no_grad()
def test_neither_padding_nor_other_samples_change_a_result(variant: str, causal: bool) -> None:
    for form in forms_of(variant, causal):
        layer, (x, keep) = layer_of(variant, causal, form), batch(63)
        # padding may hold anything
        last = torch.nan if CONTRACTS[variant].hides_nan else 0.0
        filled = torch.where(keep[..., None], x, torch.tensor([1e4, -1e4, last, 1e4])[:, None, None])
        together = layer.attend(filled, keep)
        with named(form):
            for i in range(4):
                alone = layer.attend(x[i : i + 1], keep[i : i + 1])
                assert_close(together[i][keep[i]], alone[0][keep[i]], BLOCKING)
            shorter = layer.attend(x[1:2, :60], keep[1:2, :60])
            assert_close(together[1, :60], shorter[0], BLOCKING)


def buckets_of(layer: AttentionLayer) -> list[Tensor]:
    """A list of what a hash of the layer returns from now on."""
    seen: list[Tensor] = []
    if layer.spec.is_hashed:
        layer.get_submodule("hash").register_forward_hook(lambda module, inputs, output: seen.append(output))
    return seen


@variants
@torch.no_grad()
def test_what_follows_a_sequence_does_not_change_it_at_the_lengths_of_models(variant: str, causal: bool) -> None:
    """Around chunks of 64, which published models have, and in many of them."""
    wide = {name: 64 for name in CONTRACTS[variant].small if name == "chunk_length"}
    layer = layer_of(variant, causal, seq_len=1200, **wide)
    buckets = buckets_of(layer)
    for seq_len in (1, 63, 64, 65, 100, 1000):
        x = torch.randn(2, seq_len, DIM, generator=torch.Generator().manual_seed(seq_len))
        expected = layer.attend(x, torch.ones(2, seq_len, dtype=torch.bool))
        for extra in (1, 64, 129):
            more = 100 * torch.randn(2, extra, DIM, generator=torch.Generator().manual_seed(extra))
            keep = (torch.arange(seq_len + extra) < seq_len).expand(2, -1)
            with named(f"{seq_len} tokens and {extra}"):
                assert_close(layer.attend(torch.cat([x, more], dim=1), keep)[:, :seq_len], expected, BLOCKING)
                assert all(torch.equal(one[:, :seq_len], buckets[0][:, :seq_len]) for one in buckets)
        buckets.clear()


@variants
@torch.no_grad()
def test_left_padding_holes_and_a_sample_without_tokens_may_hold_anything(variant: str, causal: bool) -> None:
    for form in forms_of(variant, causal):
        layer, (x, keep) = layer_of(variant, causal, form), batch(63)
        keep[0, :20], keep[1, 5:60:3], keep[2] = False, False, False
        given = layer.attend(x, keep)
        other = layer.attend(torch.where(keep[..., None], x, 50 * x.roll(1, 0)), keep)
        assert_close(other[keep], given[keep], BLOCKING)
        assert given.isfinite().all()
        assert not (CONTRACTS[variant].empty_is_zero and given[2].any())


@variants
@torch.no_grad()
def test_half_precision_stays_close(variant: str, causal: bool) -> None:
    """RMS of the error over RMS of the output: input and weights alone are rounded by 2^-11 or 2^-8."""
    for dtype, limit in ((torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
        layer, (x, keep) = layer_of(variant, causal), batch(100)
        buckets = buckets_of(layer)
        expected = layer(x, keep)[keep].double()
        if buckets:  # a token whose buckets nearly tie gets another one
            layer.get_submodule("hash").register_forward_hook(lambda *_, given=buckets[0]: given)
        actual = layer.to(dtype)(x.to(dtype), keep)[keep]
        assert actual.dtype == dtype
        assert_rms_close(actual.double(), expected, limit)


def assert_rms_close(actual: Tensor, expected: Tensor, limit: float) -> None:
    assert (actual - expected).square().mean().sqrt() <= limit * expected.square().mean().sqrt()


@variants
@torch.no_grad()
def test_half_precision_stays_finite_for_large_inputs(variant: str, causal: bool) -> None:
    layer, (x, keep) = layer_of(variant, causal), batch(100)
    for dtype in (torch.float16, torch.bfloat16):
        assert layer.to(dtype)((20 * x).to(dtype), keep).isfinite().all()


@pytest.mark.parametrize(
    # a later token moves the borders of chunks in a sort
    "variant",
    [variant for variant, causal in rows() if causal and not SPECS[variant].is_hashed],
)
@torch.no_grad()
def test_later_tokens_change_nothing_in_a_causal_form(variant: str) -> None:
    layer, (x, keep) = layer_of(variant, True), batch(63)
    other = x.clone()
    other[:, 40:] = 5.0
    before, after = layer.attend(x, keep)[:, :40], layer.attend(other, keep)[:, :40]
    assert torch.equal(before[keep[:, :40]], after[keep[:, :40]])


@variants
@torch.no_grad()
def test_forward_is_attend_and_a_projection_and_no_mask_hides_nothing(variant: str, causal: bool) -> None:
    for form in forms_of(variant, causal):
        layer, (x, keep) = layer_of(variant, causal, form), batch(20)
        assert torch.equal(layer(x, keep.long()), layer.out(layer.attend(x, keep)))
        assert torch.equal(layer(x), layer(x, torch.ones_like(keep)))


@variants
def test_all_parameters_get_finite_gradients(variant: str, causal: bool) -> None:
    layer, (x, keep) = layer_of(variant, causal), batch(63)
    keep[1] = False
    layer(x, keep).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # a bias of keys shifts every logit of a row alike, which a softmax ignores
        assert parameter.grad.any() or name == "key.bias", name
