"""An artifact as a module of sentence-transformers. Loads torch and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from effexport.errors import UserError
from effexport.hf.drop_in import DropIn
from effexport.runners.runner import tensors_text

# field of the drop-in's outputs → the feature that sentence-transformers takes it for
FEATURES = {"pooler_output": "sentence_embedding", "last_hidden_state": "token_embeddings"}


class Sentences(torch.nn.Module):
    """The first module of a SentenceTransformer: texts → tokens → the embeddings that an artifact computes."""

    def __init__(self, model: DropIn, tokenizer: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.max_seq_length = model.artifact.spec.model.max_seq_len

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **options: Any) -> dict[str, torch.Tensor]:
        """Tokens of texts, or of pairs of texts, padded to the longest and cut at `max_seq_length` tokens."""
        texts = [prompt + text for text in inputs] if prompt else list(inputs)
        limit = self.max_seq_length
        return dict(
            self.tokenizer(texts, padding=True, truncation=limit is not None, max_length=limit, return_tensors="pt")
        )

    # what sentence-transformers before 5.4 calls it
    tokenize = preprocess

    def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Add the embeddings to the features, which hold the inputs of the artifact."""
        names = [tensor.name for tensor in self.model.runner.inputs]
        outputs = self.model(**{name: features[name] for name in names if name in features})
        return {**features, **{FEATURES[field]: value for field, value in outputs.items()}}

    def get_embedding_dimension(self) -> int:
        """Width of an embedding."""
        width = self.model.artifact.spec.outputs[0].dims[-1]
        assert isinstance(width, int)
        return width

    get_word_embedding_dimension = get_embedding_dimension
    get_sentence_embedding_dimension = get_embedding_dimension

    def save(self, path: str, *args: Any, **options: Any) -> None:
        """Raises UserError: the artifact is the saved model."""
        self.model.save_pretrained(path)


def sentences_from_model(model: DropIn) -> Sentences:
    """Raises UserError for an artifact that returns something else than embeddings, or has no tokenizer."""
    path = model.artifact.path
    if not set(model.output_class.fields) <= FEATURES.keys():
        found = tensors_text(model.runner.outputs)
        raise UserError(f"{path} returns {found}; expected embeddings: build it with --pool mean, or the task base")
    return Sentences(model, tokenizer_of(path))


def tokenizer_of(path: Path) -> Any:
    """The tokenizer in an artifact. Raises UserError if there is none."""
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} has no tokenizer that transformers can read; build it with --tokenizer DIR") from error
