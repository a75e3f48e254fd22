"""The runtimes that a benchmark can compare, by the names of the command line. Loads no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Runtime:
    """What runs a model.

    device: where. graph: which ONNX file it reads: "ours" with our operators, "naive" with none of them, or "" for
    PyTorch itself. implementation: of our operators in ONNX Runtime, see OrtSettings.
    """

    name: str
    device: Literal["cpu", "cuda"]
    graph: Literal["ours", "naive", ""]
    summary: str
    implementation: str = "auto"


RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        Runtime("torch", "cpu", "", "eager PyTorch"),
        Runtime("compile", "cpu", "", "torch.compile"),
        Runtime("naive", "cpu", "naive", "torch.onnx.export without our operators, in ONNX Runtime"),
        Runtime("ort-body", "cpu", "ours", "ONNX Runtime, our operators as function bodies", "body"),
        Runtime("ort", "cpu", "ours", "ONNX Runtime, our kernels where the library is built"),
        Runtime("torch-cuda", "cuda", "", "eager PyTorch on the GPU"),
        Runtime("ort-cuda", "cuda", "ours", "ONNX Runtime on the GPU"),
        Runtime("trt", "cuda", "ours", "TensorRT"),
        Runtime("trt-rtx", "cuda", "ours", "TensorRT-RTX"),
    )
}
# The eager PyTorch of each device: what times_torch compares with.
TORCH_OF_DEVICE: dict[str, str] = {"cpu": "torch", "cuda": "torch-cuda"}
