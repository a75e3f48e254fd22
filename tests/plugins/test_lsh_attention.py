"""`effexport::LSHAttention`: operator, body and CPU kernel, against float64, the layer's formulas and each other."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import lsh_attention_cases
import numpy as np
import pytest
import torch
from kernel_sessions import ort_value, session
from lsh_attention_cases import (
    ATTRIBUTES,
    CASES,
    FP32,
    HALVES,
    LIMITS,
    Case,
    assert_close,
    assert_computes_the_formula,
    float64_attention,
)
from torch import Tensor

from effexport.models.layers import fused_operators
from effexport.models.variants.lsh.layer import LSHAttention
from effexport.models.variants.lsh.spec import LSHSpec
from effexport.plugins.lsh_attention.op import lsh_attention, onnx_function_body
from effexport.plugins.lsh_sort.op import lsh_sort
from effexport.plugins.ops import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE

FORBIDDEN = {"TopK", "Loop", "CumSum", "Scan", "Sort", "If", "ReduceLogSumExp", "Unique", "NonZero"}
Arrays = dict[str, np.ndarray]


def tensor_of(array: np.ndarray) -> Tensor:
    """A tensor of the same bits; torch takes no bfloat16 from NumPy."""
    if array.dtype == np.dtype("bfloat16"):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("bfloat16")
    return tensor.numpy()


def torch_attention(case: Case, arrays: Arrays) -> np.ndarray:
    options = [getattr(case, name) for name in ATTRIBUTES]
    return array_of(lsh_attention(*map(tensor_of, arrays.values()), *options))


def attention_model(
    attributes: dict[str, Any], dtype: str = "float32", *, body: bool = False, opset: int = 20, known: bool = True
) -> Any:
    """A model of one custom node. known: whether inputs and output say their dimensions."""
    from onnx import TensorProto, helper

    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = {
        "qk": (element, ["batch", "heads", "seq", "head_dim"]),
        "v": (element, ["batch", "heads", "seq", "value_dim"]),
        "order": (TensorProto.INT32, ["rows", "padded"]),
        "rank": (TensorProto.INT32, ["rows", "padded"]),
        "keep": (TensorProto.BOOL, ["batch", "seq"]),
    }
    node = helper.make_node(
        "LSHAttention", list(inputs), ["out"], domain=DOMAIN, **{PLUGIN_NAMESPACE: DOMAIN}, **attributes
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, kind, shape if known else None) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info("out", element, inputs["v"][1] if known else None)],
    )
    return helper.make_model(
        graph,
        functions=[onnx_function_body([node], opset)] if body else [],
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=helper.find_min_ir_version_for([helper.make_opsetid("", opset)], ignore_unknown=True),
    )


def run_poisoned(opened: Any, arrays: Arrays) -> np.ndarray:
    """Run into an output of NaN, so that nothing unwritten goes unseen."""
    out = np.full(arrays["v"].shape, np.nan, arrays["v"].dtype)
    binding = opened.io_binding()
    for name, array in arrays.items():
        binding.bind_ortvalue_input(name, ort_value(array))
    binding.bind_ortvalue_output("out", ort_value(out))
    opened.run_with_iobinding(binding)
    return out


@cache
def arrays_of(name: str) -> Arrays:
    return (CASES | HALVES)[name].arrays()


@pytest.mark.parametrize("name", [*CASES, *HALVES])
def test_the_operator_computes_the_formula(name: str) -> None:
    case = (CASES | HALVES)[name]
    assert_computes_the_formula(case, arrays_of(name), torch_attention(case, arrays_of(name)))


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("name", [*CASES, *HALVES])
def test_the_kernel_equals_the_formula_and_the_operator(name: str) -> None:
    case, arrays = (CASES | HALVES)[name], arrays_of(name)
    out = run_poisoned(session(attention_model(case.attributes, case.dtype)), arrays)
    assert_computes_the_formula(case, arrays, out)
    # also where the formula says nothing; both round to the type at the end, perhaps to two neighbours
    assert_close(out, torch_attention(case, arrays), 2 * LIMITS[case.dtype])


@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize("name", CASES)
def test_the_body_equals_the_formula_and_the_operator_in_onnx_runtime(name: str) -> None:
    case, arrays = CASES[name], arrays_of(name)
    (out,) = session(attention_model(case.attributes, body=True), library=False).run(None, arrays)
    assert_computes_the_formula(case, arrays, out)
    assert_close(out, torch_attention(case, arrays), 2 * FP32)


@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize("opset", [18, 20, 24])
def test_the_body_works_in_every_opset_that_is_exported(opset: int) -> None:
    import onnx

    for name in ("causal in a ring", "rounded and causal", "window 2 + 1 + 1"):
        model = attention_model(CASES[name].attributes, body=True, opset=opset)
        onnx.checker.check_model(model)
        (out,) = session(model, library=False).run(None, arrays_of(name))
        assert_computes_the_formula(CASES[name], arrays_of(name), out)


@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize("name", [name for name in HALVES if name.endswith("float16") and "bf" not in name])
def test_the_body_works_in_half_precision(name: str) -> None:
    case, arrays = HALVES[name], arrays_of(name)
    (out,) = session(attention_model(case.attributes, case.dtype, body=True), library=False).run(None, arrays)
    assert out.dtype == np.float16
    expected, alone = float64_attention(case, arrays)
    says = ~alone if case.rounded else np.ones_like(alone)
    # keys, products of up to 12 and weights are rounded to 11 bits: 12 · 2⁻¹¹ or 6e-3 in a logit, twice that in a ratio
    assert_close(out[says], expected[says], 2e-2)


def layer_of(case: Case, **fields: Any) -> LSHAttention:
    spec = LSHSpec(
        dim=case.heads * case.head_dim,
        heads=case.heads,
        head_dim=case.head_dim,
        seq_len=case.seq,
        chunk_length=case.chunk_length,
        num_chunks_before=case.chunks_before,
        num_chunks_after=case.chunks_after,
        causal=case.causal,
        circular=case.circular,
        num_hashes=case.rounds,
        num_buckets=6,
        mask_constants="hf" if case.rounded else "safe",
        **fields,
    )
    return LSHAttention(spec).eval()


MIXED = [name for name, case in CASES.items() if case.head_dim == case.value_dim]


@pytest.mark.parametrize("name", MIXED)
def test_the_operator_equals_the_formulas_of_the_layer(name: str) -> None:
    case, arrays = CASES[name], arrays_of(name)
    qk, v, keep = (torch.from_numpy(arrays[x]) for x in ("qk", "v", "keep"))
    layer = layer_of(case)
    with torch.no_grad():
        plain = layer.mix((qk, v), keep)
        with fused_operators(layer, True):
            fused = layer.mix((qk, v), keep)
    assert_close(fused.numpy(), plain.numpy(), 2 * FP32)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("name", MIXED)
def test_the_kernel_equals_the_formulas_of_the_layer(name: str) -> None:
    case, arrays = CASES[name], arrays_of(name)
    qk, v, keep = (torch.from_numpy(arrays[x]) for x in ("qk", "v", "keep"))
    layer = layer_of(case)
    with torch.no_grad():
        plain = layer.mix((qk, v), keep)
        order, rank = lsh_sort(layer.hash(qk, keep), layer.spec.total_buckets + 1)
    hashed = {**arrays, "order": order.numpy(), "rank": rank.numpy()}
    out = run_poisoned(session(attention_model(case.attributes)), hashed)
    assert_close(out, plain.numpy(), 2 * FP32)


@pytest.mark.requires("native", "onnx", "ort")
def test_rounded_weights_of_a_lonely_token_are_those_of_transformers() -> None:
    # position 0 of a causal sequence sees itself only: its value comes out times the sum of the rounded round weights
    for rounds, total in {1: 1.0, 2: 0.9978, 3: 0.9971, 4: 1.0035}.items():
        case = Case(causal=True, rounded=True, rounds=rounds)
        arrays = case.arrays()
        kernel = run_poisoned(session(attention_model(case.attributes)), arrays)
        (body,) = session(attention_model(case.attributes, body=True), library=False).run(None, arrays)
        for out in (kernel, body, torch_attention(case, arrays)):
            # known to four decimals
            np.testing.assert_allclose(out[:, :, 0], total * arrays["v"][:, :, 0], rtol=1e-4)
        safe = replace(case, rounded=False)
        out = run_poisoned(session(attention_model(safe.attributes)), arrays)
        # weights that add up to one within a rounding each
        np.testing.assert_allclose(out[:, :, 0], arrays["v"][:, :, 0], rtol=1e-6)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("name", ["plain", "1000 tokens", "causal in a ring", "chunks of 64", "plain, float16"])
def test_the_kernel_gives_the_same_bits_for_any_threads_and_batch_mates(name: str) -> None:
    case, arrays = (CASES | HALVES)[name], arrays_of(name)
    model = attention_model(case.attributes, case.dtype)
    together = run_poisoned(session(model, threads=1), arrays)
    for threads in (2, 5):
        np.testing.assert_array_equal(run_poisoned(session(model, threads=threads), arrays), together)
    rows = case.heads * case.rounds
    for i in range(case.batch):
        alone = {x: arrays[x][i : i + 1].copy() for x in ("qk", "v", "keep")}
        alone |= {x: arrays[x][i * rows : (i + 1) * rows].copy() for x in ("order", "rank")}
        alone = {x: alone[x] for x in arrays}
        np.testing.assert_array_equal(run_poisoned(session(model), alone), together[i : i + 1])


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("poisoned", ["qk", "v"])
def test_nan_reaches_those_that_see_it_and_no_others(poisoned: str) -> None:
    case = Case(chunk_length=16, seq=100, padding=10)
    arrays = case.arrays()
    opened = session(attention_model(case.attributes))
    clean = run_poisoned(opened, arrays)
    arrays[poisoned][0, 1, 40, 3] = np.nan
    out, expected = run_poisoned(opened, arrays), torch_attention(case, arrays)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    assert np.isnan(out[0, 1, 40]).any() or poisoned == "v"
    assert np.isnan(out[0, 1]).any()
    np.testing.assert_array_equal(out[~np.isnan(out)], clean[~np.isnan(out)])


EMPTY = [{"batch": 0}, {"heads": 0}, {"seq": 0}, {"value_dim": 0}]


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("fields", EMPTY)
@pytest.mark.parametrize("dtype", list(LIMITS))
def test_empty_inputs_give_empty_outputs(fields: dict[str, int], dtype: str) -> None:
    case = replace(Case(dtype=dtype), **fields)
    arrays = {name: np.ascontiguousarray(x) for name, x in empty_arrays(case).items()}
    assert torch_attention(case, arrays).shape == arrays["v"].shape
    feeds = {name: ort_value(x) for name, x in arrays.items()}
    (out,) = session(attention_model(case.attributes, dtype)).run_with_ort_values(None, feeds)
    assert out.shape() == list(arrays["v"].shape)


def empty_arrays(case: Case) -> Arrays:
    rows = case.batch * case.heads * case.rounds
    order = np.tile(np.arange(case.padded, dtype=np.int32), (rows, 1))
    heads = (case.batch, case.heads, case.seq)
    return {
        "qk": np.zeros((*heads, case.head_dim), case.dtype),
        "v": np.zeros((*heads, case.value_dim), case.dtype),
        "order": order,
        "rank": order,
        "keep": np.ones((case.batch, case.seq), bool),
    }


def changed(**arrays: np.ndarray) -> Arrays:
    return {**Case().arrays(), **arrays}


def int32s(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


# wrong shapes: what changes, what the torch operator says, what the kernel says
WRONG_SHAPES: list[tuple[Arrays, str, str]] = [
    (
        {"qk": np.zeros((2, 2, 99, 8), np.float32)},
        r"v has shape \(2, 2, 100, 8\); expected \[2, 2, 99, value_dim\]",
        r"qk and v have shapes \[2, 2, 99, 8\] and \[2, 2, 100, 8\]; expected \[batch, heads, seq, head_dim\] twice",
    ),
    (
        {"qk": np.zeros((4, 100, 8), np.float32)},
        r"qk has shape \(4, 100, 8\); expected \[batch, heads, seq, head_dim\]",
        r"qk and v have shapes \[4, 100, 8\] and",
    ),
    (
        {"keep": np.ones((2, 99), bool)},
        r"keep has shape \(2, 99\); expected \[2, 100\]",
        r"keep has shape \[2, 99\]; expected \[2, 100\]",
    ),
    (
        {"order": int32s(8, 100), "rank": int32s(8, 110)},
        r"rank has shape \(8, 110\); expected \[8, 100\]",
        r"order and rank have shapes \[8, 100\] and \[8, 110\]; expected the same twice",
    ),
    (
        {"order": int32s(8, 105), "rank": int32s(8, 105)},
        r"order has shape \(8, 105\); .* a multiple of chunk_length 10 that holds 100 tokens",
        r"\[8, 105\]; .* by a multiple of 10 \(chunk_length\) that holds 100 tokens",
    ),
    (
        {"order": int32s(8, 90), "rank": int32s(8, 90)},
        r"order has shape \(8, 90\); .* that holds 100 tokens",
        r"\[8, 90\]; .* that holds 100 tokens",
    ),
    (
        {"order": int32s(7, 100), "rank": int32s(7, 100)},
        r"order has shape \(7, 100\); expected a positive multiple of 4 rows, batch · heads",
        r"\[7, 100\]; expected the same twice, a multiple of 4 rows \(batch · heads\)",
    ),
    (
        {"order": int32s(0, 100), "rank": int32s(0, 100)},
        r"order has shape \(0, 100\); expected a positive multiple of 4 rows",
        "order has no rows; expected some for each of 4",
    ),
    (
        {"order": int32s(800), "rank": int32s(800)},
        r"order has shape \(800,\); expected \[rows, padded\]",
        r"order and rank have shapes \[800\] and \[800\]",
    ),
]


@pytest.mark.parametrize(("wrong", "message", "_"), WRONG_SHAPES)
def test_the_operator_says_what_is_wrong_with_a_shape(wrong: Arrays, message: str, _: str) -> None:
    with pytest.raises(ValueError, match="lsh_attention: " + message):
        torch_attention(Case(), changed(**wrong))


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("wrong", "_", "message"), WRONG_SHAPES)
def test_the_kernel_says_what_is_wrong_with_a_shape(wrong: Arrays, _: str, message: str) -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    opened = session(attention_model(Case().attributes, known=False))
    with pytest.raises(InvalidArgument, match="LSHAttention: .*" + message):
        opened.run(None, changed(**wrong))
    assert np.isfinite(opened.run(None, Case().arrays())[0]).all(), "a refused input does not spoil the session"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"qk": np.zeros((2, 2, 100, 8))}, "v is torch.float32 but qk is torch.float64; expected one dtype"),
        ({"qk": int32s(2, 2, 100, 8), "v": int32s(2, 2, 100, 8)}, "qk is torch.int32; expected a floating-point dtype"),
        ({"order": np.zeros((8, 100), np.int64)}, "order is torch.int64; expected torch.int32"),
        ({"rank": np.zeros((8, 100), np.int64)}, "rank is torch.int64; expected torch.int32"),
        ({"keep": np.ones((2, 100), np.int32)}, "keep is torch.int32"),
    ],
)
def test_the_operator_says_what_is_wrong_with_a_dtype(wrong: Arrays, message: str) -> None:
    with pytest.raises(ValueError, match="lsh_attention: .*" + message):
        torch_attention(Case(), changed(**wrong))


@pytest.mark.parametrize("fields", [{"chunk_length": 0}, {"chunks_before": -1}, {"chunks_after": -1}])
def test_the_operator_says_what_is_wrong_with_a_window(fields: dict[str, int]) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(ValueError, match=f"lsh_attention: {name} is {value}; expected at least {value + 1}"):
        torch_attention(replace(Case(), **fields), Case().arrays())


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"chunk_length": 0}, "chunk_length is 0; expected at least 1"),
        ({"chunk_length": 2**31}, "chunk_length is 2147483648; expected at least 1 and at most 1048576"),
        ({"chunks_before": -1}, "chunks_before is -1; expected at least 0 and at most 1048576"),
        ({"chunks_before": 2**62}, f"chunks_before is {2**62}; expected at least 0 and at most 1048576"),
        ({"chunks_after": -2}, "chunks_after is -2; expected at least 0 and at most 1048576"),
        ({"chunks_after": 2**63 - 1}, f"chunks_after is {2**63 - 1}; expected at least 0 and at most 1048576"),
        ({"causal": 0.5}, "attribute causal has another type; expected an integer"),
        ({"chunk_length": "10"}, "attribute chunk_length has another type; expected an integer"),
        ({"rounded": None}, "attribute rounded is missing; expected an integer"),
    ],
)
def test_a_bad_attribute_is_refused_when_the_model_is_loaded(attributes: dict[str, Any], message: str) -> None:
    given = {name: value for name, value in {**Case().attributes, **attributes}.items() if value is not None}
    with pytest.raises(Exception, match="LSHAttention: " + message):
        session(attention_model(given))


@pytest.mark.requires("native", "onnx", "ort")
def test_a_window_that_is_wider_than_a_round_sees_all_of_it() -> None:
    case = Case()
    chunks = case.arrays()["order"].shape[1] // case.chunk_length
    answers = []
    for around in (chunks - 1, 2**20):
        attributes = replace(case, chunks_before=around, chunks_after=around).attributes
        answers.append(session(attention_model(attributes)).run(None, case.arrays())[0])
    assert np.array_equal(*answers)


@pytest.mark.requires("native", "onnx", "ort")
def test_every_byte_of_keep_that_is_not_0_is_true() -> None:
    arrays = Case().arrays()
    opened = session(attention_model(Case().attributes))
    (expected,) = opened.run(None, arrays)
    arrays["keep"] = (arrays["keep"].view(np.uint8) * np.uint8(254)).view(bool)
    assert np.array_equal(opened.run(None, arrays)[0], expected)


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize(("place", "token"), [((0, 0), -1), ((3, 50), 100), ((7, 99), 2**31 - 1), ((7, 0), -(2**31))])
def test_the_kernel_names_a_token_that_does_not_exist(place: tuple[int, int], token: int) -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

    arrays = Case().arrays()
    arrays["order"][place] = token
    with pytest.raises(InvalidArgument, match=rf"LSHAttention: order holds {token}; expected 0 to 99"):
        session(attention_model(Case().attributes)).run(None, arrays)


@pytest.mark.requires("native", "onnx", "ort")
def test_the_output_has_the_shape_of_the_values_and_their_symbols() -> None:
    model = attention_model(Case().attributes)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    (out,) = session(model).get_outputs()
    assert out.shape == ["batch", "heads", "seq", "value_dim"]


@pytest.mark.parametrize("name", ["plain", "rounded and causal in a ring", "narrow values", "plain, bfloat16"])
def test_the_operator_keeps_the_rules_of_torch_library(name: str) -> None:
    case = (CASES | HALVES)[name]
    options = [getattr(case, x) for x in ATTRIBUTES]
    torch.library.opcheck(
        torch.ops.effexport.lsh_attention.default, (*map(tensor_of, arrays_of(name).values()), *options)
    )


def test_the_operator_accepts_tensors_that_are_not_contiguous() -> None:
    case, arrays = CASES["plain"], arrays_of("plain")
    tensors = [torch.from_numpy(x) for x in arrays.values()]
    tensors[:2] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:2]]
    out = lsh_attention(*tensors, *(getattr(case, x) for x in ATTRIBUTES))
    assert out.is_contiguous()
    np.testing.assert_array_equal(out.numpy(), torch_attention(case, arrays))


@pytest.mark.requires("onnx")
@pytest.mark.parametrize("opset", [18, 20, 24])
@pytest.mark.parametrize("name", ["plain", "rounded and causal in a ring"])
def test_the_body_holds_no_node_that_a_runtime_lacks_or_runs_serially(name: str, opset: int) -> None:
    (body,) = attention_model(CASES[name].attributes, body=True, opset=opset).functions
    kinds = {node.op_type for node in body.node}
    assert not kinds & FORBIDDEN
    assert not {kind for kind in kinds if kind.startswith("Random")}
    assert {node.domain for node in body.node} == {""}
    assert [(entry.domain, entry.version) for entry in body.opset_import] == [("", opset)]
    assert sum(node.op_type == "MatMul" for node in body.node) == 2


@pytest.mark.requires("onnx")
def test_nodes_with_different_attributes_cannot_share_a_body() -> None:
    nodes = [attention_model({**Case().attributes, "chunk_length": n}).graph.node[0] for n in (10, 16)]
    with pytest.raises(ValueError, match=r"different chunk_length \[10, 16\] cannot share one body"):
        onnx_function_body(nodes, 20)
    onnx_function_body([nodes[0], nodes[0]], 20)


@pytest.mark.requires("onnx")
@pytest.mark.parametrize("body", [False, True])
def test_shape_inference_keeps_symbolic_dimensions(body: bool) -> None:
    import onnx

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    model = attention_model(Case().attributes, body=body)
    onnx.checker.check_model(model, full_check=True)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    tensor = inferred.graph.output[0].type.tensor_type
    assert [dim.dim_param for dim in tensor.shape.dim] == ["batch", "heads", "seq", "value_dim"]


@pytest.mark.requires("onnx")
def test_the_schema_says_what_the_operator_takes() -> None:
    import onnx

    from effexport.export.onnx_from_module import register_schemas

    register_schemas()
    schema = onnx.defs.get_schema("LSHAttention", OPSET_VERSION, DOMAIN)
    assert [p.name for p in schema.inputs] == ["qk", "v", "order", "rank", "keep"]
    assert [p.name for p in schema.outputs] == ["out"]
    assert set(schema.attributes) == {*ATTRIBUTES, PLUGIN_NAMESPACE}
    assert all(schema.attributes[name].required for name in ATTRIBUTES)
    assert not schema.attributes[PLUGIN_NAMESPACE].required


def test_the_formula_of_these_tests_counts_every_key_of_a_window() -> None:
    # a chunk of one token per window, by hand: the checker itself
    case = Case(seq=2, chunk_length=1, batch=1, heads=1, rounds=1, head_dim=1, value_dim=1)
    arrays = case.arrays()
    arrays["order"][:] = [[1, 0]]
    arrays["qk"][0, 0, :, 0], arrays["v"][0, 0, :, 0] = [3, 4], [5, 7]
    out, alone = float64_attention(case, arrays)
    # token 1 stands first and sees itself; token 0 sees token 1, and itself only as a last resort
    assert out[0, 0, :, 0].tolist() == [7, 7]
    assert alone[0, 0].tolist() == [False, True]
    assert lsh_attention_cases.window_counts(case).tolist() == [[1, 0], [1, 1]]
