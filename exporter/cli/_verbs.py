"""Commands made of records of options: their parameters, their help, and what the shell completes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from click.shell_completion import CompletionItem

from effexport.base.option_fields import OTHER, OptionField, Options, options_of
from effexport.options import SECTIONS

KINDS: dict[Any, type] = {int: int, float: float, bool: bool}


def verb(
    name: str, record: Any = Options, *, examples: Sequence[str] = (), result: bool = False
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function that takes a record, and `as_json`.

    record: a subclass of Options. result: it also takes `verbose`, to show every check.
    """
    shown = [one for one in options_of(record).values() if one.flags or one.option.is_argument]
    last = ("output", "force")
    shown.sort(key=lambda one: ((*SECTIONS, one.option.section).index(one.option.section), one.name in last))
    titles = dict.fromkeys(one.option.section for one in shown if one.option.section != OTHER)
    sections = {title: [one.name for one in shown if one.option.section == title] for title in titles}
    hidden = [one.name for one in options_of(record).values() if one.option.in_file and not one.flags]

    def decorate(function: Callable[..., None]) -> click.Command:
        def call(**values: Any) -> None:
            found = {one.name: value for one in shown if (value := values.pop(one.name)) not in (None, ())}
            function(record(**found), **values)

        return HelpfulCommand(
            name,
            callback=call,
            params=[*map(parameter, shown), *common_parameters(result=result)],
            help=function.__doc__,
            examples=examples,
            sections=sections,
            in_files=hidden,
        )

    return decorate


def parameter(one: OptionField) -> click.Parameter:
    """A parameter of click for an option."""
    names = ListOf if one.option.is_list else Named
    kind = names(one.choices) if one.choices else PATH if one.is_path else KINDS.get(one.kind, str)
    more: dict[str, Any] = {"type": kind, "required": one.is_required, "metavar": one.option.metavar or None}
    if one.option.is_argument:
        return click.Argument([one.name], nargs=-1 if one.is_repeated else 1, **more)
    if one.kind is bool:
        more |= {"is_flag": True, "metavar": None}
    if one.option.read is not None:
        more |= {"callback": reading(one), "type": str}
    if one.option.bare is not None:
        more |= {"is_flag": False, "flag_value": one.option.bare}
    if not one.is_required:  # one that is not given leaves the value to a spec file, and to the default of the record
        more |= {"default": None}
    flags = [*[one.option.short] * bool(one.option.short), "/".join(one.flags)]  # errors name the last
    more |= {"multiple": one.is_repeated and one.option.read is None, "envvar": one.option.variable or None}
    return click.Option([one.name, *flags], help=one.help, **more)


class Named(click.Choice[str]):
    """A word that is usually one of a few names; the command judges other words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)


class ListOf(Named):
    """Names with commas between them; the shell completes the last one."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return [CompletionItem(f"{before}{comma}{item.value}") for item in super().shell_complete(ctx, param, last)]


PATH = click.Path(path_type=Path)


def reading(one: OptionField) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A callback that makes the value of an option from its text."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        return None if text is None or one.option.read is None else one.option.read(text, one.flags[0])

    return read


def common_parameters(*, result: bool = False) -> list[click.Parameter]:
    """--json and --debug; `cli.fail` reads --debug itself."""
    verbose = click.Option(["--verbose"], is_flag=True, help="Show every check.")
    return [
        *[verbose] * result,
        click.Option(["--json", "as_json"], is_flag=True, help="One JSON object on stdout; text goes to stderr."),
        click.Option(["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error."),
    ]


class HelpfulCommand(click.Command):
    """A command with examples, and with many options in sections.

    sections: title → names of parameters; all others are in a last section. examples: command lines, perhaps with
    comments, as they are to be printed. in_files: further options, which only a spec file can set.
    """

    def __init__(
        self,
        *arguments: Any,
        examples: Sequence[str] = (),
        sections: Mapping[str, Sequence[str]] = MappingProxyType({}),
        in_files: Sequence[str] = (),
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self.examples = examples
        self.sections = sections
        self.in_files = in_files

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {option.name: option.get_help_record(ctx) for option in options}
        left = {name: in_short(record) for name, record in records.items() if record is not None}
        shown = {title: [left.pop(name) for name in names] for title, names in self.sections.items()}
        rest = list(left.values())
        # the options of most commands come first; those of a long one are all in sections
        parts = [*shown.items(), ("Other options", rest)] if len(shown) > 2 else [("Options", rest), *shown.items()]
        for title, lines in parts:
            with formatter.section(title):
                formatter.write_dl(lines)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.in_files:
            with formatter.section("Further options, in a --spec file"):
                lines = textwrap.wrap(f"{', '.join(self.in_files)}; see docs/options.md", formatter.width - 2)
                formatter.write("".join(f"  {line}\n" for line in lines))
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"  {line}\n")


def in_short(record: tuple[str, str]) -> tuple[str, str]:
    """`--[no-]causal` for both names of a switch, which leaves more of a line to its help."""
    names, help = record
    on, slash, off = names.partition(" / --no-")
    return (f"--[no-]{off}", help) if slash and on == f"--{off}" else record
