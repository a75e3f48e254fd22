"""Nodes that other tools misread are replaced by nodes that compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from effexport.export.torch_onnx import make_portable, plain_equation
from effexport.plugins.function_body import traps
from effexport.tensorrt.preparation import limit_problems

pytestmark = pytest.mark.requires("torch", "onnx", "ort")


def run(
    model: ir.Model, feeds: Mapping[str, np.ndarray[Any, Any]], *, optimized: bool = True
) -> list[np.ndarray[Any, Any]]:
    serialised, options = ir.to_proto(model).SerializeToString(), onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(serialised, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def test_integer_divisions_with_exact_dividends_give_the_same_quotients() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        main (int64[n] x, int64[n] y, float[n] f) => (int64[n] whole, float[n] share) {
            whole = Div (x, y)
            share = Div (f, f)
        }
    """)
    make_portable(model)
    assert [node.op_type for node in model.graph] == ["Mod", "Sub", "Div", "Div"]
    dividends = np.repeat([-9, -8, -1, 0, 1, 7, 8, 9], 4)
    divisors = np.tile([-8, -3, 1, 8], 8)
    whole, _ = run(model, {"x": dividends, "y": divisors, "f": np.ones(32, np.float32)})
    # ONNX rounds towards zero
    assert whole.tolist() == [int(x / y) for x, y in zip(dividends, divisors, strict=True)]


def test_a_boolean_becomes_one_or_zero_without_a_cast() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        main (bool[n] x, int64[n] y) => (float[n] a, float[n] b, float16[n] c, float[n] sum) {
            a = Cast <to = 1> (x)
            b = Cast <to = 1> (y)
            c = Cast <to = 10> (x)
            sum = Add (a, b)
        }
    """)
    make_portable(model)
    assert [node.op_type for node in model.graph] == ["Where", "Cast", "Cast", "Add"]
    assert [value.name for value in model.graph.outputs] == ["a", "b", "c", "sum"]
    a, b, c, total = run(model, {"x": np.array([True, False]), "y": np.array([3, 4])})
    assert (a.dtype, a.tolist(), b.tolist(), c.tolist(), total.tolist()) == (np.float32, [1, 0], [3, 4], [1, 0], [4, 4])


def test_the_maximum_of_a_concatenation_is_the_maximum_of_the_maxima_of_its_parts() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        main (float[n, 2] a, float[n, 3] b, float[n, 4] c) => (float[n, 1] high, float[n, 1] low, float[k, 9] other) {
            axes = Constant <value = int64[1] {-1}> ()
            first = Constant <value = int64[1] {0}> ()
            ab = Concat <axis = 1> (a, b)
            abc = Concat <axis = -1> (ab, c)
            high = ReduceMax (abc, axes)
            low = ReduceMin (abc, axes)
            sum = Add (abc, abc)
            other = ReduceMax (sum, first)
        }
    """)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model)))
    make_portable(model)
    assert list(traps(ir.to_proto(model))) == []
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal((5, size)).astype(np.float32) for name, size in zip("abc", (2, 3, 4), strict=True)
    }
    high, low, other = run(model, feeds)
    joined = np.concatenate(list(feeds.values()), axis=1)
    assert np.array_equal(high, joined.max(axis=1, keepdims=True))
    assert np.array_equal(low, joined.min(axis=1, keepdims=True))
    assert np.array_equal(other, 2 * joined.max(axis=0, keepdims=True))


GELU = """
    <ir_version: 10, opset_import: ["" : 18]>
    main (float[n] x) => (float[n] y) <float root = {{1.4142135}}, float one = {{1.0}}, float half = {{{half}}}> {{
        scaled = Div (x, root)
        f = {f} (scaled)
        total = Add (f, one)
        halved = Mul (half, total)
        {rest}
    }}
"""


@pytest.mark.parametrize("f", ["Erf", "Tanh"])
def test_gelu_halves_its_input_and_keeps_its_bits(f: str) -> None:
    text = GELU.format(f=f, half="0.5", rest="y = Mul (x, halved)")
    model = ir.from_onnx_text(text)
    make_portable(model)
    halving, product = list(model.graph)[3:]
    assert [value.name for value in halving.inputs] == ["x", "half"]
    assert list(product.inputs) == [halving.outputs[0], model.graph[2].outputs[0]]
    x = np.concatenate([np.linspace(-30, 30, 1001), [0.0, 3.4e38, -3.4e38, np.inf, np.nan]]).astype(np.float32)
    (y,), (before,) = (run(each, {"x": x}, optimized=False) for each in (model, ir.from_onnx_text(text)))
    assert y.tobytes() == before.tobytes()


@pytest.mark.parametrize(
    ("half", "rest"),
    [
        ("0.25", "y = Mul (x, halved)"),
        ("0.5", "y = Add (x, halved)"),
        ("0.5", "first = Mul (x, halved)\n y = Add (first, halved)"),
    ],
    ids=["another factor", "a sum", "another reader"],
)
def test_what_only_resembles_gelu_stays_as_it_is(half: str, rest: str) -> None:
    model = ir.from_onnx_text(GELU.format(f="Erf", half=half, rest=rest))
    before = [[value.name for value in node.inputs] for node in model.graph]
    make_portable(model)
    assert [[value.name for value in node.inputs] for node in model.graph] == before


