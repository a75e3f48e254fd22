"""`effexport doctor`."""

from __future__ import annotations

import click

from effexport.commands._options import debug_option, json_option, stderr_console


@click.command("doctor")
@json_option
@debug_option
def command(as_json: bool, debug: bool) -> None:
    """Say what is installed, whether it works, what is missing and the command that adds it.

    Exit status 1 when nothing here can build, or nothing can run a model.
    """
    from effexport.cli import print_json
    from effexport.environment import PARTS, examine, versions

    findings = [examine(part) for part in PARTS]
    ok = all(finding["works"] for finding in findings)
    if as_json:
        print_json({"ok": ok, "environment": versions(), "parts": findings})
    else:
        from rich.table import Column, Table
        from rich.text import Text

        table = Table(
            "part", "version", "state", "needed to", Column("to add it", no_wrap=True), box=None, pad_edge=False
        )
        for finding in findings:
            state = Text("works", style="green") if finding["works"] else Text(finding["problem"], style="bold red")
            table.add_row(
                finding["name"], finding["version"] or "–", state, finding["purpose"], Text(finding["remedy"] or "")
            )
        console = stderr_console()
        console.print(table)
        console.print("custom operators run as their ONNX function bodies on every runtime", markup=False)
        console.print("everything works" if ok else "something is missing, see above", markup=False)
    if not ok:
        raise click.exceptions.Exit(1)
