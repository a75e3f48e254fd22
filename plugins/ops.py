"""The table of operators: domain, version and one row per operator, written here, once."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

DOMAIN = "effexport"
OPSET_VERSION = 1

# TensorRT takes a plugin rather than the function body for a node that carries this attribute.
PLUGIN_NAMESPACE = "plugin_namespace"

FLOAT_TYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Op:
    """One operator: a folder with its contract, torch operator, kernels and adapters, all under these names.

    torch_name names the folder and `torch.ops.effexport.<torch_name>`; onnx_name is the node's type in graphs.
    element_types are those of T in its kernels and its schema, and output_type that of its outputs.
    cuda_up_to: in ONNX Runtime on a GPU, the body should be faster than the CUDA kernel unless the last dimension of
    the first input is known and at most this. None: the kernel should be faster. Not measured yet.
    in_float: why it takes and returns floating-point numbers where the model around it is quantised.
    around_in_float32: why its inputs must be computed in float32 even if the rest is not; "": they need not be.
    body_in_float32: its body computes in float32 whatever its type T is, and rounds only the result to T.
    decides: its first input, buckets of hashes, decides which tokens attend to each other: proofs prescribe it.
    package: the Python package of a user's operator, which is its folder; "" for ours. See `user_operators.py`.
    """

    torch_name: str
    onnx_name: str
    element_types: tuple[str, ...] = FLOAT_TYPES
    output_type: str = "T"
    cuda_up_to: int | None = None
    in_float: str = "an operator takes and returns floating-point numbers"
    around_in_float32: str = ""
    body_in_float32: bool = False
    decides: bool = False
    package: str = ""

    @property
    def cuda_source(self) -> str:
        """Its CUDA kernels, a path below the folder that holds the operator's."""
        return f"{self.torch_name}/kernel_cuda.cu"

    @property
    def user_folder(self) -> Path:
        """The folder of a user's operator, whose package has been imported."""
        return Path(str(sys.modules[self.package].__file__)).resolve().parent

    def load(self) -> ModuleType:
        """The operator's `op.py`: torch operator, signature and function body."""
        return importlib.import_module(f"{self._module}.op")

    def load_trt(self) -> ModuleType:
        """The operator's `trt.py`: its TensorRT plugins. Loads no framework."""
        return importlib.import_module(f"{self._module}.trt")

    def load_calls(self) -> ModuleType:
        """The `__init__.py` of one of ours: calls that tell right from wrong. Loads NumPy and nothing else."""
        return importlib.import_module(self._module)

    @property
    def _module(self) -> str:
        return self.package or f"effexport.plugins.{self.torch_name}"


def _by_onnx_name(*ops: Op) -> dict[str, Op]:
    assert len({op.onnx_name for op in ops}) == len({op.torch_name for op in ops}) == len(ops), "a name occurs twice"
    return {op.onnx_name: op for op in ops}


# CMakeLists.txt reads the folders from these rows: the first word of a row, at the beginning of a line or behind `Op(`.
# Function bodies stand in exported files in this order, so a new operator is added at the end.
OPS: dict[str, Op] = _by_onnx_name(
    # beyond 64 columns, the matrices do not fit into shared memory, and the body's products by cuBLAS should win
    Op(
        "iterative_pinv",
        "IterativePinv",
        cuda_up_to=64,
        in_float="the iteration amplifies rounding",
        around_in_float32="the pseudo-inverse of its landmarks' matrix amplifies rounding",
        body_in_float32=True,
    ),
    Op(
        "linear_attention",
        "EluLinearAttention",
        in_float="its sums over the sequence grow with the length",
        body_in_float32=True,
    ),
    Op(
        "lsh_sort",
        "LSHSort",
        element_types=("int32",),
        in_float="it sorts integers",
        around_in_float32="rounding its hashes changes which tokens attend to each other",
        decides=True,
    ),
    Op("lsh_attention", "LSHAttention", in_float="both factors of its products are activations"),
    Op(
        "aft_simple_attention",
        "AFTSimpleAttention",
        in_float="its sums of exponentials span many magnitudes",
        body_in_float32=True,
    ),
    Op("masked_attention", "MaskedAttention", in_float="a softmax turns rounded logits into wrong weights"),
    Op(
        "segment_means",
        "SegmentMeans",
        in_float="landmarks enter a pseudo-inverse, which amplifies rounding",
        body_in_float32=True,
    ),
    Op("sequence_conv", "SequenceConv", in_float="a few multiplications for each number: nothing to gain"),
    Op("lsh_hash", "LSHHash", output_type="int32", in_float="rounded projections move tokens to other buckets"),
    Op(
        "aft_window_attention",
        "AFTWindowAttention",
        in_float="its sums of exponentials span many magnitudes",
        body_in_float32=True,
    ),
)
