"""Modules whose layers ask for several function bodies of one operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fused_operators import FUSED
from torch import Tensor, nn

import effexport
from effexport.models import attention_from_spec
from effexport.models.attention_spec import AttentionSpec
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.lsh import LSHSpec
from effexport.models.variants.nystrom import NystromSpec

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
SMALL = {"dim": 16, "heads": 2, "seq_len": 64}


class Mixed(nn.Module):
    """One layer after the other."""

    def __init__(self, *specs: AttentionSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(attention_from_spec(spec) for spec in specs)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = hidden_states + layer(hidden_states, attention_mask)
        return hidden_states


# layers, and the number of nodes of each operator that share a body
CASES: dict[str, tuple[Callable[[], list[AttentionSpec]], dict[str, int]]] = {
    "linear": (
        lambda: [LinearSpec(**SMALL), LinearSpec(**SMALL, causal=True), LinearSpec(**SMALL)],
        {"EluLinearAttention": 2},
    ),
    "nystrom": (
        lambda: [NystromSpec(**SMALL, num_landmarks=count) for count in (8, 16)],
        # of two layers; the means of one need another body
        {op: 2 if op == "IterativePinv" or op == "SequenceConv" else count for op, count in FUSED["nystrom"].items()}
        | {"MaskedAttention": 4},
    ),
    "lsh": (
        lambda: [LSHSpec(**SMALL, chunk_length=length, num_hashes=2) for length in (8, 16)],
        {"LSHHash": 1, "LSHSort": 2, "LSHAttention": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_nodes_that_need_another_body_become_standard_operators(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    make_specs, expected = CASES[name]
    result = effexport.build(module=Mixed(*make_specs()).eval(), output=tmp_path / name)
    assert result.report.verdict == "passed"
    assert result.artifact.manifest.custom_ops == expected
    assert any("one function body serves all nodes of an operator" in note for note in result.report.notes)
