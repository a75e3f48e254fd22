"""Runs a PyTorch module on the inputs of a case, with its hashes recorded, prescribed or drawn anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.models.encoder.spec import TOKENS
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effexport.dtypes import Array

# The seeds of the rotations that measure the noise: far from any seed that a user is likely to choose.
NOISE_SEED_OFFSET = 1_000_003


def run_module(module: nn.Module, spec: BuildSpec, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a module by name: float32, or float64 from a module in float64."""
    import torch

    from effexport.models.layers import at_least_float32

    with torch.inference_mode():
        outputs = module(*arguments(module, spec, inputs))
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    return {t.name: np.asarray(at_least_float32(value).numpy()) for t, value in zip(spec.outputs, values, strict=True)}


def scores_of_indices(module: nn.Module, spec: BuildSpec, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The part `ranked` of a case: for a model that returns the likeliest tokens, the probability of every token."""
    import torch

    from effexport.models.encoder.module import TopTokensModel, probabilities

    if not isinstance(module, TopTokensModel):
        return {}
    with torch.inference_mode():
        return {TOKENS: probabilities(module.logits(*arguments(module, spec, inputs))).numpy()}


def arguments(module: nn.Module, spec: BuildSpec, inputs: Mapping[str, Array]) -> list[torch.Tensor]:
    """The inputs in the order and the precision of a module."""
    import torch

    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    given = []
    for tensor in spec.inputs:
        array = np.asarray(inputs[tensor.name])
        value = torch.from_numpy(array if array.dtype.kind in "iub" else array.astype(np.float32))
        given.append(value.to(dtype) if value.is_floating_point() else value)
    return given


def hash_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Every hash of a module, by the name of its buckets in the graph."""
    from effexport.models.variants.lsh.layer import LSHHash

    return {bucket_name(path): child for path, child in module.named_modules() if isinstance(child, LSHHash)}


def bucket_name(path: str) -> str:
    """The name of the buckets of a hash in the graph. path: of the hash in its model."""
    return path.removesuffix("hash") + "buckets"


@contextmanager
def recorded_hashes(module: nn.Module) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
    """Buckets and margins of every hash during the block, by graph value name."""
    buckets: dict[str, Array] = {}
    margins: dict[str, Array] = {}
    handles = []
    for name, child in hash_modules(module).items():

        def record(child: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor, name: str = name) -> None:
            buckets[name] = output.numpy()
            margins[name] = child.margins(inputs[0]).numpy()  # type: ignore[operator]

        handles.append(child.register_forward_hook(record))
    try:
        yield buckets, margins
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def given_buckets(module: nn.Module, buckets: Mapping[str, Array]) -> Iterator[None]:
    """Replace the buckets of every hash that is in `buckets` during the block; they are as `recorded_hashes` yields
    them."""
    import torch

    handles = []
    for name, child in hash_modules(module).items():
        if name not in buckets:
            continue

        def replace(child: nn.Module, inputs: Any, output: torch.Tensor, name: str = name) -> torch.Tensor:
            return torch.from_numpy(np.array(buckets[name]))

        handles.append(child.register_forward_hook(replace))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def other_rotations(module: nn.Module) -> Iterator[None]:
    """Replace the rotations of every hash during the block."""
    import torch

    saved = {child: child.rotations for child in hash_modules(module).values()}
    try:
        for i, (child, rotations) in enumerate(saved.items()):
            generator = torch.Generator().manual_seed(NOISE_SEED_OFFSET + i)
            child.rotations = torch.randn(rotations.shape, generator=generator)  # type: ignore[arg-type]
        yield
    finally:
        for child, rotations in saved.items():
            child.rotations = rotations
