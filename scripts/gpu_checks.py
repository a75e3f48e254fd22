#!/usr/bin/env python3
"""Check and time the CUDA kernels on this machine's NVIDIA GPU.

Every kernel is compared with its reference over a grid of sizes. Then it is timed and compared with PyTorch and with a
lower bound, the time that the GPU's arithmetic or memory allows at best. Kernels run inside ONNX Runtime's CUDA
provider if onnxruntime-gpu, effexport and its kernel library are installed, and also alone if nvcc can compile them,
launched by CuPy or the CUDA driver. One of the two ways is enough; both need PyTorch with CUDA.

Exit status: 0 success, 1 a result differs or a step failed, 2 there is no GPU or a tool is missing.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

PLUGINS = Path(__file__).resolve().parent.parent / "plugins"
DEVICE = "cuda:0"

ITERATIONS = 6
DTYPES = ("float32", "float16", "bfloat16")
PINV_SIZES = (1, 2, 31, 63, 64, 100, 128)
# softmax rows are as in Nyströmformer; the other kinds have many singular values at or near zero
PINV_KINDS = ("softmax", "nearly equal rows", "one large column", "zero")
PINV_COUNT = 5
SORT_LENGTHS = (0, 1, 2, 63, 100, 1000, 4096, 65536)
SORT_BUCKETS = (1, 2, 31, 32, 33, 257, 352, 353, 1025, 4096)
# (seq, chunk_length, head_dim): one token, chunks shorter and longer than a tile of 64, incomplete slices of 32
ATTENTION_SHAPES = ((1, 1, 1), (63, 10, 24), (100, 64, 64), (1000, 100, 100), (1000, 64, 128))
# before, after, causal, circular, rounded
ATTENTION_KINDS = {
    "one chunk before": (1, 0, False, False, False),
    "both sides": (2, 1, False, False, False),
    "causal": (1, 0, True, False, False),
    "in a ring, rounded": (1, 1, True, True, True),
}

# the timed sizes: (count, m) and (rows, n, num_buckets)
TIMED_PINV = ((96, 64), (768, 64))
TIMED_SORT = ((16, 8192, 256), (256, 16384, 256))
# (batch, heads, seq, head_dim), of two rounds in chunks of 64, one before
TIMED_ATTENTION = ((1, 8, 4096, 64), (8, 12, 8192, 64))
ROUNDS = 31
CALLS_PER_ROUND = 10
COPY_BYTES = 1 << 30


class SetupError(Exception):
    """A requirement is missing on this machine; the message says what was found, what is expected and what to do."""


@dataclass(frozen=True)
class PinvCase:
    m: int
    dtype: str
    kind: str
    count: int = PINV_COUNT

    @property
    def name(self) -> str:
        return f"IterativePinv {self.dtype} {self.count}×{self.m}×{self.m}, {self.kind}"

    @property
    def tolerance(self) -> float:
        """Limit of the largest difference, relative to the largest value, or to one if that is larger.

        One rounding to the output's type, and: float32 products whose errors later steps shrink (1e-5); where small
        singular values are left, their gain of at most (13/4)^6 = 1178 times the roundoff of 6e-8 (1e-4).
        """
        rounding = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}[self.dtype]
        return rounding + (1e-5 if self.kind == "softmax" else 1e-4)


@dataclass(frozen=True)
class SortCase:
    rows: int
    n: int
    num_buckets: int

    @property
    def name(self) -> str:
        return f"LSHSort {self.rows}×{self.n}, {self.num_buckets} buckets"


@dataclass(frozen=True)
class AttentionCase:
    seq: int
    chunk_length: int
    head_dim: int
    dtype: str
    kind: str
    batch: int = 2
    heads: int = 2
    rounds: int = 2

    @property
    def name(self) -> str:
        shape = "×".join(map(str, (self.batch, self.heads, self.seq, self.head_dim)))
        return f"LSHAttention {self.dtype} {shape}, chunks of {self.chunk_length}, {self.kind}"

    @property
    def attributes(self) -> dict[str, int]:
        names = ("chunks_before", "chunks_after", "causal", "circular", "rounded")
        settings = zip(names, ATTENTION_KINDS[self.kind], strict=True)
        return {"chunk_length": self.chunk_length, **{name: int(value) for name, value in settings}}

    @property
    def tolerance(self) -> float:
        """Limit of the largest difference, relative to the largest value.

        One rounding to the output's type, and float32 sums of up to 128 terms in logits of up to ‖q‖, about 14.
        """
        return {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}[self.dtype] + 2e-5


@dataclass(frozen=True)
class Check:
    """One comparison. `error` is relative for rounded results, and the number of differing elements for exact ones."""

    runner: str
    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # NaN does not pass


@dataclass(frozen=True)
class Timing:
    """Medians in microseconds; `limited_by` says which lower bound is the higher one: arithmetic or memory."""

    name: str
    kernel_us: float
    torch_us: float
    floor_us: float
    limited_by: str


def pinv_cases() -> Iterator[PinvCase]:
    for m, dtype, kind in itertools.product(PINV_SIZES, DTYPES, PINV_KINDS):
        yield PinvCase(m, dtype, kind)
    yield PinvCase(8, "float32", "softmax", count=0)


def sort_cases() -> Iterator[SortCase]:
    for n, num_buckets in itertools.product(SORT_LENGTHS, SORT_BUCKETS):
        yield SortCase(len(SORT_PATTERNS), n, num_buckets)
    yield SortCase(0, 100, 4)


def attention_cases() -> Iterator[AttentionCase]:
    for shape, dtype, kind in itertools.product(ATTENTION_SHAPES, DTYPES, ATTENTION_KINDS):
        yield AttentionCase(*shape, dtype, kind)
    yield AttentionCase(100, 10, 8, "float32", "causal", batch=0)


def pinv_inputs(case: PinvCase, device: str = DEVICE) -> tuple[Tensor, Tensor]:
    """a [count, m, m] and scale [count, 1, 1], the largest column sum of each matrix."""
    import torch

    generator = torch.Generator().manual_seed(case.m)
    softmax = torch.softmax(2 * torch.randn(case.count, case.m, case.m, generator=generator), dim=-1)
    a = {
        "softmax": softmax,
        "nearly equal rows": 1 / case.m + 1e-6 * softmax,
        "one large column": torch.zeros_like(softmax).index_fill_(2, torch.tensor([0]), 1.0),
        "zero": torch.zeros_like(softmax),
    }[case.kind]
    smallest = torch.finfo(torch.float16).tiny  # a divisor that exists in all types
    scale = a.sum(dim=1).amax(dim=-1).clamp(min=smallest).reshape(-1, 1, 1)
    dtype = getattr(torch, case.dtype)
    return a.to(device, dtype), scale.to(device, dtype)


# bucket of each position, from position, length and the number of buckets
SORT_PATTERNS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "random": lambda position, n, buckets: (position * 2654435761 >> 7) % buckets,
    "all in the first": lambda position, n, buckets: position * 0,
    "all in the last": lambda position, n, buckets: position * 0 + buckets - 1,
    "descending": lambda position, n, buckets: (n - 1 - position) * buckets // max(n, 1),
    "alternating": lambda position, n, buckets: (position + 1) % 2 * (buckets - 1),
}


def sort_inputs(case: SortCase, device: str = DEVICE) -> Tensor:
    """int32 [rows, n], with the patterns of SORT_PATTERNS in turns."""
    import torch

    position = torch.arange(case.n)
    patterns = itertools.islice(itertools.cycle(SORT_PATTERNS.values()), case.rows)
    rows = [pattern(position, case.n, case.num_buckets) for pattern in patterns]
    buckets = torch.stack(rows) if rows else torch.empty(0, case.n)
    return buckets.to(device, torch.int32)


# qk, v, order, rank, keep
AttentionInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor] if TYPE_CHECKING else tuple


def attention_inputs(case: AttentionCase, device: str = DEVICE) -> AttentionInputs:
    """Inputs as a layer passes them: tokens sorted by random buckets; the end of the last sample is padding."""
    import torch

    generator = torch.Generator().manual_seed(case.seq)
    shape = (case.batch, case.heads, case.seq, case.head_dim)
    qk, v = (torch.randn(shape, generator=generator) for _ in range(2))
    keep = torch.ones(case.batch, case.seq, dtype=torch.bool)
    keep[-1:, case.seq - case.seq // 4 :] = False
    padded = -(-case.seq // case.chunk_length) * case.chunk_length
    buckets = torch.full((case.batch, case.heads * case.rounds, padded), 8)
    drawn = torch.randint(8, (case.batch, case.heads * case.rounds, case.seq), generator=generator)
    buckets[..., : case.seq] = torch.where(keep[:, None], drawn, 8)
    order, rank = torch_sort(buckets.flatten(0, 1))
    dtype = getattr(torch, case.dtype)
    return qk.to(device, dtype), v.to(device, dtype), order.to(device), rank.to(device), keep.to(device)


def torch_attention(inputs: AttentionInputs, attributes: dict[str, int]) -> Tensor:
    """The plain formulas, with windows and scores in memory: what PyTorch runs without our kernel.

    `rounded` reproduces a rounding of float32, so the log-sum-exps are then computed in float32.
    """
    import torch

    qk, v, order, rank, keep = inputs
    batch, heads, seq, head_dim = qk.shape
    groups, padded, chunk_length = batch * heads, order.shape[1], attributes["chunk_length"]
    rounds, chunks = order.shape[0] // groups, padded // chunk_length
    q, values = (torch.nn.functional.pad(x, (0, 0, 0, padded - seq)).flatten(0, 1) for x in (qk, v))
    keys = q * torch.rsqrt(q.square().mean(dim=-1, keepdim=True) + 1e-6) / head_dim**0.5
    index = torch.arange(rounds * chunks, device=qk.device)[:, None]
    near = index + torch.arange(-attributes["chunks_before"], attributes["chunks_after"] + 1, device=qk.device)
    exists = (near.div(chunks, rounding_mode="floor") == index // chunks) | bool(attributes["circular"])
    near = near % (rounds * chunks)
    tokens = order.long().reshape(groups, rounds * chunks, chunk_length)
    place = torch.arange(padded, device=qk.device).reshape(chunks, chunk_length).repeat(rounds, 1)
    seen = tokens[:, near].flatten(2)
    rows = torch.arange(groups, device=qk.device)[:, None, None]
    logits = q[rows, tokens] @ keys[rows, seen].transpose(-1, -2)
    kept = keep.sum(dim=1).repeat_interleave(heads)
    absent = ~exists[:, :, None].expand(-1, -1, chunk_length).flatten(1)
    hidden = ((place[near].flatten(1) >= kept[:, None, None]) | absent)[:, :, None]
    own, other = tokens[..., None], seen.masked_fill(absent, -1)[:, :, None]
    if attributes["causal"]:
        hidden = hidden | (own < other)
    logits = logits.masked_fill(hidden, -1e9).masked_fill(own == other, -1e5)
    if attributes["rounded"]:
        logits = logits.float()
    highest = logits.amax(dim=-1, keepdim=True)
    lse = highest + (logits - highest).exp().sum(dim=-1, keepdim=True).log()
    context = (logits - lse).exp().to(v.dtype) @ values[rows, seen]
    places = rank.long().reshape(groups, rounds, padded, 1)
    lse = lse.reshape(groups, rounds, padded, 1).gather(2, places)
    context = context.reshape(groups, rounds, padded, -1).gather(2, places.expand(-1, -1, -1, v.shape[-1]))
    highest = lse.amax(dim=1, keepdim=True)
    weights = (lse - (highest + (lse - highest).exp().sum(dim=1, keepdim=True).log())).exp()
    return (weights * context).sum(dim=1)[:, :seq].reshape(v.shape).to(v.dtype)


def torch_pinv(a: Tensor, scale: Tensor) -> Tensor:
    """Z0 = Aᵀ / scale, Z ← Z/4 (13 I − P (15 I − P (7 I − P))) with P = A Z: what PyTorch runs without our kernel."""
    import torch

    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    z = (1 / scale) * a.transpose(1, 2)
    for _ in range(ITERATIONS):
        p = a @ z
        z = (0.25 * z) @ (13 * identity - p @ (15 * identity - p @ (7 * identity - p)))
    return z


def torch_sort(buckets: Tensor) -> tuple[Tensor, Tensor]:
    """order and rank, int32: what PyTorch runs without our kernel."""
    import torch

    order = torch.sort(buckets, dim=-1, stable=True).indices
    places = torch.arange(buckets.shape[-1], device=buckets.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, places)
    return order.to(torch.int32), rank.to(torch.int32)


class Runner(Protocol):
    """A way to run the kernels on tensors of the GPU, on PyTorch's current stream, into outputs of the caller."""

    name: str

    def pinv(self, a: Tensor, scale: Tensor, z: Tensor) -> None: ...

    def sort(self, buckets: Tensor, num_buckets: int, order: Tensor, rank: Tensor) -> None: ...

    def attend(self, inputs: AttentionInputs, attributes: dict[str, int], out: Tensor) -> None: ...


