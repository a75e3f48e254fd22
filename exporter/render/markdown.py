"""Documents as Markdown, for pull requests and pages of documentation; and the parts that Markdown is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from effexport.base.one_line import one_line
from effexport.base.units import moment
from effexport.render.document import STATUSES, Code, Document, Facts, Item, Part, Section, Sentence, Table

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
