"""Weights that are computed in every call: norms, pruning, parametrizations and adapters of low rank on the projections
of known layers, folded into ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import effexport
from effexport.models.adapters.adapter import frozen
from effexport.models.adapters.folding import detached_copy, fold_computed_weights, linear_from
from effexport.models.adapters.replace import with_our_layers
from effexport.models.user.spec_from_module import Calling, model_and_spec

pytestmark = pytest.mark.requires("torch")

DIM, TOKENS = 32, 64
# float32 rounding of the same formula; Nyström's inverse amplifies it most, measured 3e-6
ROUNDING = 2e-5
Change = Callable[[Any], nn.Module]


class LowRank(nn.Module):
    """A projection with an adapter beside it, as peft wraps them: `weight` is that of the projection alone."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.enabled = base, 2.0, True
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.5)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x)
        return result + self.lora_B(self.lora_A(self.dropout(x))) * self.scaling if self.enabled else result


class Merging(nn.Linear):
    """As loralib: a projection that takes its adapter into its weight for evaluation."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.load_state_dict(base.state_dict())
        self.delta, self.merged = nn.Parameter(torch.randn_like(base.weight) / 4), False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.merged == mode:
            self.weight.data += -self.delta.data if mode else self.delta.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result if self.merged else result + F.linear(x, self.delta)


def in_place(change: Callable[[Any], object]) -> Change:
    def changed(part: nn.Module) -> nn.Module:
        with warnings.catch_warnings():  # the older functions are deprecated
            warnings.simplefilter("ignore")
            change(part)
        return part

    return changed


def old_spectral_norm(part: nn.Linear) -> None:
    """After a step of training, as every trained model is: before, PyTorch has no estimate of the norm."""
    nn.utils.spectral_norm(part).train()(torch.randn(2, part.in_features))
    part.eval()


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1.25 * x


CHANGES: dict[str, Change] = {
    "weight_norm, old": in_place(nn.utils.weight_norm),
    "spectral_norm, old": in_place(old_spectral_norm),
    "weight_norm": in_place(parametrizations.weight_norm),
    "spectral_norm": in_place(parametrizations.spectral_norm),
    "orthogonal": in_place(parametrizations.orthogonal),
    "two parametrizations": in_place(
        lambda part: [parametrize.register_parametrization(part, "weight", Scaled()) for _ in range(2)]
    ),
    "pruning": in_place(lambda part: prune.random_unstructured(part, "weight", 0.5)),
    "pruning twice": in_place(
        lambda part: [prune.random_unstructured(part, "weight", 0.2), prune.l1_unstructured(part, "weight", 0.2)]
    ),
    "low rank": LowRank,
    "low rank, merging": Merging,
    "low rank, twice": lambda part: LowRank(LowRank(part).base_layer),
    "a hook that scales": in_place(lambda part: part.register_forward_hook(lambda one, given, result: 3 * result)),
    "a hook that looks": in_place(lambda part: part.register_forward_hook(lambda one, given, result: None)),
}


class Called(nn.Module):
    """A layer with the arguments that its package wants, from tokens alone."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.call(self.layer, hidden_states)


def nystrom() -> tuple[nn.Module, list[str]]:
    from nystrom_attention import NystromAttention

    layer = NystromAttention(DIM, dim_head=8, heads=4, num_landmarks=8)
    return Called(layer, lambda layer, x: layer(x)), ["layer.to_qkv", "layer.to_out.0"]


def reformer() -> tuple[nn.Module, list[str]]:
    from reformer_pytorch import LSHSelfAttention

    layer = LSHSelfAttention(DIM, heads=4, bucket_size=16, n_hashes=2)
    return Called(layer, lambda layer, x: layer(x)), ["layer.toqk", "layer.tov", "layer.to_out"]


def linear() -> tuple[nn.Module, list[str]]:
    from linear_attention_transformer.linear_attention_transformer import SelfAttention

    names = ["layer.to_q", "layer.to_k", "layer.to_v", "layer.to_out"]
    return Called(SelfAttention(DIM, heads=4), lambda layer, x: layer(x)), names


