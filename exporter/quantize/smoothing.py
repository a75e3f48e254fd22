"""SmoothQuant (Xiao et al., 2023, arXiv 2211.10438), folded into layer norms.

A channel of activations with large numbers spoils the scale of all others. Dividing it where a layer norm writes it,
and multiplying the weights that read it, moves the difficulty into the weights. The factors are powers of two, so that
the float model keeps its bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from effexport.quantize.places import linear_layers
from effexport.quantize.record import Smoothing

if TYPE_CHECKING:
    from effexport.dtypes import Array

Feeds = Mapping[str, "Array"]
# Beyond this factor, a channel is as good as unused.
LARGEST_EXPONENT = 12


def smoothing_of(
    module: nn.Module, chosen: Sequence[str], samples: Sequence[Feeds], alpha: float, run: Callable[..., Any]
) -> tuple[Smoothing, ...]:
    """The layer norms of a module that only linear layers read, at least one of them quantised, and their factors:
    max|x|^α / max|w|^(1 − α) for each channel, rounded to a power of two."""
    linear = linear_layers(module)
    readers, largest = readers_of_norms(module, linear, samples, run)
    found: list[Smoothing] = []
    exact = [run(module, feeds)[0] for feeds in samples]

    def keeps_bits(smoothing: Sequence[Smoothing], count: int) -> bool:
        """Whether the outputs stay on so many samples. Whatever else reads a norm, such as a residual, changes them."""
        other = smoothed(module, smoothing)
        pairs = zip(samples[:count], exact[:count], strict=True)
        return all(
            np.array_equal(array, wanted[name])
            for feeds, wanted in pairs
            for name, array in run(other, feeds)[0].items()
        )

    for norm, layers in readers.items():
        if not set(layers) & set(chosen):
            continue
        weight = torch.stack([linear[path].weight.detach().abs().amax(dim=0) for path in layers]).amax(dim=0)
        with np.errstate(divide="ignore"):
            exponents = alpha * np.log2(largest[norm]) - (1 - alpha) * np.log2(weight.numpy())
        usable = np.isfinite(exponents)
        rounded = np.clip(np.rint(np.where(usable, exponents, 0)), -LARGEST_EXPONENT, LARGEST_EXPONENT)
        candidate = Smoothing(norm=norm, layers=tuple(layers), exponents=tuple(map(int, rounded)))
        if keeps_bits([candidate], 1):
            found.append(candidate)
    if not keeps_bits(found, len(samples)):
        found = [candidate for candidate in found if keeps_bits([candidate], len(samples))]
    return tuple(found)


def readers_of_norms(
    module: nn.Module, linear: Mapping[str, nn.Linear], samples: Sequence[Feeds], run: Callable[..., Any]
) -> tuple[dict[str, list[str]], dict[str, Array]]:
    """The linear layers that read the very output of each layer norm, and its largest number in each channel."""
    norms = {
        path: child
        for path, child in module.named_modules()
        if isinstance(child, nn.LayerNorm) and child.weight is not None and len(child.normalized_shape) == 1
    }
    readers: dict[str, list[str]] = {}
    largest: dict[str, Array] = {}
    written: list[tuple[str, Tensor]] = []

    def wrote(path: str) -> Callable[..., None]:
        def hook(child: nn.Module, inputs: Any, output: Tensor) -> None:
            written.append((path, output))
            top = output.detach().abs().flatten(0, -2).amax(dim=0).numpy()
            largest[path] = np.maximum(largest.get(path, top), top)

        return hook

    def read(path: str) -> Callable[..., None]:
        def hook(child: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            for norm, output in written:
                if output is inputs[0] and path not in readers.setdefault(norm, []):
                    readers[norm].append(path)

        return hook

    with ExitStack() as stack:
        for path, norm in norms.items():
            stack.callback(norm.register_forward_hook(wrote(path)).remove)
        for path, layer in linear.items():
            stack.callback(layer.register_forward_pre_hook(read(path)).remove)
        for feeds in samples:
            run(module, feeds)
            written.clear()
    return readers, largest


def smoothed(module: nn.Module, smoothing: Sequence[Smoothing]) -> nn.Module:
    """A copy of a module with these factors. Where `smoothing_of` has found them, the same bits come out."""
    result = copy.deepcopy(module)
    with torch.no_grad():
        for item in smoothing:
            factors = torch.tensor(item.exponents).float().exp2()
            norm = result.get_submodule(item.norm)
            assert isinstance(norm, nn.LayerNorm)
            for parameter in (norm.weight, norm.bias):
                if parameter is not None:
                    parameter.div_(factors)
            for path in item.layers:
                layer = result.get_submodule(path)
                assert isinstance(layer, nn.Linear)
                layer.weight.mul_(factors)
    return result
