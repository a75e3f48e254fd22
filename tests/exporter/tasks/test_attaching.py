"""Tokenizers that a build takes into its artifact: the files, and refusals before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from random_tokenizers import saved_tokenizer
from transformers_models import TINY_OF_TEXTS, saved

import effexport
from effexport.artifact import open_artifact
from effexport.base.errors import UserError
from effexport.tasks.fast_tokenizer import tokenizer_from_artifact
from effexport.tasks.task import ByteTokenizer
from effexport.tasks.texts import TokenizerSource, copy_tokenizer

pytestmark = [pytest.mark.requires("torch", "onnx", "ort", "transformers"), pytest.mark.usefixtures("kept_traces")]
CONFIG = TINY_OF_TEXTS | {"max_position_embeddings": 16}
TEXT = "Paris is the [MASK] of <ent> France."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    saved(folder, "NystromformerModel", CONFIG)
    saved_tokenizer("bert-with-words", folder)
    return folder


@pytest.fixture(scope="module")
def built_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts") / "built"
    effexport.build(checkpoint=checkpoint, output=folder)
    return folder


def test_an_artifact_of_a_checkpoint_has_its_tokenizer_and_transformers_reads_it_there(
    checkpoint: Path, built_checkpoint: Path
) -> None:
    import transformers

    copied = {file.name for file in checkpoint.glob("*") if file.name != "model.safetensors"}
    manifest = open_artifact(built_checkpoint).manifest
    assert copied < set(manifest.files)
    for name in copied:
        assert (built_checkpoint / name).read_bytes() == (checkpoint / name).read_bytes()
    assert transformers.AutoConfig.from_pretrained(built_checkpoint).vocab_size == 210
    expected = transformers.AutoTokenizer.from_pretrained(built_checkpoint)(TEXT)["input_ids"]
    assert list(tokenizer_from_artifact(open_artifact(built_checkpoint)).encode(TEXT).ids) == expected
    assert effexport.inspect(built_checkpoint).kind == "artifact"


def test_a_refitted_artifact_keeps_its_tokenizer(built_checkpoint: Path, tmp_path: Path) -> None:
    saved(tmp_path / "next", "NystromformerModel", CONFIG, seed=1)
    saved_tokenizer("bert", tmp_path / "next")
    result = effexport.refit(built_checkpoint, checkpoint=tmp_path / "next", output=tmp_path / "refitted")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (result.path / name).read_bytes() == (built_checkpoint / name).read_bytes()
    assert any("next has another one" in note for note in result.report.notes)


def test_a_changed_tokenizer_is_a_damaged_artifact(built_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(built_checkpoint, tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"damaged: tokenizer.json has 2 bytes"):
        open_artifact(tmp_path / "copy")


def test_a_byte_level_encoder_needs_no_files_and_a_layer_reads_no_text(built: Callable[..., Any]) -> None:
    assert isinstance(tokenizer_from_artifact(built("softmax", "encoder")), ByteTokenizer)
    with pytest.raises(UserError, match="does not read text: its inputs are hidden_states"):
        tokenizer_from_artifact(built("softmax", "attention"))


def edited(folder: Path, file: str, **changes: Any) -> None:
    values = json.loads((folder / file).read_text(encoding="utf-8"))
    (folder / file).write_text(json.dumps(values | changes), encoding="utf-8")


def endless(folder: Path) -> None:
    with (folder / "tokenizer.json").open("wb") as stream:
        stream.truncate(1 << 40)


def damage(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"', encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "vocab_size", "message"),
    [
        (lambda folder: None, 201, "has tokens up to 201; the model knows 0 to 200"),
        (
            lambda folder: edited(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["mine.Mine", None]}),
            210,
            "auto_map names code of its own",
        ),
        (damage, 210, "cannot be read"),
        (lambda folder: edited(folder, "tokenizer_config.json", added_tokens_decoder=[1]), 210, "not an object of"),
        (lambda folder: (folder / "tokenizer_config.json").write_bytes(b"\xff"), 210, "cannot read"),
        (lambda folder: (folder / "tokenizer_config.json").write_text(" " * (5 << 20)), 210, "larger than 4096 KB"),
        (lambda folder: (folder / "tokenizer.json").write_text(" " * (129 << 20)), 210, "larger than 131072 KB"),
        (endless, 210, "larger than 131072 KB"),
        (
            lambda folder: edited(folder, "tokenizer_config.json", auto_map=["x" * 5_000]),
            210,
            r"auto_map names code of its own for the tokenizer \(\['x{78}…\)",
        ),
    ],
    ids=[
        *("too-large", "auto-map", "damaged", "wrong-field", "not-utf-8"),
        *("large-config", "large-vocabulary", "endless-vocabulary", "long-auto-map"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_one_error_that_names_its_folder(
    checkpoint: Path, tmp_path: Path, change: Callable[[Path], Any], vocab_size: int, message: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(checkpoint, source)
    target.mkdir()
    change(source)
    with pytest.raises(UserError, match=message) as caught:
        copy_tokenizer(TokenizerSource(source, config=source / "config.json"), target, vocab_size)
    assert str(source) in str(caught.value)
    assert str(target) not in str(caught.value)


def test_a_refused_tokenizer_leaves_no_artifact_and_none_leaves_it_out(
    cli: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "source")
    edited(tmp_path / "source", "tokenizer_config.json", auto_map=["mine.Mine", None])
    result = cli("build", "--checkpoint", tmp_path / "source", "-o", tmp_path / "out")
    assert result.code == 2
    assert "auto_map" in result.err
    assert not (tmp_path / "out").exists()
    result = cli("build", "--checkpoint", tmp_path / "source", "--tokenizer", "none", "-o", tmp_path / "out")
    assert result.code == 0, result.err
    files = open_artifact(tmp_path / "out").manifest.files
    assert "config.json" in files
    assert "tokenizer.json" not in files
    with pytest.raises(UserError, match=r"has no tokenizer; build it with .* --tokenizer DIR"):
        tokenizer_from_artifact(open_artifact(tmp_path / "out"))


def test_a_vocabulary_without_tokenizer_json_is_converted_once_and_for_all(checkpoint: Path, tmp_path: Path) -> None:
    import transformers

    from effexport.tasks.fast_tokenizer import fast_tokenizer

    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(checkpoint, source)
    target.mkdir()
    (source / "tokenizer.json").unlink()
    assert copy_tokenizer(TokenizerSource(source, config=source / "config.json"), target, 210) == []
    expected = transformers.BertTokenizer.from_pretrained(source)(TEXT)["input_ids"]
    assert fast_tokenizer(target).tokenizer.encode(TEXT).ids == expected


def test_a_vocabulary_that_nothing_can_convert_is_a_note_unless_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "spiece.model").write_bytes(b"not a model")
    (tmp_path / "source" / "config.json").write_text('{"model_type": "reformer"}', encoding="utf-8")
    (tmp_path / "target").mkdir()
    config = tmp_path / "source" / "config.json"
    notes = copy_tokenizer(TokenizerSource(tmp_path / "source", config=config), tmp_path / "target", 320)
    assert len(notes) == 1
    assert "transformers cannot convert it" in notes[0]
    with pytest.raises(UserError, match="transformers cannot convert it"):
        copy_tokenizer(TokenizerSource(tmp_path / "source", wanted=True), tmp_path / "target", 320)
