"""The CUDA kernels of effexport::IterativePinv, emulated."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from cuda_kernels import ALL_BLOCKS, DTYPES, Emulated, assert_guard_is_intact, guarded


class EmulatedPinv(Emulated):
    op = "iterative_pinv"

    def __init__(self) -> None:
        super().__init__()
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self.library.iterative_pinv_scratch_bytes.argtypes = [integer, integer]
        self.library.iterative_pinv_scratch_bytes.restype = ctypes.c_size_t
        self.library.set_truncation.argtypes = [ctypes.c_bool]
        for name in DTYPES.values():
            function = getattr(self.library, f"iterative_pinv_{name}")
            function.argtypes = [pointer, pointer, integer, integer, integer, pointer, pointer]

    def pinv(
        self, a: np.ndarray, scale: np.ndarray, iterations: int = 6, *, seed: int = 0, max_blocks: int = ALL_BLOCKS
    ) -> np.ndarray:
        count, m, _ = a.shape
        z, whole = guarded(a.shape, a.dtype)
        scratch_bytes = self.library.iterative_pinv_scratch_bytes(count, m)
        scratch, whole_scratch = guarded((scratch_bytes // 4,), np.dtype(np.float32))
        self.library.set_schedule(seed, max_blocks)
        function = getattr(self.library, f"iterative_pinv_{DTYPES[a.dtype]}")
        inputs = (np.ascontiguousarray(a), np.ascontiguousarray(scale))
        error = function(*(x.ctypes.data for x in inputs), count, m, iterations, scratch.ctypes.data, z.ctypes.data)
        assert error == 0
        assert_guard_is_intact(whole)
        assert_guard_is_intact(whole_scratch)
        return z


@pytest.fixture(scope="module")
def emulated() -> EmulatedPinv:
    return EmulatedPinv()


def exact_pinv(a: np.ndarray, scale: np.ndarray, iterations: int = 6) -> np.ndarray:
    """Z0 = Aᵀ / c, Z ← Z/4 (13 I − P (15 I − P (7 I − P))), P = A Z, in float64."""
    a = a.astype(np.float64)
    identity = np.eye(a.shape[-1])
    z = a.swapaxes(1, 2) / scale.astype(np.float64)
    for _ in range(iterations):
        p = a @ z
        z = z / 4 @ (13 * identity - p @ (15 * identity - p @ (7 * identity - p)))
    return z


def softmax_matrices(count: int, m: int, dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """What Nyströmformer hands over: rows that add up to one, and the largest column sum of each matrix."""
    logits = 2 * np.random.default_rng(m).standard_normal((count, m, m))
    a = np.exp(logits - logits.max(axis=-1, keepdims=True))
    a /= a.sum(axis=-1, keepdims=True)
    return a.astype(dtype), a.sum(axis=1).max(axis=-1).reshape(count, 1, 1).astype(dtype)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference as a fraction of the largest value."""
    actual = actual.astype(np.float64)
    assert np.isfinite(actual).all()
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


# around the sides of tiles, of 16 and of 32; above 64 another kernel computes
SIZES = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128]


@pytest.mark.requires("native")
@pytest.mark.parametrize("m", SIZES)
def test_the_iteration_computes_the_formula(emulated: EmulatedPinv, m: int) -> None:
    a, scale = softmax_matrices(2 if m <= 32 else 1, m)
    for iterations in (1, 6):
        # float32 products of at most 128 terms; later steps shrink the roundings of earlier ones
        assert relative_error(emulated.pinv(a, scale, iterations), exact_pinv(a, scale, iterations)) <= 1e-5


@pytest.mark.requires("native")
@pytest.mark.parametrize("iterations", range(1, 9))
def test_any_number_of_steps_is_taken(emulated: EmulatedPinv, iterations: int) -> None:
    a, scale = softmax_matrices(7 if iterations == 1 else 1, 17)
    assert relative_error(emulated.pinv(a, scale, iterations), exact_pinv(a, scale, iterations)) <= 1e-5


