"""Executes graphs as TensorRT gets them: plugin nodes by the emulated CUDA kernels, with the launches and scalars of
their rows, and standard operators by ONNX's reference evaluator."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx.reference
import onnx.reference.op_run
from cuda_kernels import ALL_BLOCKS, DTYPES, assert_guard_is_intact, emulated_library, guarded

from effexport.plugins.ops import CUDA_OPS, DOMAIN, Op
from effexport.plugins.tensorrt_plugins import plugins_of
from effexport.plugins.trt_plugin import Plugin, int32_bits

NAMES = {**DTYPES, np.dtype(np.int32): "int32", np.dtype(np.bool_): "bool"}
NUMPY_TYPES = {name: dtype for dtype, name in NAMES.items()}
# as native/gpu_check.h numbers them
NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2}


@dataclass(frozen=True)
class Call:
    """One launch: the kernel, blocks, threads, bytes of shared memory, and the scalars as int32 bits."""

    entry: str
    launch: tuple[int, int, int]
    scalars: tuple[int, ...]


class EmulatedOp:
    """The kernels of one operator by the names of their entries, and its launch_cuda. Outputs are poisoned before a
    kernel runs, and guarded."""

    def __init__(self, op: Op, *options: str) -> None:
        self.op = op.torch_name
        self.library = emulated_library(op, *options)
        self.library.get_launch.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
        self.library.set_schedule.argtypes = [ctypes.c_uint, ctypes.c_uint]
        self.library.entry_kinds.argtypes = [ctypes.c_char_p]
        self.library.entry_kinds.restype = ctypes.c_char_p
        self.library.launch_entry.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
        self.library.count_launches.restype = ctypes.c_size_t
        self.library.get_call.argtypes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        self.library.get_call.restype = ctypes.c_size_t

    def launch(self, before_last: int = 0) -> list[int]:
        """Grid, block and dynamic shared memory of the last launch, or of one before."""
        launch = np.zeros(3, np.int64)
        self.library.get_launch(before_last, launch.ctypes.data)
        return launch.tolist()

    def kinds(self, entry: str) -> str:
        """Of a kernel's parameters: p for a pointer, i for an int32, f for a float."""
        found: bytes = self.library.entry_kinds(entry.encode())
        return found.decode()

    def call(self, index: int) -> Call:
        """One of the launches so far."""
        name, scalars = ctypes.c_char_p(), (ctypes.c_int32 * 32)()
        count = self.library.get_call(index, ctypes.byref(name), scalars)
        assert name.value is not None, "launch_cuda launched a kernel that its emulation does not name"
        launch = self.launch(self.library.count_launches() - 1 - index)
        return Call(name.value.decode(), (launch[0], launch[1], launch[2]), tuple(scalars[:count]))

    def calls_of_launch_cuda(
        self,
        dtype: str,
        sizes: Sequence[int],
        numbers: Sequence[float],
        multiprocessors: int = 1,
        allowed_shared: int | None = None,
    ) -> list[Call]:
        """Launches of the operator's launch_cuda for a case of its contract; no block of it runs. allowed_shared: bytes
        of shared memory that a block may have, if they are not those of the emulated GPU."""
        before = self.library.count_launches()
        nowhere = (ctypes.c_void_p * 16)(*[4096] * 16)  # addresses that nothing reads
        check = getattr(self.library, f"effexport_check_{self.op}")
        check.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 5]
        self.library.set_schedule(0, 0)
        self.library.set_multiprocessors(multiprocessors)
        if allowed_shared is not None:
            self.library.set_allowed_shared(ctypes.c_size_t(allowed_shared))
        try:
            answer = check(
                NUMBERS.get(dtype, 0),
                nowhere,
                (ctypes.c_int64 * len(sizes))(*sizes),
                (ctypes.c_double * max(len(numbers), 1))(*numbers),
                nowhere[0],
                None,
            )
        finally:
            self.library.reset_settings()  # other tests use this library, too
        assert answer == 0, f"launch_cuda refuses {dtype} {sizes} {numbers}"
        return [self.call(i) for i in range(before, self.library.count_launches())]

    def run_plugin(
        self,
        plugin: Plugin,
        inputs: Sequence[np.ndarray],
        attributes: Mapping[str, Any],
        seed: int = 0,
        dry: bool = False,
    ) -> tuple[list[np.ndarray], Call]:
        """The outputs of a node, which are poisoned before its kernel runs, and its launch. dry: no block runs."""
        dtypes = [NAMES[x.dtype] for x in inputs]
        sizes = plugin.sizes_of(dtypes, [x.shape for x in inputs], attributes)
        assert plugin.why_not(dtypes, [x.shape for x in inputs], attributes) is None
        launch = plugin.launch(sizes)
        entry = plugin.entry.format(T=sizes.T)
        floats = "".join("f" if isinstance(x, float) else "i" for x in launch.scalars)
        kinds = "p" * len(inputs) + floats + "p" * len(plugin.outputs)
        assert self.kinds(entry) == kinds, f"{entry} has other parameters"
        arrays = [np.ascontiguousarray(x) for x in inputs]
        results = [
            guarded(tuple(dims), NUMPY_TYPES[sizes.T if x.dtype == "T" else x.dtype])
            for x, dims in zip(plugin.results, plugin.output_dims(sizes), strict=True)
        ]
        scalars = tuple(int32_bits(x) for x in launch.scalars)
        values = [
            *(ctypes.c_void_p(x.ctypes.data) for x in arrays),
            *map(ctypes.c_int32, scalars),
            *(ctypes.c_void_p(x.ctypes.data) for x, _ in results),
        ]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = (ctypes.c_int64 * 3)(launch.grid, launch.threads, launch.shared_bytes)
        self.library.set_schedule(seed, 0 if dry else ALL_BLOCKS)
        assert self.library.launch_entry(entry.encode(), config, addresses) == 0, f"{entry} cannot be launched"
        for _, whole in results:
            assert_guard_is_intact(whole)
        return [result for result, _ in results], Call(entry, (config[0], config[1], config[2]), scalars)


