"""Models of transformers and ours with the same weights, at any length, padded and not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers_models import oracle_from_config, with_weights

from effexport.models.checkpoints.spec import FAMILIES, PublishedSpec
from effexport.models.contract import load
from effexport.models.layers import fused_operators

CHOICES = 3


def spec_from_config(config: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> PublishedSpec:
    spec: PublishedSpec = load(FAMILIES[config["model_type"]].spec).from_config(config, options or {})[0]
    return spec


def module_from_weights(spec: PublishedSpec, weights: Mapping[str, Tensor]) -> nn.Module:
    """Ours with the weights of a checkpoint."""
    family = FAMILIES[spec.family]
    names = family.module.weight_names(spec)
    module: nn.Module = with_weights(load(family.model)(spec), names, family.ignored(spec.task), weights)
    return module


def token_inputs(
    spec: PublishedSpec, batch: int, seq_len: int, seed: int = 0, *, padded: bool = True
) -> dict[str, Tensor]:
    """Tokens, a mask with padding of random lengths at the end of all rows but the first, and types, if any."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, CHOICES, seq_len) if spec.task == "multiple-choice" else (batch, seq_len)
    lengths = torch.randint(1, seq_len + 1, shape[:-1], generator=generator)
    if not padded:
        lengths[:] = seq_len
    lengths.view(-1)[0] = seq_len
    mask = (torch.arange(seq_len) < lengths.unsqueeze(-1)).to(torch.int64)
    inputs = {name: torch.randint(0, limit, shape, generator=generator) for name, limit in spec.input_limits.items()}
    inputs["input_ids"] = torch.where(mask == 1, inputs["input_ids"], spec.pad_token_id)
    return {"input_ids": inputs.pop("input_ids"), "attention_mask": mask, **inputs}


def kept_error(spec: PublishedSpec, inputs: Mapping[str, Tensor], actual: Any, expected: Any) -> float:
    """The largest error of kept tokens over the RMS of each output. actual: the result of our module."""
    outputs = actual if isinstance(actual, tuple) else (actual,)
    keep = inputs["attention_mask"] == 1
    sizes = dict(zip(("batch", "choices"), keep.shape, strict=False)) | {"seq": keep.shape[-1]}
    worst = 0.0
    for (name, dims), output in zip(spec.outputs.items(), outputs, strict=True):
        wanted = expected[name]
        assert output.shape == wanted.shape == tuple(sizes.get(str(dim), dim) for dim in dims)
        assert torch.isfinite(output).all()
        if "seq" in dims:
            output, wanted = output[keep], wanted[keep]
        worst = max(worst, float((output - wanted).abs().max() / wanted.square().mean().sqrt()))
    return worst


@torch.no_grad()
def error_against_original(
    config: Mapping[str, Any],
    lengths: tuple[int, ...],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> float:
    """The largest error of our layers' plain formulas and of their operators, at some lengths, padded and not.

    The original is made anew for each length: some change when they see one.
    """
    spec = spec_from_config(config)
    module = module_from_weights(spec, oracle_from_config(config, seed).state_dict()).to(dtype)
    worst = 0.0
    for seq_len in lengths:
        original = oracle_from_config({**config, **options}, seed).to(dtype)
        for padded in (False, True):
            inputs = token_inputs(spec, 3 if padded else 1, seq_len, seed + seq_len, padded=padded)
            expected = original(**inputs)
            for fused in (False, True):
                with fused_operators(module, fused):
                    worst = max(worst, kept_error(spec, inputs, module(*inputs.values()), expected))
    return worst
