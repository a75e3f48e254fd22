"""Settings of ONNX Runtime, and the import of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effexport.errors import MissingExtraError, UserError
from effexport.models.validation import SpecError, check_field_types, did_you_mean
from effexport.runtimes import ORT_RUNTIMES, RUNTIMES

if TYPE_CHECKING:
    from effexport.tensorrt.sidecar import ShapeRange

PROVIDERS: dict[str, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "tensorrt-rtx": "NvTensorRTRTXExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}
# For custom operators: the faster of our kernels, if they are built, and the function bodies; our kernels or an error;
# the function bodies of the model.
IMPLEMENTATIONS = ("auto", "kernel", "body")
# Stands for all operators that are not named.
OTHERS = ""
# ONNX Runtime starts all threads when it loads a model: more than this is a slip, unless the machine has as many cores.
MOST_THREADS = 1024
# ONNX Runtime keeps the number of a device in 16 bits, and reads no larger one.
LAST_DEVICE = 2**15 - 1


@dataclass(frozen=True)
class OrtSettings:
    """How ONNX Runtime runs a model.

    provider: "cpu", "cuda", "tensorrt", which leaves to CUDA what TensorRT does not support, or "tensorrt-rtx" or
    "openvino", which leave the rest to the CPU provider.
    implementation: of custom operators: "kernel" needs the kernel library, "body" ignores it, and "auto" uses kernels
    if the library is built, but on a GPU not those that should be slower than bodies (Op.cuda_up_to).
    "MaskedAttention=kernel,IterativePinv=body" chooses for single operators, and "auto" holds for the others.
    TensorRT sees bodies as part of the graph; kernels cut the graph into parts. TensorRT-RTX always runs bodies.
    device_id: which GPU runs the model, in CUDA's order.
    threads: size of the thread pool inside operators; None lets ONNX Runtime decide.
    cuda_graph: capture the runs of what `bind` returns as a CUDA graph, and replay it. All runs of one runner then wait
    for each other, as ONNX Runtime requires.
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
    device_id: int = 0

    def implementation_of(self, op: str) -> str:
        """What is wanted for a custom operator: "auto", "kernel" or "body"."""
        chosen = implementation_per_op(self.implementation)
        return chosen.get(op, chosen[OTHERS])

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
        known = tuple(PROVIDERS)
        if self.provider not in known:
            similar = did_you_mean(self.provider, known)
            raise UserError(f"unknown provider {self.provider!r}{similar} Expected: {', '.join(known)}")
        implementations = implementation_per_op(self.implementation)
        if not 0 <= self.device_id <= LAST_DEVICE:
            limit = f", at most {LAST_DEVICE}" * (self.device_id > 0)
            raise UserError(f"device_id is {self.device_id}; expected 0 for the first GPU, 1 for the second, …{limit}")
        most = max(MOST_THREADS, os.cpu_count() or 1)
        if self.threads is not None and not 1 <= self.threads <= most:
            limit = "at least 1" if self.threads < 1 else f"at most {most}"
            raise UserError(f"threads is {self.threads}; expected {limit}")
        if self.provider == "tensorrt-rtx" and "kernel" in implementations.values():
            raise UserError(
                f"implementation is {self.implementation!r}; TensorRT-RTX has no plugins, and its onnxruntime runs our "
                "kernels on the CPU only: leave it out, or use the provider 'cuda'"
            )
        # a CUDA graph must hold the whole model, and the parts that TensorRT takes are not known in advance
        tensorrt = ("tensorrt", "tensorrt-rtx")
        for name, useful in (
            ("cuda_graph", ("cuda",)),
            ("tf32", ("cuda", *tensorrt)),
            ("device_id", ("cuda", "tensorrt")),
            ("profile", tensorrt),
        ):
            if getattr(self, name) and self.provider not in useful:
                needed = " or ".join(map(repr, useful))
                raise UserError(f"{name} needs the provider {needed}; the provider is {self.provider!r}")


def implementation_per_op(text: str, option: str = "implementation") -> dict[str, str]:
    """Operator → "auto", "kernel" or "body", from one of these words for all operators, or from a list such as
    MaskedAttention=body,LSHSort=kernel. OTHERS has that of operators that are not named.

    option: what to call the text in errors. Raises UserError for an unknown word; `check_operators` looks at the names.
    """

    def check(word: str, known: Collection[str]) -> str:
        if word not in known:
            raise UserError(f"unknown {option} {word!r}{did_you_mean(word, known)} Expected: {', '.join(known)}")
        return word

    if "=" not in text:
        check(text, (*IMPLEMENTATIONS, "OPERATOR=kernel,…"))
        return {OTHERS: text}
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if not all(op for op, _, _ in pairs):
        raise UserError(f"{option} {text!r} lacks an operator beside a comma or '='; expected OPERATOR=kernel,…")
    chosen = {op: check(how, IMPLEMENTATIONS) for op, _, how in pairs}
    if len(chosen) < len(pairs):
        raise UserError(f"{option} {text!r} names an operator twice; expected each at most once")
    return {OTHERS: "auto"} | chosen


def import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        if RUNTIMES["ort"].package.version is not None:
            raise  # it is damaged, which the command line explains
        raise MissingExtraError("onnxruntime", RUNTIMES["ort"].package.extra) from error
    return onnxruntime
