"""`verify --reference` and `--case`: what a model is compared with, and one clear error for what cannot be."""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save, save_file
from transformers_models import TINY_NYSTROMFORMER, TINY_REFORMER, saved

from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.base.spec import BuildSpec
from effexport.models.encoder.module import module_from_spec
from effexport.proof.cases import load_reference
from effexport.proof.rebuilt_module import why_not_rebuilt
from effexport.proof.trace import TracedModule
from effexport.proof.verify import ArtifactCandidate
from effexport.proof.verify_artifact import ReferenceChoice, VerifyRequest, parse_choice, verify_artifact
from effexport.runners.options import RunOptions

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Cli = Callable[..., Any]
Built = Callable[..., Artifact]
Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def traced_modules() -> Callable[[torch.nn.Module, BuildSpec], TracedModule]:
    """TracedModule, which traces a module again only if its weights or its spec are others."""
    made: dict[tuple[str, bytes], TracedModule] = {}

    def traced(module: torch.nn.Module, spec: BuildSpec) -> TracedModule:
        key = repr(spec), save(module.state_dict())
        if key not in made:
            made[key] = TracedModule(module, spec)
        return made[key]

    return traced


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch, traced_modules: Callable[..., TracedModule]) -> None:
    monkeypatch.setattr("effexport.proof.trace.TracedModule", traced_modules)


def damaged_copy(model: Path, folder: Path) -> Path:
    """The same graph with larger weights."""
    proto = onnx.load(str(model))
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) == 2:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 1.1, tensor.name))
    onnx.save(proto, str(folder / "bad.onnx"))
    return folder / "bad.onnx"


def test_words_files_and_runtimes_are_told_apart(built: Built) -> None:
    path = built("softmax", "attention").path
    assert parse_choice("golden") == ReferenceChoice("golden")
    assert parse_choice(f"{path}@ort") == ReferenceChoice("runtime", path, "ort")
    assert parse_choice("there/reference.safetensors").kind == "file"
    assert parse_choice(f"{path}@ort").title == f"{path}@ort"
    assert parse_choice("torch").title == "PyTorch"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gold", "unknown --reference 'gold'; did you mean 'golden'?"),
        ("", "the argument after --reference is empty"),
        ("PATH@orrt", "unknown runtime 'orrt'; did you mean 'ort'?"),
        ("PATH@", "unknown runtime ''"),
        ("@ort", "expected an artifact or an ONNX file before the @"),
        ("absent/artifact@ort", "there is no absent/artifact"),
        ("PATH", "names no runtime; expected PATH@RUNTIME, such as "),
        ("PATH/model.onnx@trt", "an engine belongs to an artifact"),
        ("PATH@trt", "has no trt engine"),
        ("absent.safetensors", "no reference file at absent.safetensors"),
        ("PATH/reference.safetensors@ort", "is not an ONNX model"),
    ],
)
def test_a_reference_that_is_none_is_one_error(cli: Cli, built: Built, text: str, message: str) -> None:
    path = built("softmax", "attention").path
    assert message in cli("verify", path, "--reference", text.replace("PATH", str(path))).error()


def test_another_file_or_artifact_answers_the_golden_inputs(cli: Cli, built: Built, tmp_path: Path) -> None:
    artifact = built("lsh", "attention")
    for reference in (f"{artifact.path}@ort", f"{artifact.model_path}@ort"):
        result = cli("verify", artifact.path, "--reference", reference, "--json")
        assert result.code == 0, result.err
        assert result.json["reference"] == reference
        assert f"equal to {reference}" in result.err
        # two runs of one file: no error at all
        assert result.json["summary"]["arithmetic with identical buckets"]["worst"] == 0
    bad = damaged_copy(artifact.model_path, tmp_path)
    wrong = cli("verify", artifact.path, "--reference", f"{bad}@ort", "--json")
    assert wrong.code == 1
    assert f"NOT proven equal to {bad}@ort" in wrong.err
    # the candidate itself is right, so its trace is clean
    assert wrong.json["trace"]["first_divergence"] is None
    equal = cli("verify", artifact.path, "--model", bad, "--reference", f"{bad}@ort")
    assert equal.code == 0, equal.err
    itself = cli("verify", artifact.path, "--reference", f"{artifact.path}@ort", "--trace")
    assert itself.code == 0, itself.err
    assert "no divergence: " in itself.out
    assert "differs" not in itself.out


