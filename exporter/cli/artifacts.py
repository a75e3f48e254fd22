"""Commands that make artifacts and judge them: build, refit, verify, prove, evaluate, sign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport import api
from effexport.artifact import files_of_folder
from effexport.base.errors import Unavailable, UserError
from effexport.base.formatting import (
    NOTHING,
    command_line,
    counted,
    duration,
    megabytes,
    memory,
    number,
    rough_duration,
    say,
    seconds,
)
from effexport.base.runtimes import RUNTIMES
from effexport.cli._console import cell, implementation_text, result_console, stage_progress, stderr_console
from effexport.cli._verbs import verb
from effexport.options import BuildOptions, EvaluateOptions, ProveOptions, RefitOptions, SignOptions, VerifyOptions
from effexport.proof.check import (
    NOT_MEASURED,
    Check,
    Kind,
    by_name,
    excess,
    only_weights_failed,
    outcome_of,
    outcomes_text,
    summary,
)
from effexport.report.wording import cases_text, problems_of, quality_text, quantization_text, sizes, trace_text

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.api import BuildResult
    from effexport.artifact import Artifact, EngineEntry
    from effexport.report.report import Report
    from effexport.report.verified import Verified
    from effexport.tasks.figures import Evaluation


BUILD_EXAMPLES = (
    "effexport build --variant lsh          # random weights, to try it out",
    "effexport build --checkpoint DIR       # a trained Longformer, Reformer, …",
    "effexport build --module my_model:make # any model of your own",
    "effexport build --checkpoint DIR --task base --pool mean    # vectors of texts",
    "effexport build --variant linear --causal --seq-len 4096 --precision fp16",
    "effexport build --variant lsh --target trt-rtx --profile seq=128:1024:4096",
)


@verb("build", BuildOptions, examples=BUILD_EXAMPLES, result=True)
def build_command(options: BuildOptions, as_json: bool, verbose: bool) -> None:
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


REFIT_EXAMPLES = (
    "effexport refit artifacts/lsh --weights new.safetensors   # replaces it",
    "effexport refit artifacts/lsh --weights new.safetensors -o artifacts/new",
    "effexport refit artifacts/reformer --checkpoint DIR",
    "effexport refit artifacts/mine --module my_model:make     # with other weights",
)


@verb("refit", RefitOptions, examples=REFIT_EXAMPLES, result=True)
def refit_command(options: RefitOptions, as_json: bool, verbose: bool) -> None:
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


@verb("verify", VerifyOptions, result=True)
def verify_command(options: VerifyOptions, as_json: bool, verbose: bool) -> None:
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


PROVE_EXAMPLES = (
    "effexport prove model.onnx --against nets.py:make  # returns your nn.Module",
    "effexport prove small.onnx --against large.onnx -o report.xml",
    "effexport prove model.onnx --against artifacts/lsh # needs no PyTorch",
)


@verb("prove", ProveOptions, examples=PROVE_EXAMPLES, result=True)
def prove_command(options: ProveOptions, as_json: bool, verbose: bool) -> None:
    """Check that any ONNX file computes what a PyTorch module, an artifact or another file computes.

    Exit status 1 if it does not.
    """
    with stage_progress(stderr_console()) as progress:
        result = api.proved(replace(options, progress=progress))
    subject = {"against": result.request.against, "model": str(result.candidate.path)}
    show_verification(result, options, subject, as_json=as_json, verbose=verbose)


EVALUATE_EXAMPLES = (
    "effexport evaluate artifacts/writer --data held-out.txt",
    "effexport evaluate artifacts/writer --data held-out.txt --compare torch",
    "effexport evaluate artifacts/lsh --data all.npz --compare artifacts/softmax",
    "effexport evaluate artifacts/classifier --data all.jsonl --compare @openvino",
)


@verb("evaluate", EvaluateOptions, examples=EVALUATE_EXAMPLES)
def evaluate_command(options: EvaluateOptions, as_json: bool) -> None:
    """Judge a model on data: bits per byte, perplexity, loss and accuracy, each with its 95 % confidence interval.

    With --compare, also the differences row by row, and how many answers changed.
    """
    from effexport.cli.main import print_json

    with stage_progress(stderr_console()) as progress:
        found = api.evaluated(replace(options, progress=progress))
    if as_json:
        print_json(found.to_dict())
    console = result_console(as_json=as_json)
    print_figures(console, found)
    size = f"{counted(found.rows, 'row')}, {counted(found.answers, 'answer')} in {duration(1e3 * found.seconds)}"
    say(console, f"{found.model}: {found.objective} on {found.data}, {size}")
    if options.output is not None:
        say(console, f"{options.output}: written")


def print_figures(console: Console, found: Evaluation) -> None:
    from rich.table import Table

    from effexport.report.wording import figure_rows, interval_text

    table = Table("figure", box=None, pad_edge=False)
    table.add_column(cell(found.model))
    comparison = found.comparison
    if comparison is None:
        for estimate in found.estimates:
            table.add_row(cell(estimate.name), interval_text(estimate))
    else:
        table.add_column(cell(comparison.model))
        table.add_column("difference, row by row")
        for row in figure_rows(found.estimates, comparison.estimates, comparison.differences):
            table.add_row(*map(cell, row))
    console.print(table)
    if comparison is not None:
        changes = comparison.changes
        say(console, f"answers that changed: {changes.count:,} of {changes.of:,}, {100 * changes.share:.3g} %")


@verb("sign", SignOptions)
def sign_command(options: SignOptions, as_json: bool) -> None:
    """Sign an artifact and its verdict, so that others can check who made it, and that nothing was changed.

    Writes model.sig, of all files, in the format of OpenSSF Model Signing, and verdict.intoto.json, of the report. A
    key with a password needs it in the environment variable EFFEXPORT_KEY_PASSWORD. To check an artifact, give the
    public key: effexport verify ARTIFACT --identity PUBLIC.pem. With --sigstore, a public log keeps your identity for
    good; to check, give it and who confirmed it: --identity NAME --identity-provider URL.
    """
    from effexport.cli.main import print_json
    from effexport.signature import SIGNATURE, VERDICT

    signed = api.signed(options)
    if as_json:
        print_json(
            {
                "artifact": str(options.artifact),
                "signature": SIGNATURE,
                "verdict": VERDICT,
                "signed_by": signed.signed_by,
                "identity_provider": signed.provider,
                "files": signed.files,
            }
        )
    if signed.provider is None:
        who = f"with the key whose public half has the SHA-256 {signed.signed_by}"
    else:
        who = f"as {signed.signed_by}, which {signed.provider} confirmed"
    say(
        result_console(as_json=as_json),
        f"{signed.folder / SIGNATURE}: signs {counted(len(signed.files), 'file')} {who}",
    )


# Of golden values, from which on there is a note.
MANY_BYTES = 10_000_000


def json_of_result(result: BuildResult) -> None:
    """Print what --json says about an artifact that was written."""
    import msgspec

    from effexport.cli.main import print_json

    report = result.report
    answer = {"artifact": str(result.path), "verdict": report.verdict, "implementation": report.implementation}
    print_json(answer | msgspec.to_builtins(result.artifact.manifest))


def print_result(console: Console, result: BuildResult, about: str = "", *, verb: str, verbose: bool) -> None:
    """Print three lines: what is proven, what was written, and the next command. verbose, or if not all could be
    checked: first the checks, the notes and the engines, which the report has.

    about: which model the verdict is about, if not PyTorch's. verb: what was done to the artifact.
    """
    artifact, report = result.artifact, result.report
    notes = [*report.notes, *golden_note(artifact)]
    if verbose or report.verdict != "passed":
        print_details(console, artifact, report, notes)
    say(console, verdict_text(report, about or "PyTorch"))
    size = sum(path.stat().st_size for path in files_of_folder(artifact.path).values())
    engines = "".join(f", {engine.file}" for engine in report.engines)
    others = f"; {counted(len(notes), 'note')} in the report" if notes and not verbose else ""
    say(
        console,
        f"{artifact.path}: {memory(size)}, {report.title}, {artifact.spec.precision}{engines}, {verb} in "
        f"{rough_duration(sum(report.seconds.values()))}{implementation_text(report.implementation)}{others}",
    )
    say(console, f"Next: {next_step(artifact, report)}, or open {artifact.path}/report.html")


def print_details(console: Console, artifact: Artifact, report: Report, notes: Sequence[str]) -> None:
    print_checks(console, report.checks)
    if report.quantization is not None:
        say(console, quantization_text(report.quantization))
    for note in notes:
        say(console, f"note: {note}", style="yellow")
    for engine in report.engines:
        print_engine(console, artifact, engine)


def verdict_text(report: Report, title: str) -> str:
    """`equal to PyTorch, 35 checks passed; the closest to its limit is arithmetic with 12 % of it`."""
    verdict = {"passed": "equal to", "failed": "NOT proven equal to", "not run": "NOT compared with"}[report.verdict]
    worst = max(report.checks, key=share_used, default=None)
    closest = ""
    if worst is not None and share_used(worst) > 0 and report.verdict == "passed":
        closest = f"; the closest to its limit is {worst.name} with {100 * share_used(worst):.2g} % of it"
    return f"{verdict} {title}, {outcomes_text(report.checks)}{closest}"


def share_used(check: Check) -> float:
    """The share of its limit that a check used; 0 if it did not measure anything."""
    return excess(check.value, check.limit) if check.status == "passed" and check.limit else 0.0


def golden_note(artifact: Artifact) -> list[str]:
    """A sentence on golden values that take more room than is usual beside their model; none if they do not."""
    from effexport.artifact import REFERENCE

    golden, manifest = artifact.spec.golden, artifact.manifest
    size = manifest.files[REFERENCE].bytes if artifact.has_golden else 0
    if golden != "full" or size <= max(MANY_BYTES, manifest.model_bytes):
        return []
    return [f"{REFERENCE} holds {megabytes(size)} of golden values; --golden small keeps at most 1 MB of them"]


def next_step(artifact: Artifact, report: Report) -> str:
    """The next step with an artifact that was written: prove what could not be proven here, or try it out."""
    from effexport.base.runtimes import BFLOAT16_RUNTIME
    from effexport.report.reproduce import source_option

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
    """A command that tries out a model that fills masks; "" for others, and without a tokenizer."""
    from effexport.tasks.tasks import FillMask, task_from_artifact

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

    for remark in engine.remarks:
        say(console, f"note: {remark}", style="yellow")
    say(
        console,
        f"{artifact.path}/{engine.file}: {RUNTIMES[engine.target].label} {engine.tensorrt_version}, "
        f"{megabytes(engine.bytes)}, built in {seconds(engine.build_seconds)}, {sizes(engine.profiles)}"
        f"{implementation_text(engine.implementation, 'is a')}",
    )


_STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow", "not applicable": "dim"}


def print_checks(console: Console, checks: Sequence[Check], divergence: str = "") -> None:
    """Print one row per kind of check. Failures come first, because a reader begins at the top, and before them the
    first divergence inside the graph, unless it is known to follow from other weights; below the table comes what did
    not run, and whether the reference disagreed with itself."""
    problems = problems_of(checks)
    weights_first = only_weights_failed(checks)
    if divergence and not weights_first:
        say(console, divergence, style="bold")
    for problem in problems:
        if problem.outcome == "failed":
            say(console, problem.text, style=_STYLES["failed"])
    if divergence and weights_first:
        say(console, divergence, style="bold")
    print_table(console, checks)
    for problem in problems:
        if problem.outcome != "failed":
            say(console, problem.text, style=_STYLES[problem.outcome])
    for check in checks:
        if check.kind == Kind.REFERENCE_REPEATABLE and check.detail:
            say(console, f"note: {check.detail}", style="yellow")


def print_table(console: Console, checks: Sequence[Check]) -> None:
    from rich.table import Table

    table = Table("check", "result", "metric", box=None, pad_edge=False)
    for title in ("worst", "limit", "cases"):
        table.add_column(title, justify="right")
    groups = by_name(checks)
    for name, entry in summary(checks).items():
        group = groups[name]
        outcome = outcome_of(group)
        measured = outcome in ("passed", "failed") and entry["metric"] != NOT_MEASURED
        table.add_row(
            cell(name),
            cell(outcome, _STYLES[outcome]),
            cell(entry["metric"] if measured else NOTHING),
            number(entry["worst"]),
            number(entry["limit"]),
            cases_text(group),
        )
    console.print(table)


def show_verification(
    result: Verified, options: VerifyOptions | ProveOptions, subject: dict[str, Any], *, as_json: bool, verbose: bool
) -> None:
    """Print a comparison, and exit with 1 if it failed. subject: the first fields of its JSON."""
    from effexport.cli.main import print_json
    from effexport.proof.check import passed

    report = result.report
    if as_json:
        print_json(subject | json_of_verification(result, options))
    console = result_console(as_json=as_json)
    if verbose or report.verdict != "passed" or options.trace:
        print_checks(console, report.checks, report.divergence)
    if result.found is not None and not report.divergence and not options.trace:
        say(console, trace_text(result.found))
    for note in result.request.notes:
        say(console, f"note: {note}", style="yellow")
    if report.quality is not None:
        say(console, quality_text(report.quality))
    ran = implementation_text(report.implementation)
    title = reference_text(result, options.precision_hint)
    say(console, f"{options.model or next(iter(subject.values()))}: {verdict_text(report, title)}{ran}")
    if options.output is not None:
        say(console, f"{options.output}: written")
    if not passed(report.checks):
        raise click.exceptions.Exit(1)


def json_of_verification(result: Verified, options: VerifyOptions | ProveOptions) -> dict[str, Any]:
    from effexport.proof.check import passed, summary
    from effexport.report.report import dict_of_check

    report, found = result.report, result.found
    return {
        "passed": passed(report.checks),
        "runtime": options.runtime,
        "precision_hint": options.precision_hint or None,
        "implementation": report.implementation,
        "environment": report.environment,
        "summary": summary(report.checks),
        "checks": [dict_of_check(check) for check in report.checks],
        "trace": {"not_run": trace_text(found)} if isinstance(found, Unavailable) else found and found.to_dict(),
        "quality": report.quality and asdict(report.quality),
        **({"output": str(options.output)} if options.output is not None else {}),
    }


def reference_text(result: Verified, precision_hint: str) -> str:
    """`PyTorch within the limits of bf16`: what a model was compared with."""
    from effexport.proof.check import Kind

    report, kind = result.report, result.request.choice.kind
    title = report.reference
    stored = any(check.kind == Kind.PYTORCH_MODULE for check in report.checks)
    if kind == "golden" or (kind == "auto" and stored):
        title = "PyTorch's stored answers"
    return f"{title} within the limits of {precision_hint}" if precision_hint else title
