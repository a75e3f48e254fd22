"""Weights files of torch.save, without torch.load or the module pickle: an archive, or the format before 2020.

Nothing that a pickle names is called, and its cost is bounded. A state_dict needs few instructions: here they act on
plain values, such as texts, numbers, tuples, lists, dicts, names such as `torch FloatStorage`, and `View`, which
describes a tensor. Tensors are made at the end; storages of an archive stay in the file until they are read.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from effexport.models.validation import shown, shown_name

# Of a pickle. A model of 10,000 weights has 1 MB.
MOST_BYTES_OF_PICKLE = 4 << 20
# Of a pickle of that size: torch.save writes 110 to 140 bytes and 33 to 45 instructions for each tensor.
MOST_TENSORS = 50_000
MOST_STEPS = MOST_BYTES_OF_PICKLE // 3
# What a pickle makes, by its memory: a list, a dict or a tuple is one part, a tensor or a storage as much as five. For
# a tensor, torch.save has a storage and six of the others.
PARTS_OF_VIEW = 5
MOST_PARTS = 2 * (PARTS_OF_VIEW + 3) * MOST_TENSORS
# Instructions begin a tuple or a list in another one: the sizes of a tensor in its arguments, in a dict; more where
# models are nested in other values.
MOST_LEVELS = 100
# Of a name that a pickle imports, and of the sizes of a tensor: PyTorch computes with up to 64.
LONGEST_NAME, MOST_DIMS = 200, 64
# What the pickle of a state_dict names.
STATE_DICT_GLOBALS = re.compile(
    r"collections OrderedDict|torch Size|torch\.nn\.parameter Parameter|torch(\.storage|\.cuda)? \w+Storage"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter)"
    r"|torch (u?int|b?float|complex|double|half|long|bool)\w*"
)
DTYPES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128, "Untyped": torch.uint8,
}  # fmt: skip
DAMAGED = "its pickle is cut off or damaged"


class Name(str):
    """A reference in a pickle: a module and a name in it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Storage:
    """The memory of tensors: `size_bytes` of the file, under a key."""

    key: str
    dtype: torch.dtype
    size_bytes: int


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: a part of a storage. offset, strides: in elements."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Unpickler:
    """Carries out the instructions of a pickle that a state_dict needs. place: of the next one.

    storages: collects what the pickle refers to, by key.
    """

    def __init__(self, data: bytes, storages: dict[str, Storage] | None = None) -> None:
        self.data = data
        self.place = 0
        self.storages = {} if storages is None else storages
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.parts = 0  # that were made so far

    def load(self) -> Any:
        """The value of the pickle. Raises ValueError for one that is damaged, or is not of a state_dict."""
        data, stack = self.data, self.stack
        try:
            for _ in range(MOST_STEPS):
                code = data[self.place]
                self.place += 1
                if code == STOP:
                    return stack.pop()
                INSTRUCTIONS[code](self)
        except (IndexError, KeyError, TypeError, UnicodeDecodeError, struct.error) as error:
            raise ValueError(DAMAGED) from error
        raise ValueError(f"its pickle has more than {MOST_STEPS:,} instructions")

    def take(self, count: int) -> bytes:
        """The next bytes, all of them or IndexError."""
        start = self.place
        self.place = start + count
        if self.place > len(self.data):
            raise IndexError
        return self.data[start : self.place]

    def line(self) -> str:
        end = self.data.find(b"\n", self.place, self.place + LONGEST_NAME)
        if end < 0:
            raise IndexError
        line = self.data[self.place : end].decode("ascii")
        self.place = end + 1
        return line

    def count(self, parts: int) -> None:
        self.parts += parts
        if self.parts > MOST_PARTS:
            raise ValueError(f"it has more in it than {MOST_TENSORS:,} tensors")

    def push(self, container: Any) -> None:
        self.count(1)
        self.stack.append(container)

    def since_mark(self) -> list[Any]:
        """Take what was put on the stack since the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def mark(self) -> None:
        if len(self.marks) == MOST_LEVELS:
            raise ValueError(f"its pickle is nested more than {MOST_LEVELS} levels deep")
        self.marks.append(len(self.stack))

    def push_name(self) -> None:
        name = f"{self.line()} {self.line()}"
        if not STATE_DICT_GLOBALS.fullmatch(name):
            raise ValueError(f"it has more than tensors in it, {shown_name(name)}")
        self.stack.append(Name(name))

    def push_text(self, length: int) -> None:
        self.stack.append(self.take(length).decode("utf-8", "surrogatepass"))

    def push_tuple(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) < count:
            raise IndexError
        del self.stack[-count:]
        self.push(items)

    def put(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def append(self, items: Sequence[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise TypeError
        self.stack[-1].extend(items)

    def set_items(self, items: Sequence[Any]) -> None:
        target = self.stack[-1]
        # other keys, also long integers, can be chosen so that a dict of them takes hours
        if type(target) is not dict or len(items) % 2 or not all(is_key(key) for key in items[::2]):
            raise TypeError
        target.update(zip(items[::2], items[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items((key, value))

    def build(self) -> None:
        """Attributes of a dict, such as those in which modules keep their versions, are left out."""
        self.stack.pop()
        if type(self.stack[-1]) is not dict:
            raise TypeError

    def call(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(arguments) is not tuple:
            raise TypeError
        self.push(self.called(name, arguments))

    def called(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """The stand-in for the result of a call in the pickle."""
        match name.rpartition(" ")[2], arguments:
            case "OrderedDict", ():
                return {}
            case "OrderedDict", (list() as pairs,) if all(type(pair) is list and len(pair) == 2 for pair in pairs):
                # of Python 2; the list is emptied, because another one in its place would cost as much again
                self.stack.append({})
                self.set_items([part for pair in pairs for part in pair])
                pairs.clear()
                return self.stack.pop()
            case "Size", (tuple() as sizes,):
                return sizes
            case "Parameter" | "_rebuild_parameter", (View() as view, *_):
                return view
            case "_rebuild_tensor" | "_rebuild_tensor_v2", (Storage() as storage, offset, shape, strides, *rest):
                return self.view(storage, storage.dtype, offset, shape, strides, rest[2:])
            case "_rebuild_tensor_v3", (Storage() as storage, offset, shape, strides, _, _, Name() as kind, *rest):
                dtype = getattr(torch, kind.partition(" ")[2], None)
                if isinstance(dtype, torch.dtype):
                    return self.view(storage, dtype, offset, shape, strides, rest)
        raise ValueError(f"it has more than tensors in it, {shown_name(name)}")

    def view(
        self, storage: Storage, dtype: torch.dtype, offset: Any, shape: Any, strides: Any, flags: Sequence[Any]
    ) -> View:
        self.count(PARTS_OF_VIEW)
        if type(shape) is not tuple or type(strides) is not tuple or not len(shape) == len(strides) <= MOST_DIMS:
            raise TypeError
        if not all(type(size) is int and 0 <= size < 2**62 for size in (offset, *shape, *strides)):
            raise TypeError
        if flags and flags[0]:  # such as negated and conjugated
            raise ValueError("a tensor is stored in another form than its own")
        return View(storage, dtype, offset, shape, strides)

    def push_storage(self) -> None:
        """Push a part that the file holds elsewhere: always the storage of a tensor."""
        self.count(PARTS_OF_VIEW)
        match self.stack.pop():
            case "storage", Name() as name, str() as key, _, int() as count, *rest if rest in ([], [None]):
                dtype = DTYPES.get(name.rpartition(" ")[2].removesuffix("Storage"))
            case _:
                raise TypeError
        if dtype is None:
            raise ValueError(f"it has more than tensors in it, {shown_name(name)}")
        if not 0 <= count < 2**60:
            raise TypeError
        storage = Storage(key, dtype, count * dtype.itemsize)
        if self.storages.setdefault(key, storage) != storage:
            raise ValueError("its records are not as long as its tensors")
        self.stack.append(storage)


def is_key(value: Any) -> bool:
    return type(value) is str or (type(value) is int and 0 <= value < 2**32)


def unsigned(unpickler: Unpickler, count: int) -> int:
    return int.from_bytes(unpickler.take(count), "little")


def signed(unpickler: Unpickler, count: int) -> int:
    return int.from_bytes(unpickler.take(count), "little", signed=True)


STOP = ord(".")
# By the byte that stands for each instruction, see the module pickletools.
INSTRUCTIONS: dict[int, Callable[[Unpickler], object]] = {
    0x80: lambda it: it.take(1),
    ord("("): Unpickler.mark,
    ord("c"): Unpickler.push_name,
    ord("N"): lambda it: it.stack.append(None),
    0x88: lambda it: it.stack.append(True),
    0x89: lambda it: it.stack.append(False),
    ord("J"): lambda it: it.stack.append(signed(it, 4)),
    ord("K"): lambda it: it.stack.append(unsigned(it, 1)),
    ord("M"): lambda it: it.stack.append(unsigned(it, 2)),
    0x8A: lambda it: it.stack.append(signed(it, unsigned(it, 1))),
    ord("G"): lambda it: it.stack.append(struct.unpack(">d", it.take(8))[0]),
    ord("X"): lambda it: it.push_text(unsigned(it, 4)),
    ord("U"): lambda it: it.push_text(unsigned(it, 1)),
    ord(")"): lambda it: it.stack.append(()),
    ord("]"): lambda it: it.push([]),
    ord("}"): lambda it: it.push({}),
    ord("t"): lambda it: it.push(tuple(it.since_mark())),
    0x85: lambda it: it.push_tuple(1),
    0x86: lambda it: it.push_tuple(2),
    0x87: lambda it: it.push_tuple(3),
    ord("q"): lambda it: it.put(unsigned(it, 1)),
    ord("r"): lambda it: it.put(unsigned(it, 4)),
    ord("h"): lambda it: it.stack.append(it.memo[unsigned(it, 1)]),
    ord("j"): lambda it: it.stack.append(it.memo[unsigned(it, 4)]),
    ord("a"): lambda it: it.append((it.stack.pop(),)),
    ord("e"): lambda it: it.append(it.since_mark()),
    ord("s"): Unpickler.set_item,
    ord("u"): lambda it: it.set_items(it.since_mark()),
    ord("R"): Unpickler.call,
    0x81: Unpickler.call,
    ord("b"): Unpickler.build,
    ord("Q"): Unpickler.push_storage,
}


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
    """The places of such dictionaries in a value: ['model'] or ['ema']['state_dict']."""
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
    """The offset of an entry's bytes: behind a header of its own, whose length the directory does not tell."""
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
