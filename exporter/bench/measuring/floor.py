"""The floor, a lower bound of the time: the matrix products of a formula, and one pass over inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from effexport.bench.measuring.models import signature_of_case
from effexport.bench.results import Case
from effexport.dtypes import DTYPES
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


def traffic_bytes(case: Case) -> int:
    """Bytes of all inputs and outputs of one call."""
    sizes = {"batch": case.batch, "seq": case.seq_len}
    signature = signature_of_case(case)
    return sum(
        DTYPES[tensor.dtype].nbytes * math.prod(shape_of(tensor.dims, sizes))
        for tensor in (*signature.inputs, *signature.outputs)
    )


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        cuda: Any = torch.cuda
        cuda.synchronize()


def pieces(product: Product, largest_bytes: int) -> tuple[Product, ...]:
    """The same product in parts whose matrices fit into `largest_bytes`, as far as splitting rows allows.

    Run one after another, the parts make the product without holding all of it, as fused implementations do.
    """
    one = Product(1, product.m, product.k, product.n)
    if one.nbytes <= largest_bytes:
        most = max(1, largest_bytes // one.nbytes)
        whole, rest = divmod(product.count, most)
        parts = [Product(most, *one.shape)] * whole + [Product(rest, *one.shape)] * (rest > 0)
        return tuple(parts)
    # the right factor stays whole
    right, row = 4 * product.k * product.n, 4 * (product.k + product.n)
    rows = min(product.m, max(FEWEST_ROWS, (largest_bytes - right) // row))
    whole, rest = divmod(product.m, rows)
    parts = [Product(1, rows, product.k, product.n)] * whole + [Product(1, rest, product.k, product.n)] * (rest > 0)
    return tuple(parts) * product.count
