"""Sentences for the report: which layers were replaced, which were not although they are known, and which are not."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from effexport.models.adapters.adapter import Adapted, Adapter, DrawsNumbers, is_below, named, qualified_name
from effexport.models.adapters.table import replacements

if TYPE_CHECKING:
    from torch import nn

    from effexport.models.layers import AttentionLayer

# Words in the names of a class and of its attributes → the variant that such a layer resembles; the first that occurs.
RESEMBLES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("nystrom", "landmark"), "nystrom"),
    (("lsh", "reformer", "n_hashes", "num_hashes", "bucket"), "lsh"),
    (("aft", "attentionfree"), "aft-full"),
    (("linearattention", "performer", "feature_map", "kernel_fn"), "linear"),
    (("attention", "attn", "mha"), "softmax"),
)
# Classes with these words in their names are not attention themselves.
PARTS = ("dropout", "norm", "output", "mask", "config", "embedding", "block", "encoder", "decoder", "transformer")


def remarks_on(original: nn.Module, adapted: Adapted, turned: int) -> tuple[str, ...]:
    """Every sentence on the layers of a model that concerns the user.

    turned: how many calls of F.scaled_dot_product_attention became an operator of ours.
    """
    return (
        *replaced_remarks(original, adapted.replaced),
        *drawn_remarks(original, adapted.replaced),
        *version_remarks(original, adapted.replaced),
        *(f"{named(original, path)} is exported as PyTorch has it: {why}." for path, why in adapted.kept.items()),
        *turned_remarks(turned),
        *unknown_remarks(original, adapted, "softmax" if turned else ""),
    )


def replaced_remarks(original: nn.Module, replaced: Mapping[str, nn.Module]) -> Iterator[str]:
    """One sentence for each class that was replaced."""
    by_class: dict[str, list[str]] = {}
    for path in replaced:
        # a container whose layers are replaced, too, is not worth a sentence
        if any(other != path and is_below(other, path) for other in replaced):
            continue
        by_class.setdefault(qualified_name(original.get_submodule(path)), []).append(path)
    for name, paths in by_class.items():
        variants = sorted({layer.spec.variant for path in paths for layer in our_layers(replaced[path])})
        if variants:
            form = " and ".join(variants)
            yield f"{name} runs as effexport's {form} attention, with its weights: {places(paths)}."


def drawn_remarks(original: nn.Module, replaced: Mapping[str, nn.Module]) -> Iterator[str]:
    paths = [path for path, ours in replaced.items() if isinstance(ours, DrawsNumbers)]
    if paths:
        yield (
            f"{named(original, paths[0])} draws random numbers in every call; the file holds numbers drawn once, and "
            "the reference is the original with the same numbers."
        )


def version_remarks(original: nn.Module, replaced: Mapping[str, nn.Module]) -> Iterator[str]:
    """One sentence for each package whose installed version was not tested."""
    known = replacements()
    seen: dict[str, Adapter] = {}
    for path in replaced:
        adapter = known[qualified_name(original.get_submodule(path))][0]
        seen.setdefault(adapter.package, adapter)
    for package, adapter in seen.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not any(version == tested or version.startswith(f"{tested}.") for tested in adapter.tested):
            yield (
                f"{package} {version} was not tested with effexport, which knows {', '.join(adapter.tested)}; the "
                "comparison with the original decides."
            )


def turned_remarks(turned: int) -> Iterator[str]:
    if turned:
        calls = "1 call" if turned == 1 else f"{turned} calls"
        yield f"{calls} of F.scaled_dot_product_attention became effexport's softmax attention."


def unknown_remarks(original: nn.Module, adapted: Adapted, turned: str) -> Iterator[str]:
    """One sentence for each class that looks like attention and is neither known nor ours, nor holds such a layer.

    turned: the variant whose calls became operators wherever they are, so that its classes need no sentence.
    """
    from effexport.models.layers import AttentionLayer

    by_class: dict[str, list[str]] = {}
    inside = {*adapted.replaced, *adapted.kept}
    for path, child in original.named_modules():
        if any(is_below(path, other) or is_below(other, path) for other in inside):
            continue
        if any(isinstance(part, AttentionLayer) for part in child.modules()):
            continue
        if resembled(child) not in ("", turned):
            by_class.setdefault(qualified_name(child), []).append(path)
            inside.add(path)
    for name, paths in by_class.items():
        variant = resembled(original.get_submodule(paths[0]))
        yield (
            f"{name} is not known to effexport and is exported as PyTorch has it: {places(paths)}. It resembles "
            f"{variant} attention: a layer of effexport.models.{variant.replace('-', '_')} would have kernels."
        )


def resembled(layer: nn.Module) -> str:
    """The variant that an unknown layer resembles by its names; "" if it does not look like attention."""
    name = type(layer).__name__.lower()
    if any(part in name for part in PARTS) or not any(word in name for words, _ in RESEMBLES for word in words):
        return ""
    names = [name, *(key.lower() for key in vars(layer)), *(key.lower() for key, _ in layer.named_children())]
    return next((variant for words, variant in RESEMBLES if any(word in key for word in words for key in names)), "")


def our_layers(module: nn.Module) -> list[AttentionLayer]:
    from effexport.models.layers import AttentionLayer

    return [child for child in module.modules() if isinstance(child, AttentionLayer)]


def places(paths: list[str]) -> str:
    """The first places of a class, "" being the model itself."""
    listed = ", ".join(path or "the model itself" for path in paths[:3])
    return listed + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
