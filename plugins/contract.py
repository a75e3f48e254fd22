"""The contract that all implementations of an operator keep: the types, and helpers for its inputs.

A declaration is CONTRACT in the contract.py of an operator's folder; gpu_check.cc beside it calls launch_cuda with the
arrays and sizes declared there (see native/gpu_check.h). Its `work` is what one call's CUDA kernels do, as they are
written and counted as for SM 80 and later: bytes, multiply-adds and accesses to shared memory, which
scripts/gpu/bounds.py divides by the best rates of a GPU. Tests and scripts/gpu read it. Loads PyTorch and nothing else.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from effexport.plugins.ops import FLOAT_TYPES, Op
from effexport.plugins.signature import Signature

# A multiprocessor's shared memory moves so many bytes per clock: those of one access of a warp at most.
ACCESS_BYTES = 128
# Of a product by one warp of native/tile.h.
ROWS, COLUMNS = 16, 8


@dataclass(frozen=True)
class Work:
    """The work of all launches of one call, besides reading their inputs and writing their outputs once.

    fused: multiply-adds of float32. tensor: multiply-adds on tensor cores. Padding of tiles counts.
    shared: bytes of shared memory's bandwidth. An access of a warp counts ACCESS_BYTES for each so many that its lanes
    read or write, or a part of them; words that lanes have in common count once, conflicts of banks do not. Shuffles
    take the same way.
    scratch: bytes that are written to scratch memory. again: of each launch, bytes that it reads and that an earlier
    launch of the call has read or written, and bytes that it replaces; the L2 cache may hold a part of each.
    """

    fused: float = 0.0
    tensor: float = 0.0
    shared: float = 0.0
    scratch: float = 0.0
    again: tuple[float, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(
            self.fused + other.fused,
            self.tensor + other.tensor,
            self.shared + other.shared,
            self.scratch + other.scratch,
            self.again + other.again,
        )

    def __mul__(self, times: float) -> Work:
        """Of a part of a launch: scratch memory belongs to whole launches."""
        assert not self.scratch
        assert not self.again
        return Work(self.fused * times, self.tensor * times, self.shared * times)


def parts(whole: int, part: int) -> int:
    """The number of parts that cover the whole."""
    return -(-whole // part)


def accesses(count: float) -> Work:
    """Accesses of warps, of up to ACCESS_BYTES each."""
    return Work(shared=count * ACCESS_BYTES)


def moved(nbytes: float) -> Work:
    """Bytes that are written to shared memory, or read from it, without words in common."""
    return Work(shared=nbytes)


def product(size: int, rows: int, columns: int, depth: int, left: str = "rows", right: str = "rows") -> Work:
    """A product [rows, depth] · [depth, columns] of native/tile.h. size: bytes of an element; 2 for tensor cores.

    left: "rows", "columns" for multiply_left_transposed, or "registers" for multiply_weights. right: "rows", or
    "columns" for multiply_transposed.
    """
    products = float(rows * columns * depth)
    warps = parts(rows, ROWS)
    if size == 2:  # ldmatrix
        lefts = 0 if left == "registers" else rows * depth
        return Work(tensor=products, shared=2.0 * (lefts + warps * depth * columns))
    # 16 bytes of four numbers of 8 rows at a time; or a number of 8 columns, twice; or two shuffles
    lefts = {"rows": 4 * ROWS, "columns": 2 * ACCESS_BYTES, "registers": 2 * ACCESS_BYTES}[left]
    # a pair of 8 columns, or four numbers of 4 columns, twice
    rights = {"rows": ACCESS_BYTES, "columns": 2 * ACCESS_BYTES / 4}[right]
    return Work(fused=products, shared=warps * depth * (lefts + columns / COLUMNS * rights))


def attention_core(
    size: int,
    blocks: float,
    tiles: float,
    channels: int,
    *,
    queries: int = 64,
    fragments: int = 1,
    masked: float | None = None,
) -> Work:
    """native/attention.h: blocks of 64 columns of the values, over so many tiles of keys on average.

    queries: of each block; warps without any only copy. fragments: 16 queries each, of a warp. masked: tiles with
    hidden keys, by default all.
    """
    keys, of_warp = 64 if size == 2 else 32, fragments * ROWS
    warps, slices = parts(queries, of_warp), parts(channels, 64)
    rows = warps * of_warp
    depth = 64 if size == 2 else parts(min(64, channels), 16) * 16
    held = size == 2 and slices == 1
    load_queries = moved(4 * of_warp * 64 * size)
    # what a warp reads of keys and values serves all of its queries
    shared = Work(shared=-2.0 * (fragments - 1) * warps * 64 * keys) if size == 2 else Work()
    products = product(size, rows, keys, depth, left="registers" if held else "rows", right="columns") + shared
    tile = (products + moved(keys * 64 * size)) * slices
    if slices > 1:
        tile += load_queries * slices
    tile += accesses(warps * fragments * 2 * 2)  # the highest logit of two rows
    tile += moved(keys * 64 * size) + product(size, rows, 64, keys, left="registers") + shared
    # what each of two columns of a lane's scores needs to know of its key
    masks = accesses(warps * keys // COLUMNS * 2) * (tiles if masked is None else masked)
    once = load_queries + moved(rows * 64 * size) if held else load_queries
    return (once + tile * tiles + masks) * blocks


# The relative error of one rounding, which every kernel may make when it writes its results.
ROUNDING = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}


@dataclass(frozen=True)
class Case:
    """One call of an operator's kernels.

    sizes and numbers: what gpu_check.cc takes, in the order of the contract; a flag is a size of 0 or 1. kind: which
    inputs to make.
    dtype: the type of the operator's T; "int32" for LSHSort.
    """

    sizes: tuple[int, ...]
    numbers: tuple[float, ...] = ()
    kind: str = "random"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return " ".join([self.dtype, "×".join(map(str, self.sizes)), *map(str, self.numbers), self.kind])

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def rounding(self) -> float:
        return ROUNDING[self.dtype]

    def generator(self, device: str) -> torch.Generator:
        """A source of random numbers for the inputs."""
        return torch.Generator(device).manual_seed(zlib.crc32(self.name.encode()))

    def normal(self, source: torch.Generator, *shape: int) -> Tensor:
        """Normally distributed values of the case's type, on the device of the generator."""
        return torch.randn(shape, generator=source, dtype=self.torch_dtype, device=source.device)


