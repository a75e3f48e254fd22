"""`effexport::EluLinearAttention`: torch operator, body and CPU kernel, against the formula in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from kernel_sessions import ort_value, session
from torch import Tensor

from effexport.models.layers import fused_operators
from effexport.models.variants.linear.layer import LinearAttention
from effexport.models.variants.linear.spec import LinearSpec
from effexport.plugins.linear_attention.op import linear_attention, onnx_function_body, reference
from effexport.plugins.ops import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE

# As a share of the largest value: outputs are means of values with positive weights, so nothing cancels. Sums have 64
# or 128 terms in a row, with 6e-8 of rounding each and of either sign; 4e-7 was seen.
FP32 = 2e-6
# The result is rounded to 11 or 8 bits; the rest is float32.
LIMITS = {"float32": FP32, "float16": 2**-11 + FP32, "bfloat16": 2**-8 + FP32}
EPS = 1e-6
FORBIDDEN = {"TopK", "Loop", "CumSum", "Scan", "Sort", "If", "Where"}
# less than a block of the kernel, and not a multiple of a tile; a block; several; several slices of 1024 positions
LENGTHS = [1, 2, 63, 64, 100, 1000, 1024, 2500]
# registers exactly; less than one; with a rest; two tiles of the widest registers
HEAD_DIMS = [(64, 64), (32, 32), (1, 1), (40, 24), (100, 100), (128, 128), (16, 3)]
NEEDS_RUNTIME = pytest.mark.requires("onnx", "ort")
NEEDS_KERNEL = pytest.mark.requires("onnx", "ort", "native")


@dataclass(frozen=True)
class Case:
    """Inputs as NumPy arrays: q, k [batch, heads, seq, head_dim], v, keep [batch, seq]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    keep: np.ndarray

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        return {"q": self.q, "k": self.k, "v": self.v, "keep": self.keep}

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return tuple(torch.from_numpy(x) for x in self.feeds.values())


def make_case(
    batch: int, heads: int, seq: int, dims: tuple[int, int] = (32, 32), dtype: str = "float32", scale: float = 1.0
) -> Case:
    """Random inputs whose last sample is padded, with a hole, unless it is too short for that."""
    generator = np.random.default_rng(seq + dims[0])
    shapes = [(batch, heads, seq, dims[0])] * 2 + [(batch, heads, seq, dims[1])]
    q, k, v = ((scale * generator.standard_normal(shape)).astype(dtype) for shape in shapes)
    keep = np.ones((batch, seq), bool)
    if batch and seq > 4:
        keep[-1, seq - seq // 3 :] = False
        keep[-1, 1] = False
    return Case(q, k, v, keep)


def exact(case: Case, *, causal: bool, eps: float = EPS, relu: bool = False) -> np.ndarray:
    """out_i = Σ_j φ(q_i)·φ(k_j) v_j / (Σ_j φ(q_i)·φ(k_j) + eps) over kept j, j ≤ i where causal, in float64."""
    q, k, v = (x.astype(np.float64) for x in (case.q, case.k, case.v))
    features = [np.maximum(x, 0) if relu else np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k)]
    weights = features[0] @ features[1].swapaxes(-1, -2) * case.keep[:, None, None, :]
    if causal:
        weights = np.tril(weights)
    return weights @ v / (weights.sum(axis=-1, keepdims=True) + eps)


def assert_close(actual: np.ndarray, expected: np.ndarray, limit: float, largest: float) -> None:
    assert actual.shape == expected.shape
    assert np.isfinite(actual.astype(np.float64)).all()
    error = np.abs(actual.astype(np.float64) - expected).max(initial=0.0)
    assert error <= limit * largest, error / largest


