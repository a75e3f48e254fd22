"""The layers of a module that are quantised, and the reasons of those that stay float.

A layer declares what of it stays float beside its code, as `IN_FLOAT`: the name of a child, or "" for the products of
two computed factors, and the reason. Operators declare theirs in the table of operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from effexport.models.validation import did_you_mean, require
from effexport.plugins.quantized_linear import MOST_INPUTS
from effexport.quantize.record import FloatProduct

# Below this, the sums are too short for what scales cost; NVIDIA's ModelOpt draws the same line.
SMALLEST_WIDTH = 16
COMPUTED = "both factors are computed as the model runs, or its weights are not those of a linear layer"
ASKED = "asked for with --keep-float"


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer by path; a subclass only if it computes what nn.Linear computes."""
    return {
        path: child
        for path, child in module.named_modules()
        if isinstance(child, nn.Linear) and type(child).forward is nn.Linear.forward
    }


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
