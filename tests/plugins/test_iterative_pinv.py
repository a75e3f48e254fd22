"""`effexport::IterativePinv`: the torch operator, its published accuracy, its schema and its body of standard nodes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from cuda_kernels import ALL_BLOCKS
from emulated_plugins import emulated_op
from implementations import exact, implementation
from kernel_sessions import session
from one_node import one_node_model
from slow_cases import named
from torch import Tensor

from effexport.plugins.contract import Case
from effexport.plugins.iterative_pinv.contract import CONTRACT
from effexport.plugins.iterative_pinv.op import iterative_pinv, onnx_function_body
from effexport.plugins.ops import CUDA_OPS, DOMAIN, FLOAT_TYPES

OP = "IterativePinv"
# fp32 unit roundoff 6e-8 times the largest gain of six steps from the start value, (13/4)^6 = 1178.
AGAINST_FLOAT64 = 1e-4


def softmax_matrices(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Inputs as from Nyströmformer: rows that add up to one, and the largest column sum of each matrix."""
    a, scale = CONTRACT.inputs(Case((count, size, 6), kind="softmax"), "cpu").values()
    return a, scale


def pinv(how: str, a: Tensor, scale: Tensor, iterations: int = 6, *, max_blocks: int = ALL_BLOCKS) -> np.ndarray:
    case = Case((*a.shape[:2], iterations))
    options = {} if how == "kernel" else {"max_blocks": max_blocks}
    z: np.ndarray = implementation(OP, how).run(case, {"A": a, "scale": scale}, **options)
    return z


def error(how: str, a: Tensor, scale: Tensor) -> float:
    """Of a matrix or of several alike: the largest difference as a fraction of the largest value."""
    expected = exact(CONTRACT, Case((*a.shape[:2], 6)), {"A": a, "scale": scale})
    return relative_error(torch.from_numpy(pinv(how, a, scale)), torch.from_numpy(expected))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def product_of_norms(a: Tensor) -> Tensor:
    """The divisor with which every matrix converges."""
    return (a.abs().sum(dim=1).max() * a.abs().sum(dim=2).max()).reshape(1, 1, 1)