def node_model(
    dtype: str = "float32",
    dims: Sequence[Sequence[Any]] | None = (("b", "h", "n", "d"), ("b", "h", "n", "m"), ("b", "n")),
    *,
    body: bool = True,
    opset: int = 20,
    nodes: Sequence[dict[str, Any]] = ({"eps": EPS},),
    keep_dtype: str = "bool",
    out_dims: bool = True,
) -> Any:
    """A model of custom nodes with these attributes on the same inputs. dims: of q and k, of v, of keep.

    out_dims: whether the outputs say their shape, that of v.
    """
    from onnx import helper

    def value(name: str, kind: str, shape: Sequence[Any] | None) -> Any:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), shape)

    shape, value_shape, keep_shape = dims or (None, None, None)
    made = [
        helper.make_node(
            "EluLinearAttention",
            ["q", "k", "v", "keep"],
            [f"out{i}"],
            domain=DOMAIN,
            **{PLUGIN_NAMESPACE: DOMAIN},
            **attributes,
        )
        for i, attributes in enumerate(nodes)
    ]
    inputs = [value("q", dtype, shape), value("k", dtype, shape), value("v", dtype, value_shape)]
    return helper.make_model(
        helper.make_graph(
            made,
            "attention",
            [*inputs, value("keep", keep_dtype, keep_shape)],
            [value(f"out{i}", dtype, value_shape if out_dims else None) for i in range(len(made))],
        ),
        functions=[onnx_function_body(made, opset)] if body else [],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=helper.find_min_ir_version_for([helper.make_opsetid("", opset)], ignore_unknown=True),
    )


def run_poisoned(opened: Any, case: Case) -> np.ndarray:
    """Run into an output that holds NaN, so that nothing unwritten goes unseen."""
    out = np.full(case.v.shape, np.nan, case.v.dtype)
    binding = opened.io_binding()
    values = {name: ort_value(array) for name, array in case.feeds.items()}
    for name, given in values.items():
        binding.bind_ortvalue_input(name, given)
    binding.bind_ortvalue_output(opened.get_outputs()[0].name, ort_value(out))
    opened.run_with_iobinding(binding)
    return out


def kernel_of(dtype: str = "float32", *, causal: bool = False, threads: int = 2, **attributes: Any) -> Any:
    nodes = [{"eps": EPS, "causal": int(causal), **attributes}]
    return session(node_model(dtype, body=False, nodes=nodes), library=True, threads=threads)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq", [1, 63, 100, 1000])
def test_the_operator_computes_the_formula(seq: int, causal: bool, relu: bool) -> None:
    case = make_case(2, 2, seq, (32, 24))
    largest = np.abs(case.v).max()
    out = linear_attention(*case.tensors(), EPS, causal, relu=relu)
    # one product over the sequence in a row where the kernel has blocks: a few roundings more
    assert_close(out.numpy(), exact(case, causal=causal, relu=relu), 2 * FP32, largest)
    q, k, v, keep = case.tensors()
    double = reference(q.double(), k.double(), v.double(), keep, EPS, causal, relu=relu)
    assert double.dtype == torch.float64
    # the same operations in another order, in float64
    assert_close(double.numpy(), exact(case, causal=causal, relu=relu), 1e-12, largest)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_layer_and_the_operator_compute_the_same(dtype: torch.dtype, causal: bool) -> None:
    layer = LinearAttention(LinearSpec(dim=64, heads=2, causal=causal, chunk_length=16)).to(dtype)
    projected = tuple(torch.randn(2, 2, 50, 32, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    keep = torch.arange(50) < torch.tensor([[50], [33]])
    plain = layer.mix(projected, keep)
    with fused_operators(layer, True):
        fused = layer.mix(projected, keep)
    assert fused.dtype == plain.dtype == dtype
    # the same float32 arithmetic in another order, so a result may round to the neighbour: one unit of the dtype
    torch.testing.assert_close(fused.float(), plain.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        make_case(2, 3, 5, (4, 4)),
        make_case(1, 1, 1, (1, 1)),
        make_case(2, 1, 7, (4, 6), "float16"),
        make_case(0, 2, 5, (4, 4)),
        make_case(2, 2, 0, (4, 4)),
    ],
)
def test_the_operator_keeps_the_rules_of_torch_library(case: Case) -> None:
    for causal in (False, True):
        operator = torch.ops.effexport.linear_attention.default
        torch.library.opcheck(operator, (*case.tensors(), EPS, causal, 8))
    transposed = case.tensors()[0].transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(operator, (transposed, *case.tensors()[1:], EPS, False, 8))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": torch.ones(2, 5, 4)}, r"q has shape \(2, 5, 4\); expected \[batch, heads, seq, head_dim\]"),
        ({"k": torch.ones(2, 3, 5, 6)}, r"k has shape \(2, 3, 5, 6\); expected \[2, 3, 5, 4\]"),
        ({"v": torch.ones(2, 3, 6, 4)}, r"v has shape \(2, 3, 6, 4\); expected \[2, 3, 5, value_dim\]"),
        ({"keep": torch.ones(2, 4, dtype=torch.bool)}, r"keep has shape \(2, 4\); expected \[2, 5\]"),
        ({"v": torch.ones(2, 3, 5, 4).half()}, "v is torch.float16 but q is torch.float32; expected one dtype"),
        ({"keep": torch.ones(2, 5)}, "keep is torch.float32; expected torch.bool"),
        ({"eps": -1.0}, "eps is -1.0; expected at least 0"),
        ({"eps": float("nan")}, "eps is nan; expected a finite number"),
        ({"chunk_length": 0}, "chunk_length is 0; expected at least 1"),
    ],
)
def test_wrong_inputs_are_refused(change: dict[str, Any], text: str) -> None:
    same = torch.ones(2, 3, 5, 4)
    good = {"q": same, "k": same, "v": same, "keep": torch.ones(2, 5, dtype=torch.bool), "eps": EPS}
    with pytest.raises(ValueError, match=text):
        linear_attention(**{**good, **change})


