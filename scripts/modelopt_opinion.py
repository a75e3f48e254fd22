"""A second opinion on static int8: NVIDIA ModelOpt quantises the same float32 models from the same samples.

    scripts/soak.sh                                   # makes .venv-modelopt and runs this
    .venv/bin/python scripts/modelopt_opinion.py .venv-modelopt/bin/python

For each variant, `effexport verify --model` judges ModelOpt's file by the reference of our static build, and the losses
of both against the float model are printed. Exit status 1 if a file fails, or if ours loses half as much again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import effexport
from effexport.proof.check import Kind
from effexport.report.report import Report

ROOT = Path(__file__).resolve().parents[1]
# A hash that ModelOpt quantises is another model, so lsh has no second opinion.
VARIANTS = ("linear", "nystrom", "softmax", "aft-simple", "aft-conv")
SEQ_LEN, SAMPLES = 256, 64
# How much more ours may lose: both round independently, on cases of some hundred tokens.
TOLERATED = 1.5
QUANTIZE = """
import sys, numpy as np
from modelopt.onnx.quantization import quantize
source, target, samples = sys.argv[1:]
quantize(
    onnx_path=source, quantize_mode="int8", calibration_data=dict(np.load(samples)), calibration_method="max",
    op_types_to_quantize=["MatMul"], calibration_eps=["cpu"], output_path=target, high_precision_dtype="fp32",
    # products of two activations, as those with the pseudo-inverse, which ours declare to stay float
    nodes_to_exclude=["node_matmul.*"],
)
"""


def main() -> int:
    (interpreter,) = sys.argv[1:]
    worst = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        samples = folder / "samples.npz"
        text = np.frombuffer((ROOT / "CHANGELOG.md").read_bytes()[: SAMPLES * SEQ_LEN], np.uint8)
        ids = text.reshape(SAMPLES, SEQ_LEN).astype(np.int64) + 2
        np.savez(samples, input_ids=ids, attention_mask=np.ones_like(ids))
        for variant in VARIANTS:
            options = {"variant": variant, "seq_len": SEQ_LEN}
            plain = effexport.build(output=folder / f"{variant}-fp32", **options).artifact
            ours = effexport.build(
                output=folder / f"{variant}-int8",
                precision="int8",
                quantization="static",
                calibration=samples,
                **options,
            )
            theirs = folder / f"{variant}.onnx"
            command = [interpreter, "-c", QUANTIZE, plain.model_path, theirs, samples]
            subprocess.run(list(map(str, command)), check=True, capture_output=True)
            report = effexport.verify(ours.path, model=theirs, reference="golden")
            own, other = loss(ours.report), loss(report)
            print(f"{variant}: {report.verdict}; RMS error against float: ours {own:.2%}, ModelOpt's {other:.2%}")
            worst |= report.verdict != "passed" or own > TOLERATED * other
    return int(worst)


def loss(report: Report) -> float:
    """The RMS error against the float model in the case of the export."""
    values = (c.value for c in report.checks if c.kind == Kind.QUANTIZATION_LOSS and c.case.name == "export")
    return next(value for value in values if value is not None)


if __name__ == "__main__":
    sys.exit(main())
