"""Tasks and training of the trained models, in scripts/training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from effexport.models.encoder.module import Encoder
from effexport.tasks.data import IGNORED, MASKED_SHARE
from effexport.tasks.task import BYTE_MASK
from scripts import train_proof
from scripts.training.corpus import Corpus, tokens_of
from scripts.training.experiments import EXPERIMENTS
from scripts.training.tasks import ANSWER_HERE, CLOSE, FIRST_DIGIT, FIRST_OPERATOR, Duplication, ListOps, Task, Text
from scripts.training.trainer import Schedule, save_half, start_small, train

RULES: dict[str, Any] = {
    "MAX": max,
    "MIN": min,
    "MED": lambda values: (sorted(values)[(len(values) - 1) // 2] + sorted(values)[len(values) // 2]) // 2,
    "SM": lambda values: sum(values) % 10,
}


def text_task(*, masked: bool) -> Text:
    return Text(Corpus(tokens_of(bytes(range(200)) * 50), tokens_of(b"held out " * 200), ""), 64, masked)


def test_a_causal_model_is_asked_for_the_next_byte() -> None:
    ids, labels = text_task(masked=False).batch(3, np.random.default_rng(0))
    assert np.array_equal(ids[:, 1:], labels[:, :-1])
    assert ids.shape == labels.shape == (3, 64)


def test_a_masked_model_is_asked_for_what_the_masks_hide() -> None:
    task = text_task(masked=True)
    ids, labels = task.batch(200, np.random.default_rng(0))
    hidden = ids == BYTE_MASK
    assert np.array_equal(hidden, labels != IGNORED)
    # each byte of this text is the one before plus one
    whole = np.where(hidden, labels, ids)
    assert set(np.unique((whole[:, 1:] - whole[:, :-1]) % 200)) == {1}
    # 12,800 draws: three standard deviations are 0.0095
    assert abs(hidden.mean() - MASKED_SHARE) < 0.0095


def test_the_second_half_of_a_duplication_is_the_first() -> None:
    task = Duplication(64)
    ids, labels = task.batch(5, np.random.default_rng(0))
    assert np.array_equal(ids[:, :32], ids[:, 32:])
    assert ids.min() == 1
    assert ids.max() < task.vocabulary
    assert (labels[:, :32] == IGNORED).all()
    assert np.array_equal(labels[:, 32:-1], ids[:, 1:32])  # each symbol of w, asked for at the one before it


def test_listops_answers_are_the_values_of_the_lists() -> None:
    ids, labels = ListOps(512, shortest=16).batch(20, np.random.default_rng(0))
    for row, asked in zip(ids, labels, strict=True):
        assert row[0] == ANSWER_HERE
        text = "".join(written(token) for token in row[1:] if token)
        assert FIRST_DIGIT + valued(json.loads(text.replace(",]", "]").rstrip(","))) == asked[0]
    assert (labels[:, 1:] == IGNORED).all()


def written(token: int) -> str:
    if token == CLOSE:
        return "],"
    return f'["{list(RULES)[token - FIRST_OPERATOR]}",' if token < FIRST_DIGIT else f"{token - FIRST_DIGIT},"


def valued(tree: Any) -> int:
    return int(tree if isinstance(tree, int) else RULES[tree[0]]([valued(part) for part in tree[1:]]))


def test_held_out_rows_are_always_the_same_and_no_others() -> None:
    task: Task
    for task in (Duplication(64), ListOps(256, shortest=16), text_task(masked=True), text_task(masked=False)):
        first, again = task.held_out(4), task.held_out(4)
        assert all(np.array_equal(*pair) for pair in zip(first, again, strict=True))
        rows = {row.tobytes() for row in first[0]}
        for step in range(5):
            assert not rows & {row.tobytes() for row in task.batch(4, np.random.default_rng([0, step]))[0]}


@pytest.mark.usefixtures("each_processor")
@pytest.mark.parametrize("each_processor", ["AVX2", "AMX"], indirect=True)  # float32, bfloat16
def test_a_training_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.training.trainer.SAVE_EVERY_S", 0.0)
    task, schedule = Duplication(16, symbols=7), Schedule(steps=6, rows=2, warmup=2)

    def model() -> Encoder:
        torch.manual_seed(0)
        spec = EXPERIMENTS["duplication-64-lsh-2"].spec().model
        made = Encoder(spec)
        start_small(made)
        return made

    def run(made: Encoder, file: Path, until: int) -> None:
        def batch_of_step(step: int) -> Any:
            if step == until:
                raise KeyboardInterrupt
            return task.batch(schedule.rows, np.random.default_rng([0, step]))

        with torch.compiler.set_stance("force_eager"):
            train(made, batch_of_step, schedule, file, "test")

    whole, second = model(), model()
    run(whole, tmp_path / "whole", 6)
    with pytest.raises(KeyboardInterrupt):
        run(model(), tmp_path / "parts", 3)
    run(second, tmp_path / "parts", 6)
    for ours, theirs in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert any(not torch.equal(a, b) for a, b in zip(whole.parameters(), model().parameters(), strict=True))


def test_saved_weights_have_no_rotations_and_are_what_the_model_has(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = Encoder(EXPERIMENTS["duplication-64-lsh-4"].spec().model)
    save_half(model, tmp_path / "weights.safetensors")
    found = load_file(tmp_path / "weights.safetensors")
    assert not any("rotations" in name for name in found)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name].float(), parameter)


def test_every_experiment_has_a_spec_for_each_of_its_layers() -> None:
    for experiment in EXPERIMENTS.values():
        for other in ("", *experiment.others):
            spec = experiment.spec(other).model
            names = {name: parameter.shape for name, parameter in Encoder(spec).named_parameters()}
            own = {name: parameter.shape for name, parameter in Encoder(experiment.spec().model).named_parameters()}
            assert names == own, (experiment.name, other)


@pytest.mark.slow
def test_an_experiment_ends_in_figures_of_every_run(tmp_path: Path) -> None:
    experiment = replace(EXPERIMENTS["duplication-64-lsh-1"], schedule=Schedule(2, 2), rows=4, others={})
    train_proof.run(experiment, tmp_path)
    judged = json.loads((tmp_path / f"{experiment.name}.json").read_text())["judged"]
    runs = {(run["precision"], run["run"]) for run in judged["runs"] if "not_run" not in run}
    expected = {("fp32", title) for title in ("kernels", "function bodies", "OpenVINO", "int8")}
    assert runs == expected | {("fp16", title) for title in ("kernels", "function bodies")}
    assert {judged[name]["verdict"] for name in ("verify_fp32", "verify_fp16")} == {"passed"}
