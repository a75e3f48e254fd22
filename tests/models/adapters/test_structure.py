"""Layers of unknown classes that compute what known ones do: what is replaced, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import effexport
from effexport.models.adapters.linear_function import LinearFunction
from effexport.models.adapters.replace import with_our_layers
from effexport.models.layers import fused_operators
from effexport.models.user.spec_from_module import Calling, model_and_spec

pytestmark = pytest.mark.requires("torch")

DIM, HEADS, SEQ_LEN = 16, 2, 64
# float32 rounding of the same sums in another order, as a fraction of the RMS
ROUNDING = 1e-5


class OwnAFT(nn.Module):
    """AFT-simple with the attributes of aft-pytorch: σ(q) · Σ softmax(k) v, by its formula."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.hidden_dim = DIM, 24
        self.to_q, self.to_k, self.to_v = (nn.Linear(DIM, 24) for _ in range(3))
        self.project = nn.Linear(24, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        weights = self.to_k(tokens).softmax(dim=1)
        return self.project(self.to_q(tokens).sigmoid() * (weights * self.to_v(tokens)).sum(dim=1, keepdim=True))


class WithGain(OwnAFT):
    """The same numbers, until its own weight is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gain * super().forward(tokens)


class Longer(OwnAFT):
    """Something else for sequences of one length."""

    def forward(self, tokens: Tensor) -> Tensor:
        result = super().forward(tokens)
        return result if tokens.shape[1] != 600 else 2 * result


class Derived(nn.MultiheadAttention):
    """One more argument, which is False unless somebody asks."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, double: bool = False, **rest: Any) -> Any:
        result, weights = super().forward(query, key, value, *args, **rest)
        return (2 * result if double else result), weights


class Scaled(nn.MultiheadAttention):
    def forward(self, query: Tensor, *args: Any, **rest: Any) -> Any:
        return super().forward(1.001 * query, *args, **rest)


def elu1(x: Tensor) -> Tensor:
    return F.elu(x) + 1


class InLoFTR(nn.Module):
    """The linear attention of LoFTR: [batch, tokens, heads, channels], and values divided by their count."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_mask: Tensor | None = None, kv_mask: Tensor | None = None
    ) -> Tensor:
        q, k = elu1(q), elu1(k)
        if q_mask is not None:
            q = q * q_mask[:, :, None, None]
        if kv_mask is not None:
            k, v = k * kv_mask[:, :, None, None], v * kv_mask[:, :, None, None]
        count = v.shape[1]
        sums = torch.einsum("nshd,nshv->nhdv", k, v / count)
        weights = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + 1e-6)
        return torch.einsum("nlhd,nhdv,nlh->nlhv", q, sums, weights) * count


class ByWeights(nn.Module):
    """Σ φ(q)·φ(k) v / (Σ φ(q)·φ(k) + eps) by way of all weights, [batch, heads, tokens, channels]. change: of the
    weights [batch, heads, queries, keys]."""

    def __init__(
        self, features: Callable[[Tensor], Tensor], eps: float = 1e-3, change: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.features, self.eps, self.change = features, eps, change

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, pad: Tensor | None = None) -> Tensor:
        weights = self.features(queries) @ self.features(keys).mT
        weights = weights if pad is None else weights * pad[:, None, None]
        weights = weights if self.change is None else self.change(weights)
        return weights @ values / (weights.sum(dim=-1, keepdim=True) + self.eps)


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float(((actual - expected).abs().max() / expected.square().mean().sqrt()).detach())


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_a_copy_under_other_names_becomes_ours() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), OwnAFT())
    adapted = with_our_layers(model, SEQ_LEN)
    assert adapted.by_answers == ["1"]
    assert [layer.spec.variant for layer in adapted.module.modules() if hasattr(layer, "spec")] == ["aft-simple"]
    x = tokens(2, 37, DIM)
    assert error(adapted.module[1](tokens=x), model[1](x)) <= ROUNDING


def test_a_derived_layer_becomes_ours_and_refuses_what_was_not_proven() -> None:
    layer = Derived(DIM, HEADS, batch_first=True).eval()
    adapted = with_our_layers(layer, SEQ_LEN)
    x, hidden = tokens(2, 37, DIM), torch.arange(37).expand(2, -1) > 20
    later = torch.ones(37, 37, dtype=torch.bool).triu(1)
    for options in ({}, {"key_padding_mask": hidden, "need_weights": False}, {"attn_mask": later, "double": False}):
        actual, weights = adapted.module(x, x, x, **options)
        expected, theirs = layer(x, x, x, **options)
        assert error(actual, expected) <= ROUNDING
        assert (weights is None) == (theirs is None)
    assert error(adapted.module(x, x, x, hidden)[0], layer(x, x, x, hidden)[0]) <= ROUNDING  # by its place
    with pytest.raises(Exception, match="called with double, which effexport's layer does not have"):
        adapted.module(x, x, x, double=True)


def test_a_copy_of_an_encoder_layer_inside_pytorchs_encoder() -> None:
    class Layer(nn.TransformerEncoderLayer):
        pass

    model = nn.TransformerEncoder(Layer(DIM, HEADS, 32, batch_first=True), 2, enable_nested_tensor=False).eval()
    adapted = with_our_layers(model, SEQ_LEN)
    assert adapted.by_answers == ["layers.0", "layers.1"]
    assert {path: dict(model.named_modules())[path] for path in adapted.replaced}  # the paths of the original
    x, hidden = tokens(2, 37, DIM), torch.arange(37).expand(2, -1) > 20
    with fused_operators(adapted.module, True):
        assert error(adapted.module(x, None, hidden), model(x, None, hidden)) <= ROUNDING


class Windowed(nn.MultiheadAttention):
    """Full attention of short sequences, a window in long ones."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **rest: Any) -> Any:
        places = torch.arange(query.shape[1])
        if len(places) > 100 and attn_mask is None:
            attn_mask = (places[:, None] - places).abs() > 50
        return super().forward(query, key, value, attn_mask=attn_mask, **rest)


class Clamped(nn.MultiheadAttention):
    """Cuts off what random numbers hardly reach."""

    def forward(self, query: Tensor, *args: Any, **rest: Any) -> Any:
        return super().forward(query.clamp(-10, 10), *args, **rest)


class FirstVisible(nn.MultiheadAttention):
    """Shows the first token, of the class, to all, whatever the mask says."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Any = None, **rest: Any) -> Any:
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask & (torch.arange(key.shape[1]) > 0)
        return super().forward(query, key, value, key_padding_mask, **rest)


@pytest.mark.parametrize(
    "layer",
    [
        Scaled(DIM, HEADS, batch_first=True),
        WithGain(),
        *(kind(DIM, HEADS, batch_first=True) for kind in (Windowed, Clamped, FirstVisible)),
    ],
)
def test_a_layer_that_computes_something_else_stays(layer: nn.Module) -> None:
    adapted = with_our_layers(nn.Sequential(layer), SEQ_LEN)
    assert not adapted.replaced
    assert all("no layer of effexport was found that gives the same answers" in why for why in adapted.kept.values())
    assert len(adapted.kept) == isinstance(layer, nn.MultiheadAttention)


def test_a_layer_that_computes_something_else_at_the_length_of_the_export_is_kept() -> None:
    example = Calling(examples=(tokens(1, 600, DIM),))
    _, spec = model_and_spec(nn.Sequential(nn.Linear(DIM, DIM), Longer()), "Model", calling=example)
    assert not spec.replaced
    assert any("with effexport's layer in its place, the model has another answer" in note for note in spec.remarks)


def test_a_layer_that_is_called_with_what_was_not_proven_is_kept() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Derived(DIM, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, double=True)[0]  # type: ignore[no-any-return]

    _, spec = model_and_spec(Model(), "Model", calling=Calling(examples=(tokens(1, 40, DIM),)))
    assert not spec.replaced
    assert any(
        note.endswith("as PyTorch has it: it was called with double, which effexport's layer does not have.")
        for note in spec.remarks
    )


FUNCTIONS: dict[str, tuple[nn.Module, dict[str, object]]] = {
    "LoFTR": (InLoFTR(), {"features": "elu", "eps": 1e-6, "roles": {"q_mask": "queries", "kv_mask": "keys"}}),
    "all weights": (ByWeights(elu1), {"features": "elu", "eps": 1e-3, "roles": {"pad": "keys"}}),
    "no eps": (ByWeights(elu1, eps=0.0), {"features": "elu", "eps": 0.0}),
    "relu": (ByWeights(torch.relu), {"features": "relu", "eps": 1e-3}),
    "exp": (ByWeights(torch.exp), {"features": "exp"}),
    "squared relu": (ByWeights(lambda x: torch.relu(x) ** 2), {"features": "squared relu"}),
    "causal": (ByWeights(elu1, change=torch.tril), {"features": "elu", "causal": True, "roles": {"pad": "keys"}}),
}


@pytest.mark.parametrize(("function", "fields"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_linear_attention_as_a_function_is_known_by_its_answers(function: nn.Module, fields: dict[str, object]) -> None:
    ours = with_our_layers(function, SEQ_LEN).module
    assert isinstance(ours, LinearFunction)
    assert {name: getattr(ours.formula, name) for name in fields} == fields
    queries = 70 if ours.formula.causal else 33
    shapes = [(2, 3, queries, 8), (2, 3, 70, 8), (2, 3, 70, 5)]
    q, k, v = (tokens(*shape).transpose(1, ours.formula.heads).contiguous() for shape in shapes)
    masks = {
        name: torch.arange(queries if role == "queries" else 70).expand(2, -1) < 30
        for name, role in ours.formula.roles.items()
    }
    for given in ({}, masks):
        for fused in (False, True):
            with fused_operators(ours, fused):
                assert error(ours(q, k, v, **given), function(q, k, v, **given)) <= ROUNDING


@pytest.mark.parametrize(
    "function",
    [
        ByWeights(elu1, change=lambda weights: weights.clamp(min=1e-3)),
        ByWeights(lambda x: F.elu(x / 8) + 1),
        ByWeights(lambda x: F.elu(x) + 1.0001),
        ByWeights(elu1, change=lambda weights: weights if weights.shape[-1] < 200 else weights.square()),
        ByWeights(elu1, change=lambda weights: weights.triu()),
        ByWeights(lambda x: elu1(x.clamp(-30, 30))),
        nn.TripletMarginLoss(),
    ],
    ids=["clamped", "scaled", "offset", "another for long sequences", "anticausal", "cut off", "a loss"],
)
def test_another_function_stays(function: nn.Module) -> None:
    assert not with_our_layers(function, SEQ_LEN).replaced


def test_a_mask_of_numbers_which_may_be_weights_is_refused() -> None:
    ours, x = with_our_layers(InLoFTR(), SEQ_LEN).module, tokens(2, 7, 3, 4)
    with pytest.raises(
        Exception, match=r"called with kv_mask of torch\.float32; only boolean masks of tokens are known"
    ):
        ours(x, x, x, kv_mask=torch.ones(2, 7))


class Matcher(nn.Module):
    """Tokens of an image attend to themselves, and then to those of another image."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.attention = InLoFTR()

    def forward(self, first: Tensor, second: Tensor, first_mask: Tensor, second_mask: Tensor) -> Tensor:
        for source, mask in ((first, first_mask), (second, second_mask)):
            q, k, v = (
                linear(x).unflatten(-1, (HEADS, -1))
                for linear, x in ((self.q, first), (self.k, source), (self.v, source))
            )
            first = first + self.attention(q, k, v, first_mask, kv_mask=mask).flatten(-2)
        return first


@pytest.mark.requires("onnx", "ort")
def test_two_images_of_different_sizes_are_one_file(tmp_path: Path) -> None:
    model = Matcher().eval()
    names = ("first", "second", "first_mask", "second_mask")
    masks = [torch.arange(size).expand(2, -1) < size - 5 for size in (40, 30)]
    examples = dict(zip(names, (tokens(2, 40, DIM), tokens(2, 30, DIM), *masks), strict=True))
    axes = {name: {0: "batch", 1: "seq" if "first" in name else "others"} for name in names}
    result = effexport.export(model, examples, tmp_path / "out", dynamic=axes)
    assert result.report.verdict == "passed"
    assert result.artifact.spec.custom_ops == {"EluLinearAttention": 2}
    assert any(
        note.endswith("InLoFTR runs as effexport's linear attention: attention.") for note in result.report.notes
    )
    others = [tokens(1, 9, DIM), tokens(1, 77, DIM), torch.ones(1, 9).bool(), torch.ones(1, 77).bool()]
    with torch.no_grad(), effexport.load(result.path) as runner:
        actual = runner.run({name: value.numpy() for name, value in zip(names, others, strict=True)})
        expected = model(*others).numpy()
    assert np.abs(next(iter(actual.values())) - expected).max() <= 1e-5 * np.sqrt(np.square(expected).mean())


class Sets(nn.Module):
    """Sets an attribute of its attention, which reads it, or its method, for long sequences or for all."""

    def __init__(self, name: str, values: tuple[Any, Any], longest: int = 20) -> None:
        super().__init__()
        self.qkv, self.attention = nn.Linear(DIM, 3 * DIM), Scaled()
        self.name, self.values, self.longest = name, values, longest

    def forward(self, x: Tensor) -> Tensor:
        value = self.values[1] if x.shape[1] > self.longest else self.values[0]
        if value is not None:
            setattr(self.attention, self.name, value)
        return self.attention(*(part.unflatten(-1, (HEADS, -1)) for part in self.qkv(x).chunk(3, -1))).flatten(-2)


class Scaled(InLoFTR):
    scale = 1.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.scale * super().forward(q, k, v)


@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize(
    ("name", "values"),
    [("scale", (1.0, 2.0)), ("scale", (None, 2.0)), ("scale", (1.0, 1.0)), ("forward", (None, lambda q, k, v: 2 * v))],
    ids=["by length", "of long ones", "always", "another method"],
)
def test_a_model_that_sets_what_its_attention_reads_is_right_or_refused(
    tmp_path: Path, name: str, values: tuple[Any, Any]
) -> None:
    model = Sets(name, values).eval()
    assert "attention" in with_our_layers(model, SEQ_LEN).replaced
    result = effexport.export(model, tokens(2, 12, DIM), tmp_path / "out")
    assert result.artifact.spec.model.max_seq_len == (None if values == (1.0, 1.0) else 20)
    with torch.no_grad(), effexport.load(result.path) as runner:
        for size in (7, 20, 21, 1200)[: 4 if values == (1.0, 1.0) else 2]:
            x = tokens(1, size, DIM)
            fresh = Sets(name, values).eval()
            fresh.load_state_dict(model.state_dict())
            expected = fresh(x).numpy()
            actual = next(iter(runner.run({runner.inputs[0].name: x.numpy()}).values()))
            assert np.abs(actual - expected).max() <= 1e-5 * np.sqrt(np.square(expected).mean())
