"""`effexport::IterativePinv`: the torch operator, its published accuracy, its schema and its body of standard nodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from one_node import run_body
from torch import Tensor

from effexport.plugins.iterative_pinv.op import iterative_pinv, onnx_function_body
from effexport.plugins.ops import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE

# fp32 unit roundoff 6e-8 times the largest gain of six steps from the start value, (13/4)^6 = 1178.
AGAINST_FLOAT64 = 1e-4
FORBIDDEN = {"TopK", "Loop", "CumSum", "Scan", "Sort", "If", "ReduceLogSumExp"}


def slow_pinv(a: Tensor, scale: Tensor, iterations: int) -> Tensor:
    """Z0 = Aᵀ / c, Z ← Z/4 (13 I − P (15 I − P (7 I − P))), P = A Z, a matrix at a time in float64."""
    out = []
    for matrix, c in zip(a.double(), scale.double().flatten(), strict=True):
        identity = torch.eye(len(matrix), dtype=torch.float64)
        z = matrix.T / c
        for _ in range(iterations):
            p = matrix @ z
            z = z @ (13 * identity - p @ (15 * identity - p @ (7 * identity - p))) / 4
        out.append(z)
    return torch.stack(out)


def softmax_matrices(count: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What Nyströmformer hands over: rows that add up to one, and the largest column sum of each matrix."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.softmax(2 * torch.randn(count, size, size, generator=generator), dim=-1)
    return a, a.sum(dim=-2).amax(dim=-1).reshape(count, 1, 1)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference as a fraction of the largest value."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("iterations", [1, 2, 6, 8, 12])
@pytest.mark.parametrize("size", [1, 2, 31, 63, 64, 100, 128])
def test_the_operator_computes_the_formula(size: int, iterations: int) -> None:
    a, scale = softmax_matrices(3, size)
    exact = iterative_pinv(a.double(), scale.double(), iterations)
    expected = slow_pinv(a, scale, iterations)
    assert exact.dtype == torch.float64
    # the same operations in another order, in float64: 1e-16 times gains of at most (13/4)^12 = 1.4e6
    assert relative_error(exact, expected) <= 1e-9
    if iterations <= 6:
        assert relative_error(iterative_pinv(a, scale, iterations), expected) <= AGAINST_FLOAT64


# algorithms.md 1.2: recovered fraction of 1/σ from the start value σ / 1.2. The operator acts on each
# singular value alone, so any matrix with these singular values shows it.
SIX_STEPS = {0.1: 1.000, 0.05: 0.908, 0.03: 0.583, 0.02: 0.324, 0.01: 0.093, 0.005: 0.024, 0.001: 0.001}
RECOVERED = [
    *((6, sigma, fraction, 5e-4) for sigma, fraction in SIX_STEPS.items()),  # printed to three digits
    *((8, sigma, fraction, 5e-3) for sigma, fraction in {0.02: 0.98, 0.01: 0.64}.items()),  # to two digits
    (12, 0.001, 0.68, 5e-3),
]


@pytest.mark.parametrize(("iterations", "sigma", "fraction", "printed"), RECOVERED)
def test_small_singular_values_are_recovered_as_published(
    iterations: int, sigma: float, fraction: float, printed: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    singular = torch.tensor([1.0, 0.5, sigma], dtype=torch.float64)
    a = (u * singular) @ v.T
    z = iterative_pinv(a[None], torch.tensor([[[1.2]]], dtype=torch.float64), iterations)[0]
    # Z = V f(Σ) Uᵀ
    recovered = torch.diagonal(v.T @ z @ u) * singular
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


@pytest.mark.parametrize("case", ["equal rows", "rank one of many", "zero", "one large column", "identity"])
def test_near_singular_matrices_stay_finite_and_within_the_gain_bound(case: str) -> None:
    size = 32
    a = {
        "equal rows": torch.full((size, size), 1 / size),
        "rank one of many": torch.softmax(1e-4 * softmax_matrices(1, size)[0][0], dim=-1),
        "zero": torch.zeros(size, size),
        "one large column": torch.nn.functional.one_hot(torch.zeros(size, dtype=torch.long), size).float(),
        "identity": torch.eye(size),
    }[case][None]
    scale = a.sum(dim=-2).amax(dim=-1).clamp(min=torch.finfo(torch.float32).tiny).reshape(1, 1, 1)
    z = iterative_pinv(a, scale, 6)
    expected = slow_pinv(a, scale, 6)
    assert torch.isfinite(z).all()
    start = float((a.transpose(1, 2) / scale).abs().max())
    # ‖Z6‖ ≤ (13/4)^6 ‖Z0‖ in the spectral norm, which is at most `size` times the largest entry
    assert float(z.abs().max()) <= 1178.4 * size * start
    assert float((z.double() - expected).abs().max()) <= AGAINST_FLOAT64 * max(1.0, float(expected.abs().max()))


def test_a_zero_row_and_column_leave_the_rest_alone() -> None:
    # absent landmarks of a short sequence
    a, scale = softmax_matrices(2, 5)
    padded = torch.nn.functional.pad(a, (0, 3, 0, 3))
    z = iterative_pinv(padded, scale, 6)
    assert relative_error(z[:, :5, :5], iterative_pinv(a, scale, 6)) <= AGAINST_FLOAT64
    assert torch.count_nonzero(z[:, 5:]) == torch.count_nonzero(z[:, :, 5:]) == 0


@pytest.mark.parametrize(
    ("a", "scale"),
    [
        (softmax_matrices(2, 4)[0], torch.ones(2, 1, 1)),
        (softmax_matrices(1, 1)[0], torch.ones(1, 1, 1)),
        (softmax_matrices(2, 4)[0].double().requires_grad_(), torch.ones(2, 1, 1).double().requires_grad_()),
        (softmax_matrices(2, 4)[0].transpose(1, 2), torch.ones(2, 1, 1)),
        (torch.zeros(0, 4, 4), torch.ones(0, 1, 1)),
    ],
)
def test_the_operator_keeps_the_rules_of_torch_library(a: Tensor, scale: Tensor) -> None:
    torch.library.opcheck(torch.ops.effexport.iterative_pinv.default, (a, scale, 6))


@pytest.mark.parametrize("iterations", [1, 6])
def test_gradients_equal_finite_differences(iterations: int) -> None:
    a, scale = (x.double().requires_grad_() for x in softmax_matrices(2, 3))
    assert torch.autograd.gradcheck(lambda x, c: iterative_pinv(x, c, iterations), (a, scale))
    # of one input alone
    assert torch.autograd.gradcheck(lambda x: iterative_pinv(x, scale.detach(), iterations), (a,))
    assert torch.autograd.gradcheck(lambda c: iterative_pinv(a.detach(), c, iterations), (scale,))


@pytest.mark.parametrize(
    ("a", "scale", "iterations", "text"),
    [
        (torch.ones(4, 4), torch.ones(1, 1, 1), 6, r"A has shape \(4, 4\); expected \[N, m, m\]"),
        (torch.ones(2, 4, 3), torch.ones(2, 1, 1), 6, r"A has shape \(2, 4, 3\); expected \[N, m, m\]"),
        (torch.ones(2, 4, 4), torch.ones(2), 6, r"scale has shape \(2,\); expected \[2, 1, 1\]"),
        (torch.ones(2, 4, 4), torch.ones(1, 1, 1), 6, r"scale has shape \(1, 1, 1\); expected \[2, 1, 1\]"),
        (torch.ones(2, 4, 4), torch.ones(2, 4, 1), 6, r"scale has shape \(2, 4, 1\); expected \[2, 1, 1\]"),
        (torch.ones(2, 4, 4), torch.ones(2, 1, 1).half(), 6, "scale is torch.float16 but A is torch.float32"),
        (torch.ones(2, 4, 4), torch.ones(2, 1, 1), 0, "iterations is 0; expected at least 1"),
    ],
)
def test_wrong_inputs_are_refused(a: Tensor, scale: Tensor, iterations: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        iterative_pinv(a, scale, iterations)


def pinv_model(opset: int, iterations: int = 6, element: int = 1, *, dims: tuple = ("N", "m", "m"), nodes: int = 1):
    """A model of `nodes` custom nodes on the same inputs, with their body attached."""
    from onnx import helper

    made = [
        helper.make_node(
            "IterativePinv",
            ["A", "scale"],
            [f"Z{i}"],
            domain=DOMAIN,
            **{"iterations": iterations, PLUGIN_NAMESPACE: DOMAIN},
        )
        for i in range(nodes)
    ]
    graph = helper.make_graph(
        made,
        "pinv",
        [
            helper.make_tensor_value_info("A", element, dims),
            helper.make_tensor_value_info("scale", element, (dims[0], 1, 1)),
        ],
        [helper.make_tensor_value_info(f"Z{i}", element, dims) for i in range(nodes)],
    )
    return helper.make_model(
        graph,
        functions=[onnx_function_body(made, opset)],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=helper.find_min_ir_version_for([helper.make_opsetid("", opset)], ignore_unknown=True),
    )


def ort_run(model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


@pytest.mark.requires("onnx")
@pytest.mark.requires("ort")
@pytest.mark.parametrize("opset", [18, 20, 24])
@pytest.mark.parametrize("size", [1, 2, 31, 63, 64, 100, 128])
def test_the_body_equals_the_operator_in_onnx_runtime(size: int, opset: int) -> None:
    import onnx

    model = pinv_model(opset)
    onnx.checker.check_model(model)
    for count in (1, 3):
        a, scale = softmax_matrices(count, size, seed=size)
        (z,) = ort_run(model, {"A": a.numpy(), "scale": scale.numpy()})
        # the same products, summed in another order by another library: a few roundings of the largest
        # entries, which later steps shrink, because the iteration corrects its own errors
        assert relative_error(torch.from_numpy(z), iterative_pinv(a, scale, 6)) <= 1e-5


@pytest.mark.requires("onnx")
@pytest.mark.requires("ort")
def test_the_body_repeats_as_often_as_the_node_says() -> None:
    a, scale = softmax_matrices(2, 16)
    for iterations in (1, 2, 12):
        (z,) = ort_run(pinv_model(20, iterations), {"A": a.numpy(), "scale": scale.numpy()})
        assert relative_error(torch.from_numpy(z), iterative_pinv(a, scale, iterations)) <= AGAINST_FLOAT64


@pytest.mark.requires("onnx")
@pytest.mark.requires("ort")
def test_the_body_accepts_an_empty_batch() -> None:
    (z,) = ort_run(pinv_model(20), {"A": np.zeros((0, 8, 8), np.float32), "scale": np.ones((0, 1, 1), np.float32)})
    assert z.shape == (0, 8, 8)


@pytest.mark.requires("onnx")
@pytest.mark.requires("ort")
@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_the_body_computes_in_float32_and_rounds_once(dtype: str, rounding: float) -> None:
    a, scale = (x.numpy().astype(dtype) for x in softmax_matrices(2, 16))
    z = run_body("IterativePinv", {"A": a, "scale": scale}, a.shape, iterations=6)
    assert z.dtype.name == dtype
    exact = slow_pinv(*(torch.from_numpy(x.astype(np.float32)) for x in (a, scale)), 6)
    assert relative_error(torch.from_numpy(z.astype(np.float32)), exact) <= rounding + AGAINST_FLOAT64


@pytest.mark.requires("onnx")
@pytest.mark.parametrize("opset", [18, 20, 24])
def test_the_body_holds_no_node_that_a_runtime_lacks_or_runs_serially(opset: int) -> None:
    body = pinv_model(opset).functions[0]
    kinds = {node.op_type for node in body.node}
    assert not kinds & FORBIDDEN
    assert not {kind for kind in kinds if kind.startswith("Random")}
    assert {node.domain for node in body.node} == {""}
    assert sum(node.op_type == "MatMul" for node in body.node) == 24
    assert [(entry.domain, entry.version) for entry in body.opset_import] == [("", opset)]


@pytest.mark.requires("onnx")
def test_nodes_with_different_iterations_cannot_share_a_body() -> None:
    from onnx import helper

    nodes = [helper.make_node("IterativePinv", ["A", "scale"], ["Z"], domain=DOMAIN, iterations=n) for n in (8, 6, 6)]
    with pytest.raises(ValueError, match=r"different iterations \[6, 8\] cannot share one body"):
        onnx_function_body(nodes, 20)
    assert len(pinv_model(20, nodes=2).functions) == 1


@pytest.mark.requires("onnx")
@pytest.mark.parametrize("dims", [("N", "m", "m"), (2, "m", "m"), ("N", 64, 64), (2, 64, 64)])
def test_shape_inference_keeps_symbolic_dimensions(dims: tuple) -> None:
    import onnx

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    register_schemas()  # the registry belongs to the process: a second call must not fail
    model = pinv_model(20, dims=dims)
    onnx.checker.check_model(model, full_check=True)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    tensor = inferred.graph.output[0].type.tensor_type
    assert tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim) == dims
    assert tensor.elem_type == onnx.TensorProto.FLOAT


@pytest.mark.requires("onnx")
def test_the_schema_says_what_the_operator_takes() -> None:
    import onnx

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    schema = onnx.defs.get_schema("IterativePinv", OPSET_VERSION, DOMAIN)
    assert [p.name for p in schema.inputs] == ["A", "scale"]
    assert [p.name for p in schema.outputs] == ["Z"]
    assert set(schema.attributes) == {"iterations", PLUGIN_NAMESPACE}
    # the same default as the torch operator's
    assert schema.attributes["iterations"].default_value.i == 6
    assert not schema.attributes[PLUGIN_NAMESPACE].required