def test_a_reference_of_another_model_is_refused(cli: Cli, built: Built) -> None:
    artifact, other = built("softmax", "attention"), built("softmax", "encoder")
    golden = cli("verify", artifact.path, "--reference", other.reference_path).error()
    assert "is of another model: its inputs are ['attention_mask', 'input_ids']" in golden
    reference = f"{other.path}@ort"
    message = cli("verify", artifact.path, "--reference", reference).error()
    assert f"--reference {reference} is another model: its inputs are input_ids int64 [batch, seq], " in message
    hashed = built("lsh", "attention")
    assert "its hashes are []" in cli("verify", hashed.path, "--reference", artifact.reference_path).error()


def test_cases_that_the_reference_does_not_take_are_not_run_or_failed_if_they_were_named(
    cli: Cli, built: Built
) -> None:
    artifact, short = built("linear", "encoder"), built("linear", "encoder", seq_len=48)
    command = ("verify", artifact.path, "--reference", f"{short.path}@ort", "--json")
    reasons = {check["reason"] for check in cli(*command).json["checks"] if check["name"] == "reference"}
    assert reasons == {f"{short.path}@ort takes at most 48 tokens"}
    named = cli(*command, "--case", "export", "--case", "short")
    assert named.code == 1
    (missing,) = [check for check in named.json["checks"] if check["name"] == "reference"]
    assert missing["status"] == "failed"
    assert missing["detail"] == f"--case asks for it, but {short.path}@ort takes at most 48 tokens"


def test_a_reference_that_hashes_otherwise_is_not_equal(cli: Cli, built: Built) -> None:
    artifact = built("lsh", "attention")
    # with the buckets of the artifact, other rotations or more rounds would compute the same
    for fields, words in (
        ({"hash_seed": 7}, "failed: reference bucket near-ties"),
        ({"num_hashes": 4}, "is [8, 64]; expected [4, 64]"),
    ):
        other = built("lsh", "attention", **fields)
        result = cli("verify", artifact.path, "--reference", f"{other.path}@ort", "--json")
        assert result.code == 1
        assert "failed: reference bucket agreement" in result.err
        assert words in result.err
        assert f"NOT proven equal to {other.path}@ort" in result.err


def test_a_reference_that_hashes_in_other_layers_is_refused(cli: Cli, built: Built) -> None:
    artifact, deeper = built("lsh", "encoder"), built("lsh", "encoder", layers=2)
    message = cli("verify", artifact.path, "--reference", f"{deeper.path}@ort").error()
    assert "is of another model: it hashes in blocks.0.attention.buckets, blocks.1.attention.buckets; " in message


def saved_weights(artifact: Artifact, seed: int, path: Path) -> Path:
    """A file with the weights that a seed draws for the model of an artifact."""
    save_file(module_from_spec(artifact.spec.model, seed).state_dict(), path)
    return path


