"""tokenizer.json with the settings of the files beside it, as the fast classes of transformers 4.57.1 read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from effexport.artifact import Artifact
from effexport.base.errors import MissingExtraError, UserError
from effexport.models.checkpoints.spec import CONFIG, read_json
from effexport.models.validation import MOST_BYTES_OF_VOCABULARY, SpecError, bounded_bytes, shown, shown_reason
from effexport.tasks.task import BYTE_OFFSET, ByteTokenizer, Encoding, Tokenizer, check_unicode

if TYPE_CHECKING:
    import tokenizers


NO_TOKENS = "build it with the tokenizer of the model: effexport build … --tokenizer DIR"
REMEDY = "copy the tokenizer's files again from their source"
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
# What a tokenizer's vocabulary may be in, if there is no tokenizer.json.
VOCABULARIES = (
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.model", "spm.model"),
    *("sentencepiece.bpe.model", "tokenizer.model"),
)
TOKENIZER_FILES = (TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, *VOCABULARIES)


def json_of(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file. Raises UserError for a damaged one."""
    if not path.is_file():
        return {}
    try:
        return read_json(path, REMEDY)
    except SpecError as error:
        raise UserError(str(error)) from error


def refuse_custom_code(folder: Path) -> None:
    """Raise UserError for a tokenizer whose files name Python code that is to run."""
    options = json_of(folder / TOKENIZER_CONFIG)
    file, found = TOKENIZER_CONFIG, options.get("auto_map")
    if not found and options.get("tokenizer_class") is None:
        auto_map = json_of(folder / CONFIG).get("auto_map")
        file, found = CONFIG, auto_map.get("AutoTokenizer") if isinstance(auto_map, Mapping) else None
    if found:
        raise UserError(
            f"{folder / file}: auto_map names code of its own for the tokenizer ({shown(found)}), which effexport "
            "does not run; give the tokenizer as a tokenizer.json without auto_map, with --tokenizer DIR, or leave it "
            "out with --tokenizer none"
        )


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (TOKENIZER_JSON, *VOCABULARIES))


