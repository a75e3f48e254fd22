"""Files that lost a part in another tool: one error names the part, the tools that do it, and the remedy."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper, version_converter

from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.export.custom_nodes import inlined
from effexport.export.onnx_graph import load_graph
from effexport.proof.matching import check_nothing_lost

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]
Cli = Callable[..., Any]


def without_functions(model: onnx.ModelProto) -> None:
    del model.functions[:]


def with_a_mask_of_ones(model: onnx.ModelProto) -> None:
    """The mask becomes a constant, as a tool makes it that is given its value."""
    mask = next(value for value in model.graph.input if value.name == "attention_mask")
    model.graph.input.remove(mask)
    ones = helper.make_tensor("attention_mask", TensorProto.INT64, [1, 64], [1] * 64)
    model.graph.initializer.append(ones)


def with_another_input_name(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.input[:] = ["x_ids" if name == "input_ids" else name for name in node.input]
    model.graph.input[0].name = "x_ids"


def with_another_output_name(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Identity", [model.graph.output[0].name], ["x"]))
    model.graph.output[0].name = "x"


def with_int32_inputs(model: onnx.ModelProto) -> None:
    for value in model.graph.input:
        value.type.tensor_type.elem_type = TensorProto.INT32


def with_a_float16_output(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16


def with_an_output_of_unknown_type(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.UNDEFINED


def with_a_fixed_length(model: onnx.ModelProto) -> None:
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = 64


def with_another_rank(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim.add().dim_value = 1


LOST: dict[Callable[[onnx.ModelProto], None], tuple[str, str]] = {
    without_functions: (
        "function bodies: effexport::LSHAttention, effexport::LSHHash, effexport::LSHSort have none, so only "
        "effexport's kernels could run",
        "Known: onnx.version_converter (onnx 1.23) drops them. Remedy: let the tool change a file that has no "
        "functions, made by: effexport inline ARTIFACT -o FILE",
    ),
    with_a_mask_of_ones: (
        "inputs or outputs: the file has input_ids int64 [batch, seq], last_hidden_state",
        "onnxslim",
    ),
    with_another_input_name: ("inputs or outputs: the file has x_ids int64 [batch, seq]", "onnx.compose.add_prefix"),
    with_another_output_name: (
        "x float32 [batch, seq, 32]; expected input_ids int64",
        "onnxslim --inputs and --outputs",
    ),
    with_int32_inputs: ("element types: the file has input_ids int32 [batch, seq]", "--input_int32"),
    with_a_float16_output: ("last_hidden_state float16 [batch, seq, 32]; expected", "keep_io_types=True"),
    with_an_output_of_unknown_type: ("last_hidden_state ? [batch, seq, 32]; expected", "onnxconverter-common"),
    with_a_fixed_length: ("dynamic dimensions: the file has input_ids int64 [batch, 64]", "overwrite_input_shapes"),
    with_another_rank: ("dynamic dimensions: the file has input_ids int64 [batch, seq, 1]", "onnxslim --input-shapes"),
}


def test_an_additional_output_is_not_called_a_loss(cli: Cli, built: Built, tmp_path: Path) -> None:
    artifact = built("lsh", "encoder")
    model = load_graph(artifact.model_path)
    model.graph.node.append(helper.make_node("Identity", [model.graph.output[0].name], ["extra"]))
    model.graph.output.append(helper.make_tensor_value_info("extra", TensorProto.FLOAT, ["batch", "seq", 32]))
    onnx.save(model, tmp_path / "changed.onnx")
    message = cli("verify", artifact.path, "--model", tmp_path / "changed.onnx").error(2)
    (added,) = message.splitlines()
    assert (
        "changed.onnx cannot be compared with the artifact, because it has more than the artifact: additional inputs "
        "or outputs: the file has input_ids int64 [batch, seq]"
    ) in added
    assert "extra float32 [batch, seq, 32]; expected input_ids" in added
    assert added.endswith(". Remedy: remove them, or verify the file with the artifact that it was made from")
    without_functions(model)
    onnx.save(model, tmp_path / "changed.onnx")
    message = cli("verify", artifact.path, "--model", tmp_path / "changed.onnx").error(2)
    assert "because parts are lost: (1) function bodies: " in message


@pytest.mark.parametrize("damage", LOST, ids=lambda damage: damage.__name__)
def test_a_lost_part_is_one_error_with_tools_and_remedy(
    cli: Cli, built: Built, tmp_path: Path, damage: Callable[[onnx.ModelProto], None]
) -> None:
    artifact = built("lsh", "encoder")
    model = load_graph(artifact.model_path)
    damage(model)
    onnx.save(model, tmp_path / "changed.onnx")
    message = cli("verify", artifact.path, "--model", tmp_path / "changed.onnx").error(2)
    (lost,) = message.splitlines()
    assert "changed.onnx cannot be compared with the artifact, because parts are lost: " in lost
    for part in LOST[damage]:
        assert part in lost
    assert "Known: " in lost
    assert "Remedy: " in lost
    with pytest.raises(UserError):
        check_nothing_lost(tmp_path / "changed.onnx", artifact.spec)


def test_everything_that_is_lost_is_named_at_once(built: Built, tmp_path: Path) -> None:
    artifact = built("lsh", "encoder")
    model = load_graph(artifact.model_path)
    for damage in (without_functions, with_a_float16_output, with_a_fixed_length):
        damage(model)
    onnx.save(model, tmp_path / "changed.onnx")
    with pytest.raises(UserError) as error:
        check_nothing_lost(tmp_path / "changed.onnx", artifact.spec)
    (line,) = str(error.value).splitlines()
    parts = re.findall(r"\(\d\) ([a-z ]+): ", line)
    assert parts == ["function bodies", "element types", "dynamic dimensions"]


def test_another_model_is_called_one_and_has_lost_nothing(cli: Cli, built: Built) -> None:
    layer, encoder = built("aft-simple", "attention"), built("softmax", "encoder")
    inputs = "its inputs are input_ids int64 [batch, seq], attention_mask int64 [batch, seq]; those of "
    for arguments, name in (
        (("--model", encoder.model_path), str(encoder.model_path)),
        (("--reference", f"{encoder.path}@ort"), f"--reference {encoder.path}@ort"),
    ):
        (message,) = cli("verify", layer.path, *arguments).error(2).splitlines()
        assert f"{name} is another model: {inputs}{layer.path} are " in message


@pytest.mark.requires("native")
def test_a_file_without_bodies_is_refused_though_kernels_could_run_it(cli: Cli, built: Built, tmp_path: Path) -> None:
    artifact = built("linear", "attention")
    model = load_graph(artifact.model_path)
    without_functions(model)
    onnx.save(model, tmp_path / "changed.onnx")
    for implementation in ("auto", "kernel"):
        arguments = ["--model", tmp_path / "changed.onnx", "--implementation", implementation]
        assert "only effexport's kernels could run the file" in cli("verify", artifact.path, *arguments).error(2)


def test_the_version_converter_of_onnx_drops_functions_and_keeps_an_inlined_file_whole(
    built: Built, tmp_path: Path
) -> None:
    artifact = built("linear", "attention")
    model = load_graph(artifact.model_path)
    onnx.save(version_converter.convert_version(model, 23), tmp_path / "converted.onnx")
    with pytest.raises(UserError, match="function bodies: effexport::EluLinearAttention have none"):
        check_nothing_lost(tmp_path / "converted.onnx", artifact.spec)
    onnx.save(version_converter.convert_version(inlined(model), 23), tmp_path / "converted.onnx")
    check_nothing_lost(tmp_path / "converted.onnx", artifact.spec)


def test_missing_weights_are_named_with_a_remedy(cli: Cli, built: Built, tmp_path: Path) -> None:
    artifact = built("linear", "encoder", external_data=True)
    shutil.copy(artifact.model_path, tmp_path / "alone.onnx")
    message = cli("verify", artifact.path, "--model", tmp_path / "alone.onnx").error(2)
    assert f"keeps weights in 'model.onnx.data', which is missing from {tmp_path}; copy that file too" in message


def test_weights_that_are_cut_short_are_named_with_both_sizes(cli: Cli, built: Built, tmp_path: Path) -> None:
    artifact = built("linear", "encoder", external_data=True)
    shutil.copy(artifact.model_path, tmp_path / "cut.onnx")
    weights = (artifact.path / "model.onnx.data").read_bytes()
    (tmp_path / "model.onnx.data").write_bytes(weights[:1000])
    message = cli("verify", artifact.path, "--model", tmp_path / "cut.onnx").error(2)
    size = re.search(r"is too short: it has 1000 bytes; expected at least (\d+)\. Copy that file again", message)
    assert size is not None
    assert 1000 < int(size[1]) <= len(weights)


def test_healthy_files_have_lost_nothing(built: Built, variant: str, scope: str, tmp_path: Path) -> None:
    artifact = built(variant, scope)
    check_nothing_lost(artifact.model_path, artifact.spec)
    model = load_graph(artifact.model_path)
    # names of dimensions do not matter, nor do weights that are listed as inputs, as in old files
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_param = "unk__1"
        value.type.tensor_type.shape.dim[1].ClearField("dim_param")
    weight = next(tensor for tensor in model.graph.initializer if tensor.dims)
    model.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
    onnx.save(model, tmp_path / "other.onnx")
    check_nothing_lost(tmp_path / "other.onnx", artifact.spec)
