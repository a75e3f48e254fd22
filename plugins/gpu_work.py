"""The work of one call's CUDA kernels, as they are written: declared by each operator's contract.py as `work`.

Bytes, multiply-adds and accesses to shared memory; scripts/gpu/bounds.py divides them by the best rates of a GPU.
Counted as for SM 80 and later.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    size: int, blocks: float, tiles: float, channels: int, *, queries: int = 64, masked: float | None = None
) -> Work:
    """native/attention.h: blocks of 64 columns of the values, over so many tiles of keys on average.

    queries: at most 64 of each block; warps without any only copy. masked: tiles with hidden keys, by default all.
    """
    rows, keys = parts(queries, ROWS) * ROWS, 64 if size == 2 else 32
    warps, slices = rows // ROWS, parts(channels, 64)
    depth = 64 if size == 2 else parts(min(64, channels), 16) * 16
    load_queries = moved(64 * 64 * size)
    tile = (product(size, rows, keys, depth, right="columns") + moved(keys * 64 * size)) * slices
    if slices > 1:
        tile += load_queries * slices
    tile += accesses(warps * 2 * 2)  # the highest logit of two rows
    tile += moved(keys * 64 * size) + product(size, rows, 64, keys, left="registers")
    # what each of two columns of a lane's scores needs to know of its key
    masks = accesses(warps * keys // COLUMNS * 2) * (tiles if masked is None else masked)
    return (load_queries + tile * tiles + masks) * blocks