def test_weights_that_were_named_are_compared(cli: Cli, built: Built, tmp_path: Path) -> None:
    artifact = built("aft-simple", "attention")
    path = str(artifact.path)
    same = cli("verify", path, "--weights", saved_weights(artifact, 0, tmp_path / "same.safetensors"), "--json")
    assert same.code == 0, same.err
    assert same.json["summary"]["weights"]["passed"] == 1
    assert "PyTorch module" not in same.json["summary"]
    other = saved_weights(artifact, 1, tmp_path / "other.safetensors")
    for reference in ("auto", "golden", "torch", f"{path}@ort"):
        result = cli("verify", path, "--weights", other, "--reference", reference, "--json")
        assert result.code == 1
        lines = result.err.splitlines()
        assert "failed: weights: " in result.err
        assert (
            f"{other} holds other weights than the artifact was built with, which were drawn from seed 0" in result.err
        )
        assert " NOT proven equal to " in lines[-1]
        # the model is right, so the cause stands at the top: no node is to blame for what the trace finds
        first, second = [line for line in lines if not line.startswith("…")][:2]
        assert first.startswith("failed: weights: ")
        assert second.startswith("first divergence: value `")
        assert "it is computed from the weights " in second
        assert "wrong" not in second


def test_what_was_named_and_cannot_be_compared_is_refused_before_anything_runs(
    cli: Cli, built: Built, tmp_path: Path
) -> None:
    path = built("softmax", "attention").path
    for words, message in (
        (("--runtime", "ort-trt", "--trace"), "--trace: ort-trt keeps no intermediate values"),
        (("--weights", tmp_path / "absent"), "no weights file at"),
        (("-o", tmp_path / "report.txt"), "expected a file name that ends in .html, .htm, .json, .md, .xml"),
        (("-o", path / "report.html", "--force"), "would change the artifact"),
    ):
        result = cli("verify", path, *words)
        assert message in result.error()
        assert "comparing with" not in result.err


def from_elsewhere(artifact: Artifact) -> ArtifactCandidate:
    """An artifact whose weights came from a file."""
    manifest = msgspec.structs.replace(artifact.manifest, weights_from="A.safetensors")
    return ArtifactCandidate(Artifact(artifact.path, manifest), RunOptions(), None)


def test_a_module_that_was_asked_for_and_cannot_be_made_again_is_an_error(built: Built) -> None:
    candidate = from_elsewhere(built("softmax", "attention"))
    reason = "the weights came from A.safetensors: name it with --weights"
    for request in (VerifyRequest(parse_choice("torch")), VerifyRequest(parse_choice("auto"), trace=True)):
        with pytest.raises(UserError, match=reason):
            request.check(candidate)
    # it was not asked for by name: a check that is not run, with the reason
    verification, _ = verify_artifact(candidate, VerifyRequest(parse_choice("auto")), lambda stage: None)
    (missing,) = [check for check in verification.checks if check.status == "not run"]
    assert missing.reason.startswith(reason)


