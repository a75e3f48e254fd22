"""Weights of checkpoint folders in the style of Hugging Face: files → module. transformers is not needed.

No pickle is executed: .bin files are read with `weights_only=True`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.models.families import FAMILIES, check_weights_file, read_json
from effexport.models.model_spec import load
from effexport.models.validation import SpecError, require

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effexport.models.checkpoint_spec import CheckpointSpec

# in this order: files without pickle first
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# How many names an error lists of each kind.
LISTED = 10


def module_from_checkpoint(folder: Path, spec: CheckpointSpec) -> nn.Module:
    """The module of a spec with the weights of a folder, float32, in evaluation mode.

    Raises SpecError that lists unknown, missing and misshapen weights, or says which file is damaged.
    """
    family = FAMILIES[spec.family]
    module: nn.Module = load(family.model)(spec)
    fill_module(module, read_weights(folder), family.module.weight_names(spec), family.module.IGNORED, folder)
    return module.eval()


def fill_module(
    module: nn.Module,
    found: Mapping[str, torch.Tensor],
    names: Mapping[str, tuple[str, ...]],
    ignored: Iterable[str],
    source: Path,
    expected: str = "the tensors that its config.json describes: check the task and the sizes",
) -> None:
    """Copy weights into a module, all of them or none.

    names: parameter or buffer of the module → names it may have in the checkpoint, the first one present wins.
    ignored: patterns of names in the checkpoint that are skipped. expected: what to give instead, for the error.
    Raises SpecError with everything that does not fit.
    """
    import torch

    targets = module.state_dict(keep_vars=False)
    missing, misshapen, infinite, complexes = [], [], [], []
    used: set[str] = set()
    chosen: dict[str, torch.Tensor] = {}
    for name, accepted in names.items():
        used.update(accepted)
        given = next((alias for alias in accepted if alias in found), None)
        if given is None:
            missing.append(accepted[0])
        elif found[given].shape != targets[name].shape:
            misshapen.append(f"{given} {list(found[given].shape)}, expected {list(targets[name].shape)}")
        elif found[given].is_complex():
            complexes.append(given)
        # as the float32 that it becomes; for types of 8 bits, PyTorch has no isfinite
        elif found[given].is_floating_point() and not torch.isfinite(found[given].float()).all():
            infinite.append(given)
        else:
            chosen[name] = found[given]
    patterns = [re.compile(pattern) for pattern in ignored]
    unknown = [name for name in found if name not in used and not any(p.fullmatch(name) for p in patterns)]
    kinds = {
        "missing {}": missing,
        "unexpected {}": unknown,
        "{} of the wrong shape": misshapen,
        "{} with NaN or infinity": infinite,
        "{} of complex numbers": complexes,
    }
    problems = [counted_list(kind, bad) for kind, bad in kinds.items() if bad]
    require(
        not problems,
        f"the weights in {source} do not fit the model: {'; '.join(problems)}. Expected {expected}",
    )
    with torch.no_grad():
        for name, value in chosen.items():
            targets[name].copy_(value)


def counted_list(kind: str, names: Iterable[str]) -> str:
    """`2 unexpected tensors: a, b`: the number of tensors, and the first of them; a tied weight counts once."""
    distinct = list(dict.fromkeys(names))
    noun = kind.format("tensor" if len(distinct) == 1 else "tensors")
    return f"{len(distinct)} {noun}: {', '.join(distinct[:LISTED])}" + (", …" if len(distinct) > LISTED else "")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder by name, in the type they were saved in."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            if name.endswith(".index.json"):
                return read_shards(folder, name)
            return read_tensors(folder / name)
    raise SpecError(f"{folder} has no weights; expected one of: {', '.join(WEIGHT_FILES)}")


def read_shards(folder: Path, index: str) -> dict[str, torch.Tensor]:
    """The tensors of an index, each from the shard that the index names."""
    weight_map = read_json(folder / index, "an index has a weight_map").get("weight_map")
    require(
        isinstance(weight_map, dict) and all(isinstance(shard, str) for shard in weight_map.values()),
        f"{folder / index} has no weight_map from names to files; copy it again from its source",
    )
    assert isinstance(weight_map, dict)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        inside = path.resolve().parent == folder.resolve()
        require(inside, f"{folder / index} names {shard!r}, outside the folder; expected files beside the index")
        require(path.is_file(), f"{folder / index} names {shard}, which is missing; copy it from the source")
        tensors |= read_tensors(path)
    absent = [name for name, shard in weight_map.items() if name not in tensors]
    require(
        not absent,
        f"{folder / index} does not match its shards: {len(absent)} weights are in none, {', '.join(absent[:LISTED])}; "
        "copy index and shards from the same source",
    )
    return tensors


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file. Raises SpecError for a file that is truncated, damaged or holds something else."""
    import torch
    from safetensors.torch import load_file

    check_weights_file(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # for other bytes than weights, torch.load raises anything, such as KeyError
        reason = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise SpecError(
            f"{path} is not a readable weights file: {reason}; expected a .safetensors file or a state_dict that "
            "torch.save has written"
        ) from error
    require(
        isinstance(value, dict) and all(isinstance(tensor, torch.Tensor) for tensor in value.values()),
        f"{path} does not hold named tensors; save the state_dict of the model",
    )
    return dict(value)
