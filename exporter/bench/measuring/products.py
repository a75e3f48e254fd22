"""The matrix products of each variant's formula: what no implementation of it can do without. Loads no framework."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from effexport.bench.grid import spec_from_case
from effexport.bench.results import Case
from effexport.models.spec import (
    AFTConvSpec,
    AFTFullSpec,
    AFTLocalSpec,
    AttentionSpec,
    EncoderSpec,
    LinearSpec,
    LSHSpec,
    NystromSpec,
    SoftmaxSpec,
)

# Outputs that one block of a convolution's Toeplitz matrix makes.
BAND_BLOCK = 64
# Of a part of a product.
FEWEST_ROWS = 64


@dataclass(frozen=True)
class Product:
    """`count` products [m, k] · [k, n] of float32 matrices."""

    count: int
    m: int
    k: int
    n: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.m, self.k, self.n

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.count * self.m * self.k * self.n

    @property
    def nbytes(self) -> int:
        """Of both factors and the product, float32."""
        return 4 * self.count * (self.m * self.k + self.k * self.n + self.m * self.n)


def pieces(product: Product, largest_bytes: int) -> tuple[Product, ...]:
    """The same product in parts whose matrices fit into `largest_bytes`, as far as rows can be taken apart.

    The parts after one another make the product without holding all of it, as fused implementations do.
    """
    one = Product(1, product.m, product.k, product.n)
    if one.nbytes <= largest_bytes:
        most = max(1, largest_bytes // one.nbytes)
        whole, rest = divmod(product.count, most)
        parts = [Product(most, *one.shape)] * whole + [Product(rest, *one.shape)] * (rest > 0)
        return tuple(parts)
    # the right factor stays whole; with fewer rows than a processor needs, the parts would be slower than the product
    right, row = 4 * product.k * product.n, 4 * (product.k + product.n)
    rows = min(product.m, max(FEWEST_ROWS, (largest_bytes - right) // row))
    whole, rest = divmod(product.m, rows)
    parts = [Product(1, rows, product.k, product.n)] * whole + [Product(1, rest, product.k, product.n)] * (rest > 0)
    return tuple(parts) * product.count


def products_of_case(case: Case) -> tuple[Product, ...]:
    """Of one call. The scope "core" has those of attention; layers and encoders add their projections."""
    spec = spec_from_case(case)
    core = tuple(attention_products(spec.attention, case.batch, case.seq_len))
    if case.scope == "core":
        return core
    tokens = case.batch * case.seq_len
    layer = (*core, *projections(spec.attention, tokens))
    if not isinstance(spec.model, EncoderSpec):
        return layer
    encoder = spec.model
    dim, ff = encoder.attention.dim, encoder.ff_size
    block = (*layer, Product(1, tokens, dim, ff), Product(1, tokens, ff, dim))
    head = (Product(1, tokens, encoder.hidden_size, encoder.vocab_size),) if encoder.lm_head else ()
    return block * encoder.layers + head


def projections(spec: AttentionSpec, tokens: int) -> Iterator[Product]:
    """Into queries, keys and values, and out of the heads."""
    if isinstance(spec, LSHSpec):
        widths = [spec.inner_dim] * 2  # queries and keys are one
    elif isinstance(spec, AFTConvSpec):
        widths = [spec.inner_dim, spec.heads, spec.inner_dim]  # one key channel per head
    else:
        widths = [spec.inner_dim if spec.has_heads else spec.dim] * 3
    yield from (Product(1, tokens, spec.dim, width) for width in widths)
    yield Product(1, tokens, widths[-1], spec.dim)


def attention_products(spec: AttentionSpec, batch: int, seq_len: int) -> Iterator[Product]:
    """Of the formula in the docstring of each variant's module; causal forms are counted as the others."""
    n, d, groups = seq_len, spec.head_size, batch * spec.heads
    if isinstance(spec, SoftmaxSpec):
        yield Product(groups, n, d, n)  # Q Kᵀ
        yield Product(groups, n, n, d)  # P V
        if spec.conv_kernel_size is not None:
            yield convolution(groups, n, d, spec.conv_kernel_size)
    elif isinstance(spec, LinearSpec):
        yield Product(groups, d, n, d)  # S = φ(K)ᵀ V
        yield Product(groups, n, d, d)  # φ(Q) S
    elif isinstance(spec, NystromSpec):
        yield from nystrom_products(spec, groups, n)
    elif isinstance(spec, LSHSpec):
        yield from lsh_products(spec, groups, n)
    elif isinstance(spec, AFTLocalSpec):
        yield from banded_products(batch, n, spec.dim, reach=spec.window - 1)
    elif isinstance(spec, AFTFullSpec):
        # e^w times e^k v and e^k side by side; w = u vᵀ depends on parameters alone, and need not be made again
        yield Product(batch, n, n, 2 * spec.dim)
    elif isinstance(spec, AFTConvSpec):
        # per head d channels of e^k v, and one of e^k that they share
        yield from banded_products(groups, n, d, reach=spec.kernel_size // 2, key_channels=1)
    # aft-simple has none: its sums have no weights


def nystrom_products(spec: NystromSpec, groups: int, n: int) -> Iterator[Product]:
    d, m = spec.head_size, spec.num_landmarks
    yield Product(groups, n, d, m)  # F: Q K̃ᵀ
    yield Product(groups, m, d, n)  # G: Q̃ Kᵀ
    yield Product(groups, m, d, m)  # A: Q̃ K̃ᵀ
    yield Product(4 * spec.pinv_iterations * groups, m, m, m)  # Z(A): four products per iteration
    yield Product(groups, m, n, d)  # G V
    yield Product(groups, m, m, d)  # Z (G V)
    yield Product(groups, n, m, d)  # F (Z (G V))
    if spec.conv_kernel_size is not None:
        yield convolution(groups, n, d, spec.conv_kernel_size)


def lsh_products(spec: LSHSpec, groups: int, n: int) -> Iterator[Product]:
    d, size = spec.head_size, spec.chunk_length
    chunks = math.ceil(n / size)
    window = (spec.num_chunks_before + 1 + spec.num_chunks_after) * size
    yield Product(groups, n, d, spec.num_hashes * sum(spec.bucket_factors) // 2)  # rotations
    yield Product(groups * spec.num_hashes * chunks, size, d, window)  # Q K̂ᵀ of every chunk
    yield Product(groups * spec.num_hashes * chunks, size, window, d)  # P V


def banded_products(
    groups: int, n: int, channels: int, *, reach: int, key_channels: int | None = None
) -> Iterator[Product]:
    """e^w for keys up to `reach` tokens away times e^k v and e^k, in blocks; far keys need sums without weights."""
    if reach <= 0:
        return
    blocks = math.ceil(n / BAND_BLOCK)
    columns = channels + (channels if key_channels is None else key_channels)
    yield Product(groups * blocks, BAND_BLOCK, min(n, BAND_BLOCK + 2 * reach), columns)


def convolution(groups: int, n: int, channels: int, taps: int) -> Product:
    """A depth-wise convolution along seq as products with blocks of its Toeplitz matrix, which is how it is fastest."""
    return Product(groups * math.ceil(n / BAND_BLOCK), BAND_BLOCK, BAND_BLOCK + taps - 1, channels)


def logits_bytes(case: Case) -> int:
    """The largest intermediate value of the plain formula, float32: logits of softmax or of chunks, AFT-full's e^w."""
    spec = spec_from_case(case).attention
    groups, n = case.batch * spec.heads, case.seq_len
    if isinstance(spec, SoftmaxSpec):
        return 4 * groups * n * n
    if isinstance(spec, AFTFullSpec) and not isinstance(spec, AFTLocalSpec):
        return 4 * n * n
    if isinstance(spec, LSHSpec):
        window = (spec.num_chunks_before + 1 + spec.num_chunks_after) * spec.chunk_length
        return 4 * groups * spec.num_hashes * n * window
    if isinstance(spec, NystromSpec):
        return 4 * groups * n * spec.num_landmarks
    return 0
