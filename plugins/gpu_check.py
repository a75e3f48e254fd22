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

from effexport.plugins.contract import Case, Contract
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


@dataclass(frozen=True, kw_only=True)
class GpuCheck(Contract):
    """Everything that scripts/gpu needs to know about one operator, besides its contract.

    inputs and outputs are in the order of the shim's arrays.
    work(case): what the kernels of a call do, of which scripts/gpu/bounds.py makes a lower bound of the time.
    baselines(case, inputs): what users would run without the kernel, by name; each call enqueues its work and returns.
    checked: more sizes for the GPU: tiny, odd and large. huge: some array has more than 2³¹ elements.
    compared: how many samples of a huge case are compared with `exact`, if that is too slow for all of them. All
    elements of the others must be finite, so that none is left unwritten.
    """

    work: Callable[[Case], Work]
    baselines: Callable[[Case, dict[str, Tensor]], dict[str, Callable[[], object]]]
    checked: tuple[Case, ...]
    timed: tuple[Timed, ...]
    huge: tuple[Case, ...] = ()
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
