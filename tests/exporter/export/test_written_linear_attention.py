"""Linear attention that code writes out becomes the operator where it is the same for every input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from slow_cases import slow_after
from torch import Tensor, nn
from written_module import DIM, check_written

import effexport
from effexport.export.traced_nodes import operators_of
from effexport.export.written_linear_attention import turn_linear_attentions

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
HEADS = 2
OPERATOR = "EluLinearAttention"
NOTE = "1 linear attention that the code writes out as products became effexport's linear attention."
Core = Callable[[Tensor, Tensor, Tensor], Tensor]
RANDOM = torch.randn(DIM // HEADS, 6, generator=torch.Generator().manual_seed(1))


def two_products(q: Tensor, k: Tensor, v: Tensor, eps: float = 1e-6) -> Tensor:
    return q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1) + eps)


def column_of_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """timm's LiteMLA."""
    out = q @ (k.transpose(-1, -2) @ F.pad(v, (0, 1), mode="constant", value=1.0))
    return out[..., :-1] / (out[..., -1:] + 1e-5)


def channels_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SANA's processor in diffusers, whose queries and values have the tokens last."""
    q, v = q.transpose(2, 3), F.pad(v.transpose(2, 3), (0, 0, 0, 1), mode="constant", value=1.0)
    out = torch.matmul(torch.matmul(v, k), q)
    return (out[:, :, :-1] / (out[:, :, -1:] + 1e-15)).transpose(2, 3)


def einsums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """performer-pytorch's."""
    inverse = 1.0 / torch.einsum("...nd,...d->...n", q, k.sum(dim=-2).type_as(q))
    return torch.einsum("...de,...nd,...n->...ne", torch.einsum("...nd,...ne->...de", k, v), q, inverse)


def tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """fast-transformers', whose heads come after the tokens."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    inverse = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + 1e-6)
    return torch.einsum("nlhd,nhmd,nlh->nlhm", q, torch.einsum("nshd,nshm->nhmd", k, v), inverse).transpose(1, 2)


def sums_of_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.transpose(-2, -1) @ v) / (q * k.sum(dim=-2, keepdim=True)).sum(-1, keepdim=True)


def joined_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = q @ (k.mT @ torch.cat((v, torch.ones_like(v[..., :1])), -1))
    return out[..., :-1] / out[..., -1:]


@dataclass
class Form:
    """A way to write linear attention. features: φ. core: of features and values, [batch, heads, tokens, channels].

    is_masked: features of keys are multiplied by a mask.
    """

    features: Callable[[Tensor], Tensor] = F.relu
    core: Core = two_products
    is_masked: bool = False
    heads: int = HEADS


TURNED = {
    "relu, masked": Form(is_masked=True),
    "a column of ones": Form(core=column_of_ones),
    "channels first": Form(core=channels_first),
    "einsums of positive features": Form(
        lambda x: torch.exp(x @ RANDOM - x.square().sum(-1, keepdim=True) / 2) + 1e-4, einsums
    ),
    "tokens first, masked": Form(lambda x: F.relu(x @ RANDOM) + 1e-3, tokens_first, is_masked=True),
    "exp": Form(lambda x: x.exp(), sums_of_rows),
    "elu": Form(lambda x: F.elu(x) + 1, joined_ones),
    "squared relu": Form(lambda x: F.relu(x) ** 2),
    "one head": Form(heads=0, is_masked=True),
}
KEPT = {
    "features that could be negative": Form(lambda x: x + 8),
    "elu with less than 1": Form(lambda x: F.elu(x) + 0.9),
    "a difference of features": Form(lambda x: x.exp() + 1 - 0.1),
    "a bounded denominator": Form(core=lambda q, k, v: q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1)).clamp(min=1e-2)),
    "the mean of keys": Form(core=lambda q, k, v: q @ (k.mT @ v) / (q @ k.mean(-2).unsqueeze(-1) + 1e-6)),
    "the sum of queries": Form(
        core=lambda q, k, v: q @ (k.mT @ v) / (q.sum(-2, keepdim=True) @ k.mT + 1e-6).sum(-1, keepdim=True)
    ),
    "no denominator": Form(core=lambda q, k, v: q @ (k.mT @ v)),
    "a number for a denominator": Form(core=lambda q, k, v: q @ (k.mT @ v) / 7),
    "twos beside values": Form(
        core=lambda q, k, v: (lambda o: o[..., :-1] / o[..., -1:])(q @ (k.mT @ F.pad(v, (0, 1), value=2.0)))
    ),
    "other keys than values": Form(
        core=lambda q, k, v: q @ (k.mT @ v)[..., :, :] / (q @ k.flip(-1).sum(-2).unsqueeze(-1) + 1e-6)
    ),
    "causal": Form(core=lambda q, k, v: (q @ k.mT).tril() @ v / ((q @ k.mT).tril().sum(-1, keepdim=True) + 1e-6)),
    "half of the tokens": Form(core=lambda q, k, v: two_products(q, k[:, :, ::2], v[:, :, ::2])),
    "heads added up": Form(
        core=lambda q, k, v: q @ (k.mT @ v) / ((q @ k.sum(-2).unsqueeze(-1)).sum(1, keepdim=True) + 1e-6)
    ),
}


class Attention(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.qkv = form, nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        form = self.form
        q, k, v = self.qkv(x).chunk(3, -1)
        if form.heads:
            q, k, v = (part.unflatten(-1, (form.heads, -1)).transpose(1, 2) for part in (q, k, v))
        q, k = form.features(q), form.features(k)
        if mask is not None:
            k = k * (mask[:, None, :, None] if form.heads else mask[:, :, None])
        out = form.core(q, k, v)
        return out.transpose(1, 2).flatten(2) if form.heads else out


def check(form: Form, folder: Path, precision: str = "fp32") -> effexport.BuildResult:
    return check_written(Attention(form), folder, is_masked=form.is_masked, precision=precision)


@pytest.mark.parametrize("name", slow_after(4, TURNED, 6))
def test_a_linear_attention_becomes_the_operator(name: str, tmp_path: Path) -> None:
    result = check(TURNED[name], tmp_path)
    assert result.artifact.spec.custom_ops == {OPERATOR: 1}
    assert NOTE in result.report.notes


@pytest.mark.parametrize("name", slow_after(2, KEPT, 7))
def test_what_is_another_function_stays(name: str, tmp_path: Path) -> None:
    assert not check(KEPT[name], tmp_path).artifact.spec.custom_ops


class Alone(nn.Module):
    """A core alone, of features and values."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core = core

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch._check(k.shape[-2] == v.shape[-2])
        torch._check(q.shape[-2] == v.shape[-2] or q.ndim == 2)
        return self.core(q, k, v)


def count_in(core: Core, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """The number of linear attentions found in a core, for any number of tokens."""
    tokens = tuple({len(shape) - 2: torch.export.Dim.AUTO} for shape in shapes)
    tensors = tuple(torch.randn(shape, dtype=dtype) for shape in shapes)
    program = torch.export.export(Alone(core), tensors, dynamic_shapes={"q": tokens[0], "k": tokens[1], "v": tokens[2]})
    turn_linear_attentions(program)
    return operators_of(program).total()


HEADS_OF_8 = (2, HEADS, 12, 8)


def rectified(core: Core) -> Core:
    return lambda q, k, v: core(q.relu(), k.relu(), v)


def test_products_of_other_ranks_stay() -> None:
    """Such as keys and values without a batch, and a matrix of weights before a product."""
    assert count_in(rectified(two_products), HEADS_OF_8, HEADS_OF_8, HEADS_OF_8) == 1
    assert count_in(rectified(two_products), HEADS_OF_8, HEADS_OF_8[1:], HEADS_OF_8[1:]) == 0
    assert count_in(lambda q, k, v: (q @ (k.mT @ v)) * 0.5, (5, 8), (2, 12, 8), (2, 12, 8)) == 0


def test_a_wider_type_than_that_of_the_operator_stays() -> None:
    shapes = HEADS_OF_8, HEADS_OF_8, HEADS_OF_8
    assert count_in(rectified(two_products), *shapes, dtype=torch.float64) == 0
    assert count_in(rectified(two_products), *shapes, dtype=torch.float16) == 1


def test_sizes_that_follow_from_numbers_stay() -> None:
    def of_some_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = v[0, :, 0] > 0
        q, k, v = (x[:, kept] for x in (q.relu(), k.relu(), v))
        return two_products(q, k, v)

    def of_their_count(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.relu(), k.relu()
        return q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1) * (v[0, :, 0] > 0).nonzero().shape[0] + 1e-6)

    shape = (2, 12, 8)
    assert count_in(of_some_tokens, shape, shape, shape) == 0
    assert count_in(of_their_count, shape, shape, shape) == 0