SPECIAL_IDS = ("mask_token", "cls_token", "unk_token", "eos_token", "pad_token")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerClass:
    """A fast tokenizer class of transformers.

    special_tokens: by their name in tokenizer_config.json. wide_mask: a mask token that is given as a text takes the
    spaces before it; normalized_mask: it is looked for in the normalised text, not in the given one. sets_normalizer:
    the properties of the normalizer for which tokenizer_config.json outranks tokenizer.json. has_type_ids: whether the
    model is given segments.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    wide_mask: bool = False
    normalized_mask: bool = True
    sets_normalizer: tuple[str, ...] = ()
    has_type_ids: bool = True


# do_lower_case, strip_accents and tokenize_chinese_chars in tokenizer_config.json
NORMALIZER = ("lowercase", "strip_accents", "handle_chinese_chars")
BERT = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
ROBERTA = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
FNET = BERT | {"unk_token": "<unk>", "pad_token": "<pad>"}
ALBERT = FNET | {"bos_token": "[CLS]", "eos_token": "[SEP]"}
GPT = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
XLNET = ROBERTA | {"sep_token": "<sep>", "cls_token": "<cls>"}
T5 = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

_BERT = TokenizerClass(BERT, sets_normalizer=NORMALIZER)
_ROBERTA = TokenizerClass(ROBERTA, wide_mask=True, normalized_mask=False, has_type_ids=False)
_XLM_ROBERTA = TokenizerClass(ROBERTA, wide_mask=True, has_type_ids=False)
_ALBERT = TokenizerClass(ALBERT, wide_mask=True, normalized_mask=False)

# tokenizer_class without "Fast" → the class. Others count as PreTrainedTokenizer, which assumes nothing.
TOKENIZER_CLASSES: dict[str, TokenizerClass] = {
    "AlbertTokenizer": _ALBERT,
    "BartTokenizer": _XLM_ROBERTA,
    "BertTokenizer": _BERT,
    "BigBirdTokenizer": TokenizerClass(
        ALBERT | {"bos_token": "<s>", "eos_token": "</s>"}, wide_mask=True, has_type_ids=False
    ),
    "CamembertTokenizer": _XLM_ROBERTA,
    "ConvBertTokenizer": _BERT,
    "DebertaTokenizer": TokenizerClass(BERT | {"bos_token": "[CLS]", "eos_token": "[SEP]"}),
    "DebertaV2Tokenizer": TokenizerClass(BERT | {"bos_token": "[CLS]", "eos_token": "[SEP]"}),
    "DistilBertTokenizer": TokenizerClass(BERT, sets_normalizer=NORMALIZER, has_type_ids=False),
    "ElectraTokenizer": _BERT,
    "FNetTokenizer": TokenizerClass(FNET, wide_mask=True),
    "FunnelTokenizer": TokenizerClass(XLNET, sets_normalizer=NORMALIZER),
    "GPT2Tokenizer": TokenizerClass(GPT, has_type_ids=False),
    "GPTNeoXTokenizer": TokenizerClass(GPT, has_type_ids=False),
    "LongformerTokenizer": _ROBERTA,
    "MPNetTokenizer": TokenizerClass(
        ROBERTA | {"unk_token": "[UNK]"}, wide_mask=True, sets_normalizer=NORMALIZER[:2], has_type_ids=False
    ),
    "MobileBertTokenizer": _BERT,
    "PreTrainedTokenizer": TokenizerClass(),
    "ReformerTokenizer": TokenizerClass({"eos_token": "</s>", "unk_token": "<unk>"}, has_type_ids=False),
    "RemBertTokenizer": TokenizerClass(ALBERT, wide_mask=True),
    "RobertaTokenizer": _ROBERTA,
    "SqueezeBertTokenizer": _BERT,
    "T5Tokenizer": TokenizerClass(T5, has_type_ids=False),
    "XLMRobertaTokenizer": _XLM_ROBERTA,
    "XLNetTokenizer": TokenizerClass(XLNET, wide_mask=True),
}
# model_type in config.json → tokenizer_class, for checkpoints whose files name none.
CLASS_OF_MODEL: dict[str, str] = {
    "big_bird": "BigBirdTokenizer",
    "longformer": "LongformerTokenizer",
    "nystromformer": "AlbertTokenizer",
    "reformer": "ReformerTokenizer",
}


# transformers writes 1e30 for "no limit"
LONGEST = 2**31
# The library takes 2 s to read this many, and four times as long for twice as many.
MOST_ADDED_TOKENS = 30_000
# Most tokenizers add one or two.
MOST_TOKENS_AROUND_TEXT = 1_000


@dataclass(frozen=True, kw_only=True, eq=False)
class FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library with the settings of the files beside it."""

    tokenizer: tokenizers.Tokenizer
    has_type_ids: bool
    cleans_up: bool

    def encode(self, text: str, pair: str | None = None, *, special_tokens: bool = True) -> Encoding:
        check_unicode(text)
        check_unicode(pair or "")
        given = text if pair is None else (text, pair)
        try:
            # unlike `encode`, this lets other threads run
            (found,) = self.tokenizer.encode_batch([given], add_special_tokens=special_tokens)
        except BaseException as error:
            check_of_library(error)
            raise UserError(f"the tokenizer cannot read this text: {error}") from error
        return Encoding(
            tuple(found.ids),
            tuple(found.type_ids) if self.has_type_ids else (0,) * len(found.ids),
            tuple(map(bool, found.special_tokens_mask)),
            tuple(found.offsets),
            tuple(found.sequence_ids),
            tuple(found.word_ids),
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.tokenizer.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)
        if self.cleans_up:
            for spaced in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
                text = text.replace(spaced, spaced.strip())
        return text

    def token(self, token_id: int) -> str:
        return str(self.tokenizer.id_to_token(token_id))


