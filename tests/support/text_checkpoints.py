"""Small checkpoints with a tokenizer, their transformers pipelines, and our tasks on the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_tokenizers import saved_tokenizer
from transformers_models import TINY_OF_TEXTS, TINY_REFORMER, saved

from effexport.base.spec import build_spec_from_checkpoint
from effexport.tasks.fast_tokenizer import fast_tokenizer
from effexport.tasks.task import DEFAULT_OPTIONS, Task, TextOptions, joined_outputs
from effexport.tasks.tasks import task_from_spec

VOCAB_SIZE = 420
NYSTROM: dict[str, Any] = TINY_OF_TEXTS | {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "max_position_embeddings": 96,
    "segment_means_seq_len": 96,
    "num_landmarks": 96,
    "conv_kernel_size": 5,
}
OF_TEXTS = {"vocab_size": VOCAB_SIZE, "feed_forward_size": 32, "attn_layers": ["local", "lsh"], "num_buckets": 4}
REFORMER: dict[str, Any] = TINY_REFORMER | OF_TEXTS
# As large as the weights that make the first answers clearly more probable than the next ones.
SHARPER = 5.0


def checkpoint(folder: Path, kind: str, tokenizer: str, seed: int = 0, **config: Any) -> Any:
    """A checkpoint with a tokenizer and random weights whose logits are far apart. Returns transformers' model."""
    fields = (NYSTROM if kind.startswith("Nystrom") else REFORMER) | config
    model = saved(folder, kind, fields, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # the last layer of each head, or the normalisation before a tied one
            if name.endswith(("transform.LayerNorm.weight", "lm_head.decoder.weight", "out_proj.weight")) or (
                name in ("classifier.weight", "qa_outputs.weight")
            ):
                parameter *= SHARPER
    model.save_pretrained(folder)
    saved_tokenizer(tokenizer, folder)
    return model


def pipeline(task: str, folder: Path, model: Any, **options: Any) -> Any:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if type(model).__name__.startswith("Reformer"):  # which has no segments, whatever the tokenizer gives
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return transformers.pipeline(task, model=model, tokenizer=tokenizer, **options)


def our_task(folder: Path, options: TextOptions = DEFAULT_OPTIONS) -> Task:
    spec, _ = build_spec_from_checkpoint({}, folder)
    tokenizer = fast_tokenizer(folder, spec.model.pad_token_id)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return task_from_spec(spec, tokenizer, config, options)


def answer_on(model: Any, task: Task, text: str, pair: str | None = None) -> Any:
    """Our answer, with transformers' model in the place of the exported one: only the text is on trial."""

    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            outputs = model(**{name: torch.from_numpy(value) for name, value in feeds.items()})
        return {name: value.numpy() for name, value in outputs.items() if isinstance(value, torch.Tensor)}

    prepared = task.prepare(text, pair)
    return task.answer(prepared, joined_outputs([run(rows) for rows in prepared.rows(4)]))


def assert_same_answers(given: Any, expected: Any, score_error: float) -> None:
    """Equal but for scores, which may differ by score_error."""
    assert type(given) is type(expected), (given, expected)
    if isinstance(expected, list):
        assert len(given) == len(expected)
        for one, other in zip(given, expected, strict=True):
            assert_same_answers(one, other, score_error)
        return
    scores = given.pop("score"), expected.pop("score")
    assert given == {name: int(v) if isinstance(v, np.integer) else v for name, v in expected.items()}
    assert abs(scores[0] - float(scores[1])) <= score_error
