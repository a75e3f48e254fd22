"""`effexport refit`: an artifact with other weights is what a build from these weights would be, or stays as it was."""

from __future__ import annotations

import importlib
import json
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
import torch
from safetensors.torch import save_file
from small_builds import exported
from small_specs import spec_of
from torch import nn
from transformers_models import TINY_NYSTROMFORMER, saved

import effexport
from effexport.artifact import Artifact, manifest_digest, manifest_text, open_artifact
from effexport.base.errors import StageError, UserError
from effexport.base.spec import BuildSpec
from effexport.export.module_source import module_from_seed
from effexport.export.onnx_from_module import Written, onnx_from_module
from effexport.export.onnx_graph import model_digest
from effexport.export.traced_graphs import add_traced, read_traced
from effexport.models.user.spec_from_module import spec_from_module
from effexport.options import BuildOptions
from effexport.pipeline.build import artifact_from_spec
from effexport.pipeline.refit import RefitRequest
from effexport.plugins.ops import SCOPES_KEY
from effexport.proof.cases import load_reference
from effexport.tensorrt.sidecar import read_sidecar
from effexport.tensorrt.spec import EngineSpec, profiles_from_texts

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
ZERO = torch.tensor([0])
Built = Callable[..., Artifact]
Copied = Callable[..., Path]
Cli = Callable[..., Any]


def other_module(spec: BuildSpec) -> nn.Module:
    return module_from_seed(replace(spec, seed=7))


def weights_file(folder: Path, spec: BuildSpec, name: str = "new.safetensors", **changes: torch.Tensor) -> Path:
    path = folder / name
    save_file({**other_module(spec).state_dict(), **changes}, path)
    return path


def state_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_traced_graph_with_other_weights_is_what_their_export_writes(
    built: Built, tmp_path: Path, variant: str
) -> None:
    """Byte for byte, so no weight can be in the wrong place or be left from before. AFT layers fold theirs; the linear
    layers of all variants transpose them."""
    artifact = built(variant, "attention")
    spec = replace(artifact.spec, seed=7)
    onnx_from_module(other_module(spec), spec, tmp_path / "model.onnx", artifact.traced_path)
    assert (tmp_path / "model.onnx").read_bytes() == exported(spec).read_bytes()
    assert (tmp_path / "model.onnx").read_bytes() != artifact.model_path.read_bytes()


def test_equal_weights_share_an_initializer_only_as_long_as_they_are_equal(built: Built, tmp_path: Path) -> None:
    """The exporter merges equal tensors, and drops what adds zero. From such a model, a refit finds its way back."""
    artifact = built("aft-conv", "attention")
    alike = module_from_seed(artifact.spec)
    with torch.no_grad():
        for name, parameter in alike.named_parameters():
            parameter.fill_(float("norm" in name))
    path = tmp_path / "model.onnx"
    onnx_from_module(alike, artifact.spec, path, artifact.traced_path)
    merged = len(onnx.load(path).graph.initializer)
    onnx_from_module(module_from_seed(artifact.spec), artifact.spec, path, artifact.traced_path)
    assert path.read_bytes() == artifact.model_path.read_bytes()
    assert merged < len(onnx.load(path).graph.initializer)


def test_a_traced_graph_holds_no_weights_and_no_path_of_the_machine(built: Built) -> None:
    artifact = built("aft-full", "encoder")
    traced = read_traced(artifact.traced_path, "model.onnx")
    assert traced is not None
    graph = onnx.ModelProto.FromString(traced).graph
    weights = set(module_from_seed(artifact.spec).state_dict())
    assert weights <= {value.name for value in graph.input}
    assert not weights & {tensor.name for tensor in graph.initializer}
    assert b".py" not in traced
    assert artifact.traced_path.stat().st_size < 20_000


