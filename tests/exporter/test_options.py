"""An option is declared once: help, completion, files, arguments, docs and the commands of reports follow from it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.shell_completion import ShellComplete

import effexport
from effexport.base.errors import EffexportError, UserError
from effexport.base.option_fields import OTHER, Options, file_option, in_python, keywords, option, options_of
from effexport.base.spec import BuildSpec
from effexport.cli._verbs import verb
from effexport.cli.main import COMMANDS
from effexport.models.variants.lsh import LSHSpec
from effexport.options import (
    SECTIONS,
    SIZES,
    BuildOptions,
    EvaluateOptions,
    InspectOptions,
    ProveOptions,
    RefitOptions,
    SignOptions,
    SpecOptions,
    VerifyOptions,
)
from effexport.pipeline.request import BuildRequest
from effexport.report.report import Report
from effexport.report.reproduce import build_command

RECORDS = {
    "build": BuildOptions,
    "verify": VerifyOptions,
    "prove": ProveOptions,
    "sign": SignOptions,
    "evaluate": EvaluateOptions,
    "refit": RefitOptions,
    "inspect": InspectOptions,
}
DOCS = Path(__file__).parents[2] / "docs" / "options.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class More(BuildOptions):
    """The options of a build, and two that were added to the record."""

    colour: Literal["red", "green"] | None = option(None, "A colour that is new.", SIZES, metavar="NAME", in_file=True)
    rare: int | None = file_option(None, "A number that is rare.", SIZES)


@verb("build", More)
def command(options: More, as_json: bool) -> None:
    """Print the new options."""
    click.echo(f"{options.colour} {options.rare} {options.variant}")


def test_an_option_that_is_added_to_a_record_is_in_the_help_and_completed() -> None:
    help = command.get_help(click.Context(command, info_name="build"))
    assert "  --colour NAME      A colour that is new.\n" in help
    assert "--rare" not in help
    assert "quantize_embeddings, rare; see docs/options.md" in " ".join(help.split())
    items = ShellComplete(command, {}, "build", "_").get_completions(["--colour"], "g")
    assert [item.value for item in items] == ["green"]


def test_an_option_that_is_added_to_a_record_is_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    made = keywords(More)(lambda options: (options.colour, options.rare, options.variant))
    assert made(colour="red", rare=3) == ("red", 3, None)
    with pytest.raises(UserError, match="unknown colour 'rde'; did you mean 'red'") as refused:
        made(colour="rde")  # type: ignore[arg-type]
    assert refused.value.lines == ("unknown --colour 'rde'; did you mean 'red'? Expected: red, green",)
    with pytest.raises(UserError, match="rare is '3'; expected an integer"):
        made(rare="3")  # type: ignore[arg-type]
    command.main(["--colour", "red", "--variant", "lsh"], standalone_mode=False)
    assert capsys.readouterr().out == "red None lsh\n"


def report_of(spec: dict[str, Any], weights_from: str = "") -> Report:
    return Report(
        title="a model",
        spec=spec,
        checks=[],
        seconds={},
        environment={},
        created="",
        runtime="ort",
        weights_from=weights_from,
    )


def test_an_option_that_is_added_to_a_record_is_repeated_by_the_command_of_a_report() -> None:
    spec = {"scope": "checkpoint", "model": {"family": "module", "colour": "x"}, "batch": 2}
    command = build_command(report_of(spec, "a.py:make"), "again", More)
    assert command == "effexport build --module a.py:make --batch 2 -o again"
    report = report_of(BuildSpec.from_dict(SPEC).to_dict() | {"colour": "red", "rare": 3})
    lines = build_command(report, "again", More).splitlines()
    assert lines[:3] == ["cat > spec.toml <<'END'", "rare = 3", "END"]
    assert lines[3] == "effexport build --variant softmax --scope attention --colour red --spec spec.toml -o again"


SPEC: dict[str, Any] = {"scope": "attention", "model": {"variant": "softmax"}}


@pytest.mark.parametrize("name", [name for name, one in options_of(SpecOptions).items() if one.option.in_file])
def test_every_option_of_a_spec_may_stand_in_a_file_of_a_variant_and_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    value = "mean" if name == "pool" else 2
    (tmp_path / "spec.toml").write_text(f"{name} = {value if isinstance(value, int) else repr(value)}")
    file = tmp_path / "spec.toml"
    of_variant = BuildRequest.of(BuildOptions(file, variant="lsh"))
    assert of_variant.flags == {"variant": "lsh"}
    assert of_variant.spec.values == {name: value}  # type: ignore[union-attr]
    assert BuildRequest.of(BuildOptions(file, checkpoint="x")).flags == {name: value}


def test_what_is_given_wins_over_the_file_of_a_checkpoint() -> None:
    request = BuildRequest.of(BuildOptions({"precision": "fp16", "opset": 21}, checkpoint="x", opset=22))
    assert request.flags == {"precision": "fp16", "opset": 22}


@pytest.mark.parametrize("record", RECORDS.values())
def test_every_option_has_a_line_of_help(record: type[Options]) -> None:
    for one in options_of(record).values():
        assert one.option.help[-1:] == "."
        assert one.option.section in (*SECTIONS, OTHER)


@pytest.mark.parametrize("name", [*COMMANDS, "plugins build", "plugins path", "plugins info"])
def test_the_help_fits_into_a_terminal(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Two screens of 80 × 50; an option is one line."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli(*name.split(), "--help").out.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 80
    options = [line for line in lines if line.startswith("  -")]
    assert len(options) > sum(bool(one.flags) for one in options_of(RECORDS.get(name, Options)).values())
    continued = [line for line in lines if line.startswith("      ") and not line.strip().startswith("-")]
    assert continued == []


def table_of(record: type[Options]) -> str:
    """The options of a record as a table of docs/options.md."""
    rows = ["| command line | Python, spec file | |", "|---|---|---|"]
    for one in sorted(options_of(record).values(), key=lambda one: (*SECTIONS, OTHER).index(one.option.section)):
        if one.option.is_argument:
            continue
        flags = " ".join(f"`{flag}`" for flag in one.flags)
        places = f"`{one.name}`" + " , in a file, too" * one.option.in_file
        named = all(choice in one.option.help for choice in one.choices) or one.name == "variant"
        choices = "" if named else ", ".join(f"`{choice}`" for choice in one.choices)
        text = one.help.replace("|", "\\|") + f" One of {choices}." * bool(choices)
        rows.append(f"| {flags} | {places.replace(' ,', ',')} | {text} |")
    return "\n".join(rows)


def test_the_tables_of_the_docs_are_those_of_the_records() -> None:
    """EFFEXPORT_RECORD=1 writes them."""
    text = DOCS.read_text(encoding="utf-8")
    for name, record in RECORDS.items():
        before, mark, after = text.partition(f"\n## {name}\n\n")
        assert mark, name
        introduction, _, rest = after.partition("\n| command line |")
        rest = rest[rest.find("\n\n") :] if "\n\n" in rest else "\n"
        text = f"{before}{mark}{introduction}\n{table_of(record)}{rest}"
    if os.environ.get("EFFEXPORT_RECORD"):
        DOCS.write_text(text, encoding="utf-8")
    assert text == DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("choose another folder with -o, or replace it with --force", "output=…, or replace it with force=True"),
        ("expected --module MODULE:FUNCTION or --checkpoint DIR for", "expected module=… or checkpoint=… for"),
        ("unknown --runtime 'x'", "unknown runtime 'x'"),
        ("use --unfused, or --no-inline", "use fused=False, or inline=False"),
        ("use --quantization dynamic, or --trace as well", 'use quantization="dynamic", or trace=True as well'),
        ("use a smaller --dim, --seq-len or --batch", "use a smaller dim, seq_len or batch"),
        ("export it first: effexport build --checkpoint x -o y", ": effexport build --checkpoint x -o y"),
        ("make it with: effexport build --variant lsh; or --force", "effexport build --variant lsh; or force=True"),
        ("--target trt reads static scales only", "targets trt reads static scales only"),
        ("-o x.txt: expected a file name", "-o x.txt: expected a file name"),
        ("a-o, a--force", "a-o, a--force"),
    ],
)
def test_an_error_of_a_function_names_arguments_and_keeps_the_flags_for_the_command_line(
    text: str, expected: str
) -> None:
    error = in_python(EffexportError(text), BuildOptions)
    assert expected in str(error)
    assert error.lines == (text,)


def test_fields_of_a_variant_may_be_arguments(tmp_path: Path) -> None:
    given = {"variant": "lsh", "chunk_length": 8, "vocab_size": 99, "heads": 2}
    others = {"chunk_length": 8, "vocab_size": 99}
    assert BuildOptions.arguments(given) == {"variant": "lsh", "heads": 2, "others": others}
    file = tmp_path / "spec.toml"
    file.write_text('variant = "lsh"\nchunk_length = 64\nnum_hashes = 3\n')
    for spec in (file, {"variant": "lsh", "chunk_length": 64, "num_hashes": 3}):
        request = BuildRequest.of(BuildOptions(spec, **BuildOptions.arguments({"chunk_length": 8, "seq_len": 64})))
        built, _ = request.resolve()
        assert isinstance(built.attention, LSHSpec)
        assert (built.attention.chunk_length, built.attention.num_hashes, built.model.seq_len) == (8, 3, 64)
    with pytest.raises(UserError, match="build has no argument 'forc'; did you mean 'force'"):
        effexport.build(variant="lsh", forc=True)  # type: ignore[call-arg]
    with pytest.raises(UserError, match="chunk_length does not apply to softmax"):
        effexport.build(variant="softmax", chunk_length=8)  # type: ignore[call-arg]


def test_errors_of_functions_that_open_artifacts_name_arguments_too(tmp_path: Path) -> None:
    opened = (effexport.load, effexport.load_text, effexport.load_decoder, effexport.load_generator)
    for function in opened:
        with pytest.raises(UserError, match="unknown runtime 'orrt'; did you mean 'ort'"):
            function(tmp_path, runtime="orrt")
    with pytest.raises(UserError, match=": effexport build --variant lsh -o nope"):  # a command stays one
        effexport.report("nope")


def test_the_public_errors_are_names_of_the_package() -> None:
    assert issubclass(effexport.StageError, effexport.EffexportError)
    assert issubclass(effexport.UserError, effexport.EffexportError)
