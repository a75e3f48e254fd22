"""Output of commands: names as they are, and a clock that stays in sight."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from effexport.base.formatting import say
from effexport.bench.grid import Step
from effexport.cli import bench, sweep
from effexport.cli._console import result_console, stage_progress, stderr_console, step_progress

# rich takes the first for styles, the others for an end tag, an emoji and a link
NAMES = ("artifacts/[bold]lsh", "effexport[openvino]", "[/]", "a:warning:b", ":x:", "[link=x]y[/link]", "\\[red]")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("console", [result_console, stderr_console])
def test_names_are_printed_as_they_are_in_lines_and_tables(
    name: str, console: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    say(console(), name, style="yellow")
    table = Table(name, box=None, show_header=True)
    table.add_row(name)
    console().print(table)
    text = "".join(capsys.readouterr())
    assert [line.strip() for line in text.splitlines()] == [name] * 3


def test_doctor_prints_the_extra_that_bfloat16_tiles_need(monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    from effexport.cli import installation

    remedy = "amx_bf16; to use it: pip install 'effexport[openvino]'"
    monkeypatch.setattr(installation, "examine_bfloat16", lambda: (remedy, ""))
    printed = " ".join(cli("doctor").out.split())
    assert "effexport[openvino]" in printed.replace(" ", "")


def frames(width: int) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=width, color_system=None), file


def last_line(file: io.StringIO) -> str:
    """The longest line that was drawn, without codes of the terminal."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\r", file.getvalue())
    return max((line for line in re.split(r"[\r\n]+", plain)), key=len)


LONG = "checking the function bodies of custom operators of a model with a long name, [bold]all of them[/bold]"


@pytest.mark.parametrize("width", [40, 60, 79, 80, 120])
@pytest.mark.parametrize("steps", [False, True])
def test_the_clock_of_a_stage_is_on_every_line(width: int, steps: bool) -> None:
    console, file = frames(width)
    with stage_progress(console) as progress:
        progress(LONG)
        if steps:
            progress.step("timing tactics of the layer blocks.0.attention", 0.5)
    line = last_line(file)
    assert re.search(r"\d:\d\d:\d\d", line), line
    assert "checking"[: 3 if steps else 8] in line
    assert len(line.rstrip()) <= width


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_clock_of_a_benchmark_and_of_a_sweep_is_on_every_line(width: int) -> None:
    console, file = frames(width)
    with step_progress(console, bench.line_of_step) as show:
        show(Step(LONG, 0.5, 1.0, 3000.0))
    assert re.search(r"\d:\d\d:\d\d", last_line(file))
    console, file = frames(width)
    with step_progress(console, sweep.line_of_step, of_cells=True) as show:
        show(Step("a cell", 3, 12, 3000.0, running=2))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "3/12" in plain
    assert re.search(r"\d:\d\d:\d\d", plain)
