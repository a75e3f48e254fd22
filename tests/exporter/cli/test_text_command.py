"""`effexport run` with texts: what people read, what --json says, and the vectors of a file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept import kept
from random_tokenizers import SENTENCES
from small_builds import what_decides_a_build
from text_checkpoints import assert_same_answers, checkpoint, pipeline

import effexport

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "transformers")
TEXT = "Paris is the [MASK] of France."
# Our logits, of the size of 10, differ from PyTorch's by 1e-5.
LIMIT = 1e-4


def make(folder: Path) -> None:
    checkpoint(folder / "checkpoint", "NystromformerForMaskedLM", "bert-with-words")
    effexport.build(checkpoint=folder / "checkpoint", output=folder / "artifact")


@pytest.fixture(scope="module")
def masked_lm() -> Path:
    """A folder with a checkpoint and its artifact. Do not change it."""
    helpers = [
        Path(__file__).parents[2] / "support" / f"{name}.py" for name in ("random_tokenizers", "text_checkpoints")
    ]
    return kept("text/masked-lm", [*helpers, *what_decides_a_build()], make)


@pytest.fixture(scope="module")
def expected(masked_lm: Path) -> Any:
    import transformers

    model = transformers.AutoModelForMaskedLM.from_pretrained(masked_lm / "checkpoint")
    return pipeline("fill-mask", masked_lm / "checkpoint", model.eval())


def test_the_answers_for_a_mask_are_a_table_with_scores_tokens_and_texts(
    cli: Callable[..., Any], masked_lm: Path, expected: Any
) -> None:
    result = cli("run", masked_lm / "artifact", "--fill-mask", TEXT, "--top", "3")
    assert result.code == 0, result.err
    *rows, last = result.out.splitlines()
    assert last.startswith(f"{len(expected.tokenizer(TEXT)['input_ids'])} tokens in ")
    assert len(rows) == 3
    for row, one in zip(rows, expected(TEXT, top_k=3), strict=True):
        token = one["token_str"].split() or f'"{one["token_str"]}"'.split()
        score, *words = row.split()
        assert words == [*token, *one["sequence"].split()]
        # float32 rounding may tip the last digit that is printed
        assert abs(float(score) - one["score"]) <= 1e-4


def test_a_build_says_how_to_fill_a_mask_and_a_token_of_spaces_is_quoted(masked_lm: Path) -> None:
    from effexport.artifact import open_artifact
    from effexport.cli.artifacts import fill_mask_command
    from effexport.cli.run import quoted

    folder = masked_lm / "artifact"
    command = f'effexport run {folder} --fill-mask "Paris is the [MASK] of France."'
    assert fill_mask_command(open_artifact(folder)) == command
    assert [quoted(text) for text in (" ", "", "a b")] == ['" "', '""', "a b"]


def test_json_has_the_answer_of_the_pipeline_and_the_tokens_with_offsets(
    cli: Callable[..., Any], masked_lm: Path, expected: Any
) -> None:
    result = cli("run", masked_lm / "artifact", "--fill-mask", f"{TEXT} [MASK]!", "--json")
    assert result.code == 0, result.err
    found = result.json
    wanted = expected(f"{TEXT} [MASK]!")
    with effexport.load_text(masked_lm / "artifact") as fill:
        assert fill(f"{TEXT} [MASK]!") == found["answer"]
    assert_same_answers(found["answer"], wanted, LIMIT)
    assert found["task"] == "fill-mask"
    encoded = expected.tokenizer(f"{TEXT} [MASK]!", return_offsets_mapping=True)
    assert found["tokens"]["ids"] == encoded["input_ids"]
    assert found["tokens"]["offsets"] == list(map(list, encoded["offset_mapping"]))


def test_a_text_file_is_read_with_the_tokenizer_in_windows_that_share_tokens(
    cli: Callable[..., Any], masked_lm: Path, expected: Any, tmp_path: Path
) -> None:
    text = " ".join(SENTENCES * 2)
    (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    arguments = ("run", masked_lm / "artifact", "--text", tmp_path / "in.txt", "-o", tmp_path / "out.npz")
    result = cli(*arguments, "--stride", "12")
    assert result.code == 0, result.err
    ids = expected.tokenizer(text)["input_ids"]
    assert f"{len(ids)} tokens in" in result.out
    with np.load(tmp_path / "out.npz") as file:
        rows, mask, logits = file["input_ids"], file["attention_mask"], file["logits"]
    assert rows.shape[1] == 96
    assert logits.shape == (*rows.shape, 420)
    inner = [row[kept == 1][1:-1].tolist() for row, kept in zip(rows, mask, strict=True)]
    assert all(first[-12:] == second[:12] for first, second in itertools.pairwise(inner))
    assert [*inner[0], *(token for row in inner[1:] for token in row[12:])] == ids[1:-1]


def test_every_line_of_a_file_becomes_a_vector(
    cli: Callable[..., Any], built: Callable[..., Any], tmp_path: Path
) -> None:
    artifact = built("softmax", "encoder").path
    # the third line is longer than the 64 positions, so it becomes two windows
    lines = ["one line", "zwei Zeilen, größer", "x" * 100]
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    result = cli("run", artifact, "--embed", tmp_path / "lines.txt", "-o", tmp_path / "out.npz", "--json")
    assert result.code == 0, result.err
    with np.load(tmp_path / "out.npz") as file:
        embedding, tokens = file["embedding"], file["tokens"]
    assert tokens.tolist() == [len(line.encode()) for line in lines]
    assert result.json["answers"] == [{"tokens": count} for count in tokens.tolist()]
    with effexport.load(artifact) as runner:
        for line, vector in zip(lines, embedding, strict=True):
            ids = np.frombuffer(line.encode(), np.uint8).astype(np.int64)[None] + 2
            parts = [runner.run({"input_ids": part}) for part in (ids[:, :64], ids[:, 64:]) if part.size]
            hidden = np.concatenate([part["last_hidden_state"][0] for part in parts]).astype(np.float64)
            # float32 sums of 100 values of the size of 1
            np.testing.assert_allclose(vector, hidden.mean(axis=0), atol=1e-5)
    printed = json.loads(cli("run", artifact, "--embed", tmp_path / "lines.txt", "--json").out)["answers"]
    np.testing.assert_allclose([one["embedding"] for one in printed], embedding, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fill-mask", "Paris."), "the text has no [MASK]; write it where a token is to be predicted"),
        (("--fill-mask", "[MASK] \udcff"), r"'[MASK] \udcff' is not UTF-8; expected a text that is"),
        (("--fill-mask", "[MASK] " * 99), "this model takes 96, and fill-mask needs all of them at once"),
        (("--classify", "Paris."), "answers fill-mask, so --classify does not apply; use --fill-mask"),
        (("--text", "latin1.txt"), "latin1.txt is not UTF-8: byte 4 is 0xE9; expected a text in UTF-8"),
        (("--text", "spaces.txt"), "the text has no tokens: the tokenizer drops all of its characters"),
        (("--embed", "lines.txt"), "line 2 of lines.txt is empty; expected one text per line"),
    ],
)
def test_a_text_that_cannot_be_used_is_one_line(
    cli: Callable[..., Any],
    masked_lm: Path,
    built: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin1.txt").write_bytes(b"Cafe\xe9")
    Path("spaces.txt").write_bytes(b" \n ")
    Path("lines.txt").write_bytes(b"a\n\nb\n")
    artifact = built("softmax", "encoder").path if arguments[0] == "--embed" else masked_lm / "artifact"
    assert message in cli("run", artifact, *arguments).error()
