"""Random configurations of all checkpoint families, and the published ones: exported files against transformers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from originals import PUBLISHED, error_of, lengths_of, random_config, spec_from_config, token_inputs
from small_builds import module_from_path
from transformers_models import oracle_from_config

from effexport.base.spec import build_spec_from_checkpoint
from effexport.export.onnx_from_module import onnx_from_module
from effexport.export.onnx_graph import operators_of_model
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import limits_from_spec

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "transformers")
# The limit that docs/checkpoints.md states.
LIMIT = 1e-4
# LED is exported as several files
SWEPT = [family for family in PUBLISHED if family != "led"]

BERT_BASE = {"hidden_size": 768, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 3072}
ONE_HEAD = {"vocab_size": 60, "hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 64}
REFORMER = {"is_decoder": True, "attn_layers": ["local", "lsh"]}
# Published sizes with fewer layers; windows, blocks, frequencies and positions as published.
SIZES: list[tuple[str, str, dict[str, Any], tuple[int, ...]]] = [
    (
        "nystromformer",
        "NystromformerForMaskedLM",
        BERT_BASE
        | {
            "vocab_size": 60,
            "max_position_embeddings": 510,
            "segment_means_seq_len": 64,
            "num_landmarks": 64,
            "conv_kernel_size": 65,
        },
        (510, 200, 63),
    ),
    (
        "longformer",
        "LongformerForMaskedLM",
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
        "ReformerModelWithLMHead",
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
        "ReformerModelWithLMHead",
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
    ("modernbert", "ModernBertModel", ONE_HEAD | {"num_hidden_layers": 4, "pad_token_id": 1}, (200, 8000)),
    ("big_bird", "BigBirdModel", ONE_HEAD | {"num_hidden_layers": 2}, (705, 704, 1024, 4096)),
]


@torch.no_grad()
def check(folder: Path, config: Mapping[str, Any], lengths: tuple[int, ...], seed: int = 0) -> None:
    """One file at several lengths, alone and padded, against the original, read anew for each length: some change when
    they meet one."""
    original = oracle_from_config(config, seed)
    original.save_pretrained(folder)
    spec, _ = build_spec_from_checkpoint({"seq_len": lengths[0]}, folder)
    module, path = module_from_path(spec, folder), folder / "model.onnx"
    onnx_from_module(module, spec, path)
    assert operators_of_model(path) == spec.custom_ops
    answers = PUBLISHED[spec.model.family].answers
    with OrtRunner(path, limits=limits_from_spec(spec)) as runner:
        for seq_len, padded in itertools.product(lengths, (False, True)):
            inputs = token_inputs(spec.model, 4 if padded else 1, seq_len, padded=padded, first_kept=True)
            expected = answers(original.from_pretrained(folder).eval(), module, inputs)
            found = runner.run({name: value.numpy() for name, value in inputs.items()})
            actual = tuple(torch.from_numpy(found[name]) for name in spec.model.outputs)
            assert error_of(spec.model, inputs, actual, expected) <= LIMIT, (seq_len, padded)


@pytest.mark.parametrize(("seed", "family"), list(itertools.product(range(40), SWEPT)))
def test_random_configurations(tmp_path: Path, seed: int, family: str) -> None:
    draw = random.Random(seed)
    config = random_config(family, draw)
    check(tmp_path, config, lengths_of(spec_from_config(config), draw), seed)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind", "fields", "lengths"), SIZES)
def test_published_configurations_with_fewer_layers(
    tmp_path: Path, family: str, kind: str, fields: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    check(tmp_path, {"model_type": family, "architectures": [kind], **fields}, lengths)
