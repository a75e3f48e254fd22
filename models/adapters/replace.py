"""A copy of a model in which known layers of other packages are replaced by ours."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

from effexport.models.adapters.adapter import (
    Adapted,
    Adapter,
    NotExportableError,
    NotReplaceableError,
    Replacement,
    qualified_name,
)
from effexport.models.adapters.table import replacements

if TYPE_CHECKING:
    from torch import nn


# Where the parts of known layers come from, beside their own package: a part of any other has been exchanged.
PARTS = ("torch", "local_attention", "axial_positional_embedding", "product_key_memory", "einops")


def with_our_layers(original: nn.Module, seq_len: int) -> Adapted:
    """Replace the known layers anywhere in a copy of a model; `original` stays as it is.

    seq_len: the length in tokens that the model is exported for.
    Raises NotExportableError, with the path of the layer, for a behaviour that no file can have.
    """
    known = replacements()
    replaced: dict[str, nn.Module] = {}
    kept: dict[str, str] = {}
    # one layer in several places stays one layer; the replaced ones are held, so that their ids stay their own
    ours: dict[int, tuple[nn.Module, nn.Module]] = {}
    holder = _holder(copy.deepcopy(original).eval())

    def visit(parent: nn.Module, prefix: str) -> None:
        # not named_children, which leaves out the second name of a child
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            path = f"{prefix}{name}"
            made = ours[id(child)][1] if id(child) in ours else None
            if made is None:
                made = replacement_of(child, path.partition(".")[2], seq_len, known, kept)
                ours[id(child)] = child, made
                if made is not child:
                    replaced[path.partition(".")[2]] = made
                visit(made, f"{path}.")
            if made is not child:
                setattr(parent, name, made)

    visit(holder, "")
    module: nn.Module = holder.get_submodule("model")
    return Adapted(module, replaced, kept)


def replacement_of(
    layer: nn.Module,
    path: str,
    seq_len: int,
    known: Mapping[str, tuple[Adapter, Replacement]],
    kept: dict[str, str],
) -> nn.Module:
    """Ours for a layer, or the layer itself if there is none; `kept` then gets the reason if the layer is known."""
    name = qualified_name(layer)
    if name not in known:
        base = next((kind for kind in type(layer).__mro__ if f"{kind.__module__}.{kind.__qualname__}" in known), None)
        if base is not None:
            kept[path] = (
                f"its class is derived from {base.__module__}.{base.__qualname__}, and may compute something else"
            )
        return layer
    if why := why_changed(layer):
        kept[path] = why
        return layer
    try:
        made = known[name][1](layer, seq_len).eval()
    except NotReplaceableError as error:
        kept[path] = str(error)
        return layer
    except NotExportableError as error:
        raise NotExportableError(f"{path or 'the model'} ({name}): {error}") from error
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        # parts of another kind than the package makes, such as adapters of low rank in the place of a projection
        kept[path] = f"its parts are not those that its package makes ({' '.join(str(error).split())})"
        return layer
    if why := exchanged_part(layer):
        kept[path] = why
        return layer
    return made


def why_changed(layer: nn.Module) -> str:
    """Why a layer may not compute what its class did when its package was installed, as half a sentence; or ""."""
    home = type(layer).__module__
    if "forward" in vars(layer) or type(layer).forward.__module__ != home:
        return "its forward was replaced after the class was defined"
    if any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules()):
        return "it has forward hooks, which may change what it computes"
    return ""


def exchanged_part(layer: nn.Module) -> str:
    """Which part of a layer is not one that its package makes, as half a sentence; or ""."""
    expected = {type(layer).__module__.partition(".")[0], *PARTS}
    for name, part in layer.named_children():
        if type(part).__module__.partition(".")[0] not in expected:
            return f"its part {name} is a {qualified_name(part)}"
    return ""


def _holder(model: nn.Module) -> nn.Module:
    """A module with the model as its only child, so that the model itself can be replaced, too."""
    from torch import nn

    holder = nn.Module()
    holder.model = model
    return holder
