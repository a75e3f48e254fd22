"""Documents as pages: one self-contained file, no scripts, no network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from effexport.base.units import moment
from effexport.render.document import STATUSES, Document, Part
from effexport.render.templates import template_environment


def html_from_document(document: Document) -> str:
    filters: dict[str, Callable[..., Any]] = {
        "moment": moment,
        "path": quote,
        "css": lambda status: STATUSES.get(status, ("",))[0],
        "kind": kind_of,
    }
    return template_environment(("render",), filters).get_template("document.html.j2").render(document=document)


def kind_of(part: Part) -> str:
    """The name of a part's class, by which the template chooses a macro."""
    return type(part).__name__