# Functions that are linear attention at the 12 tokens of the example.
AT_THE_EXAMPLE: dict[str, Core] = {
    "the first 100 keys": lambda q, k, v: q @ (k.mT @ v) / (q @ k[:, :, :100].sum(-2).unsqueeze(-1) + 1e-6),
    "the last 100 keys": lambda q, k, v: q @ (k.mT @ v) / (q @ k[:, :, -100:].sum(-2).unsqueeze(-1) + 1e-6),
    "ones to a multiple of 4": lambda q, k, v: (
        q @ (k.mT @ v) / (q @ F.pad(k, (0, 0, 0, -k.shape[2] % 4), value=1.0).sum(-2).unsqueeze(-1) + 1e-6)
    ),
    "a share of 12 tokens": lambda q, k, v: q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1) * v.shape[2] / 12 + 1e-6),
    "the first 100 keys and values": lambda q, k, v: two_products(q, k[:, :, :100], v[:, :, :100]),
    "whole dozens": lambda q, k, v: q @ (k.mT @ v) * (v.shape[2] // 12) / (q @ k.sum(-2).unsqueeze(-1) + 1e-6),
    "the first of windows": lambda q, k, v: (
        q @ (k.mT @ v) / (q @ k.unflatten(2, (-1, 12)).sum(3).select(2, 0).unsqueeze(-1) + 1e-6)
    ),
}


@pytest.mark.parametrize("name", AT_THE_EXAMPLE)
def test_what_is_another_function_at_other_sizes_stays(name: str) -> None:
    assert count_in(rectified(AT_THE_EXAMPLE[name]), HEADS_OF_8, HEADS_OF_8, HEADS_OF_8) == 0


# Functions that are linear attention as long as there are features, or one token, or numbers that float32 has.
ALMOST: dict[str, Core] = {
    "1e-30 beside sums of keys": lambda q, k, v: q @ (k.mT @ v) / (q @ (k.sum(-2) + 1e-30).unsqueeze(-1)),
    "1e-30 beside queries": lambda q, k, v: q @ (k.mT @ v) / ((q + 1e-30) @ k.sum(-2).unsqueeze(-1) + 1e-30),
    "a subnormal number": lambda q, k, v: two_products(q, k, v, 1e-40),
    "a number beyond float32": lambda q, k, v: two_products(q, k, v, 1e39),
    "a doubled denominator": lambda q, k, v: q @ (k.mT @ v) / (q @ k.sum(-2).unsqueeze(-1) * 2 + 1e-6),
}


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("name", ALMOST)
def test_what_is_almost_the_function_stays(name: str, tokens: int) -> None:
    shape = (2, HEADS, tokens, 8)
    assert count_in(rectified(ALMOST[name]), shape, shape, shape) == 0


@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-6, 1.0])
def test_one_token(eps: float) -> None:
    shape = (2, HEADS, 1, 8)
    assert count_in(rectified(lambda q, k, v: two_products(q, k, v, eps)), shape, shape, shape) == 1


def after(change: Callable[[Tensor, Tensor, Tensor], object]) -> Core:
    """Keys that are read by way of a view after a change, and all factors after they were read."""

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_transposed = k.mT
        change(q, k, v)
        states, sums = k_transposed @ v, k_transposed.sum(-1, keepdim=True)
        change(q, k, v)
        return q @ states / (q @ sums + 1e-6)

    return core


