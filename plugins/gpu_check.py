"""What an operator declares for the checks of its CUDA kernels on a GPU: the types, and helpers for the declarations.

An operator's declaration is CHECK in the gpu_check.py of its folder; gpu_check.cc beside it calls its launch_cuda with
the arrays and sizes declared here (see native/gpu_check.h). scripts/gpu reads the declarations, nothing else does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from effexport.plugins.contract import Case, Limit, Output
from effexport.plugins.gpu_work import Work
from effexport.plugins.ops import Op


@dataclass(frozen=True)
class AtMost:
    """A goal: the kernel takes at most this many times its bound, that of its `work` on the GPU it runs on."""

    times: float
    reason: str


@dataclass(frozen=True)
class FasterThan:
    """A goal: the baseline takes at least `times` times as long as the kernel."""

    baseline: str
    reason: str
    times: float = 1.0


@dataclass(frozen=True)
class Timed:
    """A case whose time is measured, and the goals for that time. small: what the rehearsal runs in its place."""

    case: Case
    small: Case
    goals: tuple[AtMost | FasterThan, ...]


@dataclass(frozen=True)
class GpuCheck:
    """Everything that scripts/gpu needs to know about one operator.

    inputs(case, device): the input tensors by name, in the order of the shim's arrays, the same ones on every call.
    outputs(case): the outputs, which follow the inputs in the shim's arrays.
    reference(case, inputs): what the outputs should be, in float64 or integers, from the operator's definition. Slow
    and obvious, in plain PyTorch, on the device of the inputs; all samples at once, because it is called for some
    samples at a time (scripts/gpu/samples.py).
    intermediate(case): how many elements the reference's largest array has for one sample, if inputs and outputs are
    smaller. It decides how many samples are computed at once.
    shared: inputs that all samples share. All other inputs and outputs begin with an axis of sizes[0] samples, or of as
    many rows for each sample.
    limit(case): the largest error that passes.
    work(case): what the kernels of a call do, of which scripts/gpu/bounds.py makes a lower bound of the time.
    baselines(case, inputs): what users would run without the kernel, by name; each call enqueues its work and returns.
    small: for the emulation on a CPU and for compute-sanitizer, both of which are slow. checked: more sizes for the
    GPU: tiny, odd and large. huge: some array has more than 2³¹ elements.
    compared: how many samples of a huge case are compared with the reference, if that is too slow for all of them. All
    elements of the others must be finite, so that none is left unwritten.
    """

    inputs: Callable[[Case, str], dict[str, Tensor]]
    outputs: Callable[[Case], dict[str, Output]]
    reference: Callable[[Case, dict[str, Tensor]], dict[str, Tensor]]
    limit: Callable[[Case], Limit]
    work: Callable[[Case], Work]
    baselines: Callable[[Case, dict[str, Tensor]], dict[str, Callable[[], object]]]
    small: tuple[Case, ...]
    checked: tuple[Case, ...]
    timed: tuple[Timed, ...]
    huge: tuple[Case, ...] = ()
    intermediate: Callable[[Case], int] = lambda case: 0
    shared: tuple[str, ...] = ()
    compared: int | None = None


def load_gpu_check(op: Op) -> GpuCheck:
    """The operator's declaration."""
    check = importlib.import_module(f"effexport.plugins.{op.torch_name}.gpu_check").CHECK
    assert isinstance(check, GpuCheck)
    return check


def sdpa_baselines(q: Tensor, k: Tensor, v: Tensor, scale: float) -> dict[str, Callable[[], object]]:
    """PyTorch's own attention without a mask, by each backend that takes the type: "SDPA flash", and so on.

    float32 has no flash and no cuDNN kernel. A CPU, where none of them exists, computes all of them plainly.
    """
    backends = {"SDPA memory-efficient": SDPBackend.EFFICIENT_ATTENTION}
    if q.dtype != torch.float32:
        backends |= {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}

    def call(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend if q.is_cuda else SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, scale=scale)

    return {name: partial(call, backend) for name, backend in backends.items()}
