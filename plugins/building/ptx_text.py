"""Reads PTX: what it needs to run, and one kernel of a compilation, so that an engine does not carry the others."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from effexport.plugins.errors import LibraryError

# What PTX is made for. 75 is Turing, the oldest GPU that the kernel library and TensorRT 11 support. From 80 on, GPUs
# copy to shared memory in the background, multiply bfloat16 on tensor cores, and float16 in half as many instructions.
# The kernels use nothing newer.
ARCHITECTURES = (75, 80)
# PTX of CUDA 13.0. A driver refuses PTX that is newer than itself, and the kernels need nothing newer.
MAX_ISA = (9, 0)

Version = tuple[int, int]


@dataclass(frozen=True)
class PtxTarget:
    """The needs of the PTX in an engine: a GPU of this architecture or later, such as 80, and a driver of this CUDA
    release or later, such as "13.0", because it is in this version of the instruction set."""

    architecture: int
    isa: str
    driver: str

    def __str__(self) -> str:
        return f"SM {self.architecture} or later, and a driver of CUDA {self.driver} or later (PTX {self.isa})"


def ptx_target(architecture: int, isa: Version) -> PtxTarget:
    return PtxTarget(architecture, text_of(isa), text_of(cuda_of_isa(isa)))


def ptx_architecture(compute_capabilities: Collection[int]) -> int:
    """The best architecture for PTX that all of these GPUs can run.

    A driver translates the PTX of an architecture for itself and for every later one. So the oldest GPU decides, and of
    the architectures up to it, the latest uses most of what it can. Raises LibraryError if it is older than all.
    """
    oldest = min(compute_capabilities)
    fitting = [architecture for architecture in ARCHITECTURES if architecture <= oldest]
    if not fitting:
        raise LibraryError(f"the GPU is SM {oldest}; the kernels expect SM {ARCHITECTURES[0]} or later")
    return max(fitting)


def isa_of(ptx: str) -> Version:
    """The version of the instruction set that PTX declares. Raises LibraryError if it declares none."""
    version = re.search(r"^\.version\s+(\d+)\.(\d+)\s*$", ptx, re.MULTILINE)
    if version is None:
        raise LibraryError("the CUDA compiler made PTX without a .version; expected one. Try another CUDA toolkit")
    return int(version[1]), int(version[2])


def cuda_of_isa(isa: Version) -> Version:
    """The CUDA release that brought a version of the instruction set, from 7.0 on (PTX ISA, "Release Notes")."""
    major, minor = isa
    skipped = major == 8 and minor >= 6  # CUDA 12.6 brought none
    return major + 4, minor + skipped


def text_of(version: Version) -> str:
    return ".".join(map(str, version))


_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_HEADER = re.compile(r"^\s*\.(?:version|target|address_size)\b[^\n]*$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_$%][\w$]*")


def only_entry(ptx: str, entry: str) -> str:
    """The PTX of one entry: the header, the entry, and the variables and functions that it needs, in their order.

    Raises LibraryError if the PTX has no such entry.
    """
    text = _COMMENTS.sub("", ptx)
    header = "\n".join(match.group().strip() for match in _HEADER.finditer(text))
    items = list(_items(_HEADER.sub("", text)))
    declared = [_declared(item) for item in items]
    if not any(name == entry and ".entry" in item for name, item in zip(declared, items, strict=True)):
        raise LibraryError(
            f"the CUDA compiler made PTX without the kernel {entry}; expected it. Install effexport again"
        )
    needed = {entry}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        for item in (item for item, own in zip(items, declared, strict=True) if own == name):
            used = set(_NAME.findall(item)) & set(declared) - needed
            needed |= used
            waiting += used
    kept = [item for name, item in zip(declared, items, strict=True) if name in needed]
    return header + "\n\n" + "\n\n".join(kept) + "\n"


def _items(text: str) -> Iterator[str]:
    """The declarations and definitions of a module: a function ends with its closing brace, anything else with `;`."""
    start = depth = 0
    for match in re.finditer(r"[{};]", text):
        depth += {"{": 1, "}": -1, ";": 0}[match.group()]
        if depth:
            continue
        item = text[start : match.end()].strip()
        if match.group() == ";" or re.search(r"\.(?:entry|func)\b", item.split("{")[0]):
            start = match.end()
            yield item


def _declared(item: str) -> str:
    """The name of what a top-level item declares."""
    head = re.split(r"[{=;]", item, maxsplit=1)[0]
    if match := re.search(r"\.entry\s+([\w$]+)", head):
        return str(match[1])
    if ".func" in head:  # .func (results) name (parameters)
        names = re.findall(r"([A-Za-z_$%][\w$]*)\s*(?:\(|$)", re.sub(r"\.func\s*\([^)]*\)", ".func ", head))
        return str(names[0])
    names = re.findall(r"(?<![.\w$])([A-Za-z_$%][\w$]*)", head)
    return str(names[0]) if names else ""
