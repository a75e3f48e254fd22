"""BigBird checkpoints: config.json → spec → module, against transformers with the same weights."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from originals import (
    error_against_original,
    largest_error,
    module_from_weights,
    original_from_config,
    spec_from_config,
    token_inputs,
)

from effexport.models.checkpoints.bert_spec import HIDDEN_ACTS
from effexport.models.checkpoints.big_bird_spec import BigBirdSpec
from effexport.models.layers import fused_operators
from effexport.models.validation import SpecError

pytestmark = pytest.mark.requires("torch", "transformers")

# Largest error over RMS: float32 sums in another order, which attention amplifies.
LIMIT = 2e-5
# The same in float64, for configurations that amplify more.
EXACT = 1e-10
SEPARATOR = 5
TINY: dict[str, Any] = {
    "model_type": "big_bird",
    "vocab_size": 41,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 1024,
    "block_size": 4,
    "num_random_blocks": 2,
    "sep_token_id": SEPARATOR,
}
# of these sizes, 36 tokens are the most with full attention
FULL = 36
LENGTHS = (1, 4, 19, FULL, FULL + 1, 40, 62, 203, 1001)
TASKS = list(BigBirdSpec.TASKS)


def config_of(task: str = "base", **fields: Any) -> dict[str, Any]:
    """A config.json; fields given as "absent" are left out."""
    config = {**TINY, "architectures": [BigBirdSpec.TASKS[task]], **fields}
    return {name: value for name, value in config.items() if value != "absent"}


def spec_of(task: str = "base", **fields: Any) -> BigBirdSpec:
    spec = spec_from_config(config_of(task, **fields))
    assert isinstance(spec, BigBirdSpec)
    return spec


@pytest.mark.parametrize("attention_type", ["block_sparse", "original_full"])
def test_any_length_equals_transformers(attention_type: str) -> None:
    assert error_against_original(config_of(attention_type=attention_type), LENGTHS) <= LIMIT


def test_the_lengths_of_the_first_plans_equal_transformers() -> None:
    """transformers has a branch of its own for these."""
    config = config_of(max_position_embeddings=4096, block_size=64, num_random_blocks=3, num_hidden_layers=1)
    assert error_against_original(config, (1024, 3072)) <= LIMIT


@pytest.mark.parametrize("task", TASKS)
def test_every_task_equals_transformers(task: str) -> None:
    config = config_of(task, id2label={"0": "a", "1": "b", "2": "c"})
    assert error_against_original(config, (1, 20, 70)) <= LIMIT


def random_config(draw: random.Random) -> dict[str, Any]:
    heads, task = draw.choice([1, 2, 3]), draw.choice(TASKS)
    fields: dict[str, Any] = {
        "vocab_size": draw.randint(10, 60),
        "hidden_size": heads * draw.choice([2, 5, 16]),
        "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": heads,
        "intermediate_size": draw.randint(5, 40),
        "hidden_act": draw.choice(list(HIDDEN_ACTS)),
        "max_position_embeddings": draw.choice([100, 320]),
        "type_vocab_size": draw.randint(2, 3),
        "layer_norm_eps": draw.choice([1e-5, 1e-12, 1e-3]),
        "attention_type": draw.choice(["block_sparse", "block_sparse", "original_full"]),
        "use_bias": draw.choice([True, False]),
        "rescale_embeddings": draw.choice([True, False]),
        "block_size": draw.choice([1, 2, 4, 5, 10, 16]),
        "num_random_blocks": draw.randint(1, 3),
        "tie_word_embeddings": draw.choice([True, False]),
        "pad_token_id": draw.randint(0, 9),
        "id2label": {str(i): f"L{i}" for i in range(draw.randint(1, 4))},
        "chunk_size_feed_forward": draw.choice([0, 1]),
    }
    return config_of(task, **fields)


@pytest.mark.parametrize("seed", range(20))
def test_random_configurations_equal_transformers(seed: int) -> None:
    draw = random.Random(seed)
    config = random_config(draw)
    # transformers needs positions for its padding, too
    longest = config["max_position_embeddings"] // config["block_size"] * config["block_size"]
    lengths = (draw.randint(1, 20), draw.randint(20, longest), longest)
    assert error_against_original(config, lengths, seed, torch.float64) <= EXACT
