"""Matrix products by their sizes: what the lower bound of a variant is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

# Outputs that one block of a convolution's Toeplitz matrix makes.
BAND_BLOCK = 64


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
        """Bytes of both factors and the product, float32."""
        return 4 * self.count * (self.m * self.k + self.k * self.n + self.m * self.n)


def convolution(groups: int, n: int, channels: int, taps: int | None) -> Iterator[Product]:
    """A depth-wise convolution along seq as products with blocks of its Toeplitz matrix, which is how it is fastest.

    taps: None for no convolution.
    """
    if taps is not None:
        yield Product(groups * math.ceil(n / BAND_BLOCK), BAND_BLOCK, BAND_BLOCK + taps - 1, channels)


def banded_products(groups: int, n: int, columns: int, reach: int) -> Iterator[Product]:
    """Weights of keys up to `reach` tokens away, times `columns` columns; far keys have no weights.

    As one product whose rows have no other keys: in blocks of the band, most multiplications would be with zeros if the
    band is narrow, and a kernel that leaves them out would take less than the lower bound.
    """
    if reach > 0:
        yield Product(groups, n, min(n, 2 * reach + 1), columns)