@dataclass(frozen=True)
class Output:
    """Shape and type of one output, which the caller allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Limit:
    """The largest error that passes: the largest difference over the reference's largest value. 0: equal integers."""

    value: float
    reason: str


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
class Contract:
    """The results, and the speed, that an operator's torch operator, function body and kernels must have.

    signature: inputs, outputs and attributes, in this order in the arrays of gpu_check.cc.
    sizes, numbers: names of a case's, in order: dimensions of the signature and attributes. Of an attribute of several
    numbers, their count comes first. derived: other sizes and dimensions, from those that are known.
    inputs(case, device): the input tensors by name, the same ones on every call, in the order of the signature.
    exact(case, inputs): the right outputs, in float64 or integers, from the operator's definition. Slow and obvious, in
    plain PyTorch, on the device of the inputs; all samples at once, because it is called for some samples at a time
    (scripts/gpu/samples.py).
    intermediate(case): the number of elements that the largest array in `exact` has for one sample, if inputs and
    outputs are smaller. It decides how many samples are computed at once.
    shared: inputs that all samples share. All other inputs and outputs begin with an axis of sizes[0] samples, or of as
    many rows for each sample.
    limit(case): the largest error that passes.
    small: for everything that is slow: the emulation on a CPU, and compute-sanitizer. cases: further ones for the
    emulation. larger: too slow for it. raced: calls in which two blocks take several items each and all loops repeat,
    for the search for races, which is slower still. empty: some size is zero. body_refuses: those that ONNX Runtime
    refuses in it. unlaunched: those that ort.cc answers without CUDA, whose launch refuses them.
    averaged: an input, and the case of kind "mean" with so many heads and channels: its results are means of that
    input's two tokens, exact but for one rounding to T.
    hidden: values that hidden tokens of these inputs may hold without a change of any bit.
    body_hides: the body takes NaN there, too. body_limit: the error that its own roundings add in half types.
    per_node: attributes in which nodes that share a body may differ.
    cuda_roundings: roundings in the limit that only the CUDA kernels make. torch_halves: the torch operator computes in
    float32 in half types, too.
    wrong_attributes: with the words of the error. wrong_sizes: in place of those of the last case, shapes of inputs,
    and attributes, that the signature allows and the operator refuses. uncountable: sizes that the CUDA kernels refuse.
    checked: more sizes for the GPU: tiny, odd and large. huge: some array has more than 2³¹ elements.
    compared: the number of samples of a huge case to compare with `exact`, if that is too slow for all of them. All
    elements of the others must be finite, so that none is left unwritten.
    work(case): the work of a call's kernels, from which scripts/gpu/bounds.py computes a lower bound of the time.
    baselines(case, inputs): the alternatives without the kernel, by name; each call enqueues its work and returns.
    """

    signature: Signature
    sizes: str
    inputs: Callable[[Case, str], dict[str, Tensor]]
    exact: Callable[[Case, dict[str, Tensor]], dict[str, Tensor]]
    limit: Callable[[Case], Limit]
    small: tuple[Case, ...]
    work: Callable[[Case], Work] = lambda case: Work()
    baselines: Callable[[Case, dict[str, Tensor]], dict[str, Callable[[], object]]] = lambda case, inputs: {}
    checked: tuple[Case, ...] = ()
    timed: tuple[Timed, ...] = ()
    raced: tuple[Case, ...] = ()
    numbers: str = ""
    derived: Mapping[str, Callable[[Mapping[str, Any]], int]] = field(default_factory=dict)
    huge: tuple[Case, ...] = ()
    compared: int | None = None
    intermediate: Callable[[Case], int] = lambda case: 0
    shared: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()
    larger: tuple[Case, ...] = ()
    empty: tuple[Case, ...] = ()
    body_refuses: tuple[Case, ...] = ()
    unlaunched: tuple[Case, ...] = ()
    averaged: tuple[str, Callable[[int, int], Case]] | None = None
    hidden: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    torch_halves: bool = True
    body_hides: bool = True
    body_limit: float = 0.0
    per_node: tuple[str, ...] = ()
    cuda_roundings: int = 0
    wrong_attributes: tuple[tuple[Mapping[str, Any], str], ...] = ()
    wrong_sizes: tuple[Mapping[str, Any], ...] = ()
    uncountable: tuple[tuple[int, ...], ...] = ()

    def attributes(self, case: Case) -> dict[str, Any]:
        """Those of the call, in the order of the signature."""
        known: Mapping[str, Any] = self._named(case)
        return {x.name: x.type(known.get(x.name, x.default)) for x in self.signature.attributes}

    def outputs(self, case: Case) -> dict[str, Output]:
        known = self._named(case)

        def size(dim: str) -> int:
            return int(dim) if dim.isdecimal() else known[dim] if dim in known else self.derived[dim](known)

        return {
            x.name: Output(
                tuple(map(size, x.dims.split())), case.torch_dtype if x.dtype == "T" else getattr(torch, x.dtype)
            )
            for x in self.signature.outputs
        }

    def case_of(self, tensors: Sequence[Tensor], attributes: Mapping[str, Any]) -> Case:
        """The case of a call with these inputs."""
        known = {**attributes}
        for parameter, tensor in zip(self.signature.inputs, tensors, strict=True):
            known |= zip(parameter.dims.split(), tensor.shape, strict=True)
        sizes: list[int] = []
        for name in self.sizes.split():
            value = known[name] if name in known else self.derived[name](known)
            sizes += (len(value), *value) if isinstance(value, Sequence) else (int(value),)
        numbers = tuple(float(known[name]) for name in self.numbers.split())
        return Case(tuple(sizes), numbers, dtype=str(tensors[0].dtype).removeprefix("torch."))

    def _named(self, case: Case) -> dict[str, Any]:
        """Sizes and numbers by name."""
        tuples = {x.name for x in self.signature.attributes if x.type is tuple}
        sizes, known = list(case.sizes), dict[str, Any](zip(self.numbers.split(), case.numbers, strict=True))
        for name in self.sizes.split():
            value = sizes.pop(0)
            known[name] = tuple(sizes.pop(0) for _ in range(value)) if name in tuples else value
        assert not sizes, f"{case.name} has more sizes than {self.sizes}"
        return known


