"""The encoder of LED checkpoints as our module (Beltagy et al., 2020, arXiv 2004.05150; transformers 4.57.1)."""

from __future__ import annotations

from effexport.models.checkpoints.bert import Embeddings, NumberedEmbeddings, encoder_names
from effexport.models.checkpoints.led_spec import LEDSpec
from effexport.models.checkpoints.longformer import Longformer
from effexport.models.checkpoints.longformer_spec import GLOBAL_PROJECTIONS, BandedModelSpec

# Checkpoint names that mean nothing to the encoder: the decoder, heads, and the table of words under another name.
IGNORED: tuple[str, ...] = (
    r"(led\.)?decoder\..*",
    r"(led\.)?encoder\.embed_tokens\.weight",
    r"(lm_head|classification_head|qa_outputs)\..*",
    r"final_logits_bias",
)
EMBEDDING_NAMES: dict[str, str] = {
    "embeddings.word.weight": "shared.weight",
    "embeddings.position.weight": "encoder.embed_positions.weight",
    "embeddings.norm.weight": "encoder.layernorm_embedding.weight",
    "embeddings.norm.bias": "encoder.layernorm_embedding.bias",
}
# our module → theirs, in each block
BLOCK_NAMES: dict[str, str] = {
    **{
        f"attention.{name}": f"self_attn.longformer_self_attn.{name}"
        for name in ("query", "key", "value", *GLOBAL_PROJECTIONS)
    },
    "attention.out": "self_attn.output",
    "attention_norm": "self_attn_layer_norm",
    "up": "fc1",
    "down": "fc2",
    "feed_forward_norm": "final_layer_norm",
}


class LEDEncoder(Longformer):
    """A Longformer without segments, whose positions count all tokens."""

    @staticmethod
    def embeddings_of(spec: BandedModelSpec) -> Embeddings:
        return NumberedEmbeddings(spec, 0)


def weight_names(spec: LEDSpec) -> dict[str, tuple[str, ...]]:
    """Name in our state_dict → names that it may have in a checkpoint; the first one present is the one to take."""
    return encoder_names(spec, EMBEDDING_NAMES, "encoder.layers", BLOCK_NAMES)
