"""The artifact folder: what it says, what damage it notices, and that no failure leaves half of one behind."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx.inliner
import pytest
from fused_operators import FUSED
from onnx import TensorProto, helper, numpy_helper
from slow_cases import soak

from effexport.artifact import (
    ARTIFACT_FOLDER,
    Artifact,
    FileEntry,
    manifest_digest,
    manifest_text,
    open_artifact,
    read_manifest,
    why_not_states,
    write_manifest,
)
from effexport.base.dtypes import TensorInfo
from effexport.base.errors import DiskError, StageError, UserError
from effexport.base.spec import BuildSpec
from effexport.export.onnx_from_module import Written
from effexport.options import BuildOptions
from effexport.pipeline.build import artifact_from_spec
from effexport.proof.check import CaseLabel, Check

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]
Copied = Callable[..., Path]
Rewrite = Callable[..., None]
HASHED_FILES = ("model.onnx", "reference.safetensors", "report.html", "report.json", "traced.zip")
FILES = ("manifest.json", *HASHED_FILES)


def state_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def build_into(output: Path, *, force: bool, work: Callable[[Path], None] = lambda folder: None) -> None:
    with ARTIFACT_FOLDER.new(output, force=force) as folder:
        work(folder)


def dead_pid() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def quick_export(built: Built, monkeypatch: pytest.MonkeyPatch) -> BuildSpec:
    """A spec whose export only copies a file, so that tests of what surrounds it are fast."""
    artifact = built("softmax", "attention", fused=False)
    built("softmax", "attention")  # what tests copy, before nothing can be exported

    def copied_file(module: object, spec: BuildSpec, path: Path, *others: object) -> Written:
        shutil.copy(artifact.model_path, path)
        return Written(Counter())

    monkeypatch.setattr(importlib.import_module("effexport.export.onnx_from_module"), "onnx_from_module", copied_file)
    return artifact.spec


def test_the_manifest_describes_the_model(built: Built, variant: str, scope: str) -> None:
    artifact = built(variant, scope)
    manifest, spec = artifact.manifest, artifact.spec
    assert manifest.format_version == 1
    assert (manifest.variant, manifest.precision, manifest.opset) == (variant, "fp32", 20)
    assert [tensor.name for tensor in manifest.inputs] == [spec.inputs[0].name, "attention_mask"]
    assert manifest.outputs == (TensorInfo("last_hidden_state", "float32", ("batch", "seq", 32)),)
    assert manifest.custom_ops == FUSED.get(variant, {})
    assert manifest.engines == ()
    assert manifest.parity.passed is True
    assert manifest.environment["torch"]


def test_the_manifest_hashes_every_other_file(built: Built) -> None:
    artifact = built("softmax", "attention")
    assert sorted(file.name for file in artifact.path.iterdir()) == sorted(FILES)
    assert sorted(artifact.manifest.files) == sorted(set(FILES) - {"manifest.json"})
    for name, entry in artifact.manifest.files.items():
        data = (artifact.path / name).read_bytes()
        assert entry == FileEntry(hashlib.sha256(data).hexdigest(), len(data))


@pytest.mark.requires("native")
def test_the_report_in_the_folder_agrees_with_the_manifest(built: Built) -> None:
    artifact = built("lsh", "encoder")
    report = json.loads((artifact.path / "report.json").read_text())
    assert report["verdict"] == "passed"
    assert report["spec"] == artifact.manifest.spec
    assert report["summary"] == msgspec.to_builtins(artifact.manifest.parity.summary)
    assert report["implementation"] == {"LSHAttention": "kernel", "LSHHash": "kernel", "LSHSort": "kernel"}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("length", ["empty", "half", "all but one"])
def test_a_truncated_file_is_one_clear_error(copied: Copied, name: str, length: str) -> None:
    folder = copied()
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: {"empty": 0, "half": len(data) // 2, "all but one": len(data) - 2}[length]])
    with pytest.raises(UserError, match=rf"{name}.*(damaged|has \d+ bytes)|damaged: {name}"):
        open_artifact(folder)


@pytest.mark.parametrize("name", HASHED_FILES)
def test_one_flipped_bit_is_one_clear_error(copied: Copied, name: str) -> None:
    folder, rng = copied(), random.Random(name)
    data = bytearray((folder / name).read_bytes())
    for place in [0, len(data) - 1, *rng.sample(range(len(data)), 8)]:
        bit = 1 << rng.randrange(8)
        data[place] ^= bit
        (folder / name).write_bytes(data)
        with pytest.raises(UserError, match=f"damaged: {name} does not match its checksum"):
            open_artifact(folder)
        data[place] ^= bit


@pytest.mark.parametrize("step", [7, soak(1)])
def test_a_flipped_bit_in_any_byte_of_the_manifest_is_noticed(copied: Copied, step: int) -> None:
    folder, rng = copied(), random.Random(0)
    file = folder / "manifest.json"
    good = file.read_bytes()
    for place in range(0, len(good), step):
        data = bytearray(good)
        data[place] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        with pytest.raises(UserError):
            read_manifest(folder)


@pytest.mark.parametrize("name", HASHED_FILES)
def test_a_missing_file_is_one_clear_error(copied: Copied, name: str) -> None:
    folder = copied()
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing; build the artifact again"):
        open_artifact(folder)


def test_a_missing_manifest_means_that_it_is_no_artifact(copied: Copied, tmp_path: Path) -> None:
    folder = copied()
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"is not an artifact: it has no manifest\.json"):
        open_artifact(folder)
    with pytest.raises(UserError, match=r"no artifact at .*; make one with: effexport build"):
        open_artifact(tmp_path / "absent")
    (tmp_path / "file").write_text("{}")
    with pytest.raises(UserError, match="is not an artifact"):
        open_artifact(tmp_path / "file")


def test_a_manifest_from_the_future_says_upgrade(copied: Copied) -> None:
    folder = copied()
    manifest = json.loads((folder / "manifest.json").read_text()) | {"format_version": 2, "effexport_version": "9.9"}
    manifest["integrity"] = manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"format version 2, written by effexport 9\.9; .*up to 1: upgrade effexport"):
        open_artifact(folder)


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", "3", '{"format_version": "1"}', '{"format_version": true}', "{}", "[" * 100_000]
)
def test_a_foreign_manifest_is_one_clear_error(copied: Copied, text: str) -> None:
    folder = copied()
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json is (damaged|not a manifest of effexport)"):
        open_artifact(folder)


def with_own_checksum(folder: Path, **changes: Any) -> None:
    """Change the manifest and restate its checksum, as only a deliberate edit would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, value in changes.items():
        if value is None:
            del manifest[name]
        else:
            manifest[name] = value
    manifest["integrity"] = manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "link"])
