"""What the fast tokenizer classes of transformers 4.57.1 assume where tokenizer_config.json is silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
CLASS_OF_MODEL: dict[str, str] = {"nystromformer": "AlbertTokenizer", "reformer": "ReformerTokenizer"}