Argument = ctypes.c_void_p | ctypes.c_int32


class Launcher(Protocol):
    """A loader of compiled kernels, which launches them by name."""

    name: str

    def load(self, cubin: Path) -> None: ...

    def launch(self, name: str, grid: int, block: int, shared_bytes: int, arguments: Sequence[Argument]) -> None: ...


class CupyLauncher:
    name = "CuPy"

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.functions: dict[str, Any] = {}

    def load(self, cubin: Path) -> None:
        import cupy

        self.modules.append(cupy.RawModule(path=str(cubin)))

    def launch(self, name: str, grid: int, block: int, shared_bytes: int, arguments: Sequence[Argument]) -> None:
        import cupy
        import numpy as np
        import torch

        if name not in self.functions:
            self.functions[name] = find_function(name, [module.get_function for module in self.modules])
        values = [np.int32(x.value) if isinstance(x, ctypes.c_int32) else np.uint64(x.value or 0) for x in arguments]
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            self.functions[name]((grid,), (block,), tuple(values), shared_mem=shared_bytes)


class DriverLauncher:
    name = "the CUDA driver"

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.modules: list[ctypes.c_void_p] = []
        self.functions: dict[str, ctypes.c_void_p] = {}

    def load(self, cubin: Path) -> None:
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin.read_bytes())
        self.modules.append(module)

    def launch(self, name: str, grid: int, block: int, shared_bytes: int, arguments: Sequence[Argument]) -> None:
        import torch

        if name not in self.functions:
            lookups = [lambda entry, module=module: self.function(module, entry) for module in self.modules]
            self.functions[name] = find_function(name, lookups)
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(x) for x in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        shape = [ctypes.c_uint(x) for x in (grid, 1, 1, block, 1, 1, shared_bytes)]
        self.call("cuLaunchKernel", self.functions[name], *shape, stream, addresses, None)

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def call(self, function: str, *arguments: Any) -> None:
        status = getattr(self.driver, function)(*arguments)
        if status != 0:
            raise RuntimeError(f"{function} returned CUDA error {status}")


