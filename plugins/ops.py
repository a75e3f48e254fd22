"""The table of operators: domain, version, and the rows that stand in their folders."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

DOMAIN = "effexport"
PACKAGE = "effexport.plugins"
OPSET_VERSION = 1

# TensorRT takes a plugin rather than the function body for a node that carries this attribute.
PLUGIN_NAMESPACE = "plugin_namespace"
# The end of the name of a graph value that holds the buckets of an LSH layer: "<module path>.buckets".
BUCKETS = "buckets"
# The path of the module that a node came from, in the metadata of a written file, and as torch.onnx writes it.
MODULE_KEY, SCOPES_KEY = "effexport.module", "pkg.torch.onnx.name_scopes"

# From this opset on, ONNX has the operators that are named by Op.carrier; ONNX Runtime has them in a domain of its own.
CARRIER_OPSET, CONTRIB_DOMAIN = 27, "com.microsoft"

FLOAT_TYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Op:
    """One operator: a folder with its contract, torch operator, kernels and adapters, all under these names.

    torch_name names the folder and `torch.ops.effexport.<torch_name>`; onnx_name is the node's type in graphs.
    element_types are those of T in its kernels and its schema, and output_type that of its outputs: one word for all,
    or one for each.
    cuda_up_to: in ONNX Runtime on a GPU, the body should be faster than the CUDA kernel unless the last dimension of
    the first input is known and at most this. None: the kernel should be faster. Not measured yet.
    cuda: it has CUDA kernels and TensorRT plugins; otherwise its body runs on a GPU.
    in_float: why it takes and returns floating-point numbers where the model around it is quantised.
    around_in_float32: why its inputs must be computed in float32 even if the rest is not; "": they need not be.
    body_in_float32: its body computes in float32 whatever its type T is, and rounds only the result to T.
    decides: its first input, buckets of hashes, decides which tokens attend to each other: proofs prescribe it.
    carrier: an operator of ONNX and of ONNX Runtime that can stand for it, which `carrier_body` of its op.py calls; "":
    there is none.
    linear: exports with quantised linear layers put it in their place, as often as the record of these says.
    place: of its function body in exported files, among those of other operators; new ones come last.
    package: the Python package of a user's operator, which is its folder; "" for ours. See `user_operators.py`.
    """

    torch_name: str
    onnx_name: str
    element_types: tuple[str, ...] = FLOAT_TYPES
    output_type: str = "T"
    cuda_up_to: int | None = None
    cuda: bool = True
    in_float: str = "an operator takes and returns floating-point numbers"
    around_in_float32: str = ""
    body_in_float32: bool = False
    decides: bool = False
    carrier: str = ""
    linear: bool = False
    place: int = 1000
    package: str = ""

    def type_of_output(self, index: int) -> str:
        """T, or the name of a type."""
        words = self.output_type.split()
        return words[min(index, len(words) - 1)]

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
        """The `calls.py` of one of ours: calls that tell right from wrong. Loads NumPy and nothing else."""
        return importlib.import_module(f"{self._module}.calls")

    @property
    def _module(self) -> str:
        return self.package or f"effexport.plugins.{self.torch_name}"


def counted(ops: Mapping[str, int]) -> dict[str, int]:
    """The operators, with their numbers of nodes, whose number a spec says. Those of users, and those in the place of
    linear layers, may occur any number of times."""
    rows = sys.modules[__name__].OPS
    return {op: n for op, n in ops.items() if op in rows and not rows[op].linear}


def with_domain(op: str) -> str:
    """The whole name of an operator: one without a domain is ours."""
    return op if "::" in op else f"{DOMAIN}::{op}"


def _found() -> dict[str, Op]:
    """The operators by ONNX name: OP in `__init__.py` of the folders beside this file, which may be in an archive."""
    folders = [found.name for found in pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__) if found.ispkg]
    packages = {folder: importlib.import_module(f"{PACKAGE}.{folder}") for folder in sorted(folders)}
    named = {folder: package.OP for folder, package in packages.items() if hasattr(package, "OP")}
    assert all(row.torch_name == folder for folder, row in named.items()), "an operator is not named as its folder"
    rows = list(named.values())
    found = {row.onnx_name: row for row in sorted(rows, key=lambda row: row.place)}
    assert len(found) == len(rows), "a name occurs twice"
    return found


OPS: dict[str, Op]
# Those with CUDA kernels and TensorRT plugins.
CUDA_OPS: dict[str, Op]


def __getattr__(name: str) -> dict[str, Op]:
    """The tables, made on first use: an operator's package, which imports this module, may be the first to be
    imported."""
    if name not in ("OPS", "CUDA_OPS"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _found()
    globals().update(OPS=found, CUDA_OPS={op: row for op, row in found.items() if row.cuda})
    tables: dict[str, dict[str, Op]] = globals()
    return tables[name]
