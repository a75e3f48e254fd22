"""Byte language models on real text: training, export, and bits per byte in every runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from effexport.evaluation.labelled import IGNORED, MASKED_SHARE
from effexport.text.tokenizer import BYTE_MASK
from scripts.training.corpus import Corpus

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]  # input_ids and labels, [rows, tokens]


def windows_of_step(corpus: Corpus, length: int, rows: int, step: int, *, masked: bool) -> Batch:
    """Random windows of the training text: for each token the next one, or the tokens behind masks."""
    generator = np.random.default_rng([0, step])
    starts = generator.integers(0, len(corpus.training) - length, (rows, 1))
    windows = corpus.training[starts + np.arange(length + 1)]
    ids = windows[:, :-1]
    if not masked:
        return ids, windows[:, 1:]
    chosen = generator.random(ids.shape) < MASKED_SHARE
    return np.where(chosen, BYTE_MASK, ids), np.where(chosen, ids, IGNORED)


def held_out_arrays(corpus: Corpus, length: int, rows: int, *, masked: bool) -> dict[str, Any]:
    """The first windows of the held-out text as inputs and labels, for `effexport.evaluate`."""
    ids = corpus.held_out[: rows * length].reshape(rows, length)
    if not masked:
        return {"input_ids": ids, "labels": np.hstack([ids[:, 1:], np.full((rows, 1), IGNORED)])}
    chosen = np.random.default_rng(1).random(ids.shape) < MASKED_SHARE
    return {"input_ids": np.where(chosen, BYTE_MASK, ids), "labels": np.where(chosen, ids, IGNORED)}


def half_weights(model: Any, file: Path) -> None:
    """Round the weights to float16 and save them as such: what is judged is what the file holds."""
    import torch
    from safetensors.torch import save_file

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    save_file({name: value.half().contiguous() for name, value in model.state_dict().items()}, file)
