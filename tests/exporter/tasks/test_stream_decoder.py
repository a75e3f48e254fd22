"""Text that arrives in pieces is the text of all tokens, and no piece ends inside a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from effexport.tasks.task import ByteTokenizer, Tokenizer
from effexport.tasks.text_generator import MOST_WAITING, REPLACEMENT, StreamDecoder

TEXT = "Grüße, 世界! 👩\N{ZERO WIDTH JOINER}🚀 naïve — ﷽ \U00010348 end"
WORDS = ["▁Hello", "▁world", ",", "▁", "s", "<0xE4>", "<0xB8>", "<0x96>", "</s>"]


class Pieces:
    """A tokenizer as SentencePiece's: the first word of a text has no space, and unknown characters are bytes."""

    def __init__(self) -> None:
        import tokenizers

        vocab = [("<unk>", 0.0), *((word, -1.0) for word in WORDS)]
        self.tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=0, byte_fallback=True))
        self.tokenizer.add_special_tokens(["</s>"])
        replace, strip = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Strip(" ", 1, 0)
        parts = [replace, tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(), strip]
        self.tokenizer.decoder = tokenizers.decoders.Sequence(parts)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def pieces_of(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer, prompt)
    return [*(decoder.add(token) for token in tokens), decoder.end()]


def byte_level_bpe() -> Any:
    """One with two merges, of the last byte of a character and the first of the next."""
    import tokenizers

    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    merges = []
    for pair, place in (("世界", 2), ("üß", 1)):
        letters = level.pre_tokenize_str(pair)[0][0]  # one for each byte
        merges.append((letters[place], letters[place + 1]))
    vocab = [*sorted(level.alphabet()), *map("".join, merges)]
    model = tokenizers.models.BPE({token: number for number, token in enumerate(vocab)}, merges)
    made: Any = tokenizers.Tokenizer(model)
    made.pre_tokenizer, made.decoder = level, tokenizers.decoders.ByteLevel()
    return made


def test_every_character_of_bytes_arrives_whole_with_its_last_byte() -> None:
    tokenizer = ByteTokenizer()
    pieces = pieces_of(tokenizer, tokenizer.encode("a").ids, tokenizer.encode(TEXT).ids)
    assert [piece for piece in pieces if piece] == list(TEXT)
    ends = np.cumsum([len(character.encode()) for character in TEXT]) - 1
    assert [place for place, piece in enumerate(pieces) if piece] == ends.tolist()


@pytest.mark.requires("transformers")
def test_bpe_tokens_that_end_inside_characters_give_whole_characters() -> None:
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode(TEXT).ids
    inside = [token for token in ids if REPLACEMENT in tokenizer.decode([token])]
    assert {256, 257} < set(inside), "the merged ones too"
    pieces = pieces_of(tokenizer, ids[:2], ids[2:])
    assert tokenizer.decode(ids[:2]) + "".join(pieces) == TEXT
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.requires("transformers")
def test_spaces_between_words_depend_on_earlier_tokens_also_after_special_ones() -> None:
    tokenizer: Tokenizer = Pieces()  # type: ignore[assignment]  # only decode is used
    hello, world, comma, _, letter, b0, b1, b2, eos = range(1, len(WORDS) + 1)
    pieces = pieces_of(tokenizer, [hello], [world, letter, comma, eos, world, b0, b1, b2, b0, b1, b2, hello])
    assert pieces == [" world", "s", ",", "", " world", "", "", "世", "", "", "世", " Hello", ""]


@pytest.mark.parametrize("seed", range(5))
def test_random_bytes_give_the_text_of_all_of_them_within_bounded_memory(seed: int) -> None:
    tokenizer, rng = ByteTokenizer(), np.random.default_rng(seed)
    # continuation bytes and first bytes of characters, with text between them
    tokens = np.where(rng.random(2000) < 0.9, rng.integers(128, 258, 2000), rng.integers(0, 130, 2000)).tolist()
    decoder = StreamDecoder(tokenizer, [70])
    pieces = []
    for token in tokens:
        pieces.append(decoder.add(token))
        assert len(decoder._context) + len(decoder._waiting) <= 3 * MOST_WAITING
    assert "".join([*pieces, decoder.end()]) == tokenizer.decode(tokens)
