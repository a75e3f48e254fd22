"""Options as fields of frozen records, from which every face of a verb is made.

A field carries its help, its section and its name on the command line, beside its type and default. From these follow
the options of a command (commands/_verbs.py), the arguments of a Python function (`keywords`), the keys of a --spec
file, the words of a command that is printed (`words_of`), and docs/options.md.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from effexport.base.errors import EffexportError, UserError, check_type, refuse_type
from effexport.base.formatting import Word, command_line
from effexport.models.validation import SpecError, did_you_mean

P = ParamSpec("P")
Record = TypeVar("Record")
Result = TypeVar("Result")
OTHER = "Other options"
# Placeholders of the values of options in --help.
A_FILE, A_FOLDER, A_NUMBER, A_FACTORY = "FILE", "DIR", "N", "MODULE:FUNCTION"


@dataclass(frozen=True)
class Option:
    """The metadata of a field, which its type and default complete.

    help: one line.
    section: its place in --help.
    flag: its name on the command line, if not --FIELD; of a switch both, --fused/--unfused. "": it has none.
    short: another name, such as -o.
    metavar: stands for the value.
    choices: values that the shell completes. Others are refused, unless `is_open`.
    is_list: its value is a list with commas, each a choice or more than one.
    bare: its value if it is given without one.
    variable: of the environment, which gives it as well.
    read: makes the value from a text and the flag.
    in_file: whether a --spec file may set it.
    expected: the values of the Python argument, in words.
    """

    help: str
    section: str = OTHER
    flag: str | None = None
    short: str = ""
    metavar: str = ""
    choices: Collection[str] = ()
    is_open: bool = False
    is_list: bool = False
    bare: Any = None
    variable: str = ""
    read: Callable[[str, str], Any] | None = None
    in_file: bool = False
    is_argument: bool = False
    expected: str = ""


def option(default: Any, help: str, section: str = OTHER, **details: Any) -> Any:
    """A field of a record of options. details: as in `Option`."""
    return field(default=default, metadata={"option": Option(help, section, **details)})


def file_option(default: Any, help: str, section: str = OTHER, **details: Any) -> Any:
    """An option that only Python and spec files have."""
    return option(default, help, section, flag="", in_file=True, **details)


def python_option(default: Any, help: str, section: str = OTHER, **details: Any) -> Any:
    """An option that only Python has."""
    return option(default, help, section, flag="", **details)


def argument(help: str, **details: Any) -> Mapping[str, Option]:
    """The metadata of a field that has no default and no flag, such as the artifact of most verbs."""
    return {"option": Option(help, is_argument=True, **details)}


@dataclass(frozen=True)
class OptionField:
    """A field of a record with its type: `kind` without None, and without the sequence around it."""

    name: str
    option: Option
    default: Any
    kind: Any
    is_optional: bool
    is_repeated: bool
    is_required: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """Its names on the command line, such as ("--fused", "--unfused"); empty if it has none."""
        named = f"--{self.name.replace('_', '-')}" if self.option.flag is None else self.option.flag
        if self.option.flag is None and self.is_switch:
            named += f"/--no{named[1:]}"
        return tuple(named.split("/")) if named and not self.option.is_argument else ()

    @property
    def is_switch(self) -> bool:
        """True if it has a name for true and another for false; a plain flag can only be given."""
        return self.kind is bool and self.is_optional and (self.option.flag is None or "/" in self.option.flag)

    @property
    def help(self) -> str:
        """Its line of help, with the default if that is a word or a number."""
        text, default = self.option.help, self.default
        shown = isinstance(default, (str, int, float)) and not isinstance(default, bool) and "default" not in text
        value = f"{default:g}" if isinstance(default, float) else default
        return f"{text.removesuffix('.')}; default: {value}." if default and shown else text

    @property
    def is_path(self) -> bool:
        return Path in (self.kind, *get_args(self.kind))

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that are known."""
        literal = get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()
        return tuple(self.option.choices or literal)

    def words(self, value: Any) -> list[Word]:
        """The words of a command line that give it a value; none if it has no flag."""
        if not self.flags:
            return []
        if self.kind is bool:
            return [self.flags[not value]] if value or self.is_switch else []
        return [(self.flags[0], one) for one in (value if self.is_repeated else [value])]

    def checked(self, value: Any) -> Any:
        """The value; of several, a tuple. Raises UserError for another type, or one that is not among the choices."""
        if value is None and self.is_optional:
            return None
        if not self.is_repeated:
            self.check_one(self.name, value, self.option.expected)
            return value
        values = (value,) if isinstance(value, str) and self.kind is str else value
        check_type(self.name, values, (list, tuple), self.option.expected or "a name or a list of names")
        expected = PATH if self.is_path else _WORDS.get(self.kind, f"an {getattr(self.kind, '__name__', 'item')}")
        for one in values:
            self.check_one(f"an item of {self.name}", one, expected)
        return tuple(values)

    def check_one(self, name: str, value: Any, expected: str) -> None:
        kinds = tuple(typing.get_origin(one) or one for one in get_args(self.kind) or (self.kind,))
        if self.choices:
            check_type(name, value, str, expected or "text")
            if value not in self.choices and not (self.option.is_open or self.option.is_list):
                known = f"{did_you_mean(value, self.choices)} Expected: {', '.join(self.choices)}"
                raise UserError(f"unknown {(*self.flags, self.name)[0]} {value!r}{known}")
        elif self.is_path and isinstance(value, (str, os.PathLike)):
            path_of(name, value)
        elif self.is_path or expected or self.kind in _WORDS:
            words = expected or _WORDS.get(self.kind, PATH)
            is_number = isinstance(value, int) and not isinstance(value, bool) and self.kind is float
            wrong = isinstance(value, bool) and self.kind in (int, float)
            if wrong or not (is_number or isinstance(value, kinds)):
                refuse_type(name, value, words)


