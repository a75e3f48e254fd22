"""bfloat16 graphs compute the right numbers. ONNX Runtime's CPU provider has no bfloat16 kernels, so they run in the
reference evaluator of onnx, which is slow: short sequences only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_cases import slow_after

from effexport.base.errors import RuntimeUnsupportedError
from effexport.base.spec import build_spec_from_options
from effexport.pipeline.build import artifact_from_spec
from effexport.proof.cases import load_reference
from effexport.proof.checks.arithmetic import check_arithmetic, check_signature
from effexport.proof.tolerances import arithmetic_limit
from effexport.proof.verify import not_run_in_bfloat16

pytestmark = pytest.mark.requires("torch", "onnx", "ort")


def evaluator(path: Path) -> Any:
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class GatherElements(OpRun):
        """onnx 1.23's own cannot gather along the last axis of more than one row."""

        op_domain = ""

        def _run(self, data: Any, indices: Any, axis: int = 0) -> tuple[Any]:
            return (np.take_along_axis(data, indices, axis),)

    return ReferenceEvaluator(str(path), new_ops=[GatherElements])


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        *slow_after(0, ["nystrom", "lsh", "aft-local"]),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("softmax", "aft-full", "aft-simple", "aft-conv")),
    ],
)
def test_a_bfloat16_encoder_agrees_with_float32_pytorch(name: str, tmp_path: Path) -> None:
    # one chunk covers seven tokens: a bucket that flips in bfloat16 changes nothing
    options = {"variant": name, "dim": 32, "heads": 2, "layers": 1, "seq_len": 64, "precision": "bf16"}
    spec = build_spec_from_options(options, None)
    artifact, report = artifact_from_spec(spec, tmp_path / "artifact")
    assert report.verdict == "not run", "ONNX Runtime has learned bfloat16: check it there"
    session = evaluator(artifact.model_path)
    short = [case for case in load_reference(artifact.reference_path) if case.keep.size <= 16]
    assert len(short) >= 2
    for case in short:
        names = [tensor.name for tensor in spec.outputs]
        outputs = dict(zip(names, session.run(names, dict(case.inputs)), strict=True))
        assert check_signature(case, outputs, spec).status == "passed"
        check = check_arithmetic(case, outputs, arithmetic_limit(spec))
        assert check.status == "passed", check


def test_a_bfloat16_model_refused_for_any_other_reason_is_an_error() -> None:
    spec = build_spec_from_options({"variant": "linear", "precision": "bf16"}, None)
    with pytest.raises(RuntimeUnsupportedError, match="INVALID_GRAPH"):
        not_run_in_bfloat16("parity", spec, RuntimeUnsupportedError("[ONNXRuntimeError] : 10 : INVALID_GRAPH : broken"))
