"""Function bodies hold no construct that a known tool misreads: docs/function_bodies.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from one_node import one_node_model
from slow_cases import soak

from effexport.export.onnx_graph import FORBIDDEN_OPS
from effexport.plugins.contract import load_contract
from effexport.plugins.function_body import LARGEST_FILL, rounded_down, traps
from effexport.plugins.ops import DOMAIN, OPS, Op
from effexport.plugins.signature import with_constants

pytestmark = pytest.mark.requires("torch", "onnx")

FORBIDDEN = {*FORBIDDEN_OPS, "Sort", "If", "Unique", "NonZero"}
# As many places as a sample has global tokens, of a node that does not say how many there are at most.
EXCEPTIONS = {"BandedAttention": {"NonZero"}}


def models_of_bodies(op: str, opset: int, **changed: float) -> Iterator[Any]:
    """Models of one node with its body, for all options in the contract's cases and all element types."""
    import onnx

    signature, contract = OPS[op].load().SIGNATURE, load_contract(OPS[op])
    seen: list[dict[str, Any]] = []
    for case in (*contract.small, *contract.cases):
        attributes = contract.attributes(case) | changed
        if attributes in seen:
            continue
        seen.append(attributes)
        for element in OPS[op].element_types:
            feeds = {
                parameter.name: np.zeros(
                    [int(dim) if dim.isdecimal() else 2 for dim in parameter.dims.split()],
                    ml_dtypes.bfloat16
                    if (element, parameter.dtype) == ("bfloat16", "T")
                    else element
                    if parameter.dtype == "T"
                    else parameter.dtype,
                )
                for parameter in signature.inputs
            }
            yield onnx.ModelProto.FromString(one_node_model(op, feeds, body=True, opset=opset, **attributes))


# the oldest and the newest here; bodies for those between are written by the same code
@pytest.mark.parametrize("opset", [18, 24, *map(soak, range(19, 24))])
@pytest.mark.parametrize("op", OPS)
def test_no_body_holds_a_trap_or_a_node_that_a_runtime_lacks_or_runs_serially(op: str, opset: int) -> None:
    for model in models_of_bodies(op, opset):
        assert list(traps(model)) == []
        (body,) = model.functions
        assert not {node.op_type for node in body.node} & (FORBIDDEN - EXCEPTIONS.get(op, set()))
        assert {node.domain for node in body.node} == {""}
        assert [(entry.domain, entry.version) for entry in body.opset_import] == [("", opset)]


def test_no_shape_of_a_body_depends_on_values_if_the_number_of_global_tokens_is_bounded() -> None:
    for model in models_of_bodies("BandedAttention", 20, most_globals=4):
        assert not {node.op_type for node in model.functions[0].node} & FORBIDDEN


def test_a_body_that_takes_sizes_from_its_node_holds_no_trap() -> None:
    narrow, wide = (next(models_of_bodies("BandedAttention", 20, left=reach)) for reach in (4, 9))
    nodes = [*narrow.graph.node, *wide.graph.node]
    narrow.functions[0].CopyFrom(OPS["BandedAttention"].load().onnx_function_body(nodes, 20))
    assert any(attribute.ref_attr_name for node in narrow.functions[0].node for attribute in node.attribute)
    assert list(traps(narrow)) == []


@pytest.mark.parametrize("op", OPS)
def test_an_untyped_constant_is_found_in_any_body(op: str) -> None:
    import onnx

    model = next(models_of_bodies(op, 20))
    constant = next(node for node in model.functions[0].node if node.op_type == "Constant")
    constant.attribute[0].CopyFrom(onnx.helper.make_attribute("value_ints", [0]))
    assert any(f"computes {constant.output[0]}" in trap and "has value_ints" in trap for trap in traps(model))


