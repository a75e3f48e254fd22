"""What `effexport build` and `effexport refit` print about the artifact that they have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effexport.commands._options import implementation_text
from effexport.errors import UserError
from effexport.one_line import say
from effexport.runtimes import RUNTIMES
from effexport.shell import command_line
from effexport.units import megabytes, rough_duration, seconds

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.artifact import Artifact, EngineEntry
    from effexport.report.model import Report


# Of golden values, from which on there is a note.
MANY_BYTES = 10_000_000


def print_result(console: Console, artifact: Artifact, report: Report, verb: str = "built") -> None:
    """Print the checks, the notes, the engines, and one line about the artifact. verb: what was done to it."""
    from effexport.artifact import MODEL
    from effexport.commands._checks import print_checks

    print_checks(console, report.checks)
    if report.quantization is not None:
        from effexport.report.rendering.quantization import quantization_text

        say(console, quantization_text(report.quantization))
    for note in (*report.notes, *golden_note(artifact)):
        say(console, f"note: {note}", style="yellow")
    for engine in report.engines:
        print_engine(console, artifact, engine)
    say(
        console,
        f"{artifact.path}: {report.title}, {artifact.spec.precision}, {MODEL} of "
        f"{megabytes(artifact.manifest.model_bytes)}, "
        f"{verb} in {rough_duration(sum(report.seconds.values()))}{implementation_text(report.implementation)}. "
        f"Next: {next_step(artifact, report)}, or open {artifact.path}/report.html",
    )


def golden_note(artifact: Artifact) -> list[str]:
    """A sentence on golden values that take more room than is usual beside their model; none if they do not."""
    from effexport.artifact import REFERENCE

    golden, manifest = artifact.spec.golden, artifact.manifest
    size = manifest.files[REFERENCE].bytes if artifact.has_golden else 0
    if golden != "full" or size <= max(MANY_BYTES, manifest.model_bytes):
        return []
    return [f"{REFERENCE} holds {megabytes(size)} of golden values; --golden small keeps at most 1 MB of them"]


def next_step(artifact: Artifact, report: Report) -> str:
    """What to do with an artifact that was written: prove what could not be proven here, or try it out."""
    from effexport.report.reproduce import source_option
    from effexport.runtimes import BFLOAT16_RUNTIME

    unproven = [
        engine.target
        for engine in report.engines
        if any(check.status == "not run" and check.target == engine.target for check in report.checks)
    ]
    if unproven:
        verify = command_line("effexport", "verify", artifact.path, ("--runtime", unproven[0]))
        return f"on a machine with a GPU, {verify}"
    if report.verdict == "not run":  # ONNX Runtime has no arithmetic in bfloat16 on CPUs
        package = BFLOAT16_RUNTIME.package
        where = "" if package.version else f"with OpenVINO ({package.remedy}), "
        return where + command_line("effexport", "verify", artifact.path, ("--runtime", BFLOAT16_RUNTIME.name))
    source = [] if artifact.has_golden else source_option(report)
    verify = command_line("effexport", "verify", artifact.path, *(source or ()))
    if source is None:
        verify = f"in Python, effexport.verify({str(artifact.path)!r}, module=model)"
    return f"{fill} or {verify}" if (fill := fill_mask_command(artifact)) else verify


def fill_mask_command(artifact: Artifact) -> str:
    """How to try out a model that fills masks; "" for others, and without what reads texts."""
    from effexport.text.tasks import FillMask, task_from_artifact

    try:
        task = task_from_artifact(artifact)
    except UserError:
        return ""
    if not isinstance(task, FillMask):
        return ""
    text = f"Paris is the {task.reader.tokenizer.mask_token} of France."
    return command_line("effexport", "run", artifact.path, ("--fill-mask", text))


def print_engine(console: Console, artifact: Artifact, engine: EngineEntry) -> None:
    """Print the remarks on an engine, and one line about it."""
    from effexport.report.rendering.text import sizes

    for remark in engine.remarks:
        say(console, f"note: {remark}", style="yellow")
    say(
        console,
        f"{artifact.path}/{engine.file}: {RUNTIMES[engine.target].label} {engine.tensorrt_version}, "
        f"{megabytes(engine.bytes)}, built in {seconds(engine.build_seconds)}, {sizes(engine.profiles)}"
        f"{implementation_text(engine.implementation, 'is a')}",
    )
