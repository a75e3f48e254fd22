"""plugins/native/tile.h: its products against NumPy, in an emulation of two architectures, and compiled for GPUs."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cuda_kernels import ALL_BLOCKS, NATIVE, PLUGINS, build, run

from effexport.plugins.building.toolchain import find_nvcc

DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# One rounding of weights that are about normally distributed, over the result's largest value.
ROUNDED_WEIGHTS = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}
# Sums of at most 64 products in float32.
SUMS = 1e-6


@pytest.fixture(scope="module", params=[800, 750], ids=["sm_80", "sm_75"])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """SM 75 has no asynchronous copies, and multiplies bfloat16 without tensor cores."""
    flags = ("-O2", "-fPIC", "-shared", f"-DEFFEXPORT_EMULATED={request.param}")
    return ctypes.CDLL(str(build("tile", *flags)))


@pytest.mark.requires("native")
@pytest.mark.parametrize(
    "columns", [64, 40, 44, 38, 37], ids=["whole chunks", "a part", "8 bytes", "4 bytes", "elements"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_numpy(library: ctypes.CDLL, dtype: np.dtype, columns: int) -> None:
    random = np.random.default_rng(columns)
    left, right = (random.standard_normal((rows, columns)).astype(dtype) for rows in (32, 64))
    x, y = np.zeros((32, 64)), np.zeros((64, 64))
    x[:, :columns], y[:, :columns] = left, right
    expected = (x[:, :48] @ y[:, :48].T, x[:, :48] @ y[8:56], x[:, :32].T @ y[:32], x @ y.T @ y)
    limits = (SUMS, SUMS, SUMS, SUMS + ROUNDED_WEIGHTS[dtype.name])
    for seed in range(4):
        library.set_schedule(seed, ALL_BLOCKS)
        for product, (wanted, limit) in enumerate(zip(expected, limits, strict=True)):
            out = np.full((32, 64), np.nan, np.float32)
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in (left, right, out)]
            assert library.tile_products(DTYPES.index(dtype), *pointers[:2], columns, product, pointers[2]) == 0
            np.testing.assert_array_less(np.abs(out - wanted), limit * np.abs(wanted).max(), f"product {product}")


@pytest.mark.requires("nvcc")
@pytest.mark.xdist_group("nvcc")
@pytest.mark.parametrize(
    ("architecture", "products"),
    [
        (75, {"float16": {"m16n8k8.row.col.f32.f16.f16.f32"}, "bfloat16": set()}),
        (80, {"float16": {"m16n8k16.row.col.f32.f16.f16.f32"}, "bfloat16": {"m16n8k16.row.col.f32.bf16.bf16.f32"}}),
    ],
)
def test_half_types_are_multiplied_on_tensor_cores_and_float32_never(
    architecture: int, products: dict[str, set[str]], tmp_path: Path
) -> None:
    strict = ["-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror"]
    command = [find_nvcc(), "-std=c++17", *strict, "-ptx", f"-arch=compute_{architecture}", "-I", PLUGINS]
    run(*command, NATIVE / "tile_products.cu", "-o", tmp_path / "tile.ptx")
    bodies = re.split(r"\.visible \.entry tile_products_(\w+)\(", (tmp_path / "tile.ptx").read_text(encoding="utf-8"))
    found = {
        dtype: set(re.findall(r"mma\.sync\.aligned\.([\w.]+)", body))
        for dtype, body in zip(bodies[1::2], bodies[2::2], strict=True)
    }
    assert found == {"float32": set(), **products}