PATH = "a path, as str or pathlib.Path"
_WORDS: dict[Any, str] = {str: "text", int: "an integer", float: "a number", bool: "true or false"}


@functools.cache
def options_of(record: Any) -> dict[str, OptionField]:
    """The options of a record, by field."""
    hints = typing.get_type_hints(record)
    return {one.name: _option_field(one, hints[one.name]) for one in fields(record) if "option" in one.metadata}


def _option_field(one: Field[Any], hint: Any) -> OptionField:
    parts = get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    given = [part for part in parts if part is not types.NoneType]
    repeated = [part for part in given if typing.get_origin(part) is Sequence]
    if repeated:
        given = [get_args(repeated[0])[0]]
    kind = given[0] if len(given) == 1 else typing.Union[tuple(given)]  # noqa: UP007
    required = one.default is MISSING
    return OptionField(
        one.name,
        one.metadata["option"],
        None if required else one.default,
        kind,
        len(given) < len(parts),
        bool(repeated),
        required,
    )


@dataclass(frozen=True)
class Options:
    """Base of the records, and that of a verb without options. Checks types, and that values are among the choices."""

    @classmethod
    def arguments(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call, by the names of the fields."""
        return given

    def __post_init__(self) -> None:
        record: Any = type(self)
        for name, one in options_of(record).items():
            object.__setattr__(self, name, one.checked(getattr(self, name)))


def given(options: Options, base: type) -> dict[str, Any]:
    """The options that one of the bases of a record declares and that were given: other values than the default."""
    return {
        name: value
        for name, one in options_of(base).items()
        if (value := getattr(options, name)) is not None and value != one.default
    }


# A command that is quoted, up to its end; and an option, with the word that stands for its value, or may be one.
_NAMED = re.compile(
    r"effexport [a-z][^;:)\n]*"
    r"|(?<![\w-])(--[a-z][a-z0-9-]*|-o(?=[,;.)]|$))((?: [A-Z][A-Z_]*(?:[.:][A-Za-z]+)?(?![\w-]))?)"
    r"(?: ([a-z][a-z0-9-]*))?",
    re.MULTILINE,
)


def keywords(record: Callable[P, Record]) -> Callable[[Callable[[Record], Result]], Callable[P, Result]]:
    """Let a function that takes a record take the fields of the record as arguments, with their types.

    Its errors are those of `python_errors`.
    """
    known = typing.cast(type, record)

    def decorate(function: Callable[[Record], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            with python_errors(record):
                named = known.arguments(kwargs)  # type: ignore[attr-defined]
                if unknown := [name for name in kwargs if name in named and name not in options_of(known)]:
                    similar = did_you_mean(unknown[0], options_of(known))
                    raise UserError(f"{function.__name__} has no argument {unknown[0]!r}{similar}")
                return function(typing.cast(Any, record)(*args, **named))

        call.__signature__ = inspect.signature(record)  # type: ignore[attr-defined]
        return call

    return decorate


@contextmanager
def python_errors(record: Any = Options) -> Iterator[None]:
    """Errors for callers in Python, of the function that takes the fields of a record.

    Their messages name arguments; their `lines` keep the names of flags, which the command line prints. A spec that
    cannot work becomes a UserError, like everything else that users can mend.
    """
    try:
        yield
    except SpecError as error:
        raise in_python(UserError(str(error)), record) from error
    except EffexportError as error:
        in_python(error, record)
        raise


def in_python(error: EffexportError, record: Any) -> EffexportError:
    """The error, with a message that names arguments in place of flags. record: of the function that was called."""

    def argument_of(found: re.Match[str]) -> str:
        flag, stands_for_value = found[1], bool(found[2])
        if flag is None:
            return found[0]
        name, value = arguments_by_flag(record).get(flag, (flag[2:].replace("-", "_"), ""))
        word, known = found[3], options_of(record).get(name)
        if word and known and not known.is_repeated and word in known.choices:
            return f'{name}="{word}"'
        value = value or "…" * (stands_for_value or flag == "-o")
        return (f"{name}={value}" if value else name) + (f" {word}" if word else "")

    error.args = (_NAMED.sub(argument_of, "\n".join(error.lines)),)
    return error


@functools.cache
def arguments_by_flag(record: Any) -> dict[str, tuple[str, str]]:
    """Flag → the argument, and its value if the flag has none."""
    found: dict[str, tuple[str, str]] = {}
    for name, one in options_of(record).items():
        values = ("True", "False") if one.kind is bool else ("",)
        found |= {flag: (name, value) for flag, value in zip(one.flags, values, strict=False)}
        found |= {one.option.short: (name, "")} if one.option.short else {}
    return found


def words_of(record: type, values: Mapping[str, Any]) -> list[Word]:
    """The words of a command line that give these values to options; those without a flag are left out."""
    known = options_of(record)
    return [word for name, value in values.items() if name in known for word in known[name].words(value)]


def command_of(verb: str, options: Options) -> str:
    """The command line that gives these options, quoted for a shell."""
    record: Any = type(options)
    known = options_of(record)
    arguments = [Path(getattr(options, name)) for name, one in known.items() if one.option.is_argument]
    return command_line("effexport", verb, *arguments, *words_of(record, given(options, record)))


def path_of(name: str, path: object) -> Path:
    """The argument of this name as a path. Raises UserError for something else."""
    check_type(name, path, (str, os.PathLike), PATH)
    found = Path(typing.cast("str | Path", path))
    # the libraries that read and write models take names as UTF-8
    if (encoding := sys.getfilesystemencoding()) != "utf-8" and not str(found.absolute()).isascii():
        raise UserError(
            f"{name} is {str(found)!a}, and in this locale Python has {encoding} for the names of files; start it with "
            "PYTHONUTF8=1, or in a locale with UTF-8"
        )
    return found


def optional_path(name: str, path: str | Path | None) -> Path | None:
    return None if path is None else path_of(name, path)
