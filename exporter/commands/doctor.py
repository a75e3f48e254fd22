"""`effexport doctor`."""

from __future__ import annotations

from typing import Any

import click

from effexport.commands._options import common_options, result_console, say
from effexport.environment import MISSING


@click.command("doctor")
@common_options
def command(as_json: bool) -> None:
    """Show what is installed, whether it works, and the command that adds each missing part.

    Exit status 1 if a required part is missing, or if an installed part does not work.
    """
    from effexport.cli import print_json
    from effexport.environment import PACKAGES, examine, versions

    findings = [examine(package) for package in PACKAGES]
    library = examine_library()
    ok = all(finding["works"] or is_left_out(finding) for finding in findings) and library["problem"] is None
    if as_json:
        print_json({"ok": ok, "environment": versions(), "parts": findings, "library": library})
    else:
        from rich.table import Column, Table
        from rich.text import Text

        table = Table(
            "part", "version", "state", "needed to", Column("to add it", no_wrap=True), box=None, pad_edge=False
        )
        for finding in findings:
            style = "green" if finding["works"] else "dim" if is_left_out(finding) else "bold red"
            state = Text("works" if finding["works"] else finding["problem"], style=style)
            table.add_row(
                finding["name"], finding["version"] or "–", state, finding["purpose"], Text(finding["remedy"] or "")
            )
        console = result_console()
        console.print(table)
        say(console, library_line(library))
        say(console, "everything works" if ok else "something is missing, see above")
    if not ok:
        raise click.exceptions.Exit(1)


def is_left_out(finding: dict[str, Any]) -> bool:
    """Whether an optional part is not installed, which is fine, unlike one that is installed but does not load."""
    return bool(finding["optional"] and finding["problem"] == MISSING)


def examine_library() -> dict[str, Any]:
    """The kernel library. A missing library is not a problem: the function bodies run instead."""
    from effexport.plugins.building.library import LibraryError, find_library

    try:
        library, problem = find_library(), None
    except LibraryError as error:
        library, problem = None, str(error)
    current = library is not None and not library.outdated
    return {
        "path": str(library.path) if library else None,
        "outdated": library.outdated if library else None,
        "cuda": library.info.has_cuda if library and library.info else None,
        "problem": problem,
        "remedy": None if current or problem else "effexport plugins build",
    }


def library_line(library: dict[str, Any]) -> str:
    """The kernel library in one line."""
    if library["problem"]:
        return f"kernel library: {library['problem']}"
    if library["path"] is None:
        return (
            "kernel library: not built, so custom operators run as their ONNX function bodies; "
            f"build the kernels with: {library['remedy']}"
        )
    if library["outdated"]:
        return f"kernel library: OUTDATED, built from different sources: {library['path']}; run: {library['remedy']}"
    devices = {True: "CPU and CUDA", False: "CPU only", None: "given by EFFEXPORT_LIBRARY"}[library["cuda"]]
    return f"kernel library: {devices}: {library['path']}"
