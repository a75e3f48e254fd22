"""Why a traced graph holds for one length, or for some lengths only: the lines of the user's code that decided it."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.quiet import quiet

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.export import ExportedProgram

    from effexport.dtypes import TensorInfo

# torch.export reports here, at level INFO, each free size and each assumption about one, with the line that made it.
TRACER = "torch.fx.experimental.symbolic_shapes"
SYMBOL = re.compile(r"create_symbol (\w+) = \d+ for L\['(\w+)'\]\.size\(\)\[(\d+)\]")
ASSUMPTION = re.compile(r"eval (?:\[guard suppressed\] )?(.+?) \[guard added\] \((.+?):(\d+) in ")
# How many assumptions a sentence lists.
LISTED = 3


def assumed_sizes(module: nn.Module, example: tuple[torch.Tensor, ...], inputs: Sequence[TensorInfo]) -> str:
    """Which lines of the user's code assume something of sizes that should stay free, as a sentence; "" if none do.

    Traces the module once more, with the example.
    """
    import torch
    from torch.export import Dim

    free = [{axis: name for axis, name in enumerate(tensor.dims) if isinstance(name, str)} for tensor in inputs]
    # it may fail where the export has failed
    with quiet(streams=True), recorded() as messages, contextlib.suppress(Exception):
        shapes = tuple(dict.fromkeys(axes, Dim.DYNAMIC) for axes in free)
        torch.export.export(module, example, dynamic_shapes=shapes, strict=False)
    names = dict(zip((tensor.name for tensor in inputs), free, strict=True))
    axes = {
        match[1]: f"{names.get(match[2], {}).get(int(match[3]), match[3])} of {match[2]}"
        for match in map(SYMBOL.search, messages)
        if match
    }
    lines = assumptions(messages, axes)
    if not lines:
        return ""
    more = "; …" if len(lines) > LISTED else ""
    return (
        f"the code of the module assumes sizes that should stay free: {'; '.join(lines[:LISTED])}{more}. Write it so "
        "that it holds for every size: no int() of a size, no loop over tokens, no branch that depends on a size"
    )


def largest_sizes(program: ExportedProgram, inputs: Sequence[TensorInfo]) -> dict[str, int]:
    """The largest size for which a traced program holds, by axis; without the axes that have no such limit."""
    import torch

    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    largest: dict[str, int] = {}
    for tensor, name in zip(inputs, program.graph_signature.user_inputs, strict=True):
        for axis, size in zip(tensor.dims, values[name].shape, strict=True):
            bounds = program.range_constraints.get(size.node.expr) if isinstance(size, torch.SymInt) else None
            if isinstance(axis, str) and bounds is not None and bounds.upper.is_Integer:
                largest[axis] = min(int(bounds.upper), largest.get(axis, int(bounds.upper)))
    return largest


def assumptions(messages: Sequence[str], axes: Mapping[str, str]) -> list[str]:
    """Each assumption of the user's code, with its line, in the order of the trace. axes: names by symbol."""
    found = []
    for match in filter(None, map(ASSUMPTION.search, messages)):
        expression, file, line = match.groups()
        if not is_of_package(file):
            found.append(f"{Path(file).name}, line {line}: {readable(expression, axes)}")
    return list(dict.fromkeys(found))


def is_of_package(file: str) -> bool:
    """Whether a file belongs to PyTorch or to us. file: its path, whose beginning may be cut off."""
    specs = map(importlib.util.find_spec, ("torch", "effexport", "effexport.models", "effexport.plugins"))
    return any(lies_in(file, Path(str(spec.origin)).parent) for spec in specs if spec is not None)


def lies_in(file: str, folder: Path) -> bool:
    """Whether a path, of which the tracer has cut off the first characters, is that of a file in a folder."""
    parts = Path(file).parts
    paths = (folder.joinpath(*parts[i:]) for i in range(len(parts)))
    return any(path.is_relative_to(folder) and str(path).endswith(file) and path.exists() for path in paths)


def readable(expression: str, axes: Mapping[str, str]) -> str:
    """An assumption with the names of the axes in place of symbols."""
    return re.sub(r"\w+", lambda word: f"({axes[word[0]]})" if word[0] in axes else word[0], expression)


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """The messages of the tracer, which nobody else sees meanwhile."""
    messages: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, recorder = logging.getLogger(TRACER), Recorder()
    level, propagate, handlers = logger.level, logger.propagate, logger.handlers
    logger.handlers, logger.propagate = [recorder], False
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
