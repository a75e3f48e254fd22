"""Expected errors, by who has to act. Any other exception is a bug and keeps its traceback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn


class EffexportError(Exception):
    """Base class of the errors that are shown as one message. `exit_code` is the process's.

    lines: of the message. A line feed inside of one comes from a name that it quotes, and is shown as \\n.
    """

    exit_code = 1

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class KernelWarning(UserWarning):
    """Custom operators run as function bodies, or as outdated kernels, which is slower but not an error."""


class EngineWarning(UserWarning):
    """A refitted artifact has no engine any more, because none can be made on this machine."""


class GraphWarning(UserWarning):
    """A CUDA graph could not be captured, so kernels are launched one by one, which is slower but equally correct."""


class RuntimeUnsupportedError(EffexportError):
    """The runtime cannot run this model, typically because it has no kernel for the element type."""


class RuntimeFailedError(EffexportError):
    """The runtime accepted the model and failed while running it, for example because the graph fixes a length."""


class RefusedNumbersError(RuntimeFailedError):
    """A kernel was given numbers that it refuses, such as infinity: those of the input are too large for the model."""


class UserError(EffexportError):
    """Bad usage or bad input: the message says what was given, what was expected and what to do."""

    exit_code = 2


class InterruptError(EffexportError):
    """Ctrl-C ended a command before it had anything to show."""

    exit_code = 130


class StageError(EffexportError):
    """A stage of the pipeline failed, or its result is not what it must be."""

    def __init__(self, stage: str, *lines: str) -> None:
        super().__init__(f"{stage}: {lines[0]}", *lines[1:])
        self.stage = stage


class DiskError(EffexportError):
    """A file could not be written because its disk is full or has failed, or because a limit of the system is reached.

    The message says which, and how much room there is on a full disk.
    """


class MissingExtraError(UserError):
    """An optional part is not installed."""

    def __init__(self, package: str, extra: str, *, remark: str = "") -> None:
        remedy = f"{package} is not installed; add it with: pip install 'effexport[{extra}]'"
        super().__init__(f"{remedy} ({remark})" if remark else remedy)


def check_type(name: str, value: object, accepted: type | tuple[type, ...], expected: str) -> None:
    """Raise UserError unless a value has a type that is accepted. name: of the argument. expected: in words."""
    if not isinstance(value, accepted):
        refuse_type(name, value, expected)


def refuse_type(name: str, value: object, expected: str) -> NoReturn:
    """Raise UserError: the argument has another type than expected."""
    text = repr(value)
    given = text if len(text) <= 80 and text.isprintable() else f"a value of the type {type(value).__name__}"
    raise UserError(f"{name} is {given}; expected {expected}")


@dataclass(frozen=True)
class Unavailable:
    """The reason why a result is not available here. It is returned instead of the result and is not an error."""

    reason: str

    def __str__(self) -> str:
        return self.reason


# What PyTorch and ONNX Runtime say, in lower case; the last two, of sizes that do not even fit into an integer.
_OUT_OF_MEMORY = (
    *("can't allocate memory", "failed to allocate memory", "out of memory", "bad_alloc"),
    *("overflow when unpacking long", "storage size calculation overflowed"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, or would have: PyTorch and ONNX Runtime say so only in their messages."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY)