def test_a_listed_file_outside_the_folder_is_refused(copied: Copied, name: str) -> None:
    folder = copied()
    secret = folder.parent / "secret"
    secret.write_text("not yours")
    (folder / "link").symlink_to(secret)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    entry = {"sha256": hashlib.sha256(b"not yours").hexdigest(), "bytes": 9}
    with_own_checksum(folder, files=files | {name: entry})
    with pytest.raises(UserError, match="outside the artifact; expected files inside it"):
        open_artifact(folder)


@pytest.mark.parametrize("required", ["model.onnx", "reference.safetensors"])
def test_a_manifest_that_does_not_list_a_required_file_is_refused(copied: Copied, required: str) -> None:
    folder = copied()
    files = json.loads((folder / "manifest.json").read_text())["files"]
    del files[required]
    with_own_checksum(folder, files=files)
    with pytest.raises(UserError, match=f"does not list {required}"):
        open_artifact(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": None},
        {"files": ["model.onnx"]},
        {"files": {"model.onnx": {}}},
        {"spec": None},
        {"spec": "lsh"},
        {"spec": {"model": {"variant": "lhs"}}},
        {"spec": {"model": {"variant": "softmax", "dim": -1}}},
        {"spec": {"model": {"variant": "softmax"}, "wings": 2}},
        {"spec": {"scope": "encoder"}},
        {"spec": {"model": 3}},
        {"hash_values": None},
        {"custom_ops": None},
        {"environment": []},
        {"environment": {"torch": 3}},
        {"parity": {"summary": {}}},
        {"engines": [{"target": "trt-rtx"}]},
        {"notes": ["\ud800"]},
        {"notes": ["\x1b[2J"]},
        {"notes": [[[]]]},
        {"custom_ops": {"LSHSort": 2**64}},
        {"files": {"model.onnx": {"sha256": "", "bytes": 10**4000}}},
        {"files": {"x" * 5000: {"sha256": "", "bytes": 0}}},
        {"files": {"./model.onnx": {"sha256": "", "bytes": 0}}},
        {"files": {"\n": {"sha256": "", "bytes": 0}}},
        {"notes": ["a"] * 1001},
        {"variant": "lsh"},
        {"precision": "fp16"},
        {"opset": 21},
        {"outputs": []},
        {"inputs": [{"name": "hidden_states", "dtype": "float32", "dims": [10**12]}]},
    ],
)
def test_a_manifest_that_cannot_work_is_one_clear_error(copied: Copied, changes: dict[str, Any]) -> None:
    folder = copied()
    with_own_checksum(folder, **changes)
    with pytest.raises(UserError, match=r"manifest\.json"):
        open_artifact(folder)