def test_a_causal_model_is_replaced_with_its_decode_step_and_prefill(cli: Cli, copied: Copied, tmp_path: Path) -> None:
    folder = copied("linear", "attention", causal=True)
    old = open_artifact(folder)
    file = weights_file(tmp_path, old.spec)
    result = cli("refit", folder, "--weights", file, "--json", "--verbose")
    assert result.code == 0, result.err
    new = open_artifact(folder)
    assert result.json["weights_sha256"] == new.manifest.weights_sha256 != old.manifest.weights_sha256
    assert result.json["verdict"] == "passed"
    (note,) = new.manifest.notes
    before, after = old.manifest.weights_sha256, new.manifest.weights_sha256
    assert note == (
        f"refitted from {folder.name} (weights sha256 {before[:12]}…) with new.safetensors, weights sha256 {after}"
    )
    assert note in effexport.report(folder).notes
    assert note in result.err
    assert "refitted in" in result.err
    assert "exporting" not in result.err
    assert new.manifest.weights_from == "new.safetensors"
    assert new.manifest.files["traced.zip"] == old.manifest.files["traced.zip"]
    # by the proof, they decode what PyTorch computes with the new weights
    assert {"decode step", "prefill"} <= new.manifest.parity.summary.keys()
    for name in ("decode_step.onnx", "prefill.onnx"):
        assert new.manifest.files[name] != old.manifest.files[name]
    module = other_module(old.spec)
    with effexport.load(folder) as runner, torch.no_grad():
        for case in load_reference(new.reference_path):
            (actual,) = runner.run(case.inputs).values()
            hidden, mask = (torch.from_numpy(case.inputs[name]) for name in ("hidden_states", "attention_mask"))
            torch.testing.assert_close(
                torch.from_numpy(actual)[mask != 0], module(hidden, mask)[mask != 0], atol=1e-4, rtol=1e-4
            )


def test_a_second_folder_leaves_the_artifact_alone_and_needs_no_traced_graph(
    copied: Copied, rewrite_manifest: Callable[..., None], tmp_path: Path
) -> None:
    """An artifact of an older effexport has none and is exported again, with the same result."""
    folder = copied("softmax", "attention", precision="fp16", external_data=True)
    spec = open_artifact(folder).spec
    file = weights_file(tmp_path, spec)
    refitted = effexport.refit(folder, weights=file, output=tmp_path / "first").path
    (folder / "traced.zip").unlink()
    rewrite_manifest(folder)
    before, stages = state_of(folder), list[str]()
    again = effexport.refit(
        folder, weights=file, output=tmp_path / "second", progress=lambda stage, share: stages.append(stage)
    ).path
    assert "exporting to ONNX" in stages
    assert state_of(folder) == before
    for name in ("model.onnx", "model.onnx.data", "reference.safetensors", "traced.zip"):
        assert (refitted / name).read_bytes() == (again / name).read_bytes(), name
    with pytest.raises(
        UserError, match="first exists; choose another folder with output=…, or replace it with force=True"
    ):
        effexport.refit(folder, weights=file, output=refitted)
    state = other_module(spec).half().state_dict()
    tensors = onnx.load(refitted / "model.onnx").graph.initializer
    bias = next(tensor for tensor in tensors if tensor.name == "out.bias")
    assert onnx.numpy_helper.to_array(bias).tobytes() == state["out.bias"].numpy().tobytes()


