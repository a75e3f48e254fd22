"""What can go wrong, by who has to act. Anything else that escapes is a bug and keeps its traceback."""

from __future__ import annotations

from dataclasses import dataclass


class EffexportError(Exception):
    """Base of the errors that are shown as one message. `exit_code` is the process's."""

    exit_code = 1


class KernelWarning(UserWarning):
    """Custom operators run as function bodies, or as outdated kernels: worth a remedy, but no error."""


class GraphWarning(UserWarning):
    """A CUDA graph could not be captured: runs are launched one by one, which is slower and as right."""


class RuntimeUnsupportedError(EffexportError):
    """The runtime cannot run this model, typically because it has no kernel for the element type."""


class RuntimeFailedError(EffexportError):
    """The runtime accepted the model and failed while running it, for example because the graph fixes a length."""


class UserError(EffexportError):
    """Bad usage or bad input: the message says what was given, what was expected and what to do."""

    exit_code = 2


class StageError(EffexportError):
    """A stage of the pipeline failed its own promise."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(f"{stage}: {message}")
        self.stage = stage


class MissingExtraError(UserError):
    """An optional part is not installed."""

    def __init__(self, package: str, extra: str, *, remark: str = "") -> None:
        remedy = f"{package} is not installed; add it with: pip install 'effexport[{extra}]'"
        super().__init__(f"{remedy} ({remark})" if remark else remedy)


@dataclass(frozen=True)
class Unavailable:
    """The reason why a result is not available here. It is returned in the place of the result: it is not an error."""

    reason: str

    def __str__(self) -> str:
        return self.reason