def test_a_listed_file_that_is_a_loop_of_links_is_refused(copied: Copied) -> None:
    folder = copied()
    (folder / "model.onnx").unlink()
    (folder / "model.onnx").symlink_to("model.onnx")
    with pytest.raises(UserError, match=r"lists 'model\.onnx', outside the artifact"):
        open_artifact(folder)


@pytest.mark.parametrize("what", ["text", "values", "spaces"])
def test_a_huge_manifest_is_refused_before_it_takes_memory(copied: Copied, what: str) -> None:
    folder = copied()
    manifest = json.loads((folder / "manifest.json").read_text())
    if what == "text":
        manifest["notes"] = ["x" * (100 << 20)]
    elif what == "values":
        manifest["spec"]["x"] = [[]] * 2_000_000
    manifest["integrity"] = manifest_digest(manifest)
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text + " " * (100 << 20) * (what == "spaces"))
    tracemalloc.start()
    try:
        with pytest.raises(
            UserError,
            match=r"manifest\.json (has about \d+ values; expected at most|cannot be read: it is larger than)",
        ):
            open_artifact(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20  # twice the limit of 8 MB, and a little


def other_opset(model: onnx.ModelProto) -> None:
    for imports in (model.opset_import, *(function.opset_import for function in model.functions)):
        for entry in imports:
            if entry.domain == "":
                entry.version = 21


def other_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "length"


def no_custom_operator(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.domain == "effexport":
            node.domain, node.op_type = "", "Sum"
            del node.input[1:]
            del node.output[1:]
            del node.attribute[:]


def longer_weight(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "hash.rotations")
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.concatenate([values, values]), tensor.name))


def weight_in_place_of_an_input(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 1), np.int64), "attention_mask"))


def same_output_twice(model: onnx.ModelProto) -> None:
    model.graph.node.append(model.graph.node[-1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_opset, "its opset is 21; expected 20"),
        (other_input, "inputs are hidden_states float32 [batch, length, 32]"),
        (no_custom_operator, "custom operators are {}; declared are {'LSHHash': 1"),
        (longer_weight, "hash.rotations has shape [4, 16, 2, 4]; expected [2, 16, 2, 4]"),
        (weight_in_place_of_an_input, "inputs are hidden_states float32 [batch, seq, 32]; expected"),
        (same_output_twice, "Graph must be in single static assignment"),
    ],
)
def test_a_graph_that_the_manifest_does_not_describe_is_refused(
    copied: Copied, rewrite_manifest: Rewrite, change: Callable[[onnx.ModelProto], None], words: str
) -> None:
    folder = copied("lsh", "attention")
    model = onnx.load(str(folder / "model.onnx"))
    change(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    rewrite_manifest(folder)
    with pytest.raises(UserError, match=r"model\.onnx is not the graph that manifest\.json describes: ") as error:
        open_artifact(folder)
    assert words in str(error.value)


def test_an_artifact_whose_release_wrote_an_operator_out_still_opens(copied: Copied, rewrite_manifest: Rewrite) -> None:
    folder = copied("softmax", "attention")
    inlined = onnx.inliner.inline_local_functions(onnx.load(str(folder / "model.onnx")))
    (folder / "model.onnx").write_bytes(inlined.SerializeToString())
    rewrite_manifest(folder)
    with pytest.raises(UserError, match=r"custom operators are {}; declared are {'MaskedAttention': 1}"):
        open_artifact(folder)
    rewrite_manifest(folder, custom_ops={"MaskedAttention": 2})
    with pytest.raises(UserError, match="its fields custom_ops and spec contradict each other"):
        open_artifact(folder)
    rewrite_manifest(folder, custom_ops={})
    assert open_artifact(folder).manifest.custom_ops == {}


def external(name: str, location: str) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def in_initializer(model: onnx.ModelProto, location: str) -> None:
    model.graph.initializer.append(external("stolen", location))


def in_constant(model: onnx.ModelProto, location: str) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["stolen"], value=external("v", location)))


