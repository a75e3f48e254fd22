"""spec → module → onnx → parity → artifact: the whole of `effexport build`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.artifact import (
    ARTIFACT_FOLDER,
    DECODE_STEP,
    MODEL,
    REFERENCE,
    REPORT_HTML,
    REPORT_JSON,
    Artifact,
    open_artifact,
    write_manifest,
)
from effexport.engines.api import import_api
from effexport.engines.builder_log import OnProgress
from effexport.engines.engine_from_onnx import engine_from_onnx
from effexport.engines.profile import profile_remarks
from effexport.engines.sidecar import engine_name, summary_of_engine
from effexport.engines.spec import EngineSpec
from effexport.environment import PACKAGES, examine, versions
from effexport.errors import StageError, Unavailable, UserError
from effexport.export.module_source import ModuleSource, source_from_seed, weights_digest
from effexport.proof.checks.result import Check, passed, summary
from effexport.proof.verify import (
    case_to_trace,
    verify_bodies,
    verify_candidate,
    verify_decode_step,
)
from effexport.proof.verify_engine import verify_engine_if_possible
from effexport.report import Report, html_from_report, json_from_report
from effexport.runners.ort.session import OrtSettings, import_onnxruntime
from effexport.spec import BuildSpec
from effexport.version import __version__

if TYPE_CHECKING:
    from torch import nn


@dataclass
class Stopwatch:
    """Seconds per stage, and a callback that hears when one begins."""

    on_stage: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.on_stage(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def artifact_from_spec(
    spec: BuildSpec,
    output: Path,
    *,
    source: ModuleSource | None = None,
    engines: Sequence[EngineSpec] = (),
    notes: Sequence[str] = (),
    settings: OrtSettings | None = None,
    trace: bool = False,
    force: bool = False,
    on_stage: Callable[[str], None] = lambda name: None,
    on_progress: OnProgress = lambda phase, share: None,
) -> tuple[Artifact, Report]:
    """Build, check and write an artifact; `output` appears only when everything has succeeded.

    source: where the module comes from; None draws its weights from the seed.
    engines: TensorRT engines to build as well; they are run only where there is a GPU, and the report says so.
    notes: sentences on the model that the report repeats.
    trace: also compare the intermediate values of the graph, for the errors of each layer in the report. A build that
    fails is traced in any case.
    settings: how ONNX Runtime runs the model for the parity check; nothing of it gets into the artifact.
    on_stage, on_progress: hear which stage begins, and how far the build of an engine is.
    Raises UserError when `output` cannot be written or TensorRT is not installed, and StageError when a stage or the
    parity check fails: then nothing is written, and the message carries the failed checks.
    """
    watch = Stopwatch(on_stage)
    settings = settings or OrtSettings()
    source = source or source_from_seed()
    with ARTIFACT_FOLDER.new(output, force=force) as folder:
        with watch.stage("loading PyTorch and the ONNX exporter"):
            import_onnxruntime()
            for engine in engines:
                import_api(engine.target)
            require_core()
            from effexport.export.onnx_from_module import onnx_from_module
            from effexport.proof.answers import REFERENCE_SEED_OFFSET, hash_modules, reference_from_module
            from effexport.proof.cases import load_reference, save_reference
            from effexport.proof.trace.trace_from_model import trace_if_it_runs
        with watch.stage(f"making the {spec.title} module"):
            module = source.make(spec)
            hashes = list(hash_modules(module))
        with watch.stage("exporting to ONNX"):
            onnx_from_module(module, spec, folder / MODEL)
        with watch.stage("running the PyTorch reference"):
            cases = reference_from_module(module, spec, spec.seed + REFERENCE_SEED_OFFSET)
            save_reference(cases, folder / REFERENCE)
        with watch.stage("checking parity in ONNX Runtime"):
            # as written and read back: what is checked is what users get
            cases = load_reference(folder / REFERENCE)
            verification = verify_candidate(folder / MODEL, cases, spec, hashes, settings)
        if "kernel" in verification.implementation.values():
            with watch.stage("checking the function bodies of custom operators"):
                # short and padded: bodies are slow, and kernels have shown what the long case can
                case = next(case for case in cases if case.name == "padded batch")
                verification += verify_bodies(folder / MODEL, case, spec, hashes, settings)
        if spec.has_decode_step:
            with watch.stage("exporting and checking the decode step"):
                from effexport.export.decode_step import onnx_from_decode_step

                onnx_from_decode_step(module, spec, folder / DECODE_STEP)
                verification += verify_decode_step(folder / DECODE_STEP, cases, spec, settings)
        infos = []
        for engine in engines:
            with watch.stage(f"building the {engine.target} engine"):
                path = folder / engine_name(engine.target)
                remarks = tuple(profile_remarks(engine.profiles, spec))
                info = engine_from_onnx(
                    folder / MODEL, engine, path, precision=spec.precision, remarks=remarks, on_progress=on_progress
                )
                infos.append(info)
            with watch.stage(f"checking parity of the {engine.target} engine"):
                verification += verify_engine_if_possible(path, folder / MODEL, cases, spec, hashes)
        layers, divergence = [], ""
        traced = case_to_trace(verification.checks, cases, wanted=trace)
        if traced is not None:
            with watch.stage("tracing the values of the graph"):
                found = trace_if_it_runs(folder / MODEL, folder / MODEL, module, spec, traced, settings)
                layers, divergence = ([] if isinstance(found, Unavailable) else found.layers()), str(found)
        report = Report(
            title=spec.title,
            spec=spec.to_dict(),
            checks=verification.checks,
            seconds=watch.seconds,
            environment=versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            runtime=settings.runtime,
            notes=list(notes),
            implementation=verification.implementation,
            engines=[summary_of_engine(info) for info in infos],
            weights_from=source.origin,
            layers=layers,
        )
        if report.verdict == "failed":
            raise StageError("parity", f"{failure_message(report.checks)}\n  {divergence}")
        (folder / REPORT_JSON).write_text(json_from_report(report), encoding="utf-8")
        (folder / REPORT_HTML).write_text(html_from_report(report), encoding="utf-8")
        write_manifest(folder, manifest_contents(spec, module, hashes, report, source.origin))
    return open_artifact(output), report


def require_core() -> None:
    """PyTorch and the exporter are dependencies, but a serving machine may leave them out."""
    for package in PACKAGES:
        problem = None if package.extra else examine(package)["problem"]
        if problem:
            raise UserError(f"{package.module}, needed for {package.purpose}: {problem}; add it with: {package.remedy}")


def failure_message(checks: list[Check]) -> str:
    failed = [check for check in checks if check.status == "failed"]
    lines = [
        f"  {check.name} ({check.case}): {check.metric} {check.value} > {check.limit} {check.detail}"
        for check in failed[:10]
    ]
    return "\n".join([f"{len(failed)} of {len(checks)} checks failed; nothing was written", *lines])


def manifest_contents(
    spec: BuildSpec, module: nn.Module, hashes: list[str], report: Report, origin: str
) -> dict[str, Any]:

    def plain(tensors: Any) -> list[dict[str, Any]]:
        return [{"name": t.name, "dtype": t.dtype, "dims": list(t.dims)} for t in tensors]

    return {
        "effexport_version": __version__,
        "variant": spec.variant,
        "spec": spec.to_dict(),
        "precision": spec.precision,
        "opset": spec.opset,
        "inputs": plain(spec.inputs),
        "outputs": plain(spec.outputs),
        "custom_ops": spec.custom_ops,
        "hash_values": hashes,
        "weights_sha256": weights_digest(module),
        "weights_from": origin,
        "notes": report.notes,
        "engines": report.engines,
        "parity": {"passed": passed(report.checks), "summary": summary(report.checks)},
        "environment": report.environment,
    }
