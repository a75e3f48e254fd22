"""Decides what is quantised and by which scales: runs samples through the float model, and measures what each layer
costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from torch import nn

from effexport.base.errors import StageError
from effexport.quantize.modules import (
    FP8_LARGEST,
    INT8_LARGEST,
    RoundedLinear,
    quantized_module,
    recorded_inputs,
    smoothed,
    smoothing_of,
)
from effexport.quantize.places import is_within, layers_to_quantize
from effexport.quantize.record import Loss, Quantization, QuantizedLayer, Samples

if TYPE_CHECKING:
    from effexport.base.dtypes import Array
    from effexport.base.spec import BuildSpec

STAGE = "quantization"
# Samples that the loss of each layer alone is measured on: every layer takes one run of each.
LOSS_SAMPLES = 2
# The search aims lower than the limit: in the file, other numbers are rounded to the next step than in PyTorch.
SEARCH_SHARE = 0.95

Feeds = Mapping[str, "Array"]
# The outputs of a model by name, and the buckets of its hashes.
Answer = tuple[Mapping[str, "Array"], Mapping[str, "Array"]]
Run = Callable[[nn.Module, Feeds], Answer]
# The relative loss of a task that a quantised module causes.
TaskLoss = Callable[[nn.Module], float]


def prepared(
    module: nn.Module,
    spec: BuildSpec,
    samples: Sequence[Feeds],
    origin: Samples,
    run: Run,
    task_loss: TaskLoss | None = None,
) -> tuple[nn.Module, Quantization]:
    """The float module, with smoothing folded in if that is asked for, and the record of what is quantised in it.

    samples: inputs, at least one.
    origin: their description in the record.
    task_loss: what `spec.max_loss` limits, by default the RMS error on the samples.
    Raises SpecError for a layer in `spec.keep_float` that does not exist, and StageError if nothing can be quantised,
    or nothing within `spec.max_loss`.
    """
    chosen, floats = layers_to_quantize(module, spec.keep_float)
    record = Quantization(
        precision=spec.precision,  # type: ignore[arg-type]
        scales=spec.scales,
        products=tuple(floats),
        samples=origin,
        smooth=spec.smooth,
        max_loss=spec.max_loss,
    )
    original = module
    largest, called, tables = largest_inputs(module, chosen, samples, run)
    if spec.smooth is not None:
        smoothing = smoothing_of(module, chosen, samples, spec.smooth, run)
        record = msgspec.structs.replace(record, smoothing=smoothing)
        module = smoothed(module, smoothing)
        largest, *_ = largest_inputs(module, chosen, samples, run)
    by_code = INT8_LARGEST if spec.precision == "int8" else FP8_LARGEST
    static = spec.scales == "static"
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
    embeddings = tuple(
        QuantizedLayer(layer=path)
        for path in tables
        if spec.quantize_embeddings and not any(is_within(path, name) for name in spec.keep_float)
    )
    if not layers:
        reasons = "; ".join(f"{product.layer}: {product.reason}" for product in floats)
        raise StageError(STAGE, f"the model has no layer that can be quantised{f' ({reasons})' * bool(reasons)}")
    record = msgspec.structs.replace(record, layers=layers, embeddings=embeddings)
    trial = Trial(quantized_module(module, record), original, samples[:LOSS_SAMPLES], run)
    return module, within_loss(measured(record, trial), trial, task_loss)


def scale_of(largest: float, largest_code: float) -> float:
    """The static scale by which the largest input that was seen gets the largest code, as a float32."""
    scale = np.float32(largest) / np.float32(largest_code)
    return float(scale) if scale >= np.finfo(np.float32).tiny else 1.0


def largest_inputs(
    module: nn.Module, chosen: Sequence[str], samples: Sequence[Feeds], run: Run
) -> tuple[dict[str, float], set[str], list[str]]:
    """The largest absolute input of each layer over all samples; and the linear layers and the embeddings that ran."""
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
    return largest, ran, list(tables)


class Trial:
    """A quantised module whose layers can be made float one by one, and its loss against the float model."""

    def __init__(self, module: nn.Module, original: nn.Module, samples: Sequence[Feeds], run: Run) -> None:
        self.module = module
        self.layers = {path: child for path, child in module.named_modules() if isinstance(child, RoundedLinear)}
        self._samples, self._run = samples, run
        self._exact = [run(original, feeds) for feeds in samples]

    def round_only(self, paths: Collection[str]) -> None:
        for path, layer in self.layers.items():
            layer.active = path in paths

    def loss(self) -> Loss:
        return loss_of(self._exact, [self._run(self.module, feeds) for feeds in self._samples])


def measured(record: Quantization, trial: Trial) -> Quantization:
    """The record with the loss of each layer alone, and of all of them together."""
    whole, layers = trial.loss(), []
    for layer in record.layers:
        trial.round_only([layer.layer])
        layers.append(msgspec.structs.replace(layer, loss=trial.loss().rms_error))
    return msgspec.structs.replace(record, layers=tuple(layers), loss=whole)


def within_loss(record: Quantization, trial: Trial, task_loss: TaskLoss | None) -> Quantization:
    """The record with the layers of the largest loss float again, as few as `max_loss` needs.

    Raises StageError if not even one layer can stay quantised.
    """
    limit = record.max_loss
    if limit is None:
        return record
    worst_first = [layer.layer for layer in sorted(record.layers, key=lambda layer: -(layer.loss or 0.0))]
    losses: list[float] = []
    for count in range(len(worst_first)):
        trial.round_only(worst_first[count:])
        losses.append(task_loss(trial.module) if task_loss else trial.loss().rms_error)
        if losses[-1] > SEARCH_SHARE * limit:
            continue
        if count == 0:
            return record
        put_back = tuple(worst_first[:count])
        kept = record.without(put_back, f"put back to float by the search for --max-loss {limit:g}")
        return msgspec.structs.replace(kept, loss=trial.loss(), search_put_back=put_back)
    least, what = record.layer(worst_first[-1]), "task" if task_loss else "RMS"
    assert least is not None
    raise StageError(
        STAGE,
        f"--max-loss {limit:g} leaves no layer to quantise: {least.layer} alone changes the output by {least.loss:.2g} "
        f"of its RMS; with all {len(worst_first)} layers, the {what} loss is {losses[0]:.2g}; allow more, or build "
        "with --precision fp16",
    )


def loss_of(exact: Sequence[Answer], answers: Sequence[Answer]) -> Loss:
    """The distance of the answers of a quantised model from those of the float one, over all outputs of all samples.

    Raises StageError if they are not finite.
    """
    squares, flips, tokens = np.zeros(3), 0, 0
    product = 0.0
    for (wanted, buckets), (found, own) in zip(exact, answers, strict=True):
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