def aft() -> tuple[nn.Module, list[str]]:
    from aft_pytorch import AFTFull

    layer = AFTFull(max_seqlen=TOKENS, dim=DIM, hidden_dim=16)
    return Called(layer, lambda layer, x: layer(x)), ["layer.to_q", "layer.to_v", "layer.project"]


def labml() -> tuple[nn.Module, list[str]]:
    from labml_nn.transformers.aft import AFTLocal

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        return layer(query=y, key=y, value=y, mask=y.new_ones(len(y), len(y), 1, dtype=torch.bool)).transpose(0, 1)

    return Called(AFTLocal(DIM, TOKENS, 8), call), ["layer.query", "layer.output"]


def multihead() -> tuple[nn.Module, list[str]]:
    layer = nn.MultiheadAttention(DIM, 4, batch_first=True)
    return Called(layer, lambda layer, x: layer(x, x, x, need_weights=False)[0]), ["layer.out_proj"]


def encoder() -> tuple[nn.Module, list[str]]:
    layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    parts = ["layers.0.linear1", "layers.1.linear2", "layers.1.self_attn.out_proj"]
    return Called(layers, lambda layer, x: layer(x)), [f"layer.{part}" for part in parts]


def transformers_nystrom() -> tuple[nn.Module, list[str]]:
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    sizes = {"hidden_size": DIM, "num_attention_heads": 4, "num_landmarks": 8, "segment_means_seq_len": TOKENS}
    layer = NystromformerSelfAttention(NystromformerConfig(**sizes, conv_kernel_size=5))
    return Called(layer, lambda layer, x: layer(x)[0]), ["layer.query", "layer.value"]


foreign, transformers = pytest.mark.requires("foreign"), pytest.mark.requires("transformers")
LAYERS = [
    *(pytest.param(make, marks=foreign) for make in (nystrom, reformer, linear, aft, labml)),
    pytest.param(transformers_nystrom, marks=transformers),
    multihead,
    encoder,
]


def changed_model(make: Callable[[], tuple[nn.Module, list[str]]], change: Change) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, names = make()
        for name in names:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, change(model.get_submodule(name)))
    return model.eval()


def tokens(seq_len: int = TOKENS) -> Tensor:
    return torch.randn(2, seq_len, DIM, generator=torch.Generator().manual_seed(1))


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.square().mean().sqrt())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("make", LAYERS)
@torch.no_grad()
def test_a_copy_with_our_layers_answers_as_the_original(
    make: Callable[[], tuple[nn.Module, list[str]]], change: Change
) -> None:
    model = changed_model(make, change)
    kinds = {path: type(part) for path, part in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    adapted = with_our_layers(model, TOKENS)
    with frozen(model, adapted):
        assert error(adapted.module(tokens()), model(tokens())) <= ROUNDING
    assert {path: type(part) for path, part in model.named_modules()} == kinds
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@foreign
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_projections_that_stay_linear_do_not_keep_a_layer(change: Change) -> None:
    adapted = with_our_layers(changed_model(nystrom, change), TOKENS)
    assert list(adapted.replaced) == ["layer"]
    assert {*adapted.folded} == {"layer.to_qkv", "layer.to_out.0"}


@pytest.mark.parametrize("name", ["weight_norm, old", "weight_norm", "pruning"])
@torch.no_grad()
def test_weights_of_the_layer_itself_are_folded(name: str) -> None:
    layer = nn.MultiheadAttention(DIM, 4, batch_first=True).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        {
            "weight_norm, old": lambda: nn.utils.weight_norm(layer, "in_proj_weight"),
            "weight_norm": lambda: parametrizations.weight_norm(layer, "in_proj_weight"),
            "pruning": lambda: prune.random_unstructured(layer, "in_proj_weight", 0.5),
        }[name]()
    adapted = with_our_layers(Called(layer, lambda layer, x: layer(x, x, x)[0]), TOKENS)
    assert list(adapted.replaced) == ["layer"]
    assert error(adapted.module(tokens()), layer(tokens(), tokens(), tokens())[0]) <= ROUNDING


@torch.no_grad()
def test_a_weight_that_pytorch_reads_without_a_call_stays_as_it_was_when_last_computed() -> None:
    layer = nn.MultiheadAttention(DIM, 4, batch_first=True).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(layer.out_proj)
    layer.out_proj.weight_g *= 5  # as load_state_dict does: no hook runs
    adapted = with_our_layers(Called(layer, lambda layer, x: layer(x, x, x)[0]), TOKENS)
    assert error(adapted.module(tokens()), layer(tokens(), tokens(), tokens())[0]) <= ROUNDING


@torch.no_grad()
def test_a_weight_that_another_module_shares_is_folded_where_it_is_computed_only() -> None:
    plain, pruned = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
    pruned.weight = plain.weight
    prune.random_unstructured(pruned, "weight", 0.5)
    model = nn.Sequential(plain, pruned)
    copy = detached_copy(model).eval()
    assert fold_computed_weights(copy) == ["1"]
    assert torch.equal(copy(tokens()), model(tokens()))
    assert torch.equal(copy[0].weight, plain.weight)
    assert [*copy[1].state_dict()] == ["bias", "weight"]


def test_a_copy_of_a_parametrized_layer_leaves_the_original_parametrized() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(DIM, DIM)))
    copy = detached_copy(model).eval()
    fold_computed_weights(copy)
    assert type(copy[0]) is nn.Linear
    assert parametrize.is_parametrized(model[0], "weight")
    assert model(tokens()).requires_grad