@NEEDS_RUNTIME
@pytest.mark.parametrize("opset", [18, 20, 24])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq", [1, 63, 100, 1000])
def test_the_body_computes_the_formula(seq: int, causal: bool, relu: bool, opset: int) -> None:
    import onnx

    model = node_model(opset=opset, nodes=[{"eps": EPS, "causal": int(causal), "relu": int(relu), "chunk_length": 16}])
    onnx.checker.check_model(model)
    opened = session(model, library=False)
    for case in (make_case(3, 2, seq, (32, 24)), make_case(1, 1, seq, (5, 7))):
        (out,) = opened.run(None, case.feeds)
        assert_close(out, exact(case, causal=causal, relu=relu), 2 * FP32, np.abs(case.v).max())


@NEEDS_RUNTIME
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_body_computes_half_precision_in_float32(causal: bool, relu: bool, dtype: str) -> None:
    opened = session(node_model(dtype, nodes=[{"eps": EPS, "causal": int(causal), "relu": int(relu)}]), library=False)
    # sums over 3000 positions exceed what float16 holds
    case = make_case(2, 1, 3000, (64, 64), dtype)
    out = run_poisoned(opened, case)
    assert out.dtype == np.dtype(dtype)
    assert_close(
        out, exact(case, causal=causal, relu=relu), LIMITS[dtype] + FP32, np.abs(case.v.astype(np.float64)).max()
    )


@NEEDS_RUNTIME
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "seq"), [(0, 5), (2, 0)])
def test_the_body_accepts_empty_inputs(batch: int, seq: int, causal: bool) -> None:
    case = make_case(batch, 2, seq, (8, 4))
    (out,) = session(node_model(nodes=[{"eps": EPS, "causal": int(causal)}]), library=False).run(None, case.feeds)
    assert out.shape == case.v.shape


