"""Custom operators: one folder per operator. Domain, version and the list of operators are written here, once."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from effexport.plugins.building.library import Library, LibraryError, find_library, get_library_path

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
    below this folder. trt_module: its TensorRT plugin; None where engines are built from the function body.
    """

    onnx_name: str
    torch_name: str
    module: str
    cuda_source: str
    element_types: tuple[str, ...]
    trt_module: str | None = None

    def load(self) -> ModuleType:
        """The operator's `op.py`: torch op, ONNX schema, translation and function body."""
        return importlib.import_module(self.module)

    def load_trt(self) -> ModuleType:
        """The operator's `trt.py`: the TensorRT plugin. Loads no framework; its `register` loads tensorrt."""
        assert self.trt_module is not None, f"{self.onnx_name} has no TensorRT plugin"
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
    "EluLinearAttention": Op(
        "EluLinearAttention",
        "linear_attention",
        module="effexport.plugins.linear_attention.op",
        cuda_source="linear_attention/kernel_cuda.cu",
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
    "LSHAttention": Op(
        "LSHAttention",
        "lsh_attention",
        module="effexport.plugins.lsh_attention.op",
        cuda_source="lsh_attention/kernel_cuda.cu",
        element_types=("float32", "float16", "bfloat16"),
    ),
    "AFTSimpleAttention": Op(
        "AFTSimpleAttention",
        "aft_simple_attention",
        module="effexport.plugins.aft_simple_attention.op",
        cuda_source="aft_simple_attention/kernel_cuda.cu",
        element_types=("float32", "float16", "bfloat16"),
    ),
    "MaskedAttention": Op(
        "MaskedAttention",
        "masked_attention",
        module="effexport.plugins.masked_attention.op",
        cuda_source="masked_attention/kernel_cuda.cu",
        element_types=("float32", "float16", "bfloat16"),
    ),
    "SegmentMeans": Op(
        "SegmentMeans",
        "segment_means",
        module="effexport.plugins.segment_means.op",
        cuda_source="segment_means/kernel_cuda.cu",
        element_types=("float32", "float16", "bfloat16"),
    ),
    "SequenceConv": Op(
        "SequenceConv",
        "sequence_conv",
        module="effexport.plugins.sequence_conv.op",
        cuda_source="sequence_conv/kernel_cuda.cu",
        element_types=("float32", "float16", "bfloat16"),
    ),
}
