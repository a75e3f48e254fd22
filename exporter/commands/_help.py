"""The help of a command: options in sections, examples at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import click


class HelpfulCommand(click.Command):
    """A command with examples, and with many options in sections.

    sections: title → names of parameters; all others are in a last section. examples: command lines, perhaps with
    comments, as they are to be printed.
    """

    def __init__(
        self,
        *arguments: Any,
        examples: Sequence[str] = (),
        sections: Mapping[str, Sequence[str]] = MappingProxyType({}),
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self.examples = examples
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        left = {name: record for name, record in records.items() if record is not None}
        for title, names in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([left.pop(name) for name in names])
        with formatter.section("Other options" if self.sections else "Options"):
            formatter.write_dl(list(left.values()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"  {line}\n")