def traps_of(nodes: str) -> list[str]:
    """Traps of a model of one call, out = Trap(x, y, f), whose body is made of these nodes; f is float16."""
    import onnx.parser

    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20, "{DOMAIN}" : 1]>
        main (int64[a, b] x, int64[1] y, float16[a, b] f) => (out) {{ out = {DOMAIN}.Trap (x, y, f) }}
        <domain: "{DOMAIN}", opset_import: ["" : 20]>
        Trap (x, y, f) => (out) {{ {with_constants(nodes)} }}
    """)
    return list(traps(model))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("out = Constant <value_float = 1.0> ()", "the Constant that computes out has value_float; expected `value`"),
        ("out = Constant <value_floats = [1.0]> ()", "has value_floats"),
        ("out = Constant <value_ints = [1]> ()", "has value_ints"),
        ("""
        one = 1.0
        out = CastLike (one, f)""", "the CastLike that computes out casts a constant"),
        ("out = Div (x, y)", "the Div that computes out rounds integers"),
        ("""
        eight = 8
        whole = Div (x, eight)
        out = Add (whole, eight)""", "the Div that computes whole.* rounds integers"),
        ("""
        eight = 8
        rest = Mod (x, y)
        multiple = Sub (x, rest)
        out = Div (multiple, eight)""", "rounds integers"),
        ("""
        rest = Mod (x, y)
        multiple = Add (x, rest)
        out = Div (multiple, y)""", "rounds integers"),
        ("""
        one = 1
        axis = [1]
        near = Add (x, one)
        both = Concat <axis = 1> (x, near)
        out = ReduceMax (both, axis)""", "the ReduceMax that computes out follows a Concat directly"),
        ("""
        ends = [0, 0, 0, 1]
        fill = 2147483647
        out = Pad (x, ends, fill)""", "the Pad that computes out has a fill that may be beyond 2.24"),
        (f"""
        ends = [0, 0, 0, 1]
        fill = {-LARGEST_FILL - 1}
        out = Pad (x, ends, fill)""", "has a fill"),
        ("""
        ends = [0, 0, 0, 1]
        out = Pad (x, ends, y)""", "has a fill"),
        ("""
        ends = [0, 0, 0, 1]
        fill = Constant <value_int = 1> ()
        out = Pad (x, ends, fill)""", "has a fill"),
    ],
)  # fmt: skip
def test_every_trap_is_found(nodes: str, message: str) -> None:
    (trap, *_) = traps_of(nodes)
    assert re.search(message, trap)


@pytest.mark.parametrize(
    "nodes",
    [
        rounded_down("out", "x", "y"),
        "out = Div (f, f)",
        f"""
        ends = [0, 0, 0, 1]
        fill = {LARGEST_FILL}
        out = Pad (x, ends, fill)""",
        """
        ends = [0, 0, 0, 1]
        least = -1e30
        fill = Cast <to = 10> (least)
        out = Pad (f, ends, fill)""",
        """
        ends = [0, 0, 0, 1]
        out = Pad (x, ends)""",
        "out = CastLike (x, f)",
    ],
)
def test_the_constructs_that_stand_for_traps_are_accepted(nodes: str) -> None:
    assert traps_of(nodes) == []


def test_lines_with_literals_become_typed_constants_if_a_node_uses_them() -> None:
    import onnx
    import onnx.parser

    nodes = with_constants("""
        whole = -3
        eps = 1e-06
        big = -3.402823466e+38
        axes = [0, -1]
        unused = 7
        out = Concat <axis = 0> (whole, eps, big, axes)
    """)
    function = onnx.parser.parse_function(f'<domain: "d", opset_import: ["" : 20]> F () => (out) {{ {nodes} }}')
    arrays = [onnx.numpy_helper.to_array(node.attribute[0].t) for node in function.node[:4]]
    assert [array.dtype.name for array in arrays] == ["int64", "float32", "float32", "int64"]
    assert [array.tolist() for array in arrays] == [-3, np.float32(1e-6), np.finfo(np.float32).min, [0, -1]]
    assert [node.op_type for node in function.node[4:]] == ["Concat"]


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_the_type_of_an_operators_outputs_is_that_of_its_signature(op: Op) -> None:
    outputs = op.load().SIGNATURE.outputs
    assert [output.dtype for output in outputs] == [op.type_of_output(i) for i in range(len(outputs))]