@pytest.mark.requires("onnx")
def test_nodes_that_cannot_share_a_body_are_refused() -> None:
    with pytest.raises(ValueError, match=r"different causal \[0, 1\] cannot share one body"):
        node_model(nodes=[{"eps": EPS, "causal": 1}, {"eps": EPS}])
    with pytest.raises(ValueError, match=r"different relu \[0, 1\] cannot share one body"):
        node_model(nodes=[{"eps": EPS, "relu": 1}, {"eps": EPS}])
    with pytest.raises(ValueError, match=r"different chunk_length \[16, 128\] cannot share one body"):
        node_model(nodes=[{"eps": EPS, "causal": 1, "chunk_length": 16}, {"eps": EPS, "causal": 1}])
    with pytest.raises(ValueError, match=r"different eps \[.*, 30.0\] cannot share one body"):
        node_model(nodes=[{"eps": EPS}, {"eps": 30.0}])
    # it has no meaning where the body is not causal
    assert len(node_model(nodes=[{"eps": EPS, "chunk_length": 16}, {"eps": EPS}]).functions) == 1


@pytest.mark.requires("onnx")
@pytest.mark.parametrize("causal", [False, True])
def test_the_body_holds_no_node_that_a_runtime_lacks_or_runs_serially(causal: bool) -> None:
    (body,) = node_model(nodes=[{"eps": EPS, "causal": int(causal)}]).functions
    kinds = {node.op_type for node in body.node}
    assert not kinds & FORBIDDEN
    assert {node.domain for node in body.node} == {""}
    names = [name for node in body.node for name in node.output]
    assert len(set(names)) == len(names)


@pytest.mark.requires("onnx")
@pytest.mark.parametrize("sizes", [("b", "h", "n", "d", "m"), (2, 4, "n", 64, 32), (2, 4, 100, 64, 64)])
def test_the_output_has_the_shape_of_v(sizes: tuple[Any, ...]) -> None:
    import onnx

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    b, h, n, d, m = sizes
    dims = ((b, h, n, d), (b, h, n, m), (b, n))
    onnx.checker.check_model(node_model(dims=dims), full_check=True)
    model = node_model(dims=dims, out_dims=False)
    tensor = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.output[0].type.tensor_type
    assert tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim) == (b, h, n, m)
    assert tensor.elem_type == onnx.TensorProto.FLOAT


@pytest.mark.requires("onnx")
def test_the_schema_says_what_the_operator_takes() -> None:
    import onnx

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    schema = onnx.defs.get_schema("EluLinearAttention", OPSET_VERSION, DOMAIN)
    assert [p.name for p in schema.inputs] == ["q", "k", "v", "keep"]
    assert set(schema.attributes) == {"eps", "causal", "chunk_length", "relu", PLUGIN_NAMESPACE}
    assert schema.attributes["eps"].required
    # the same defaults as the torch operator's
    assert schema.attributes["causal"].default_value.i == 0
    assert schema.attributes["chunk_length"].default_value.i == 128


@NEEDS_KERNEL
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq", [*LENGTHS[:-1], pytest.param(LENGTHS[-1], marks=pytest.mark.slow)])
def test_the_kernel_computes_the_formula(seq: int, causal: bool) -> None:
    opened = kernel_of(causal=causal)
    # few heads are cut into slices, many are not
    for case in (make_case(2, 1, seq, (64, 64)), make_case(3, 8, seq, (16, 24))):
        assert_close(run_poisoned(opened, case), exact(case, causal=causal), FP32, np.abs(case.v).max())


@NEEDS_KERNEL
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_the_kernel_takes_heads_of_any_size(dims: tuple[int, int], causal: bool, relu: bool) -> None:
    opened = kernel_of(causal=causal, relu=int(relu))
    for seq in (70, 1100):
        case = make_case(2, 2, seq, dims)
        assert_close(run_poisoned(opened, case), exact(case, causal=causal, relu=relu), FP32, np.abs(case.v).max())


@NEEDS_KERNEL
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("dims", [(64, 64), (40, 24)])
def test_the_kernel_computes_half_precision_in_float32(
    dims: tuple[int, int], dtype: str, causal: bool, relu: bool
) -> None:
    opened = kernel_of(dtype, causal=causal, relu=int(relu))
    # sums over 3000 positions exceed what float16 holds
    case = make_case(2, 1, 3000, dims, dtype)
    out = run_poisoned(opened, case)
    assert out.dtype == np.dtype(dtype)
    assert_close(out, exact(case, causal=causal, relu=relu), LIMITS[dtype], np.abs(case.v.astype(np.float64)).max())


