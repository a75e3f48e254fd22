"""Weights files of torch.save, without torch.load: an archive, or the format before 2020.

Tensors are made at the end, of what the pickle in the file describes; see `state_dict_pickle`.
Storages of an archive stay in the file until they are read.
"""

from __future__ import annotations

import os
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from effexport.models.checkpoints.state_dict_pickle import (
    DAMAGED,
    MOST_BYTES_OF_PICKLE,
    MOST_TENSORS,
    Storage,
    Unpickler,
    View,
)
from effexport.models.validation import shown

# What finds the memory of a storage.
Memory = Callable[[Storage], torch.UntypedStorage]

# Of an archive, for its directory: zipfile takes 10 µs and 600 bytes for each entry before anything can be looked at.
MOST_BYTES_OF_DIRECTORY = 6 << 20
# The record at its end, one of 64 bits and its place before it, and a comment after it.
LONGEST_END = 22 + 56 + 20 + (1 << 16)
ARCHIVE_MAGIC, ENTRY_HEADER_BYTES = b"PK\x03\x04", 30
# Of the first three pickles of the format before 2020, and the first two.
MOST_BYTES_OF_FACTS = 1024
OLD_MAGIC, OLD_VERSION = 0x1950A86A20F9469CFC6C, 1001
CUT_OFF = "its entries overlap or are cut off"
TOO_LONG = f"it lists tensors for more than {MOST_BYTES_OF_PICKLE:,} bytes"


class NoNamedTensorsError(ValueError):
    """A file holds something else than a state_dict that is harmless. place: where in it one is, such as ['model']."""

    def __init__(self, place: str) -> None:
        super().__init__("it does not hold named tensors")
        self.place = place


