"""Weights of checkpoint folders in the style of Hugging Face: files → module. transformers is not needed.

No pickle is executed: .bin files are read with `weights_only=True`.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from effexport.models.bounded_file import MOST_BYTES_OF_INDEX
from effexport.models.families import FAMILIES, check_no_adapter, check_weights_file, read_json
from effexport.models.model_spec import load
from effexport.models.other_names import how_to_rename
from effexport.models.validation import SpecError, require, shown, shown_name, shown_reason

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
# A model of 10,000 weights has 1 MB.
MOST_BYTES_OF_HEADER = 4 << 20
# of Linux and others, in bytes
LONGEST_FILE_NAME = 255
# How errors about weights end by default.
OF_CONFIG = "the tensors that its config.json describes: check the task and the sizes"
# What the pickle of a state_dict names. `weights_only=True` allows more: sparse tensors, and functions such as
# bytearray, which makes gigabytes from a few bytes.
STATE_DICT_GLOBALS = re.compile(
    r"collections OrderedDict|torch Size|torch\.nn\.parameter Parameter|torch(\.storage|\.cuda)? \w+Storage"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter)"
    r"|torch (u?int|b?float|complex|double|half|long|bool)\w*"
)


def module_from_checkpoint(folder: Path, spec: CheckpointSpec) -> nn.Module:
    """The module of a spec with the weights of a folder, float32, in evaluation mode.

    Raises SpecError that lists unknown, missing and misshapen weights, or says which file is damaged.
    """
    family = FAMILIES[spec.family]
    names, ignored = family.module.weight_names(spec), family.module.IGNORED
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

    missing, misshapen, complexes, integers = [], [], [], []
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
    import torch
    from safetensors.torch import load_file

    check_weights_file(path)
    try:
        if path.suffix == ".safetensors":
            check_header(path)
            return load_file(path)
        check_pickle(path)
        # the tensors of an archive stay in the file until they are read
        is_archive = zipfile.is_zipfile(path)
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
        has_names = isinstance(value, dict) and all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items()
        )
        if is_archive and has_names:
            check_records(path, list(value.values()))
    except Exception as error:  # for other bytes than weights, torch.load raises anything, such as KeyError
        reason = shown_reason(error)
        raise SpecError(
            f"{path} is not a readable weights file: {reason}; expected a .safetensors file or a state_dict that "
            "torch.save has written"
        ) from error
    if not has_names:
        places = list(places_of_tensors(value))
        remedy = "; save the state_dict of the model"
        if places:
            remedy = f", but {places[0]} of it does: save that alone: torch.save(torch.load(FILE){places[0]}, OTHER)"
        raise SpecError(f"{path} does not hold named tensors{remedy}")
    return dict(value)


def places_of_tensors(value: object, place: str = "", depth: int = 3) -> Iterator[str]:
    """Where in a file that holds more than a state_dict such dictionaries are: ['model'] or ['ema']['state_dict']."""
    import torch

    if not isinstance(value, dict) or not value or not depth:
        return
    if place and all(isinstance(key, str) and isinstance(part, torch.Tensor) for key, part in value.items()):
        yield place
        return
    for key, part in value.items():
        yield from places_of_tensors(part, f"{place}[{shown(key)}]", depth - 1)


def check_header(path: Path) -> None:
    """Raise ValueError for a safetensors file that lists more tensors than any model has: each takes memory."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MOST_BYTES_OF_HEADER:
        raise ValueError(f"its header claims {length:,} bytes, more than {MOST_BYTES_OF_HEADER:,}")


def check_pickle(path: Path) -> None:
    """Raise ValueError for a file that torch.load would read with `weights_only=True`, but that a state_dict is not in:
    one that is small on the disk and large in memory, or that calls functions that make large objects."""
    with path.open("rb") as file:
        if not zipfile.is_zipfile(path):
            # written before 2020: a number, the version of the format, the machine, and the weights
            for _ in range(4):
                check_calls(file)
            return
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is a compressed archive")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ValueError("its entries overlap or are cut off")
        for entry in entries:
            if entry.filename.endswith("data.pkl"):
                with archive.open(entry) as file:
                    check_calls(file)


def check_records(path: Path, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless the records of an archive are as long as the tensors that torch.load has mapped to them:
    it does not look itself, and reads on into the next record."""
    with zipfile.ZipFile(path) as archive:
        # below a folder with the name that the file had when it was written, which may be "data" as well
        records = [entry for entry in archive.infolist() if PurePosixPath(entry.filename).match("*/data/*")]
    in_file = [entry.file_size for entry in sorted(records, key=lambda entry: entry.header_offset) if entry.file_size]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    if [size for _, size in sorted(storages.items()) if size] != in_file:
        raise ValueError("its records are not as long as its tensors")


def check_calls(file: IO[bytes]) -> None:
    """Raise ValueError if the next pickle of a file names anything that does not belong to tensors, or too many."""
    for opcode, argument, place in pickletools.genops(file):
        if (place or 0) > MOST_BYTES_OF_HEADER:
            raise ValueError(f"it lists tensors for more than {MOST_BYTES_OF_HEADER:,} bytes")
        if opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST") and not STATE_DICT_GLOBALS.fullmatch(str(argument)):
            raise ValueError(f"it has more than tensors in it, {shown_name(str(argument))}")
