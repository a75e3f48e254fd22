"""Templates of pages: what they have in common lies beside this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2


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
