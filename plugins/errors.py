"""The error of this part, for every module in it."""

from __future__ import annotations


class LibraryError(Exception):
    """An error of the user's set-up: the library cannot be found or built, or an operator of theirs cannot be used.

    `exit_code` is that of the command.
    """

    exit_code = 2
