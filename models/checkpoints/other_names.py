"""Weights under other names than a model has, as wrappers and old conversions write them: how to rename them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from effexport.models.validation import shown_name

# A part of the names in a file → what it is in the names of the model, and who writes it so.
REPLACED = {
    "_orig_mod.": ("", "torch.compile"),
    "_fsdp_wrapped_module.": ("", "FSDP"),
    "_checkpoint_wrapped_module.": ("", "activation checkpointing"),
    ".gamma": (".weight", "an old conversion from TensorFlow"),
    ".beta": (".bias", "an old conversion from TensorFlow"),
}
# Parts of the names that PEFT gives to adapters, and to the layers that it wraps.
OF_ADAPTERS = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer)\.")
MERGE = "merge the adapter into its model, and save that: model.merge_and_unload().save_pretrained(FOLDER)"
# How many names that belong to no weight an expression leaves out; with more of them, it is another model.
MOST_LEFT_OUT = 5


def how_to_rename(found: Iterable[str], names: Mapping[str, Collection[str]], ignored: Collection[str] = ()) -> str:
    """The end of a sentence about a file whose names would fit if they were changed: who writes them so, and the
    expression that renames them; "" if nothing known makes them fit.

    names: as for `fitting_weights`. ignored: of the found names, those that the model does not need.
    """
    found = list(found)
    adapters = [name for name in found if OF_ADAPTERS.search(name)]
    if adapters:
        return f"are those of an adapter of PEFT, such as {shown_name(adapters[0])}: {MERGE}"
    expected = {name for accepted in names.values() for name in accepted}
    renamed, expression, writers = found, "name", []
    for part, (new, writer) in REPLACED.items():
        after = [name if name in expected else name.replace(part, new) for name in renamed]
        if after != renamed:
            renamed, expression = after, f"{expression}.replace({part!r}, {new!r})"
            writers.append(writer)
    if prefix := common_prefix(renamed, expected):
        renamed = [name.removeprefix(prefix) for name in renamed]
        expression = f"{expression}.removeprefix({prefix!r})"
        writers.append("DataParallel" if prefix == "module." else "a model around this one")
    left = [old for old, new in zip(found, renamed, strict=True) if new not in expected and old not in ignored]
    # otherwise it is another model, and renaming does not help
    if not writers or 2 * fitting(renamed, names) <= len(names) + fitting(found, names) or len(left) > MOST_LEFT_OUT:
        return ""
    old, new = next((old, new) for old, new in zip(found, renamed, strict=True) if old != new and new in expected)
    others = f" if name not in {left}" if left else ""
    return (
        f"have other names, from {' and '.join(dict.fromkeys(writers))}, such as {shown_name(old)} for "
        f"{shown_name(new)}: save them as {{{expression}: tensor for name, tensor in tensors.items(){others}}}"
    )


def common_prefix(found: Iterable[str], expected: Collection[str]) -> str:
    """What most names have before one that is expected; "" if they have nothing."""
    prefixes: Counter[str] = Counter()
    for name in found:
        starts = [0, *(match.end() for match in re.finditer(r"\.", name))]
        # the longest name that is expected, if one ends with another
        prefixes.update([next((name[:start] for start in starts if name[start:] in expected), "")])
    return prefixes.most_common(1)[0][0] if prefixes else ""


def fitting(found: Iterable[str], names: Mapping[str, Collection[str]]) -> int:
    """How many weights of a model are there."""
    known = set(found)
    return sum(any(name in known for name in accepted) for accepted in names.values())
