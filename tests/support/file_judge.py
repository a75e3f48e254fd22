"""Verdicts of `prove` on damaged copies of an ONNX file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import nn

import effexport
from effexport.base.errors import EffexportError
from effexport.export.onnx_graph import graph_inputs, graph_outline, graph_tensors
from effexport.proof.candidate import ModelCandidate
from effexport.proof.check import Check
from effexport.proof.prove import ProofRequest, precision_of_file
from effexport.proof.tolerances import ARITHMETIC
from effexport.proof.verify import run_checks
from effexport.proof.verify_artifact import references_from_choice
from effexport.runners.artifact_runner import model_opener
from effexport.runners.options import RunOptions
from effexport.runners.runner import limits_from_spec

# The largest change of an answer that may pass: that of a file in float32.
LIMIT = ARITHMETIC["fp32", "checkpoint"].value
OPTIONS = RunOptions(threads=1, memory_arena=False)


class Judge:
    """Verdicts of `prove` on damaged copies of a file, for which the module answers once.

    path: the right file. module, example: as for `effexport.prove`.
    """

    def __init__(self, path: Path, module: nn.Module, example: object) -> None:
        self.path, self.module, self.example = path, module, example
        asked = ProofRequest(path, module, example, None, False, OPTIONS, lambda stage: None)
        candidate, request = asked.subject()
        self.spec, self.contract = candidate.artifact.spec, contract_of(path)
        references = references_from_choice(request.choice, candidate.artifact, request.source, (), asked.on_stage)
        self.cases = [case for reference in references for case in reference.cases]

    def failure(self, file: Path) -> str:
        """The first check that fails, or why the file does not run; "" if `prove` calls it equal."""
        try:
            if contract_of(file) != self.contract:  # which decides sizes and limits
                checks: Iterable[Check] = effexport.prove(file, self.module, self.example).checks
            else:
                checks = run_checks(self.opened(file), self.cases, self.spec)
            return next((str(check.kind) for check in checks if check.status == "failed"), "")
        except EffexportError as error:
            return f"{type(error).__name__}: {error}"

    def opened(self, file: Path) -> ModelCandidate:
        return ModelCandidate(file, (), limits_from_spec(self.spec), model_opener(OPTIONS))

    def effect(self, file: Path) -> float:
        """The largest change of an answer of the file in any case, relative to the RMS of the answer. Infinite if a
        number of either is not finite."""
        right, wrong, largest = self.opened(self.path), self.opened(file), 0.0
        for case in self.cases:
            for a, b in zip(right.run(case.inputs).values(), wrong.run(case.inputs).values(), strict=True):
                if not (np.isfinite(a).all() and np.isfinite(b).all()):
                    return math.inf
                away = np.abs(a.astype(np.float64) - b).max(initial=0.0)
                largest = max(largest, float(away / (np.sqrt(np.mean(np.square(a, dtype=np.float64))) or 1.0)))
        return largest


def contract_of(path: Path) -> tuple[object, ...]:
    """The parts of a file that `prove` reads before it runs it."""
    outline = graph_outline(path)
    return graph_inputs(outline), graph_tensors(outline.graph.output), precision_of_file(outline)