def in_branch(model: onnx.ModelProto, location: str) -> None:
    value = helper.make_tensor_value_info("stolen", TensorProto.FLOAT, [2])
    branch = helper.make_graph([], "branch", [], [value], [external("stolen", location)])
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "flag"))
    model.graph.node.append(helper.make_node("If", ["flag"], ["choice"], then_branch=branch, else_branch=branch))


def in_function(model: onnx.ModelProto, location: str) -> None:
    node = helper.make_node("Constant", [], ["stolen"], value=external("v", location))
    opsets = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function("other", "Steal", [], ["stolen"], [node], opsets))


def in_sparse_weight(model: onnx.ModelProto, location: str) -> None:
    indices = numpy_helper.from_array(np.zeros(2, np.int64), "stolen_indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(external("stolen", location), indices, [4]))


@pytest.mark.parametrize("where", [in_initializer, in_constant, in_branch, in_function, in_sparse_weight])
@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "a/../../secret"])
def test_external_data_outside_the_folder_is_refused(
    copied: Copied, rewrite_manifest: Rewrite, where: Callable[[onnx.ModelProto, str], None], location: str
) -> None:
    folder = copied()
    (folder.parent / "secret").write_bytes(b"12345678")
    model = onnx.load(str(folder / "model.onnx"))
    where(model, location)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    rewrite_manifest(folder)
    with pytest.raises(UserError, match="outside its own folder"):
        open_artifact(folder)


def test_external_data_that_is_missing_is_an_error(copied: Copied, rewrite_manifest: Rewrite) -> None:
    folder = copied()
    model = onnx.load(str(folder / "model.onnx"))
    in_initializer(model, "weights.bin")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    rewrite_manifest(folder)
    with pytest.raises(UserError, match=r"keeps weights in 'weights\.bin', which is missing"):
        open_artifact(folder)


def test_a_reference_that_is_something_else_is_an_error(copied: Copied, rewrite_manifest: Rewrite) -> None:
    from effexport.proof.cases import load_reference

    folder = copied()
    for data in (b"", b"nonsense", b"\xff" * 100, (2).to_bytes(8, "little") + b"{}"):
        (folder / "reference.safetensors").write_bytes(data)
        with pytest.raises(UserError, match=r"reference\.safetensors holds no stored answers"):
            load_reference(folder / "reference.safetensors")


@pytest.mark.parametrize(
    "noise", ['{"export": [[-1], 0.0]}', '{"export": [0.0]}', '{"export": null}', "[]", '{"x": ["a", 0.0]}', "[" * 5000]
)
def test_a_reference_whose_noise_is_not_numbers_is_an_error(copied: Copied, noise: str) -> None:
    from safetensors.numpy import load_file, save_file

    from effexport.proof.cases import load_reference

    file = copied() / "reference.safetensors"
    load_reference(file)
    save_file(load_file(file), file, {"noise": noise})
    with pytest.raises(UserError, match=r"reference\.safetensors holds no stored answers, or is damaged"):
        load_reference(file)


def test_an_artifact_may_be_moved(copied: Copied) -> None:
    folder = copied()
    moved = folder.rename(folder.with_name("név with space"))
    assert open_artifact(moved).spec.attention.variant == "softmax"


@pytest.mark.parametrize("graph", ["decode_step.onnx", "prefill.onnx"])
def test_a_decoder_is_held_to_the_same_rules(copied: Copied, rewrite_manifest: Rewrite, graph: str) -> None:
    folder = copied("aft-simple", "attention", causal=True)
    original = (folder / graph).read_bytes()
    model = onnx.load_from_string(original)
    in_initializer(model, "../secret")
    (folder / graph).write_bytes(model.SerializeToString())
    rewrite_manifest(folder)
    with pytest.raises(UserError, match=rf"{re.escape(graph)} keeps weights at '\.\./secret', outside"):
        open_artifact(folder)
    (folder / graph).write_bytes(original)
    (folder / "decode_step.onnx").unlink()
    rewrite_manifest(folder)
    with pytest.raises(UserError, match=r"does not list decode_step\.onnx"):
        open_artifact(folder)


