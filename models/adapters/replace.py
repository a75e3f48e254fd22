"""A copy of a model in which known layers of other packages are replaced by ours, and the sentences of its report on
them."""

from __future__ import annotations

import functools
import importlib.metadata
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import (
    Adapted,
    Adapter,
    DrawsNumbers,
    NotExportableError,
    NotReplaceableError,
    Replacement,
    is_below,
    named,
    qualified_name,
)
from effexport.models.adapters.fla_functions import FORMS
from effexport.models.adapters.folding import (
    detached_copy,
    fold_computed_weights,
    has_hooks,
    unwrapped_layer,
    with_plain_projections,
    with_read_weights,
)
from effexport.models.adapters.structure import counterpart
from effexport.models.layers import failing_module
from effexport.models.user.probe import ModuleFailedError


@functools.cache
def adapters() -> tuple[Adapter, ...]:
    """Those of all packages: an ADAPTER in a file of this folder."""
    names = (found.name for found in pkgutil.iter_modules(sys.modules[__package__].__path__))
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    return tuple(module.ADAPTER for module in modules if hasattr(module, "ADAPTER"))


def replacements() -> dict[str, tuple[Adapter, Replacement]]:
    """Every layer that has a counterpart of ours, by qualified class name."""
    found: dict[str, tuple[Adapter, Replacement]] = {}
    for adapter in adapters():
        for name, replacement in adapter.replacements.items():
            assert name not in found, f"{name} occurs twice"
            found[name] = (adapter, replacement)
    return found


# Largest difference by stored weights, as a fraction of the RMS of an answer: far above rounding.
FOLDED_ERROR = 1e-4
# Attributes of layers that PyTorch and the exporter set.
SET_BY_US = ("training", "fused")
# Of parts that another class has taken the place of, such as one with an adapter of low rank.
READ = "PyTorch reads its weight and its bias in evaluation mode without gradients, and does not call it"
# Where the parts of known layers come from, beside their own package: a part of any other has been exchanged.
PARTS = ("torch", "local_attention", "axial_positional_embedding", "product_key_memory", "einops")


def with_our_layers(original: nn.Module, seq_len: int, keep: Mapping[str, str] | None = None) -> Adapted:
    """Replace the known layers anywhere in a copy of a model; `original` stays as it is.

    seq_len: the length in tokens that the model is exported for. keep: layers to keep all the same, with the reasons.
    Raises NotExportableError, with the path of the layer, for a behaviour that no file can have.
    """
    known = replacements()
    replaced: dict[str, nn.Module] = {}
    kept = dict(keep or {})
    # one layer in several places stays one layer; the replaced ones are held, so that their ids stay their own
    ours: dict[int, tuple[nn.Module, nn.Module]] = {}
    model = detached_copy(original).eval()
    folded, by_answers = fold_computed_weights(model, kept), list[str]()
    holder = _holder(model)

    def visit(parent: nn.Module, prefix: str) -> None:
        # not named_children, which leaves out the second name of a child
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            path = f"{prefix}{name}"
            made = ours[id(child)][1] if id(child) in ours else None
            if made is None:
                made = replacement_of(child, path.partition(".")[2], seq_len, known, kept, folded, by_answers)
                ours[id(child)] = child, made
                if made is not child:
                    replaced[path.partition(".")[2]] = made
                visit(made, f"{path}.")
                if made is not child and type(made).__module__.startswith("effexport."):
                    seal(made)
            if made is not child:
                setattr(parent, name, made)

    visit(holder, "")
    return Adapted(holder.get_submodule("model"), replaced, kept, folded, by_answers)


def replacement_of(
    layer: nn.Module,
    path: str,
    seq_len: int,
    known: Mapping[str, tuple[Adapter, Replacement]],
    kept: dict[str, str],
    folded: list[str],
    by_answers: list[str],
) -> nn.Module:
    """Ours for a layer, or the layer itself if there is none; `kept` then gets the reason if the layer is known.

    folded: gets the paths of its parts that are linear layers in ours. by_answers: gets the path of a layer whose class
    is unknown.
    """
    if path in kept:
        return layer
    name = qualified_name(layer)
    if name not in known:
        if (inner := unwrapped_layer(layer)) is not None:
            folded.append(path)
            return replacement_of(inner, path, seq_len, known, kept, folded, by_answers)
        if (found := counterpart(layer, seq_len, known)) is not None:
            made, parts = found
            folded += [f"{path}.{part}" if path else part for part in parts]
            by_answers.append(path)
            return made
        base = next((kind for kind in type(layer).__mro__ if f"{kind.__module__}.{kind.__qualname__}" in known), None)
        if base is not None:
            kept[path] = (
                f"its class is derived from {base.__module__}.{base.__qualname__}, but no layer of effexport was found "
                "that gives the same answers"
            )
        return layer
    adapter, replacement = known[name]
    try:
        plain, parts = with_plain_projections(layer, adapter.projections)
        plain, read = with_read_weights(plain, adapter.reads(plain))
        if why := why_changed(plain):
            raise NotReplaceableError(why)
        made = replacement(plain, seq_len).eval()
    except NotReplaceableError as error:
        kept[path] = str(error)
        return layer
    except NotExportableError as error:
        raise NotExportableError(f"{path or 'the model'} ({name}): {error}") from error
    except Exception as error:  # whatever parts of another kind than the package makes lead to
        kept[path] = f"its parts are not those that its package makes ({' '.join(str(error).split())})"
        return layer
    if why := exchanged_part(plain):
        kept[path] = why
        return layer
    prefix = f"{path}." if path else ""
    folded += [prefix + part for part in parts]
    kept.update({prefix + part: READ for part in read})
    return made


