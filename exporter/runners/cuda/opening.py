"""Opens the GPU of this machine, through PyTorch or cuda-python."""

from __future__ import annotations

import sys
from typing import Any

from effexport.errors import MissingExtraError, UserError
from effexport.runners.cuda.cuda_python import CudaPython
from effexport.runners.cuda.cuda_torch import CudaTorch
from effexport.runners.cuda.device import Cuda

NEEDS = "running an engine needs an NVIDIA GPU and its driver; building trt-rtx engines does not"


def open_cuda(extra: str) -> Cuda:
    """The current device of this thread: through PyTorch if it is loaded and has a GPU, else through cuda-python.

    extra: the optional part of effexport that installs cuda-python: "tensorrt" or "rtx".
    Raises MissingExtraError without cuda-python, and UserError without a driver or a GPU.
    """
    torch: Any = sys.modules.get("torch")
    # programs with tensors on the GPU then share PyTorch's memory pool
    if torch is not None and torch.cuda.is_available():
        return CudaTorch(torch)
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise MissingExtraError("cuda-bindings", extra, remark=NEEDS) from error
    # anything but success means that nothing can run: there is no driver, an old one, or no device
    status, count = runtime.cudaGetDeviceCount()
    if status != runtime.cudaError_t.cudaSuccess or not count:
        name = getattr(status, "name", status)
        raise UserError(f"CUDA finds no GPU that it can use ({name}); {NEEDS}")
    return CudaPython(runtime)


def current_compute_capability(extra: str) -> int:
    """The compute capability of the device that `open_cuda` opens, such as 90. Raises as `open_cuda` does."""
    cuda = open_cuda(extra)
    with cuda.selected():
        try:
            return cuda.compute_capability
        finally:
            cuda.close()