def read_torch_file(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a state_dict by name.

    Raises NoNamedTensorsError if there is none, and ValueError for a file that is damaged, large in memory though small
    on the disk, or that names what does not belong to tensors.
    """
    with path.open("rb") as file:
        is_archive = file.read(len(ARCHIVE_MAGIC)) == ARCHIVE_MAGIC
        file.seek(0)
        value, memory_of = read_archive(path, file) if is_archive else read_old(file)
        if not is_state_dict(value):
            raise NoNamedTensorsError(next(places_of_tensors(value), ""))
        if len(value) > MOST_TENSORS:
            raise ValueError(f"it lists {len(value):,} tensors, more than {MOST_TENSORS:,}")
        return {name: tensor_of_view(view, memory_of(view.storage)) for name, view in value.items()}


def is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(type(n) is str and type(v) is View for n, v in value.items())


def places_of_tensors(value: Any, place: str = "", depth: int = 3) -> Iterator[str]:
    """Where in a value such dictionaries are: ['model'] or ['ema']['state_dict']."""
    if not isinstance(value, dict) or not value or not depth:
        return
    if place and is_state_dict(value):
        yield place
        return
    for key, part in value.items():
        yield from places_of_tensors(part, f"{place}[{shown(key)}]", depth - 1)


def read_archive(path: Path, file: IO[bytes]) -> tuple[Any, Memory]:
    """The value in an archive, and what finds the memory of its storages."""
    check_directory(file)
    with zipfile.ZipFile(file) as archive:
        # the folder around all of them has the name that the file had when it was written
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is a compressed archive")
    size = os.fstat(file.fileno()).st_size
    if sum(entry.file_size for entry in entries.values()) > size:
        raise ValueError(CUT_OFF)
    if "data.pkl" not in entries:
        raise ValueError("it is an archive of something else")
    if entries["data.pkl"].file_size > MOST_BYTES_OF_PICKLE:
        raise ValueError(TOO_LONG)
    value = Unpickler(bytes_of_entry(file, entries["data.pkl"])).load()
    # older files have none
    order = bytes_of_entry(file, entries["byteorder"]) if "byteorder" in entries else b"little"
    if order not in (b"little", b"big"):
        raise ValueError("its order of bytes is unknown")
    whole = torch.UntypedStorage.from_file(str(path), False, size)
    found: dict[str, torch.UntypedStorage] = {}

    def memory_of(storage: Storage) -> torch.UntypedStorage:
        if storage.key in found:
            return found[storage.key]
        entry = entries.get(f"data/{storage.key}")
        if entry is None or entry.file_size != storage.size_bytes:
            raise ValueError("its records are not as long as its tensors")
        start = start_of_entry(file, entry)
        memory: torch.UntypedStorage = whole[start : start + storage.size_bytes]
        if order.decode() != sys.byteorder:
            memory = memory.clone()
            memory.byteswap(storage.dtype)
        found[storage.key] = memory
        return memory

    return value, memory_of


def check_directory(file: IO[bytes]) -> None:
    """Raise ValueError for an archive whose directory is longer than that of any model."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_END))
    end = file.read()
    place = end.rfind(b"PK\x05\x06")
    if place < 0:
        raise ValueError(CUT_OFF)
    length = int.from_bytes(end[place + 12 : place + 16], "little")
    if end[max(0, place - 76) :].startswith(b"PK\x06\x06"):  # of a large archive, with 64 bits
        length = int.from_bytes(end[place - 76 + 40 : place - 76 + 48], "little")
    if length > MOST_BYTES_OF_DIRECTORY:
        raise ValueError(f"its directory has {length:,} bytes, more than {MOST_BYTES_OF_DIRECTORY:,}")
    file.seek(0)


def start_of_entry(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Where the bytes of an entry begin: behind a header of its own, whose length the directory does not tell."""
    file.seek(entry.header_offset)
    header = file.read(ENTRY_HEADER_BYTES)
    start = file.tell() + sum(struct.unpack("<HH", header[26:30])) if len(header) == ENTRY_HEADER_BYTES else 0
    if not header.startswith(ARCHIVE_MAGIC) or start + entry.file_size > os.fstat(file.fileno()).st_size:
        raise ValueError(CUT_OFF)
    return start


def bytes_of_entry(file: IO[bytes], entry: zipfile.ZipInfo) -> bytes:
    """Without its checksum, which torch.save may leave out."""
    file.seek(start_of_entry(file, entry))
    return file.read(entry.file_size)


def read_old(file: IO[bytes]) -> tuple[Any, Memory]:
    """The value in a file of the format before 2020, and what finds the memory of its storages.

    There are five pickles: a number, the version, facts about the machine, the value, and the keys of the storages;
    then the storages, each after the number of its elements.
    """
    magic, version, machine = (next_pickle(file, most_bytes=MOST_BYTES_OF_FACTS) for _ in range(3))
    if magic != OLD_MAGIC or version != OLD_VERSION:
        raise ValueError("it is not a file of torch.save")
    if not isinstance(machine, dict) or machine.get("little_endian") is False:
        raise ValueError("its order of bytes is unknown")
    storages: dict[str, Storage] = {}
    value = next_pickle(file, storages)
    keys = next_pickle(file)
    if not isinstance(keys, list) or not all(type(key) is str for key in keys) or sorted(keys) != sorted(storages):
        raise ValueError(DAMAGED)
    end = os.fstat(file.fileno()).st_size
    found: dict[str, torch.UntypedStorage] = {}
    for key in keys:
        size_bytes = storages[key].size_bytes
        count = int.from_bytes(file.read(8), "little")
        if count * storages[key].dtype.itemsize != size_bytes or size_bytes > end - file.tell():
            raise ValueError("its records are not as long as its tensors")
        data = bytearray(size_bytes)
        file.readinto(data)  # type: ignore[attr-defined]
        found[key] = torch.frombuffer(data, dtype=torch.uint8).untyped_storage() if data else torch.UntypedStorage(0)
    return value, lambda storage: found[storage.key]


def next_pickle(
    file: IO[bytes], storages: dict[str, Storage] | None = None, most_bytes: int = MOST_BYTES_OF_PICKLE
) -> Any:
    """The next pickle of a file, which is then read up to its end."""
    start = file.tell()
    data = file.read(most_bytes)
    unpickler = Unpickler(data, storages)
    try:
        value = unpickler.load()
    except ValueError as error:
        if unpickler.place >= MOST_BYTES_OF_PICKLE:
            raise ValueError(TOO_LONG) from error
        raise
    file.seek(start + unpickler.place)
    return value


def tensor_of_view(view: View, memory: torch.UntypedStorage) -> torch.Tensor:
    """Raises ValueError for a view that reaches beyond its storage."""
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    if 0 not in view.shape and (last + 1) * view.dtype.itemsize > view.storage.size_bytes:
        raise ValueError("a tensor reaches beyond its record")
    empty = torch.empty(0, dtype=view.dtype)
    return empty.set_(memory, view.offset, view.shape, view.strides)
