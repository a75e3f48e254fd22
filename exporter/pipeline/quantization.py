"""The part of a build that quantises: its samples, its decisions, and their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from effexport.artifact import Artifact, artifact_in_progress
from effexport.base.errors import UserError
from effexport.base.files import file_digest
from effexport.base.machine import Processor
from effexport.base.spec import BuildSpec
from effexport.proof.check import RMS_METRIC, CaseLabel, Check, Kind, Limit, judged
from effexport.proof.inputs import random_inputs
from effexport.proof.quantized import check_products
from effexport.quantize.record import Quantization, Samples
from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import Runner, limits_from_spec
from effexport.tasks.texts import samples_from_file
from effexport.tensorrt.spec import EngineSpec

if TYPE_CHECKING:
    from torch import nn

    from effexport.base.dtypes import Array
    from effexport.tasks.evaluate import TaskData

# Drawn where no file is given; they only show where a loss arises.
DRAWN_SAMPLES = 2
DRAWN_SEED_OFFSET = 104_729
DRAWN_NOTE = (
    "no --calibration was given: the loss of quantisation was measured on {count} samples of random input, which says "
    "little about real data"
)
SLOW_INT8_NOTE = (
    "the processor of this machine has no int8 dot products (AVX512-VNNI, AVX-VNNI or AMX): the file is right here, "
    "but gains less, and hardly anything over float32 without the kernels"
)
NEEDS_SAMPLES = (
    "--calibration is missing: {precision} with static scales needs at least 64 samples of what the model will read; "
    "give a text, FILE.jsonl with a text in each line, or FILE.npz with the model's inputs{dynamic}"
)
Feeds = Mapping[str, "Array"]


@dataclass(frozen=True)
class QuantizationData:
    """The files of a quantised build.

    calibration: samples of the data that the model will read.
    task: labelled data.
    """

    calibration: Path | None = None
    task: TaskData | None = None

    def check(self, spec: BuildSpec, engines: Sequence[EngineSpec]) -> None:
        """Refuse, before any work, what cannot be quantised as asked. Raises UserError."""
        targets = [engine.target for engine in engines]
        capabilities = [number for engine in engines for number in engine.compute_capabilities]
        if not spec.is_quantized:
            given = ["--calibration"] * (self.calibration is not None) + ["--evaluate"] * (self.task is not None)
            if given:
                raise UserError(
                    f"{' and '.join(given)} applies to --precision int8, fp8 and linear layers in bf16 only; this is "
                    f"{spec.precision}{' of the whole graph' * (spec.precision == 'bf16')}"
                )
            return
        if targets and spec.bf16 == "linear":
            raise UserError(
                f'--target {targets[0]} has bfloat16 in the whole graph; leave bf16 = "linear" out, which is for CPUs'
            )
        if spec.scales == "static" and self.calibration is None:
            dynamic = ", or use --quantization dynamic" if spec.precision == "int8" and not targets else ""
            raise UserError(NEEDS_SAMPLES.format(precision=spec.precision, dynamic=dynamic))
        if targets and spec.scales == "dynamic":
            raise UserError(
                f"--target {targets[0]} reads static scales only; use --quantization static with --calibration FILE"
            )
        if spec.precision == "fp8" and (older := [number for number in capabilities if number < 89]):
            raise UserError(
                f"fp8 needs a GPU of compute capability 8.9 or newer, and compute_capabilities has {older[0]}; use "
                "--precision int8"
            )
        if self.calibration is not None and not self.calibration.is_file():
            raise UserError(
                f"--calibration names {self.calibration}, which is no file; expected a text, .jsonl or .npz"
            )


NO_DATA = QuantizationData()


@dataclass(frozen=True)
class QuantizedModel:
    """A module whose quantisation is decided.

    original: float32; losses are measured against it.
    module: with smoothing folded in; this one is exported.
    """

    original: nn.Module
    module: nn.Module
    record: Quantization
    samples: Sequence[Feeds]


def quantization_of_build(module: nn.Module, spec: BuildSpec, folder: Path, data: QuantizationData) -> QuantizedModel:
    """Decide what is quantised in a module, and by which scales. folder: of the build, with the tokenizer.

    Raises UserError for files that do not fit the model, and as `quantize.prepare.prepared` does.
    """
    from effexport.proof.module_runs import run_module
    from effexport.proof.quantized import run_with_buckets
    from effexport.quantize.calibration import TaskLoss, prepared

    artifact = artifact_in_progress(folder, spec)
    samples, origin = samples_of_build(artifact, data.calibration)
    task_loss: TaskLoss | None = None
    if (task := data.task) is not None:
        task.read(artifact)

        def task_loss(quantized: nn.Module) -> float:
            return task.loss(lambda feeds: run_module(module, spec, feeds), lambda f: run_module(quantized, spec, f))

    smooth, record = prepared(
        module, spec, samples, origin, lambda m, feeds: run_with_buckets(m, spec, feeds), task_loss
    )
    return QuantizedModel(module, smooth, record, samples)


def samples_of_build(artifact: Artifact, calibration: Path | None) -> tuple[list[Feeds], Samples]:
    """The samples of a file; or, without one, a few that are drawn."""
    if calibration is not None:
        samples = samples_from_file(calibration, artifact)
        return samples, Samples(source=calibration.name, sha256=file_digest(calibration), samples=len(samples))
    spec = artifact.spec
    rng = np.random.default_rng(spec.seed + DRAWN_SEED_OFFSET)
    batch = spec.batch if spec.model.is_traced_as_found else 1  # which may take no other batch
    drawn: list[Feeds] = [random_inputs(spec, rng, batch, spec.model.seq_len, None) for _ in range(DRAWN_SAMPLES)]
    return drawn, Samples(source="", sha256="", samples=len(drawn))


def check_loss_on_samples(model: QuantizedModel, runner: Runner, spec: BuildSpec, *, judge: bool) -> Check:
    """A check of the distance of the file from the float module on samples.

    judge: against `max_loss`, if there is one.
    """
    from effexport.proof.quantized import run_with_buckets
    from effexport.quantize.calibration import LOSS_SAMPLES, Answer, loss_of

    few = model.samples[:LOSS_SAMPLES]
    exact: list[Answer] = [(run_with_buckets(model.original, spec, feeds)[0], {}) for feeds in few]
    value = loss_of(exact, [(runner.run(feeds), {}) for feeds in few]).rms_error
    source = model.record.samples.source or "random samples"
    case = CaseLabel(source, (len(few), spec.model.seq_len))
    reason = "--max-loss: the RMS error against the float model that the build may cause"
    limit = None if spec.max_loss is None or not judge else Limit(spec.max_loss, reason)
    return judged_if_limited(Kind.QUANTIZATION_LOSS, case, RMS_METRIC, value, limit)


def check_task(model: QuantizedModel, runner: Runner, task: TaskData, spec: BuildSpec) -> tuple[Quantization, Check]:
    """The cost of quantisation at the task: the record with its figures, and a check of the relative increase of its
    loss against `max_loss`."""
    from effexport.proof.module_runs import run_module

    figures = tuple(task.compared(lambda feeds: run_module(model.original, spec, feeds), runner.run))
    record = msgspec.structs.replace(model.record, task=figures, task_data=task.path.name)
    kind, metric = Kind.TASK_LOSS, "relative increase of the loss"
    case = CaseLabel(task.path.name, task.shape)
    value = next(figure.relative_loss for figure in figures if figure.name == "loss")
    detail = "; ".join(f"{f.name} {f.quantized_value:.5g}, float {f.float_value:.5g}" for f in figures)
    reason = "--max-loss: the share of the task's loss that the build may add"
    limit = None if spec.max_loss is None else Limit(spec.max_loss, reason)
    return record, judged_if_limited(kind, case, metric, value, limit, detail)


def judged_if_limited(
    kind: str, case: CaseLabel, metric: str, value: float, limit: Limit | None, detail: str = ""
) -> Check:
    """A check of a loss, which only fails against --max-loss."""
    if limit is not None:
        return judged(kind, case, metric, value, limit, detail)
    reason = "reported, and judged only against --max-loss"
    return Check(kind, case, metric, "passed", value, None, reason, detail, seq_len=case.shape[-1])


def quantization_notes(record: Quantization | None) -> list[str]:
    """Caveats about a quantised build: its calibration samples, and slow int8 on this processor."""
    if record is None:
        return []
    notes = [] if record.samples.source else [DRAWN_NOTE.format(count=record.samples.samples)]
    if record.precision == "int8" and not Processor.here().has_int8_products:
        notes.append(SLOW_INT8_NOTE)
    return notes


def cost_of_quantization(
    model: Path, settings: RunOptions, spec: BuildSpec, quantized: QuantizedModel, data: QuantizationData
) -> tuple[Quantization, list[Check]]:
    """Checks of the loss against the float model, on the samples and at the task, and the record with its figures."""
    record = quantized.record
    checks = [check_products(model, record)]
    with OrtRunner(model, settings, limits=limits_from_spec(spec)) as runner:
        checks.append(check_loss_on_samples(quantized, runner, spec, judge=data.task is None))
        if data.task is not None:
            record, check = check_task(quantized, runner, data.task, spec)
            checks.append(check)
    return record, checks
