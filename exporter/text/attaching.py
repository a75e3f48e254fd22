"""The tokenizer that a build takes into its artifact."""

from __future__ import annotations

import filecmp
from dataclasses import dataclass
from pathlib import Path

from effexport.artifact import Artifact
from effexport.base.errors import MissingExtraError, UserError
from effexport.models.checkpoints.spec import CONFIG, GENERATION_CONFIG
from effexport.models.validation import MOST_BYTES_OF_VOCABULARY, FileTooLargeError, bounded_bytes
from effexport.text.fast_tokenizer import (
    REMEDY,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    VOCABULARIES,
    fast_tokenizer,
    has_tokenizer,
    refuse_custom_code,
)


@dataclass(frozen=True)
class TokenizerSource:
    """The source of an artifact's tokenizer.

    folder: with the tokenizer's files; None for no tokenizer. wanted: whether a folder without a tokenizer is an error.
    config: the config.json that goes with it, None for none.
    """

    folder: Path | None = None
    wanted: bool = False
    config: Path | None = None


NO_TOKENIZER = TokenizerSource()


def tokenizer_of_build(tokenizer: str | Path | None, checkpoint: Path | None) -> TokenizerSource:
    """The source that `build --tokenizer` names: a folder, "none", or None for the checkpoint's if it has one."""
    config = None if checkpoint is None else checkpoint / CONFIG
    if tokenizer is None:
        return TokenizerSource(checkpoint, config=config)
    if str(tokenizer) == "none":
        return TokenizerSource(config=config)
    folder = Path(tokenizer)
    if not folder.is_dir():
        raise UserError(f"--tokenizer is {tokenizer}; expected a folder with {TOKENIZER_JSON}, or none")
    return TokenizerSource(folder, wanted=True, config=config)


def tokenizer_of_refit(previous: Artifact, checkpoint: Path | None) -> tuple[TokenizerSource, list[str]]:
    """An artifact keeps its tokenizer when it gets other weights. Also returns sentences for the report."""
    files = previous.manifest.files
    own = previous.path / CONFIG if CONFIG in files else None
    config = own if checkpoint is None else checkpoint / CONFIG
    kept = previous.path / TOKENIZER_JSON
    notes = []
    if checkpoint is not None and kept.is_file() and (other := checkpoint / TOKENIZER_JSON).is_file():
        notes = [
            f"The tokenizer is that of {previous.path.resolve().name}; {checkpoint.resolve().name} has another one: if "
            "its weights were trained with that, build the artifact again."
        ] * (not filecmp.cmp(other, kept, shallow=False))
    folder = previous.path if any(name in files for name in TOKENIZER_FILES) else None
    return TokenizerSource(folder, config=config), notes


def copy_tokenizer(source: TokenizerSource, target: Path, vocab_size: int | None) -> list[str]:
    """Copy config.json, the options of `generate` and the tokenizer's files into an artifact's folder, and check that
    the tokenizer works.

    vocab_size: the number of tokens that the model knows, None if it reads none. A tokenizer without tokenizer.json is
    converted with transformers. Returns sentences for the report: what cannot be used, and what it needs.
    Raises UserError for a damaged tokenizer, one with code of its own, and one that does not fit the model.
    """
    if source.config is not None:
        copy_bounded(source.config, target / CONFIG)
        if (options := source.config.with_name(GENERATION_CONFIG)).is_file():
            copy_bounded(options, target / GENERATION_CONFIG)
    if source.folder is None:
        return []
    if not has_tokenizer(source.folder):
        if source.wanted:
            raise UserError(
                f"{source.folder} has no tokenizer; expected a folder with {TOKENIZER_JSON}, or with "
                f"{', '.join(VOCABULARIES[:4])}"
            )
        return []
    refuse_custom_code(source.folder)
    if vocab_size is None:
        raise UserError("--tokenizer is for models that read tokens; this one has no input_ids: leave it out")
    for name in TOKENIZER_FILES:
        if (source.folder / name).is_file():
            copy_bounded(source.folder / name, target / name)
    notes = [] if (target / TOKENIZER_JSON).is_file() else converted(source, target)
    return notes or checked(source.folder, target, vocab_size)


def copy_bounded(file: Path, copy: Path) -> None:
    """Copy a file, unless it is larger than the largest vocabulary. Raises UserError."""
    try:
        copy.write_bytes(bounded_bytes(file, MOST_BYTES_OF_VOCABULARY))
    except FileTooLargeError as error:
        raise UserError(f"{file} cannot be used: {error}; {REMEDY}") from error


def converted(source: TokenizerSource, target: Path) -> list[str]:
    """Write tokenizer.json for a folder without one. Returns why that is not possible."""
    found = [name for name in VOCABULARIES if (target / name).is_file()]
    what = f"The tokenizer ({', '.join(found)}) has no {TOKENIZER_JSON}"
    remedy = "until then, tokens can be given, and texts cannot"
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return [f"{what}; build again with transformers installed, which converts it; {remedy}."]
    try:
        # from the copies: without code, and with the config.json of the artifact
        tokenizer = AutoTokenizer.from_pretrained(str(target), local_files_only=True, trust_remote_code=False)
        tokenizer.backend_tokenizer.save(str(target / TOKENIZER_JSON))
    except Exception as error:  # transformers raises anything
        reason = " ".join(str(error).split())[:300]
        if source.wanted:
            raise UserError(f"{source.folder}: {what}, and transformers cannot convert it: {reason}") from error
        return [f"{what}, and transformers cannot convert it: {reason}; {remedy}."]
    return []


def checked(origin: Path, target: Path, vocab_size: int) -> list[str]:
    """Open a copied tokenizer. Returns why it was not checked. Raises UserError for one that does not fit the model."""
    try:
        tokenizer = fast_tokenizer(target)
    except MissingExtraError as error:
        return [f"The tokenizer was copied and not checked: {error}."]
    except UserError as error:
        raise UserError(str(error).replace(str(target), str(origin))) from error
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer in {origin} has tokens up to {tokenizer.vocab_size - 1}; the model knows 0 to "
            f"{vocab_size - 1}: give the tokenizer of this model with --tokenizer DIR, or leave it out with "
            "--tokenizer none"
        )
    return []
