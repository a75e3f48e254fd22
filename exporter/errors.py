"""What can go wrong, by who has to act. Anything else that escapes is a bug and keeps its traceback."""

from __future__ import annotations


class EffexportError(Exception):
    """Base of the errors that are shown as one message. `exit_code` is the process's."""

    exit_code = 1


class KernelWarning(UserWarning):
    """Custom operators run as function bodies, or as outdated kernels: worth a remedy, but no error."""


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

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; add it with: pip install 'effexport[{extra}]'")
