"""Calibration: which layers are quantised, by which scales, and at what loss.

Samples are run through the float model, and what each layer costs is measured.

SmoothQuant (Xiao et al., 2023, arXiv 2211.10438) is folded into layer norms. A channel of activations with large
numbers spoils the scale of all others. Dividing it where a layer norm writes it, and multiplying the weights that read
it, moves the difficulty into the weights. The factors are powers of two, so that the float model keeps its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from effexport.base.errors import StageError
from effexport.models.adapters.torch_layers import attention_calls_as_operators
from effexport.models.layers import fused_operators
from effexport.models.user.modes import Observer
from effexport.plugins.masked_attention.op import masked_attention
from effexport.quantize.modules import (
    FP8_LARGEST,
    INT8_LARGEST,
    NOT_CALLED,
    RoundedLinear,
    is_within,
    layers_to_quantize,
    linear_layers,
    quantized_module,
    recorded_inputs,
    rows_of,
    smoothed,
    with_linear_layers,
)
from effexport.quantize.record import FloatProduct, Loss, Quantization, QuantizedLayer, Samples, Smoothing

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
# Beyond this factor, a channel is as good as unused.
LARGEST_EXPONENT = 12


def prepared(
    module: nn.Module,
    spec: BuildSpec,
    samples: Sequence[Feeds],
    origin: Samples,
    run: Run,
    task_loss: TaskLoss | None = None,
) -> tuple[nn.Module, Quantization]:
    """The module of `with_linear_layers`, with smoothing folded in if that is asked for, and what is quantised in it.

    samples: inputs, at least one.
    origin: their description in the record.
    task_loss: what `spec.max_loss` limits, by default the RMS error on the samples.
    Raises SpecError for a layer in `spec.keep_float` that does not exist, and StageError if nothing can be quantised,
    or nothing within `spec.max_loss`.
    """
    original, module = module, with_linear_layers(module)
    chosen, floats = layers_to_quantize(module, spec.keep_float, spec.precision)
    record = Quantization(
        precision=spec.precision,  # type: ignore[arg-type]
        scales=spec.scales,
        samples=origin,
        smooth=spec.smooth,
        max_loss=spec.max_loss,
    )
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
    multiplied = multiplied_results(module, chosen, spec, lambda: run(module, samples[0]))
    layers = tuple(
        QuantizedLayer(
            layer=path,
            input_scale=scale_of(largest[path], by_code) if static else None,
            rounds_output=path in multiplied,
        )
        for path in chosen
        if path in called
    )
    embeddings = tuple(
        QuantizedLayer(layer=path)
        for path in tables
        if spec.quantize_embeddings and not any(is_within(path, name) for name in spec.keep_float)
    )
    floats += [FloatProduct(layer=path, operator="Linear", reason=NOT_CALLED) for path in chosen if path not in called]
    if not layers:
        reasons = "; ".join(f"{product.layer}: {product.reason}".removeprefix(": ") for product in floats)
        why = f" ({reasons})" if reasons else ""
        raise StageError(
            STAGE,
            f"the model has no layer that can be quantised{why}; an nn.Linear that it calls could be: build with "
            "--precision fp32",
        )
    record = msgspec.structs.replace(record, layers=layers, embeddings=embeddings, products=tuple(floats))
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


def multiplied_results(
    module: nn.Module, chosen: Sequence[str], spec: BuildSpec, run: Callable[[], object]
) -> set[str]:
    """The linear layers whose results are the queries, keys and values of MaskedAttention, as they are.

    It multiplies numbers of bfloat16 faster, and as exactly. So where operators of ours stand for linear layers, these
    results are rounded, too.
    """
    if spec.precision == "fp8" or spec.scales == "static" or not spec.fused:
        return set()
    results: dict[int, tuple[StorageWeakRef, str]] = {}  # by the place of the numbers, which views of them have, too
    found: set[str] = set()

    def wrote(path: str) -> Callable[..., None]:
        def hook(child: nn.Module, inputs: Any, result: Tensor) -> None:
            storage = result.untyped_storage()
            results[storage.data_ptr()] = StorageWeakRef(storage), path

        return hook

    class Attention(Observer):
        def see(self, func: Any, arguments: tuple[Any, ...]) -> None:
            if func is not masked_attention._opoverload:
                return
            known = [results.get(x.untyped_storage().data_ptr()) for x in arguments[:3]]
            makers = [None if one is None or one[0].expired() else one[1] for one in known]
            if makers[0] is not None and makers[1] is not None:
                found.update(maker for maker in makers if maker is not None)

    with ExitStack() as stack:
        for path in chosen:
            stack.callback(module.get_submodule(path).register_forward_hook(wrote(path)).remove)
        stack.enter_context(fused_operators(module, True))
        if spec.model.is_traced_as_found:
            stack.enter_context(attention_calls_as_operators())
        stack.enter_context(Attention())
        run()
    return found


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
        raise StageError(STAGE, "the answers of the quantised model are not finite; build with --precision fp32")
    tiny = np.finfo(np.float64).tiny
    return Loss(
        rms_error=float(np.sqrt(error / max(reference, tiny))),
        cosine=float(product / max(np.sqrt(reference * answer), tiny)),
        bucket_flips=flips / tokens if tokens else None,
    )


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
        """True if the outputs stay on so many samples. Any other reader of a norm, such as a residual, changes them."""
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
        weight = torch.stack([rows_of(linear[path]).abs().amax(dim=0) for path in layers]).amax(dim=0)
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
