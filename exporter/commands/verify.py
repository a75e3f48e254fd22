"""`effexport verify`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from effexport.commands._options import (
    common_options,
    implementation_text,
    precision_hint_option,
    result_console,
    runtime_options,
    say,
    stage_progress,
    stderr_console,
)
from effexport.commands._types import Named
from effexport.errors import Unavailable
from effexport.runtimes import ARTIFACT_RUNTIMES, ORT_RUNTIMES, RUNTIMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from effexport.artifact import Artifact
    from effexport.proof.cases import Case
    from effexport.proof.references.choice import ReferenceChoice
    from effexport.proof.trace.trace import Trace
    from effexport.proof.verify import Verification
    from effexport.runners.runner import ModelOptions


@click.command("verify")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="ONNX file to check instead of the artifact's own.")
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    help="The weights that the artifact was built from: a checkpoint folder or a file.",
)
@runtime_options(ARTIFACT_RUNTIMES)
@precision_hint_option
@click.option(
    "--reference",
    type=Named(("auto", "golden", "torch", "transformers")),
    metavar="NAME|FILE|PATH@RUNTIME",
    default="auto",
    show_default=True,
    help="golden: stored answers, PyTorch is not needed. torch: the PyTorch module on new inputs. auto: both, if it "
    "is installed. transformers: the original model from --weights DIR. FILE.safetensors: answers stored elsewhere. "
    "PATH@RUNTIME: another artifact or ONNX file, such as other/artifact@ort.",
)
@click.option("--case", "cases", multiple=True, help="Check only this case, named as in the report. Repeatable.")
@click.option(
    "--trace", is_flag=True, help="Find the first value inside the graph that differs, even if no check fails."
)
@common_options
def command(
    artifact: Path,
    model: Path | None,
    weights: Path | None,
    runtime: str,
    implementation: str,
    precision_hint: str,
    reference: str,
    cases: tuple[str, ...],
    trace: bool,
    as_json: bool,
) -> None:
    """Check that a model computes what PyTorch computes: several shapes, padding, repetition, batch invariance.

    Exit status 1 if a check fails.
    """
    from effexport.cli import print_json
    from effexport.proof.references.choice import parse_choice
    from effexport.runners.artifact_runner import check_runtime
    from effexport.runners.runner import ModelOptions

    choice = parse_choice(reference)
    # cases have different shapes and up to two sessions are open, so memory is released after each run
    options = ModelOptions(implementation, memory_arena=False, precision_hint=precision_hint)
    check_runtime(runtime, options)
    from effexport.artifact import open_artifact
    from effexport.commands._checks import print_checks
    from effexport.environment import versions
    from effexport.proof.checks.result import passed, summary
    from effexport.proof.lost_parts import check_nothing_lost
    from effexport.report.model import dict_of_check
    from effexport.report.rendering.text import trace_text

    opened = open_artifact(artifact)
    if model is not None and not RUNTIMES[runtime].engine:
        check_nothing_lost(model, opened.spec)
    with stage_progress(stderr_console()) as on_stage:
        candidate = Candidate(opened, runtime, options, model)
        verification, found = verify_artifact(candidate, weights, choice, cases, trace, on_stage)
    checks = verification.checks
    ok = passed(checks)
    if as_json:
        print_json(
            {
                "artifact": str(artifact),
                "model": str(candidate.path),
                "reference": reference,
                "passed": ok,
                "runtime": runtime,
                "precision_hint": precision_hint or None,
                "implementation": verification.implementation,
                "environment": versions(),
                "summary": summary(checks),
                "checks": [dict_of_check(check) for check in checks],
                "trace": {"not_run": trace_text(found)}
                if isinstance(found, Unavailable)
                else found and found.to_dict(),
            }
        )
    console = result_console(as_json=as_json)
    print_checks(console, checks)
    if found is not None:
        say(console, trace_text(found))
    count = sum(check.status == "passed" for check in checks)
    verdict = f"{'equal' if ok else 'NOT proven equal'} to {choice.title}"
    if precision_hint:
        verdict += f" within the limits of {precision_hint}"
    ran = implementation_text(verification.implementation)
    say(console, f"{model or artifact}: {verdict}, {count} of {len(checks)} checks passed{ran}")
    if not ok:
        raise click.exceptions.Exit(1)


@dataclass(frozen=True)
class Candidate:
    """The model under test: the artifact's model, its engine, or another ONNX file instead of its model."""

    artifact: Artifact
    runtime: str
    options: ModelOptions
    model: Path | None

    @property
    def is_engine(self) -> bool:
        return RUNTIMES[self.runtime].engine

    @property
    def path(self) -> Path:
        """Raises UserError for an engine that the artifact does not have, or that is to be another ONNX file."""
        from effexport.errors import UserError

        if not self.is_engine:
            return self.model or self.artifact.model_path
        if self.model is not None:
            raise UserError(
                f"--model names an ONNX file, and --runtime {self.runtime} runs the engine of the artifact; give one"
            )
        return self.artifact.engine_path(self.runtime)

    def verify(self, cases: Sequence[Case]) -> Verification:
        from effexport.proof.verify import verify_in_runtime
        from effexport.proof.verify_engine import verify_engine
        from effexport.runners.artifact_runner import check_precision_of_model, model_opener

        check_precision_of_model(self.artifact.spec, self.options)
        spec, hashes = self.artifact.spec, self.artifact.manifest.hash_values
        if self.is_engine:
            return verify_engine(self.path, self.artifact.model_path, cases, spec, hashes)
        open_model = model_opener(self.runtime, self.options)
        return verify_in_runtime(self.path, cases, spec, hashes, open_model, self.options.precision_hint)

    def verify_bodies(self, cases: Sequence[Case], ran: Mapping[str, str]) -> Verification:
        """What the file computes without the kernel library."""
        from effexport.proof.verify import verify_bodies
        from effexport.runners.artifact_runner import model_opener
        from effexport.runners.runner import ModelOptions

        open_with_bodies = model_opener(self.runtime, ModelOptions("body", memory_arena=False))
        spec, hashes = self.artifact.spec, self.artifact.manifest.hash_values
        return verify_bodies(self.path, cases, spec, hashes, ran, open_with_bodies)

    def trace(self, weights: Path | None, case: Case) -> Trace | Unavailable:
        """The first values that differ from the module's on the inputs of one case."""
        from effexport.commands._options import settings_from_options
        from effexport.proof.trace.trace_from_model import trace_if_possible

        if self.runtime not in ORT_RUNTIMES:
            kind = f"a {self.runtime} engine" if self.is_engine else self.runtime
            return Unavailable(f"{kind} keeps no intermediate values; trace its model with --runtime ort")
        settings = settings_from_options(self.runtime, self.options.implementation)
        return trace_if_possible(self.path, self.artifact, weights, case, settings)


