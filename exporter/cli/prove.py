"""`effexport prove`."""

from __future__ import annotations

from dataclasses import replace

from effexport import api
from effexport.cli._console import stage_progress, stderr_console
from effexport.cli._result import show_verification
from effexport.cli._verbs import verb
from effexport.options import ProveOptions

EXAMPLES = (
    "effexport prove model.onnx --against nets.py:make  # returns your nn.Module",
    "effexport prove small.onnx --against large.onnx -o report.xml",
    "effexport prove model.onnx --against artifacts/lsh # needs no PyTorch",
)


@verb("prove", ProveOptions, examples=EXAMPLES, result=True)
def command(options: ProveOptions, as_json: bool, verbose: bool) -> None:
    """Check that any ONNX file computes what a PyTorch module, an artifact or another file computes.

    Exit status 1 if it does not.
    """
    with stage_progress(stderr_console()) as progress:
        result = api.proved(replace(options, progress=progress))
    subject = {"against": result.request.against, "model": str(result.candidate.path)}
    show_verification(result, options, subject, as_json=as_json, verbose=verbose)
