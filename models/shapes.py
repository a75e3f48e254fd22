"""Axes of inputs and outputs, shapes of weights, and matrix products: the sizes of a model are known before anything is
allocated. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# The axes of an input or output: a size, the name of an axis whose size is free or, of an output, a formula of these.
Dims = tuple[int | str, ...]
# The shape of each parameter and buffer by its name in the module's state_dict; a tied weight occurs once.
Shapes = dict[str, tuple[int, ...]]


def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    return shapes | {f"{name}.bias": (outputs,)} if bias else shapes


def norm(name: str, width: int, *, bias: bool = True) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (width,)}
    return shapes | {f"{name}.bias": (width,)} if bias else shapes


def within(module: str, shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    """The weights of a child, by their names in its parent."""
    return {f"{module}.{name}": shape for name, shape in shapes.items()}


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Numbers in all weights."""
    return sum(map(math.prod, shapes.values()))


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