def test_stale_weights_are_caught_by_the_proof_and_the_artifact_stays(
    copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("softmax", "attention")
    before = state_of(folder)

    def stale(module: object, spec: BuildSpec, path: Path, *others: object) -> Written:
        path.write_bytes(before["model.onnx"])
        return Written(Counter())

    monkeypatch.setattr(importlib.import_module("effexport.export.onnx_from_module"), "onnx_from_module", stale)
    file = weights_file(tmp_path, open_artifact(folder).spec)
    with pytest.raises(StageError, match="parity: "):
        effexport.refit(folder, weights=file)
    assert state_of(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def wrong_files(folder: Path, spec: BuildSpec) -> dict[str, tuple[Path, str]]:
    """Files that cannot be the new weights, each with what the error says."""
    state = other_module(spec).state_dict()
    bias = state["out.bias"]
    fewer = folder / "fewer.safetensors"
    save_file({name: tensor for name, tensor in state.items() if name != "out.bias"}, fewer)
    same = folder / "same.safetensors"
    save_file(module_from_seed(spec).state_dict(), same)
    text = folder / "text.safetensors"
    text.write_text("not tensors")
    aft = weights_file(folder, spec_of("aft-simple", "attention", dim=64), "aft.safetensors")
    return {
        "missing": (fewer, "1 missing tensor: out.bias"),
        "unexpected": (weights_file(folder, spec, "more.safetensors", extra=bias), "1 unexpected tensor: extra"),
        "shape": (
            weights_file(folder, spec, "shape.safetensors", **{"out.bias": bias[:-1].clone()}),
            r"1 tensor of the wrong shape: out.bias \[31\], expected \[32\]",
        ),
        "nan": (
            weights_file(folder, spec, "nan.safetensors", **{"out.bias": bias * float("nan")}),
            "1 tensor with NaN or infinity: out.bias",
        ),
        "variant": (aft, "do not fit the model: .* of the wrong shape"),
        "large": (
            weights_file(folder, spec, "large.safetensors", **{"out.bias": bias.clone().index_fill(0, ZERO, -7e4)}),
            "out.bias contains -70000, and the largest number of float16 is 65504; check the weights, or build the",
        ),
        "text": (text, "is not a readable weights file"),
        "absent": (folder / "absent.safetensors", "no weights file at"),
        "folder": (folder, "is a folder; expected a weights file"),
        "same": (same, "holds the weights that .* has already; expected other ones"),
    }


def test_weights_that_do_not_fit_are_one_error_and_change_nothing(copied: Copied, tmp_path: Path) -> None:
    folder = copied("softmax", "attention", precision="fp16", external_data=True)
    before = state_of(folder)
    for name, (file, message) in wrong_files(tmp_path, open_artifact(folder).spec).items():
        with pytest.raises(UserError, match=message) as raised:
            effexport.refit(folder, weights=file)
        assert "--scope" not in str(raised.value)  # it is no option of refit
        assert state_of(folder) == before, name
    with pytest.raises(UserError, match="no artifact at"):
        effexport.refit(tmp_path / "absent", weights=tmp_path / "same.safetensors")


def test_requests_that_cannot_work_are_one_error_with_status_2(cli: Cli, copied: Copied, tmp_path: Path) -> None:
    folder = copied("softmax", "attention")
    file = weights_file(tmp_path, open_artifact(folder).spec)
    before = state_of(folder)
    assert "expected new weights as" in cli("refit", folder, "--weights", file, "--checkpoint", tmp_path).error()
    assert "was built from a variant, softmax" in cli("refit", folder, "--checkpoint", tmp_path).error()
    reference = folder / "reference.safetensors"
    assert "lies in" in cli("refit", folder, "--weights", reference).error()
    inside = folder / "below"
    assert "would change the artifact" in cli("refit", folder, "--weights", file, "-o", inside).error()
    assert cli("refit", folder, "--weights", tmp_path / "absent", "--json").json["exit_code"] == 2
    assert state_of(folder) == before
    (folder / "NOTES.md").write_text("of the user")
    assert (
        "also holds NOTES.md, which refitting in place would remove" in cli("refit", folder, "--weights", file).error()
    )
    (folder / "NOTES.md").unlink()
    (folder / "traced.zip").write_bytes(b"damaged")
    assert "is damaged: traced.zip has 7 bytes" in cli("refit", folder, "--weights", file).error()


def nonsense(graph: bytes) -> bytes:
    return b"nonsense" * 100


def weight_of_another_shape(graph: bytes) -> bytes:
    model = onnx.ModelProto.FromString(graph)
    value = next(value for value in model.graph.input if value.name == "out.weight")
    value.type.tensor_type.shape.dim[0].dim_value = 7
    return model.SerializeToString()


def missing_weight(graph: bytes) -> bytes:
    model = onnx.ModelProto.FromString(graph)
    model.graph.input.remove(next(value for value in model.graph.input if value.name == "out.weight"))
    return model.SerializeToString()


def weight_in_a_file(graph: bytes) -> bytes:
    model = onnx.ModelProto.FromString(graph)
    tensor = model.graph.initializer.add(name="stolen", data_type=onnx.TensorProto.FLOAT, dims=[2])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/hostname")
    return model.SerializeToString()


def unknown_module(graph: bytes) -> bytes:
    model = onnx.ModelProto.FromString(graph)
    for node in model.graph.node:
        node.metadata_props.add(key=SCOPES_KEY, value="(")
    return model.SerializeToString()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "traced.zip is damaged: File is not a zip file"),
        (nonsense, "is damaged: it is not an ONNX model"),
        (weight_of_another_shape, "it takes out.weight float32 [7, 32]; expected out.weight float32 [32, 32]"),
        (missing_weight, "Nodes in a graph must be topologically sorted, however input 'out.weight'"),
        (weight_in_a_file, "it refers to other files"),
        (unknown_module, "cannot be completed: "),
    ],
)
def test_a_traced_graph_that_is_not_one_of_the_model_is_one_error(
    cli: Cli,
    copied: Copied,
    rewrite_manifest: Callable[..., None],
    tmp_path: Path,
    change: Callable[[bytes], bytes] | None,
    words: str,
) -> None:
    folder = copied("softmax", "attention")
    traced = folder / "traced.zip"
    graph = read_traced(traced, "model.onnx")
    assert graph is not None
    if change is None:
        traced.write_bytes(b"hello")
    else:
        traced.unlink()
        add_traced(traced, "model.onnx", change(graph))
    rewrite_manifest(folder)
    before = state_of(folder)
    message = cli("refit", folder, "--weights", weights_file(tmp_path, open_artifact(folder).spec)).error()
    assert words in message
    assert message.endswith("build the artifact again with effexport build")
    assert state_of(folder) == before


