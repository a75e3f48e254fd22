"""The error of this part, for every module in it."""

from __future__ import annotations


class LibraryError(Exception):
    """An error of the user's set-up: the library cannot be found or built, or an operator of theirs cannot be used.

    `exit_code` is that of the command. lines: of the message; a line feed inside of one is that
    of a name that it quotes.
    """

    exit_code = 2

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
