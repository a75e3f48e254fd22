"""Tiny checkpoints with a tokenizer, and their artifacts, built once for several tests and runs: see kept.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kept import digest_of, kept
from random_tokenizers import saved_tokenizer
from small_builds import what_decides_a_build
from transformers_models import BERT_SIZES, TINY_OF_TEXTS, TINY_REFORMER, saved

# Plain softmax attention, so that transformers computes the same at every length.
NYSTROMFORMER: dict[str, Any] = TINY_OF_TEXTS | {
    "hidden_size": 32,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "conv_kernel_size": 3,
}
REFORMER: dict[str, Any] = TINY_REFORMER | {
    "vocab_size": 210,
    "hidden_size": 16,
    "feed_forward_size": 16,
    "attn_layers": ["local", "lsh"],
    "num_buckets": 4,
    "num_hashes": 1,
    "axial_pos_shape": [4, 8],
    "axial_pos_embds_dim": [8, 8],
    "max_position_embeddings": 32,
    "is_decoder": True,
}
LONGFORMER: dict[str, Any] = BERT_SIZES | {
    "vocab_size": 420,
    "num_hidden_layers": 2,
    "max_position_embeddings": 42,
    "attention_window": 8,
    "type_vocab_size": 1,
}
BIG_BIRD: dict[str, Any] = BERT_SIZES | {
    "vocab_size": 420,
    "max_position_embeddings": 40,
    "block_size": 4,
    "num_random_blocks": 2,
    "pad_token_id": 1,
    "sep_token_id": 2,
}
MODERNBERT: dict[str, Any] = BERT_SIZES | {
    "vocab_size": 210,
    "num_hidden_layers": 2,
    "max_position_embeddings": 40,
    "local_attention": 8,
    "pad_token_id": 0,
}
# As transformers' own tester of these models, with the words of the tokenizers.
LED: dict[str, Any] = {
    "vocab_size": 420,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "max_encoder_position_embeddings": 52,
    "max_decoder_position_embeddings": 50,
    "attention_window": 4,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
FAMILIES = {"BigBird": BIG_BIRD, "LED": LED, "Longformer": LONGFORMER, "ModernBert": MODERNBERT, "Reformer": REFORMER}
LABELS = {"num_labels": 3, "id2label": {0: "ENTAILMENT", 1: "NEUTRAL", 2: "CONTRADICTION"}}
FIELDS: dict[str, dict[str, Any]] = {
    "NystromformerForSequenceClassification": LABELS
    | {"label2id": {"entailment": 0, "neutral": 1, "contradiction": 2}},
    "NystromformerForTokenClassification": LABELS,
    "LongformerForSequenceClassification": LABELS,
    "ModernBertForSequenceClassification": LABELS,
}


@dataclass(frozen=True)
class CheckpointArtifact:
    """Two folders. Copy them before changing them."""

    checkpoint: Path
    artifact: Path


def checkpoint_artifact(kind: str, tokenizer: str = "bert", **options: Any) -> CheckpointArtifact:
    """kind: a class of transformers. tokenizer: a name in random_tokenizers.py. options: of `effexport.build`."""
    import effexport

    of_family = (config for family, config in FAMILIES.items() if kind.startswith(family))
    config = next(of_family, NYSTROMFORMER) | FIELDS.get(kind, {})

    def make(folder: Path) -> None:
        saved(folder / "checkpoint", kind, config)
        saved_tokenizer(tokenizer, folder / "checkpoint")
        effexport.build(checkpoint=folder / "checkpoint", output=folder / "built", **options)

    decided_by = [repr(config), tokenizer, repr(options), Path(__file__), *what_decides_a_build()]
    folder = kept(f"checkpoints/{kind}-{digest_of([tokenizer, repr(options)])}", decided_by, make)
    return CheckpointArtifact(folder / "checkpoint", folder / "built")
