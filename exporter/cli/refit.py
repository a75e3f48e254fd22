"""`effexport refit`."""

from __future__ import annotations

from dataclasses import replace

from effexport import api
from effexport.cli._console import result_console, stage_progress, stderr_console
from effexport.cli._result import json_of_result, print_result
from effexport.cli._verbs import verb
from effexport.options import RefitOptions

EXAMPLES = (
    "effexport refit artifacts/lsh --weights new.safetensors   # replaces it",
    "effexport refit artifacts/lsh --weights new.safetensors -o artifacts/new",
    "effexport refit artifacts/reformer --checkpoint DIR",
    "effexport refit artifacts/mine --module my_model:make     # with other weights",
)


@verb("refit", RefitOptions, examples=EXAMPLES, result=True)
def command(options: RefitOptions, as_json: bool, verbose: bool) -> None:
    """Put other weights of the same architecture into an artifact, without exporting it again.

    The graphs are those that were traced for the artifact, or the same again of a module of your own; the files are
    those that a build from these weights would write. PyTorch with the new weights is the reference of the same checks
    as in a build. Engines are refitted or built again. If anything fails, the old artifact stays as it is.
    """
    with stage_progress(stderr_console()) as progress:
        result = api.refitted(replace(options, progress=progress))
    if as_json:
        json_of_result(result)
    print_result(result_console(as_json=as_json), result, verb="refitted", verbose=verbose)
