"""Nodes that other tools misread are replaced by nodes that compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from effexport.export.portable_graph import make_portable
from effexport.plugins.function_body import traps

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
