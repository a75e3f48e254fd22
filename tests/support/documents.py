"""That the formats of a document agree: every figure of one stands in the others."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

from markupsafe import escape

from effexport.base.formatting import one_line
from effexport.render.document import Chart, Document, Item, Link, Table
from effexport.render.formats import escaped, html_from_document, markdown_from_document, print_document


def assert_formats_agree(document: Document) -> None:
    """Sentences, cells and problems are on the page and in Markdown; without the background, on a terminal too."""
    page = re.sub(r"\s+", " ", html_from_document(document))
    markdown = markdown_from_document(document)
    terminal = without_spaces(terminal_of(document, 400))
    for text, is_background in texts_of(document):
        assert re.sub(r"\s+", " ", escape(text)) in page, text
        assert escaped(text) in markdown, text
        assert is_background or without_spaces(one_line(text)) in terminal, text


def texts_of(document: Document) -> Iterator[tuple[str, bool]]:
    yield from ((one.text, False) for one in (*document.verdicts, *document.sentences))
    for section in document.sections:
        if not all(isinstance(part, Chart) for part in section.parts):
            yield section.title, section.is_background
    shown = [(document.parts, False), *((section.parts, section.is_background) for section in document.sections)]
    for parts, is_background in shown:
        for part in parts:
            if isinstance(part, Item):
                yield part.text, is_background
            elif isinstance(part, Table):
                cells = (cell for line in part.lines for cell in line.cells if not isinstance(cell, Link))
                # a terminal wraps long texts, and so puts others between their lines
                yield from ((cell, is_background or len(cell) > 24) for cell in cells if cell)


def terminal_of(document: Document, width: int = 130) -> str:
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO(), highlight=False, markup=False, emoji=False)
    print_document(console, document)
    return console.export_text()


def without_spaces(text: str) -> str:
    return "".join(text.split())
