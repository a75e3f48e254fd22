"""Layers of aft-pytorch against ours: the package itself is the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from foreign_aft import DIM, FLOAT32, error, largest_file_error, trained_like
from torch import Tensor, nn

from effexport.models.adapters.adapter import NotExportableError
from effexport.models.adapters.replace import with_our_layers

pytestmark = pytest.mark.requires("foreign", "torch")

# The original makes the biases of AFTLocal in a loop over all pairs, in every call.
POSITIONS = {"AFTFull": 1050, "AFTSimple": 1050, "AFTLocal": 130}


def made(name: str, positions: int | None = None, hidden_dim: int = 48, **fields: float) -> nn.Module:
    import aft_pytorch.aft_pytorch

    made_class = getattr(aft_pytorch.aft_pytorch, name)
    return trained_like(made_class(positions or POSITIONS[name], DIM, hidden_dim, **fields))


@torch.no_grad()
def error_at(layer: nn.Module, seq_len: int, exported_for: int = 100) -> float:
    torch.manual_seed(seq_len)
    x = torch.randn(2, seq_len, DIM)
    adapted = with_our_layers(layer, exported_for)
    assert list(adapted.replaced) == [""]
    return error(adapted.module(x=x), layer(x=x))


@pytest.mark.parametrize("hidden_dim", [16, 48])
@pytest.mark.parametrize("name", POSITIONS)
def test_layers_agree_at_every_length_whether_narrower_or_wider_than_the_model(name: str, hidden_dim: int) -> None:
    layer = made(name, hidden_dim=hidden_dim)
    for seq_len in (1, 63, 100, min(1000, POSITIONS[name]), POSITIONS[name]):
        assert error_at(layer, seq_len) <= FLOAT32


@pytest.mark.parametrize("window", [0, 1, 2.5, 40, 500])
def test_windows_of_every_size_agree(window: float) -> None:
    assert error_at(made("AFTLocal", s=window), 100) <= FLOAT32


@pytest.mark.slow
def test_a_thousand_tokens_with_the_windows_default_agree() -> None:
    assert error_at(made("AFTLocal", 1000), 1000) <= FLOAT32


class Model(nn.Module):
    """A residual block around a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        visible = hidden_states * attention_mask[..., None]
        return hidden_states + self.layer(visible)


@pytest.mark.requires("onnx", "ort", "native")
@pytest.mark.parametrize(
    "name", ["AFTLocal", *(pytest.param(n, marks=pytest.mark.soak) for n in ("AFTFull", "AFTSimple"))]
)
def test_the_file_computes_what_the_original_does(name: str, tmp_path: Path) -> None:
    seq_lens = (1, 63, 100, min(1000, POSITIONS[name]))
    assert largest_file_error(Model(made(name)).eval(), seq_lens, tmp_path / "built") <= FLOAT32


def test_only_near_biases_use_the_fused_operator() -> None:
    local = with_our_layers(made("AFTLocal", s=40), 100).module
    assert local.attention.spec.window == 40
    assert local.attention.spec.operators(fused=True) == ("AFTWindowAttention",)
    assert with_our_layers(made("AFTFull"), 100).module.attention.spec.seq_len == 1050


def test_a_layer_in_float64_stays_in_float64() -> None:
    layer = made("AFTFull").double()
    x = torch.randn(1, 63, DIM, dtype=torch.float64)
    with torch.no_grad():
        assert error(with_our_layers(layer, 100).module(x), layer(x)) <= 1e-12  # rounding of float64


def test_the_original_is_left_alone() -> None:
    layer = made("AFTFull")
    adapted = with_our_layers(layer, 100).module
    with torch.no_grad():
        adapted.attention.query.weight.zero_()
        adapted.attention.position_bias.zero_()
    assert layer.to_q.weight.abs().max() > 0
    assert layer.wbias.abs().max() > 0


def test_a_layer_without_a_forward_is_refused_with_its_path() -> None:
    from aft_pytorch.aft_pytorch import AFTConv

    with pytest.raises(NotExportableError, match=r"^layer \(aft_pytorch\.aft_pytorch\.AFTConv\): .* no forward"):
        with_our_layers(Model(AFTConv()), 100)


def test_a_layer_whose_projections_compute_something_else_is_kept_as_it_is() -> None:
    class Bounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    layer = made("AFTFull")
    layer.to_q = Bounded(DIM, 48)
    adapted = with_our_layers(Model(layer), 100)
    assert list(adapted.kept) == ["layer"]
    assert "its to_q, a " in adapted.kept["layer"]
    assert "Bounded, is not a linear layer in effect" in adapted.kept["layer"]
    assert not adapted.replaced