def nearly_equal_rows(m: int) -> tuple[np.ndarray, np.ndarray]:
    a = (1 / m + 1e-6 * softmax_matrices(1, m)[0]).astype(np.float32)
    return a, a.sum(axis=1).max(axis=-1).reshape(1, 1, 1)


@pytest.mark.requires("native")
@pytest.mark.parametrize("m", [31, 64])
def test_tensor_cores_that_round_towards_zero_keep_the_stated_errors(emulated: EmulatedPinv, m: int) -> None:
    emulated.library.set_truncation(True)
    try:
        for inputs, limit in [(softmax_matrices(1, m), 1e-5), (nearly_equal_rows(m), 3e-4)]:
            # the contract's limits
            assert relative_error(emulated.pinv(*inputs), exact_pinv(*inputs)) <= limit
    finally:
        emulated.library.set_truncation(False)


@pytest.mark.requires("native")
@pytest.mark.parametrize("exponents", [(-30, -10), (0, 15), (-15, 15)])
@pytest.mark.parametrize("shape", [(1, 1, 17), (1, 17, 1)], ids=["columns", "rows"])
def test_numbers_beyond_the_range_of_halves_are_as_exact_as_others(
    emulated: EmulatedPinv, shape: tuple[int, ...], exponents: tuple[int, int]
) -> None:
    a = softmax_matrices(1, 17)[0] * 10 ** np.linspace(*exponents, 17).reshape(shape)
    # with the product of both norms every matrix converges
    scale = (a.sum(axis=1).max() * a.sum(axis=2).max()).reshape(1, 1, 1)
    a, scale = a.astype(np.float32), scale.astype(np.float32)
    # float32 products of 17 terms
    assert relative_error(emulated.pinv(a, scale), exact_pinv(a, scale)) <= 2e-6


@pytest.mark.requires("native")
@pytest.mark.parametrize(("dtype", "rounding"), [(np.float16, 2**-11), (ml_dtypes.bfloat16, 2**-8)])
@pytest.mark.parametrize("m", [1, 2, 31, 63, 64, 100])
def test_half_precision_is_rounded_only_at_the_end(
    emulated: EmulatedPinv, m: int, dtype: type, rounding: float
) -> None:
    a, scale = softmax_matrices(1, m, dtype)
    z = emulated.pinv(a, scale)
    assert z.dtype == a.dtype
    assert relative_error(z, exact_pinv(a, scale)) <= rounding + 1e-5


@pytest.mark.requires("native")
# Up to m = 64, numbers are sums of two halves: 22 bits. Above, adding zeros does not round, so all bits are known.
@pytest.mark.parametrize(("m", "limit"), [(5, 2**-21), (64, 2**-21), (65, 0)])
def test_the_start_divides_before_it_multiplies(emulated: EmulatedPinv, m: int, limit: float) -> None:
    # the steps of a diagonal matrix are those of its entries
    sigma = np.float32(0.7) + np.arange(m, dtype=np.float32) / np.float32(3 * m)
    scale = np.full((1, 1, 1), 3, np.float32)
    z0 = (np.float32(1) / scale[0, 0, 0]) * sigma
    p = sigma * z0
    u = np.float32(13) - p * (np.float32(15) - p * (np.float32(7) - p))
    z = emulated.pinv(np.diag(sigma)[None], scale, iterations=1)[0]
    np.testing.assert_allclose(z, np.diag(np.float32(0.25) * z0 * u), rtol=limit, atol=0)


