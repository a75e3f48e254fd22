"""Graphs that `load_graph` refuses before a runtime sees them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from effexport.base.errors import UserError
from effexport.export import onnx_graph
from effexport.export.onnx_graph import graph_outline, load_graph, why_invalid, why_not_readable

pytestmark = pytest.mark.requires("onnx")
OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]

# A name, and as many bytes that are not UTF-8.
MARK, NOT_UTF_8 = "not_utf8", b"not_utf\xff"


def model_of(*functions: tuple[str, tuple[str, ...]]) -> onnx.ModelProto:
    """A model that calls the first function. A function: its name, and the functions that it calls."""
    value = helper.make_tensor_value_info
    call = helper.make_node(functions[0][0], ["x"], ["y"], domain="own")
    graph = helper.make_graph([call], "g", [value("x", 1, [2])], [value("y", 1, [2])])
    made = [
        helper.make_function(
            "own",
            name,
            ["x"],
            ["y"],
            [
                helper.make_node("Identity", ["x"], ["y"]),
                *(helper.make_node(called, ["x"], [f"y{i}"], domain="own") for i, called in enumerate(calls)),
            ],
            OPSETS,
        )
        for name, calls in functions
    ]
    return helper.make_model(graph, opset_imports=OPSETS, functions=made, ir_version=10)


def opset_999(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 999


def opset_0(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 0


def opset_999_of_a_function(model: onnx.ModelProto) -> None:
    model.functions[0].opset_import[0].version = 999


def ir_999(model: onnx.ModelProto) -> None:
    model.ir_version = 999


def no_ir(model: onnx.ModelProto) -> None:
    model.ClearField("ir_version")


def attribute_of_no_function(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.add(name="a", type=onnx.AttributeProto.INT, ref_attr_name="b")


def control_character(model: onnx.ModelProto) -> None:
    model.functions[0].node[0].op_type = "\x1b[2J"


def endless_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer.add(name="w", data_type=1, dims=[2**62] * 2000)


def negative_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer.add(name="w", data_type=1, dims=[-1])


def two_opsets(model: onnx.ModelProto) -> None:
    model.opset_import.add(domain="ai.onnx", version=7)


def training(model: onnx.ModelProto) -> None:
    model.training_info.add().initialization.name = "g"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (control_character, "has a control character"),
        (endless_weight, "its weight 'w' has a shape that no tensor has"),
        (negative_weight, "its weight 'w' has a shape that no tensor has"),
        (two_opsets, "several versions of the standard operators"),
        (training, "it holds a training step"),
        (attribute_of_no_function, "takes an attribute from a function, and is in none"),
        (opset_999, "it needs opset 999, not 1 to "),
        (opset_0, "it needs opset 0, not 1 to "),
        (opset_999_of_a_function, "A needs opset 999, not 1 to "),
        (ir_999, "its IR version is 999, not 3 to "),
        (no_ir, "its IR version is 0, not 3 to "),
    ],
)
def test_what_no_runtime_can_read_is_one_error(
    tmp_path: Path, change: Callable[[onnx.ModelProto], None], words: str
) -> None:
    model = model_of(("A", ()))
    onnx.save(model, tmp_path / "m.onnx")
    load_graph(tmp_path / "m.onnx")
    change(model)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(UserError, match=r"m\.onnx cannot be used: .*; expected a model that onnx .* can read") as error:
        load_graph(tmp_path / "m.onnx")
    assert words in str(error.value)


@pytest.mark.parametrize(
    "functions",
    [
        [("A", ("A",))],
        [("A", ("B",)), ("B", ("A",))],
        [("A", ()), ("B", ("C",)), ("C", ("D",)), ("D", ("B",))],
    ],
)
def test_functions_that_call_themselves_are_found(functions: list[tuple[str, tuple[str, ...]]]) -> None:
    assert why_not_readable(model_of(*functions)).endswith("calls itself")


def test_functions_that_double_each_other_are_found_before_they_fill_the_memory() -> None:
    names = [f"F{level}" for level in range(60)]
    chain = [*((name, (below, below)) for name, below in itertools.pairwise(names)), (names[-1], ())]
    assert "amount to " in why_not_readable(model_of(*chain))
    assert why_not_readable(model_of(*chain[-15:])) == ""


def test_a_name_that_is_not_utf_8_is_one_reason(tmp_path: Path) -> None:
    model = model_of(("A", ()))
    model.graph.output[0].name = MARK
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString().replace(MARK.encode(), NOT_UTF_8))
    assert why_invalid(tmp_path / "m.onnx") == "a name in it is not UTF-8"


@pytest.mark.parametrize(
    ("holder", "place"),
    [
        ("nodes", lambda model: setattr(model.graph.node[0], "op_type", MARK)),
        ("nodes", lambda model: model.graph.node[0].output.append(MARK)),
        ("nodes", lambda model: setattr(model.functions[0].node[0], "name", MARK)),
        ("nodes", lambda model: model.graph.node[0].attribute.add(name="a").g.node.add(name=MARK)),
        ("nodes", lambda model: model.graph.node[0].attribute.add(name=MARK)),
        ("functions", lambda model: setattr(model.functions[0], "name", MARK)),
        ("functions", lambda model: model.functions[0].attribute.append(MARK)),
        ("operator sets", lambda model: model.functions[0].opset_import.add(domain=MARK)),
        ("operator sets", lambda model: model.opset_import.add(domain=MARK)),
        ("weights", lambda model: model.graph.initializer.add(name=MARK)),
        ("weights", lambda model: model.graph.initializer.add().external_data.add(key=MARK)),
        ("weights", lambda model: setattr(model.graph.node[0].attribute.add(name="a").t, "name", MARK)),
        ("values", lambda model: setattr(model.graph.input[0], "name", MARK)),
        ("values", lambda model: model.graph.node[0].attribute.add(name="a").g.value_info.add(name=MARK)),
        ("dimensions", lambda model: model.graph.input[0].type.tensor_type.shape.dim.add(dim_param=MARK)),
    ],
)
def test_names_that_are_not_utf_8_are_found_wherever_they_are(
    holder: str, place: Callable[[onnx.ModelProto], object]
) -> None:
    model = model_of(("A", ()))
    place(model)
    data = model.SerializeToString()
    assert why_not_readable(model) == ""
    read = onnx.ModelProto.FromString(data.replace(MARK.encode(), NOT_UTF_8))
    assert why_not_readable(read) == f"a name of its {holder} is not UTF-8"


def test_functions_that_only_call_later_ones_are_fine() -> None:
    assert why_not_readable(model_of(("A", ("B", "C")), ("B", ("C",)), ("C", ()))) == ""


@pytest.mark.parametrize(
    ("location", "offset", "words"),
    [
        ("x" * 5000, "0", "outside its own folder"),
        ("../m.onnx", "0", "outside its own folder"),
        ("loop", "0", "outside its own folder"),
        ("\x00", "0", "a name of its weights has a control character"),
        (".", "0", "which is missing"),
        ("data", "many", "the place of its external weights cannot be read"),
        ("data", "9" * 5000, "the place of its external weights cannot be read"),
        ("data", str(2**62), "which is too short"),
    ],
)
def test_external_weights_that_cannot_be_found_are_one_error(
    tmp_path: Path, location: str, offset: str, words: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "data").write_bytes(b"1234")
    model = model_of(("A", ()))
    tensor = model.graph.initializer.add(name="w", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", "4")):
        tensor.external_data.add(key=key, value=value)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=r"m\.onnx") as error:
        load_graph(tmp_path / "m.onnx")
    assert words in str(error.value)


def test_a_file_that_is_larger_than_any_model_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "m.onnx").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(UserError, match=r"m\.onnx has more bytes than the 2147483647 that an ONNX file can have"):
        load_graph(tmp_path / "m.onnx")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is not a regular file"):
        load_graph(tmp_path / "pipe")


def weighted_model(path: Path, name: str) -> Path:
    value = helper.make_tensor_value_info
    weights = [
        onnx.numpy_helper.from_array(np.arange(5000, dtype=np.float32), "large"),
        onnx.numpy_helper.from_array(np.array([3], dtype=np.int64), "small"),
    ]
    node = helper.make_node("Add", ["x", "large"], ["y"], name=name)
    graph = helper.make_graph([node], "g", [value("x", 1, [5000])], [value("y", 1, [5000])], weights)
    onnx.save(helper.make_model(graph, opset_imports=OPSETS[:1]), path)
    return path


def test_an_outline_is_the_graph_without_large_weights_and_follows_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_graph, "LARGE_FILE_BYTES", 1)
    (tmp_path / "new").mkdir()
    path = weighted_model(tmp_path / "new" / "model.onnx", "first")
    outline = graph_outline(path)
    large, small = outline.graph.initializer
    assert (large.raw_data, list(large.dims)) == (b"", [5000])
    assert onnx.numpy_helper.to_array(small) == [3]
    assert outline.graph.node == load_graph(path).graph.node
    moved = (tmp_path / "new").rename(tmp_path / "finished") / "model.onnx"
    assert graph_outline(moved) is outline  # read once
    weighted_model(moved, "other")
    assert graph_outline(moved).graph.node[0].name == "other"


def test_the_outline_of_a_file_that_is_not_a_model_is_refused_as_ever(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model file at"):
        graph_outline(tmp_path / "absent.onnx")