CHANGED_IN_PLACE: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "keys": lambda q, k, v: k.add_(0.3),
    "a part of the keys": lambda q, k, v: k[:, :, 0].zero_(),
    "values in pieces": lambda q, k, v: v.chunk(2, -1)[0].mul_(2),
}


@pytest.mark.parametrize("name", CHANGED_IN_PLACE)
def test_what_is_changed_in_place_stays(name: str) -> None:
    core = after(CHANGED_IN_PLACE[name])
    assert count_in(lambda q, k, v: core(q.relu(), k.relu(), v * 2), HEADS_OF_8, HEADS_OF_8, HEADS_OF_8) == 0


def test_features_that_are_changed_in_place_may_be_negative() -> None:
    def below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        features = k.exp()
        alias = features[:]
        features.sub_(2)
        return two_products(q.exp(), alias * 1, v)

    assert count_in(below, HEADS_OF_8, HEADS_OF_8, HEADS_OF_8) == 0
    assert count_in(lambda q, k, v: two_products(q.exp(), F.elu(k).add(1, alpha=0.5), v), *[HEADS_OF_8] * 3) == 0
    assert count_in(lambda q, k, v: two_products((q * 1).relu_(), (k * 1).relu_(), v), *[HEADS_OF_8] * 3) == 1


def test_results_that_are_arguments_of_the_next() -> None:
    def three_times(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return two_products(two_products(q, k, two_products(q, k, v)).relu(), k, v)

    assert count_in(rectified(three_times), HEADS_OF_8, HEADS_OF_8, HEADS_OF_8) == 3


def test_values_from_another_attention(tmp_path: Path) -> None:
    form = Form(core=lambda q, k, v: two_products(q, k, two_products(q, k, v)))
    assert check(form, tmp_path).artifact.spec.custom_ops == {OPERATOR: 2}


def test_whole_numbers_between_the_steps() -> None:
    def of_rounded_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q @ (k.mT @ v) / ((q @ k.sum(-2).unsqueeze(-1)).type_as(q.argmax()) + 1e-6)

    assert count_in(rectified(of_rounded_sums), HEADS_OF_8, HEADS_OF_8, HEADS_OF_8) == 0


def test_values_that_are_divided_by_their_number_and_multiplied_again() -> None:
    def as_in_loftr(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inverse = 1 / (q @ k[:, :, : v.shape[2]].sum(-2).unsqueeze(-1) + 1e-6)
        return q @ (k.mT @ (v / v.shape[2])) * inverse * v.shape[2]

    assert count_in(rectified(as_in_loftr), HEADS_OF_8, HEADS_OF_8, HEADS_OF_8) == 1


class Image(nn.Module):
    """SANA's attention as a whole: channels are moved to the front, and back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).transpose(1, 2).unflatten(1, (HEADS, -1)) for part in (self.q, self.k, self.v))
        k, v = F.relu(k.transpose(2, 3)), F.pad(v, (0, 0, 0, 1), mode="constant", value=1.0)
        out = torch.matmul(torch.matmul(v, k), F.relu(q))
        return (out[:, :, :-1] / (out[:, :, -1:] + 1e-15)).flatten(1, 2).transpose(1, 2)


def test_channels_that_were_moved_cost_one_transpose(tmp_path: Path) -> None:
    result = check_written(Image(), tmp_path, is_masked=False)
    assert result.artifact.spec.custom_ops == {OPERATOR: 1}
    import onnx

    nodes = onnx.load(result.path / "model.onnx").graph.node
    assert sum(node.op_type == "Transpose" for node in nodes) == 4


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Attention(Form())
        self.second = Attention(Form(core=lambda q, k, v: two_products(q, k, v, 1e-3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_layers_with_another_eps_stay(tmp_path: Path) -> None:
    """All nodes of a model share one function body."""
    assert check_written(Two(), tmp_path, is_masked=False).artifact.spec.custom_ops == {OPERATOR: 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [Form(torch.exp, column_of_ones), Form(torch.exp, is_masked=True)], ids=["ones", "masked"]
)
def test_half_precision(form: Form, tmp_path: Path) -> None:
    result = check(form, tmp_path, "fp16")
    assert result.artifact.spec.custom_ops == {OPERATOR: 1}