@functools.cache
def emulated_op(op: Op) -> EmulatedOp:
    return EmulatedOp(op)


class GatherElements(onnx.reference.op_run.OpRun):
    """The standard operator, of which ONNX's own evaluator returns too little for some indices."""

    op_domain = ""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
        return (np.take_along_axis(data, indices, axis),)


@dataclass
class Executed:
    """Outputs of a graph by name, and the launches of its plugins in the order of execution."""

    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)


def execute(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], seed: int = 0, dry: bool = False) -> Executed:
    """Run a graph that was prepared for TensorRT, or one of standard operators. dry: plugins leave outputs poisoned."""
    executed = Executed()
    plugins = plugins_of(CUDA_OPS)
    run_of = {plugin.name: _kernel_of(plugin, executed, seed, dry) for plugin in plugins}
    without_bodies = onnx.ModelProto()
    without_bodies.CopyFrom(model)
    for function in [f for f in without_bodies.functions if f.domain == DOMAIN and f.name in run_of]:
        without_bodies.functions.remove(function)
    kernels = [
        type(name, (onnx.reference.op_run.OpRun,), {"op_domain": DOMAIN, "_run": run}) for name, run in run_of.items()
    ]
    evaluator = onnx.reference.ReferenceEvaluator(without_bodies, new_ops=[*kernels, GatherElements])
    outputs = evaluator.run(None, dict(inputs))
    executed.outputs = dict(zip(evaluator.output_names, outputs, strict=True))
    return executed


def _kernel_of(plugin: Plugin, executed: Executed, seed: int, dry: bool) -> Callable[..., tuple[np.ndarray, ...]]:
    def run(self: Any, *inputs: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        assert attributes.pop("plugin_namespace") == DOMAIN, "TensorRT would not take the plugin"
        given = {name: kind(attributes.pop(name)) for name, kind in plugin.attributes.items()}
        assert not attributes, f"{plugin.name} does not take {list(attributes)}"
        outputs, call = emulated_op(CUDA_OPS[plugin.op]).run_plugin(plugin, inputs, given, seed, dry)
        executed.calls.append(call)
        return tuple(outputs)

    return run


def relative_rms(found: np.ndarray, expected: np.ndarray) -> float:
    """The root of the mean square of the error, over that of the expected values; NaN and infinities must agree."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    assert found.shape == expected.shape
    assert np.isfinite(found).all(), "a result was not written, or overflowed"
    scale = np.sqrt(np.mean(expected**2)) if expected.size else 0.0
    error = np.sqrt(np.mean((found - expected) ** 2)) if expected.size else 0.0
    return float(error / scale) if scale else float(error)


def array_of(tensor: Any) -> np.ndarray:
    """A torch tensor as NumPy's, bfloat16 too."""
    import torch

    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: np.ndarray = tensor.contiguous().numpy()
    return array
