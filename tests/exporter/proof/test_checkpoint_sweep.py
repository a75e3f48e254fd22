"""Random configurations of all checkpoint families, and the published ones: exported files against transformers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from originals import HEADS, PUBLISHED, error_of, lengths_of, random_config, spec_from_config, token_inputs
from small_builds import module_from_path
from transformers_models import oracle_from_config

from effexport.base.spec import build_spec_from_checkpoint
from effexport.export.onnx_from_module import onnx_from_module
from effexport.export.onnx_graph import operators_of_model
from effexport.models.checkpoints.spec import FAMILIES
from effexport.models.contract import load
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import limits_from_spec

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "transformers")
# The limit that docs/checkpoints.md states.
LIMIT = 1e-4
# LED is exported as several files
SWEPT = [family for family in PUBLISHED if family != "led"]

# The configurations of transformers 4.57.1's own model testers.
BERT_TESTER: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 16,
}
BIG_BIRD_TESTER = {"hidden_act": "gelu_new", "max_position_embeddings": 256, "block_size": 8}
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
REFORMER_LSH_TESTER: dict[str, Any] = REFORMER_TESTER | {
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
# (family, fields, lengths)
TESTERS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("nystromformer", BERT_TESTER | {"segment_means_seq_len": 64, "num_landmarks": 64}, (64, 33, 7)),
    ("longformer", BERT_TESTER | {"attention_window": 4}, (128, 33, 7)),
    ("modernbert", BERT_TESTER | {"pad_token_id": 0, "hidden_activation": "gelu"}, (7, 64, 300)),
    ("big_bird", BERT_TESTER | BIG_BIRD_TESTER, (128, 56, 88, 89, 101)),
    ("reformer", REFORMER_TESTER, (32, 13, 7)),
    ("reformer", REFORMER_LSH_TESTER, (32, 13, 7)),
    # as create_and_check_reformer_model_with_attn_mask and get_pipeline_config change them
    ("reformer", REFORMER_TESTER | {"axial_pos_embds": False, "is_decoder": False}, (32, 13, 7)),
    ("reformer", REFORMER_TESTER | {"max_position_embeddings": 100, "axial_pos_shape": [4, 25]}, (32, 13, 7)),
]
ALL_TESTERS = [(*row, task) for row in TESTERS for family, task in HEADS if family == row[0]]
BERT_BASE = {"hidden_size": 768, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 3072}
ONE_HEAD = {"vocab_size": 60, "hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 64}
REFORMER = {"is_decoder": True, "attn_layers": ["local", "lsh"]}
# Published sizes with fewer layers; windows, blocks, frequencies and positions as published.
SIZES: list[tuple[str, str, dict[str, Any], tuple[int, ...]]] = [
    (
        "nystromformer",
        "masked-lm",
        BERT_BASE
        | {
            "vocab_size": 60,
            "max_position_embeddings": 510,
            "segment_means_seq_len": 64,
            "num_landmarks": 64,
            "conv_kernel_size": 65,
        },
        (64, 33, 63),
    ),
    (
        "longformer",
        "masked-lm",
        BERT_BASE
        | {
            "vocab_size": 60,
            "max_position_embeddings": 4098,
            "attention_window": [512],
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
        },
        (1500, 700, 63),
    ),
    (
        "reformer",
        "lm-head",
        REFORMER
        | {
            "vocab_size": 320,
            "hidden_size": 256,
            "num_attention_heads": 2,
            "attention_head_size": 64,
            "feed_forward_size": 512,
            "lsh_attn_chunk_length": 64,
            "local_attn_chunk_length": 64,
            "num_buckets": [64, 128],
            "num_hashes": 1,
            "axial_pos_shape": [512, 1024],
            "axial_pos_embds_dim": [64, 192],
            "max_position_embeddings": 524288,
        },
        (1024, 300, 129),
    ),
    (
        "reformer",
        "lm-head",
        REFORMER
        | {
            "vocab_size": 258,
            "hidden_size": 1024,
            "num_attention_heads": 8,
            "attention_head_size": 128,
            "feed_forward_size": 1024,
            "lsh_attn_chunk_length": 256,
            "local_attn_chunk_length": 128,
            "num_buckets": 512,
            "num_hashes": 4,
            "axial_pos_shape": [128, 512],
            "axial_pos_embds_dim": [256, 768],
            "max_position_embeddings": 65536,
        },
        (1024, 600, 300),
    ),
    ("modernbert", "base", ONE_HEAD | {"num_hidden_layers": 4, "pad_token_id": 1}, (200, 8000)),
    ("big_bird", "base", ONE_HEAD | {"num_hidden_layers": 2}, (705, 704, 1024, 4096)),
]


def named(family: str, task: str) -> dict[str, Any]:
    return {"model_type": family, "architectures": [load(FAMILIES[family].spec).TASKS[task]]}


@torch.no_grad()
def check(folder: Path, config: Mapping[str, Any], lengths: tuple[int, ...], seed: int = 0) -> None:
    """One file at several lengths, alone and padded, against the original, read anew for each length: some change when
    they meet one. What is automatic belongs to a length: transformers takes that of its first input."""
    original = oracle_from_config(config, seed)
    original.save_pretrained(folder)
    spec, _ = build_spec_from_checkpoint({"seq_len": lengths[0]}, folder)
    module, path = module_from_path(spec, folder), folder / "model.onnx"
    onnx_from_module(module, spec, path)
    assert operators_of_model(path) == spec.custom_ops
    answers, remembers = PUBLISHED[spec.model.family].answers, config.get("num_buckets", 0) is None
    with OrtRunner(path, limits=limits_from_spec(spec)) as runner:
        for seq_len, padded in itertools.product(lengths, (False, True)):
            inputs = token_inputs(spec.model, 4 if padded else 1, seq_len, padded=padded, first_kept=True)
            expected = answers(original if remembers else original.from_pretrained(folder).eval(), module, inputs)
            found = runner.run({name: value.numpy() for name, value in inputs.items()})
            actual = tuple(torch.from_numpy(found[name]) for name in spec.model.outputs)
            assert error_of(spec.model, inputs, actual, expected) <= LIMIT, (seq_len, padded)


@pytest.mark.parametrize(("seed", "family"), list(itertools.product(range(40), SWEPT)))
def test_random_configurations(tmp_path: Path, seed: int, family: str) -> None:
    draw = random.Random(seed)
    config = random_config(family, draw)
    check(tmp_path, config, lengths_of(spec_from_config(config), draw), seed)


@pytest.mark.soak
@pytest.mark.parametrize(("family", "fields", "lengths", "task"), ALL_TESTERS)
def test_the_configurations_of_the_testers_of_transformers(
    tmp_path: Path, family: str, fields: dict[str, Any], lengths: tuple[int, ...], task: str
) -> None:
    if family == "reformer" and task != "base":
        fields = fields | {"is_decoder": task == "lm-head"}
    check(tmp_path, named(family, task) | fields | {"num_labels": 2 if task == "question-answering" else 3}, lengths)


@pytest.mark.parametrize(("family", "task", "fields", "lengths"), SIZES)
def test_published_configurations_with_fewer_layers(
    tmp_path: Path, family: str, task: str, fields: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    check(tmp_path, named(family, task) | fields, lengths)
