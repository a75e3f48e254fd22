"""A model whose functions are inlined: standard operators only, the same names where others look for them, and the same
bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from small_builds import exported
from small_specs import spec_of

from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.export.custom_nodes import inlined
from effexport.export.onnx_graph import all_nodes, graph_tensors, load_graph
from effexport.plugins.ops import DOMAIN
from effexport.proof.candidate import given_values
from effexport.proof.cases import load_reference
from effexport.proof.inputs import random_inputs
from effexport.proof.trace import module_of_node

if TYPE_CHECKING:
    from effexport.base.dtypes import Array

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]


def outputs_of(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> list[Array]:
    """The outputs of a model in ONNX Runtime, without kernels."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs: list[Array] = session.run(None, dict(inputs))
    return outputs


def test_the_result_has_standard_operators_only_and_computes_the_same_bits(
    built: Built, variant: str, scope: str
) -> None:
    """Also: names are unique, stable, and those of the graph before."""
    artifact = built(variant, scope)
    model = load_graph(artifact.model_path)
    before = model.SerializeToString()
    result = inlined(model)
    assert model.SerializeToString() == before
    onnx.checker.check_model(result, full_check=True)
    assert [entry.domain for entry in result.opset_import] == [""]
    assert result.opset_import[0].version == artifact.spec.opset
    assert not result.functions
    assert {node.domain for node in all_nodes(result)} == {""}
    assert "CastLike" not in {node.op_type for node in all_nodes(result)}
    assert graph_tensors(result.graph.input) == artifact.spec.inputs
    assert graph_tensors(result.graph.output) == artifact.spec.outputs
    values = [value for node in result.graph.node for value in node.output if value]
    nodes = [node.name for node in result.graph.node]
    assert len(set(values)) == len(values)
    assert len(set(nodes)) == len(nodes)
    assert {value for node in model.graph.node for value in node.output} <= set(values)
    assert [tensor.name for tensor in result.graph.initializer] == [tensor.name for tensor in model.graph.initializer]
    assert inlined(model).SerializeToString(deterministic=True) == result.SerializeToString(deterministic=True)
    rng = np.random.default_rng(0)
    for seq_len, lengths in ((64, None), (37, [37, 19, 1])):
        inputs = random_inputs(artifact.spec, rng, 3, seq_len, lengths)
        for given, expected in zip(outputs_of(result, inputs), outputs_of(model, inputs), strict=True):
            np.testing.assert_array_equal(given, expected)


@pytest.mark.parametrize("name", ["nystrom", "lsh"])
def test_half_precision_computes_the_same_bits_too(name: str) -> None:
    spec = spec_of(name, precision="fp16")
    model = load_graph(exported(spec))
    inputs = random_inputs(spec, np.random.default_rng(0), 2, 50, [50, 7])
    for given, expected in zip(outputs_of(inlined(model), inputs), outputs_of(model, inputs), strict=True):
        np.testing.assert_array_equal(given, expected)


@pytest.mark.parametrize("fields", [{"precision": "bf16", "bf16": "linear"}, {"precision": "int8"}], ids=str)
def test_branches_of_constants_are_taken(built: Built, fields: dict[str, Any]) -> None:
    """Linear layers with and without an activation share a body, which has an If of their attribute."""
    artifact = built("softmax", **fields)
    model = load_graph(artifact.model_path)
    result = inlined(model)
    onnx.checker.check_model(result, full_check=True)
    assert "If" in {node.op_type for node in all_nodes(model)}
    assert "If" not in {node.op_type for node in all_nodes(result)}
    inputs = load_reference(artifact.reference_path)[0].inputs
    for mine, theirs in zip(outputs_of(result, inputs), outputs_of(model, inputs), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_nodes_of_a_body_belong_to_the_module_of_their_call(built: Built) -> None:
    model = load_graph(built("nystrom", "encoder").model_path)
    callers = {module_of_node(node) for node in model.graph.node if node.domain == DOMAIN}
    before = {value for node in model.graph.node for value in node.output}
    new = [node for node in inlined(model).graph.node if node.output[0] not in before]
    assert new
    assert {module_of_node(node) for node in new} == callers - {""}


def test_buckets_are_still_found(built: Built, tmp_path: Path) -> None:
    artifact = built("lsh", "encoder")
    hashes = artifact.manifest.hash_values
    onnx.save(inlined(load_graph(artifact.model_path)), tmp_path / "inlined.onnx")
    assert list(given_values(tmp_path / "inlined.onnx", hashes).values()) == list(hashes) != []


def test_external_weights_stay_in_their_file(tmp_path: Path) -> None:
    spec = spec_of("linear", external_data=True)
    source = exported(spec)
    result = inlined(load_graph(source))
    given = random_inputs(spec, np.random.default_rng(0), 1, 20, None)
    (tmp_path / "model.onnx.data").write_bytes((source.parent / "model.onnx.data").read_bytes())
    onnx.save(result, tmp_path / "inlined.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "inlined.onnx", providers=["CPUExecutionProvider"])
    expected = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, given)
    np.testing.assert_array_equal(session.run(None, given)[0], expected[0])


def test_operators_of_other_domains_keep_their_import(built: Built) -> None:
    model = load_graph(built("linear", "encoder").model_path)
    value = model.graph.node[-1].output[0]
    model.graph.node[-1].output[0] = "before"
    model.graph.node.append(helper.make_node("Gelu", ["before"], [value], domain="com.microsoft"))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert {entry.domain for entry in inlined(model).opset_import} == {"", "com.microsoft"}


def test_a_node_of_ours_without_a_body_is_refused(built: Built) -> None:
    model = load_graph(built("nystrom", "encoder").model_path)
    kept = [function for function in model.functions if function.name != "IterativePinv"]
    del model.functions[:]
    model.functions.extend(kept)
    with pytest.raises(UserError, match="no function body for effexport::IterativePinv; expected a file as"):
        inlined(model)


def test_bodies_of_another_opset_are_refused(built: Built) -> None:
    model = load_graph(built("linear", "encoder").model_path)
    model.opset_import[0].version = 21
    with pytest.raises(UserError, match="function bodies of the model do not fit it: Opset mismatch"):
        inlined(model)
