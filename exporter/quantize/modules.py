"""The layers of a module that are quantised, the reasons of those that stay float, and PyTorch's own model with these
layers quantised or smoothed.

A layer declares what of it stays float beside its code, as `IN_FLOAT`: the name of a child, or "" for the products of
two computed factors, and the reason. Operators declare theirs in the table of operators.

The quantised model has the same places, scales and roundings as the exported graph. It computes in float32 with numbers
that the codes stand for. The formulas are written out, independently of the code that writes the graph.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.encoder.module import FeedForward
from effexport.models.validation import did_you_mean, require
from effexport.plugins.quantized_linear import MOST_INPUTS
from effexport.quantize.record import (
    FloatProduct,
    Quantization,
    QuantizedLayer,
    Smoothing,
    rounded_name,
    unrounded_name,
)

# Below this, the sums are too short for what scales cost; NVIDIA's ModelOpt draws the same line.
SMALLEST_WIDTH = 16
COMPUTED = "both factors are computed as the model runs, or its weights are not those of an nn.Linear that is called"
NOT_CALLED = "it is not called: its weights are used otherwise, or not at all"
ASKED = "asked for with --keep-float"
CONV1D = ("transformers.pytorch_utils", "Conv1D")


class TransposedLinear(nn.Linear):
    """A linear layer whose weight is [in, out]."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight + self.bias


def with_linear_layers(module: nn.Module) -> nn.Module:
    """A copy in which every Conv1D of transformers is a TransposedLinear; the module itself if it has none.

    The weights stay as they are, because other code of the module may read them.
    """
    if not conv1d_layers(module):
        return module
    result = copy.deepcopy(module)
    for layer in conv1d_layers(result):
        layer.in_features, layer.out_features = layer.weight.shape
        layer.__class__ = TransposedLinear  # which keeps its hooks
    return result


