"""The files of a tokenizer: their names, and that they run no code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from effexport.errors import UserError
from effexport.models.checkpoints.spec import CONFIG, read_json
from effexport.models.validation import SpecError, shown

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
