"""Artifacts that return vectors: against transformers and the formula in float64, and held to every check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers_models import inputs, saved

import effexport
from effexport.artifact import Artifact, open_artifact
from effexport.export.module_source import module_from_path
from effexport.export.onnx_from_module import onnx_from_module
from effexport.models.head import PooledModel
from effexport.proof.cases import load_reference
from effexport.proof.verify import verify_candidate
from effexport.runners.ort.settings import OrtSettings

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "transformers")
# What the issue of pooled answers asks for: float32 sums of two layers, in another order.
LIMIT = 1e-5
# Softmax attention, so that transformers takes every length; 8 channels of 32.
CONFIG: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "segment_means_seq_len": 8,
    "num_landmarks": 8,
    "conv_kernel_size": 5,
}
CUT = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    folder = tmp_path_factory.mktemp("pooled") / "checkpoint"
    return folder, saved(folder, "NystromformerModel", CONFIG)


@pytest.fixture(scope="module")
def artifact(checkpoint: tuple[Path, nn.Module]) -> Artifact:
    folder, _ = checkpoint
    options = {"pool": "mean", "normalize": True, "truncate_dim": CUT, "seq_len": 32}
    return effexport.build(checkpoint=folder, output=folder.parent / "built", **options).artifact


def mean_vectors(hidden: Tensor, mask: Tensor) -> np.ndarray:
    """The mean over kept tokens, cut and scaled to length one, in float64."""
    kept = mask.numpy()[..., None].astype(np.float64)
    mean = ((hidden.double().numpy() * kept).sum(axis=1) / kept.sum(axis=1))[:, :CUT]
    vectors: np.ndarray = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    return vectors


def test_a_pooled_checkpoint_is_the_mean_of_what_transformers_returns(
    checkpoint: tuple[Path, nn.Module], artifact: Artifact
) -> None:
    with effexport.load(artifact.path) as runner:
        for batch, seq_len, padded in ((1, 32, False), (4, 32, True), (3, 19, True), (2, CUT, True)):
            ids, mask = inputs(batch, seq_len, 1, padded=padded)
            with torch.no_grad():
                hidden = checkpoint[1](input_ids=ids, attention_mask=mask).last_hidden_state
            found = runner.run({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
            assert list(found) == ["embedding"]
            assert np.abs(found["embedding"] - mean_vectors(hidden, mask)).max() <= LIMIT


def test_a_pooled_artifact_is_verified_traced_and_refitted_like_any_other(
    cli: Callable[..., Any], checkpoint: tuple[Path, nn.Module], artifact: Artifact, tmp_path: Path
) -> None:
    folder, _ = checkpoint
    found = cli("verify", artifact.path, "--weights", folder, "--reference", "transformers", "--trace", "--json")
    assert found.code == 0, found.err
    assert found.json["passed"]
    assert found.json["trace"]["first_divergence"] is None
    other = tmp_path / "other"
    model = saved(other, "NystromformerModel", CONFIG, seed=1)
    refitted = effexport.refit(artifact.path, checkpoint=other, output=tmp_path / "refitted")
    assert refitted.artifact.spec == artifact.spec
    ids, mask = inputs(4, 32, 1, padded=True)
    with effexport.load(tmp_path / "refitted") as runner, torch.no_grad():
        wanted = mean_vectors(model(input_ids=ids, attention_mask=mask).last_hidden_state, mask)
        assert (
            np.abs(runner.run({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})["embedding"] - wanted).max()
            <= LIMIT
        )


def test_a_vector_that_counts_padding_fails_the_proof(checkpoint: tuple[Path, nn.Module], artifact: Artifact) -> None:
    spec, path = artifact.spec, checkpoint[0].parent / "faulty.onnx"
    module = module_from_path(spec, checkpoint[0])
    assert isinstance(module, PooledModel)
    module._mask = None
    onnx_from_module(module, spec, path)
    checks = verify_candidate(path, load_reference(artifact.reference_path), spec, (), OrtSettings()).checks
    failed = {check.case.name for check in checks if check.status == "failed"}
    assert failed == {"padded batch"}


class Mixed(nn.Module):
    """Hidden states of as many channels as there are tokens, and a mask whose ones are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, dropout=0.0)

    def forward(self, input_ids: Tensor, padding_mask: Tensor) -> Tensor:
        hidden: Tensor = self.layer(self.tokens(input_ids), src_key_padding_mask=padding_mask)
        return hidden


def test_a_module_of_the_users_own_is_pooled_over_the_tokens_that_its_mask_keeps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mixed().eval()
    examples = {"input_ids": torch.randint(0, 50, (2, 16)), "padding_mask": torch.zeros(2, 16, dtype=torch.bool)}
    built = effexport.build(module=model, examples=examples, output=tmp_path / "out", pool="max")
    assert built.report.verdict == "passed"
    ids, hidden_tokens = np.arange(48).reshape(3, 16), np.arange(16) >= np.array([[16], [9], [1]])
    with torch.no_grad():
        states = model(torch.from_numpy(ids), torch.from_numpy(hidden_tokens)).numpy()
    with effexport.load(tmp_path / "out") as runner:
        found = runner.run({"input_ids": ids, "padding_mask": hidden_tokens})["embedding"]
    for sample in range(3):
        assert np.abs(found[sample] - states[sample][~hidden_tokens[sample]].max(axis=0)).max() <= LIMIT


def test_every_channel_of_a_vector_is_compared_where_there_are_as_many_tokens(artifact: Artifact) -> None:
    case = next(case for case in load_reference(artifact.reference_path) if case.name == "padded batch")
    count = CUT  # tokens, of which all but one are padding
    mask = np.zeros((3, count), np.int64)
    mask[:, 0] = 1
    short = replace(case, inputs={**case.inputs, "attention_mask": mask})
    assert short.kept("embedding", case.outputs["embedding"], 0).shape == (1, CUT)
    assert open_artifact(artifact.path).spec.pooled_outputs == ("embedding",)
