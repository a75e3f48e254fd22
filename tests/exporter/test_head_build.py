"""Artifacts that return vectors or the likeliest tokens: against transformers in float64, and held to every check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import save_file
from small_builds import module_from_path
from torch import Tensor, nn
from transformers_models import TINY_NYSTROMFORMER, inputs, saved

import effexport
from effexport.artifact import Artifact, open_artifact
from effexport.base.errors import UserError
from effexport.export.onnx_from_module import onnx_from_module
from effexport.models.encoder.module import PooledModel
from effexport.proof.cases import Case, load_reference
from effexport.proof.check import Limit
from effexport.proof.checks.arithmetic import check_ranks
from effexport.proof.verify import verify_candidate
from effexport.runners.options import RunOptions
from effexport.tensorrt.preparation import limit_problems
from effexport.tensorrt.spec import profiles_from_texts

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "transformers"), pytest.mark.usefixtures("kept_traces")]
# What the issue of pooled answers asks for: float32 sums of two layers, in another order.
LIMIT = 1e-5
# Softmax attention, so that transformers takes every length; 8 channels of 32.
CONFIG = TINY_NYSTROMFORMER | {"segment_means_seq_len": 8}
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


@pytest.mark.slow
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
    checks = verify_candidate(path, load_reference(artifact.reference_path), spec, (), RunOptions()).checks
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


LANGUAGE_MODEL = CONFIG | {"vocab_size": 200}
TOP = 5


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    folder = tmp_path_factory.mktemp("top-k") / "checkpoint"
    return folder, saved(folder, "NystromformerForMaskedLM", LANGUAGE_MODEL)


@pytest.fixture(scope="module")
def ranking(language_model: tuple[Path, nn.Module]) -> Artifact:
    folder, _ = language_model
    return effexport.build(checkpoint=folder, output=folder.parent / "built", top_k=TOP, seq_len=32).artifact


def test_the_likeliest_tokens_are_those_of_the_whole_logits_of_transformers(
    language_model: tuple[Path, nn.Module], ranking: Artifact
) -> None:
    with effexport.load(ranking.path) as runner:
        for batch, seq_len, places in ((1, 32, [[7]]), (3, 19, [[0, 18], [5, 5], [9, 2]]), (2, 4, [[3], [0]])):
            ids, mask = inputs(batch, seq_len, 1, padded=True)
            with torch.no_grad():
                logits = language_model[1](input_ids=ids, attention_mask=mask).logits.double().numpy()
            rows = np.stack([logits[row, place] for row, place in enumerate(places)])
            softmax = np.exp(rows) / np.exp(rows).sum(axis=-1, keepdims=True)
            tokens = np.argsort(-softmax, axis=-1)[..., :TOP]
            feeds = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "positions": np.array(places)}
            found = runner.run(feeds)
            assert np.array_equal(found["tokens"], tokens)
            assert np.abs(found["scores"] - np.take_along_axis(softmax, tokens, axis=-1)).max() <= LIMIT


def test_only_the_places_that_are_asked_for_meet_the_vocabulary(ranking: Artifact) -> None:
    graph = onnx.shape_inference.infer_shapes(onnx.load(ranking.model_path)).graph
    wide = [
        [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in graph.value_info
        if [dim.dim_value for dim in value.type.tensor_type.shape.dim][2:] == [200]  # not the table of words
    ]
    assert wide
    assert all(dims[:2] == ["batch", "masks"] for dims in wide)
    assert limit_problems(onnx.load(ranking.model_path), plugins=("MaskedAttention", "SequenceConv")) == []


@pytest.mark.slow
def test_an_artifact_of_ranked_tokens_is_verified_and_traced_like_any_other(
    cli: Callable[..., Any], language_model: tuple[Path, nn.Module], ranking: Artifact
) -> None:
    folder, _ = language_model
    found = cli("verify", ranking.path, "--weights", folder, "--reference", "transformers", "--trace", "--json")
    assert found.code == 0, found.err
    ties = [check for check in found.json["checks"] if check["name"] == "rank near-ties"]
    assert len(ties) >= 8
    assert {check["status"] for check in ties} == {"passed"}
    assert found.json["trace"]["first_divergence"] is None


@pytest.mark.parametrize(
    ("positions", "words"),
    [([[32]], "positions contains 32; expected 0 to 31"), ([[-1]], "contains -1"), ([[0] * 65], "expected at most 64")],
)
def test_places_beyond_the_sequence_are_refused(ranking: Artifact, positions: list[list[int]], words: str) -> None:
    feeds = {"input_ids": np.ones((1, 32), np.int64), "positions": np.array(positions)}
    with effexport.load(ranking.path) as runner, pytest.raises(UserError, match=words):
        runner.run(feeds)


def test_a_profile_names_the_number_of_places(ranking: Artifact) -> None:
    (profile,) = profiles_from_texts(["masks=1:8:16"], ranking.spec)
    assert profile.shapes(ranking.spec.inputs)["positions"] == ((1, 1), (1, 8), (4, 16))
    (default,) = profiles_from_texts((), ranking.spec)
    assert default.shapes(ranking.spec.inputs)["positions"] == ((1, 1), (1, 4), (4, 32))


SCORES = np.array([[[0.4, 0.3, 0.2, 0.2 - 1e-6, 0.1, 0.0]]], np.float32)


@pytest.mark.parametrize(
    ("tokens", "passes"),
    [
        ([0, 1, 2], True),
        ([0, 1, 3], True),  # as good as tied with the one that PyTorch has there
        ([1, 0, 2], False),
        ([0, 1, 4], False),
        ([0, 1, 1], False),
        ([0, 1, 6], False),  # there is no such token
        ([0, 1, -1], False),
    ],
)
def test_another_token_passes_only_where_the_reference_ranks_it_alike(tokens: list[int], passes: bool) -> None:
    case = Case(
        "export",
        {"attention_mask": np.ones((1, 3), np.int64)},
        {"scores": SCORES[..., :3], "tokens": np.array([[[0, 1, 2]]])},
        pooled=("scores", "tokens"),
        ranked={"tokens": SCORES},
    )
    check = check_ranks(case, "tokens", np.array([[tokens]]), Limit(2e-4, ""))
    assert (check.status == "passed") == passes, check


def test_answers_of_the_original_are_compared_by_their_own_scores(ranking: Artifact, tmp_path: Path) -> None:
    case = load_reference(ranking.reference_path)[0]
    tokens = case.outputs["tokens"].astype(np.int64)
    answers = {**case.inputs, "scores": case.outputs["scores"], "tokens": tokens}
    save_file(answers, tmp_path / "answers.safetensors")
    reference = f"{tmp_path / 'answers.safetensors'}"
    assert effexport.verify(ranking.path, reference=reference).verdict == "passed"
    unknown = (tokens + 1) % 200
    save_file(answers | {"tokens": unknown}, tmp_path / "answers.safetensors")
    assert effexport.verify(ranking.path, reference=reference).verdict == "failed"