def find_function(name: str, lookups: Sequence[Callable[[str], Any]]) -> Any:
    """The function of that name in the first module that has it."""
    for lookup in lookups:
        try:
            return lookup(name)
        except Exception as error:  # CuPy and the driver raise different types
            failure = error
    raise RuntimeError(f"no compiled kernel is named {name}") from failure


@dataclass(frozen=True)
class PinvLaunch:
    """The launch parameters that plugins/iterative_pinv/kernel_cuda.cu expects."""

    entry: str
    grid: int
    block: int
    shared_bytes: int
    scratch_bytes: int


def pinv_launch(count: int, m: int, dtype: str) -> PinvLaunch:
    tiles = ((m + 3) // 4) ** 2
    buffer_bytes = tiles * 16 * 4
    if m <= 64:
        block = (tiles + 31) // 32 * 32
        return PinvLaunch(f"effexport_iterative_pinv_{dtype}", count, block, 3 * buffer_bytes, 0)
    blocks = min(count, 256)
    return PinvLaunch(f"effexport_iterative_pinv_scratch_{dtype}", blocks, 512, 0, blocks * 4 * buffer_bytes)


def sort_shared_bytes(num_buckets: int) -> int:
    """Shared memory of plugins/lsh_sort/kernel_cuda.cu: a counter per warp and digit, and one more per warp."""
    if num_buckets <= 352:
        return 4 * 32 * (num_buckets + 1)
    bucket_bits = (num_buckets - 1).bit_length()
    passes = -(-bucket_bits // 8)
    return 4 * 32 * ((1 << -(-bucket_bits // passes)) + 1)


@dataclass(frozen=True)
class Launch:
    entry: str
    grid: int
    block: int
    shared_bytes: int


def attention_launches(case: AttentionCase) -> tuple[Launch, Launch, Launch]:
    """The launch parameters of the three kernels of plugins/lsh_attention/kernel_cuda.cu."""
    chunks = -(-case.seq // case.chunk_length)
    groups = case.batch * case.heads
    tiles = -(-case.chunk_length // 64) * -(-case.head_dim // 128)
    entry = "effexport_lsh_attention"
    return (
        Launch(f"{entry}_kept", case.batch, 256, 4),
        Launch(f"{entry}_{case.dtype}", groups * case.rounds * chunks * tiles, 256, 34560),
        Launch(f"{entry}_combine_{case.dtype}", -(-groups * case.seq // 8), 256, 0),
    )


class LaunchRunner:
    """The kernels alone, compiled by nvcc for this GPU."""

    def __init__(self, launcher: Launcher, cubins: Sequence[Path]) -> None:
        self.name = f"kernels launched by {launcher.name}"
        self.launcher = launcher
        for cubin in cubins:
            launcher.load(cubin)

    def pinv(self, a: Tensor, scale: Tensor, z: Tensor) -> None:
        import torch

        count, m, _ = a.shape
        if a.numel() == 0:
            return
        how = pinv_launch(count, m, str(a.dtype).removeprefix("torch."))
        arguments = [*pointers(a, scale), *integers(count, m, ITERATIONS), *pointers(z)]
        if how.scratch_bytes:
            # PyTorch reuses this memory only on the same stream, so not before the kernel has finished
            scratch = torch.full((how.scratch_bytes // 4,), float("nan"), device=a.device)
            arguments += pointers(scratch)
        self.launcher.launch(how.entry, how.grid, how.block, how.shared_bytes, arguments)

    def sort(self, buckets: Tensor, num_buckets: int, order: Tensor, rank: Tensor) -> None:
        rows, n = buckets.shape
        if buckets.numel() == 0:
            return
        arguments = [*pointers(buckets), *integers(rows, n, num_buckets), *pointers(order, rank)]
        self.launcher.launch("effexport_lsh_sort", rows, 1024, sort_shared_bytes(num_buckets), arguments)

    def attend(self, inputs: AttentionInputs, attributes: dict[str, int], out: Tensor) -> None:
        import torch

        qk, v, order, _, keep = inputs
        if out.numel() == 0:
            return
        batch, heads, seq, head_dim = qk.shape
        groups, (rows, padded) = batch * heads, order.shape
        rounds, value_dim = rows // groups, v.shape[3]
        dtype = str(qk.dtype).removeprefix("torch.")
        case = AttentionCase(seq, attributes["chunk_length"], head_dim, dtype, "", batch, heads, rounds)
        # PyTorch reuses this memory only on the same stream, so not before the kernels have finished
        contexts, lses = (torch.full((rows * seq * n,), float("nan"), device=qk.device) for n in (value_dim, 1))
        kept = torch.full((batch,), -1, dtype=torch.int32, device=qk.device)
        sizes = (groups, heads, seq, padded, rounds, head_dim, value_dim, *attributes.values())
        arguments = (
            [*pointers(keep), *integers(batch, seq), *pointers(kept)],
            [*pointers(qk, v, order, kept), *integers(*sizes), *pointers(contexts, lses)],
            [
                *pointers(contexts, lses),
                *integers(groups, seq, rounds, value_dim, attributes["rounded"]),
                *pointers(out),
            ],
        )
        for how, given in zip(attention_launches(case), arguments, strict=True):
            self.launcher.launch(how.entry, how.grid, how.block, how.shared_bytes, given)


def pointers(*tensors: Tensor) -> list[Argument]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def integers(*values: int) -> list[Argument]:
    return [ctypes.c_int32(value) for value in values]


class OrtRunner:
    """The kernels inside ONNX Runtime: models of one custom node, whose inputs and outputs are bound to tensors."""

    def __init__(self, library: Path, device: str = "cuda") -> None:
        import torch

        self.name = f"ONNX Runtime with {library.name}"
        self.library = library
        self.device = device
        self.sessions: dict[tuple[str | int, ...], Any] = {}
        self.nowhere = torch.zeros(1, device=device)

    def pinv(self, a: Tensor, scale: Tensor, z: Tensor) -> None:
        self.run("IterativePinv", {"iterations": ITERATIONS}, {"A": a, "scale": scale}, {"Z": z})

    def sort(self, buckets: Tensor, num_buckets: int, order: Tensor, rank: Tensor) -> None:
        self.run("LSHSort", {"num_buckets": num_buckets}, {"buckets": buckets}, {"order": order, "rank": rank})

    def attend(self, inputs: AttentionInputs, attributes: dict[str, int], out: Tensor) -> None:
        named = dict(zip(("qk", "v", "order", "rank", "keep"), inputs, strict=True))
        self.run("LSHAttention", attributes, named, {"out": out})

    def run(self, op: str, attributes: dict[str, int], inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        key = (op, *attributes.values(), onnx_element(next(iter(inputs.values()))))
        if key not in self.sessions:
            self.sessions[key] = self.session(one_node_model(op, attributes, inputs, outputs))
        binding = self.sessions[key].io_binding()
        for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, tensor in tensors.items():
                # an empty tensor has a null address, which is not accepted
                address = tensor.data_ptr() or self.nowhere.data_ptr()
                bind(name, self.device, 0, onnx_element(tensor), list(tensor.shape), address)
        self.sessions[key].run_with_iobinding(binding)

    def session(self, model: bytes) -> Any:
        import onnxruntime
        import torch

        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(str(self.library))
        if self.device == "cpu":
            return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        # the stream whose events measure the time
        cuda = {"device_id": 0, "user_compute_stream": str(torch.cuda.current_stream().cuda_stream)}
        return onnxruntime.InferenceSession(model, options, providers=[("CUDAExecutionProvider", cuda)])


def onnx_element(tensor: Tensor) -> int:
    """The number of the tensor's type in ONNX."""
    return {"float32": 1, "int32": 6, "bool": 9, "float16": 10, "bfloat16": 16}[
        str(tensor.dtype).removeprefix("torch.")
    ]


def one_node_model(op: str, attributes: dict[str, Any], inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> bytes:
    """A model of one node for tensors of these types and ranks."""
    from onnx import helper

    def values(tensors: dict[str, Tensor]) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, onnx_element(x), [f"{name}_{axis}" for axis in range(x.dim())])
            for name, x in tensors.items()
        ]

    node = helper.make_node(op, list(inputs), list(outputs), domain="effexport", **attributes)
    graph = helper.make_graph([node], op, values(inputs), values(outputs))
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("effexport", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return model


def require_gpu() -> None:
    """Check that PyTorch can use a GPU. Raises SetupError otherwise."""
    try:
        import torch
    except ImportError as error:
        raise SetupError(
            f"PyTorch cannot be imported ({error}); expected PyTorch with CUDA. Install a CUDA build of torch"
        ) from error
    if torch.version.cuda is None:
        raise SetupError(
            f"PyTorch {torch.__version__} is a CPU build; expected one with CUDA, on a machine with an NVIDIA GPU. "
            "Install a CUDA build of torch"
        )
    if not torch.cuda.is_available():
        raise SetupError(
            f"PyTorch {torch.__version__} finds no NVIDIA GPU; expected one with its driver. "
            "Run `nvidia-smi` to see what the driver sees"
        )


def choose_runners(folder: Path) -> list[Runner]:
    """All ways to run the kernels here, the one with the least overhead last. Compiled kernels go to `folder`.

    Raises SetupError if there is none.
    """
    library, nvcc = ort_library(), find_nvcc()
    if library is None and nvcc is None:
        raise SetupError(
            "found neither nvcc nor onnxruntime-gpu with a kernel library of effexport; expected one of the two. "
            "Put the CUDA toolkit's nvcc on PATH, or run `pip install onnxruntime-gpu` and `effexport plugins build`"
        )
    runners: list[Runner] = [OrtRunner(library)] if library else []
    if nvcc:
        launcher = CupyLauncher() if importlib.util.find_spec("cupy") else DriverLauncher()
        runners.append(LaunchRunner(launcher, compile_kernels(nvcc, folder)))
    return runners


def find_nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def ort_library() -> Path | None:
    """The kernel library; None unless ONNX Runtime has CUDA and effexport is installed."""
    if not all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime", "effexport")):
        return None
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return None
    from effexport.plugins.building.library import LibraryError, get_library_path

    try:
        path: Path | None = get_library_path()
    except LibraryError as error:
        raise SetupError(str(error)) from error
    return path


def compile_kernels(nvcc: str, folder: Path) -> list[Path]:
    """A cubin of each kernel for this GPU. Raises SetupError if nvcc fails."""
    import torch

    major, minor = torch.cuda.get_device_capability(0)
    cubins = []
    for kernel in ("iterative_pinv", "lsh_attention", "lsh_sort"):
        cubin = folder / f"{kernel}.cubin"
        source = PLUGINS / kernel / "kernel_cuda.cu"
        command = [nvcc, "-std=c++17", "-cubin", f"-arch=sm_{major}{minor}", "-I", str(PLUGINS), str(source)]
        completed = subprocess.run([*command, "-o", str(cubin)], capture_output=True, text=True, check=False)
        if completed.returncode != 0:
            raise SetupError(
                f"nvcc could not compile {source.name} of {kernel} for sm_{major}{minor}: {completed.stderr.strip()}. "
                "Expected CUDA 12 or later that knows this GPU; see `nvcc --list-gpu-code`"
            )
        cubins.append(cubin)
    return cubins


def describe_machine(runners: Sequence[Runner]) -> dict[str, str]:
    """What the results were measured on."""
    import torch

    driver, clock = nvidia_smi("driver_version", "clocks.max.sm")
    described = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "GPU": torch.cuda.get_device_name(0),
        "highest SM clock": f"{clock} MHz",
        "driver": driver,
        "CUDA of PyTorch": str(torch.version.cuda),
        "kernels run by": ", ".join(runner.name for runner in runners),
        "timed with": runners[-1].name,
        "Python": platform.python_version(),
    }
    for name in ("torch", "cupy-cuda13x", "cupy-cuda12x", "cupy", "onnxruntime-gpu", "onnxruntime", "effexport"):
        try:
            described[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return described


def nvidia_smi(*fields: str) -> list[str]:
    """Properties of the first GPU. Raises SetupError if the driver's tool fails."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(
            f"nvidia-smi failed: {error}; expected the tool that comes with the driver. Put it on PATH"
        ) from error
    return [value.strip() for value in output.split(",")]


def check_pinv(runner: Runner, case: PinvCase, device: str = DEVICE) -> Check:
    import torch

    a, scale = pinv_inputs(case, device)
    z = torch.full_like(a, float("nan"))
    runner.pinv(a, scale, z)
    if case.count == 0:
        return Check(runner.name, case.name, 0.0, case.tolerance)
    expected = torch_pinv(a.double(), scale.double())
    error = (z.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    return Check(runner.name, case.name, float(error), case.tolerance)


def check_pinv_independence(runner: Runner, m: int, device: str = DEVICE) -> Check:
    """Check that each matrix alone gives the same bits as in a batch with a NaN matrix."""
    import torch

    a, scale = pinv_inputs(PinvCase(m, "float32", "softmax"), device)
    a[1, 0, 0] = float("nan")
    together = torch.zeros_like(a)
    runner.pinv(a, scale, together)
    wrong = int(torch.isfinite(together[1]).sum())
    for i in (0, 2, 3, 4):
        alone = torch.full_like(a[:1], float("nan"))
        runner.pinv(a[i : i + 1].contiguous(), scale[i : i + 1].contiguous(), alone)
        wrong += int((alone[0] != together[i]).sum())
    return Check(runner.name, f"IterativePinv {m}×{m}, each matrix alone and beside a NaN", wrong, 0)


def check_sort(runner: Runner, case: SortCase, device: str = DEVICE) -> Check:
    import torch

    buckets = sort_inputs(case, device)
    order, rank = torch.full_like(buckets, -1), torch.full_like(buckets, -1)
    runner.sort(buckets, case.num_buckets, order, rank)
    expected_order, expected_rank = torch_sort(buckets)
    return Check(runner.name, case.name, int((order != expected_order).sum() + (rank != expected_rank).sum()), 0)


def check_attention(runner: Runner, case: AttentionCase, device: str = DEVICE) -> Check:
    import torch

    inputs = attention_inputs(case, device)
    out = torch.full_like(inputs[1], float("nan"))
    runner.attend(inputs, case.attributes, out)
    if case.batch == 0:
        return Check(runner.name, case.name, 0.0, case.tolerance)
    qk, v, *others = inputs
    expected = torch_attention((qk.double(), v.double(), *others), case.attributes)
    error = (out.double() - expected).abs().max() / expected.abs().max()
    return Check(runner.name, case.name, float(error), case.tolerance)


def run_checks(runner: Runner, device: str = DEVICE) -> list[Check]:
    return [
        *(check_pinv(runner, case, device) for case in pinv_cases()),
        *(check_pinv_independence(runner, m, device) for m in PINV_SIZES),
        *(check_sort(runner, case, device) for case in sort_cases()),
        *(check_attention(runner, case, device) for case in attention_cases()),
    ]


def interleaved_medians(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Median time of each call in microseconds. They take turns, so that a changing clock affects all."""
    import torch

    samples: list[list[float]] = [[] for _ in calls]
    for turn in range(ROUNDS + 2):
        for call, times in zip(calls, samples, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS_PER_ROUND):
                call()
            end.record()
            end.synchronize()
            if turn >= 2:  # the first turns warm up
                times.append(1e3 * begin.elapsed_time(end) / CALLS_PER_ROUND)
    return [statistics.median(times) for times in samples]


def copy_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    import torch

    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    destination = torch.empty_like(source)
    (time_us,) = interleaved_medians([lambda: destination.copy_(source)])
    return 2 * COPY_BYTES / (time_us * 1e-6)


def float32_peak(multiprocessors: int, clock_mhz: float, capability: tuple[int, int]) -> float:
    """Floating-point operations per second outside tensor cores."""
    # Turing and the A100 have half as many float32 lanes per multiprocessor as the others
    lanes = 64 if capability in ((7, 5), (8, 0)) else 128
    return multiprocessors * lanes * 2 * clock_mhz * 1e6


def floor_us(operations: float, moved_bytes: float, peak: float, bandwidth: float) -> tuple[float, str]:
    """The lower bound in microseconds, and what determines it: "arithmetic" or "memory"."""
    arithmetic, memory = 1e6 * operations / peak, 1e6 * moved_bytes / bandwidth
    return (arithmetic, "arithmetic") if arithmetic > memory else (memory, "memory")


def time_pinv(runner: Runner, count: int, m: int, peak: float, bandwidth: float) -> Timing:
    import torch

    a, scale = pinv_inputs(PinvCase(m, "float32", "softmax", count))
    z = torch.empty_like(a)
    kernel, eager = interleaved_medians([lambda: runner.pinv(a, scale, z), lambda: torch_pinv(a, scale)])
    least, limited_by = floor_us(8 * m**3 * ITERATIONS * count, 4 * (2 * m * m + 1) * count, peak, bandwidth)
    return Timing(f"IterativePinv float32 {count}×{m}×{m}", kernel, eager, least, limited_by)


def time_sort(runner: Runner, rows: int, n: int, num_buckets: int, peak: float, bandwidth: float) -> Timing:
    import torch

    generator = torch.Generator().manual_seed(0)
    buckets = torch.randint(num_buckets, (rows, n), generator=generator).to(DEVICE, torch.int32)
    order, rank = torch.empty_like(buckets), torch.empty_like(buckets)
    kernel, eager = interleaved_medians(
        [lambda: runner.sort(buckets, num_buckets, order, rank), lambda: torch_sort(buckets)]
    )
    least, limited_by = floor_us(0, 3 * 4 * rows * n, peak, bandwidth)
    return Timing(f"LSHSort {rows}×{n}, {num_buckets} buckets", kernel, eager, least, limited_by)


def time_attention(
    runner: Runner, batch: int, heads: int, seq: int, head_dim: int, peak: float, bandwidth: float
) -> Timing:
    import torch

    case = AttentionCase(seq, 64, head_dim, "float32", "one chunk before", batch, heads)
    inputs = attention_inputs(case)
    out = torch.empty_like(inputs[1])
    kernel, eager = interleaved_medians(
        [lambda: runner.attend(inputs, case.attributes, out), lambda: torch_attention(inputs, case.attributes)]
    )
    tokens = batch * heads * seq
    # two products over windows of 128 keys; queries, values and results once, and the order of every round
    operations = 2 * 2 * 128 * head_dim * tokens * case.rounds
    least, limited_by = floor_us(operations, 4 * tokens * (3 * head_dim + case.rounds), peak, bandwidth)
    return Timing(case.name, kernel, eager, least, limited_by)


def run_timings(runner: Runner) -> tuple[list[Timing], dict[str, float]]:
    """The timings, and the two limits of this GPU that their lower bounds were computed from."""
    import torch

    (clock,) = nvidia_smi("clocks.max.sm")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    peak = float32_peak(multiprocessors, float(clock), torch.cuda.get_device_capability(0))
    bandwidth = copy_bandwidth()
    timings = [
        *(time_pinv(runner, *shape, peak, bandwidth) for shape in TIMED_PINV),
        *(time_sort(runner, *shape, peak, bandwidth) for shape in TIMED_SORT),
        *(time_attention(runner, *shape, peak, bandwidth) for shape in TIMED_ATTENTION),
    ]
    return timings, {"float32_tflops": peak / 1e12, "copy_gb_per_s": bandwidth / 1e9}


@dataclass(frozen=True)
class Results:
    machine: dict[str, str]
    checks: list[Check]
    timings: list[Timing]
    limits: dict[str, float]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]


def json_from_results(results: Results) -> str:
    value = dataclasses.asdict(results)
    for entry, check in zip(value["checks"], results.checks, strict=True):
        # JSON has no NaN
        entry |= {"passed": check.passed, "error": check.error if check.error == check.error else "nan"}
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def markdown_from_results(results: Results) -> str:
    passed = len(results.checks) - len(results.failed)
    lines = ["# Results on a GPU", "", "Written by `scripts/gpu_checks.py`.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in results.machine.items()]
    lines += ["", f"{passed} of {len(results.checks)} comparisons with the references passed.", ""]
    lines += [
        f"* failed: {check.name}, {check.runner}: {check.error:.3g}, at most {check.tolerance:.3g}"
        for check in results.failed
    ]
    lines += [""] if results.failed else []
    if results.timings:
        lines += timing_lines(results)
    return "\n".join(lines)


def timing_lines(results: Results) -> list[str]:
    limits = results.limits
    lines = [
        f"Medians of {ROUNDS} interleaved rounds of {CALLS_PER_ROUND} calls. The lower bound is the time that float32 "
        f"arithmetic at {limits['float32_tflops']:.1f} TFLOP/s or memory traffic at the measured copy bandwidth of "
        f"{limits['copy_gb_per_s']:.0f} GB/s takes.",
        "",
        "| | kernel (µs) | PyTorch (µs) | PyTorch / kernel | lower bound (µs) | bound / kernel |",
        "|---|---|---|---|---|---|",
    ]
    for t in results.timings:
        lines.append(
            f"| {t.name} | {t.kernel_us:.1f} | {t.torch_us:.1f} | {t.torch_us / t.kernel_us:.1f} "
            f"| {t.floor_us:.1f} ({t.limited_by}) | {100 * t.floor_us / t.kernel_us:.0f} % |"
        )
    return [*lines, ""]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write all results as JSON")
    parser.add_argument("--output-markdown", type=Path, metavar="FILE", help="write a Markdown table")
    parser.add_argument("--no-timing", action="store_true", help="only compare results")
    return parser.parse_args(arguments)


def run(timing: bool) -> Results:
    require_gpu()
    import torch

    # ONNX Runtime treats the default stream as none given
    with tempfile.TemporaryDirectory() as folder, torch.cuda.stream(torch.cuda.Stream()):
        runners = choose_runners(Path(folder))
        machine = describe_machine(runners)
        checks = [check for runner in runners for check in run_checks(runner)]
        timings, limits = run_timings(runners[-1]) if timing else ([], {})
    return Results(machine, checks, timings, limits)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        results = run(timing=not options.no_timing)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.output_json:
        options.output_json.write_text(json_from_results(results), encoding="utf-8")
    if options.output_markdown:
        options.output_markdown.write_text(markdown_from_results(results), encoding="utf-8")
    print(markdown_from_results(results))
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