@pytest.mark.requires("native")
@pytest.mark.parametrize("case", ["equal rows", "nearly equal rows", "one large column", "zero", "identity"])
@pytest.mark.parametrize("m", [31, 64, 100])
def test_near_singular_matrices_stay_finite(emulated: EmulatedPinv, m: int, case: str) -> None:
    a = {
        "equal rows": np.full((m, m), 1 / m),
        "nearly equal rows": 1 / m + 1e-6 * softmax_matrices(1, m)[0][0],
        "one large column": np.eye(m)[np.zeros(m, int)],
        "zero": np.zeros((m, m)),
        "identity": np.eye(m),
    }[case].astype(np.float32)[None]
    scale = a.sum(axis=1).max(axis=-1).clip(np.finfo(np.float32).tiny).reshape(1, 1, 1)
    z, expected = emulated.pinv(a, scale), exact_pinv(a, scale)
    assert np.isfinite(z).all()
    # fp32 unit roundoff 6e-8 times the largest gain of six steps from the start value, (13/4)^6 = 1178
    assert np.abs(z - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.requires("native")
@pytest.mark.parametrize("m", [2, 31, 64, 100])
def test_a_matrix_has_the_same_bits_alone_and_among_others(emulated: EmulatedPinv, m: int) -> None:
    a, scale = softmax_matrices(3, m)
    together = emulated.pinv(a, scale, 2)
    # other schedules, and blocks that take several matrices in turn
    for seed, max_blocks in [(1, ALL_BLOCKS), (2, 2), (3, 1)]:
        np.testing.assert_array_equal(emulated.pinv(a, scale, 2, seed=seed, max_blocks=max_blocks), together)
    for i in range(3):
        np.testing.assert_array_equal(emulated.pinv(a[i : i + 1], scale[i : i + 1], 2), together[i : i + 1])


@pytest.mark.requires("native")
@pytest.mark.parametrize("m", [2, 31, 64, 100])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_matrix(emulated: EmulatedPinv, m: int, poison: float) -> None:
    a, scale = softmax_matrices(4, m)
    # one block after the other, so that remains of the poisoned matrix would be found
    clean = emulated.pinv(a, scale, 2, max_blocks=1)
    a[1, m // 2, m - 1] = poison
    scale[2] = 0
    z = emulated.pinv(a, scale, 2, max_blocks=1)
    np.testing.assert_array_equal(z[[0, 3]], clean[[0, 3]])
    assert not np.isfinite(z[1]).any()
    assert not np.isfinite(z[2]).all()


@pytest.mark.requires("native")
def test_unaligned_matrices_are_read_element_by_element(emulated: EmulatedPinv) -> None:
    for dtype in DTYPES:
        a, scale = softmax_matrices(2, 8, dtype)
        moved = np.empty(a.size + 1, dtype)[1:].reshape(a.shape)
        moved[:] = a
        assert moved.ctypes.data % (4 * dtype.itemsize) != 0
        np.testing.assert_array_equal(emulated.pinv(moved, scale), emulated.pinv(a, scale))


@pytest.mark.requires("native")
@pytest.mark.parametrize(("count", "m"), [(0, 8), (3, 0), (0, 0)])
def test_the_iteration_accepts_empty_inputs(emulated: EmulatedPinv, count: int, m: int) -> None:
    assert emulated.library.iterative_pinv_float32(None, None, count, m, 6, None, None) == 0
    assert emulated.library.iterative_pinv_scratch_bytes(count, m) == 0


@pytest.mark.requires("native")
@pytest.mark.parametrize("arguments", [(2**31, 4, 6), (1, 46337, 6), (1, 4, 0), (1, 4, 2**31), (-1, 4, 6)])
def test_the_iteration_refuses_what_its_kernel_cannot_count(
    emulated: EmulatedPinv, arguments: tuple[int, int, int]
) -> None:
    assert emulated.library.iterative_pinv_float32(None, None, *arguments, None, None) == 1


@pytest.mark.requires("native")
def test_scratch_memory_does_not_grow_with_the_batch(emulated: EmulatedPinv) -> None:
    scratch_bytes = emulated.library.iterative_pinv_scratch_bytes
    assert scratch_bytes(1000, 64) == 0
    assert scratch_bytes(1, 65) == 4 * 72 * 72 * 4  # four buffers, padded to a multiple of 8
    assert scratch_bytes(256, 128) == scratch_bytes(100_000, 128) == 256 * scratch_bytes(1, 128)
    assert scratch_bytes(1, 46336) == 4 * 46336**2 * 4
