"""Types of options that take names: the shell completes them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import click
from click.shell_completion import CompletionItem


def check_choice(option: str, value: str, known: Collection[str]) -> None:
    """Raises UserError, with the most similar name, for an unknown one."""
    from effexport.errors import UserError
    from effexport.models.validation import did_you_mean

    if value not in known:
        raise UserError(f"unknown {option} {value!r}{did_you_mean(value, known)} Expected: {', '.join(known)}")


class Named(click.Choice[str]):
    """A word that is usually one of a few names; the command judges other words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)


class OneOf(Named):
    """One of a few names; another word is refused, with the most similar name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        check_choice(param.opts[-1] if param else self.name, value, self.choices)
        return str(value)


class ListOf(Named):
    """Names with commas between them; the shell completes the last one."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "NAME,…"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return [CompletionItem(f"{before}{comma}{item.value}") for item in super().shell_complete(ctx, param, last)]