def load_contract(op: Op) -> Contract:
    """The operator's declaration."""
    contract = importlib.import_module(f"effexport.plugins.{op.torch_name}.contract").CONTRACT
    assert isinstance(contract, Contract)
    return contract


def in_all_types(*cases: Case) -> tuple[Case, ...]:
    """The cases in float32, float16 and bfloat16."""
    return tuple(replace(case, dtype=dtype) for case in cases for dtype in FLOAT_TYPES)


def random_mask(source: torch.Generator, *shape: int) -> Tensor:
    """A mask that is true for two thirds of all elements, on average."""
    return torch.rand(shape, generator=source, device=source.device) < 2 / 3


def token_mask(source: torch.Generator, batch: int, seq: int) -> Tensor:
    """A mask [batch, seq] that hides a tenth of all tokens, and the last quarter of the last sample."""
    keep = torch.rand(batch, seq, generator=source, device=source.device) < 0.9
    keep[-1:, seq - seq // 4 :] = False
    return keep


# Kinds of inputs where a token has logits so far above all others that e^x is infinite unless their own maximum is
# taken off: where this token is. What merges maxima of parts must not miss one.
PEAKS = ("first", "middle", "last")
# Of such a logit, where all others are about 1. float32 and all half types have it exactly.
PEAK_LOGIT = 128.0


def peak(kind: str, tokens: int) -> slice:
    """The token with such logits; none of any kind but PEAKS."""
    if kind not in PEAKS:
        return slice(0, 0)
    start = {"first": 0, "middle": tokens // 2, "last": tokens - 1}[kind]
    return slice(start, start + 1)


def with_peaks(case: Case) -> tuple[Case, ...]:
    """The case with each of PEAKS."""
    return tuple(replace(case, kind=kind) for kind in PEAKS)


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
