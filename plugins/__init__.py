"""Custom operators: one folder per operator. Domain, version and the list of operators are written here, once."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from effexport.plugins.library import Library, LibraryError, find_library, get_library_path

__all__ = [
    "DOMAIN",
    "OPS",
    "OPSET_VERSION",
    "PLUGIN_NAMESPACE",
    "Library",
    "LibraryError",
    "Op",
    "find_library",
    "get_library_path",
]

DOMAIN = "effexport"
OPSET_VERSION = 1

# TensorRT takes a plugin rather than the function body for a node that carries this attribute.
PLUGIN_NAMESPACE = "plugin_namespace"


@dataclass(frozen=True)
class Op:
    """One operator under its names: `onnx_name` in graphs, `torch_name` under `torch.ops.effexport`.

    element_types: what its kernels take, as its schema and the kernel library do. cuda_source: its CUDA kernels, a path
    below this folder.
    """

    onnx_name: str
    torch_name: str
    module: str
    trt_module: str
    cuda_source: str
    element_types: tuple[str, ...]

    def load(self) -> ModuleType:
        """The operator's `op.py`: torch op, ONNX schema, translation and function body."""
        return importlib.import_module(self.module)

    def load_trt(self) -> ModuleType:
        """The operator's `trt.py`: the TensorRT plugin. Loads no framework; its `register` loads tensorrt."""
        return importlib.import_module(self.trt_module)


OPS: dict[str, Op] = {
    "IterativePinv": Op(
        "IterativePinv",
        "iterative_pinv",
        module="effexport.plugins.iterative_pinv.op",
        trt_module="effexport.plugins.iterative_pinv.trt",
        cuda_source="iterative_pinv/kernel_cuda.cu",
        element_types=("float32", "float16", "bfloat16"),
    ),
    "LSHSort": Op(
        "LSHSort",
        "lsh_sort",
        module="effexport.plugins.lsh_sort.op",
        trt_module="effexport.plugins.lsh_sort.trt",
        cuda_source="lsh_sort/kernel_cuda.cu",
        element_types=("int32",),
    ),
}