@NEEDS_KERNEL
@pytest.mark.parametrize("causal", [False, True])
def test_the_exponential_is_exact_to_two_units_in_the_last_place(causal: bool) -> None:
    # one key whose features are known: with v = 1 and eps = 1 the output is x / (x + 1), and x = head_dim · exp(k)
    k = -np.linspace(0, 100, 4001, dtype=np.float32).reshape(-1, 1, 1, 1)
    # φ(0) = 1
    case = Case(np.zeros_like(k), k, np.full_like(k, 2.0**100), np.ones((len(k), 1), bool))
    out = run_poisoned(kernel_of(causal=causal, eps=1.0), case).astype(np.float64).ravel()
    feature = np.exp(k.astype(np.float64).ravel())
    expected = 2.0**100 * feature / (feature + 1)
    normal = feature >= np.finfo(np.float32).tiny
    # two units of the exponential, and the roundings of the sum, the reciprocal and two products
    np.testing.assert_allclose(out[normal], expected[normal], rtol=6 * 2.0**-24)
    # where it would be subnormal it is zero
    assert (out[~normal] <= expected[~normal].max()).all()


@NEEDS_KERNEL
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_masked_has_no_influence(causal: bool, relu: bool) -> None:
    opened = kernel_of(causal=causal, relu=int(relu))
    body = session(node_model(nodes=[{"eps": EPS, "causal": int(causal), "relu": int(relu)}]), library=False)
    case = make_case(2, 2, 300)
    before = [run_poisoned(opened, case), body.run(None, case.feeds)[0]]
    for array, huge in ((case.k, 1e30), (case.v, -1e30)):
        np.copyto(array, np.float32(huge), where=~case.keep[:, None, :, None])
    after = [run_poisoned(opened, case), body.run(None, case.feeds)[0]]
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x, y)
    case.keep[:] = False
    assert (run_poisoned(opened, case) == 0).all(), "without keys the output is zero, not NaN"


@NEEDS_KERNEL
def test_the_future_has_no_influence() -> None:
    opened = kernel_of(causal=True)
    case = make_case(1, 2, 1200)
    whole = run_poisoned(opened, case)
    for length in (1, 65, 1024, 1030):
        prefix = Case(*(x[:, :, :length].copy() for x in (case.q, case.k, case.v)), case.keep[:, :length].copy())
        np.testing.assert_array_equal(run_poisoned(opened, prefix), whole[:, :, :length])


@NEEDS_KERNEL
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_not_finite_stays_in_its_head(causal: bool, relu: bool, poison: float) -> None:
    opened = kernel_of(causal=causal, relu=int(relu))
    case = make_case(2, 2, 200)
    clean = run_poisoned(opened, case)
    case.k[0, 1, 5, 3] = poison
    out = run_poisoned(opened, case)
    np.testing.assert_array_equal(out[0, 0], clean[0, 0])
    np.testing.assert_array_equal(out[1], clean[1])
    assert np.isnan(out[0, 1, 5:]).any(axis=-1).all()
    case.k[0, 1, 5, 3] = 0
    case.q[0, 1, 7, 0] = np.nan
    assert np.isnan(run_poisoned(opened, case)[0, 1, 7]).all(), "a query that is NaN has no output"


@NEEDS_KERNEL
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 3), (9, 2)])
def test_the_kernel_gives_the_same_bits_for_any_threads_and_batch_mates(batch: int, heads: int, causal: bool) -> None:
    case = make_case(batch, heads, 2100)
    together = run_poisoned(kernel_of(causal=causal, threads=1), case)
    for threads in (2, 5):
        np.testing.assert_array_equal(run_poisoned(kernel_of(causal=causal, threads=threads), case), together)
    # a head alone is cut into slices, many heads are not
    opened = kernel_of(causal=causal)
    for b, h in ((0, 0), (batch - 1, heads - 1)):
        alone = Case(*(x[b : b + 1, h : h + 1].copy() for x in (case.q, case.k, case.v)), case.keep[b : b + 1].copy())
        np.testing.assert_array_equal(run_poisoned(opened, alone)[0, 0], together[b, h])