def near_singular(m: int) -> dict[str, Tensor]:
    """Matrices of many singular values at or near zero."""
    random = softmax_matrices(1, m)[0][0]
    source = torch.Generator().manual_seed(m)
    few = torch.rand(m, 3, generator=source) @ torch.rand(3, m, generator=source)
    u, v = (torch.linalg.qr(torch.randn(m, m, generator=source, dtype=torch.float64)).Q for _ in range(2))
    logits = torch.randn(m, m, generator=source)
    return {
        "equal rows": torch.full((m, m), 1 / m),
        **{f"nearly uniform, {s}": torch.softmax(s * logits, dim=-1) for s in (1e-7, 1e-6, 1e-5, 1e-4, 1e-2)},
        "rank three": few / few.sum(dim=-1, keepdim=True),
        "singular values from 1 to 1e-8": ((u * torch.logspace(0, -8, m, dtype=torch.float64)) @ v.T).float(),
        "repeated rows": torch.cat([random[: m // 2], random[: m - m // 2]]),
        "nearly the identity": torch.full((m, m), 1e-3 / m) + 0.999 * torch.eye(m),
        "one large column": torch.eye(m)[torch.zeros(m, dtype=torch.long)],
    }


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("m", [2, 31, 63, 64, 100, 128])
def test_the_kernel_is_as_exact_for_near_singular_matrices_as_for_others(m: int) -> None:
    """Roundings along small singular values grow by 13/4 per step, 1178 in all: the kernel keeps Z in float64. Torch
    operator, body and CUDA kernels do not, see the contract."""
    for kind, a in near_singular(m).items():
        with named(kind):
            assert error("kernel", a[None], product_of_norms(a[None])) <= 1e-5


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("m", [200, 384])
def test_equal_terms_of_long_sums_do_not_add_up_their_rounding(m: int) -> None:
    # of more than 64 terms; in one sum from end to end, m = 384 was 1.9e-5 off in every element, and m = 200 1.3e-5
    a = torch.full((1, m, m), 1 / m)
    assert error("kernel", a, a.sum(dim=1).amax().reshape(1, 1, 1)) <= 4e-6


@pytest.mark.requires("native", "onnx", "ort")
def test_the_kernel_runs_six_iterations_without_the_attribute() -> None:
    a, scale = (x.numpy() for x in softmax_matrices(2, 16))
    feeds = {"A": a, "scale": scale}
    (z,) = session(one_node_model(OP, feeds, body=False)).run(None, feeds)
    np.testing.assert_array_equal(z, pinv("kernel", *map(torch.from_numpy, (a, scale))))


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_the_kernel_refuses_nan_and_infinity_in_every_type(dtype: str) -> None:
    case = Case((3, 5, 6), kind="softmax", dtype=dtype)
    inputs, run = CONTRACT.inputs(case, "cpu"), implementation(OP, "kernel").run
    for value in (np.nan, np.inf, -np.inf):
        of_scale, of_matrix = ({name: x.clone() for name, x in inputs.items()} for _ in range(2))
        of_scale["scale"][1] = of_matrix["A"][2, 4, 4] = value
        with named(value):
            with pytest.raises(Exception, match=r"scale\[1\] is NaN or infinite; expected a number"):
                run(case, of_scale)
            with pytest.raises(Exception, match="matrix 2 of A holds NaN or infinity"):
                run(case, of_matrix)


@pytest.mark.requires("native")
@pytest.mark.parametrize("m", [31, 64, 65])
def test_tensor_cores_that_round_towards_zero_keep_the_stated_errors(m: int) -> None:
    library = implementation(OP, "cuda").library
    library.set_truncation.argtypes = [ctypes.c_bool]
    library.set_truncation(True)
    try:
        for kind, limit in (("softmax", 1e-5), ("nearly equal rows", 3e-4)):
            assert error("cuda", *CONTRACT.inputs(Case((1, m, 6), kind=kind), "cpu").values()) <= limit
    finally:
        library.reset_settings()


@pytest.mark.requires("native")
@pytest.mark.parametrize("shape", [(1, 1, 17), (1, 17, 1)], ids=["columns", "rows"])
def test_numbers_beyond_the_range_of_halves_are_as_exact_as_others(shape: tuple[int, ...]) -> None:
    for exponents in ((-30, -10), (0, 15), (-15, 15)):
        a = softmax_matrices(1, 17)[0] * 10 ** torch.linspace(*exponents, 17, dtype=torch.float64).reshape(shape)
        # float32 products of 17 terms
        assert error("cuda", a.float(), product_of_norms(a).float()) <= 2e-6, exponents


@pytest.mark.requires("native")
# Up to m = 128, numbers are sums of two halves: 22 bits. Above, adding zeros does not round, so all bits are known.
@pytest.mark.parametrize(("m", "limit"), [(5, 2**-21), (64, 2**-21), (65, 2**-21), (129, 0)])
def test_the_start_divides_before_it_multiplies(m: int, limit: float) -> None:
    # the steps of a diagonal matrix are those of its entries
    sigma = np.float32(0.7) + np.arange(m, dtype=np.float32) / np.float32(3 * m)
    z0 = (np.float32(1) / np.float32(3)) * sigma
    p = sigma * z0
    u = np.float32(13) - p * (np.float32(15) - p * (np.float32(7) - p))
    z = pinv("cuda", torch.from_numpy(np.diag(sigma)[None]), torch.full((1, 1, 1), 3.0), iterations=1)[0]
    np.testing.assert_allclose(z, np.diag(np.float32(0.25) * z0 * u), rtol=limit, atol=0)


@pytest.mark.requires("native")
@pytest.mark.parametrize("m", [2, 31, 64, 65, 129])
def test_what_is_not_finite_stays_in_its_matrix(m: int) -> None:
    a, scale = softmax_matrices(4, m)
    # one block after the other, so that remains of the poisoned matrix would be found
    clean = pinv("cuda", a, scale, 2, max_blocks=1)
    scale[2] = 0
    for poison in (np.nan, np.inf):
        a[1, m // 2, m - 1] = poison
        z = pinv("cuda", a, scale, 2, max_blocks=1)
        np.testing.assert_array_equal(z[[0, 3]], clean[[0, 3]])
        assert not np.isfinite(z[1]).any()
        assert not np.isfinite(z[2]).all()


@pytest.mark.requires("native")
def test_scratch_memory_does_not_grow_with_the_batch() -> None:
    cuda = implementation(OP, "cuda")
    # what a call allows holds for this call alone
    emulated_op(CUDA_OPS[OP]).calls_of_launch_cuda("float32", (1, 64, 6), (), allowed_shared=48 << 10)

    def scratch_bytes(count: int, m: int) -> int:
        return int(cuda.scratch_bytes(Case((count, m, 6))))

    assert scratch_bytes(1000, 128) == scratch_bytes(0, 130) == scratch_bytes(3, 0) == 0
    assert scratch_bytes(1, 129) == 4 * 136 * 136 * 4  # four buffers, padded to a multiple of 8
    assert scratch_bytes(256, 130) == scratch_bytes(100_000, 130) == 256 * scratch_bytes(1, 130)
    assert scratch_bytes(1, 46336) == 4 * 46336**2 * 4


# algorithms.md 1.2: recovered fraction of 1/σ from the start value σ / 1.2. The operator acts on each
# singular value alone, so any matrix with these singular values shows it.
SIX_STEPS = {0.1: 1.000, 0.05: 0.908, 0.03: 0.583, 0.02: 0.324, 0.01: 0.093, 0.005: 0.024, 0.001: 0.001}
RECOVERED = [
    *((6, sigma, fraction, 5e-4) for sigma, fraction in SIX_STEPS.items()),  # printed to three digits
    *((8, sigma, fraction, 5e-3) for sigma, fraction in {0.02: 0.98, 0.01: 0.64}.items()),  # to two digits
    (12, 0.001, 0.68, 5e-3),
]


def test_small_singular_values_are_recovered_as_published() -> None:
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    for iterations, sigma, fraction, printed in RECOVERED:
        singular = torch.tensor([1.0, 0.5, sigma], dtype=torch.float64)
        a = (u * singular) @ v.T
        z = iterative_pinv(a[None], torch.tensor([[[1.2]]], dtype=torch.float64), iterations)[0]
        # Z = V f(Σ) Uᵀ
        recovered = torch.diagonal(v.T @ z @ u) * singular
        with named(f"{iterations} steps, {sigma}"):
            assert float(recovered[2]) == pytest.approx(fraction, abs=printed)
            assert recovered[:2].tolist() == pytest.approx([1.0, 1.0], abs=1e-6)


@pytest.mark.parametrize(("c", "dtype"), [(1.2, torch.float32), (1.2, torch.float64)])
def test_a_diagonal_matrix_follows_the_scalar_iteration(c: float, dtype: torch.dtype) -> None:
    sigmas = [1.0, *SIX_STEPS]
    expected = []
    for sigma in sigmas:
        z = sigma / c
        for _ in range(6):
            p = sigma * z
            z = z / 4 * (13 - p * (15 - p * (7 - p)))
        expected.append(z)
    z = iterative_pinv(torch.diag(torch.tensor(sigmas, dtype=dtype))[None], torch.tensor([[[c]]], dtype=dtype), 6)[0]
    # a dozen roundings per step
    torch.testing.assert_close(torch.diagonal(z).tolist(), expected, rtol=200 * torch.finfo(dtype).eps, atol=0)
    assert torch.count_nonzero(z) == len(sigmas)


def test_a_zero_row_and_column_leave_the_rest_alone() -> None:
    # absent landmarks of a short sequence
    a, scale = softmax_matrices(2, 5)
    padded = torch.nn.functional.pad(a, (0, 3, 0, 3))
    z = iterative_pinv(padded, scale, 6)
    assert relative_error(z[:, :5, :5], iterative_pinv(a, scale, 6)) <= AGAINST_FLOAT64
    assert torch.count_nonzero(z[:, 5:]) == torch.count_nonzero(z[:, :, 5:]) == 0


@pytest.mark.parametrize("iterations", [1, 6])
def test_gradients_equal_finite_differences(iterations: int) -> None:
    a, scale = (x.double().requires_grad_() for x in softmax_matrices(2, 3))
    assert torch.autograd.gradcheck(lambda x, c: iterative_pinv(x, c, iterations), (a, scale))
    # of one input alone
    assert torch.autograd.gradcheck(lambda x: iterative_pinv(x, scale.detach(), iterations), (a,))
    assert torch.autograd.gradcheck(lambda c: iterative_pinv(a.detach(), c, iterations), (scale,))


@pytest.mark.requires("onnx")
def test_the_body_has_four_products_in_each_step() -> None:
    from onnx import helper

    node = helper.make_node(OP, ["A", "scale"], ["Z"], domain=DOMAIN, iterations=6)
    assert sum(node.op_type == "MatMul" for node in onnx_function_body([node], 20).node) == 24
