"""The kernels of examples/my_operator: on the CPU, and the CUDA kernel in the emulation."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cuda_kernels import ALL_BLOCKS, DTYPES, ROOT, assert_guard_is_intact, build, guarded

pytestmark = pytest.mark.requires("native")
EPSILON = 1e-5
# Of one rounding of the result.
ROUNDING = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
# Of the arithmetic in float32, of results of about 1: a sum of 1000 squares, an exponential and four products.
ARITHMETIC = 1e-6


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    example = f"-I{ROOT / 'examples' / 'my_operator'}"
    library = ctypes.CDLL(str(build("my_operator", "-O2", "-fPIC", "-shared", example)))
    library.set_schedule.argtypes = [ctypes.c_uint, ctypes.c_uint]
    for name in DTYPES.values():
        function = getattr(library, f"run_{name}")
        function.argtypes = [ctypes.c_bool, ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p]
    return library


def run(
    library: ctypes.CDLL, on_cuda: bool, inputs: tuple[np.ndarray, ...], *, seed: int = 0, max_blocks: int = ALL_BLOCKS
) -> np.ndarray:
    """The operator, into an output of NaN that must not be exceeded."""
    x = inputs[0]
    out, whole = guarded(x.shape, x.dtype)
    pointers = (ctypes.c_void_p * 4)(*(array.ctypes.data for array in (*inputs, out)))
    library.set_schedule(seed, max_blocks)
    status = getattr(library, f"run_{DTYPES[x.dtype]}")(on_cuda, (ctypes.c_int64 * 2)(*x.shape), EPSILON, pointers)
    assert status == 0
    assert_guard_is_intact(whole)
    return out


def make_inputs(rows: int, channels: int, dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """x, gate and weight. The first row is as small as epsilon, and a gate of it beyond ±88, where exp overflows."""
    random = np.random.default_rng((rows, channels))
    x, gate = random.standard_normal((2, rows, channels))
    x[0] *= EPSILON**0.5
    gate[0, 0] = -100 if channels % 2 else 100
    return tuple(array.astype(dtype) for array in (x, gate, random.uniform(0.5, 1.5, channels)))


def formula(inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    x, gate, weight = (array.astype(np.float64) for array in inputs)
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPSILON) * weight * gate / (1 + np.exp(-gate))


@pytest.mark.parametrize("on_cuda", [False, True], ids=["cpu", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize("channels", [1, 63, 64, 100, 1000])
def test_a_kernel_computes_the_formula(library: ctypes.CDLL, on_cuda: bool, dtype: np.dtype, channels: int) -> None:
    inputs = make_inputs(7, channels, dtype)
    exact = formula(inputs)
    error = np.abs(run(library, on_cuda, inputs).astype(np.float64) - exact)
    assert np.all(error <= ROUNDING[DTYPES[dtype]] * np.abs(exact) + ARITHMETIC * np.maximum(1, np.abs(exact)))


def test_neither_the_order_of_threads_nor_the_grid_changes_a_bit(library: ctypes.CDLL) -> None:
    inputs = make_inputs(11, 100, np.dtype(np.float32))
    expected = run(library, True, inputs)
    for seed, max_blocks in ((1, ALL_BLOCKS), (2, 1), (3, 2)):
        assert run(library, True, inputs, seed=seed, max_blocks=max_blocks).tobytes() == expected.tobytes()


def test_nan_stays_in_its_token(library: ctypes.CDLL) -> None:
    inputs = make_inputs(4, 63, np.dtype(np.float32))
    inputs[0][2, 5] = np.nan
    for on_cuda in (False, True):
        assert np.isnan(run(library, on_cuda, inputs)).all(axis=1).tolist() == [False, False, True, False]
