"""Random numbers that are drawn once: they are PyTorch's own, the same in every call and in every precision, and
nothing else changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from written_module import DIM, Written

from effexport.models.user.drawn_numbers import SEED, DrawnNumbers, NotFrozenError
from effexport.models.user.model import CalledByPosition, called_by_position, training_note

ROUNDING = 1e-6  # of float32, in a few operations


def learned(change: Callable[[Tensor], Tensor], x: Tensor) -> tuple[CalledByPosition, Tensor]:
    """A model that has drawn its numbers for an input, and its answer."""
    model = called_by_position(Written(change).eval().requires_grad_(False), ["x"], {})
    model.drawn = DrawnNumbers()
    with model.drawn.learning():
        return model, model(x)[0]


def vectors(*sizes: int, seed: int = 1) -> Tensor:
    return torch.randn(*sizes, DIM, generator=torch.Generator().manual_seed(seed))


def orthogonal(x: Tensor) -> Tensor:
    return x @ nn.init.orthogonal_(torch.empty(DIM, DIM)).to(x.dtype)


def attended(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(DIM, 2, dropout=0.4, batch_first=True, dtype=x.dtype).requires_grad_(False)
    return layer(x, x, x)[0]


AS_PYTORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: x + torch.rand(DIM),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randint": lambda x: x[..., torch.randint(DIM, (3,))],
    "randperm": lambda x: x[..., torch.randperm(DIM)],
    "normal of numbers": lambda x: x + torch.normal(1.0, 2.0, (DIM,)),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "out": lambda x: x + torch.randn(DIM, out=torch.empty(DIM)),
    "uniform_": lambda x: x + torch.empty(DIM).uniform_(-1, 3),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(),
    "bernoulli_": lambda x: x * torch.empty(DIM).bernoulli_(0.3),
    "bernoulli of a number": lambda x: x * torch.bernoulli(x, 0.3),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x, 0.3, inplace=True),
    "dropout of everything": lambda x: F.dropout(x, 1.0),
    "dropout of channels": lambda x: F.dropout1d(x, 0.3),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "a layer": lambda x: nn.Dropout(0.3)(x),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "multinomial": lambda x: x.softmax(-1).flatten(0, 1).multinomial(3).float(),
    "one choice": lambda x: torch.multinomial(x.softmax(-1).flatten(0, 1), 1).float(),
    "orthogonal_": orthogonal,
    "its seed": lambda x: (torch.manual_seed(3), x + torch.rand(DIM))[1],
    "its own generator": lambda x: x + torch.rand(DIM, generator=torch.Generator().manual_seed(4)),
    "Python": lambda x: x * random.random() + np.random.rand(),
    "attention without dropout": lambda x: F.scaled_dot_product_attention(x, x, x) + torch.rand(DIM),
    "rrelu in evaluation mode": lambda x: F.rrelu(x) + torch.rand(DIM),
    "multi-head attention": attended,
}


@pytest.mark.parametrize("name", AS_PYTORCH)
def test_the_numbers_are_what_pytorch_draws_from_the_seed_and_stay(name: str) -> None:
    change, x = AS_PYTORCH[name], vectors(3, 7)
    model, answer = learned(change, x)
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.testing.assert_close(change(model.get_submodule("linear")(x)), answer, rtol=ROUNDING, atol=ROUNDING)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    torch.testing.assert_close(model(x)[0], answer, rtol=0, atol=0)
    after = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    exact = copy.deepcopy(model).double()
    torch.testing.assert_close(exact(x.double())[0].float(), answer, rtol=100 * ROUNDING, atol=100 * ROUNDING)


COUNTS = 200_000


def sampled(x: Tensor) -> Tensor:
    return torch.multinomial(torch.tensor([[0.5, 0.0, 0.3, 0.2]]).expand(x.shape[0], -1), COUNTS, replacement=True)


SHARES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "bernoulli": (lambda x: torch.bernoulli(torch.full((COUNTS,), 0.3) + 0 * x.sum()), 0.3),
    "bernoulli_": (lambda x: torch.empty(COUNTS).bernoulli_(torch.tensor(0.3) + 0 * x.sum()), 0.3),
    "multinomial with replacement": (lambda x: (sampled(x) == 2).float(), 0.3),
    "no choice without weight": (lambda x: (sampled(x) == 1).float(), 0.0),
    "rrelu": (lambda x: -F.rrelu(torch.full((COUNTS,), -1.0) + 0 * x.sum(), 0.2, 0.4, training=True), 0.3),
}


@pytest.mark.parametrize("name", SHARES)
def test_formulas_of_draws_have_the_distribution_of_pytorch(name: str) -> None:
    change, share = SHARES[name]
    model, answer = learned(change, vectors(2))
    # five standard deviations of the mean of so many
    assert abs(answer.double().mean() - share) <= 5 * (0.21 / COUNTS) ** 0.5
    torch.testing.assert_close(model(vectors(2))[0], answer, rtol=0, atol=0)


def test_dropout_inside_of_attention_drops_weights() -> None:
    x = vectors(2, 3, 9)
    model, answer = learned(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4, is_causal=True), x)
    assert model.drawn is not None
    ((_, scales),) = model.drawn.numbers.items()
    y = model.get_submodule("linear")(x)
    causal = torch.full((9, 9), -torch.inf).triu(1)
    weights = (y @ y.transpose(-1, -2) / DIM**0.5 + causal).softmax(-1)
    torch.testing.assert_close(answer, (weights * scales) @ y, rtol=10 * ROUNDING, atol=10 * ROUNDING)
    assert set(scales.unique().tolist()) == {0.0, torch.tensor(1 / 0.6).item()}


def test_what_is_made_of_drawn_numbers_alone_is_looked_up_and_what_is_written_to_is_not() -> None:
    def change(x: Tensor) -> Tensor:
        noise = torch.randn(DIM, DIM)
        first = noise[0]
        q, _ = torch.linalg.qr(noise)
        times = int(torch.randint(2, 5, (1,)))
        noise += x.mean((0, 1))
        return times * (x @ q) + first + torch.linalg.norm(noise)

    model, _ = learned(change, vectors(3, 7))
    assert model.drawn is not None
    assert [key[0].__name__ for key in model.drawn.made] == ["linalg_qr", "__int__"]
    (noise, times), x = model.drawn.numbers.values(), vectors(2, 5, seed=2)
    y = model.get_submodule("linear")(x)
    changed = noise + y.mean((0, 1))
    expected = int(times) * (y @ torch.linalg.qr(noise)[0]) + changed[0] + torch.linalg.norm(changed)
    torch.testing.assert_close(model(x)[0], expected, rtol=10 * ROUNDING, atol=10 * ROUNDING)


def test_one_layer_in_several_places_draws_for_each() -> None:
    layer = Written(lambda x: x + torch.randn(DIM))
    model = called_by_position(nn.Sequential(layer, layer).eval().requires_grad_(False), ["input"], {})
    model.drawn = DrawnNumbers()
    x = vectors(2, 5)
    with model.drawn.learning():
        (answer,) = model(x)
    first, second = model.drawn.numbers.values()
    expected = layer.linear(layer.linear(x) + first) + second
    torch.testing.assert_close(answer, expected.detach(), rtol=10 * ROUNDING, atol=10 * ROUNDING)


def test_a_generator_of_the_model_stays_as_it_was() -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    model, answer = learned(lambda x: x + torch.randn(DIM, generator=generator), vectors(2))
    torch.testing.assert_close(model(vectors(2))[0], answer, rtol=0, atol=0)
    assert torch.equal(generator.get_state(), before)


def test_draws_without_a_formula_are_refused_with_their_line() -> None:
    for change, name in (
        (lambda x: torch.poisson(x.exp()), "torch.poisson"),
        (lambda x: torch.native_dropout(x, 0.5, True)[0], "torch.native_dropout"),
    ):
        with pytest.raises(NotFrozenError, match=rf"inside of {name} \(test_drawn_numbers.py, line \d+\)"):
            learned(change, vectors(2))


def test_layers_that_eval_does_not_reach_are_not_said_to_be_as_after_eval() -> None:
    class Always(nn.Dropout):
        def train(self, mode: bool = True) -> Always:
            return super().train(True)

    model = nn.Sequential(Always(0.5), nn.Dropout(0.5))
    evaluated = nn.Sequential(Always(0.5), nn.Dropout(0.5)).eval()
    (note,) = training_note(model, evaluated, "Model")
    assert "which changes 1 (Dropout); it is exported as after eval()" in note
