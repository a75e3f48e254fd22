"""Weights of checkpoint folders in the style of Hugging Face: files → module. transformers is not needed.

No pickle is executed, see `effexport.models.checkpoints.torch_file`. Weights under other names than a model has, as
wrappers and old conversions write them, end in an error that says how to rename them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.models.checkpoints.spec import FAMILIES, MERGE, check_no_adapter, check_weights_file, read_json
from effexport.models.contract import load
from effexport.models.validation import MOST_BYTES_OF_INDEX, SpecError, require, shown, shown_name, shown_reason

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effexport.models.contract import ModelContract


# in this order: files without pickle first
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# How many names an error lists of each kind.
LISTED = 10
# A model of 10,000 weights has 1 MB.
MOST_BYTES_OF_HEADER = 4 << 20
# of Linux and others, in bytes
LONGEST_FILE_NAME = 255
# How errors about weights end by default.
OF_CONFIG = "the tensors that its config.json describes: check the task and the sizes"


def module_from_checkpoint(folder: Path, spec: ModelContract) -> nn.Module:
    """The module of a spec with the weights of a folder, float32, in evaluation mode.

    Raises SpecError that lists unknown, missing and misshapen weights, or says which file is damaged.
    """
    family = FAMILIES[spec.family]
    names, ignored = family.module.weight_names(spec), family.ignored(spec.task)
    # config.json may claim any size: the module is made when the files, which stay on the disk until then, agree
    chosen = fitting_weights(spec.weights(), read_weights(folder), names, ignored, folder)
    module: nn.Module = load(family.model)(spec)
    copy_weights(module, chosen)
    return module.eval()


def fill_module(
    module: nn.Module,
    found: Mapping[str, torch.Tensor],
    names: Mapping[str, tuple[str, ...]],
    ignored: Iterable[str],
    source: Path,
    expected: str = OF_CONFIG,
) -> None:
    """Copy weights into a module, all of them or none. Arguments and errors as for `fitting_weights`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    copy_weights(module, fitting_weights(shapes, found, names, ignored, source, expected))


def copy_weights(module: nn.Module, chosen: Mapping[str, torch.Tensor]) -> None:
    import torch

    targets = module.state_dict()
    with torch.no_grad():
        for name, value in chosen.items():
            targets[name].copy_(value)


