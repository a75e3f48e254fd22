"""Linear attention over a state inside other people's models: ours computes what it computes, eager and exported."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import padding, random_states, trained_like
from comparison import relative_error
from torch import Tensor, nn

import effexport
from effexport.models.adapters.replace import with_our_layers

pytestmark = pytest.mark.requires("torch", "transformers")

# The limit of the issue. Sums of up to 1000 float32 terms in another order leave a few 1e-6 of the RMS.
CLOSE = 1e-4
LENGTHS = (1, 2, 17, 63, 64, 65, 200, 1000)
WORDS, DIM = 50, 32
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
    model = trained_like(getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**options)))
    # States that last for some 20 tokens. Of states that forget at once, an output can be nearly nothing, and the norm
    # after it enlarges roundings: transformers itself is then up to 4e-3 of the RMS away from its own float64.
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.data -= 4
    return model


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
        every = (right, left, alone, {"input_ids": right["input_ids"]})
        for given in every if seq_len < LENGTHS[-1] else every[:1]:
            expected, actual = answer(original, given), answer(adapted.module, given)
            keep = given.get("attention_mask")
            assert relative_error(actual, expected, None if keep is None else keep != 0) < CLOSE


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "experts" in name else [pytest.mark.soak]) for name in CASES]
)
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


class WithState(nn.Module):
    """A Qwen3-Next whose states are inputs and outputs: those of a gated delta layer, and the keys and values of a
    softmax layer. Without states, tokens are the first ones; with them, there is one token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        conv: Tensor | None = None,
        state: Tensor | None = None,
        key: Tensor | None = None,
        value: Tensor | None = None,
    ) -> dict[str, Tensor]:
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDynamicCache

        cache: Any = Qwen3NextDynamicCache(config=self.model.config)
        cache.conv_states[0], cache.recurrent_states[0] = conv, state
        cache.key_cache[1], cache.value_cache[1] = key, value
        hidden_states = self.model(input_ids, past_key_values=cache, use_cache=True)[0]
        return {
            "hidden_states": hidden_states,
            "next_conv": cache.conv_states[0],
            "next_state": cache.recurrent_states[0],
            "next_key": cache.key_cache[1],
            "next_value": cache.value_cache[1],
        }


STATES = ("conv", "state", "key", "value")


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
def test_a_prefill_and_its_steps_are_two_builds_of_one_module(tmp_path: Path) -> None:
    original = CASES["Qwen3-Next, dense"].make()
    module, words = WithState(original).eval(), inputs_of(2, 40)["input_ids"]
    with torch.inference_mode():
        expected, past = answer(original, {"input_ids": words}), module(words[:, :30])
    effexport.export(module, {"input_ids": words}, tmp_path / "prefill")
    step = {"input_ids": words[:, :1], **{name: past[f"next_{name}"].clone() for name in STATES}}
    free = {name: {0: "batch", 2: "past"} if name in ("key", "value") else {0: "batch"} for name in step}
    effexport.export(module, step, tmp_path / "step", dynamic=free)
    with effexport.load(tmp_path / "prefill") as prefill, effexport.load(tmp_path / "step") as one_token:
        for first in (1, 3, 33):
            results = prefill.run({"input_ids": words[:, :first].numpy()})
            found = [results["hidden_states"]]
            for i in range(first, words.shape[1]):
                states = {name: results[f"next_{name}"] for name in STATES}
                results = one_token.run({"input_ids": words[:, i : i + 1].numpy(), **states})
                found.append(results["hidden_states"])
            actual = torch.cat([torch.from_numpy(value) for value in found], dim=1)
            assert relative_error(actual, expected) < CLOSE


def test_layers_of_mamba_2_go_on_from_a_cache() -> None:
    original, words = CASES["Mamba-2"].make(), inputs_of(2, 40)["input_ids"]
    ours = with_our_layers(original, 40).module
    with torch.inference_mode():
        for first in (1, 3, 33):
            result = ours(words[:, :first], use_cache=True)
            found = [result[0]]
            for i in range(first, words.shape[1]):
                position, cache = torch.tensor([i]), result.cache_params
                result = ours(words[:, i : i + 1], cache_params=cache, use_cache=True, cache_position=position)
                found.append(result[0])
            assert relative_error(torch.cat(found, dim=1), answer(original, {"input_ids": words})) < CLOSE


def retention(**options: Any) -> Any:
    from yet_another_retnet.retnet import RetNetDecoder, RetNetDecoderLayer

    return trained_like(RetNetDecoder(RetNetDecoderLayer(DIM, 4, 48, **options), 2))


@pytest.mark.requires("foreign")
def test_retention_and_its_steps_are_the_parallel_form() -> None:
    original = retention()
    adapted = with_our_layers(original, 100)
    assert (list(adapted.replaced), adapted.kept) == (["layers.0.retention", "layers.1.retention"], {})
    with torch.inference_mode():
        for seq_len in LENGTHS:
            x = random_states(2, seq_len, DIM)
            assert relative_error(adapted.module(x), original(x)) < CLOSE
        x = random_states(2, 40, DIM)
        out, states = adapted.module.forward_chunkwise(x[:, :33], 0)
        found = [out]
        for i in range(33, 40):
            out, states = adapted.module.forward_recurrent(x[:, i], i, states)
            found.append(out[:, None])
        assert relative_error(torch.cat(found, dim=1), original(x)) < CLOSE


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.requires("foreign", "onnx", "ort")
def test_a_build_of_retention_is_proven_at_any_size(tmp_path: Path) -> None:
    original = retention(norm_first=False)
    built = effexport.export(original, {"x": random_states(2, 60, DIM)}, tmp_path / "out")
    assert (built.report.verdict, built.artifact.spec.custom_ops) == ("passed", {"LinearRecurrence": 2})
    with effexport.load(tmp_path / "out") as model:
        for seq_len in LENGTHS:
            x = random_states(3, seq_len, DIM)
            with torch.inference_mode():
                assert relative_error(torch.from_numpy(model.run({"x": x.numpy()})["output"]), original(x)) < CLOSE