def check_of_library(error: BaseException) -> None:
    """Raise what the library does not raise: it has Exception itself, and for its own defects one that is not an
    Exception."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def fast_tokenizer(folder: Path, pad_token_id: int = 0) -> FastTokenizer:
    """The tokenizer of a folder with tokenizer.json. Runs no code of the folder's.

    pad_token_id: of the model, for a tokenizer without a padding token.
    Raises UserError for a damaged file or one that asks for code of its own, MissingExtraError without tokenizers.
    """
    try:
        import tokenizers
    except ImportError:
        raise MissingExtraError("tokenizers", "text") from None
    refuse_custom_code(folder)
    options = json_of(folder / TOKENIZER_CONFIG)
    kind = class_of(folder, options)
    try:
        data = vocabulary(folder)
        check_count(len(ADDED_TOKENS_JSON.decode(data).added_tokens))
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
        around = max(map(tokenizer.num_special_tokens_to_add, (False, True)))
        if around > MOST_TOKENS_AROUND_TEXT:
            raise ValueError(f"it adds {around:,} tokens to every text; expected at most {MOST_TOKENS_AROUND_TEXT:,}")
        if not tokenizer.get_vocab_size():
            raise ValueError("its vocabulary is empty")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = bool(options.get("split_special_tokens", False))
        special = add_missing_tokens(tokenizer, folder, options, kind)
        set_add_prefix_space(tokenizer, bool(options.get("add_prefix_space", False)))
        if kind.sets_normalizer:
            set_normalizer(tokenizer, options, kind.sets_normalizer)
    except UserError:
        raise
    except BaseException as error:
        check_of_library(error)
        raise UserError(f"the tokenizer in {folder} cannot be read: {shown_reason(error)}; {REMEDY}") from error
    limit = options.get("model_max_length", options.get("max_len"))
    names = options.get("model_input_names")
    ids = {f"{name}_id": tokenizer.token_to_id(token) for name, token in special.items() if name in SPECIAL_IDS}
    if ids.get("pad_token_id") is None:
        ids["pad_token_id"] = pad_token_id
    return FastTokenizer(
        tokenizer=tokenizer,
        mask_token=special.get("mask_token"),
        **ids,
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        max_length=int(limit) if isinstance(limit, int | float) and 0 < limit < LONGEST else None,
        has_type_ids="token_type_ids" in names if isinstance(names, list) else kind.has_type_ids,
        cleans_up=bool(options.get("clean_up_tokenization_spaces", False)),
    )


def vocabulary(folder: Path) -> bytes:
    """The contents of tokenizer.json."""
    return bounded_bytes(folder / TOKENIZER_JSON, MOST_BYTES_OF_VOCABULARY)


class AddedTokenJson(msgspec.Struct):
    """An added token of tokenizer.json, with the fields that the library requires."""

    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class TokenizerJson(msgspec.Struct):
    """The part of tokenizer.json that is checked before the library reads the file."""

    added_tokens: list[AddedTokenJson] = []


# Made before any thread reads, as base/records.py says.
ADDED_TOKENS_JSON = msgspec.json.Decoder(TokenizerJson)


def check_count(added_tokens: int) -> None:
    """Raise ValueError for more added tokens than a tokenizer has: the library takes minutes for 300,000."""
    if added_tokens > MOST_ADDED_TOKENS:
        raise ValueError(f"it has {added_tokens:,} added tokens; expected at most {MOST_ADDED_TOKENS:,}")


def class_of(folder: Path, options: Mapping[str, Any]) -> TokenizerClass:
    """The class that transformers reads a folder with."""
    name = options.get("tokenizer_class")
    if name is None and (folder / CONFIG).is_file():
        try:
            config = read_json(folder / CONFIG, "")
        except SpecError as error:
            raise UserError(str(error)) from error
        name = config.get("tokenizer_class") or CLASS_OF_MODEL.get(str(config.get("model_type")))
    return TOKENIZER_CLASSES.get(str(name).removesuffix("Fast"), TokenizerClass())


def add_missing_tokens(
    tokenizer: tokenizers.Tokenizer, folder: Path, options: Mapping[str, Any], kind: TokenizerClass
) -> dict[str, str]:
    """Add the tokens that only the other files name, in the order of transformers, which decides their ids.

    Returns the special tokens by name.
    """
    from tokenizers import AddedToken

    given, listed = given_tokens(folder, options)
    by_text = {token.content: token for token in listed.values()}
    defaults: dict[str, Any] = dict(kind.special_tokens)
    special: dict[str, str | AddedToken] = {}
    for name in (*SPECIAL_TOKENS, *extra_names(options)):
        token = given.get(name, defaults.get(name))
        if name in given and token:
            token = by_text.get(str_of(token), token)
        if name == "mask_token" and kind.wide_mask and isinstance(token, str):
            token = AddedToken(token, lstrip=True, normalized=kind.normalized_mask)
        if token:
            special[name] = token
    additional = [token for token in given.get("additional_special_tokens") or () if token]
    texts = {str_of(token) for token in (*special.values(), *additional)}
    # also those that tokenizer.json has: a special token may be listed in it as an ordinary one
    missing: list[str | AddedToken] = [token for _, token in sorted(listed.items())]
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()} | set(map(str_of, missing))
    seen: set[str] = set()
    for token in (*special.values(), *additional):
        # as an AddedToken, it also replaces the properties that tokenizer.json gives it
        if str_of(token) not in seen and (not isinstance(token, str) or token not in present):
            missing.append(token)
        seen.add(str_of(token))
    check_count(len(missing))
    tokenizer.add_tokens([with_special(token, special=str_of(token) in texts) for token in missing])
    return {name: str_of(token) for name, token in special.items()}


def extra_names(options: Mapping[str, Any]) -> list[str]:
    extra = options.get("extra_special_tokens")
    return list(extra) if isinstance(extra, Mapping) else []


def given_tokens(folder: Path, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, tokenizers.AddedToken]]:
    """The special tokens that the files name, by name, and all added tokens that they list, by id.

    tokenizer_config.json with added_tokens_decoder is complete; without it, older files count, too.
    """
    names = (*SPECIAL_TOKENS, "additional_special_tokens")
    given = {name: token_from_json(options[name]) for name in names if name in options}
    extra = options.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        given |= {name: token_from_json(value) for name, value in extra.items()}
    decoder = options.get("added_tokens_decoder")
    if decoder is not None:
        if not isinstance(decoder, Mapping) or not all(isinstance(token, Mapping) for token in decoder.values()):
            raise UserError(
                f"{folder / TOKENIZER_CONFIG}: added_tokens_decoder is not an object of tokens by id; {REMEDY}"
            )
        return given, {int(number): token_from_json(dict(token)) for number, token in decoder.items()}
    for name, value in json_of(folder / SPECIAL_TOKENS_MAP).items():
        if name == "additional_special_tokens" and isinstance(value, list):
            known = dict.fromkeys(given.get(name) or ())
            found = [token_from_json(token, special=True) for token in value]
            given[name] = [*known, *(token for token in found if token not in known)]
        else:
            given[name] = token_from_json(value, special=True)
    special = {str_of(token) for name in SPECIAL_TOKENS if (token := given.get(name))}
    special |= {str_of(token) for token in given.get("additional_special_tokens") or ()}
    listed = {
        number: token_from_json({"content": text, "normalized": text not in special, "special": text in special})
        for text, number in json_of(folder / ADDED_TOKENS).items()
    }
    for token in ADDED_TOKENS_JSON.decode(vocabulary(folder)).added_tokens:
        fields = msgspec.structs.asdict(token)
        listed[fields.pop("id")] = token_from_json(fields)
    return given, listed


def token_from_json(value: Any, *, special: bool = False) -> Any:
    """A token as the files write it: a text, or an object with a content and properties."""
    from tokenizers import AddedToken

    if isinstance(value, list):
        return [token_from_json(item, special=special) for item in value]
    if not isinstance(value, Mapping):
        return value
    fields = {key: item for key, item in value.items() if key != "__type"}
    return AddedToken(**(fields | {"special": True} if special else fields))


def with_special(token: str | tokenizers.AddedToken, *, special: bool) -> tokenizers.AddedToken:
    from tokenizers import AddedToken

    if isinstance(token, str):
        return AddedToken(token, special=special)
    token.special = token.special or special
    return token


def str_of(token: str | tokenizers.AddedToken) -> str:
    return token if isinstance(token, str) else str(token.content)


def set_add_prefix_space(tokenizer: tokenizers.Tokenizer, wanted: bool) -> None:
    """Give the setting of tokenizer_config.json to a pre-tokenizer that has one."""
    from tokenizers import pre_tokenizers

    if tokenizer.pre_tokenizer is None:
        return
    state = json.loads(tokenizer.pre_tokenizer.__getstate__())
    if state.get("add_prefix_space", wanted) != wanted:
        kind = getattr(pre_tokenizers, state.pop("type"))
        tokenizer.pre_tokenizer = kind(**(state | {"add_prefix_space": wanted}))


def set_normalizer(tokenizer: tokenizers.Tokenizer, options: Mapping[str, Any], names: Sequence[str]) -> None:
    """Give the settings of tokenizer_config.json, those of these names, to a normalizer that has them."""
    from tokenizers import normalizers

    if tokenizer.normalizer is None:
        return
    state = json.loads(tokenizer.normalizer.__getstate__())
    wanted = {
        "lowercase": options.get("do_lower_case", True),
        "strip_accents": options.get("strip_accents"),
        "handle_chinese_chars": options.get("tokenize_chinese_chars", True),
    }
    wanted = {name: wanted[name] for name in names}
    if any(state.get(name, value) != value for name, value in wanted.items()):
        kind = getattr(normalizers, state.pop("type"))
        tokenizer.normalizer = kind(**(state | wanted))


def tokenizer_from_artifact(artifact: Artifact) -> Tokenizer:
    """The tokenizer of an artifact: from its files, or of bytes for a byte-level encoder without any.

    Raises UserError if the artifact does not read text, MissingExtraError without the package tokenizers.
    """
    model = artifact.spec.model
    if TOKENIZER_JSON in artifact.manifest.files:
        return fast_tokenizer(artifact.path, model.pad_token_id)
    if model.reads_bytes and model.input_limits["input_ids"] >= 256 + BYTE_OFFSET:
        return ByteTokenizer(pad_token_id=model.pad_token_id)
    if "input_ids" not in model.inputs:
        raise UserError(
            f"{artifact.path} does not read text: its inputs are {', '.join(model.inputs)}; give arrays with --input"
        )
    if any(name in artifact.manifest.files for name in TOKENIZER_FILES):
        raise UserError(
            f"{artifact.path} has the tokenizer in files that need transformers; build it again with transformers "
            f"installed, which converts them to {TOKENIZER_JSON}"
        )
    raise UserError(f"{artifact.path} has no tokenizer; {NO_TOKENS}")
