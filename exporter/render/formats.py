"""Documents as Markdown, as pages and on a terminal.

Markdown is for pull requests and pages of documentation. A page is one self-contained file, without scripts or network;
its templates lie beside this file. A terminal shows the conclusion and the tables; charts and the background are left
to the other formats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from effexport.base.formatting import NOTHING, moment, one_line, say
from effexport.render.document import (
    STATUSES,
    Chart,
    Code,
    Document,
    Facts,
    Item,
    Link,
    Part,
    Plots,
    Section,
    Sentence,
    Table,
)

if TYPE_CHECKING:
    import jinja2
    from rich.console import Console


SIGNS = {status: sign for status, (_, _, sign) in STATUSES.items()}
# A longer table is folded.
MAX_OPEN_LINES = 40


def markdown_from_document(document: Document) -> str:
    """The conclusion, then the sections; their background is folded. Charts are left to pages."""
    created = moment(document.created) if document.created else ""
    parts = [f"### {escaped(document.title)}"]
    parts += [f"{sign_of(one)}**{escaped(one.text)}**" for one in document.verdicts]
    parts.append("\n".join(f"* {sign_of(one)}{escaped(one.text)}" for one in document.sentences))
    parts += markdown_of_parts(document.parts)
    for section in document.sections:
        parts += markdown_of_section(section)
    parts.append(escaped(", ".join(filter(None, (document.lead, created)))))
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_of_section(section: Section) -> Iterator[str]:
    found = list(markdown_of_parts(section.parts))
    if section.is_background and found:
        yield folded(escaped(section.title), "\n\n".join(found))
    elif found:
        yield f"#### {escaped(section.title)}"
        yield from found


def markdown_of_parts(parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, Table):
            yield markdown_of_table(part)
            if part.note:
                yield escaped(part.note)
        elif isinstance(part, Facts):
            yield table((part.title.lower(), ""), part.rows)
        elif isinstance(part, Item):
            reason = f": {escaped(part.reason)}" if part.reason else ""
            yield f"* {sign_of(part)}**{escaped(part.status)}**: {escaped(part.text)}{reason}"
            for text in filter(None, (part.log, part.command)):
                yield indented(fenced(text))
        elif isinstance(part, Code):
            yield fenced(part.text)
        elif isinstance(part, Sentence):
            yield f"{sign_of(part)}{escaped(part.text)}"
        elif isinstance(part, str):
            yield escaped(part)


def markdown_of_table(one: Table) -> str:
    marks = ["---:" if column.right else "---" for column in one.columns]
    text = grid([column.title.lower() for column in one.columns], marks, map(one.texts, one.lines))
    return folded(escaped(one.folded or one.title), text) if len(one.lines) > MAX_OPEN_LINES else text


def sign_of(one: Sentence | Item) -> str:
    return f"{SIGNS[one.status]} " if one.status in SIGNS else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """right: how many of the last columns hold figures."""
    return grid(head, ["---"] * (len(head) - right) + ["---:"] * right, rows)


def grid(head: Sequence[str], marks: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, *rows]
    text = [f"| {' | '.join(escaped(cell) for cell in line)} |" for line in lines]
    return "\n".join([text[0], f"|{'|'.join(marks)}|", *text[1:]])


def escaped(text: str) -> str:
    """Text that Markdown, its tables and a terminal leave as it is: on one line, without HTML, links, emphasis or
    mentions."""
    text = one_line(" ".join(text.split()))
    for sign in "\\`*_[]|~":
        text = text.replace(sign, f"\\{sign}")
    # an invisible joiner keeps @name from calling somebody
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "@\u2060")


def fenced(text: str) -> str:
    """A block of code, in a fence longer than any inside."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"


def indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def template_environment(
    folders: Sequence[str], filters: Mapping[str, Callable[..., Any]] | None = None
) -> jinja2.Environment:
    """Templates of folders of effexport, in which text is escaped and a name that nobody gave is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader("effexport", folder) for folder in folders]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters or {})
    return environment


def html_from_document(document: Document) -> str:
    return _template().render(document=document)


@functools.cache
def _template() -> jinja2.Template:
    filters: dict[str, Callable[..., Any]] = {
        "moment": moment,
        "path": quote,
        "css": lambda status: STATUSES.get(status, ("",))[0],
        "kind": kind_of,
    }
    return template_environment(("render",), filters).get_template("document.html.j2")


def kind_of(part: Part) -> str:
    """The name of a part's class, by which the template chooses a macro."""
    return type(part).__name__


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