def fitting_weights(
    shapes: Mapping[str, tuple[int, ...]],
    found: Mapping[str, torch.Tensor],
    names: Mapping[str, tuple[str, ...]],
    ignored: Iterable[str],
    source: Path,
    expected: str = OF_CONFIG,
) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint of each parameter and buffer of a module.

    shapes: of the parameters and buffers; a tied one may be left out. names: parameter or buffer → names it may have in
    the checkpoint, the first one present wins. ignored: patterns of names in the checkpoint that are skipped.
    expected: what to give instead, for the error. Raises SpecError with everything that does not fit.
    """
    import torch

    missing, misshapen, complexes, integers, packed = [], [], [], [], []
    infinite: dict[str, str] = {}
    used: set[str] = set()
    chosen: dict[str, torch.Tensor] = {}
    for name, accepted in names.items():
        used.update(accepted)
        given = next((alias for alias in accepted if alias in found), None)
        if given is None:
            missing.append(accepted[0])
        elif tuple(found[given].shape) != shapes.get(name, found[given].shape):
            misshapen.append(f"{given} {shown(list(found[given].shape))}, expected {list(shapes[name])}")
        elif found[given].is_complex():
            complexes.append(given)
        elif not found[given].is_floating_point():
            integers.append(given)
        elif found[given].dtype == torch.float4_e2m1fn_x2:  # PyTorch has no numbers for it
            packed.append(given)
        # as the float32 that it becomes; for types of 8 bits, PyTorch has no isfinite
        elif count := int((~torch.isfinite(found[given].float())).sum()):
            infinite[given] = f"{count:,} of {found[given].numel():,} elements"
        else:
            chosen[name] = found[given]
    patterns = [re.compile(pattern) for pattern in ignored]
    skipped = {name for name in found if any(pattern.fullmatch(name) for pattern in patterns)}
    unknown = [name for name in found if name not in used and name not in skipped]
    kinds: dict[str, Iterable[str] | Mapping[str, str]] = {
        "missing {}": missing,
        "unexpected {}": unknown,
        "{} of the wrong shape": misshapen,
        "{} with NaN or infinity": infinite,
        "{} of complex numbers": complexes,
        "{} of integers": integers,
        "{} of two numbers in a byte": packed,
    }
    problems = [counted_list(kind, bad) for kind, bad in kinds.items() if bad]
    if infinite and len(problems) == 1:
        raise SpecError(
            f"{source} has {problems[0]}; expected numbers: the training has probably diverged, or the file is "
            "damaged: take weights from before that, or copy the file again"
        )
    if renaming := how_to_rename(found, names, skipped) if missing and unknown else "":
        raise SpecError(f"the weights in {source} {renaming}")
    require(
        not problems,
        f"the weights in {source} do not fit the model: {'; '.join(problems)}. Expected {expected}",
    )
    return chosen


def counted_list(kind: str, names: Iterable[str] | Mapping[str, str]) -> str:
    """`2 unexpected tensors: a, b`: the number of tensors, and the first of them; a tied weight counts once.

    names: perhaps with a remark on each.
    """
    distinct = list(dict.fromkeys(names))
    noun = kind.format("tensor" if len(distinct) == 1 else "tensors")
    remarks = names if isinstance(names, Mapping) else {}
    listed = ", ".join(
        shown_name(name) + (f" ({remarks[name]})" if name in remarks else "") for name in distinct[:LISTED]
    )
    return f"{len(distinct)} {noun}: {listed}" + (", …" if len(distinct) > LISTED else "")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder by name, in the type they were saved in."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            if name.endswith(".index.json"):
                return read_shards(folder, name)
            return read_tensors(folder / name)
    check_no_adapter(folder)
    raise SpecError(f"{folder} has no weights; expected one of: {', '.join(WEIGHT_FILES)}")


def read_shards(folder: Path, index: str) -> dict[str, torch.Tensor]:
    """The tensors of an index, each from the shard that the index names."""
    weight_map = read_json(folder / index, "an index has a weight_map", MOST_BYTES_OF_INDEX).get("weight_map")
    require(
        isinstance(weight_map, dict) and all(isinstance(shard, str) for shard in weight_map.values()),
        f"{folder / index} has no weight_map from names to files; copy it again from its source",
    )
    assert isinstance(weight_map, dict)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        check_shard_name(shard, folder / index)
        path = folder / shard
        require(
            path.is_file(), f"{folder / index} names {shown_name(shard)}, which is missing; copy it from the source"
        )
        # of a weight that several files have, the one in the file that the index names
        found = read_tensors(path)
        tensors |= {name: tensor for name, tensor in found.items() if weight_map.get(name, shard) == shard}
    absent = [name for name, shard in weight_map.items() if name not in tensors]
    listed = ", ".join(map(shown_name, absent[:LISTED]))
    require(
        not absent,
        f"{folder / index} does not match its shards: {len(absent)} weights are in none, {listed}; "
        "copy index and shards from the same source",
    )
    return tensors


def check_shard_name(shard: str, index: Path) -> None:
    """Raise SpecError for a name that is not that of a file beside the index."""
    plain = shard.isprintable() and shard not in ("", ".", "..") and not set(shard) & set("/\\:")
    require(plain, f"{index} names {shown(shard)}, outside the folder; expected names of files beside the index")
    require(
        len(shard.encode()) <= LONGEST_FILE_NAME, f"{index} names a file of {len(shard)} characters; expected fewer"
    )


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file. Raises SpecError for a file that is truncated, damaged or holds something else."""
    from safetensors.torch import load_file

    from effexport.models.checkpoints.torch_file import NoNamedTensorsError, read_torch_file

    check_weights_file(path)
    try:
        if path.suffix == ".safetensors":
            check_header(path)
            return load_file(path)
        return read_torch_file(path)
    except NoNamedTensorsError as error:
        remedy = "; save the state_dict of the model"
        if error.place:
            remedy = (
                f", but {error.place} of it does: save that alone: torch.save(torch.load(FILE){error.place}, OTHER)"
            )
        raise SpecError(f"{path} does not hold named tensors{remedy}") from None
    except Exception as error:  # for other bytes than weights, libraries raise anything, such as KeyError
        reason = shown_reason(error)
        raise SpecError(
            f"{path} is not a readable weights file: {reason}; expected a .safetensors file or a state_dict that "
            "torch.save has written"
        ) from error


def check_header(path: Path) -> None:
    """Raise ValueError for a safetensors file that lists more tensors than any model has: each takes memory."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MOST_BYTES_OF_HEADER:
        raise ValueError(f"its header claims {length:,} bytes, more than {MOST_BYTES_OF_HEADER:,}")


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
    """The prefix that most names put before an expected one; "" for none."""
    prefixes: Counter[str] = Counter()
    for name in found:
        starts = [0, *(match.end() for match in re.finditer(r"\.", name))]
        # the longest name that is expected, if one ends with another
        prefixes.update([next((name[:start] for start in starts if name[start:] in expected), "")])
    return prefixes.most_common(1)[0][0] if prefixes else ""


def fitting(found: Iterable[str], names: Mapping[str, Collection[str]]) -> int:
    """The number of a model's weights that were found."""
    known = set(found)
    return sum(any(name in known for name in accepted) for accepted in names.values())
