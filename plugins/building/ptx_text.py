"""Reads PTX: cuts one kernel out of a compilation, so that an engine does not carry the others."""

from __future__ import annotations

import re
from collections.abc import Iterator

from effexport.plugins.errors import LibraryError

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
