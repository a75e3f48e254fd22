"""Random configurations of all checkpoint families, and the published ones: exported files against transformers."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow_after
from small_builds import module_from_path
from torch import nn
from transformers_models import inputs, same_rotations, saved, worst_error

from effexport.base.spec import BuildSpec, build_spec_from_checkpoint
from effexport.export.onnx_from_module import onnx_from_module
from effexport.export.onnx_graph import operators_of_model
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import limits_from_spec

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "transformers")
# The limit that docs/checkpoints.md states.
LIMIT = 1e-4
SEEDS = slow_after(1, range(40), soak_after=1)


# The configurations of transformers 4.57.1's own model testers.
REFORMER_TESTER: dict[str, Any] = {
    "vocab_size": 32,
    "attention_head_size": 16,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "local_attn_chunk_length": 4,
    "local_num_chunks_before": 1,
    "local_num_chunks_after": 0,
    "num_buckets": None,
    "num_hashes": 1,
    "lsh_attn_chunk_length": None,
    "lsh_num_chunks_before": None,
    "lsh_num_chunks_after": None,
    "feed_forward_size": 32,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "axial_pos_embds": True,
    "axial_pos_shape": [4, 8],
    "axial_pos_embds_dim": [16, 16],
    "attn_layers": ["local", "local"],
    "num_hidden_layers": 2,
    "is_decoder": True,
    "hash_seed": 0,
}
NYSTROM_TESTER: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 16,
    "segment_means_seq_len": 64,
    "num_landmarks": 64,
}
LONGFORMER_TESTER: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 16,
    "attention_window": 4,
}
REFORMER_LSH_TESTER: dict[str, Any] = {
    "hidden_size": 64,
    "num_buckets": 2,
    "num_hashes": 4,
    "lsh_attn_chunk_length": 4,
    "lsh_num_chunks_before": 1,
    "lsh_num_chunks_after": 0,
    "hidden_act": "relu",
    "axial_pos_embds_dim": [16, 48],
    "attn_layers": ["lsh"],
    "num_hidden_layers": 1,
}
MODERNBERT_TESTER: dict[str, Any] = {
    "vocab_size": 99,
    "pad_token_id": 0,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "hidden_activation": "gelu",
    "max_position_embeddings": 512,
}
BIG_BIRD_TESTER: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 256,
    "type_vocab_size": 16,
    "attention_type": "block_sparse",
    "use_bias": True,
    "rescale_embeddings": False,
    "block_size": 8,
    "num_random_blocks": 3,
}
REFORMER_HEADS = {
    "ReformerModel": {},
    "ReformerModelWithLMHead": {},
    "ReformerForMaskedLM": {"is_decoder": False},
    "ReformerForSequenceClassification": {},
    "ReformerForQuestionAnswering": {},
}
TESTERS = [
    *(
        pytest.param(kind, layers | head, marks=pytest.mark.soak)
        for layers in ({}, REFORMER_LSH_TESTER)
        for kind, head in REFORMER_HEADS.items()
    ),
    # as create_and_check_reformer_model_with_attn_mask and get_pipeline_config change them
    pytest.param("ReformerModel", {"axial_pos_embds": False, "is_decoder": False}, marks=pytest.mark.soak),
    pytest.param("ReformerModel", {"max_position_embeddings": 100, "axial_pos_shape": [4, 25]}, marks=pytest.mark.soak),
    *(
        pytest.param(f"Nystromformer{kind}", {"num_labels": 3} if "Class" in kind else {}, marks=pytest.mark.soak)
        for kind in (
            "Model",
            "ForMaskedLM",
            "ForQuestionAnswering",
            "ForSequenceClassification",
            "ForTokenClassification",
        )
    ),
    *(
        pytest.param(f"{family}{kind}", {}, marks=pytest.mark.soak)
        for family in ("ModernBert", "BigBird")
        for kind in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    ),
    *(
        pytest.param(f"Longformer{kind}", {}, marks=pytest.mark.soak)
        for kind in (
            "Model",
            "ForMaskedLM",
            "ForQuestionAnswering",
            "ForSequenceClassification",
            "ForTokenClassification",
        )
    ),
]


def exported(folder: Path, seq_len: int | None = None) -> tuple[BuildSpec, nn.Module, Path]:
    spec, _ = build_spec_from_checkpoint({"seq_len": seq_len}, folder)
    module = module_from_path(spec, folder)
    onnx_from_module(module, spec, folder / "model.onnx")
    return spec, module, folder / "model.onnx"


def random_nystromformer(seed: int) -> tuple[str, dict[str, Any]]:
    draw = random.Random(seed)
    heads, landmarks = draw.choice([1, 2, 4]), draw.choice([4, 8])
    config = {
        "vocab_size": 60,
        "hidden_size": 8 * heads * draw.choice([1, 2]),
        "num_hidden_layers": draw.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "intermediate_size": draw.choice([16, 40]),
        "hidden_act": draw.choice(["gelu_new", "gelu", "relu"]),
        "max_position_embeddings": 70,
        "segment_means_seq_len": landmarks * draw.choice([1, 2, 6, 8]),
        "num_landmarks": landmarks,
        "conv_kernel_size": draw.choice([None, 3, 9]),
    }
    kind = draw.choice(["Model", "ForMaskedLM", "ForTokenClassification", "ForSequenceClassification"])
    return f"Nystromformer{kind}", config


def random_reformer(seed: int) -> tuple[str, dict[str, Any]]:
    draw = random.Random(seed)
    decoder = draw.random() < 0.5
    chunk = draw.choice([4, 8])
    axial = draw.random() < 0.6
    config = {
        "vocab_size": 60,
        "hidden_size": 16,
        "num_attention_heads": draw.choice([1, 2]),
        "attention_head_size": draw.choice([8, 16]),
        "feed_forward_size": 32,
        "attn_layers": [draw.choice(["lsh", "local"]) for _ in range(draw.choice([1, 2]))],
        "lsh_attn_chunk_length": chunk,
        "local_attn_chunk_length": draw.choice([chunk, 2 * chunk]),
        "lsh_num_chunks_after": 0 if decoder else draw.choice([0, 1]),
        "local_num_chunks_after": 0 if decoder else draw.choice([0, 1]),
        "num_buckets": draw.choice([4, 8, [4, 4], None]),
        "num_hashes": draw.choice([1, 2, 3, 8]),
        "axial_pos_embds": axial,
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [4, 12],
        "max_position_embeddings": 128,
        "is_decoder": decoder,
    }
    return "ReformerModelWithLMHead" if decoder else draw.choice(["ReformerModel", "ReformerForMaskedLM"]), config


def random_longformer(seed: int) -> tuple[str, dict[str, Any]]:
    draw = random.Random(seed)
    heads, layers, one = draw.choice([1, 2, 4]), draw.choice([1, 2, 3]), draw.choice([4, 8, 32])
    config = {
        "vocab_size": 60,
        "hidden_size": 8 * heads * draw.choice([1, 2]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": draw.choice([16, 40]),
        "hidden_act": draw.choice(["gelu_new", "gelu", "relu"]),
        "max_position_embeddings": draw.choice([202, 402]),
        "attention_window": draw.choice([one, [draw.choice([one, 2 * one]) for _ in range(layers)]]),
        "type_vocab_size": draw.choice([1, 2]),
    }
    kind = draw.choice(["Model", "ForMaskedLM", "ForTokenClassification", "ForSequenceClassification"])
    return f"Longformer{kind}", config


def check_longformer(folder: Path, kind: str, config: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """With global tokens, others in each row, and with none or those of the task."""
    model = saved(folder, kind, config)
    spec, _, path = exported(folder)
    assert operators_of_model(path) == spec.custom_ops
    # at other lengths, transformers pads too little for layers with different windows
    windows = config["attention_window"]
    step = max(windows) if isinstance(windows, list) and len(set(windows)) > 1 else 1
    generator = torch.Generator().manual_seed(0)
    with OrtRunner(path, limits=limits_from_spec(spec)) as runner:
        for seq_len, (batch, padded) in zip(lengths, ((1, False), (4, True), (4, False)), strict=True):
            seq_len = max(seq_len // step, 1) * step
            ids, mask = inputs(batch, seq_len, 1, padded=padded)
            marks = (torch.rand(ids.shape, generator=generator) < 0.1).long()
            marks[:, 0] = 1
            if kind == "LongformerForQuestionAnswering":
                ids[:, [seq_len // 3, seq_len // 3 + 1, seq_len - 1]] = 2
                mask[:] = 1
            for given in ({}, {"global_attention_mask": marks}):
                with torch.no_grad():
                    expected = model(input_ids=ids, attention_mask=mask, **given)
                arrays = {name: value.numpy() for name, value in given.items()}
                found = runner.run({"input_ids": ids.numpy(), "attention_mask": mask.numpy(), **arrays})
                for name, output in found.items():
                    assert worst_error(output, expected[name], mask) <= LIMIT, (batch, seq_len, name, list(given))


def check_nystromformer(folder: Path, kind: str, config: dict[str, Any], lengths: tuple[int, ...]) -> None:
    model = saved(folder, kind, config)
    spec, _, path = exported(folder)
    segment = config["segment_means_seq_len"] if "IterativePinv" in spec.custom_ops else 0
    with OrtRunner(path, limits=limits_from_spec(spec)) as runner:
        for seq_len, (batch, padded) in zip(lengths, ((1, False), (4, True), (4, False)), strict=True):
            seq_len = min(seq_len, segment or seq_len)
            ids, mask = inputs(batch, seq_len, 1, padded=padded)
            extra = max(0, segment - seq_len)
            with torch.no_grad():
                expected = model(
                    input_ids=nn.functional.pad(ids, (0, extra), value=1),
                    attention_mask=nn.functional.pad(mask, (0, extra)),
                )
            for name, output in runner.run({"input_ids": ids.numpy(), "attention_mask": mask.numpy()}).items():
                wanted = expected[name]
                wanted = wanted[:, :seq_len] if wanted.shape[1] == seq_len + extra else wanted
                assert worst_error(output, wanted, mask) <= LIMIT, (batch, seq_len)


def check_reformer(folder: Path, kind: str, config: dict[str, Any], lengths: tuple[int, ...]) -> None:
    model = saved(folder, kind, config)
    # the number of buckets, where it is automatic, belongs to a length: transformers takes that of its first input
    spec, module, path = exported(folder, lengths[0])
    with OrtRunner(path, limits=limits_from_spec(spec)) as runner:
        for seq_len, (batch, padded) in zip(lengths, ((1, False), (4, True), (4, False)), strict=True):
            ids, mask = inputs(batch, seq_len, 0, padded=padded)
            ids = ids % config["vocab_size"]
            with torch.no_grad(), same_rotations(module):
                expected = model(input_ids=ids, attention_mask=mask)
            for name, output in runner.run({"input_ids": ids.numpy(), "attention_mask": mask.numpy()}).items():
                assert worst_error(output, expected[name], mask) <= LIMIT, (batch, seq_len)


def random_modernbert(seed: int) -> tuple[str, dict[str, Any]]:
    draw = random.Random(seed)
    heads = draw.choice([1, 2, 4])
    config = {
        "vocab_size": 60,
        "hidden_size": 8 * heads * draw.choice([1, 2]),
        "num_hidden_layers": draw.choice([2, 3, 4]),
        "num_attention_heads": heads,
        "intermediate_size": draw.choice([16, 40]),
        "hidden_activation": draw.choice(["gelu", "silu", "relu"]),
        "local_attention": draw.choice([4, 16, 33]),
        "global_attn_every_n_layers": draw.choice([2, 3]),
        "norm_bias": draw.choice([True, False]),
        "attention_bias": draw.choice([True, False]),
        "classifier_pooling": draw.choice(["cls", "mean"]),
        "pad_token_id": 1,
    }
    kind = draw.choice(["Model", "ForMaskedLM", "ForTokenClassification", "ForSequenceClassification"])
    return f"ModernBert{kind}", config


def random_big_bird(seed: int) -> tuple[str, dict[str, Any]]:
    draw = random.Random(seed)
    heads, block = draw.choice([1, 2, 4]), draw.choice([4, 8, 16])
    config = {
        "vocab_size": 60,
        "hidden_size": 8 * heads * draw.choice([1, 2]),
        "num_hidden_layers": draw.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "intermediate_size": draw.choice([16, 40]),
        "hidden_act": draw.choice(["gelu_new", "gelu", "relu"]),
        "max_position_embeddings": 336,
        "attention_type": draw.choice(["block_sparse", "block_sparse", "block_sparse", "original_full"]),
        "use_bias": draw.choice([True, False]),
        "rescale_embeddings": draw.choice([True, False]),
        "block_size": block,
        "num_random_blocks": draw.choice([1, 2, 3]),
    }
    kind = draw.choice(["Model", "ForMaskedLM", "ForTokenClassification", "ForSequenceClassification"])
    return f"BigBird{kind}", config


def check_any_length(folder: Path, kind: str, config: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """One file at several lengths, alone and padded, against the original, read anew for each call: some change when
    they meet a length."""
    original = type(saved(folder, kind, config))
    spec, _, path = exported(folder, lengths[0])
    with OrtRunner(path, limits=limits_from_spec(spec)) as runner:
        for seq_len, padded in itertools.product(lengths, (False, True)):
            ids, mask = inputs(4 if padded else 1, seq_len, spec.model.pad_token_id, padded=padded)
            with torch.no_grad():
                expected = original.from_pretrained(folder)(input_ids=ids, attention_mask=mask)
            for name, output in runner.run({"input_ids": ids.numpy(), "attention_mask": mask.numpy()}).items():
                assert worst_error(output, expected[name], mask) <= LIMIT, (seq_len, padded)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_nystromformer_configurations(tmp_path: Path, seed: int) -> None:
    check_nystromformer(tmp_path, *random_nystromformer(seed), (64, 33, 7))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_reformer_configurations(tmp_path: Path, seed: int) -> None:
    check_reformer(tmp_path, *random_reformer(seed), (96, 61, 40))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_modernbert_configurations(tmp_path: Path, seed: int) -> None:
    check_any_length(tmp_path, *random_modernbert(seed), (150, 1, 7, 64, 130, 333))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_big_bird_configurations(tmp_path: Path, seed: int) -> None:
    kind, config = random_big_bird(seed)
    full = (5 + 2 * config["num_random_blocks"]) * config["block_size"]
    check_any_length(tmp_path, kind, config, (300, 1, 7, min(full, 330), min(full + 1, 331), 333))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_longformer_configurations(tmp_path: Path, seed: int) -> None:
    check_longformer(tmp_path, *random_longformer(seed), (200, 77, 3))


@pytest.mark.parametrize(("kind", "fields"), TESTERS)
def test_the_configurations_of_the_testers_of_transformers(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    if kind.startswith("Nystrom"):
        check_nystromformer(tmp_path, kind, NYSTROM_TESTER | fields, (64, 33, 7))
    elif kind.startswith("ModernBert"):
        check_any_length(tmp_path, kind, MODERNBERT_TESTER | fields, (7, 64, 300))
    elif kind.startswith("BigBird"):
        check_any_length(tmp_path, kind, BIG_BIRD_TESTER | fields, (128, 56, 88, 89, 101))
    elif kind.startswith("Longformer"):
        check_longformer(tmp_path, kind, LONGFORMER_TESTER | fields, (128, 33, 7))
    else:
        check_reformer(tmp_path, kind, REFORMER_TESTER | fields, (32, 13, 7))


def test_the_configuration_of_nystromformer_512_at_one_layer(tmp_path: Path) -> None:
    config = {
        "vocab_size": 60,
        "hidden_size": 768,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 510,
        "segment_means_seq_len": 64,
        "num_landmarks": 64,
        "conv_kernel_size": 65,
    }
    check_nystromformer(tmp_path, "NystromformerForMaskedLM", config, (510, 200, 63))


@pytest.mark.slow
def test_the_configuration_of_longformer_base_4096_at_one_layer(tmp_path: Path) -> None:
    config = {
        "vocab_size": 60,
        "hidden_size": 768,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 4098,
        "attention_window": [512],
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
    }
    check_longformer(tmp_path, "LongformerForMaskedLM", config, (1500, 700, 63))


@pytest.mark.slow
def test_the_configuration_of_reformer_crime_and_punishment_at_two_layers(tmp_path: Path) -> None:
    config = {
        "vocab_size": 320,
        "hidden_size": 256,
        "num_attention_heads": 2,
        "attention_head_size": 64,
        "feed_forward_size": 512,
        "attn_layers": ["local", "lsh"],
        "lsh_attn_chunk_length": 64,
        "local_attn_chunk_length": 64,
        "num_buckets": [64, 128],
        "num_hashes": 1,
        "axial_pos_shape": [512, 1024],
        "axial_pos_embds_dim": [64, 192],
        "max_position_embeddings": 524288,
        "is_decoder": True,
    }
    check_reformer(tmp_path, "ReformerModelWithLMHead", config, (1024, 300, 129))


# as many dimensions as no other test here has, for as long; the smaller published model is in every run
@pytest.mark.soak
def test_the_configuration_of_reformer_enwik8_at_two_layers(tmp_path: Path) -> None:
    config = {
        "vocab_size": 258,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "attention_head_size": 128,
        "feed_forward_size": 1024,
        "attn_layers": ["local", "lsh"],
        "lsh_attn_chunk_length": 256,
        "local_attn_chunk_length": 128,
        "num_buckets": 512,
        "num_hashes": 4,
        "axial_pos_shape": [128, 512],
        "axial_pos_embds_dim": [256, 768],
        "max_position_embeddings": 65536,
        "is_decoder": True,
    }
    check_reformer(tmp_path, "ReformerModelWithLMHead", config, (1024, 600, 300))


LONGEST = [
    ("ModernBertModel", {"num_hidden_layers": 4, "pad_token_id": 1}, (200, 8000)),
    ("BigBirdModel", {"num_hidden_layers": 2}, (705, 704, 1024, 4096)),
]


# windows, blocks, frequencies and positions as published; one head
@pytest.mark.soak
@pytest.mark.parametrize(("kind", "fields", "lengths"), LONGEST)
def test_the_longest_sequences_of_published_configurations(
    tmp_path: Path, kind: str, fields: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    config = {"vocab_size": 60, "hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 64} | fields
    check_any_length(tmp_path, kind, config, lengths)
