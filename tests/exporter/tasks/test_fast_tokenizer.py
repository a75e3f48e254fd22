"""Tokenizers of an artifact's files against transformers' fast classes, which read the same files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from random_tokenizers import SENTENCES, TEXTS, TOKENIZERS, saved_tokenizer

from effexport.base.errors import UserError
from effexport.tasks.fast_tokenizer import FastTokenizer, fast_tokenizer
from effexport.tasks.task import ByteTokenizer

pytestmark = pytest.mark.requires("transformers")


def assert_same(tokenizer: FastTokenizer, expected: Any) -> None:
    """Ids, segments, offsets, special tokens and decoded text of several texts."""
    for name in ("mask_token", "mask_token_id", "unk_token_id", "cls_token_id", "eos_token_id"):
        if getattr(expected, name) is not None:
            assert getattr(tokenizer, name) == getattr(expected, name), name
    assert tokenizer.vocab_size == max(expected.get_vocab().values()) + 1
    mask = expected.mask_token or ""
    texts = [text.format(mask=mask) for text in TEXTS] + list(SENTENCES)
    for text, pair in [(text, None) for text in texts] + [(texts[0], texts[1]), (texts[2], "x")]:
        wanted = expected(text, pair, return_offsets_mapping=True, return_special_tokens_mask=True)
        found = tokenizer.encode(text, pair)
        assert list(found.ids) == wanted["input_ids"]
        assert list(found.type_ids) == wanted.get("token_type_ids", [0] * len(found))
        assert list(found.offsets) == wanted["offset_mapping"]
        assert list(map(int, found.special)) == wanted["special_tokens_mask"]
        assert list(found.sequence) == wanted.sequence_ids()
        for skip in (True, False):
            assert tokenizer.decode(found.ids, skip_special_tokens=skip) == expected.decode(
                found.ids, skip_special_tokens=skip
            )
        assert [tokenizer.token(i) for i in found.ids] == expected.convert_ids_to_tokens(found.ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_offsets_and_decoded_text_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    expected = saved_tokenizer(name, tmp_path)
    assert_same(fast_tokenizer(tmp_path), expected)


def edited(folder: Path, file: str, **changes: Any) -> None:
    values = json.loads((folder / file).read_text(encoding="utf-8")) | changes
    values = {key: value for key, value in values.items() if value != "removed"}
    (folder / file).write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize("name", ["bert-with-words", "bert-additional", "roberta-with-words", "albert-with-words"])
def test_files_of_old_releases_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    """Without added_tokens_decoder, special_tokens_map.json and added_tokens.json decide."""
    import transformers

    saved_tokenizer(name, tmp_path)
    edited(tmp_path, "tokenizer_config.json", added_tokens_decoder="removed")
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    special = [token for token in tokenizer["added_tokens"] if token["special"]]
    edited(tmp_path, "tokenizer.json", added_tokens=special)
    assert_same(fast_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path))


def test_tokens_that_only_the_configuration_lists_are_added_as_transformers_adds_them(tmp_path: Path) -> None:
    import transformers

    saved_tokenizer("bert-with-words", tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    edited(tmp_path, "tokenizer.json", added_tokens=tokenizer["added_tokens"][:5])
    edited(tmp_path, "tokenizer_config.json", mask_token={"__type": "AddedToken", "content": "[MASK]", "lstrip": True})
    assert_same(fast_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path))


def test_a_checkpoint_that_names_no_class_gets_that_of_its_model(tmp_path: Path) -> None:
    import transformers

    saved_tokenizer("albert", tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "nystromformer"}', encoding="utf-8")
    assert_same(fast_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path))


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    saved_tokenizer("bert", tmp_path)
    for tokenizer in (fast_tokenizer(tmp_path), ByteTokenizer()):
        with pytest.raises(UserError, match=r"not valid Unicode: character 2 is U\+D800"):
            tokenizer.encode("ab\ud800")


def test_the_tokens_of_a_byte_level_model_are_its_bytes() -> None:
    encoding = ByteTokenizer().encode("aé🙂")
    assert encoding.ids == (99, 197, 171, 242, 161, 155, 132)
    assert encoding.offsets == ((0, 1), *[(1, 2)] * 2, *[(2, 3)] * 4)
    assert ByteTokenizer().decode((0, *encoding.ids, 1)) == "aé🙂"


def test_a_special_token_that_is_listed_as_an_ordinary_one_is_special(tmp_path: Path) -> None:
    import transformers

    saved_tokenizer("bert-additional", tmp_path)
    tokens = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    edited(tmp_path, "tokenizer.json", added_tokens=[token | {"special": False} for token in tokens])
    edited(tmp_path, "tokenizer_config.json", added_tokens_decoder="removed")
    assert_same(fast_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_more_added_tokens_than_a_tokenizer_has_are_refused(file: str, tmp_path: Path) -> None:
    """The library needs more than a minute to read as many from tokenizer.json."""
    saved_tokenizer("bert-additional", tmp_path)
    if file == "tokenizer.json":
        tokens = json.loads((tmp_path / file).read_text(encoding="utf-8"))["added_tokens"]
        more = [tokens[0] | {"id": 1000 + i, "content": f"<{i}>"} for i in range(200_000)]
        edited(tmp_path, file, added_tokens=tokens + more)
    else:
        edited(tmp_path, "tokenizer_config.json", added_tokens_decoder="removed")
        edited(tmp_path, "tokenizer_config.json", additional_special_tokens=[f"<{i}>" for i in range(20_000)])
        edited(tmp_path, file, additional_special_tokens=[f"<{i}>" for i in range(10_000, 200_000)])
    started = time.process_time()
    with pytest.raises(UserError, match=r"it has [12]..,... added tokens; expected at most 30,000"):
        fast_tokenizer(tmp_path)
    assert time.process_time() - started < 4


def test_a_template_that_adds_a_million_tokens_to_every_text_is_refused(tmp_path: Path) -> None:
    saved_tokenizer("bert", tmp_path)
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1_000 + [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"x": {"id": "x", "ids": [2] * 1_000, "tokens": ["x"] * 1_000}},
    }
    edited(tmp_path, "tokenizer.json", post_processor=template)
    with pytest.raises(UserError, match="it adds 1,000,000 tokens to every text; expected at most 1,000"):
        fast_tokenizer(tmp_path)


def test_a_text_that_the_library_cannot_read_is_refused(tmp_path: Path) -> None:
    saved_tokenizer("albert", tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    edited(tmp_path, "tokenizer.json", model=model | {"unk_id": None})
    with pytest.raises(UserError, match=r"the tokenizer cannot read this text: .*unk_id"):
        fast_tokenizer(tmp_path).encode("☃")


def test_a_panic_of_the_library_is_refused_like_any_other_text_that_it_cannot_read(tmp_path: Path) -> None:
    """Its words in the normalised text go wrong where the normaliser removes characters."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Strip()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens(["the", "  "])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="the tokenizer cannot read this text: AddedVocabulary bad split"):
        fast_tokenizer(tmp_path).encode("  é")
