"""The size of a model is known from its spec: as the module has it, and fast for sizes that no machine can hold."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from effexport.models.attention_spec import AttentionSpec, attention_spec
from effexport.models.checkpoints.big_bird_spec import BigBirdSpec
from effexport.models.checkpoints.led_spec import LEDSpec
from effexport.models.checkpoints.longformer_spec import LongformerSpec
from effexport.models.checkpoints.modernbert_spec import ModernBertSpec
from effexport.models.checkpoints.nystromformer_spec import NystromformerSpec
from effexport.models.checkpoints.reformer_spec import ReformerSpec
from effexport.models.checkpoints.spec import FAMILIES, PublishedSpec
from effexport.models.contract import load
from effexport.models.encoder.module import module_from_spec
from effexport.models.encoder.spec import EncoderSpec
from effexport.models.shapes import count
from effexport.models.validation import SpecError, nearest_divisors
from effexport.models.variants import ATTENTION_SPECS

LAYERS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ATTENTION_SPECS),
    ("softmax", {"conv_kernel_size": 5, "bias": False}),
    ("nystrom", {"conv_kernel_size": None}),
    ("nystrom", {"head_dim": 3}),
    ("lsh", {"bias": True, "num_hashes": 3, "num_buckets": (4, 6)}),
    ("lsh", {"rotations_per_head": False, "buckets_by_length": True}),
    ("aft-full", {"position_bias": "full"}),
    ("aft-local", {"head_dim": 3}),
    ("aft-conv", {"kernel_size": 7, "head_dim": 3}),
    ("mamba2", {"groups": 2, "head_dim": 3, "value_dim": 5}),
]


@pytest.mark.parametrize(("variant", "options"), LAYERS)
def test_a_layer_has_the_weights_that_its_spec_names(variant: str, options: dict[str, Any]) -> None:
    spec = attention_spec(variant, {"dim": 12, "heads": 2, "seq_len": 32, **options})
    assert spec.weights() == shapes_of(module_from_spec(spec, 0))


@pytest.mark.parametrize("variant", ATTENTION_SPECS)
@pytest.mark.parametrize(
    "options",
    [{}, {"lm_head": True, "block": "post-norm"}, {"block": "reversible", "reversible_output": "concat", "ff_dim": 7}],
)
def test_an_encoder_has_the_weights_that_its_spec_names(variant: str, options: dict[str, Any]) -> None:
    spec = EncoderSpec(attention=attention_spec(variant, {"dim": 12, "heads": 2, "seq_len": 32}), **options)
    assert spec.weights() == shapes_of(module_from_spec(spec, 0))


NYSTROM: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 12, "heads": 2, "num_hidden_layers": 3, "intermediate_size": 7, "seq_len": 20,
    "max_position_embeddings": 20, "type_vocab_size": 3, "conv_kernel_size": 5, "num_labels": 4,
}  # fmt: skip
REFORMER: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 12, "heads": 2, "attention_head_size": 5, "feed_forward_size": 7, "seq_len": 16,
    "attn_layers": ("local", "lsh", "lsh"), "axial_pos_shape": (4, 4), "axial_pos_embds_dim": (8, 4), "num_hashes": 3,
}  # fmt: skip
MODERNBERT: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 12, "heads": 2, "num_hidden_layers": 3, "intermediate_size": 7, "seq_len": 20,
    "pad_token_id": 0, "global_attn_every_n_layers": 2,
}  # fmt: skip
BIG_BIRD: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 12, "heads": 2, "num_hidden_layers": 2, "intermediate_size": 7, "seq_len": 20,
    "max_position_embeddings": 90, "block_size": 4,
}  # fmt: skip
BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
LONGFORMER: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 12, "heads": 2, "num_hidden_layers": 2, "intermediate_size": 7, "seq_len": 20,
    "max_position_embeddings": 22, "attention_window": (4, 6),
}  # fmt: skip
CHECKPOINTS: list[PublishedSpec] = [
    *(NystromformerSpec(**NYSTROM, task=task) for task in NystromformerSpec.TASKS),
    NystromformerSpec(**NYSTROM, task="masked-lm", tie_word_embeddings=False),
    NystromformerSpec(**NYSTROM | {"num_landmarks": 4, "segment_means_seq_len": 8, "seq_len": 8}),
    NystromformerSpec(**NYSTROM | {"conv_kernel_size": None}),
    *(
        ReformerSpec(**REFORMER, task=task, num_labels=2, is_decoder=task == "lm-head")
        for task in ReformerSpec.TASKS
    ),
    *(LongformerSpec(**LONGFORMER, task=task) for task in LongformerSpec.TASKS),
    LongformerSpec(**LONGFORMER, pooler=False),
    LEDSpec(vocab_size=50, hidden_size=12, heads=2, num_hidden_layers=2, intermediate_size=7, seq_len=9),
    ReformerSpec(**REFORMER, axial_pos_embds=False, num_buckets=(4, 6), num_hidden_layers=2),
    *(BigBirdSpec(**BIG_BIRD, task=task) for task in BigBirdSpec.TASKS),
    BigBirdSpec(**BIG_BIRD, task="masked-lm", tie_word_embeddings=False, attention_type="original_full"),
    BigBirdSpec(**BIG_BIRD, use_bias=False, pooler=False),
    *(ModernBertSpec(**MODERNBERT, task=task) for task in ModernBertSpec.TASKS),
    ModernBertSpec(**MODERNBERT, task="masked-lm", tie_word_embeddings=False, decoder_bias=False),
    ModernBertSpec(**MODERNBERT, **dict.fromkeys(BIASES, True), task="token-classification", num_labels=4),
]  # fmt: skip


@pytest.mark.parametrize("spec", CHECKPOINTS, ids=lambda spec: spec.title)
def test_a_checkpoint_has_the_weights_that_its_spec_names(spec: PublishedSpec) -> None:
    module = load(FAMILIES[spec.family].model)(spec)
    found = shapes_of(module)
    if spec.task == "masked-lm" and getattr(spec, "tie_word_embeddings", False):
        (decoder,) = found.keys() - spec.weights().keys()
        assert found.pop(decoder) == (spec.vocab_size, spec.output_width)
    assert spec.weights() == found
    assert count(spec.weights()) == sum(tensor.numel() for tensor in {*module.parameters(), *module.buffers()})


def shapes_of(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(
    "spec",
    [
        attention_spec("lsh", {"chunk_length": 10**9, "num_buckets": 2}),
        attention_spec("nystrom", {"num_landmarks": 10**9}),
        attention_spec("aft-conv", {"kernel_size": 10**9 + 1}),
        attention_spec("linear", {"dim": 10**9, "heads": 1}),
        EncoderSpec(attention=attention_spec("softmax"), vocab_size=10**9, layers=10_000),
        NystromformerSpec(vocab_size=10**9, num_hidden_layers=10_000, seq_len=1),
        ReformerSpec(feed_forward_size=10**9, attn_layers=("lsh", "local") * 5_000, seq_len=1),
        ReformerSpec(lsh_chunk_length=10**9, seq_len=1),
    ],
    ids=lambda spec: spec.title,
)
def test_the_size_of_a_huge_model_is_found_at_once(spec: AttentionSpec | EncoderSpec | PublishedSpec) -> None:
    start = time.process_time()
    assert count(spec.weights()) + spec.least_elements(batch=1, seq_len=1) > 10**9
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EncoderSpec(attention=attention_spec("lsh"), layers=10**9), "layers is 1000000000; expected at most"),
        (lambda: NystromformerSpec(num_hidden_layers=10**9, seq_len=1), "num_hidden_layers is 1000000000; expected at"),
        (lambda: ReformerSpec(attn_layers=("lsh",), num_hidden_layers=10**9, seq_len=1), "num_hidden_layers is 10"),
        (lambda: ReformerSpec(attn_layers=("lsh",) * 20_000, seq_len=1), "attn_layers is a list of 20000"),
        (lambda: NystromformerSpec(hidden_size=10**9 - 1, heads=2, seq_len=1), "hidden_size .* cannot be split"),
        (lambda: NystromformerSpec(intermediate_size=2**31, seq_len=1), "intermediate_size is 2147483648; expected at"),
        (lambda: NystromformerSpec(layer_norm_eps=10**5000, seq_len=1), "layer_norm_eps is an integer of thousands"),
        (lambda: ReformerSpec(axial_pos_shape=(2**31, 2), seq_len=1), "axial_pos_shape is 2147483648; expected at"),
        (lambda: ReformerSpec(axial_pos_shape=(1,) * 10**6, seq_len=1), "axial_pos_shape is a list of 1000000"),
        (lambda: ReformerSpec(num_buckets=(2,) * 10**6, seq_len=1), "num_buckets is a list of 1000000"),
        (lambda: attention_spec("softmax", {"dim": 10**5000}), "dim is an integer of thousands of digits; expected at"),
        (lambda: attention_spec("lsh", {"num_hashes": 10**9}), "num_hashes is 1000000000; expected at most 1000"),
        (lambda: attention_spec("nystrom", {"pinv_iterations": 10**9}), "pinv_iterations is 1000000000; expected at"),
        (lambda: attention_spec("lsh", {"hash_seed": 2**63}), "hash_seed is 9223372036854775808; expected at most"),
        (lambda: attention_spec("linear", {"dim": 2**31 - 2, "heads": 2**30}), "cannot be split into .* heads"),
    ],
)
def test_sizes_that_cannot_be_meant_are_refused_at_once(make: Any, message: str) -> None:
    start = time.process_time()
    with pytest.raises(SpecError, match=message) as failure:
        make()
    assert time.process_time() - start < 1
    assert len(str(failure.value)) < 400


def test_the_nearest_divisors_are_found() -> None:
    assert nearest_divisors(5, 12) == "4 or 6"
    assert nearest_divisors(5, 7) == "1 or 7"
    assert nearest_divisors(9, 9) == "9"
    assert nearest_divisors(3, 2**31 - 1) == "1 or 2147483647"
