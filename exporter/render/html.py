"""Documents as pages: one self-contained file, no scripts, no network."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from effexport.base.units import moment
from effexport.render.document import STATUSES, Document, Part
from effexport.render.templates import template_environment

if TYPE_CHECKING:
    import jinja2


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
