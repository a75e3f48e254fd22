"""Documents on a terminal: the conclusion and the tables; charts and the background are left to the other formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from effexport.base.one_line import one_line, say
from effexport.base.units import NOTHING
from effexport.render.document import STATUSES, Code, Document, Facts, Item, Link, Part, Plots, Sentence, Table
from effexport.render.multiples import Chart

if TYPE_CHECKING:
    from rich.console import Console

# Lines of a log that are printed; its folder has the whole log.
LOG_LINES = 8
# Texts of this width or less are kept on one line.
WRAPPED = 24


def print_document(console: Console, document: Document) -> None:
    for sentence in document.verdicts:
        say(console, sentence.text, style_of(sentence.status) or "bold")
    for sentence in document.sentences:
        say(console, sentence.text, style_of(sentence.status))
    for part in document.parts:
        print_part(console, part)
    for section in document.sections:
        if not section.is_background and not all(isinstance(part, Chart | Plots) for part in section.parts):
            console.print()
            say(console, section.title, "bold")
            for part in section.parts:
                print_part(console, part)


def print_part(console: Console, part: Part) -> None:
    if isinstance(part, Table):
        print_table(console, part)
    elif isinstance(part, Sentence):
        say(console, part.text, style_of(part.status))
    elif isinstance(part, Item):
        print_item(console, part)
    elif isinstance(part, Facts):
        for name, value in part.rows:
            say(console, f"{name}: {value}")
    elif isinstance(part, Code):
        say(console, f"  {part.text}")
    elif isinstance(part, str):
        say(console, part)


def print_table(console: Console, table: Table) -> None:
    """Print all columns side by side if the terminal is wide enough, else some below others, as on a page.

    Where even these do not fit, figures wrap: nothing is cut off.
    """
    from rich.table import Table as Grid
    from rich.text import Text

    # files beside a page are no part of a terminal
    linked = {n for line in table.lines for n, cell in enumerate(line.cells) if isinstance(cell, Link)}
    every = [table.texts(line) for line in table.lines]
    widths = [max(map(len, (column.title, *(row[n] for row in every)))) for n, column in enumerate(table.columns)]
    layout = [(n, list[int]()) for n in range(len(widths)) if n not in linked]
    if sum(widths[n] + 2 for n, _ in layout) > console.width:
        groups = [(n, list[int]()) for n, column in enumerate(table.columns) if column.group]
        layout = groups + [(n, below) for n, below in table.shown if n not in linked]
    stacked = [max([widths[n], *(widths[m] + len(table.columns[m].below) for m in below)]) for n, below in layout]
    fits = sum(min(width, WRAPPED) + 2 for width in stacked) <= console.width
    grid = Grid(box=None, pad_edge=False)
    for n, _ in layout:
        column = table.columns[n]
        justify: Any = "right" if column.right else "left"
        grid.add_column(column.title.lower(), justify=justify, overflow="fold", no_wrap=fits and widths[n] <= WRAPPED)
    for line, texts in zip(table.lines, every, strict=True):
        row = []
        for n, below in layout:
            status = line.status if n == len(line.cells) else texts[n] if table.columns[n].is_status else ""
            text = Text(one_line(texts[n]), style_of(status))
            for m in below:
                if m < len(line.cells) and texts[m] not in ("", NOTHING):
                    text.append(f"\n{table.columns[m].below.format(one_line(texts[m]))}", "dim")
            row.append(text)
        grid.add_row(*row)
    console.print(grid)
    if table.note:
        say(console, table.note, "dim")


def print_item(console: Console, item: Item) -> None:
    say(console, f"{item.status}: {item.text}", style_of(item.status))
    for line in item.reason.splitlines():
        say(console, f"  {line}")
    for line in item.log.splitlines()[-LOG_LINES:]:
        say(console, f"  | {line}", "dim")
    if item.command:
        say(console, f"  to run this cell only: {item.command}")


def style_of(status: str) -> str:
    return STATUSES[status][1] if status in STATUSES else ""