def test_without_pytorch_the_reason_names_the_extra(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    assert "pip install 'effexport[build]'" in why_not_rebuilt(built("softmax", "attention"), None)


def test_kernels_that_were_asked_for_need_an_operator(cli: Cli, built: Built) -> None:
    path = built("softmax", "attention", fused=False).path
    message = cli("verify", path, "--implementation", "kernel").error()
    assert "model.onnx has no custom operators, so there is no kernel to check; leave it out" in message


def test_the_report_of_a_failed_verification_is_written_in_every_format(cli: Cli, built: Built, tmp_path: Path) -> None:
    artifact = built("softmax", "attention")
    bad = damaged_copy(artifact.model_path, tmp_path)
    for name, words in (("r.md", "### ❌"), ("r.xml", "<failure"), ("r.html", "Failed: "), ("r.json", '"failed"')):
        result = cli("verify", artifact.path, "--model", bad, "--case", "short", "-o", tmp_path / name)
        assert result.code == 1
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert words in text
        assert "first divergence: value" in text
        assert result.out.startswith("first divergence: value `")
    lines = result.out.splitlines()
    assert [line.partition(" ")[0] for line in lines[1:3]] == ["failed:", "failed:"]
    failures = [line for line in lines if line.startswith("failed: ")]
    assert len(failures) == len({line.split(" in ")[0] for line in failures})
    assert "NOT proven equal to PyTorch, " in lines[-2]
    assert lines[-1] == f"{tmp_path / name}: written"
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert report["options"] == ["--model", str(bad)]
    assert "exists; choose another file" in cli("verify", artifact.path, "-o", tmp_path / "r.md").error()


def test_a_golden_file_from_elsewhere(cli: Cli, built: Built, tmp_path: Path) -> None:
    artifact = built("softmax", "attention")
    file = tmp_path / "golden.safetensors"
    shutil.copy(artifact.reference_path, file)
    result = cli("verify", artifact.path, "--reference", file, "--json")
    assert result.code == 0, result.err
    assert f"equal to {file}" in result.err
    file.write_bytes(b"nothing")
    expected = f"{file} is not a safetensors file, or is damaged; expected the inputs that the original was given ("
    assert expected in cli("verify", artifact.path, "--reference", file).error()
    save_file({"weight": torch.zeros(2)}, file)
    message = cli("verify", artifact.path, "--reference", file).error()
    assert f"{file} holds no answers; expected the inputs that the original was given (" in message
    assert message.endswith("each under its name; weights go with --weights")
    file.unlink()
    os.mkfifo(file)
    writer = os.open(file, os.O_RDWR)  # so that a reader does not wait
    assert f"{file} is not a file; expected the inputs" in cli("verify", artifact.path, "--reference", file).error()
    os.close(writer)


def with_codes_alone(tensors: Tensors) -> Tensors:
    return {**tensors, "export/codes/x": np.zeros(7, np.int8)}


def with_short_answers(tensors: Tensors) -> Tensors:
    return {key: array[:, :3] if "/outputs/" in key else array for key, array in tensors.items()}


def with_flat_answers(tensors: Tensors) -> Tensors:
    return {key: array[0, 0] if "/outputs/" in key else array for key, array in tensors.items()}


def with_nothing_kept(tensors: Tensors) -> Tensors:
    return {key: np.zeros_like(array) if "attention_mask" in key else array for key, array in tensors.items()}


def with_flat_tokens(tensors: Tensors) -> Tensors:
    return {**tensors, "export/tokens/kept": np.ones(7, bool)}


def with_numbers_for_tokens(tensors: Tensors) -> Tensors:
    """Numbers instead of booleans; numpy would take them for indices."""
    return {**tensors, "export/tokens/kept": np.ones((1, 64), np.int64)}


@pytest.mark.parametrize(
    ("change", "pooled", "words"),
    [
        (with_codes_alone, "[]", "there are codes of ['x'] and scales of []"),
        (
            with_short_answers,
            "[]",
            "last_hidden_state has the shape [1, 3, 32]; expected [1, 64, 32], as",
        ),
        (
            with_flat_answers,
            "[]",
            "last_hidden_state has the shape [32]; expected last_hidden_state float32 [",
        ),
        (with_nothing_kept, "[]", "a mask keeps no token of a sequence"),
        (with_flat_tokens, "[]", "nothing says for every sequence which of its tokens count: bool [7]; expected bool"),
        (with_numbers_for_tokens, "[]", "nothing says for every sequence which of its tokens count: int64 [1, 64]; "),
        (dict, '["last_hidden_state"]', "the outputs without an axis of tokens are ['last_hidden_state']; expected []"),
    ],
)
def test_answers_that_contradict_each_other_are_one_error(
    cli: Cli, copied: Callable[..., Path], rewrite_manifest: Callable[..., None], change: Any, pooled: str, words: str
) -> None:
    folder = copied("softmax", "attention")
    file = folder / "reference.safetensors"
    with safe_open(file, "numpy") as golden:
        noise = golden.metadata()["noise"]
    save_arrays(change(load_file(file)), file, {"noise": noise, "pooled": pooled})
    rewrite_manifest(folder)
    for reference in ("golden", str(file)):
        message = cli("verify", folder, "--reference", reference).error()
        assert f"{file} is damaged: in the case 'export', {words}" in message
    assert f"{file} is damaged: " in cli("inline", folder, "-o", folder.parent / "inlined.onnx").error()


def test_only_the_named_cases_run(cli: Cli, built: Built) -> None:
    path = built("softmax", "attention").path
    command = ("verify", path, "--case", "padded batch", "--case", "short", "--json")
    for reference in ("golden", "torch", "auto", f"{path}@ort"):
        checks = cli(*command, "--reference", reference).json["checks"]
        # that PyTorch repeats itself is one check of all its cases
        repeated = [check["case"] for check in checks if check["name"] == "reference repeatable"]
        assert repeated == (["all cases"] if reference in ("torch", "auto") else [])
        assert {check["case"].split(":")[0] for check in checks} - set(repeated) == {"padded batch", "short"}
    known = [case.name for case in load_reference(path / "reference.safetensors")]
    message = cli("verify", path, "--case", "shrot").error()
    assert "there is no case 'shrot'; did you mean 'short'?" in message
    assert all(repr(name) in message for name in known)


@pytest.mark.slow
@pytest.mark.requires("transformers")
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("NystromformerForQuestionAnswering", TINY_NYSTROMFORMER),
        pytest.param("ReformerForMaskedLM", TINY_REFORMER, marks=pytest.mark.soak),
        pytest.param("NystromformerForMultipleChoice", TINY_NYSTROMFORMER, marks=pytest.mark.soak),
        pytest.param("NystromformerModel", TINY_NYSTROMFORMER | {"segment_means_seq_len": 8}, marks=pytest.mark.soak),
        pytest.param("ReformerModelWithLMHead", TINY_REFORMER | {"is_decoder": True}, marks=pytest.mark.soak),
        pytest.param("ReformerModel", TINY_REFORMER | {"hash_seed": 3}, marks=pytest.mark.soak),
    ],
)
def test_the_original_model_is_a_reference(cli: Cli, tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    saved(tmp_path / "checkpoint", kind, config)
    build = ("build", "--checkpoint", tmp_path / "checkpoint", "--seed", "5", "-o", tmp_path / "out")
    assert cli(*build).code == 0
    command = ("verify", tmp_path / "out", "--reference", "transformers", "--json")
    result = cli(*command, "--weights", tmp_path / "checkpoint")
    assert result.code == 0, result.err
    titles = [c["case"] for c in result.json["checks"] if c["name"] == "signature"]
    # golden inputs and new ones
    assert len(titles) >= 6
    assert len(titles) > len(set(titles))
    assert "came from checkpoint: name it with --weights" in cli(*command).error()
    bad = damaged_copy(tmp_path / "out" / "model.onnx", tmp_path)
    wrong = cli(*command, "--weights", tmp_path / "checkpoint", "--model", bad, "--case", "short")
    assert wrong.code == 1
    assert wrong.json["trace"]["first_divergence"] is not None


@pytest.mark.requires("transformers")
def test_a_chosen_correction_is_not_compared_with_transformers() -> None:
    from effexport.models.checkpoints.nystromformer_spec import NystromformerSpec
    from effexport.models.checkpoints.reformer_spec import ReformerSpec

    landmarks = {"num_landmarks": 8, "segment_means_seq_len": 32}
    per_head = NystromformerSpec(seq_len=8, pinv_init="per_head", **landmarks)
    assert "pinv_init per_head" in per_head.why_not_as_published
    assert NystromformerSpec(seq_len=8, **landmarks).why_not_as_published == ""
    safe = ReformerSpec(seq_len=64, num_buckets=4, mask_constants="safe", num_hashes=2)
    assert "mask_constants safe" in safe.why_not_as_published


def test_transformers_needs_a_checkpoint(cli: Cli, built: Built) -> None:
    message = cli("verify", built("softmax", "attention").path, "--reference", "transformers").error()
    assert "was not built from a checkpoint" in message


def test_a_missing_transformers_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from effexport.proof.other_answers import import_transformers

    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install transformers==4\.57\.1"):
        import_transformers()