def verify_artifact(
    candidate: Candidate,
    weights: Path | None,
    choice: ReferenceChoice,
    names: Sequence[str],
    trace: bool,
    on_stage: Callable[[str], None],
) -> tuple[Verification, Trace | Unavailable | None]:
    """Checks against the chosen references; and a trace, if it is asked for or a check has failed."""
    from effexport.commands._options import settings_from_options
    from effexport.export.onnx_graph import custom_ops_of_model
    from effexport.proof.checks.result import Kind, not_run
    from effexport.proof.references.choice import references_from_choice
    from effexport.proof.verify import Verification, case_to_trace, verify_decoder

    artifact, spec = candidate.artifact, candidate.artifact.spec
    result, cases = Verification(), []
    for reference in references_from_choice(choice, artifact, weights, names, on_stage):
        if reference.cases:
            result += candidate.verify(reference.cases)
            cases += reference.cases
        result.checks += reference.checks
        if reference.kind == "golden" and candidate.path == artifact.model_path and spec.model.has_decode_step:
            if candidate.runtime in ORT_RUNTIMES:
                settings = settings_from_options(candidate.runtime, candidate.options.implementation)
                step, prefill = artifact.decode_step_path, artifact.prefill_path
                result += verify_decoder(step, prefill, reference.cases, spec, settings)
            else:
                reason = f"a decode step runs in ONNX Runtime only, not in {candidate.runtime}"
                result.checks.append(not_run(Kind.DECODE_STEP, reason))
    # an engine has no function bodies: TensorRT has compiled them
    if not names and not candidate.is_engine and custom_ops_of_model(candidate.path):
        on_stage("checking the function bodies of custom operators")
        result += candidate.verify_bodies(cases, result.implementation)
    case = case_to_trace(result.checks, cases, wanted=trace)
    if case is None:
        return result, None
    on_stage("tracing the values of the graph")
    return result, candidate.trace(weights, case)