def test_a_traced_graph_that_is_too_large_is_neither_kept_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "traced.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.onnx", bytes(1001))
    # effexport.export itself is the function
    monkeypatch.setattr(importlib.import_module("effexport.export.traced_graphs"), "MOST_BYTES", 1000)
    with pytest.raises(UserError, match=r"traced\.zip holds 1001 bytes for model\.onnx; expected at most 1000; build"):
        read_traced(tmp_path / "traced.zip", "model.onnx")
    add_traced(tmp_path / "new.zip", "model.onnx", bytes(1001))
    assert not (tmp_path / "new.zip").exists()


def test_traced_graphs_that_the_manifest_does_not_list_are_not_used(copied: Copied, tmp_path: Path) -> None:
    folder = copied("softmax", "attention")
    values = json.loads((folder / "manifest.json").read_text())
    del values["files"]["traced.zip"]
    values["integrity"] = manifest_digest(values)
    (folder / "manifest.json").write_bytes(manifest_text(values))
    (folder / "traced.zip").write_bytes(b"hello")
    file = weights_file(tmp_path, open_artifact(folder).spec)
    refitted = effexport.refit(folder, weights=file, output=tmp_path / "new")
    assert read_traced(refitted.path / "traced.zip", "model.onnx") is not None


def test_the_artifact_of_a_module_needs_its_module(built: Built) -> None:
    """There is no module of the user's own to compare with otherwise; see test_module_again.py."""
    artifact = built("softmax", "attention")
    model = spec_from_module(module_from_seed(artifact.spec), "my_model:make", 64)
    changes = {"spec": BuildSpec(model=model).to_dict(), "weights_from": "my_model:make"}
    own = Artifact(artifact.path, msgspec.structs.replace(artifact.manifest, **changes))
    with pytest.raises(UserError, match="came from my_model:make, code that an artifact does not hold; name the"):
        RefitRequest(own, artifact.model_path, output=Path("elsewhere")).resolve()


