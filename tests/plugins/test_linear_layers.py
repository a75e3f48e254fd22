"""PackedLinear and QuantizedLinear: weights that are constants, and numbers that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from implementations import implementation
from kernel_sessions import run_values, session
from one_node import one_node_model
from onnx import numpy_helper

from effexport.plugins.contract import Case, load_contract
from effexport.plugins.ops import OPS

pytestmark = pytest.mark.requires("native", "onnx", "ort")
LINEAR = [name for name, op in OPS.items() if op.linear]
linear = pytest.mark.parametrize("op", LINEAR)


def call_of(op: str, *sizes: int) -> tuple[Case, dict[str, Any]]:
    """A call without activation, with one residual for all tokens; NumPy arrays by name."""
    from emulated_plugins import array_of

    case = Case((*sizes, 1, 1, 0))
    return case, {name: array_of(x) for name, x in load_contract(OPS[op]).inputs(case, "cpu").items()}


def with_constant_weight(op: str, feeds: dict[str, Any], attributes: dict[str, Any]) -> bytes:
    model = onnx.ModelProto.FromString(one_node_model(op, feeds, body=False, **attributes))
    weight = next(value for value in model.graph.input if value.name == "weight")
    model.graph.input.remove(weight)
    model.graph.initializer.append(numpy_helper.from_array(feeds["weight"], "weight"))
    return bytes(model.SerializeToString())


@linear
@pytest.mark.parametrize("sizes", [(1, 1, 70, 65), (2, 5, 33, 7), (1, 100, 64, 130)], ids=str)
def test_a_weight_that_is_packed_once_gives_the_same_bits(op: str, sizes: tuple[int, ...]) -> None:
    case, feeds = call_of(op, *sizes)
    attributes = load_contract(OPS[op]).attributes(case)
    expected = run_values(session(one_node_model(op, feeds, body=False, **attributes)), feeds)
    opened = session(with_constant_weight(op, feeds, attributes))
    given = {name: x for name, x in feeds.items() if name != "weight"}
    for _ in range(2):
        np.testing.assert_array_equal(run_values(opened, given), expected)


@linear
@pytest.mark.parametrize("rows", [1, 6, 7, 97])
def test_a_token_does_not_depend_on_how_many_there_are(op: str, rows: int) -> None:
    case, feeds = call_of(op, 1, 200, 48, 70)
    opened = session(one_node_model(op, feeds, body=False, **load_contract(OPS[op]).attributes(case)))
    (whole,) = run_values(opened, feeds)
    (part,) = run_values(opened, feeds | {"x": feeds["x"][:, :rows]})
    np.testing.assert_array_equal(part, whole[:, :rows])


@linear
@pytest.mark.parametrize("how", ["kernel", "body", "torch"])
def test_results_are_rounded_to_nearest_even_if_asked(op: str, how: str) -> None:
    import ml_dtypes

    case, feeds = call_of(op, 2, 9, 33, 70)
    inputs = load_contract(OPS[op]).inputs(case, "cpu").values()

    def result(**attributes: int) -> Any:
        if how == "torch":
            return getattr(OPS[op].load(), OPS[op].torch_name)(*inputs, **attributes).numpy()
        return run_values(session(one_node_model(op, feeds, body=how == "body", **attributes)), feeds)[0]

    whole = result()
    np.testing.assert_array_equal(result(round_output=1), whole.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert (whole != result(round_output=1)).any()


@linear
@pytest.mark.parametrize("how", ["kernel", "body", "torch"])
@pytest.mark.parametrize("width", [1, 2, 31, 64])
def test_what_is_no_number_stays_in_its_token(op: str, how: str, width: int) -> None:
    import torch

    case, _ = call_of(op, 1, 4, width, 5)
    inputs = load_contract(OPS[op]).inputs(case, "cpu")
    expected = implementation(op, how).run(case, inputs)
    inputs["x"][0, 1, -1], inputs["x"][0, 2, 0] = torch.nan, torch.inf
    found = implementation(op, how).run(case, inputs)
    np.testing.assert_array_equal(found[0, [0, 3]], expected[0, [0, 3]])
    assert not np.isfinite(found[0, 2]).any()
    if op == "PackedLinear":  # no scale of int8 reaches infinity
        assert np.isinf(found[0, 2]).all()
    # as its page says, ReduceMax of ONNX Runtime does not see every NaN
    if (op, how) != ("QuantizedLinear", "body"):
        assert np.isnan(found[0, 1]).all()
