"""`effexport build`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from effexport import api
from effexport.cli._console import result_console, stage_progress, stderr_console
from effexport.cli._result import json_of_result, print_result
from effexport.cli._verbs import verb
from effexport.options import BuildOptions

if TYPE_CHECKING:
    from effexport.report.report import Report

EXAMPLES = (
    "effexport build --variant lsh          # random weights, to try it out",
    "effexport build --checkpoint DIR       # a trained Longformer, Reformer, …",
    "effexport build --module my_model:make # any model of your own",
    "effexport build --checkpoint DIR --task base --pool mean    # vectors of texts",
    "effexport build --variant linear --causal --seq-len 4096 --precision fp16",
    "effexport build --variant lsh --target trt-rtx --profile seq=128:1024:4096",
)


@verb("build", BuildOptions, examples=EXAMPLES, result=True)
def command(options: BuildOptions, as_json: bool, verbose: bool) -> None:
    """Export a model to ONNX, check it against PyTorch and write an artifact folder.

    Nothing is written unless every check passes.
    """
    with stage_progress(stderr_console()) as progress:
        result = api.built(replace(options, progress=progress))
    if as_json:
        json_of_result(result)
    console = result_console(as_json=as_json)
    about = "" if options.weights is None else compared_text(result.report, options.reference)
    print_result(console, result, about, verb="built", verbose=verbose)


def compared_text(report: Report, reference: str | Path | None) -> str:
    """The reference of a model whose weights come from another one."""
    layer = f"the {report.title} of effexport with the weights of {report.weights_from}"
    if reference is not None:
        return f"{layer} and to the answers in {reference}"
    return f"{layer}, NOT compared with the model that these weights were trained in (--reference FILE.safetensors)"
