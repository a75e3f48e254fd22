"""Tokenizers trained on a few sentences, with all that makes tokenizers differ, saved as transformers saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = (
    "Paris is the capital of France, and Lyon is not.",
    "The quick brown fox doesn't jump over the lazy dog; it's asleep.",
    "Élan vital, naïve façade, ÜBER-größe, Ångström: accents everywhere!",
    "Emoji 🙂 and 漢字 and текст stand beside the ASCII text.",
    "Two  spaces,\ttabs and <angle> [brackets] are kept, or not.",
    "I've said: we're here, they'm not. Is it 42 or 1,024?",
)
# Texts around a mask, which stands for the tokenizer's own.
TEXTS = (
    "Paris is the {mask} of France.",
    "ÉLAN  vital {mask}, naïve  🙂 façade!",
    "{mask} it's  the lazy{mask} dog, <ent> NewWord newword.",
)


def byte_level_bpe(vocab_size: int = 400, *, prefix: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train(tokenizer, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet))
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=prefix)
    return tokenizer


def word_piece(vocab_size: int = 200, **normalizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    train(tokenizer, trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def unigram(
    vocab_size: int = 150, special: tuple[str, ...] = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), normalizers.Replace("``", '"')]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    train(tokenizer, trainers.UnigramTrainer(vocab_size=vocab_size, special_tokens=list(special), unk_token="<unk>"))
    if "[CLS]" in special:
        cls, sep = special.index("[CLS]"), special.index("[SEP]")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", cls), ("[SEP]", sep)],
        )
    return tokenizer


def train(tokenizer: Tokenizer, trainer: Any) -> None:
    trainer.show_progress = False
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)


def wide(text: str) -> AddedToken:
    return AddedToken(text, lstrip=True, normalized=False, special=True)


def fast(family: str, tokenizer: Tokenizer, **options: Any) -> Any:
    """The tokenizer of one of transformers' families, which takes seconds to import: not while tests are collected."""
    import transformers

    return getattr(transformers, f"{family}TokenizerFast")(tokenizer_object=tokenizer, **options)


def bert(**options: Any) -> Callable[[], Any]:
    normalizer = options.pop("normalizer", {})
    return lambda: fast("Bert", word_piece(**normalizer), **options)


def with_tokens(make: Callable[[], Any], *tokens: str | AddedToken, special: bool = False) -> Callable[[], Any]:
    def made() -> Any:
        tokenizer = make()
        tokenizer.add_tokens(list(tokens), special_tokens=special)
        return tokenizer

    return made


def roberta(**options: Any) -> Callable[[], Any]:
    prefix = options.get("add_prefix_space", False)
    return lambda: fast("Roberta", byte_level_bpe(prefix=prefix), **options)


def albert(**options: Any) -> Callable[[], Any]:
    return lambda: fast("Albert", unigram(), **options)


def reformer(**options: Any) -> Callable[[], Any]:
    special = ("</s>", "<unk>", "<pad>", "<mask>")
    return lambda: fast("Reformer", unigram(special=special), mask_token="<mask>", pad_token="<pad>", **options)


def plain(make: Callable[[], Tokenizer], **options: Any) -> Callable[[], Any]:
    return lambda: fast("PreTrained", make(), **options)


NAMES = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
BPE_NAMES = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}

TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bert": bert(),
    "bert-cased": bert(do_lower_case=False),
    "bert-keeps-accents": bert(do_lower_case=True, strip_accents=False),
    "bert-of-a-cased-tokenizer": bert(normalizer={"lowercase": False}, do_lower_case=True),
    "bert-with-words": with_tokens(bert(), "NewWord", AddedToken("<ent>", rstrip=True)),
    "bert-with-special-words": with_tokens(bert(clean_up_tokenization_spaces=True), "<ent>", special=True),
    "bert-additional": bert(additional_special_tokens=["<ent>", "[brackets]"]),
    "bert-wide-mask": bert(mask_token=wide("[MASK]")),
    "bert-no-chinese": bert(tokenize_chinese_chars=False),
    "roberta": roberta(),
    "roberta-prefix": roberta(add_prefix_space=True),
    "roberta-with-words": with_tokens(roberta(), "NewWord", AddedToken("<ent>", lstrip=True, single_word=True)),
    "bpe-plain": plain(byte_level_bpe, mask_token="<mask>", **BPE_NAMES),
    "bpe-wide-mask": plain(byte_level_bpe, mask_token=wide("<mask>"), clean_up_tokenization_spaces=True, **BPE_NAMES),
    "wordpiece-plain": plain(word_piece, mask_token="[MASK]", **NAMES),
    "wordpiece-cleaned": plain(word_piece, mask_token="[MASK]", clean_up_tokenization_spaces=True, **NAMES),
    "albert": albert(),
    "albert-with-words": with_tokens(albert(), "NewWord", "<ent>"),
    "unigram-plain": plain(unigram, mask_token="[MASK]", **(NAMES | {"pad_token": "<pad>", "unk_token": "<unk>"})),
    "reformer": reformer(),
}


def saved_tokenizer(name: str, folder: Path) -> Any:
    """The tokenizer of a name, saved to a folder and loaded from there by transformers."""
    import transformers

    TOKENIZERS[name]().save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)
