"""`effexport evaluate` against figures that PyTorch computes in float64 from the logits of the module."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from text_checkpoints import checkpoint, our_task
from torch.nn.functional import cross_entropy

import effexport
from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.models.user.model import UserModel
from effexport.proof.rebuilt_module import model_of_artifact
from effexport.report.formats import report_from_values
from effexport.tasks.data import (
    IGNORED,
    MASKED_SHARE,
    LabelledRows,
    class_names,
    examples_of_lines,
    rows_of_texts,
    same_labels,
)
from effexport.tasks.evaluate import scores_of
from effexport.tasks.tasks import Labels, TextClassification

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "transformers"), pytest.mark.usefixtures("kept_traces")]
Cli = Callable[..., Any]
TEXT = "Größe und Länge, gemessen in Bytes. " * 5
# float32 logits within 2e-4 of their RMS, averaged over some hundred answers
CLOSE = 1e-5


@pytest.fixture(scope="module")
def writer(built: Callable[..., Artifact]) -> Artifact:
    return built("linear", causal=True, lm_head=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held-out.txt"
    path.write_text(TEXT)
    return path


def torch_nats(artifact: Artifact, ids: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> tuple[float, int]:
    """The sum of the cross-entropy, and how many answers are right. ids, labels: [rows, tokens]."""
    model = model_of_artifact(artifact, None)
    assert isinstance(model, UserModel)
    module = model.module
    with torch.inference_mode():
        logits = module.double()(torch.from_numpy(ids), torch.ones(ids.shape, dtype=torch.int64)).flatten(0, 1)
    wanted = torch.from_numpy(labels).flatten()
    right = (logits.argmax(-1) == wanted).sum().item()
    return cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum").item(), int(right)


def test_a_language_model_is_asked_for_every_byte_that_has_one_before_it(writer: Artifact, text: Path) -> None:
    data = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int64) + 2
    assert len(data) % 40
    nats, right, asked = 0.0, 0, 0
    for start in range(0, len(data), 40):
        window = data[start : start + 40]
        more = torch_nats(writer, window[None, :-1], window[None, 1:])
        nats, right, asked = nats + more[0], right + more[1], asked + len(window) - 1
    found = effexport.evaluate(writer.path, text, window=40)
    assert (found.objective, found.answers, found.rows) == ("language model", asked, -(-len(data) // 40))
    assert found.figure("bits per byte").value == pytest.approx(nats / asked / math.log(2), abs=CLOSE)
    assert found.figure("perplexity").value == pytest.approx(math.exp(nats / asked), rel=CLOSE)
    assert found.figure("accuracy").value == pytest.approx(right / asked)


def test_neighbouring_windows_share_tokens_that_are_asked_for_once(writer: Artifact, text: Path) -> None:
    found = effexport.evaluate(writer.path, text, window=40, stride=10)
    # all but the first byte; the shared ones have more text before them than without a stride
    assert found.answers == len(TEXT.encode()) - 1
    assert effexport.evaluate(writer.path, text, window=40, rows=1).answers == 39
    assert effexport.evaluate(writer.path, text, window=40, rows=3).answers == 3 * 39


def test_models_that_are_asked_for_other_tokens_are_not_compared() -> None:
    ids = np.full((1, 4), 5)
    ours, theirs = (LabelledRows({"input_ids": ids}, np.array([[5, 6, last, IGNORED]])) for last in (7, 8))
    assert same_labels([ours, ours], [LabelledRows({"input_ids": ids}, np.concatenate([ours.labels] * 2))])
    assert not same_labels([ours], [theirs])
    assert not same_labels([ours], [ours, ours])


def test_arrays_with_labels_say_the_same_as_the_text(writer: Artifact, text: Path, tmp_path: Path) -> None:
    data = np.frombuffer(TEXT.encode()[:120], np.uint8).astype(np.int64).reshape(3, 40) + 2
    labels = np.hstack([data[:, 1:], np.full((3, 1), IGNORED)])
    np.savez(tmp_path / "data.npz", input_ids=data, labels=labels)
    (tmp_path / "begin.txt").write_bytes(TEXT.encode()[:120])
    arrays = effexport.evaluate(writer.path, tmp_path / "data.npz")
    assert arrays.figure("loss") == effexport.evaluate(writer.path, tmp_path / "begin.txt", window=40).figure("loss")
    assert effexport.evaluate(writer.path, {"input_ids": data, "labels": labels}).figure("loss") == arrays.figure(
        "loss"
    )


@pytest.mark.slow
def test_a_masked_language_model_is_asked_for_the_masked_tokens(
    built: Callable[..., Artifact], writer: Artifact, text: Path
) -> None:
    encoder = built("linear", lm_head=True)
    data = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int64)[:40] + 2
    masked = np.random.default_rng(7).random(len(TEXT.encode()))[:40] < MASKED_SHARE
    nats, right = torch_nats(encoder, np.where(masked, 1, data)[None], np.where(masked, data, IGNORED)[None])
    found = effexport.evaluate(encoder.path, text, window=40, rows=1, seed=7)
    assert (found.objective, found.answers) == ("masked language model", masked.sum())
    assert found.figure("loss").value == pytest.approx(nats / masked.sum(), abs=CLOSE)
    assert found.figure("accuracy").value == pytest.approx(right / masked.sum())
    assert [estimate.name for estimate in found.estimates] == ["loss", "perplexity", "accuracy"]
    with pytest.raises(UserError, match="do not read the data as the same rows"):
        effexport.evaluate(encoder.path, text, window=40, compare=str(writer.path))


def test_texts_with_classes_are_scored_as_transformers_scores_them(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "NystromformerForSequenceClassification", "bert-with-words", num_labels=3)
    task = our_task(tmp_path)
    assert isinstance(task, TextClassification)
    lines = [("a dog", None, "LABEL_2"), ("the cat sat on the mat", "a dog", 0), ("a cat", None, 1)]
    file = tmp_path / "data.jsonl"
    fields = [{"text": one, "label": label} | ({"pair": two} if two else {}) for one, two, label in lines]
    file.write_text("\n".join(map(json.dumps, fields)) + "\n")
    examples = examples_of_lines(file, class_names(Labels(("LABEL_0", "LABEL_1", "LABEL_2"))), None)
    assert [label for *_, label in examples] == [2, 0, 1]
    rows = rows_of_texts([task.prepare(*text) for *text, _ in examples], [label for *_, label in examples], 2)

    def run(feeds: Any) -> dict[str, Any]:
        with torch.inference_mode():
            return {"logits": model(**{name: torch.from_numpy(array) for name, array in feeds.items()}).logits.numpy()}

    expected = 0.0
    for text, pair, label in examples:
        inputs = {name: torch.from_numpy(array) for name, array in task.prepare(text, pair).runs[0].items()}
        with torch.inference_mode():
            expected += cross_entropy(model(**inputs).logits, torch.tensor([label])).item()
    # sums of some hundred float32 products in another order
    assert scores_of(run, rows).nats.sum() == pytest.approx(expected, rel=1e-5)


def test_an_artifact_answers_as_its_module_and_as_itself(writer: Artifact, text: Path, cli: Cli) -> None:
    found = effexport.evaluate(writer.path, text, window=40, compare="torch")
    assert found.comparison is not None
    assert (found.comparison.changes.count, found.comparison.changes.of) == (0, found.answers)
    assert all(abs(difference.value) < CLOSE for difference in found.comparison.differences)
    result = cli("evaluate", writer.path, "--data", text, "--window", "40", "--compare", f"{writer.path}@ort", "--json")
    assert result.json["comparison"]["differences"][0] == {
        "name": "bits per byte",
        "value": 0.0,
        "low": 0.0,
        "high": 0.0,
    }
    assert result.json["data_sha256"] == found.data_sha256
    spec = json.loads((writer.path / "manifest.json").read_text())["spec"]
    judged = [result.json[name] for name in ("label", "runtime", "precision", "tokens", "spec")]
    assert judged == ["linear, chunk_length=16", "ort", "fp32", 40, spec]
    printed = cli("evaluate", writer.path, "--data", text, "--window", "40", "--compare", "torch").out
    assert f"answers that changed: 0 of {found.answers}, 0 %" in printed
    assert f"bits per byte  {found.figure('bits per byte').value:.4f} (" in printed


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"input_ids": np.full((2, 8), 5)}, "the arrays are input_ids; expected the model's inputs and labels"),
        ({"input_ids": np.full((2, 8), 5), "labels": np.zeros((2, 8))}, r"labels is float64 \[2, 8\]"),
        ({"input_ids": np.full((2, 8), 5), "labels": np.zeros(2, int)}, r"expected integers \[2, 8\]"),
        ({"input_ids": np.full((2, 8), 5), "labels": np.full((2, 8), 258)}, "labels contain 258; expected 0 to 257"),
        ({"input_ids": np.full((2, 8), 5), "labels": np.full((2, 8), -1)}, "labels contain -1; expected 0 to 257"),
        (
            {"input_ids": np.full((2, 8), 5), "labels": np.zeros((2, 8), int), "attention_mask": np.ones((1, 8))},
            "different numbers of rows: input_ids 2, labels 2, attention_mask 1",
        ),
        ({"input_ids": np.full((2, 8), 5), "labels": np.full((2, 8), IGNORED)}, "asks for no answer"),
        ({"input_ids": np.zeros((0, 8), int), "labels": np.zeros((0, 8), int)}, "asks for no answer"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(writer: Artifact, arrays: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        effexport.evaluate(writer.path, arrays)


def test_files_and_options_that_do_not_fit_are_refused(
    writer: Artifact, built: Callable[..., Artifact], text: Path, tmp_path: Path, cli: Cli
) -> None:
    hidden = built("linear").path
    short, lines = tmp_path / "short.txt", tmp_path / "data.jsonl"
    short.write_text("a")
    lines.write_text('{"text": "a", "label": 0}\n')
    wrong: dict[str, tuple[object, ...]] = {
        "returns last_hidden_state, which labels cannot judge": (hidden, "--data", text),
        "no text file at": (writer.path, "--data", tmp_path / "absent.txt"),
        "asks for no answer": (writer.path, "--data", short),
        "has texts with a class each": (writer.path, "--data", lines),
        "window is 1; expected at least 2": (writer.path, "--data", text, "--window", "1"),
        "unknown runtime 'orrt'": (writer.path, "--data", text, "--compare", "@orrt"),
        "give --compare torch too": (writer.path, "--data", text, "--weights", short),
        "ends in .json": (writer.path, "--data", text, "-o", tmp_path / "out.txt"),
    }
    for message, arguments in wrong.items():
        assert message in cli("evaluate", *arguments).error()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .* is not JSON"),
        ("[" * 100_000, "line 2 of .* is not JSON"),
        ('{"label": 1}', "line 2 of .* has no text"),
        ('{"text": "b", "label": 2}', "line 2 of .* has the label 2; expected 0 to 1, or one of: no, yes"),
        ('{"text": "b", "label": true}', "has the label True"),
        ('{"text": "b"}', "has the label None"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"text": "a", "label": "yes"}}\n{line}\n')
    with pytest.raises(UserError, match=message):
        examples_of_lines(file, ("no", "yes"), None)


@pytest.mark.slow
def test_verify_counts_the_answers_that_are_not_pytorchs(
    writer: Artifact, text: Path, tmp_path: Path, cli: Cli
) -> None:
    model = onnx.load(writer.model_path)
    (bias,) = (one for one in model.graph.initializer if list(one.dims) == [258])
    values = onnx.numpy_helper.to_array(bias).copy()
    values[100] += 1  # one token that is too probable
    bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))
    onnx.save(model, tmp_path / "damaged.onnx")
    options = ("--data", text, "--reference", "golden")
    damaged = cli("verify", writer.path, "--model", tmp_path / "damaged.onnx", *options, "--json")
    assert damaged.code == 1
    found = damaged.json["summary"]
    assert found["answers"]["worst"] > 0
    assert found["answer near-ties"]["failed"] == 1
    values[100] = np.nan
    bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))
    onnx.save(model, tmp_path / "nan.onnx")
    broken = cli("verify", writer.path, "--model", tmp_path / "nan.onnx", *options, "--json")
    assert broken.json["summary"]["answers"]["failed"] == 1
    assert broken.json["quality"] is None


def test_a_report_of_verify_has_the_figures_of_evaluate(writer: Artifact, text: Path, tmp_path: Path, cli: Cli) -> None:
    printed = cli("verify", writer.path, "--data", text, "--reference", "golden", "-o", tmp_path / "report.json").out
    report = report_from_values(json.loads((tmp_path / "report.json").read_text()), tmp_path / "report.json")
    found, quality = effexport.evaluate(writer.path, text, compare="torch"), report.quality
    assert quality is not None
    assert found.comparison is not None
    assert (quality.data_sha256, quality.rows, quality.objective) == (found.data_sha256, found.rows, found.objective)
    assert (quality.estimates, quality.pytorch) == (found.estimates, found.comparison.estimates)
    assert (quality.differences, quality.changes) == (found.comparison.differences, found.comparison.changes)
    # Σ nats / Σ answers over windows of 64 tokens, ± 1.96 standard errors of this ratio
    data = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int64)[None] + 2
    windows = [data[:, start : start + 64] for start in range(0, data.size, 64)]
    nats = np.array([torch_nats(writer, window[:, :-1], window[:, 1:])[0] for window in windows])
    asked = np.array([window.size - 1 for window in windows])
    bits = nats.sum() / asked.sum() / math.log(2)
    squares = ((nats / math.log(2) - bits * asked) ** 2).sum()
    half = 1.96 * math.sqrt(len(windows) / (len(windows) - 1) * squares) / asked.sum()
    wanted = {"name": "bits per byte", "value": bits, "low": bits - half, "high": bits + half}
    assert dataclasses.asdict(quality.pytorch[0]) == {
        name: pytest.approx(value, abs=CLOSE) if isinstance(value, float) else value for name, value in wanted.items()
    }
    line = f"held-out.txt: bits per byte {bits:.4f} ({bits - half:.4f} to {bits + half:.4f}), PyTorch {bits:.4f}, "
    assert f"{line}0 of {asked.sum()} answers changed" in printed


@pytest.mark.slow
def test_buckets_of_their_own_may_change_answers(built: Callable[..., Artifact], text: Path) -> None:
    report = effexport.verify(built("lsh", lm_head=True).path, data=text, reference="golden")
    assert [check.limit for check in report.checks if check.kind.startswith("answer")] == [None]


def test_data_is_compared_with_pytorch_or_refused(writer: Artifact, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "short.txt").write_text("a")
    assert "asks for no answer" in cli("verify", writer.path, "--data", tmp_path / "short.txt").error()
