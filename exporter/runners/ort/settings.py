"""Settings of ONNX Runtime, and the import of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effexport.errors import MissingExtraError, UserError
from effexport.models.validation import SpecError, check_field_types, did_you_mean
from effexport.runtimes import ORT_RUNTIMES, RUNTIMES

if TYPE_CHECKING:
    from effexport.engines.sidecar import ShapeRange

PROVIDERS: dict[str, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "tensorrt-rtx": "NvTensorRTRTXExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}
# For custom operators: our kernels if they are built, our kernels or an error, the function bodies of the model.
IMPLEMENTATIONS = ("auto", "kernel", "body")
# ONNX Runtime starts all threads when it loads a model: more than this is a slip, unless the machine has as many cores.
MOST_THREADS = 1024


@dataclass(frozen=True)
class OrtSettings:
    """How ONNX Runtime runs a model.

    provider: "cpu", "cuda", "tensorrt", which leaves to CUDA what TensorRT does not support, or "tensorrt-rtx" or
    "openvino", which leave the rest to the CPU provider.
    implementation: of custom operators: "kernel" needs the kernel library, "body" ignores it, and "auto" uses kernels
    if the library is built. TensorRT sees bodies as part of the graph; kernels cut the graph into parts. TensorRT-RTX
    always runs bodies.
    threads: size of the thread pool inside operators; None lets ONNX Runtime decide.
    cuda_graph: capture the runs of what `bind` returns as a CUDA graph, and replay it.
    memory_arena: keep freed CPU memory for later runs. Faster, but a model then keeps its peak memory.
    tf32: let the GPU round the inputs of float32 products to 11 bits. Faster, but outside the limits of fp32 parity.
    TensorRT and TensorRT-RTX do so unless NVIDIA_TF32_OVERRIDE=0 is in the environment.
    profile: for "tensorrt" and "tensorrt-rtx", the smallest, optimal and largest shape of every input: one engine is
    built when the model is loaded. Without a profile, TensorRT's engines are built when inputs first arrive, and again
    for shapes outside the earlier ones; TensorRT-RTX builds one for all shapes. A profile excludes kernels, because it
    has no shapes for the inputs of parts of a graph.
    """

    provider: str = "cpu"
    implementation: str = "auto"
    threads: int | None = None
    cuda_graph: bool = False
    memory_arena: bool = True
    tf32: bool = False
    profile: Mapping[str, ShapeRange] | None = None

    @property
    def runtime(self) -> str:
        """The name in --runtime."""
        return next(name for name, runtime in ORT_RUNTIMES.items() if runtime.provider == self.provider)

    @property
    def device(self) -> str:
        """The place of tensors and kernels: "cpu" or "cuda"."""
        return "cuda" if self.provider in ("cuda", "tensorrt") else "cpu"

    def __post_init__(self) -> None:
        try:
            check_field_types(self)
        except SpecError as error:
            raise UserError(str(error)) from error
        for name, known in (("provider", tuple(PROVIDERS)), ("implementation", IMPLEMENTATIONS)):
            value = getattr(self, name)
            if value not in known:
                raise UserError(f"unknown {name} {value!r}{did_you_mean(value, known)} Expected: {', '.join(known)}")
        most = max(MOST_THREADS, os.cpu_count() or 1)
        if self.threads is not None and not 1 <= self.threads <= most:
            limit = "at least 1" if self.threads < 1 else f"at most {most}"
            raise UserError(f"threads is {self.threads}; expected {limit}")
        if (self.provider, self.implementation) == ("tensorrt-rtx", "kernel"):
            raise UserError(
                "implementation is 'kernel'; TensorRT-RTX has no plugins, and its onnxruntime runs our kernels on the "
                "CPU only: leave it out, or use the provider 'cuda'"
            )
        # a CUDA graph must hold the whole model, and the parts that TensorRT takes are not known in advance
        tensorrt = ("tensorrt", "tensorrt-rtx")
        for name, useful in (("cuda_graph", ("cuda",)), ("tf32", ("cuda", *tensorrt)), ("profile", tensorrt)):
            if getattr(self, name) and self.provider not in useful:
                needed = " or ".join(map(repr, useful))
                raise UserError(f"{name} needs the provider {needed}; the provider is {self.provider!r}")


def import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        if RUNTIMES["ort"].package.version is not None:
            raise  # it is damaged, which the command line explains
        raise MissingExtraError("onnxruntime", RUNTIMES["ort"].package.extra) from error
    return onnxruntime
