"""`effexport verify`."""

from __future__ import annotations

from dataclasses import replace

from effexport import api
from effexport.base.formatting import counted, say
from effexport.cli._console import result_console, stage_progress, stderr_console
from effexport.cli._result import show_verification
from effexport.cli._verbs import verb
from effexport.options import VerifyOptions


@verb("verify", VerifyOptions, result=True)
def command(options: VerifyOptions, as_json: bool, verbose: bool) -> None:
    """Check that a model computes what PyTorch computes: several shapes, padding, repetition, batch invariance.

    Exit status 1 if a check fails, or if something that the options name was not compared.
    """
    with stage_progress(stderr_console()) as progress:
        result = api.verified(replace(options, progress=progress))
    subject = {"artifact": str(options.artifact), "model": str(result.candidate.path), "reference": options.reference}
    if result.seal is not None:
        owner = "" if result.seal.provider else "the owner of "
        signed = f"{counted(len(result.seal.files), 'file')} as {owner}{options.identity} signed them"
        say(result_console(as_json=as_json), f"{options.artifact}: {signed}")
        subject["signed_by"] = result.seal.signed_by
        if result.seal.provider is not None:
            subject["identity_provider"] = result.seal.provider
    show_verification(result, options, subject, as_json=as_json, verbose=verbose)