def without_last_state(model: onnx.ModelProto) -> None:
    del model.graph.output[-1]


def of_other_rank(model: onnx.ModelProto) -> None:
    del model.graph.output[0].type.tensor_type.shape.dim[0]


def of_other_type(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT8


def another_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [3]))


@pytest.mark.parametrize("graph", ["decode_step.onnx", "prefill.onnx"])
@pytest.mark.parametrize("change", [without_last_state, of_other_rank, of_other_type, another_input])
def test_a_decoder_that_the_spec_does_not_describe_is_refused(
    copied: Copied, rewrite_manifest: Rewrite, change: Callable[[onnx.ModelProto], None], graph: str
) -> None:
    folder = copied("linear", "encoder", causal=True)
    model = onnx.load(str(folder / graph))
    change(model)
    (folder / graph).write_bytes(model.SerializeToString())
    rewrite_manifest(folder)
    with pytest.raises(UserError, match=rf"{re.escape(graph)} is not the graph that .*puts are .*; expected "):
        open_artifact(folder)


@pytest.mark.parametrize(
    ("place", "file"),
    [
        ("decode_step.onnx", "prefill.onnx"),
        ("decode_step.onnx", "model.onnx"),
        ("prefill.onnx", "decode_step.onnx"),
        ("prefill.onnx", "model.onnx"),
    ],
)
def test_a_graph_in_the_place_of_another_is_refused(
    copied: Copied, rewrite_manifest: Rewrite, place: str, file: str
) -> None:
    folder = copied("aft-simple", "attention", causal=True)
    shutil.copy(folder / file, folder / place)
    rewrite_manifest(folder)
    with pytest.raises(UserError, match=rf"{re.escape(place)} is not the graph that .*: inputs are .*; expected "):
        open_artifact(folder)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ((), "it takes no state"),
        ((TensorInfo("s", "float32", ("batch", 4, 4)),), ""),
        ((TensorInfo("s", "float16", ("batch", 4)),), "its state s float16 [batch, 4] is not float32"),
        ((TensorInfo("s", "float32", (4, 4)),), "its state s float32 [4, 4] is not"),
        ((TensorInfo("s", "float32", ("batch", "seq")),), "its state s float32 [batch, seq] is not"),
        ((TensorInfo("s", "float32", ("batch", 4, 5)),), "and at most 16 other elements"),
        ((TensorInfo("s", "float32", ()),), "its state s float32 [] is not"),
    ],
)
def test_a_state_has_a_constant_size(states: tuple[TensorInfo, ...], words: str) -> None:
    found = why_not_states(states, 16)
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize("graph", ["model.onnx", "decode_step.onnx"])
def test_external_weights_that_the_manifest_does_not_list_are_refused(
    copied: Copied, rewrite_manifest: Rewrite, graph: str
) -> None:
    folder = copied("aft-simple", "attention", causal=True)
    (folder / "weights.bin").write_bytes(b"12345678")
    model = onnx.load(str(folder / graph))
    in_initializer(model, "weights.bin")
    (folder / graph).write_bytes(model.SerializeToString())
    rewrite_manifest(folder)
    open_artifact(folder)
    values = json.loads((folder / "manifest.json").read_text())
    del values["files"]["weights.bin"]
    values["integrity"] = manifest_digest(values)
    (folder / "manifest.json").write_bytes(manifest_text(values))
    with pytest.raises(
        UserError, match=rf"{graph} is .* weights in 'weights\.bin', which manifest\.json does not list"
    ):
        open_artifact(folder)


def failing(*arguments: object, **options: object) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize("old", [False, True], ids=["nothing before", "an artifact before"])
@pytest.mark.parametrize(
    "stage",
    [
        "effexport.models.encoder.module.module_from_spec",
        "effexport.export.onnx_from_module.onnx_from_module",
        "effexport.proof.reference.reference_from_model",
        "effexport.pipeline.build.save_reference",
        "effexport.proof.verify.run_checks",
        "effexport.pipeline.build.html_from_report",
        "effexport.pipeline.build.write_manifest",
    ],
)
def test_a_stage_that_raises_leaves_what_was_there(
    quick_export: BuildSpec, copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, old: bool
) -> None:
    output = copied() if old else tmp_path / "new" / "softmax"
    output.parent.mkdir(exist_ok=True)
    before = state_of(output) if old else None
    module, _, name = stage.rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), name, failing)
    with pytest.raises(RuntimeError, match="planted"):
        artifact_from_spec(quick_export, output, BuildOptions(force=True))
    assert [path.name for path in output.parent.iterdir()] == ([output.name] if old else [])
    assert before is None or state_of(output) == before


