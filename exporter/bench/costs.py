"""The cost of a case: its floor, its memory, whether this machine can run it, and a rough estimate of the seconds that
its measurement takes."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from effexport.base.dtypes import DTYPES
from effexport.base.environment import free_memory_bytes, has_compiler, usable_cores
from effexport.base.errors import EffexportError
from effexport.base.formatting import memory
from effexport.base.runtimes import RUNTIMES, TORCH_OF_DEVICE, Runtime
from effexport.bench.candidates import short, signature_of_case, synchronize
from effexport.bench.grid import BenchCase
from effexport.bench.timing import FEWEST_ROUNDS, SHORT_RUNS, WAKE_UP_BELOW_SECONDS, WARM_UP_RUNS, Settings
from effexport.models.shapes import Product
from effexport.models.size_formula import shape_of

if TYPE_CHECKING:
    import torch

# Bytes of the matrices of one torch.matmul: several times what keeps a processor busy.
LARGEST_BYTES = 64 * 2**20
# With fewer rows, a part of a product would be slower than its share of the product.
FEWEST_ROWS = 64


def run_products(products: Sequence[Product], device: str = "cpu") -> Callable[[], None]:
    """A call that computes all products in float32 with torch.matmul, into preallocated outputs.

    Large products are split, and parts of one shape share their matrices: a fused implementation keeps these values in
    registers, so they should not go through memory here either. The numbers are random, like those of a model.
    """
    import torch

    parts = [part for product in products for part in pieces(product, LARGEST_BYTES)]

    generator = torch.Generator().manual_seed(0)

    def matrices(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    buffers: dict[Product, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    for product in parts:
        if product not in buffers:
            count, m, k, n = product.count, product.m, product.k, product.n
            buffers[product] = (matrices(count, m, k), matrices(count, k, n), torch.empty(count, m, n, device=device))

    def run() -> None:
        with torch.inference_mode():
            for product in parts:
                left, right, out = buffers[product]
                torch.matmul(left, right, out=out)
            synchronize(device)

    return run


def run_pass(nbytes: int, device: str = "cpu") -> Callable[[], None]:
    """A call that moves `nbytes` with all threads: copying half as many reads one half and writes the other."""
    import torch

    source = torch.ones(max(1, nbytes // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)
        synchronize(device)

    return run


def traffic_bytes(case: BenchCase) -> int:
    """Bytes of all inputs and outputs of one call."""
    sizes = {"batch": case.batch, "seq": case.seq_len}
    signature = signature_of_case(case)
    return sum(
        DTYPES[tensor.dtype].nbytes * math.prod(shape_of(tensor.dims, sizes))
        for tensor in (*signature.inputs, *signature.outputs)
    )


def pieces(product: Product, largest_bytes: int) -> tuple[Product, ...]:
    """The same product in parts whose matrices fit into `largest_bytes`, as far as splitting rows allows.

    Run one after another, the parts make the product without holding all of it, as fused implementations do.
    """
    one = Product(1, product.m, product.k, product.n)
    if one.nbytes <= largest_bytes:
        return tuple(Product(count, *one.shape) for count in shares(product.count, largest_bytes // one.nbytes))
    # the right factor stays whole
    right, row = 4 * product.k * product.n, 4 * (product.k + product.n)
    rows = shares(product.m, max(FEWEST_ROWS, (largest_bytes - right) // row))
    return tuple(Product(1, count, product.k, product.n) for count in rows) * product.count


def shares(total: int, most: int) -> list[int]:
    """A number as a sum, each term as large as possible."""
    return [min(most, total - start) for start in range(0, total, most)]


# Plain formulas hold logits before and after the mask, weights, and a few copies of inputs and outputs.
COPIES_OF_LOGITS, COPIES_OF_INPUTS = 3, 4
# The rest is left to other processes.
USABLE_SHARE = 0.9
# ONNX Runtime's arena keeps the peak of a model while others run, so it is used only if it leaves most memory free.
ARENA_SHARE = 0.25


def needed_bytes(case: BenchCase) -> int:
    """Roughly what a plain implementation needs at its peak."""
    return COPIES_OF_LOGITS * case.logits_bytes + COPIES_OF_INPUTS * traffic_bytes(case)


def reason_too_large(case: BenchCase) -> str | None:
    """The reason a case does not fit into the free memory; None if it fits or the free memory is unknown."""
    free, needed = free_memory_bytes(), needed_bytes(case)
    if free is None or needed <= USABLE_SHARE * free:
        return None
    return f"would need about {memory(needed)} of memory, and this machine has {memory(free)} free"


def reason_not_run(case: BenchCase) -> str | None:
    """The reason this machine cannot run a case; None if it can."""
    return reason_not_here(case.runtime) or reason_too_large(case)


@cache  # asking a GPU takes time
def reason_not_here(runtime: str) -> str | None:
    """The reason this machine cannot run a runtime; None if it can."""
    row = RUNTIMES[runtime]
    if row.device == "cpu":
        if row.compiled and not has_compiler():
            return "torch.compile needs a C++ compiler, and this machine has none"
        return None if row.package.version else f"{row.package.module} is not installed: {row.package.remedy}"
    if not row.graph:
        import torch

        if not torch.cuda.is_available():
            return "PyTorch sees no NVIDIA GPU here"
        without_triton = row.compiled and importlib.util.find_spec("triton") is None
        return "torch.compile needs Triton on a GPU: pip install triton" if without_triton else None
    from effexport.runners.cuda import open_cuda

    try:
        open_cuda(row.package.extra).close()
    except EffexportError as error:
        return f"needs an NVIDIA GPU: {short(error).partition(';')[0]}"
    return reason_without_runtime(row)


def reason_without_runtime(runtime: Runtime) -> str | None:
    """The reason a runtime that needs a GPU is not usable; None if it is installed."""
    try:
        if runtime.engine:
            from effexport.tensorrt.bindings import import_api

            import_api(runtime.name)
        else:
            from effexport.runners.options import RunOptions
            from effexport.runners.ort import import_onnxruntime
            from effexport.runners.ort.providers import providers_from_settings

            providers_from_settings(import_onnxruntime(), RunOptions(runtime=runtime.name))
    except EffexportError as error:
        return short(error)
    return None


def arena_fits(case: BenchCase) -> bool:
    free = free_memory_bytes()
    return free is None or needed_bytes(case) <= ARENA_SHARE * free


# Roughly a current processor. The run corrects the time left; the time announced before it may be off by half.
FLOPS_PER_CORE, BYTES_PER_SECOND = 5e10, 5e9
# How often a call reads or writes its inputs and outputs, and how often a plain formula its logits.
PASSES_OF_INPUTS, PASSES_OF_LOGITS = 4, 12
# Importing PyTorch; exporting a model; loading and comparing a case; a child process.
START_SECONDS, EXPORT_SECONDS, LOAD_SECONDS, CHILD_SECONDS = 3.0, 2.5, 0.7, 1.5
# Calls of PyTorch for the reference of a case, and calls in the child process.
REFERENCE_CALLS, CHILD_CALLS = 2, 2
# The floors take turns with the candidates and about as long; between turns, threads stop spinning.
TIMES_WITH_FLOORS, PAUSES_SECONDS = 2.0, 0.06


def call_seconds(case: BenchCase) -> float:
    """Roughly how long one call takes."""
    is_plain = RUNTIMES[case.runtime].graph != "ours"
    moved = PASSES_OF_INPUTS * traffic_bytes(case) + is_plain * PASSES_OF_LOGITS * case.logits_bytes
    return case.flops / (FLOPS_PER_CORE * usable_cores()) + moved / BYTES_PER_SECOND + 1e-3


def prepare_cost(case: BenchCase, settings: Settings) -> float:
    """Loading, and comparing with PyTorch unless that is left out."""
    reference = replace(case, runtime=TORCH_OF_DEVICE["cpu"])
    return LOAD_SECONDS + settings.parity * REFERENCE_CALLS * call_seconds(reference)


def timing_cost(case: BenchCase, settings: Settings) -> float:
    """Warming up and taking turns with the floors of the model."""
    call, rounds = call_seconds(case), settings.rounds
    is_short = call < WAKE_UP_BELOW_SECONDS
    planned = min(settings.max_seconds, rounds * call * (SHORT_RUNS if is_short else 1))
    timed = max(planned, min(rounds, FEWEST_ROUNDS) * call)
    waking = timed / SHORT_RUNS if is_short else 0.0
    return TIMES_WITH_FLOORS * (WARM_UP_RUNS * call + timed + waking) + rounds * PAUSES_SECONDS


def memory_cost(case: BenchCase) -> float:
    return CHILD_SECONDS + CHILD_CALLS * call_seconds(case)


def measuring_cost(cases: Iterable[BenchCase], settings: Settings) -> float:
    """Preparing, timing and measuring the memory of some cases, whose files are exported."""
    return sum(
        prepare_cost(case, settings) + timing_cost(case, settings) + settings.memory * memory_cost(case)
        for case in cases
    )
