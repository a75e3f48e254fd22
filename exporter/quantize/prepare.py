"""Decides what is quantised and by which scales: runs samples through the float model, and measures what each layer
costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from torch import nn

from effexport.errors import StageError
from effexport.quantize.modules import FP8_LARGEST, INT8_LARGEST, RoundedLinear, quantized_module, recorded_inputs
from effexport.quantize.places import is_within, layers_to_quantize
from effexport.quantize.record import Loss, Quantization, QuantizedLayer, Samples, Scales
from effexport.quantize.smoothing import smoothed, smoothing_of

if TYPE_CHECKING:
    from effexport.dtypes import Array

STAGE = "quantization"
# Samples that the loss of each layer alone is measured on: every layer takes one run of each.
LOSS_SAMPLES = 2
# The search aims lower than the limit: in the file, other numbers are rounded to the next step than in PyTorch.
SEARCH_SHARE = 0.95

Feeds = Mapping[str, "Array"]
# Runs a module on inputs and returns its outputs by name, and the buckets of its hashes under other names.
Run = Callable[[nn.Module, Feeds], tuple[Mapping[str, "Array"], Mapping[str, "Array"]]]
# The relative loss of a task that a quantised module causes.
TaskLoss = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Options:
    """What a build asks for; see `BuildSpec`."""

    precision: str
    scales: Scales
    keep: tuple[str, ...]
    embeddings: bool
    smooth: float | None
    max_loss: float | None


def prepared(
    module: nn.Module,
    options: Options,
    samples: Sequence[Feeds],
    origin: Samples,
    run: Run,
    task_loss: TaskLoss | None = None,
) -> tuple[nn.Module, Quantization]:
    """The float module, with smoothing folded in if that is asked for, and the record of what is quantised in it.

    samples: inputs, at least one; origin: what the record says of them. task_loss: what `options.max_loss` limits, by
    default the RMS error on the samples.
    Raises SpecError for a layer in `options.keep` that does not exist, and StageError if nothing can be quantised, or
    nothing within `options.max_loss`.
    """
    chosen, floats = layers_to_quantize(module, options.keep)
    record = Quantization(
        precision=options.precision,  # type: ignore[arg-type]
        scales=options.scales,
        products=tuple(floats),
        samples=origin,
        smooth=options.smooth,
        max_loss=options.max_loss,
    )
    exact = module
    largest, called = largest_inputs(module, chosen, samples, run)
    if options.smooth is not None:
        smoothing = smoothing_of(module, chosen, samples, options.smooth, run)
        record = msgspec.structs.replace(record, smoothing=smoothing)
        module = smoothed(module, smoothing)
        largest, _ = largest_inputs(module, chosen, samples, run)
    by_code = INT8_LARGEST if options.precision == "int8" else FP8_LARGEST
    static = options.scales == "static"
    if static and (silent := [path for path in chosen if path in called and largest[path] == 0]):
        raise StageError(
            STAGE,
            f"the input of {silent[0]} is 0 in all samples, so that it has no scale; give samples of what the model "
            f"will read, or leave the layer float with --keep-float {silent[0]}",
        )
    layers = tuple(
        QuantizedLayer(layer=path, input_scale=scale_of(largest[path], by_code) if static else None)
        for path in chosen
        if path in called
    )
    wanted = called.embeddings if options.embeddings else ()
    tables = tuple(
        QuantizedLayer(layer=path) for path in wanted if not any(is_within(path, name) for name in options.keep)
    )
    if not layers:
        reasons = "; ".join(f"{product.layer}: {product.reason}" for product in floats)
        raise StageError(STAGE, f"the model has no layer that can be quantised{f' ({reasons})' * bool(reasons)}")
    record = msgspec.structs.replace(record, layers=layers, embeddings=tables)
    record = measured(exact, module, record, samples, run)
    return module, within_loss(record, exact, module, samples, run, task_loss)


def scale_of(largest: float, largest_code: float) -> float:
    """The static scale by which the largest input that was seen gets the largest code, as a float32."""
    scale = np.float32(largest) / np.float32(largest_code)
    return float(scale) if scale >= np.finfo(np.float32).tiny else 1.0


@dataclass(frozen=True)
class Called:
    """Paths of the linear layers and embeddings that ran."""

    linear: frozenset[str]
    embeddings: tuple[str, ...]

    def __contains__(self, path: str) -> bool:
        return path in self.linear


def largest_inputs(
    module: nn.Module, chosen: Sequence[str], samples: Sequence[Feeds], run: Run
) -> tuple[dict[str, float], Called]:
    """The largest absolute input of each layer over all samples, and which layers ran at all."""
    largest = dict.fromkeys(chosen, 0.0)
    ran: set[str] = set()
    tables: dict[str, None] = {}
    for number, feeds in enumerate(samples):
        with recorded_inputs(module, nn.Linear) as inputs, recorded_inputs(module, nn.Embedding) as indices:
            run(module, feeds)
        for name, x in inputs.items():
            path = name.rpartition(".")[0]
            ran.add(path)
            if path in largest and x.numel():
                top = float(x.abs().max())  # NaN if there is one
                if not np.isfinite(top):
                    raise StageError(
                        STAGE, f"the input of {path} is not finite in sample {number}; check the model and the samples"
                    )
                largest[path] = max(largest[path], top)
        tables |= dict.fromkeys(name.rpartition(".")[0] for name in indices)
    return largest, Called(frozenset(ran), tuple(tables))


def measured(
    original: nn.Module, module: nn.Module, record: Quantization, samples: Sequence[Feeds], run: Run
) -> Quantization:
    """The record with the loss of each layer alone, and of all of them together. module: `original` with smoothing."""
    few = samples[:LOSS_SAMPLES]
    exact = [run(original, feeds) for feeds in few]
    copy = quantized_module(module, record)
    rounding = rounded_layers(copy)
    whole = loss_of(copy, few, exact, run)
    for layer in rounding.values():
        layer.active = False
    alone = {}
    for path, layer in rounding.items():
        layer.active = True
        alone[path] = loss_of(copy, few, exact, run).rms_error
        layer.active = False
    layers = tuple(msgspec.structs.replace(layer, loss=alone[layer.layer]) for layer in record.layers)
    return msgspec.structs.replace(record, layers=layers, loss=whole)


def within_loss(
    record: Quantization,
    original: nn.Module,
    module: nn.Module,
    samples: Sequence[Feeds],
    run: Run,
    task_loss: TaskLoss | None,
) -> Quantization:
    """The record with the layers of the largest loss float again, as few as `max_loss` needs.

    Raises StageError if not even one layer can stay quantised.
    """
    limit = record.max_loss
    if limit is None:
        return record
    few = samples[:LOSS_SAMPLES]
    exact = [run(original, feeds) for feeds in few]
    copy = quantized_module(module, record)
    rounding = rounded_layers(copy)

    def loss() -> float:
        return task_loss(copy) if task_loss else loss_of(copy, few, exact, run).rms_error

    if (whole := loss()) <= SEARCH_SHARE * limit:
        return record
    worst_first = sorted(record.layers, key=lambda layer: -(layer.loss or 0.0))
    for count, layer in enumerate(worst_first, 1):
        rounding[layer.layer].active = False
        if count == len(worst_first):
            break
        if loss() <= SEARCH_SHARE * limit:
            put_back = tuple(layer.layer for layer in worst_first[:count])
            kept = record.without(put_back, f"put back to float by the search for --max-loss {limit:g}")
            left = loss_of(copy, few, exact, run)
            return msgspec.structs.replace(kept, loss=left, search_put_back=put_back)
    least, what = worst_first[-1], "task" if task_loss else "RMS"
    raise StageError(
        STAGE,
        f"--max-loss {limit:g} leaves no layer to quantise: {least.layer} alone changes the output by {least.loss:.2g} "
        f"of its RMS; with all {len(worst_first)} layers, the {what} loss is {whole:.2g}; allow more, or build with "
        "--precision fp16",
    )


def rounded_layers(module: nn.Module) -> dict[str, RoundedLinear]:
    return {path: child for path, child in module.named_modules() if isinstance(child, RoundedLinear)}


def loss_of(
    quantized: nn.Module,
    samples: Sequence[Feeds],
    exact: Sequence[tuple[Mapping[str, Array], Mapping[str, Array]]],
    run: Run,
) -> Loss:
    """How far a quantised module is from the answers of the float one, over all outputs of all samples."""
    squares, flips, tokens = np.zeros(3), 0, 0
    product = 0.0
    for feeds, (wanted, buckets) in zip(samples, exact, strict=True):
        found, own = run(quantized, feeds)
        for name, expected in wanted.items():
            ours, theirs = found[name].astype(np.float64), expected.astype(np.float64)
            squares += [np.square(x).sum() for x in (ours - theirs, theirs, ours)]
            product += float((ours * theirs).sum())
        for name, expected in buckets.items():
            flips += int(np.count_nonzero(own[name] != expected))
            tokens += expected.size
    error, reference, answer = squares
    if not np.isfinite(error):
        raise StageError(
            STAGE, "the answers of the quantised model are not finite; build with --precision fp32 or bf16"
        )
    tiny = np.finfo(np.float64).tiny
    return Loss(
        rms_error=float(np.sqrt(error / max(reference, tiny))),
        cosine=float(product / max(np.sqrt(reference * answer), tiny)),
        bucket_flips=flips / tokens if tokens else None,
    )