@pytest.mark.parametrize(("dtype", "kind"), [(np.float32, "float"), (np.float16, "float16")])
def test_rows_without_keys_are_found_by_a_search_for_nan(dtype: type[np.floating[Any]], kind: str) -> None:
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        main ({kind}[b, n] scores) => (bool[b, n] missing, {kind}[b, n] shares) {{
            shares = Softmax <axis = -1> (scores)
            missing = IsNaN (shares)
        }}
    """)
    make_portable(model)
    scores = np.array([[0, -np.inf], [-np.inf, -np.inf], [np.nan, 0], [-60000, -60000]], dtype)
    missing, _ = run(model, {"scores": scores})
    # where PyTorch's softmax is NaN
    assert missing.tolist() == [[False, False], [True, True], [True, True], [False, False]]


# an equation, the sizes of its operands, and the same as TensorRT reads it
EQUATIONS: list[tuple[str, list[tuple[int, ...]], str]] = [
    ("...ij,...jk->...ik", [(2, 3, 4, 5), (2, 3, 5, 6)], "abij,abjk->abik"),
    ("...nd,...md->...nm", [(2, 3, 4, 5), (3, 6, 5)], "abnd,bmd->abnm"),
    ("...ij,jk->...ik", [(2, 3, 4), (4, 5)], "aij,jk->aik"),
    ("...a,...a->...", [(2, 1, 4), (3, 4)], "bca,ca->bc"),
    ("b...d,b...d,d->b...", [(2, 3, 4), (2, 3, 4), (4,)], "bad,bad,d->ba"),
    ("i...->...", [(2, 3)], "ia->a"),
    ("...i,i", [(2, 3), (3,)], "ai,i->a"),
    ("...ii->...i", [(2, 3, 3)], "aii->ai"),
    ("BND,BMD->BNM", [(2, 3, 4), (2, 5, 4)], "adb,acb->adc"),
    ("B...i, a i -> B...a", [(2, 3, 4), (5, 4)], "bci,ai->bca"),
    ("...i,...i->...i", [(4,), (4,)], "i,i->i"),
    ("bij,bjk", [(2, 3, 4), (2, 4, 5)], "bij,bjk->ik"),
]


# ONNX Runtime does not take an ellipsis that stands for other numbers of axes, which PyTorch does
REFUSED = ("...nd,...md->...nm", "...a,...a->...")


@pytest.mark.parametrize(("equation", "shapes", "expected"), EQUATIONS)
def test_axes_of_einsum_have_lower_case_letters_and_keep_the_bits(
    equation: str, shapes: list[tuple[int, ...]], expected: str
) -> None:
    inputs = ", ".join(f"float{list(shape)} x{i}" for i, shape in enumerate(shapes))
    names = ", ".join(f"x{i}" for i in range(len(shapes)))
    rng = np.random.default_rng(0)
    feeds = {f"x{i}": rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    output = ", ".join("abcd"[: np.einsum(equation, *feeds.values()).ndim])
    text = f"""
        <ir_version: 10, opset_import: ["" : 20]>
        main ({inputs}) => (float[{output}] y) {{ y = Einsum <equation = "{equation}"> ({names}) }}
    """
    model = ir.from_onnx_text(text)
    make_portable(model)
    assert model.graph[0].attributes["equation"].as_string() == expected
    assert limit_problems(ir.to_proto(model)) == []
    (y,) = run(model, feeds)
    wanted = np.einsum(equation, *feeds.values())
    assert y.shape == wanted.shape
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    # of three operands, ONNX Runtime multiplies first the two that the order of the letters suggests
    if len(shapes) <= 2 and equation not in REFUSED:
        (before,) = run(ir.from_onnx_text(text), feeds)
        assert y.tobytes() == before.tobytes()


def test_an_equation_with_more_axes_than_letters_stays_as_it_is() -> None:
    equation = "...ij,...jk->...ik"
    assert plain_equation(equation, [25, 25]).count("->") == 1
    assert plain_equation(equation, [26, 26]) == equation


@pytest.mark.requires("rtx")
def test_tensorrt_parses_an_einsum_only_with_a_letter_for_each_axis() -> None:
    import tensorrt_rtx

    def errors(equation: str) -> list[str]:
        text = f"""
            <ir_version: 10, opset_import: ["" : 20]>
            main (float[2, n, 4] x, float[n, 4] z) => (float[a, b] y) {{ y = Einsum <equation = "{equation}"> (x, z) }}
        """
        model = ir.from_onnx_text(text)
        logger = tensorrt_rtx.Logger(tensorrt_rtx.Logger.INTERNAL_ERROR)
        flags = 1 << int(tensorrt_rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = tensorrt_rtx.Builder(logger).create_network(flags)
        parser = tensorrt_rtx.OnnxParser(network, logger)
        parser.parse(ir.to_proto(model).SerializeToString())
        return [parser.get_error(i).desc() for i in range(parser.num_errors)]

    for equation in ("...i,...i->...", "BNI,NI->BN"):
        assert errors(equation)
        assert not errors(plain_equation(equation, [3, 2]))


@pytest.mark.parametrize("keepdims", [0, 1])
def test_the_logarithm_of_a_sum_of_exponentials_is_written_out(keepdims: int) -> None:
    text = f"""
        <ir_version: 10, opset_import: ["" : 20]>
        main (float[n, 5] x) => (float[{"n, 1" if keepdims else "n"}] y) {{
            axes = Constant <value = int64[1] {{-1}}> ()
            y = ReduceLogSumExp <keepdims = {keepdims}, noop_with_empty_axes = 0> (x, axes)
        }}
    """
    model = ir.from_onnx_text(text)
    make_portable(model)
    assert limit_problems(ir.to_proto(model)) == []
    x = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    x[1], x[2], x[3, 0], x[4], x[5, 2] = 1e4, -1e4, -np.inf, -np.inf, np.inf
    (y,) = run(model, {"x": x})
    with np.errstate(divide="ignore"):
        expected = np.logaddexp.reduce(x.astype(np.float64), axis=-1, keepdims=bool(keepdims))
    assert y.shape == expected.shape
    # a few roundings of float32
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
