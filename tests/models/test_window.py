"""Window attention: the decode step and its state."""

from __future__ import annotations

import pytest
import torch
from comparison import all_kept
from torch import Tensor

from effexport.models.encoder.module import module_from_spec
from effexport.models.validation import SpecError
from effexport.models.variants.window import WindowSpec
from effexport.models.variants.window.layer import CONTRACT, WindowAttention, exact

BATCH, DIM = 3, 32


def layer_of(window: int, **fields: object) -> WindowAttention:
    layer = module_from_spec(WindowSpec(dim=DIM, heads=2, causal=True, window=window, **fields), seed=0)
    assert isinstance(layer, WindowAttention)
    return layer


def tokens(seq_len: int, seed: int = 1) -> Tensor:
    return torch.randn(BATCH, seq_len, DIM, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected.double()).abs().max() / expected.double().square().mean().sqrt()
    assert error <= CONTRACT.limit


@pytest.mark.parametrize("window", [1, 7, 64])
@pytest.mark.parametrize("cuts", [(), (20,), (1, 2, 30), (39,)])
@torch.no_grad()
def test_any_split_into_prompts_and_steps_is_the_whole_sequence(window: int, cuts: tuple[int, ...]) -> None:
    layer, x = layer_of(window), tokens(40)
    expected = exact(layer, x, all_kept(x)) @ layer.out.weight.double().T + layer.out.bias.double()
    state, outputs = layer.initial_state(BATCH), []
    for part in torch.tensor_split(x, cuts, dim=1):
        is_token = part.shape[1] == 1
        output, state = layer.step(part, state) if is_token else layer.prefill(part, all_kept(part), state)
        outputs.append(output)
    assert_close(torch.cat(outputs, dim=1), expected)
    stepped = layer.initial_state(BATCH)
    for t in range(40):
        stepped = layer.step(x[:, t : t + 1], stepped)[1]
    for name, value in state.items():
        assert_close(value, stepped[name])


@torch.no_grad()
def test_prompts_of_other_lengths_leave_their_own_states() -> None:
    layer, x = layer_of(8), tokens(30)
    lengths = torch.tensor([30, 11, 0])
    keep = torch.arange(30) < lengths[:, None]
    # what is hidden is not a number: it must not reach a product with a weight of zero
    output, state = layer.prefill(x.masked_fill(~keep[..., None], torch.nan), keep, layer.initial_state(BATCH))
    following, _ = layer.step(x[:, :1], state)
    for i, length in enumerate(lengths.tolist()):
        own = layer.initial_state(1)
        if length:
            alone, own = layer.prefill(x[i : i + 1, :length], keep[i : i + 1, :length], own)
            assert_close(output[i : i + 1, :length], alone)
        assert_close(following[i : i + 1], layer.step(x[i : i + 1, :1], own)[0])


@torch.no_grad()
def test_a_step_leaves_the_state_it_was_given_unchanged() -> None:
    layer, x = layer_of(4), tokens(6)
    state = layer.prefill(x, all_kept(x), layer.initial_state(BATCH))[1]
    before = {name: value.clone() for name, value in state.items()}
    layer.step(x[:, :1], state)
    assert all(torch.equal(value, before[name]) for name, value in state.items())


def test_the_state_has_the_last_tokens_only() -> None:
    spec = WindowSpec(causal=True, global_tokens=2)
    assert WindowSpec(causal=True).has_decode_step
    assert not spec.has_decode_step
    with pytest.raises(SpecError, match="global_tokens 2 has no decode step; use global_tokens 0"):
        layer_of(8, global_tokens=2).initial_state(1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, "window is 0; expected a positive number of tokens"),
        ({"window": 7}, "window is 7; expected an even number, half of it on each side of a token; use 6 or 8"),
        ({"window": 1}, "window is 1; expected an even number, half of it on each side of a token; use 2"),
        ({"global_tokens": -1}, "global_tokens is -1; expected 0 or more"),
    ],
)
def test_windows_that_do_not_exist_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        WindowSpec(**fields)
