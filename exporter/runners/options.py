"""Options of a run: one record for every runtime."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from effexport.base.errors import UserError
from effexport.base.runtimes import ARTIFACT_RUNTIMES, DEFAULT_RUNTIME, RUNTIMES, TENSORRT_RTX, Runtime
from effexport.models.validation import SpecError, check_field_types, did_you_mean

if TYPE_CHECKING:
    from effexport.tensorrt.sidecar import ShapeRange

# For custom operators: the faster of our kernels, if they are built, and the function bodies; our kernels or an error;
# the function bodies of the model.
IMPLEMENTATIONS = ("auto", "kernel", "body")
# Stands for all operators that are not named.
OTHERS = ""
# ONNX Runtime starts all threads when it loads a model: more than this is a slip, unless the machine has as many cores.
MOST_THREADS = 1024
# ONNX Runtime keeps the number of a device in 16 bits, and reads no larger one.
LAST_DEVICE = 2**15 - 1


def option(default: Any, section: str, help: str) -> Any:
    """A field of RunOptions. section: what it is about: "model", "CPU", "GPU" or "TensorRT"."""
    return field(default=default, metadata={"section": section, "help": help})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run. Each field has its help as metadata; `Runtime.takes` names the fields that a runtime follows.

    profile: the smallest, optimal and largest shape of every input.
    Raises UserError for a value out of range, and for a field that the runtime does not follow.
    """

    runtime: str = option(DEFAULT_RUNTIME, "model", "Where the model runs.")
    implementation: str = option(
        "auto",
        "model",
        "How custom operators run in ONNX Runtime: kernel needs the kernel library, body ignores it, and auto uses "
        "kernels if the library is built, but on a GPU not those that should be slower than bodies. "
        "MaskedAttention=kernel,IterativePinv=body chooses for single operators. TensorRT sees bodies as part of the "
        "graph; kernels cut the graph into parts. TensorRT-RTX always runs bodies.",
    )
    precision_hint: str = option("", "model", "Compute in this precision, whatever the model's.")
    threads: int | None = option(None, "CPU", "Threads inside operators; by default, the runtime decides.")
    memory_arena: bool = option(
        True, "CPU", "Keep freed memory for later runs. Faster, but a model then keeps its peak memory."
    )
    device: int = option(0, "GPU", "Which GPU runs the model, in CUDA's order.")
    tf32: bool = option(
        False,
        "GPU",
        "Let the GPU round the inputs of float32 products to 11 bits. Faster, but outside the limits of fp32 parity. "
        "TensorRT in ONNX Runtime does so unless NVIDIA_TF32_OVERRIDE=0 is in the environment.",
    )
    cuda_graph: bool = option(
        False,
        "GPU",
        "Replay runs as one CUDA graph: in ONNX Runtime those of what `bind` returns, and all runs of a runner then "
        "wait for each other; of an engine from the second run of a shape on.",
    )
    max_graphs: int = option(
        8,
        "TensorRT",
        "The most shapes that have a graph at a time; the least recently used one is dropped. TensorRT-RTX manages "
        "graphs itself.",
    )
    weight_streaming_budget_bytes: int | None = option(
        None,
        "TensorRT",
        "How much of the weights of an engine built with weight_streaming stays on the GPU; by default, TensorRT "
        "decides.",
    )
    profile: Mapping[str, ShapeRange] | None = option(
        None,
        "TensorRT",
        "In ONNX Runtime, build one engine for these shapes when the model is loaded. Without it, TensorRT builds when "
        "inputs first arrive, and again for shapes outside the earlier ones; TensorRT-RTX builds one for all shapes. A "
        "profile excludes kernels, because it has no shapes for the inputs of parts of a graph.",
    )

    @property
    def row(self) -> Runtime:
        """The runtime's row of the table."""
        return RUNTIMES[self.runtime]

    def implementation_of(self, op: str) -> str:
        """The choice for a custom operator: "auto", "kernel" or "body"."""
        chosen = implementation_per_op(self.implementation)
        return chosen.get(op, chosen[OTHERS])

    def __post_init__(self) -> None:
        try:
            check_field_types(self)
        except SpecError as error:
            raise UserError(str(error)) from error
        if self.runtime not in RUNTIMES:
            known = tuple(ARTIFACT_RUNTIMES)
            raise UserError(
                f"unknown runtime {self.runtime!r}{did_you_mean(self.runtime, known)} Expected: {', '.join(known)}"
            )
        implementations = implementation_per_op(self.implementation)
        if not 0 <= self.device <= LAST_DEVICE:
            limit = f", at most {LAST_DEVICE}" * (self.device > 0)
            raise UserError(f"device is {self.device}; expected 0 for the first GPU, 1 for the second, …{limit}")
        most = max(MOST_THREADS, os.cpu_count() or 1)
        if self.threads is not None and not 1 <= self.threads <= most:
            limit = "at least 1" if self.threads < 1 else f"at most {most}"
            raise UserError(f"threads is {self.threads}; expected {limit}")
        if self.max_graphs < 1:
            raise UserError(f"max_graphs is {self.max_graphs}; expected at least 1; cuda_graph=False disables graphs")
        budget = self.weight_streaming_budget_bytes
        if budget is not None and budget < 0:
            raise UserError(f"the weight streaming budget is {budget} bytes; expected at least 0")
        if self.row.provider == TENSORRT_RTX and "kernel" in implementations.values():
            raise UserError(
                f"implementation is {self.implementation!r}; TensorRT-RTX has no plugins, and its onnxruntime runs our "
                "kernels on the CPU only: leave it out, or use another runtime"
            )
        taken = {name for row in RUNTIMES.values() for name in row.takes}
        for name in (one.name for one in fields(self) if one.name in taken and getattr(self, one.name) != one.default):
            if name not in self.row.takes:
                able = " or ".join(repr(row.name) for row in RUNTIMES.values() if name in row.takes)
                raise UserError(f"{name} needs the runtime {able}; the runtime is {self.runtime!r}")


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
