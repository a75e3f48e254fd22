"""Parts of Markdown pages that scripts write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Cells are Markdown, and stand as they are."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def with_part(page: str, begin: str, end: str, part: str) -> str:
    """The page with another text between two marks."""
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{part}\n{end}{rest.partition(end)[2]}"