class AroundAttention(nn.Module):
    """As peft wraps nn.MultiheadAttention, whose projections are not modules: every call adds to a weight of it, and
    takes it away again."""

    def __init__(self, base: nn.MultiheadAttention) -> None:
        super().__init__()
        self.base_layer, self.delta = base, torch.randn_like(base.in_proj_weight.detach()) / 4
        self.merged = self.disable_adapters = False

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.MultiheadAttention:
        self.base_layer.in_proj_weight.data += self.delta * merge
        return self.base_layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weight = self.base_layer.in_proj_weight.data
        try:
            self.base_layer.in_proj_weight.data = weight + self.delta
            return self.base_layer(*args, **kwargs)
        finally:
            self.base_layer.in_proj_weight.data = weight


@pytest.mark.parametrize("off", [False, True])
@torch.no_grad()
def test_a_known_layer_inside_one_that_changes_its_weights_is_replaced_with_these_weights(off: bool) -> None:
    layer = AroundAttention(nn.MultiheadAttention(DIM, 4, batch_first=True)).eval()
    layer.disable_adapters = off
    if off:
        layer.delta.zero_()
    model = Called(layer, multihead()[0].call)
    before = layer.base_layer.in_proj_weight.clone()
    adapted = with_our_layers(model, TOKENS)
    assert list(adapted.replaced) == ["layer.base_layer" if off else "layer"]
    assert torch.equal(layer.base_layer.in_proj_weight, before)
    if not off:
        assert error(adapted.module(tokens()), model(tokens())) <= ROUNDING


def test_a_part_that_pytorch_reads_without_a_call_is_noted() -> None:
    adapted = with_our_layers(changed_model(encoder, LowRank), TOKENS)
    assert {*adapted.kept} == {*encoder()[1]}
    assert all("reads its weight and its bias" in why for why in adapted.kept.values())


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_a_weight_that_changes_from_call_to_call_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM))
    parametrize.register_parametrization(model[0], "weight", Noise())
    assert fold_computed_weights(model.eval()) == []
    assert parametrize.is_parametrized(model[0])


class Part(nn.Module):
    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.in_features, self.formula, self.inner = DIM, formula, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self.inner(x))


