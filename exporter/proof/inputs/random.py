"""Random inputs: the shapes of every case, filled with random tokens or hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from effexport.dtypes import numpy_dtype
from effexport.models.checkpoint_spec import CheckpointSpec
from effexport.models.encoder_spec import EncoderSpec
from effexport.models.model_spec import shape_of
from effexport.models.module_probe import longer_length
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array

# Answers per question in the cases of a multiple-choice model.
CHOICES = 3


def case_inputs(spec: BuildSpec, seed: int) -> dict[str, dict[str, Array]]:
    """Inputs of every case by name: the export shape, a padded batch, and lengths other than the export length."""
    rng = np.random.default_rng(seed)
    fixed, seq_len = spec.fixed_seq_len, spec.seq_len
    padded_len = min(seq_len, 300)
    shapes = {
        "export": (spec.batch, seq_len, None),
        "padded batch": (3, padded_len, [padded_len, max(1, padded_len * 2 // 3), max(1, padded_len // 300)]),
        "odd length": (1, max(1, seq_len * 5 // 8 - 1), None),
        "short": (2, min(seq_len, 7), None),
        "single token": (1, 1, None),
    }
    if spec.max_seq_len is None and seq_len <= 4096:
        shapes["longer"] = (1, longer_length(seq_len), None)
    if fixed is not None:
        shapes = {
            "export": (spec.batch, fixed, None),
            "single": (1, fixed, None),
            "padded batch": (3, fixed, [fixed, max(1, fixed * 2 // 3), 1]),
            "padded single": (1, fixed, [max(1, fixed // 2)]),
        }
    return {name: random_inputs(spec, rng, *shape) for name, shape in shapes.items()}


def random_inputs(
    spec: BuildSpec, rng: np.random.Generator, batch: int, seq_len: int, lengths: list[int] | None
) -> dict[str, Array]:
    """Random tokens or unit-variance hidden states; `lengths` counts the kept tokens of each sample."""
    mask = np.ones((batch, seq_len), dtype=np.int64)
    for row, length in enumerate(lengths or []):
        mask[row, length:] = 0
    if isinstance(spec.model, CheckpointSpec):
        return checkpoint_inputs(spec, rng, mask)
    if isinstance(spec.model, EncoderSpec):
        return {
            "input_ids": rng.integers(0, spec.model.vocab_size, (batch, seq_len), dtype=np.int64),
            "attention_mask": mask,
        }
    hidden = rng.standard_normal((batch, seq_len, spec.attention.dim), dtype=np.float32)
    return {"hidden_states": hidden.astype(numpy_dtype(spec.dtype)), "attention_mask": mask}


def checkpoint_inputs(spec: BuildSpec, rng: np.random.Generator, mask: Array) -> dict[str, Array]:
    """Random indices within their limits, with the padding token where the mask says so. mask: [batch, seq]."""
    model = spec.model
    sizes = {"batch": mask.shape[0], "choices": CHOICES, "seq": mask.shape[1]}
    inputs: dict[str, Array] = {}
    for name, dims in model.inputs.items():
        shape = shape_of(dims, sizes)
        spread = mask if "choices" not in dims else np.broadcast_to(mask[:, None], shape)
        if name == "hidden_states":
            inputs[name] = rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(spec.dtype))
        elif name == "attention_mask":
            inputs[name] = np.ascontiguousarray(spread)
        else:
            padding = model.pad_token_id if name == "input_ids" else 0
            indices = rng.integers(0, model.input_limits[name], shape, dtype=np.int64)
            inputs[name] = np.where(spread != 0, indices, padding)
    return inputs
