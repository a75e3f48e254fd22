"""Places of tokens, sizes and angles of positions stay exact where OpenVINO computes in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from one_node import one_node_model

from effexport.artifact import Artifact
from effexport.base.errors import RuntimeFailedError, UserError
from effexport.export.custom_nodes import inlined
from effexport.export.onnx_graph import value_types
from effexport.runners.openvino.runner import ROUNDED, OpenVinoRunner, core_of, import_openvino, keep_places
from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Feeds = dict[str, np.ndarray]
# More than bfloat16 counts, and no multiple of a block.
TOKENS = 700
RANDOM = np.random.default_rng(0)
# bfloat16 has all of these numbers and their sums
X: Feeds = {"x": RANDOM.integers(-4, 5, (2, TOKENS, 8)).astype(np.float32), "w": np.eye(8, dtype=np.float32)}


def graph(nodes: str) -> bytes:
    """A model x [b, n, 8], w [8, 8] → y, whose nodes may use n and place, 0 to n − 1."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float[b, n, 8] x, float[8, 8] w) => (float[b, m, 8] y)
        <int64 zero = {{0}}, int64 one = {{1}}, int64[1] last = {{-1}}, int64[1] axis = {{1}}, int64[1] start = {{0}},
         float part = {{0.75}}, float[1, 8] speeds = {{1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3}}> {{
            length = Shape <start = 1, end = 2> (x)
            n_tokens = Squeeze (length)
            place = Range (zero, n_tokens, one)
            number = Cast <to = 1> (place)
            column = Unsqueeze (number, last)
            {nodes}
        }}""")
    return bytes(model.SerializeToString())


def turned(angle: str) -> bytes:
    """A model whose product with w is behind what it makes of angles [n, 8]."""
    return graph(f"{angle} turn = Cos (angle) product = Mul (x, turn) y = MatMul (product, w)")


def convolution() -> tuple[bytes, Feeds]:
    """The body moves kept tokens to the front."""
    feeds = {
        "x": X["x"],
        "weight": np.ones((8, 3), np.float32),
        "bias": np.zeros(8, np.float32),
        "past": np.zeros((2, 2, 8), np.float32),
        "keep": RANDOM.random((2, TOKENS)) < 0.8,
    }
    return one_node_model("CausalConv", feeds, body=True, silu=0), feeds


def sort() -> tuple[bytes, Feeds]:
    feeds: Feeds = {"buckets": RANDOM.integers(0, 40, (3, TOKENS), np.int32)}
    return one_node_model("LSHSort", feeds, body=True, num_buckets=40), feeds


CASES = {
    "convolution": convolution(),
    "sort": sort(),
    "size": (
        graph("""
            whole = Cast <to = 1> (length) shorter = Mul (whole, part) size = Cast <to = 7> (shorter)
            cut = Slice (x, start, size, axis) y = MatMul (cut, w)
        """),
        X,
    ),
    "angles": (turned("angle = Mul (column, speeds)"), X),
    "angles by an outer product": (turned("angle = MatMul (column, speeds)"), X),
}


def in_bfloat16(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model that rounds as OpenVINO does: every float32 value, but not behind the last product before an output."""
    types = value_types(model)
    producers = {output: node for node in model.graph.node for output in node.output}
    waiting, exact = [output.name for output in model.graph.output], set[str]()
    while waiting:
        name = waiting.pop()
        if name in producers and name not in exact and producers[name].op_type not in ROUNDED:
            exact.add(name)
            waiting += producers[name].input
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        for index, name in enumerate(node.output):
            if name not in exact and types[name][0] == "float32":
                node.output[index] = f"{name}_exact"
                nodes.append(onnx.helper.make_node("Cast", [f"{name}_exact"], [f"{name}_short"], to=16))
                nodes.append(onnx.helper.make_node("Cast", [f"{name}_short"], [name], to=1))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def standard(model: bytes, *, kept: bool) -> onnx.ModelProto:
    proto = inlined(onnx.ModelProto.FromString(model))
    if kept:
        keep_places(proto)
    return proto


def answer(model: bytes, feeds: Feeds) -> Feeds:
    with OrtRunner(model, RunOptions(implementation="body")) as runner:
        return runner.run(feeds)


def is_right(given: Feeds, expected: Feeds) -> bool:
    """Within the rounding of a product; with another place or angle, it is wrong by about 1."""
    return all(
        given[name].shape == expected[name].shape and np.abs(given[name] - expected[name]).max() < 0.1
        for name in expected
    )


@pytest.mark.parametrize("case", CASES)
def test_places_are_right_in_bfloat16_and_would_not_be_otherwise(case: str) -> None:
    model, feeds = CASES[case]
    expected = answer(model, feeds)
    assert is_right(answer(in_bfloat16(standard(model, kept=True)).SerializeToString(), feeds), expected)
    try:
        rounded = answer(in_bfloat16(standard(model, kept=False)).SerializeToString(), feeds)
    except RuntimeFailedError:  # an index beyond the data
        return
    assert not is_right(rounded, expected)


@pytest.mark.parametrize("case", CASES)
def test_a_graph_that_keeps_places_computes_the_same_bits_in_float32(case: str) -> None:
    model, feeds = CASES[case]
    given = answer(standard(model, kept=True).SerializeToString(), feeds)
    for name, array in answer(model, feeds).items():
        assert np.array_equal(given[name], array)


@pytest.mark.parametrize("name", ["lsh", "nystrom", "window", "gated-delta"])
def test_our_bodies_make_indices_of_integers_alone(built: Callable[..., Artifact], name: str) -> None:
    model = standard(built(name, "attention").model_path.read_bytes(), kept=True)
    types = value_types(model)
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    indices = [node.input[0] for node in casts if types[node.output[0]][0] in ("int32", "int64")]
    assert {types[name][0] for name in indices} <= {"bool", "int32", "int64"}
    assert len(model.graph.output) == 1


@pytest.mark.requires("openvino")
@pytest.mark.parametrize("case", CASES)
def test_openvino_in_bfloat16_has_the_right_places(case: str) -> None:
    model, feeds = CASES[case]
    options = RunOptions(runtime="openvino", threads=1, precision_hint="bf16")
    if "BF16" not in core_of(import_openvino()).get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        with pytest.raises(UserError, match="use a CPU with AVX512-BF16 or AMX"):
            OpenVinoRunner(model, options)
        return
    with OpenVinoRunner(model, options) as runner:
        assert is_right(runner.run(feeds), answer(model, feeds))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (graph("scores = MatMul (x, w) code = Cast <to = 7> (scores) y = Cast <to = 1> (code)"), "MatMul rounds"),
        (turned('angle = Einsum <equation = "ij,kl->il"> (column, speeds)'), "Einsum rounds"),
    ],
)
def test_an_index_or_an_angle_that_cannot_be_kept_is_refused(model: bytes, message: str) -> None:
    with pytest.raises(UserError, match=rf"--precision-hint bf16 does not apply .*{message} .*; leave it out"):
        standard(model, kept=True)


def test_sines_of_activations_stay_in_bfloat16() -> None:
    model = graph("scores = MatMul (x, w) wave = Sin (scores) y = MatMul (wave, w)")
    assert [output.name for output in standard(model, kept=True).graph.output] == ["y"]
