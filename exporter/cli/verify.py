"""`effexport verify`."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import click

from effexport import api
from effexport.base.errors import Unavailable
from effexport.base.one_line import say
from effexport.base.units import counted
from effexport.cli._console import implementation_text, result_console, stage_progress, stderr_console
from effexport.cli._result import print_checks, verdict_text
from effexport.cli._verbs import verb
from effexport.options import VerifyOptions


@verb("verify", VerifyOptions, result=True)
def command(options: VerifyOptions, as_json: bool, verbose: bool) -> None:
    """Check that a model computes what PyTorch computes: several shapes, padding, repetition, batch invariance.

    Exit status 1 if a check fails, or if something that the options name was not compared.
    """
    from effexport.cli.main import print_json
    from effexport.proof.check import passed
    from effexport.report.rendering.text import quality_text, trace_text

    with stage_progress(stderr_console()) as progress:
        result = api.verified(replace(options, progress=progress))
    report = result.report
    if as_json:
        print_json(json_of_verification(result, options))
    console = result_console(as_json=as_json)
    if verbose or report.verdict != "passed" or options.trace:
        print_checks(console, report.checks, report.divergence)
    if result.found is not None and not report.divergence and not options.trace:
        say(console, trace_text(result.found))
    if report.quality is not None:
        say(console, quality_text(report.quality))
    ran = implementation_text(report.implementation)
    title = reference_text(result, options.precision_hint)
    say(console, f"{options.model or options.artifact}: {verdict_text(report, title)}{ran}")
    if result.seal is not None:
        files = counted(len(result.seal.files), "file")
        say(console, f"{options.artifact}: {files} as the owner of {options.identity} signed them")
    if options.output is not None:
        say(console, f"{options.output}: written")
    if not passed(report.checks):
        raise click.exceptions.Exit(1)


def json_of_verification(result: api.Verified, options: VerifyOptions) -> dict[str, Any]:
    from effexport.proof.check import passed, summary
    from effexport.report.model import dict_of_check
    from effexport.report.rendering.text import trace_text

    report, found = result.report, result.found
    return {
        "artifact": str(options.artifact),
        "model": str(result.candidate.path),
        "reference": options.reference,
        "passed": passed(report.checks),
        "runtime": options.runtime,
        "precision_hint": options.precision_hint or None,
        "implementation": report.implementation,
        "environment": report.environment,
        "summary": summary(report.checks),
        "checks": [dict_of_check(check) for check in report.checks],
        "trace": {"not_run": trace_text(found)} if isinstance(found, Unavailable) else found and found.to_dict(),
        "quality": report.quality and asdict(report.quality),
        **({"signed_by": result.seal.key_sha256} if result.seal is not None else {}),
        **({"output": str(options.output)} if options.output is not None else {}),
    }


def reference_text(result: api.Verified, precision_hint: str) -> str:
    """`PyTorch within the limits of bf16`: what a model was compared with."""
    from effexport.proof.check import Kind

    report, kind = result.report, result.request.choice.kind
    title = report.reference
    stored = any(check.kind == Kind.PYTORCH_MODULE for check in report.checks)
    if kind == "golden" or (kind == "auto" and stored):
        title = "PyTorch's stored answers"
    return f"{title} within the limits of {precision_hint}" if precision_hint else title
