"""Linear attention over a state inside other people's models: ours computes what it computes, eager and exported."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import exported, padding, relative_error, trained_like
from torch import Tensor, nn

import effexport
from effexport.models.adapters.replace import with_our_layers

pytestmark = pytest.mark.requires("torch", "transformers")

# The limit of the issue. Sums of up to 1000 float32 terms in another order leave a few 1e-6 of the RMS.
CLOSE = 1e-4
LENGTHS = (1, 2, 17, 63, 64, 65, 200, 1000)
WORDS, DIM, BATCH = 50, 32, {0: "batch", 1: "seq"}
QWEN: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": DIM,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "mlp_only_layers": [0, 1],
    "use_cache": False,
}
MAMBA: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": DIM,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 12,
    "n_groups": 2,
    "chunk_size": 32,
    "time_step_limit": (0.3, 2.0),
    "use_cache": False,
}


def of_transformers(kind: str, **options: Any) -> Any:
    import transformers

    name = kind.partition("Model")[0].partition("For")[0]
    return trained_like(getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**options)))


@dataclass(frozen=True)
class Case:
    """A model. replaced: by class. operators: nodes of LinearRecurrence."""

    make: Callable[[], Any]
    replaced: tuple[str, ...]
    operators: int


def case(kind: str, *replaced: str, operators: int, **options: Any) -> Case:
    return Case(functools.partial(of_transformers, kind, **options), replaced, operators)


CASES = {
    "Qwen3-Next, dense": case("Qwen3NextModel", "Qwen3NextModel", "Qwen3NextGatedDeltaNet", operators=1, **QWEN),
    "Qwen3-Next, experts": case(
        "Qwen3NextForCausalLM",
        *("Qwen3NextModel", "Qwen3NextGatedDeltaNet", "Qwen3NextSparseMoeBlock"),
        operators=2,
        **QWEN | {"layer_types": ["linear_attention"] * 2, "mlp_only_layers": [0]},
    ),
    "Mamba-2": case("Mamba2Model", "Mamba2Mixer", operators=2, **MAMBA),
}


def inputs_of(batch: int, seq_len: int, *, left: bool = False) -> dict[str, Tensor]:
    """Words, padded in all samples but the first, at the end or at the beginning."""
    keep = ~padding(batch, seq_len)
    keep = keep.flip(1) if left else keep
    words = torch.randint(1, WORDS, (batch, seq_len), generator=torch.Generator().manual_seed(seq_len))
    return {"input_ids": words, "attention_mask": keep.long()}


def answer(model: nn.Module, given: Mapping[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(**given)[0]
    return result


@pytest.mark.parametrize("name", CASES)
def test_models_with_our_layers_answer_as_the_originals(name: str) -> None:
    original = CASES[name].make()
    adapted = with_our_layers(original, 100)
    assert not adapted.kept
    replaced = {type(original.get_submodule(path)).__name__ for path in adapted.replaced}
    assert replaced == set(CASES[name].replaced)
    for seq_len in LENGTHS:
        right, left = inputs_of(3, seq_len), inputs_of(3, seq_len, left=True)
        # in a batch of one, the originals do not look at padding before the first token
        alone = {key: value[-1:] for key, value in left.items()}
        for given in (right, left, alone, {"input_ids": right["input_ids"]}):
            expected, actual = answer(original, given), answer(adapted.module, given)
            keep = given.get("attention_mask")
            assert relative_error(actual, expected, None if keep is None else keep != 0) < CLOSE


class FirstOutput(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        result: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        return result


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize("name", CASES)
def test_builds_are_proven_at_any_size(name: str, tmp_path: Path) -> None:
    original = CASES[name].make()
    built = effexport.export(original, inputs_of(2, 60), tmp_path / "out")
    assert built.report.verdict == "passed"
    assert built.artifact.spec.custom_ops["LinearRecurrence"] == CASES[name].operators
    assert built.artifact.spec.inputs[0].dims == ("batch", "seq")
    with effexport.load(tmp_path / "out") as model:
        for seq_len in LENGTHS:
            for given in (inputs_of(3, seq_len), inputs_of(1, seq_len)):
                outputs = model.run({key: value.numpy() for key, value in given.items()})
                expected = answer(original, given)
                actual = torch.from_numpy(next(iter(outputs.values())))
                assert relative_error(actual, expected, given["attention_mask"] != 0) < CLOSE
