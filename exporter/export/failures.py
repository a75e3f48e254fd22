"""Failures of torch.onnx to export a module: a reason in one line, and the place in the user's code."""

from __future__ import annotations

import functools
import importlib.util
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.models.validation import LONGEST_REASON

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

STAGE, GRAPH_CHECK = "export", "graph check"
# How torch.onnx ends a message whose reason is in the error that caused it.
REFERS = "See the stack trace"
# Of the message of an error → the same in words that say what to do; {0}, {1} are its groups.
PLAIN: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"Could not (?:guard on|extract specialized integer from) data-dependent expression"),
        "the code asks for the value of a tensor, as `if`, float(), int(), .item() and .tolist() do, and a graph has "
        "one path for all values: keep it a tensor, compute both sides of a branch and choose with torch.where, or "
        "decide it outside of the model",
    ),
    (
        re.compile(r"\.numpy\(\) is not supported for tensor subclasses"),
        "the code computes with NumPy what a graph has to compute from its inputs or their sizes: use functions of "
        "torch",
    ),
    (
        re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>"),
        "torch.onnx has no translation of the operator {0} ({1}): compute the same with other operators, or outside of "
        "the model",
    ),
    (
        re.compile(r"^((?!torch\b)[a-z]\w*\.\w+)\.(\w+)$"),
        "torch.export cannot trace the operator {0} ({1}): compute the same with other operators, or outside of the "
        "model",
    ),
    (
        re.compile(r"unhashable type: non-nested SymInt"),
        "the code looks a size up in a dict or a set, or caches a function of it: compute the value in each call",
    ),
)
# What torch.onnx says when a translation of its own raises an error, which is the cause.
OF_TRANSLATION = re.compile(r"Error when calling function '.*<function (\w+) at 0x")
FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


def place_of(error: BaseException, module: nn.Module) -> str:
    """The submodule and the line of the user's code that an error is about, as the end of a sentence; or ""."""
    from effexport.models.layers import failing_module

    owner, line = failing_module(error, module), line_of_user(error)
    return f"{f': in {owner}' * bool(owner)}{f' ({line})' * bool(line)}"


def line_of_user(error: BaseException) -> str:
    """The innermost line of the user's `forward`, or of a function in the same file, that led to an error, or to the
    operator that could not be translated; "" if there is none."""
    import torch

    found = ""
    for cause in chain_of(error):
        files: set[str] = set()
        for frame, line in traceback.walk_tb(cause.__traceback__):
            code, node = frame.f_code, frame.f_locals.get("node")
            if code.co_name == "forward" and not is_of_package(code.co_filename):
                files.add(code.co_filename)
            if code.co_filename in files:
                found = place_in_file(code.co_filename, line)
            elif isinstance(node, torch.fx.Node) and (stack := node.meta.get("stack_trace")):
                places = [place_in_file(*place) for place in FRAME.findall(stack) if not is_of_package(place[0])]
                found = places[-1] if places else found
    return found


def place_in_file(file: str, line: int | str) -> str:
    return f"{Path(file).name}, line {line}"


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def reason_of(error: BaseException) -> str:
    """The reason that torch.onnx gives for a failure, in one line and without its graph: of chained errors, the first
    that does not refer to others, in plain words if these are known."""
    cause = error.__cause__ or error
    while cause.__cause__ is not None and REFERS in str(cause):
        cause = cause.__cause__
    text = first_paragraph(str(cause)) or type(cause).__name__
    if match := OF_TRANSLATION.match(text):
        why = f": {first_paragraph(str(cause.__cause__))}" if cause.__cause__ is not None else ""
        text = f"the translation {match[1]} of torch.onnx fails{why}"
    for pattern, words in PLAIN:
        if match := pattern.search(text):
            return words.format(*match.groups())
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"


def first_paragraph(text: str) -> str:
    """The lines of a message up to the first empty one, as one line."""
    lines = text.strip().partition("\n\n")[0].splitlines()
    return " ".join(line.strip() for line in lines).strip(" :")


@functools.cache
def is_of_package(file: str) -> bool:
    """True if a file belongs to PyTorch or to us. file: its path, whose beginning may be cut off."""
    specs = map(importlib.util.find_spec, ("torch", "effexport", "effexport.models", "effexport.plugins"))
    return any(lies_in(file, Path(str(spec.origin)).parent) for spec in specs if spec is not None)


def lies_in(file: str, folder: Path) -> bool:
    """True if a path, whose first characters the tracer may have cut off, is that of a file in a folder."""
    parts = Path(file).parts
    paths = (folder.joinpath(*parts[i:]) for i in range(len(parts)))
    return any(path.is_relative_to(folder) and str(path).endswith(file) and path.exists() for path in paths)
