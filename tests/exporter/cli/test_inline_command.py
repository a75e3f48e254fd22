"""`effexport inline`, and artifacts built with --inline: standard operators only, proven, and said everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from small_specs import SMALL
from weights_elsewhere import move_weights

from effexport.artifact import Artifact, open_artifact
from effexport.export.module_source import module_from_seed
from effexport.export.onnx_graph import all_nodes, external_sizes, load_graph
from effexport.models.variants import ATTENTION_SPECS
from effexport.options import BuildOptions
from effexport.pipeline.request import BuildRequest
from effexport.proof.cases import load_reference
from effexport.proof.trace import TracedModule, trace_from_model
from effexport.runners.artifact_runner import runner_from_artifact

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Cli = Callable[..., Any]
Built = Callable[..., Artifact]


def is_standard(path: Path) -> bool:
    model = load_graph(path)
    return not model.functions and all(node.domain == "" for node in all_nodes(model))


@pytest.mark.parametrize("name", ["nystrom", "lsh"])
def test_a_file_is_written_and_proven(cli: Cli, built: Built, tmp_path: Path, name: str) -> None:
    artifact = built(name, "encoder")
    output = tmp_path / "inlined.onnx"
    result = cli("inline", artifact.path, "-o", output, "--json")
    assert result.code == 0, result.err
    assert is_standard(output)
    assert [path.name for path in tmp_path.iterdir()] == ["inlined.onnx"]
    assert result.json["files"] == [str(output)]
    assert result.json["bytes"] == output.stat().st_size
    assert result.json["nodes"] == len(load_graph(output).graph.node)
    assert result.json["inlined"] == artifact.manifest.custom_ops
    assert result.json["passed"] is True
    verified = cli("verify", artifact.path, "--model", output, "--reference", "golden", "--json").json
    assert verified["summary"] == result.json["summary"]
    assert verified["passed"] is True
    assert verified["implementation"] == {}


def test_the_line_says_what_the_file_is_for(cli: Cli, built: Built, tmp_path: Path) -> None:
    result = cli("inline", built("linear", "encoder").path, "-o", tmp_path / "x.onnx")
    (line,) = result.out.splitlines()
    assert re.match(
        r"\S+x\.onnx: \d+ nodes, all of them standard operators of opset 20 \(effexport::EluLinearAttention inlined\), "
        r"0\.\d MB; equal to PyTorch, \d+ checks passed(, \d+ not applicable)?\. "
        r"It is for tools that know no model-local functions",
        line,
    )
    assert (
        "(the model had no custom operators)"
        in cli("inline", built("aft-full", "encoder").path, "-o", tmp_path / "y.onnx").out
    )


def test_external_weights_go_beside_the_file(cli: Cli, built: Built, tmp_path: Path) -> None:
    artifact = built("linear", "encoder", external_data=True)
    output = tmp_path / "inlined.onnx"
    assert cli("inline", artifact.path, "-o", output).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inlined.onnx", "inlined.onnx.data"]
    assert set(external_sizes(load_graph(output))) == {"inlined.onnx.data"}
    output.unlink()
    message = cli("inline", artifact.path, "-o", output).error()
    assert message.startswith(f"{output}.data exists")
    assert not output.exists()


def test_weights_of_another_name_do_not_replace_a_file_either(
    cli: Cli, copied: Callable[..., Path], rewrite_manifest: Callable[..., None], tmp_path: Path
) -> None:
    folder = copied("linear", "encoder", external_data=True)
    move_weights(folder, "other.data")
    rewrite_manifest(folder)
    (tmp_path / "x.onnx.data").write_text("of the user")
    assert f"{tmp_path / 'x.onnx.data'} exists" in cli("inline", folder, "-o", tmp_path / "x.onnx").error()
    assert (tmp_path / "x.onnx.data").read_text() == "of the user"
    assert not (tmp_path / "x.onnx").exists()
    assert cli("inline", folder, "-o", tmp_path / "x.onnx", "--force").code == 0


def test_weights_of_a_replaced_file_are_kept_and_said_to_be_unused(cli: Cli, built: Built, tmp_path: Path) -> None:
    output, data = tmp_path / "x.onnx", tmp_path / "x.onnx.data"
    unused = f" {data} is older, and the model does not use it."
    external = built("linear", "encoder", external_data=True).path
    assert unused not in cli("inline", external, "-o", output).out
    weights = data.read_bytes()
    assert cli("inline", built("linear", "encoder").path, "-o", output, "--force").out.rstrip().endswith(unused)
    assert data.read_bytes() == weights
    assert unused not in cli("inline", external, "-o", output, "--force").out


def test_outputs_that_exist_or_cannot_be_are_refused(cli: Cli, built: Built, tmp_path: Path) -> None:
    artifact = built("linear", "encoder").path
    (tmp_path / "old.onnx").write_text("old")
    assert (
        "old.onnx exists; choose another file with -o, or replace it with --force"
        in cli("inline", artifact, "-o", tmp_path / "old.onnx").error()
    )
    assert (tmp_path / "old.onnx").read_text() == "old"
    assert cli("inline", artifact, "-o", tmp_path / "old.onnx", "--force").code == 0
    assert is_standard(tmp_path / "old.onnx")
    assert "is a folder; expected the path of a file" in cli("inline", artifact, "-o", tmp_path, "--force").error()
    for inside in ("model.onnx", "new.onnx"):
        assert "would change the artifact" in cli("inline", artifact, "-o", artifact / inside, "--force").error()
    (tmp_path / "link.onnx").symlink_to(artifact / "model.onnx")
    assert "would change the artifact" in cli("inline", artifact, "-o", tmp_path / "link.onnx", "--force").error()
    assert "is not a regular file" in cli("inline", artifact, "-o", "/dev/null", "--force").error()
    open_artifact(artifact)


def test_nothing_is_written_if_a_check_fails(
    cli: Cli, copied: Callable[..., Path], rewrite_manifest: Callable[..., None], tmp_path: Path
) -> None:
    folder = copied("nystrom", "encoder")
    model = onnx.load(folder / "model.onnx")
    body = next(function for function in model.functions if function.name == "IterativePinv")
    node = next(node for node in body.node if node.op_type == "Sub")
    node.input[:] = list(node.input)[::-1]
    onnx.save(model, folder / "model.onnx")
    rewrite_manifest(folder)
    output = tmp_path / "inlined.onnx"
    output.write_text("old")
    message = cli("inline", folder, "-o", output, "--force").error(1)
    assert re.match(r"inline: \d+ checks failed, \d+ passed; nothing was written", message)
    assert output.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "inlined.onnx"]


@pytest.mark.parametrize("name", ["lsh", pytest.param("nystrom", marks=pytest.mark.soak)])
def test_an_artifact_built_inline_says_so_everywhere(cli: Cli, built: Built, tmp_path: Path, name: str) -> None:
    artifact = built(name, "encoder", inline=True)
    assert is_standard(artifact.model_path)
    assert artifact.spec.inline
    assert artifact.manifest.custom_ops == {}
    with runner_from_artifact(artifact) as runner:
        assert runner.implementation == {}
    verified = cli("verify", artifact.path, "--reference", "golden", "--json").json
    assert (verified["passed"], verified["implementation"]) == (True, {})
    described = cli("inspect", artifact.path, "--json").json
    assert described["graph"]["custom_ops"] == {}
    assert described["spec"]["inline"] is True
    assert "effexport::" not in cli("inspect", artifact.path).out
    report = cli("report", artifact.path, "--json").json
    assert (report["verdict"], report["implementation"]) == ("passed", {})
    packaged = cli("package", artifact.path, "-o", tmp_path / "triton", "--backend", "onnxruntime", "--json")
    assert packaged.code == 0, packaged.err
    assert not list((tmp_path / "triton").rglob("*.so"))
    assert "(the model had no custom operators)" in cli("inline", artifact.path, "-o", tmp_path / "again.onnx").out


@pytest.mark.slow
def test_the_decode_step_of_an_artifact_built_inline_is_standard_too(built: Built) -> None:
    artifact = built("linear", "attention", causal=True, inline=True)
    assert is_standard(artifact.model_path)
    assert is_standard(artifact.decode_step_path)


def test_every_value_of_an_inlined_model_is_traced(built: Built) -> None:
    plain, artifact = built("nystrom", "encoder"), built("nystrom", "encoder", inline=True)
    module = TracedModule(module_from_seed(artifact.spec), artifact.spec)
    case = load_reference(artifact.reference_path)[0]
    trace = trace_from_model(artifact.model_path, artifact.model_path, module, case)
    assert trace.first_divergence is None
    assert len(trace.values) == trace.pairable
    # as many as in a model whose custom operators are nodes
    other = trace_from_model(
        plain.model_path, plain.model_path, TracedModule(module_from_seed(plain.spec), plain.spec), case
    )
    assert trace.pairable == other.pairable


def test_every_field_reaches_the_spec(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text('variant = "lsh"\n[build]\ninline = true\n')
    for flags, file, expected in (
        ({"variant": "lsh", "inline": True}, None, True),
        ({}, tmp_path / "spec.toml", True),
        ({"inline": False}, tmp_path / "spec.toml", False),
        ({"variant": "lsh"}, None, False),
    ):
        spec = BuildRequest.of(BuildOptions(file, **flags)).resolve()[0]
        assert spec.inline is expected
        assert bool(spec.custom_ops) is not expected


def test_no_variant_has_custom_operators_inline() -> None:
    for variant in ATTENTION_SPECS:
        spec = BuildRequest.of(BuildOptions(variant=variant, **SMALL, inline=True)).resolve()[0]
        assert spec.custom_ops == {}


def of_unknown_type(model: onnx.ModelProto) -> bytes:
    value = next(value for value in model.graph.value_info if value.name.startswith("val"))
    value.type.tensor_type.elem_type = 99
    return model.SerializeToString()


def with_bytes_that_are_no_text(model: onnx.ModelProto) -> bytes:
    model.graph.node[0].metadata_props.add(key="effexport.module", value="a module")
    return model.SerializeToString().replace(b"a module", b"a \xeeodule")


@pytest.mark.parametrize("damaged", [of_unknown_type, with_bytes_that_are_no_text])
def test_a_graph_that_onnx_ir_does_not_read_or_write_is_refused(
    built: Any, tmp_path: Path, monkeypatch: Any, damaged: Callable[[onnx.ModelProto], bytes]
) -> None:
    from effexport.base.errors import UserError
    from effexport.cli import packaging

    artifact = built("lsh", "encoder")
    (tmp_path / "model.onnx").write_bytes(damaged(onnx.load(artifact.model_path)))
    monkeypatch.setattr(type(artifact), "model_path", tmp_path / "model.onnx")
    with pytest.raises(UserError, match="is damaged: onnx_ir refuses it"):
        packaging.save_inlined(artifact, tmp_path / "inlined.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
