"""Artifacts in the place of PyTorch models: in transformers' pipelines and in sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effexport.hf.drop_in import DropIn, Sentences
    from effexport.runners.options import RunOptions

__all__ = ["SentenceModule", "model"]


def model(path: str | Path, settings: RunOptions | None = None, *, runtime: str | None = None) -> DropIn:
    """Open an artifact as the model class of its task in transformers, for inference.

        tokenizer = AutoTokenizer.from_pretrained("artifacts/mlm")
        fill = pipeline("fill-mask", model=effexport.hf.model("artifacts/mlm"), tokenizer=tokenizer)

    Its class has the name that transformers gives to the class of the checkpoint, and its outputs have the class that
    this one returns. Tensors are on the CPU, whatever runs the model.
    That of an encoder-decoder, such as LED, has `generate`, which reads the source once and decodes token by token.
    settings, runtime: as for `effexport.load`.
    Raises UserError as `effexport.load` does, and for an artifact whose outputs no model of transformers has;
    MissingExtraError without transformers or PyTorch.
    """
    require_transformers()
    from effexport.api import load, load_encoder_decoder
    from effexport.artifact import Artifact, read_manifest
    from effexport.base.option_fields import path_of
    from effexport.hf.drop_in import drop_in_from_runner

    runner = load(path, settings, runtime=runtime)  # type: ignore[call-overload]
    folder = path_of("path", path)
    artifact = Artifact(folder, read_manifest(folder))
    return drop_in_from_runner(artifact, runner, lambda: load_encoder_decoder(path, settings, runtime=runtime))


def SentenceModule(path: str | Path, settings: RunOptions | None = None, *, runtime: str | None = None) -> Sentences:
    """Open an artifact as the first module of a SentenceTransformer, with the tokenizer in the artifact.

        embedder = SentenceTransformer(modules=[effexport.hf.SentenceModule("artifacts/embedder")])
        vectors = embedder.encode(["first text", "second text"])  # [2, dim]

    A pooled artifact needs no other module. One with `last_hidden_state` gives token embeddings for the Pooling module
    of sentence-transformers, which follows it in the list.
    settings, runtime, errors: as for `model`; also raises UserError for an artifact without a tokenizer, and for one
    that returns something else.
    """
    drop_in = model(path, settings, runtime=runtime)
    from effexport.hf.drop_in import sentences_from_model

    return sentences_from_model(drop_in)


def require_transformers() -> None:
    """Raise MissingExtraError unless transformers and PyTorch are installed."""
    import importlib.util

    from effexport.base.errors import MissingExtraError

    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "hf")