def seal(layer: nn.Module) -> None:
    """Let a layer of ours raise NotReplaceableError when the model that called the original sets an attribute of it,
    such as a scale that depends on the length: ours would not read it."""
    kind = type(layer)

    def refuse(self: nn.Module, name: str, value: Any) -> None:
        own = (self._parameters, self._buffers, self._modules)
        if not isinstance(value, nn.Module) and name not in SET_BY_US and not any(name in kept for kept in own):
            raise NotReplaceableError(f"the model sets its attribute {name} while it runs")
        super(sealed, self).__setattr__(name, value)  # type: ignore[arg-type]

    sealed = type(kind.__name__, (kind,), {"__setattr__": refuse, "__module__": kind.__module__})
    layer.__class__ = sealed


def why_changed(layer: nn.Module) -> str:
    """The reason a layer may compute something else than its class as installed, as half a sentence; or ""."""
    home = type(layer).__module__
    if "forward" in vars(layer) or type(layer).forward.__module__ != home:
        return "its forward was replaced after the class was defined"
    if has_hooks(layer):
        return "it has forward hooks, which may change what it computes"
    return ""


class NotAsOriginalError(Exception):
    """A copy with folded weights, or with layers that were known by their answers, does not answer as its original."""


@torch.inference_mode()
def check_folded(original: nn.Module, adapted: Adapted, tensors: Sequence[Tensor]) -> None:
    """Raise NotAsOriginalError if the answers of a copy whose weights were folded, or with layers that were known by
    their answers, differ from those of the original.

    They do for a model that reads its weights without a call, that switches its adapters on and off while it runs, or
    whose layer does something else at this length. Both are called by position. Hashes may differ by a tie, and are
    left to the proof.
    """
    if not (adapted.folded or adapted.by_answers) or any(
        isinstance(ours, DrawsNumbers) for ours in adapted.replaced.values()
    ):
        return
    try:
        answers = original(*tensors)
    except Exception:  # whatever the user's code raises: it is reported where lengths are tried
        return
    for expected, actual in zip(answers, adapted.module(*tensors), strict=True):
        finite = expected.isfinite()
        wanted, found = expected[finite].double(), actual[finite].double()
        if wanted.numel() and not (found - wanted).abs().max() <= FOLDED_ERROR * wanted.square().mean().sqrt():
            raise NotAsOriginalError


def layers_at_fault(error: ModuleFailedError | NotAsOriginalError, adapted: Adapted) -> dict[str, str]:
    """The parts to keep as in the original, so that a copy does not fail, with the reasons: replaced layers and modules
    with stored weights. Those around the place of an error, or all; none if there are none."""
    if isinstance(error.__cause__, NotExportableError):  # nor can the original be exported
        return {}
    ours = [*adapted.replaced, *adapted.folded]
    if isinstance(error, NotAsOriginalError):
        if adapted.by_answers:  # first, because weights are folded in every model that has computed ones
            return dict.fromkeys(
                adapted.by_answers, "with effexport's layer in its place, the model has another answer"
            )
        changed = [path for path in ours if any(is_below(folded, path) for folded in adapted.folded)]
        return dict.fromkeys(changed, "with weights as evaluation mode computes them, the model has another answer")
    place = failing_module(error.__cause__ or error, adapted.module).partition(" (")[0]
    around = [path for path in ours if place and (is_below(path, place) or is_below(place, path))]
    why = f"with effexport's layer in its place, {' '.join(str(error).split())}"
    if isinstance(error.__cause__, NotReplaceableError):  # of a call that ours does not take
        why = str(error.__cause__)
    return dict.fromkeys(around or ours, why)


def exchanged_part(layer: nn.Module) -> str:
    """The part of a layer that its package does not make, as half a sentence; or ""."""
    expected = {type(layer).__module__.partition(".")[0], *PARTS}
    for name, part in layer.named_children():
        if type(part).__module__.partition(".")[0] not in expected:
            return f"its part {name} is a {qualified_name(part)}"
    return ""


def _holder(model: nn.Module) -> nn.Module:
    """A module with the model as its only child, so that the model itself can be replaced, too."""
    holder = nn.Module()
    holder.model = model
    return holder


def remarks_on(original: nn.Module, adapted: Adapted, turned: Mapping[str, int]) -> tuple[str, ...]:
    """Every sentence on the layers of a model that concerns the user.

    turned: how many calls of functions became operators of ours, by name.
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


def turned_remarks(turned: Mapping[str, int]) -> Iterator[str]:
    for name, count in turned.items():
        calls = "1 call" if count == 1 else f"{count} calls"
        owner, ours = ("fla-core's ", "linear recurrence") if name in FORMS else ("", "softmax attention")
        if count:
            yield f"{calls} of {owner}{name} became effexport's {ours}."


def folded_remarks(folded: Sequence[str]) -> Iterator[str]:
    if folded:
        yield (
            f"The file holds the weights of {places(folded)} as evaluation mode computes them from others, such as "
            "those of a norm or of an adapter of low rank."
        )


def variants_in(ours: nn.Module) -> set[str]:
    """The variants of attention in a replacement."""
    from effexport.models.adapters.linear_function import LinearFunction, RecurrentFunction
    from effexport.models.adapters.local_attention import BandedFunction
    from effexport.models.layers import AttentionLayer

    functions = BandedFunction | LinearFunction | RecurrentFunction
    layers = [child for child in ours.modules() if isinstance(child, AttentionLayer | functions)]
    return {layer.spec.variant if isinstance(layer, AttentionLayer) else layer.variant for layer in layers}


def places(paths: Sequence[str]) -> str:
    """The first places of a class, "" being the model itself."""
    listed = ", ".join(path or "the model itself" for path in paths[:3])
    return listed + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
