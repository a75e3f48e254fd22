"""labml's AFTLocal against ours: the package itself is the reference. It needs a mask, the same for all samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_aft import DIM, FLOAT32, error, largest_file_error, trained_like
from torch import Tensor, nn

from effexport.models.adapters.replace import with_our_layers
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("foreign", "torch")

POSITIONS = 1010


def made(window: int = 12, positions: int = POSITIONS, bias: bool = True) -> nn.Module:
    from labml_nn.transformers.aft import AFTLocal

    return trained_like(AFTLocal(DIM, positions, window, bias))


def masks(seq_len: int) -> dict[str, Tensor]:
    """By name: boolean [queries or 1, keys, 1]; every query sees a key, without which the original has NaN."""
    padding = torch.rand(1, seq_len, 1) > 0.3
    padding[:, 0] = True
    pairs = torch.rand(seq_len, seq_len, 1) > 0.5
    pairs[:, 0] = True
    causal = torch.ones(seq_len, seq_len, dtype=torch.bool).tril().unsqueeze(-1)
    everything = torch.ones(1, seq_len, 1, dtype=torch.bool)
    return {"everything": everything, "padding": padding, "causal": causal, "both": causal & padding, "pairs": pairs}


def tokens(batch: int, seq_len: int) -> dict[str, Tensor]:
    """Different query, key and value, [seq, batch, dim]."""
    return {name: torch.randn(seq_len, batch, DIM) for name in ("query", "key", "value")}


@pytest.mark.parametrize("mask", ["everything", "padding", "causal", "both", "pairs"])
@pytest.mark.parametrize("window", [0, 1, 12, 200])
def test_all_masks_and_windows_agree_at_every_length(window: int, mask: str) -> None:
    torch.manual_seed(window)
    layer = made(window)
    adapted = with_our_layers(layer, 100)
    assert list(adapted.replaced) == [""]
    with torch.no_grad():
        for seq_len in (1, 63, 100, 1000):
            given = tokens(2, seq_len) | {"mask": masks(seq_len)[mask]}
            assert error(adapted.module(**given), layer(**given)) <= FLOAT32


def test_projections_without_a_bias_agree() -> None:
    layer, given = made(bias=False), tokens(2, 63) | {"mask": masks(63)["causal"]}
    with torch.no_grad():
        assert error(with_our_layers(layer, 100).module(**given), layer(**given)) <= FLOAT32


@pytest.mark.parametrize("queries", [1, 63])
def test_a_mask_of_its_own_for_each_sample_is_what_the_original_computes_for_one(queries: int) -> None:
    torch.manual_seed(0)
    layer, given = made(), tokens(3, 63)
    mask = torch.rand(queries, 63, 3) > 0.5
    mask[:, 0] = True
    with torch.no_grad():
        together = with_our_layers(layer, 100).module(**given, mask=mask)
        for i in range(3):
            one = {name: x[:, i : i + 1] for name, x in given.items()}
            assert error(together[:, i : i + 1], layer(**one, mask=mask[..., i : i + 1])) <= FLOAT32


def test_a_local_mask_from_a_checkpoint_counts_and_not_the_window() -> None:
    layer, given = made(window=12), tokens(2, 63) | {"mask": masks(63)["everything"]}
    state = layer.state_dict()
    state["local_mask"] = torch.rand(POSITIONS, POSITIONS) > 0.5
    layer.load_state_dict(state)
    with torch.no_grad():
        assert error(with_our_layers(layer, 100).module(**given), layer(**given)) <= FLOAT32


def test_no_mask_is_a_mask_that_hides_nothing() -> None:
    layer, given = made(), tokens(2, 63)
    with torch.no_grad():
        ours = with_our_layers(layer, 100).module(**given)
        assert error(ours, layer(**given, mask=masks(63)["everything"])) <= FLOAT32


def test_hidden_tokens_may_hold_anything_and_a_query_without_keys_stays_finite() -> None:
    torch.manual_seed(0)
    layer, given, mask = made(), tokens(1, 63), masks(63)["pairs"]
    mask[5] = False
    mask[:, 40:] = False
    broken = {name: torch.where(torch.arange(63)[:, None, None] < 40, x, torch.nan) for name, x in given.items()}
    broken["query"] = given["query"]
    seen = torch.arange(63) != 5
    with torch.no_grad():
        ours = with_our_layers(layer, 100).module(**broken, mask=mask)
        assert ours.isfinite().all()
        assert error(ours[seen], layer(**given, mask=mask)[seen]) <= FLOAT32


class Model(nn.Module):
    """A residual block around a layer, with batches first."""

    def __init__(self, layer: nn.Module, causal: bool) -> None:
        super().__init__()
        self.layer, self.causal = layer, causal

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        x = hidden_states.transpose(0, 1)
        mask = (attention_mask != 0).T.unsqueeze(0)
        if self.causal:
            length = x.shape[0]
            mask = mask & torch.ones(length, length, dtype=torch.bool, device=x.device).tril().unsqueeze(-1)
        return (x + self.layer(query=x, key=x, value=x, mask=mask)).transpose(0, 1)


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort", "native")
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_the_file_computes_what_the_original_does_and_no_more_tokens(causal: bool, tmp_path: Path) -> None:
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

    model = Model(made(), causal).eval()
    assert largest_file_error(model, (1, 63, 100, 1000, POSITIONS), tmp_path / "built") <= FLOAT32
    session = onnxruntime.InferenceSession(tmp_path / "built" / "model.onnx", providers=["CPUExecutionProvider"])
    longer = {
        "hidden_states": np.zeros((1, POSITIONS + 1, DIM), np.float32),
        "attention_mask": np.ones((1, POSITIONS + 1), np.int64),
    }
    with pytest.raises((Fail, InvalidArgument, RuntimeException)):
        session.run(None, longer)


def test_more_tokens_than_learned_positions_are_refused() -> None:
    with pytest.raises(SpecError, match="has 65 tokens, but aft-full has learned position biases for 64"):
        with_our_layers(made(positions=64), 64).module(**tokens(1, 65))


def test_layers_that_ours_cannot_stand_for_are_kept_as_they_are() -> None:
    other = made()
    other.activation = nn.Tanh()
    model = nn.ModuleDict({"other": other, "single": made(positions=1)})
    assert with_our_layers(model, 100).kept == {
        "other": "its activation is Tanh, not Sigmoid",
        "single": "it has learned a bias for a single position",
    }