@pytest.mark.requires("transformers")
def test_a_checkpoint_is_replaced_by_one_of_the_same_architecture(cli: Cli, tmp_path: Path) -> None:
    for name, fields, seed in (("first", {}, 0), ("second", {}, 1), ("wider", {"intermediate_size": 64}, 2)):
        saved(tmp_path / name, "NystromformerForMaskedLM", TINY_NYSTROMFORMER | fields, seed)
    effexport.build(checkpoint=tmp_path / "first", output=tmp_path / "out")
    notes = open_artifact(tmp_path / "out").manifest.notes
    before = state_of(tmp_path / "out")
    message = cli("refit", tmp_path / "out", "--checkpoint", tmp_path / "wider").error()
    assert "is of another architecture than" in message
    assert "intermediate_size is 64, not 48" in message
    weights = tmp_path / "second" / "model.safetensors"
    assert "was built from the checkpoint first" in cli("refit", tmp_path / "out", "--weights", weights).error()
    assert "has already" in cli("refit", tmp_path / "out", "--checkpoint", tmp_path / "first").error()
    assert state_of(tmp_path / "out") == before
    assert cli("refit", tmp_path / "out", "--checkpoint", tmp_path / "second").code == 0
    after = open_artifact(tmp_path / "out").manifest
    assert after.weights_from == "second"
    assert after.notes[:-1] == notes
    assert after.notes[-1].startswith("refitted from out ")
    verified = cli("verify", tmp_path / "out", "--reference", "golden", "--weights", tmp_path / "second", "--json").json
    assert verified["summary"]["weights"]["passed"] == 1


def test_notes_about_the_build_before_are_not_repeated(built: Built, tmp_path: Path) -> None:
    artifact = built("softmax", "attention")
    notes = ("of the model", "refitted from x with y", "left out: engine/trt.engine: it has", "--trace: no")
    noted = Artifact(artifact.path, msgspec.structs.replace(artifact.manifest, notes=notes))
    file = weights_file(tmp_path, artifact.spec)
    source, engines = RefitRequest(noted, file, output=tmp_path / "out").resolve()
    assert (list(source.notes), engines) == (["of the model"], [])


@pytest.mark.requires("rtx")
@pytest.mark.filterwarnings("default::effexport.base.errors.EngineWarning")
def test_an_engine_is_built_again_or_left_out(
    cli: Cli, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = built("softmax", "attention").spec
    profiles = profiles_from_texts(("batch=1:2:3,seq=8:32:64", "batch=8"), spec)
    wanted = EngineSpec(target="trt-rtx", profiles=profiles, optimization_level=1, compute_capabilities=(86, 89))
    old, _ = artifact_from_spec(spec, tmp_path / "old", BuildOptions(engines=[wanted]))
    file = weights_file(tmp_path, spec)
    new = effexport.refit(old.path, weights=file, output=tmp_path / "new").artifact
    first, second = (read_sidecar(artifact.engine_path("trt-rtx")) for artifact in (old, new))
    assert second.onnx_sha256 == model_digest(new.model_path) != first.onnx_sha256
    assert (second.profiles, second.options) == (first.profiles, first.options)
    assert second.engine_sha256 != first.engine_sha256
    reason = "TensorRT-RTX is not installed; add it with: pip install 'effexport[rtx]'"
    monkeypatch.setattr(
        "effexport.tensorrt.engine_from_onnx.import_api", lambda target: (_ for _ in ()).throw(UserError(reason))
    )
    result = cli("refit", old.path, "--weights", file, "--verbose")
    assert result.code == 0, result.err
    left_out = f"left out: engine/trt-rtx.engine: it has the old weights and cannot be made again here: {reason}"
    assert f"note: {left_out}" in result.out.splitlines()
    assert f"effexport: warning: {left_out}" in result.err.splitlines()
    after = open_artifact(old.path)
    assert left_out in after.manifest.notes
    assert after.manifest.engines == ()
    assert not (old.path / "engine").exists()
