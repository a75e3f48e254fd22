"""transformers' own models for tests: random checkpoints, runs with our rotations, inputs and errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from effexport.proof.tolerances import rms

# Fields of configurations.
BERT_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
TINY_NYSTROMFORMER: dict[str, Any] = BERT_SIZES | {
    "vocab_size": 60,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "segment_means_seq_len": 32,
    "num_landmarks": 8,
    "conv_kernel_size": 5,
}
# For the tokenizers of random_tokenizers.py. Softmax attention, so that transformers takes every length.
TINY_OF_TEXTS: dict[str, Any] = BERT_SIZES | {
    "vocab_size": 210,
    "hidden_size": 16,
    "intermediate_size": 16,
    "segment_means_seq_len": 8,
    "num_landmarks": 8,
    "conv_kernel_size": None,
    "pad_token_id": 0,
}
TINY_REFORMER: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "attention_head_size": 8,
    "feed_forward_size": 48,
    "attn_layers": ["lsh", "local"],
    "is_decoder": False,
    "lsh_attn_chunk_length": 8,
    "local_attn_chunk_length": 8,
    "num_buckets": 8,
    "num_hashes": 2,
    "axial_pos_shape": [8, 16],
    "axial_pos_embds_dim": [16, 16],
    "max_position_embeddings": 128,
}


def saved(folder: Path, kind: str, config: dict[str, Any], seed: int = 0) -> nn.Module:
    """A transformers model with random weights that make attention sharp, saved to a folder."""
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, kind)(config_of_class(kind, config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                gain = 2.0 if "query" in name else 1.0
                parameter.normal_(0, gain / parameter[0].numel() ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


@contextmanager
def same_rotations(module: nn.Module) -> Iterator[None]:
    """Let transformers' LSH layers draw the rotations of our module, layer by layer."""
    from effexport.models.variants.lsh.layer import LSHHash

    rotations = itertools.cycle([child.rotations for child in module.modules() if isinstance(child, LSHHash)])
    real = torch.randn

    def draw(*size: Any, **options: Any) -> Tensor:
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        if len(shape) == 4:
            given: Tensor = next(rotations)
            assert tuple(given.shape) == shape
            return given.to(options.get("dtype"))
        return real(*size, **options)

    with mock.patch("torch.randn", draw):
        yield


def inputs(batch: int, seq_len: int, pad: int, *, padded: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * 1000 + seq_len)
    ids = torch.randint(3, 60, (batch, seq_len), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(1, batch):
            mask[row, max(1, seq_len - 3 * row) :] = 0
    return torch.where(mask == 1, ids, pad), mask


def worst_error(actual: np.ndarray, expected: Tensor, mask: Tensor) -> float:
    """max |error| / RMS over valid positions, or over a pooled output."""
    wanted, given = expected.numpy(), actual
    if wanted.shape[:2] == tuple(mask.shape):
        keep = mask.numpy() == 1
        wanted, given = wanted[keep], given[keep]
    assert wanted.shape == given.shape
    return float(np.abs(given - wanted).max() / rms(wanted))


def config_of_class(kind: str, config: Mapping[str, Any]) -> Any:
    """The configuration of a class of transformers, by its name."""
    import transformers

    family = kind.partition("Model")[0].partition("For")[0]
    return getattr(transformers, f"{family}Config")(**config)


def randomize(model: nn.Module, seed: int) -> None:
    """Weights at a scale at which every term reaches the output: logits of order two, filters and gains that vary."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            value = 0.3 * value + float(name.lower().endswith("norm.weight"))
        elif "embeddings" not in name:
            gain = 1.5 if "query" in name or "key" in name else 1.0
            value = gain * value * parameter[0].numel() ** -0.5
        parameter.data.copy_(value)


def oracle_from_config(config: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """transformers' model of a config.json, with random weights."""
    import transformers

    (kind,) = config["architectures"]
    model: nn.Module = getattr(transformers, kind)(config_of_class(kind, config))
    randomize(model, seed)
    return model.eval()


def run_ours(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    outputs = module(*inputs)
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Over the RMS of each output."""
    assert [x.shape for x in actual] == [x.shape for x in expected]
    assert all(torch.isfinite(x).all() for x in actual)
    pairs = zip(actual, expected, strict=True)
    return max(float((a - b).abs().max() / b.square().mean().sqrt()) for a, b in pairs)