def conv1d_layers(module: nn.Module) -> list[Any]:
    return [child for child in module.modules() if (type(child).__module__, type(child).__name__) == CONV1D]


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer by path; a subclass only if it computes what nn.Linear computes."""
    forwards = (nn.Linear.forward, TransposedLinear.forward)
    return {
        path: child
        for path, child in module.named_modules()
        if isinstance(child, nn.Linear) and type(child).forward in forwards
    }


def rows_of(layer: nn.Linear) -> Tensor:
    """A view of the weight of a linear layer, [out, in]."""
    weight = layer.weight.detach()
    return weight.T if isinstance(layer, TransposedLinear) else weight


def layers_to_quantize(module: nn.Module, keep: Sequence[str], precision: str) -> tuple[list[str], list[FloatProduct]]:
    """Paths of the linear layers that are quantised, and the others with the reason why they stay float.

    keep: layers, or modules around them, that the user wants float. Raises SpecError for one that does not exist.
    """
    first = first_paths(module)
    keep = [first.get(name, name) for name in keep]
    linear = linear_layers(module)
    known = (*linear, *embeddings(module))
    for name in keep:
        require(
            any(is_within(path, name) for path in known),
            f"--keep-float names {name!r}{did_you_mean(name, known)} Layers: {', '.join(known)}",
        )
    chosen, others = [], []
    for path, layer in linear.items():
        if reason := why_float(module, path, layer, keep, precision):
            others.append(FloatProduct(layer=path, operator="Linear", reason=reason))
        else:
            chosen.append(path)
    return chosen, others


def why_float(module: nn.Module, path: str, layer: nn.Linear, keep: Sequence[str], precision: str) -> str:
    """The reason why a linear layer stays float; "" if it is quantised."""
    if any(is_within(path, name) for name in keep):
        return ASKED
    if not path:
        return "the model is itself a linear layer: put it into a module"
    if layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
        return "it has hooks, or a forward of its own"
    if precision == "int8" and layer.in_features > MOST_INPUTS:
        return f"sums of more than {MOST_INPUTS:,} products of int8 may overflow 32 bits"
    parent, _, name = path.rpartition(".")
    if declared := declared_by(module.get_submodule(parent)).get(name):
        return declared
    if min(layer.in_features, layer.out_features) < SMALLEST_WIDTH:
        return f"{layer.in_features} × {layer.out_features} is below {SMALLEST_WIDTH} channels: nothing to gain"
    if any(isinstance(other, nn.Embedding) and other.weight is layer.weight for other in module.modules()):
        return "its weights are those of an embedding, which stays float"
    return ""


def declared_by(module: nn.Module) -> Mapping[str, str]:
    """The parts that a layer declares to stay float, with reasons."""
    found: Mapping[str, str] = getattr(module, "IN_FLOAT", {})
    return found


def reason_of_product(module: nn.Module, path: str) -> str:
    """The reason why a product that is not a linear layer's stays float.

    path: of the module that computes it.
    """
    for owner in owners(path):
        try:
            declared = declared_by(module.get_submodule(owner))
        except AttributeError:  # a path of the exporter's that is no module
            continue
        if "" in declared:
            return declared[""]
    return COMPUTED


def owners(path: str) -> Iterator[str]:
    """A path and those of the modules around it, the nearest first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def is_within(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def first_paths(module: nn.Module) -> dict[str, str]:
    """Every path of every module, and the first of those that lead to the same one."""
    first: dict[int, str] = {}
    return {path: first.setdefault(id(child), path) for path, child in module.named_modules(remove_duplicate=False)}


def embeddings(module: nn.Module) -> list[str]:
    """Paths of the embeddings."""
    return [path for path, child in module.named_modules() if isinstance(child, nn.Embedding)]


INT8_LARGEST, FP8_LARGEST = 127.0, 448.0
SMALLEST_MAXIMUM = INT8_LARGEST * torch.finfo(torch.float32).tiny


def rounded_to_int8(x: Tensor, scale: Tensor) -> Tensor:
    """x as multiples of a scale, -128 to 127 of them; ties go to the even one."""
    return torch.clamp(torch.round(x / scale), -128, 127) * scale


def rounded_to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x as a scale times a float8 E4M3 number."""
    scaled = torch.clamp(x / scale, -FP8_LARGEST, FP8_LARGEST)
    return scaled.to(torch.float8_e4m3fn).to(x.dtype) * scale


def rounded(x: Tensor, scale: Tensor | None, precision: str) -> Tensor:
    """scale: not of bfloat16."""
    if precision == "bf16":
        return x.bfloat16().float()
    assert scale is not None
    return rounded_to_int8(x, scale) if precision == "int8" else rounded_to_fp8(x, scale)


def weight_scales(weight: Tensor, precision: str) -> Tensor:
    """One scale for each row of a weight [out, in], [out, 1]: the largest number of the row has the largest code."""
    largest = weight.abs().amax(dim=1, keepdim=True)
    scales = largest / (INT8_LARGEST if precision == "int8" else FP8_LARGEST)
    return torch.where(scales < torch.finfo(torch.float32).tiny, torch.ones_like(scales), scales)


class RoundedLinear(nn.Linear):
    """A linear layer with quantised weights and inputs.

    input_scale: of all inputs; None gives each row of the last axis in int8 one of its own, so that a token's result
    depends neither on the rest of its batch nor on padding.
    rounds_output: the result is rounded to bfloat16.
    active: otherwise it computes what the float layer does.
    """

    def __init__(
        self, linear: nn.Linear, input_scale: float | None, precision: str, rounds_output: bool = False
    ) -> None:
        # on meta, where PyTorch draws no weights to begin with
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        weight = rows_of(linear)
        self.weight = nn.Parameter(rounded(weight, weight_scales(weight, precision), precision))
        self.bias = linear.bias
        self.original = (linear,)  # in a tuple, so that it is no submodule
        self.precision = precision
        self.rounds_output = rounds_output
        self.active = True
        self.input_scale = None if input_scale is None else torch.tensor(input_scale)

    def rounded(self, x: Tensor) -> Tensor:
        """The input as the numbers that its codes stand for."""
        if self.input_scale is not None or self.precision == "bf16":
            return rounded(x, self.input_scale, self.precision)
        largest = x.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_MAXIMUM)
        # torch makes number / tensor a product with the reciprocal, which rounds twice
        steps = torch.full_like(largest, INT8_LARGEST)
        return torch.round(x * (steps / largest)) * (largest / steps)

    def forward(self, input: Tensor) -> Tensor:
        if not self.active:
            result: Tensor = self.original[0](input)
            return result
        result = F.linear(self.rounded(input), self.weight, self.bias)
        return rounded(result, None, "bf16") if self.rounds_output else result


def with_rounded_table(embedding: nn.Embedding) -> None:
    """Round the rows of an embedding's table to int8, each with a scale of its own."""
    weight = embedding.weight.detach()
    embedding.weight = nn.Parameter(rounded_to_int8(weight, weight_scales(weight, "int8")))


def quantized_module(module: nn.Module, record: Quantization) -> nn.Module:
    """A copy of a float32 module whose layers round as `record` says."""
    result = copy.deepcopy(module)
    for place in record.layers:
        replace_everywhere(result, result.get_submodule(place.layer), rounded_layer(result, place, record.precision))
    for place in record.embeddings:
        embedding = result.get_submodule(place.layer)
        assert isinstance(embedding, nn.Embedding)
        with_rounded_table(embedding)
    for child in result.modules():
        if isinstance(child, FeedForward):
            # slices of the sequence give the same numbers, and would be recorded one by one
            child.chunk_length = 0
    return result.eval()


def rounded_layer(module: nn.Module, place: QuantizedLayer, precision: str) -> RoundedLinear:
    linear = module.get_submodule(place.layer)
    assert isinstance(linear, nn.Linear)
    return RoundedLinear(linear, place.input_scale, precision, place.rounds_output)


def replace_everywhere(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module under every path that it has."""
    paths = [path for path, child in module.named_modules(remove_duplicate=False) if child is old]
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, new)


@contextmanager
def recorded_inputs(module: nn.Module, kind: type[nn.Module] = RoundedLinear) -> Iterator[dict[str, Tensor]]:
    """The inputs of every layer of a kind during the block, and the results that it rounds, under the names that they
    have in the graph."""
    found: dict[str, Tensor] = {}
    calls: Counter[str] = Counter()
    handles = []
    for path, child in module.named_modules():
        if isinstance(child, kind):

            def record(child: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], path: str = path) -> None:
                # a copy, because the module may write into it later
                found[unrounded_name(path, calls[path])] = first_argument(args, named).clone()
                calls[path] += 1

            def record_result(child: nn.Module, args: Any, result: Tensor, path: str = path) -> None:
                found[rounded_name(path, calls[path] - 1)] = result.clone()

            handles.append(child.register_forward_pre_hook(record, with_kwargs=True))
            if isinstance(child, RoundedLinear) and child.rounds_output:
                handles.append(child.register_forward_hook(record_result))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def first_argument(args: tuple[Tensor, ...], named: dict[str, Tensor]) -> Tensor:
    """The only input of a linear layer or an embedding, whether it has its name or not."""
    return args[0] if args else next(iter(named.values()))


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
                rows_of(layer).mul_(factors)
    return result
