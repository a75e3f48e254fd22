"""Layers of transformers in a user's model: ours compute what they compute, eager and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import exported, padding, random_states, trained_like
from comparison import relative_error
from torch import Tensor, nn

import effexport
from effexport.models.adapters.adapter import Adapted, DrawsNumbers, frozen
from effexport.models.adapters.replace import with_our_layers
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch", "transformers")

DIM, HEADS, CHUNK = 32, 4, 16
BATCH = {0: "batch", 1: "seq"}
# Sums of up to 1000 float32 terms in another order: a few 1e-6 of the RMS.
CLOSE = 2e-5
# Six steps towards a pseudo-inverse amplify rounding by the condition number of a matrix of softmax rows.
CLOSE_NYSTROM = 1e-4


def nystrom_config(**options: Any) -> Any:
    from transformers import NystromformerConfig

    sizes = {"hidden_size": DIM, "num_attention_heads": HEADS, "intermediate_size": 2 * DIM}
    lengths = {"num_landmarks": 8, "segment_means_seq_len": 64, "conv_kernel_size": 5}
    config = NystromformerConfig(**sizes)
    vars(config).update(lengths | options)  # release 5 refuses None in its constructor
    return config


def reformer_config(**options: Any) -> Any:
    from transformers import ReformerConfig

    sizes = {"hidden_size": DIM, "num_attention_heads": HEADS, "attention_head_size": 8, "is_decoder": False}
    chunks = {"lsh_attn_chunk_length": CHUNK, "local_attn_chunk_length": CHUNK, "axial_pos_embds": False}
    return ReformerConfig(**(sizes | chunks | options))


def additive(keep: Tensor) -> Tensor:
    """As `get_extended_attention_mask` of transformers makes it."""
    return (1.0 - keep[:, None, None, :].float()) * torch.finfo(torch.float32).min


class NystromClassifier(nn.Module):
    """A user's own model with a layer of transformers' Nyströmformer inside."""

    def __init__(self, **options: Any) -> None:
        from transformers.models.nystromformer.modeling_nystromformer import NystromformerLayer

        super().__init__()
        self.layer = NystromformerLayer(nystrom_config(**options))
        self.head = nn.Linear(DIM, 5)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.layer(hidden_states, additive(attention_mask != 0))[0])


class ReformerClassifier(nn.Module):
    """A user's own model with an attention block of transformers' Reformer inside."""

    def __init__(self, kind: str, **options: Any) -> None:
        from transformers.models.reformer.modeling_reformer import ReformerAttention

        super().__init__()
        self.block = ReformerAttention(reformer_config(attn_layers=[kind], **options), layer_id=0)
        self.head = nn.Linear(DIM, 5)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        attended = self.block(hidden_states=hidden_states, attention_mask=attention_mask)
        return self.head(hidden_states + attended.hidden_states)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"conv_kernel_size": None}, {"num_landmarks": 32}, {"num_landmarks": 64, "conv_kernel_size": None}]
)
def test_nystromformer_layers_compute_the_same(options: dict[str, Any], padded: bool) -> None:
    original = trained_like(NystromClassifier(**options))
    adapted = with_our_layers(original, 100)
    assert list(adapted.replaced) == ["layer.attention.self"]
    x = random_states(3, 64, DIM)
    keep = ~padding(3, 64) if padded else torch.ones(3, 64, dtype=torch.bool)
    with torch.inference_mode():
        expected, actual = original(x, keep), adapted.module(x, keep)
    assert relative_error(actual, expected) < CLOSE_NYSTROM


@pytest.mark.parametrize("seq_len", [1, 63, 100, 1000])
def test_as_many_landmarks_as_tokens_are_softmax_attention_of_any_length(seq_len: int) -> None:
    original = trained_like(NystromClassifier(num_landmarks=64))
    ours = with_our_layers(original, 100).module
    x, keep = random_states(3, seq_len, DIM), ~padding(3, seq_len)
    with torch.inference_mode():
        assert relative_error(ours(x, keep), original(x, keep)) < CLOSE


def test_a_nystromformer_layer_without_a_mask() -> None:
    original = trained_like(NystromClassifier().layer.attention)
    ours = with_our_layers(original, 64).module
    x = random_states(2, 64, DIM)
    with torch.inference_mode():
        assert relative_error(ours(x)[0], original(x)[0]) < CLOSE_NYSTROM


def test_options_that_no_spec_has_keep_a_nystromformer_layer() -> None:
    adapted = with_our_layers(NystromClassifier(conv_kernel_size=4), 64)
    assert "conv_kernel_size" in adapted.kept["layer.attention.self"]


def test_other_masks_and_results_are_errors() -> None:
    ours = with_our_layers(NystromClassifier(), 64).module.layer.attention.self
    x = random_states(2, 64, DIM)
    with pytest.raises(SpecError, match=r"\[2, 64\]; expected \[batch, 1, 1, seq\]"):
        ours(x, torch.zeros(2, 64))
    with pytest.raises(SpecError, match="got output_attentions"):
        ours(x, output_attentions=True)


def answers(original: nn.Module, adapted: Adapted, *inputs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    with torch.inference_mode(), frozen(original, adapted) as buckets:
        expected = original(*inputs)
        return expected, adapted.module(*inputs), buckets


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 0), (1, 1), (0, 0)])
@pytest.mark.parametrize("kind", ["local", "lsh"])
def test_reformer_layers_compute_the_same(kind: str, before: int, after: int, is_decoder: bool) -> None:
    if is_decoder:
        after = 0
    around = {f"{kind}_num_chunks_before": before, f"{kind}_num_chunks_after": after}
    original = trained_like(ReformerClassifier(kind, is_decoder=is_decoder, num_hashes=2, **around))
    adapted = with_our_layers(original, 100)
    assert list(adapted.replaced) == ["block.self_attention"]
    # the original takes whole chunks, or less than one
    for seq_len in (1, 5, 16, 112, 1008):
        for keep in (torch.ones(3, seq_len, dtype=torch.bool), ~padding(3, seq_len)):
            expected, actual, buckets = answers(original, adapted, random_states(3, seq_len, DIM), keep)
            assert relative_error(actual, expected, keep) < CLOSE
            assert list(buckets) == ["block.self_attention.attention.hash"] * (kind == "lsh")


@pytest.mark.parametrize(
    "options",
    [
        {"num_hashes": 1},
        {"num_hashes": 4, "num_buckets": 8},
        {"num_buckets": [4, 8]},
        {"hash_seed": 5, "num_hashes": 2},
    ],
)
def test_hashes_of_reformer_choose_the_same_buckets(options: dict[str, Any]) -> None:
    original = trained_like(ReformerClassifier("lsh", **options))
    adapted = with_our_layers(original, 112)
    ours = adapted.replaced["block.self_attention"]
    assert isinstance(ours, DrawsNumbers)
    for seq_len in (16, 112):
        x, keep = random_states(3, seq_len, DIM), ~padding(3, seq_len)
        expected, actual, buckets = answers(original, adapted, x, keep)
        assert relative_error(actual, expected, keep) < CLOSE
        normed = original.block.layer_norm(x)
        chosen = ours.attention.hash(ours.attention.project(normed)[0], keep)
        assert torch.equal(buckets["block.self_attention.attention.hash"], chosen)


def test_a_hash_seed_gives_the_rotations_of_the_original_without_freezing() -> None:
    original = trained_like(ReformerClassifier("lsh", hash_seed=7, num_buckets=8, num_hashes=2))
    ours = with_our_layers(original, 112).module
    x, keep = random_states(2, 112, DIM), ~padding(2, 112)
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        assert relative_error(ours(x, keep), original(x, keep), keep) < CLOSE


def test_freezing_leaves_the_original_and_the_generator_as_they_were() -> None:
    original = trained_like(ReformerClassifier("lsh", hash_seed=7))
    adapted, state = with_our_layers(original, 112), torch.random.get_rng_state()
    answers(original, adapted, random_states(2, 112, DIM), torch.ones(2, 112))
    layer = original.block.self_attention
    assert (layer.hash_seed, layer.num_buckets) == (7, None)
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks
    assert torch.equal(torch.random.get_rng_state(), state)


def test_lengths_at_which_rounds_overlap_are_not_compared() -> None:
    original = trained_like(ReformerClassifier("lsh", num_hashes=2, num_buckets=8))
    x, keep = random_states(2, 40, DIM), torch.ones(2, 40)
    original(x, keep)  # 80 sorted tokens are 5 chunks
    with pytest.raises(SpecError, match="40 tokens are not whole chunks of 16"):
        answers(original, with_our_layers(original, 112), x, keep)


def test_a_copy_in_float64_uses_the_same_rotations() -> None:
    original = trained_like(ReformerClassifier("lsh", num_hashes=2))
    adapted = with_our_layers(original, 112)
    x, keep = random_states(2, 112, DIM), ~padding(2, 112)
    expected, _, _ = answers(original, adapted, x, keep)
    with torch.inference_mode(), frozen(original.double(), adapted) as buckets:
        exact = original(x.double(), keep)
    assert exact.dtype == torch.float64
    assert buckets
    # float32 rounding
    assert relative_error(expected, exact.float(), keep) < CLOSE


def test_arguments_of_the_cache_are_errors() -> None:
    ours = with_our_layers(ReformerClassifier("lsh"), 64).module.block.self_attention
    with pytest.raises(SpecError, match="got num_hashes"):
        ours(random_states(1, 16, DIM), num_hashes=3)


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize("kind", ["lsh", pytest.param("local", marks=pytest.mark.soak)])
def test_an_exported_reformer_layer_computes_the_same(kind: str, tmp_path: Path) -> None:
    original = trained_like(ReformerClassifier(kind, num_hashes=2))
    adapted = with_our_layers(original, 112)
    example = {"hidden_states": random_states(2, 48, DIM), "attention_mask": torch.ones(2, 48)}
    run, counts = exported(adapted.module, example, dict.fromkeys(example, BATCH), tmp_path / "model.onnx")
    assert counts == ({"LSHHash": 1, "LSHSort": 1, "LSHAttention": 1} if kind == "lsh" else {})
    for seq_len in (1, 16, 112, 1008):
        x, keep = random_states(3, seq_len, DIM), ~padding(3, seq_len)
        expected, _, _ = answers(original, adapted, x, keep)
        assert relative_error(run(hidden_states=x, attention_mask=keep.float())[0], expected, keep) < CLOSE


@pytest.mark.slow
@pytest.mark.requires("onnx", "ort")
def test_a_build_proves_a_classifier_with_a_nystromformer_layer(tmp_path: Path) -> None:
    original = trained_like(NystromClassifier())
    result = effexport.build(module=original, output=tmp_path / "out")
    assert result.report.verdict == "passed"
    x, keep = random_states(3, 64, DIM), ~padding(3, 64)
    with effexport.load(tmp_path / "out") as model:
        outputs = model.run({"hidden_states": x.numpy(), "attention_mask": keep.long().numpy()})
    with torch.inference_mode():
        expected = original(x, keep)
    assert relative_error(torch.from_numpy(next(iter(outputs.values()))), expected) < CLOSE_NYSTROM
