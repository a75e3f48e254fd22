"""Judges trained weights in every runtime and precision, each beside PyTorch on the same held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import effexport
from effexport.artifact import Artifact, open_artifact
from effexport.base.spec import BuildSpec, Precision
from effexport.models.encoder.spec import LOGITS
from effexport.proof.rebuilt_module import source_of_weights
from effexport.runners.artifact_runner import model_opener
from effexport.runners.options import RunOptions
from effexport.runners.runner import limits_from_spec
from effexport.tasks.data import LabelledRows, Windows, rows_of_data
from effexport.tasks.evaluate import TORCH, EvaluatedModel, Run, scores_of
from effexport.tasks.figures import Estimate, Scores, changes, differences, estimates_of

# Runs of an artifact: their titles, runtime and implementation.
RUNS: dict[Precision, tuple[tuple[str, str, str], ...]] = {
    "fp32": (("kernels", "ort", "kernel"), ("function bodies", "ort", "body"), ("OpenVINO", "openvino", "auto")),
    "fp16": (("kernels", "ort", "kernel"), ("function bodies", "ort", "body")),
}
Judged = dict[str, Any]


def judged(
    spec: BuildSpec, weights: Path, data: Path, folder: Path, on_stage: Callable[[str], None], *, everywhere: bool
) -> Judged:
    """The figures of PyTorch, and those of each run beside them. everywhere: otherwise with kernels only.

    spec: in float32. data: inputs and labels, .npz. folder: where artifacts are kept. A run that is not possible has
    the reason under `not_run`.
    """
    found: Judged = {"runs": []}
    for precision, runs in RUNS.items():
        artifact = built(replace(spec, precision=precision), weights, folder / precision)
        on_stage(f"{precision}, verify")
        report = effexport.verify(artifact.path, weights=weights, data=data)
        failed = [f"{check.name}: {check.detail}" for check in report.checks if check.status == "failed"]
        found[f"verify_{precision}"] = {"verdict": report.verdict, "checks": len(report.checks), "failed": failed}
        rows = rows_of_data(data, artifact, Windows())
        if precision == "fp32":
            with EvaluatedModel(
                artifact, RunOptions(runtime=TORCH), source_of_weights(artifact, weights)
            ).opened() as run:
                expected = scores_of(run, rows)
            found |= {"rows": len(expected.asked), "answers": int(expected.asked.sum())}
            found["PyTorch"] = intervals(estimates_of(expected, language=False))
        openers: list[tuple[str, Callable[[], AbstractContextManager[Run]]]] = [
            (title, EvaluatedModel(artifact, RunOptions(runtime=runtime, implementation=implementation)).opened)
            for title, runtime, implementation in (runs if everywhere else runs[:1])
        ]
        if everywhere and precision == "fp32":
            openers.append(("int8", partial(quantised, artifact)))
            if spec.model.has_decode_step:
                openers.append(("decode step", partial(decoded, artifact)))
        for title, opened in openers:
            on_stage(f"{precision}, {title}")
            found["runs"].append({"precision": precision, "run": title, **compared(opened, rows, expected)})
    return found


def built(spec: BuildSpec, weights: Path, folder: Path) -> Artifact:
    """The artifact in a folder, built unless it is there."""
    if not folder.exists():
        effexport.build(spec, folder, weights=weights)
    return open_artifact(folder)


def compared(opened: Callable[[], AbstractContextManager[Run]], rows: list[LabelledRows], expected: Scores) -> Judged:
    """Figures of a run, its differences from PyTorch row by row, and how many answers are others."""
    try:
        with opened() as run:
            scores = scores_of(run, rows)
    except effexport.UserError as error:
        return {"not_run": str(error)}
    # a row counts as right only if all of its answers are
    changed_rows = ((scores.right == scores.asked) != (expected.right == expected.asked)).sum()
    return {
        **intervals(estimates_of(scores, language=False)),
        "differences": intervals(differences(scores, expected, language=False)),
        "changed_answers": changes(scores, expected).count,
        "changed_rows": int(changed_rows),
    }


def intervals(estimates: Sequence[Estimate]) -> dict[str, list[float | None]]:
    """Value, and low and high end of the interval, by name."""
    return {estimate.name: [estimate.value, estimate.low, estimate.high] for estimate in estimates}


@contextmanager
def quantised(artifact: Artifact) -> Iterator[Run]:
    """The model with weights and activations in int8 in all products with a constant matrix, quantised by ONNX Runtime
    as it runs, per channel."""
    from onnxruntime.quantization import quantize_dynamic

    target = artifact.path.parent / "int8.onnx"
    options = {"MatMulConstBOnly": True}
    quantize_dynamic(
        artifact.model_path, target, op_types_to_quantize=["MatMul"], per_channel=True, extra_options=options
    )
    limits = limits_from_spec(artifact.spec)
    with model_opener(RunOptions(implementation="kernel"))(target, limits, None) as runner:
        yield runner.run


@contextmanager
def decoded(artifact: Artifact) -> Iterator[Run]:
    """The decode step, fed one token after the other."""
    with effexport.load_decoder(artifact.path) as decoder:

        def run(feeds: Mapping[str, Any]) -> dict[str, Any]:
            ids = feeds["input_ids"]
            decoder.reset()
            steps = [decoder.step({"input_ids": ids[:, place : place + 1]})[LOGITS] for place in range(ids.shape[1])]
            return {LOGITS: np.concatenate(steps, axis=1)}

        yield run
