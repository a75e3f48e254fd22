"""`effexport completion`."""

from __future__ import annotations

import click

from effexport.commands._options import common_options
from effexport.commands._types import OneOf


@click.command("completion")
@click.argument("shell", type=OneOf(["bash", "zsh", "fish"]), metavar="SHELL")
@common_options
def command(shell: str, as_json: bool) -> None:
    """Print a completion script for SHELL: bash, zsh or fish. In bash: eval "$(effexport completion bash)"."""
    from click.shell_completion import get_completion_class

    from effexport.cli import cli, print_json

    completion = get_completion_class(shell)
    assert completion is not None
    script = completion(cli, {}, "effexport", "_EFFEXPORT_COMPLETE").source()
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