@NEEDS_KERNEL
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (2, 2, 0)])
def test_the_kernel_accepts_empty_inputs(shape: tuple[int, int, int], causal: bool, dtype: str) -> None:
    case = make_case(*shape, (8, 4), dtype)
    values = {name: ort_value(array) for name, array in case.feeds.items()}
    (out,) = kernel_of(dtype, causal=causal).run_with_ort_values(None, values)
    assert out.shape() == list(case.v.shape)


@NEEDS_KERNEL
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 5, 4)}, r"q has shape \[2, 5, 4\]; expected \[batch, heads, seq, head_dim\]"),
        ({"k": (2, 3, 5, 6)}, r"k has shape \[2, 3, 5, 6\]; expected that of q, \[2, 3, 5, 4\]"),
        ({"v": (2, 3, 6, 4)}, r"v has shape \[2, 3, 6, 4\]; expected that of q, \[2, 3, 5, 4\], but for the last"),
        ({"v": (2, 3, 5)}, r"v has shape \[2, 3, 5\]; expected that of q"),
        ({"keep": (5,)}, r"keep has shape \[5\]; expected \[2, 5\], \[batch, seq\] of q"),
        ({"keep": (2, 6)}, r"keep has shape \[2, 6\]; expected \[2, 5\]"),
    ],
)
def test_the_kernel_says_what_is_wrong_with_its_input(change: dict[str, tuple[int, ...]], message: str) -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    opened = session(node_model(dims=None, body=False), library=True)
    shapes = {"q": (2, 3, 5, 4), "k": (2, 3, 5, 4), "v": (2, 3, 5, 4), "keep": (2, 5)}
    arrays = {n: np.ones(s, bool if n == "keep" else np.float32) for n, s in {**shapes, **change}.items()}
    with pytest.raises(InvalidArgument, match="EluLinearAttention: " + message):
        opened.run(None, arrays)
    good = {n: np.ones(s, bool if n == "keep" else np.float32) for n, s in shapes.items()}
    assert np.isfinite(opened.run(None, good)[0]).all(), "a refused input does not spoil the session"


@NEEDS_KERNEL
@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({}, "attribute eps is missing; expected a float"),
        ({"eps": 1}, "attribute eps has another type; expected a float"),
        ({"eps": -1.0}, "eps is -1; expected a finite number that is not negative"),
        ({"eps": float("nan")}, "eps is nan; expected a finite number"),
        ({"eps": EPS, "causal": 2}, "causal is 2; expected 0 or 1"),
        ({"eps": EPS, "causal": 1.0}, "attribute causal has another type; expected an integer"),
        ({"eps": EPS, "chunk_length": 0}, "chunk_length is 0; expected at least 1"),
    ],
)
def test_a_bad_attribute_is_refused_when_the_model_is_loaded(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match="EluLinearAttention: " + message):
        session(node_model(body=False, nodes=[attributes]), library=True)


@NEEDS_KERNEL
def test_a_mask_of_another_type_is_refused_when_the_model_is_loaded() -> None:
    with pytest.raises(Exception, match=r"[Tt]ype"):
        session(node_model(body=False, keep_dtype="float32"), library=True)


@NEEDS_KERNEL
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("sizes", [("b", "h", "n", "d", "m"), (2, 4, "n", 64, 32)])
def test_shapes_and_their_symbols_survive_the_runtimes_inference(sizes: tuple[Any, ...], dtype: str) -> None:
    b, h, n, d, m = sizes
    model = node_model(dtype, dims=((b, h, n, d), (b, h, n, m), (b, n)), body=False, out_dims=False)
    (output,) = session(model, library=True).get_outputs()
    assert output.shape == [b, h, n, m]