@pytest.mark.parametrize(
    "formula",
    [
        lambda x: x.tanh(),
        lambda x: x.clamp(min=-100),  # only large values show it
        lambda x: x + (1e-3 * x).tanh(),
        lambda x: x + x.mean(dim=1, keepdim=True),  # mixes tokens
        lambda x: x * x.shape[1],
        lambda x: x + torch.randn_like(x),
        lambda x: x[..., None],
        lambda x: x * float("nan"),
        lambda x: x.flip(0),  # mixes samples
    ],
)
def test_a_part_that_is_not_linear_in_each_token_has_no_linear_layer(formula: Callable[[Tensor], Tensor]) -> None:
    assert linear_from(Part(formula)) is None


@pytest.mark.parametrize(
    "formula", [lambda x: x, lambda x: 3 * x + 1, lambda x: x.float().to(x.dtype), lambda x: 0 * x]
)
@torch.no_grad()
def test_a_part_that_is_linear_has_one(formula: Callable[[Tensor], Tensor]) -> None:
    part = Part(formula)
    linear = linear_from(part)
    assert linear is not None
    torch.testing.assert_close(linear(tokens()), part(tokens()))


class Switching(nn.Module):
    """Has its adapters on for some of its layers only, as a model for several tasks does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        for part in self.modules():
            if isinstance(part, LowRank):
                part.enabled = False
        result: Tensor = self.layer(x)
        return result


class Reading(Switching):
    """Reads an attribute of the layer that ours does not have."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result / self.layer.hidden_dim


class ReadingNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        in_place(nn.utils.weight_norm)(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) * self.linear.weight_g.sum()
        return result


@foreign
@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (Switching, LowRank, "layer (aft_pytorch.aft_pytorch.AFTFull) is exported as PyTorch has it: with weights as "),
        (Reading, lambda part: part, "exported as PyTorch has it: with effexport's layer in its place, mine fails on "),
    ],
)
def test_a_model_that_needs_what_replacement_takes_away_keeps_its_layer(
    kind: type[nn.Module], change: Change, reason: str
) -> None:
    model = kind(changed_model(aft, change).layer)
    user, spec = model_and_spec(model, "mine", calling=Calling(examples=tokens(30)))
    assert not user.adapted.replaced
    assert any(reason in note for note in spec.notes)
    with torch.no_grad():
        assert error(user.module(tokens(20))[0], user.original(tokens(20))[0]) <= ROUNDING


def test_a_model_that_reads_the_sources_of_its_weights_keeps_them() -> None:
    user, _ = model_and_spec(ReadingNorms(), "mine", calling=Calling(examples=tokens(30)))
    assert not user.adapted.folded
    with torch.no_grad():
        assert torch.equal(user.module(tokens(20))[0], user.original(tokens(20))[0])


@foreign
@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("weight_norm, old", "fp32"),
        ("spectral_norm, old", "fp16"),
        # all others are the same linear layers by then, see above
        *(pytest.param(name, precision, marks=pytest.mark.soak) for name in CHANGES for precision in ("fp32", "fp16")),
    ],
)
@torch.no_grad()
def test_a_layer_with_folded_projections_exports_at_a_free_length(name: str, precision: str, tmp_path: Any) -> None:
    model = changed_model(nystrom, CHANGES[name])
    result = effexport.export(model, tokens(30), tmp_path / "out", precision=precision)
    assert result.report.verdict == "passed"
    assert any("runs as effexport's nystrom attention" in note for note in result.report.notes)
    if precision == "fp32":
        with effexport.load(result.path) as runner:
            answer = runner.run({"hidden_states": tokens(41).numpy()})["output"]
        assert error(torch.from_numpy(answer), model(tokens(41))) <= ROUNDING


@pytest.mark.requires("onnx", "ort")
def test_a_model_without_known_layers_exports(tmp_path: Any) -> None:
    model = nn.Sequential(*(nn.Sequential(change(nn.Linear(DIM, DIM)), nn.GELU()) for change in CHANGES.values()))
    assert effexport.export(model, tokens(30), tmp_path / "out", precision="fp16").report.verdict == "passed"
