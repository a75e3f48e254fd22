"""`effexport completion`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import click

from effexport.base.option_fields import Options, argument
from effexport.cli._verbs import verb


@dataclass(frozen=True)
class ShellOptions(Options):
    """The options of `effexport completion`."""

    shell: Literal["bash", "zsh", "fish"] = field(metadata=argument("The shell that completes.", metavar="SHELL"))


@verb("completion", ShellOptions)
def command(options: ShellOptions, as_json: bool) -> None:
    """Print a completion script for SHELL: bash, zsh or fish. In bash: eval "$(effexport completion bash)"."""
    from click.shell_completion import get_completion_class

    from effexport.cli.main import cli, print_json

    completion = get_completion_class(options.shell)
    assert completion is not None
    script = completion(cli, {}, "effexport", "_EFFEXPORT_COMPLETE").source()
    if as_json:
        print_json({"shell": options.shell, "script": script})
    else:
        click.echo(script)
