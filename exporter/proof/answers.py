"""PyTorch's answers to the inputs of every case, the buckets of its hashes, and the size of its own noise."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from effexport.export.onnx_from_module import at_precision
from effexport.proof.cases import Case
from effexport.proof.inputs.adversarial import adversarial_inputs
from effexport.proof.inputs.random import case_inputs
from effexport.proof.metrics import largest_change, rms_change
from effexport.proof.tolerances import UNIT_ROUNDOFF
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effexport.dtypes import Array

# Golden inputs are drawn from a seed of their own, so that they do not repeat the stream that made the weights.
REFERENCE_SEED_OFFSET = 7919
# The seeds of the rotations that measure the noise: far from any seed that a user is likely to choose.
NOISE_SEED_OFFSET = 1_000_003


def reference_from_module(module: nn.Module, spec: BuildSpec, seed: int) -> list[Case]:
    """The answers of the float32 module to every case.

    Inputs of lower precision are rounded first, so that the reference and the candidate see the same numbers.
    """
    cases = []
    hashed = spec.attention.is_hashed
    rounded = at_precision(module, spec.precision) if hashed else module
    hostile = adversarial_inputs(module, spec)
    for name, inputs in (case_inputs(spec, seed) | hostile).items():
        with recorded_hashes(module) as (buckets, margins):
            outputs = run_module(module, spec, inputs)
        case = Case(name, inputs, outputs, dict(buckets), dict(margins))
        if hashed:
            case = with_hash_noise(case, module, rounded, spec)
        elif name in hostile:
            case = dataclasses.replace(case, own_error=change_by_rounding(case, module, spec))
        cases.append(case)
    return cases


def with_hash_noise(case: Case, module: nn.Module, rounded: nn.Module, spec: BuildSpec) -> Case:
    """The case with its noise: how much the outputs change with other rotations, and in `rounded`, the module in lower
    precision."""
    with other_rotations(module):
        by_seed = rms_change(case, run_module(module, spec, case.inputs))
    by_precision = 0.0 if rounded is module else rms_change(case, run_module(rounded, spec, case.inputs))
    return dataclasses.replace(case, seed_noise=by_seed, precision_noise=by_precision)


def change_by_rounding(case: Case, module: nn.Module, spec: BuildSpec) -> float:
    """How much rounding changes PyTorch's own answer: the largest relative change of the outputs if every weight is off
    by one rounding at the spec's precision, or if the module runs in that precision, whichever is larger."""
    import torch

    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(NOISE_SEED_OFFSET)
    with torch.no_grad():
        for weight in other.parameters():
            noise = torch.rand(weight.shape, generator=generator) * 2 - 1
            weight.mul_(1 + UNIT_ROUNDOFF[spec.precision] * noise)
    changes = [largest_change(case, run_module(other, spec, case.inputs))]
    if spec.precision != "fp32":
        changes.append(largest_change(case, run_module(at_precision(module, spec.precision), spec, case.inputs)))
    return float(np.max(changes))


def run_module(module: nn.Module, spec: BuildSpec, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a module by name, float32."""
    import torch

    dtype = next(module.parameters()).dtype
    given = []
    for tensor in spec.inputs:
        array = np.asarray(inputs[tensor.name])
        value = torch.from_numpy(array if array.dtype == np.int64 else array.astype(np.float32))
        given.append(value.to(dtype) if value.is_floating_point() else value)
    with torch.inference_mode():
        outputs = module(*given)
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    return {t.name: np.asarray(value.float().numpy()) for t, value in zip(spec.outputs, values, strict=True)}


def hash_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Every hash of a module, by the name of its buckets in the graph."""
    from effexport.models.lsh import LSHHash

    return {
        path.removesuffix("hash") + "buckets": child
        for path, child in module.named_modules()
        if isinstance(child, LSHHash)
    }


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
