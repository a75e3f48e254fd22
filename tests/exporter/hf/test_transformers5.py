"""Artifacts in transformers 5 and sentence-transformers, which run in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_artifacts import CheckpointArtifact, checkpoint_artifact
from pipeline_questions import TRANSFORMERS_5, worst_difference

pytestmark = [
    pytest.mark.requires("transformers5", "torch", "onnx", "ort", "transformers"),
    pytest.mark.xdist_group("transformers5"),
]
ROOT = Path(__file__).parents[3]
CLASSES = {
    "NystromformerModel": "BaseModelOutput",
    "NystromformerForMaskedLM": "MaskedLMOutput",
    "NystromformerForSequenceClassification": "SequenceClassifierOutput",
    "NystromformerForTokenClassification": "TokenClassifierOutput",
    "NystromformerForQuestionAnswering": "QuestionAnsweringModelOutput",
    "NystromformerForMultipleChoice": "MultipleChoiceModelOutput",
    "ReformerModelWithLMHead": "CausalLMOutput",
}
# transformers 4.57.1 beside ONNX Runtime, as in test_drop_in.py: rounding in float32.
LIMIT = 1e-4


@pytest.fixture(scope="module")
def folders() -> dict[str, CheckpointArtifact]:
    return {kind: checkpoint_artifact(kind) for kind in CLASSES}


@pytest.fixture(scope="module")
def answers(folders: dict[str, CheckpointArtifact]) -> Any:
    all_of_them = folders | {"pooled": checkpoint_artifact("NystromformerModel", pool="mean")}
    job = {
        name: {"checkpoint": str(one.checkpoint), "artifact": str(one.artifact)} for name, one in all_of_them.items()
    }
    done = subprocess.run(
        [ROOT / ".venv-transformers5/bin/python", ROOT / "tests/support/transformers5_client.py", json.dumps(job)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_environment_has_the_versions_that_the_pages_name(answers: Any) -> None:
    import torch

    assert answers["versions"] == ["5.23.0", "6.2.0", torch.__version__]


@pytest.mark.parametrize(("task", "kind", "ask"), TRANSFORMERS_5)
def test_pipelines_of_transformers_5_answer_with_an_artifact_as_those_of_4_with_the_checkpoint(
    task: str, kind: str, ask: Any, answers: Any, folders: dict[str, CheckpointArtifact]
) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[kind].checkpoint, model_max_length=40)
    original = getattr(transformers, kind).from_pretrained(folders[kind].checkpoint).eval()
    expected = ask(transformers.pipeline(task, model=original, tokenizer=tokenizer))
    assert worst_difference(answers["pipelines"][task], expected) <= LIMIT


def test_pipelines_of_transformers_5_log_no_warning(answers: Any) -> None:
    assert answers["logged"] == []


@pytest.mark.parametrize("kind", CLASSES)
def test_exported_model_of_transformers_5_opens_an_artifact(kind: str, answers: Any) -> None:
    found = answers["exported"][kind]
    assert found["class"] == CLASSES[kind]
    assert found["worst"] <= LIMIT


@pytest.mark.requires("native")
def test_exported_model_of_transformers_5_runs_our_kernels(answers: Any) -> None:
    assert answers["kernels"].keys() == CLASSES.keys()
    assert max(found["worst"] for found in answers["kernels"].values()) <= LIMIT


def test_transformers_5_continues_a_prompt_with_the_likeliest_tokens(answers: Any) -> None:
    assert answers["generated"]["found"] == answers["generated"]["expected"]


@pytest.mark.parametrize("kind", ["pooled", "token embeddings"])
def test_sentence_transformers_makes_the_same_vectors_from_an_artifact_and_from_its_checkpoint(
    kind: str, answers: Any
) -> None:
    found, expected = map(np.array, answers["embeddings"][kind])
    assert expected.shape == (3, 32)
    # means of vectors that differ by rounding; the texts of the batch have different lengths
    assert np.abs(found - expected).max() <= 1e-5
