"""Softmax attention written out as products and a softmax becomes the operator where it is the same for every input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from slow_cases import slow_after, soak
from torch import Tensor, nn
from written_module import DIM, check_written

import effexport
from effexport.base.errors import UserError
from effexport.export import written_attention

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
HEADS = 2
NOTE = "1 attention that the code writes out as products and a softmax became effexport's softmax attention."


@dataclass
class Form:
    """A way to write attention. logits: of queries and transposed keys. hidden: of a mask [batch, keys] of 0 and 1.

    weights: of logits; mixed: of weights and values.
    """

    heads: int = HEADS
    keys: Callable[[Tensor], Tensor] = lambda k: k.transpose(-2, -1)
    logits: Callable[[Tensor, Tensor], Tensor] = lambda q, k: q @ k / math.sqrt(q.shape[-1])
    hidden: Callable[[Tensor], Tensor] | None = None
    low: float = -1e9
    weights: Callable[[Tensor], Tensor] = lambda logits: logits.softmax(-1)
    mixed: Callable[[Tensor, Tensor], Tensor] = lambda weights, v: weights @ v


class Attention(nn.Module):
    def __init__(self, form: Form, dim: int = DIM) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.qkv, self.dropout = form, nn.Linear(dim, 3 * dim), nn.Dropout()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        form = self.form
        q, k, v = self.qkv(x).chunk(3, -1)
        if form.heads:
            q, k, v = (part.unflatten(-1, (form.heads, -1)).transpose(1, 2) for part in (q, k, v))
        logits = form.logits(q, form.keys(k))
        if form.hidden is not None:
            assert mask is not None
            logits = logits.masked_fill(form.hidden(mask), form.low)
        mixed = form.mixed(self.dropout(form.weights(logits)), v)
        return mixed.transpose(1, 2).flatten(2) if form.heads else mixed


def padding(mask: Tensor) -> Tensor:
    return mask[:, None, None] == 0


def later(mask: Tensor) -> Tensor:
    return torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).triu(1)


TURNED = {
    "masked": Form(hidden=padding),
    "hidden by infinity": Form(hidden=padding, low=-math.inf),
    "without a mask": Form(),
    "keys by permute": Form(keys=lambda k: k.permute(0, 1, 3, 2)),
    "a scaled query": Form(logits=lambda q, k: (q * 0.3) @ k),
    "a factor": Form(logits=lambda q, k: 0.3 * (q @ k) * 2),
    "one head": Form(heads=0, hidden=lambda mask: mask[:, None] == 0),
    "one mask for all samples": Form(hidden=lambda mask: mask[:1, None, None] == 0),
    "torch.softmax of the fourth axis": Form(weights=lambda logits: torch.softmax(logits, 3)),
}
KEPT = {
    "a mask that hides little": Form(hidden=padding, low=-5.0),
    "a causal mask": Form(hidden=later),
    "a mask of pairs": Form(hidden=lambda mask: (mask[:, None, None] == 0) | (mask[:, None, :, None] == 0)),
    "a factor after the mask": Form(hidden=padding, weights=lambda logits: (0.1 * logits).softmax(-1)),
    "two masks": Form(hidden=padding, weights=lambda logits: logits.masked_fill(logits.isnan(), -1e9).softmax(-1)),
    "a softmax over queries": Form(weights=lambda logits: logits.softmax(-2)),
    "a softmax over heads": Form(weights=lambda logits: logits.softmax(1)),
    "positions added": Form(weights=lambda logits: (logits + torch.arange(logits.shape[-1])).softmax(-1)),
    "weights that are used again": Form(mixed=lambda weights, v: weights @ v + weights.amax(-1, keepdim=True)),
    "weights that are changed": Form(mixed=lambda weights, v: weights.square() @ v),
    "values on the left": Form(mixed=lambda weights, v: (v.transpose(-2, -1) @ weights).transpose(-2, -1)),
    "logits with a minus": Form(logits=lambda q, k: -(q @ k)),
}

CHANGED = {
    "queries that are changed later": Form(logits=lambda q, k: (q @ k, q.mul_(2))[0]),
    "values that are changed before": Form(mixed=lambda weights, v: weights @ v.mul_(2)),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which the operator does not pay, but is as right."""
    monkeypatch.setattr(written_attention, "LEAST_CHANNELS", 1)
    monkeypatch.setattr(written_attention, "LEAST_TOKENS", 1)


def check(form: Form, folder: Path, precision: str = "fp32") -> effexport.BuildResult:
    return check_written(Attention(form), folder, is_masked=form.hidden is not None, precision=precision)


@pytest.mark.parametrize("name", slow_after(4, TURNED, 6))
def test_an_attention_becomes_the_operator(tmp_path: Path, name: str) -> None:
    result = check(TURNED[name], tmp_path)
    assert result.artifact.spec.custom_ops == {"MaskedAttention": 1}
    assert NOTE in result.report.notes
    assert result.report.verdict == "passed"


@pytest.mark.parametrize("name", slow_after(4, KEPT, 7))
def test_what_the_operator_does_not_compute_stays(tmp_path: Path, name: str) -> None:
    result = check(KEPT[name], tmp_path)
    assert result.artifact.spec.custom_ops == {}


def test_a_tensor_that_is_changed_in_place_is_read_when_the_code_reads_it(tmp_path: Path) -> None:
    for name in ("queries that are changed later", "values that are changed before"):
        assert check(CHANGED[name], tmp_path / name).artifact.spec.custom_ops == {}


def test_a_mask_of_other_values_than_the_proven_ones_is_refused(tmp_path: Path) -> None:
    result = check(TURNED["masked"], tmp_path)
    assert result.artifact.spec.model.mask == "mask"
    inputs = {"x": np.ones((1, 3, DIM), np.float32), "mask": np.array([[1, 0, -1]])}
    message = "mask has values other than 0 and 1; expected 1 for tokens to keep, 0 for padding: replace -1 by one"
    with effexport.load(result.path) as runner, pytest.raises(UserError, match=message):
        runner.run(inputs)


@pytest.mark.slow
def test_half_precision(tmp_path: Path) -> None:
    assert check(TURNED["masked"], tmp_path, "fp16").artifact.spec.custom_ops == {"MaskedAttention": 1}


def test_an_unfused_build_keeps_it(tmp_path: Path) -> None:
    result = effexport.export(Attention(Form()).eval(), torch.randn(2, 12, DIM), tmp_path / "out", fused=False)
    assert result.artifact.spec.custom_ops == {}


def test_every_layer_of_a_stack(tmp_path: Path) -> None:
    stack = nn.Sequential(*(Attention(Form()) for _ in range(3))).eval()
    result = effexport.export(stack, torch.randn(2, 12, DIM), tmp_path / "out")
    assert result.artifact.spec.custom_ops == {"MaskedAttention": 3}


@pytest.mark.slow
@pytest.mark.parametrize(("seq_len", "dim", "count"), [(1023, 128, 0), *map(soak, [(1024, 128, 1), (1024, 126, 0)])])
def test_it_stays_where_the_operator_would_be_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seq_len: int, dim: int, count: int
) -> None:
    monkeypatch.undo()
    model = Attention(Form(), dim).eval()
    result = effexport.export(model, torch.randn(1, seq_len, dim), tmp_path / "out")
    assert result.artifact.spec.custom_ops == ({"MaskedAttention": 1} if count else {})