def test_a_failed_check_writes_nothing_and_is_quoted(
    quick_export: BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Check(
        "arithmetic", CaseLabel("export", (1, 64)), "error", "failed", 0.5, 2e-5, detail="worst at x[0, 0, 0]"
    )
    monkeypatch.setattr("effexport.proof.verify.run_checks", lambda *arguments: [check])
    with pytest.raises(
        StageError, match=r"(?s)1 check failed, 3 passed; nothing was written.*0\.5, limit 2e-05; worst at x"
    ):
        artifact_from_spec(quick_export, tmp_path / "softmax")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_what_was_there(copied: Copied, monkeypatch: pytest.MonkeyPatch) -> None:
    output = copied()
    before = state_of(output)

    def full(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskError, match="the disk is full"):
        build_into(output, force=True, work=full)
    assert state_of(output) == before
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_an_existing_artifact_is_replaced_only_with_force(copied: Copied) -> None:
    output = copied()
    with pytest.raises(UserError, match=r"exists; choose another folder with -o, or replace it with --force"):
        build_into(output, force=False)
    with ARTIFACT_FOLDER.new(output, force=True) as folder:
        (folder / "manifest.json").write_text("new")
    assert state_of(output) == {"manifest.json": b"new"}
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_force_does_not_replace_a_folder_that_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    with pytest.raises(UserError, match="is not an artifact, so --force does not replace it"):
        build_into(tmp_path / "thesis", force=True)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "years of work"


def test_force_does_not_replace_a_folder_with_the_manifest_of_something_else(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.mkdir()
    (page / "manifest.json").write_text('{"name": "a page", "icons": []}')
    (page / "main.js").write_text("years of work")
    with pytest.raises(UserError, match="is not an artifact, so --force does not replace it"):
        build_into(page, force=True)
    assert (page / "main.js").read_text() == "years of work"


def test_force_fills_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with ARTIFACT_FOLDER.new(tmp_path / "out", force=True) as folder:
        (folder / "x").write_text("x")
    assert state_of(tmp_path / "out") == {"x": b"x"}


def test_an_output_that_appears_during_the_build_is_not_replaced(tmp_path: Path) -> None:
    def intrude(folder: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("mine")

    with pytest.raises(UserError, match="has other files in it"):
        build_into(tmp_path / "out", force=False, work=intrude)
    assert state_of(tmp_path / "out") == {"mine": b"mine"}


@pytest.mark.parametrize("below", ["out", "deep/er/out"])
def test_an_output_that_cannot_be_written_is_one_clear_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("a file, not a folder")
    with pytest.raises(UserError, match=r"cannot write .*choose another folder with -o"):
        build_into(tmp_path / "file" / below, force=False)


@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_is_a_file_is_one_clear_error(tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(UserError, match="is a file; expected the path of a folder"):
        build_into(tmp_path / "file", force=force)
    assert (tmp_path / "file").read_text() == "keep me"


def test_what_killed_builds_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    pid = dead_pid()
    for name in (f".out.building-{pid}", ".out.building-mine", f".output.building-{pid}"):
        (tmp_path / name).mkdir()
    with ARTIFACT_FOLDER.new(tmp_path / "out", force=False) as folder:
        (folder / "x").write_text("x")
    # only what is surely a dead build of this very output goes
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [".out.building-mine", f".output.building-{pid}", "out"]
    )


def test_the_folder_of_a_running_build_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / f".out.building-{os.getppid()}"
    other.mkdir()
    with ARTIFACT_FOLDER.new(tmp_path / "out", force=False):
        pass
    assert other.is_dir()


def test_an_artifact_that_was_moved_aside_is_put_back(copied: Copied) -> None:
    output = copied()
    before = state_of(output)
    output.rename(output.parent / f".{output.name}.replaced-{dead_pid()}")

    def check_and_fail(folder: Path) -> None:
        assert state_of(output) == before
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        build_into(output, force=True, work=check_and_fail)
    assert state_of(output) == before
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_an_artifact_that_was_moved_aside_is_dropped_once_replaced(copied: Copied) -> None:
    output = copied()
    shutil.copytree(output, output.parent / f".{output.name}.replaced-{dead_pid()}")
    with ARTIFACT_FOLDER.new(output, force=True) as folder:
        (folder / "x").write_text("x")
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_odd_names_do_not_confuse_the_clean_up(tmp_path: Path) -> None:
    """The name is used in a glob pattern: brackets and stars must match themselves only."""
    pid = dead_pid()
    (tmp_path / f".a.building-{pid}").mkdir()
    for name in ("[a]", "*", "a b"):
        with ARTIFACT_FOLDER.new(tmp_path / name, force=False):
            pass
    assert (tmp_path / f".a.building-{pid}").is_dir()


NEW = b'{"effexport_version": "new"}'


@pytest.mark.parametrize("moment", ["building", "first rename", "second rename", "removal"])
def test_a_kill_while_replacing_leaves_one_of_the_two(copied: Copied, moment: str) -> None:
    output = copied()
    before = state_of(output)
    script = """
    import os, shutil, signal, sys
    from pathlib import Path
    import effexport.base.files
    from effexport.artifact import ARTIFACT_FOLDER
    output, moment = Path(sys.argv[1]), sys.argv[2]
    if "rename" in moment:  # on a system that cannot exchange two folders
        effexport.base.files._exchanged = lambda *paths: False
    def kill(*arguments, **options): os.kill(os.getpid(), signal.SIGKILL)
    rename = Path.rename
    def rename_or_die(self, target):
        if moment == "first rename" or (moment == "second rename" and ".building-" in self.name):
            kill()
        return rename(self, target)
    with ARTIFACT_FOLDER.new(output, force=True) as folder:
        (folder / "manifest.json").write_text(sys.argv[3])
        if moment == "building":
            kill()
        Path.rename = rename_or_die
        if moment == "removal":
            shutil.rmtree = kill
    """
    code = textwrap.dedent(script)
    words = [sys.executable, "-c", code, str(output), moment, NEW.decode()]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == -9, result.stderr
    if moment == "removal":
        assert state_of(output) == {"manifest.json": NEW}
    elif moment != "second rename":
        assert state_of(output) == before

    # between the two renames there is none; the next build puts the old one back before it does anything else
    def check_and_fail(folder: Path) -> None:
        assert state_of(output) == ({"manifest.json": NEW} if moment == "removal" else before)
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        build_into(output, force=True, work=check_and_fail)
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def kill_build(output: Path, stage: str, *options: str) -> None:
    """Start a real build and kill it when it announces the stage."""
    arguments = [
        "build",
        "--variant",
        "aft-simple",
        "--scope",
        "attention",
        "--dim",
        "32",
        "--heads",
        "2",
        "--seq-len",
        "64",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "effexport", *arguments, "-o", str(output), *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    with process.stderr:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if line.startswith(f"… {stage}"):
                break
        process.kill()
    assert process.wait() == -9, seen


@pytest.mark.slow
def test_a_killed_build_leaves_the_old_artifact_or_none_and_the_next_succeeds(
    small_spec: Callable[..., BuildSpec], tmp_path: Path
) -> None:
    output, spec = tmp_path / "aft", small_spec("aft-simple", "attention")
    kill_build(output, "checking parity")
    assert not output.exists()
    artifact_from_spec(spec, output)
    assert [path.name for path in tmp_path.iterdir()] == ["aft"]
    before = state_of(output)
    for stage in ("exporting to ONNX", "checking parity"):  # scripts/campaign.py kills at any moment
        kill_build(output, stage, "--force")
        assert state_of(output) == before
        open_artifact(output)
    artifact_from_spec(spec, output, BuildOptions(force=True))
    assert [path.name for path in tmp_path.iterdir()] == ["aft"]
    assert state_of(output)["model.onnx"] == before["model.onnx"]


def test_writing_the_same_manifest_twice_gives_the_same_checksum(built: Built, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    written = msgspec.structs.replace(
        built("softmax", "attention").manifest, weights_from="naïve", spec={"dims": (1, "seq"), "eps": 1e-5}
    )
    write_manifest(tmp_path, written)
    first = (tmp_path / "manifest.json").read_text()
    manifest = json.loads(first)
    assert manifest["spec"] == {"dims": [1, "seq"], "eps": 1e-5}
    assert manifest["integrity"] == manifest_digest(manifest)
    (tmp_path / "manifest.json").unlink()
    write_manifest(tmp_path, written)
    assert (tmp_path / "manifest.json").read_text() == first
