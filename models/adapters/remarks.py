"""Sentences for the report: which layers were replaced, and which were not although they are known."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from effexport.models.adapters.adapter import Adapted, Adapter, DrawsNumbers, is_below, named, qualified_name
from effexport.models.adapters.table import replacements

if TYPE_CHECKING:
    from torch import nn


def remarks_on(original: nn.Module, adapted: Adapted, turned: int) -> tuple[str, ...]:
    """Every sentence on the layers of a model that concerns the user.

    turned: how many calls of F.scaled_dot_product_attention became an operator of ours.
    """
    return (
        *replaced_remarks(original, adapted.replaced),
        *drawn_remarks(original, adapted.replaced),
        *version_remarks(original, adapted.replaced),
        *kept_remarks(original, adapted.kept),
        *folded_remarks(adapted.folded),
        *turned_remarks(turned),
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
        variants = sorted({variant for path in paths for variant in variants_in(replaced[path])})
        if variants:
            form = " and ".join(variants)
            weights = ", with its weights" if any(True for _ in replaced[paths[0]].parameters()) else ""
            yield f"{name} runs as effexport's {form} attention{weights}: {places(paths)}."


def kept_remarks(original: nn.Module, kept: Mapping[str, str]) -> Iterator[str]:
    """One sentence for each class and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path, why in kept.items():
        groups.setdefault((qualified_name(original.get_submodule(path)), why), []).append(path)
    for (name, why), paths in groups.items():
        layers = f"{places(paths)} ({name})" if paths != [""] else name
        yield f"{layers} {'is' if len(paths) == 1 else 'are'} exported as PyTorch has it: {why}."


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
        name = qualified_name(original.get_submodule(path))
        if name in known:  # not a wrapper of another package
            seen.setdefault(known[name][0].package, known[name][0])
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


def folded_remarks(folded: Sequence[str]) -> Iterator[str]:
    if folded:
        yield (
            f"The file holds the weights of {places(folded)} as evaluation mode computes them from others, such as "
            "those of a norm or of an adapter of low rank."
        )


def variants_in(ours: nn.Module) -> set[str]:
    """The variants of attention in a replacement."""
    from effexport.models.adapters.linear_function import LinearFunction
    from effexport.models.layers import AttentionLayer

    layers = [child for child in ours.modules() if isinstance(child, AttentionLayer | LinearFunction)]
    return {layer.variant if isinstance(layer, LinearFunction) else layer.spec.variant for layer in layers}


def places(paths: Sequence[str]) -> str:
    """The first places of a class, "" being the model itself."""
    listed = ", ".join(path or "the model itself" for path in paths[:3])
    return listed + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
