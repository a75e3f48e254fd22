"""LED checkpoints as our modules (Beltagy et al., 2020, arXiv 2004.05150; transformers 4.57.1): the encoder, and the
whole with its decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from effexport.models.checkpoints.bert import Embeddings, NumberedEmbeddings, both, encoder_names
from effexport.models.checkpoints.led_spec import ENCODER, SEQ2SEQ, LEDSpec
from effexport.models.checkpoints.longformer import Longformer
from effexport.models.checkpoints.longformer_spec import GLOBAL_PROJECTIONS, BandedModelSpec
from effexport.models.checkpoints.seq2seq import Decoder, KeysAndValues
from effexport.models.validation import SpecError

# The table of words under other names, and heads of other classes.
OTHERS: tuple[str, ...] = (r"(led\.)?(encoder|decoder)\.embed_tokens\.weight", r"(classification_head|qa_outputs)\..*")
# Checkpoint names that mean nothing to the model of a task.
IGNORED: Mapping[str, tuple[str, ...]] = {
    SEQ2SEQ: OTHERS,
    ENCODER: (*OTHERS, r"(led\.)?decoder\..*", r"lm_head\..*", r"final_logits_bias"),
}
EMBEDDING_NAMES: dict[str, str] = {
    "embeddings.word.weight": "shared.weight",
    "embeddings.position.weight": "encoder.embed_positions.weight",
    "embeddings.norm.weight": "encoder.layernorm_embedding.weight",
    "embeddings.norm.bias": "encoder.layernorm_embedding.bias",
}
FEED_FORWARD_NAMES = {"up": "fc1", "down": "fc2", "feed_forward_norm": "final_layer_norm"}
# our module → theirs, in each block
BLOCK_NAMES: dict[str, str] = {
    **{
        f"attention.{name}": f"self_attn.longformer_self_attn.{name}"
        for name in ("query", "key", "value", *GLOBAL_PROJECTIONS)
    },
    "attention.out": "self_attn.output",
    "attention_norm": "self_attn_layer_norm",
    **FEED_FORWARD_NAMES,
}
PROJECTION_NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
DECODER_BLOCK_NAMES: dict[str, str] = {
    **{f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in PROJECTION_NAMES.items()},
    "attention_norm": "self_attn_layer_norm",
    **{f"cross_attention.{ours}": f"encoder_attn.{theirs}" for ours, theirs in PROJECTION_NAMES.items()},
    "cross_attention_norm": "encoder_attn_layer_norm",
    **FEED_FORWARD_NAMES,
}


class LEDEncoder(Longformer):
    """A Longformer without segments, whose positions count all tokens."""

    @staticmethod
    def embeddings_of(spec: BandedModelSpec) -> Embeddings:
        return NumberedEmbeddings(spec, 0)


class LED(nn.Module):
    """Encoder and decoder over one table of words, and logits of the decoder's tokens."""

    def __init__(self, spec: LEDSpec) -> None:
        super().__init__()
        self.spec = spec
        self.encoder = LEDEncoder(spec)
        self.decoder = Decoder(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.register_buffer("final_logits_bias", torch.zeros(1, spec.vocab_size))
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.encoder.embeddings.word.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, global_attention_mask: Tensor, decoder_input_ids: Tensor
    ) -> Tensor:
        """int64 [batch, seq] three times, as of `Longformer`, and [batch, target] → logits [batch, target, vocab_size].

        Raises SpecError for more tokens than there are positions.
        """
        target = decoder_input_ids.shape[1]
        if not torch.compiler.is_exporting() and target > self.spec.max_target_len:
            raise SpecError(f"the decoder has {target} tokens; expected at most {self.spec.max_target_len}")
        memory = self.memory(input_ids, attention_mask, global_attention_mask)
        tokens = self.encoder.embeddings.word(decoder_input_ids)
        return self.logits(self.decoder(tokens, memory, keys_to_keep(attention_mask)))

    def memory(self, *source: Tensor) -> list[KeysAndValues]:
        """The first three inputs of `forward` → keys and values for each block of the decoder."""
        return self.decoder.memory(self.encoder.encode(*source))

    def step(
        self, token: Tensor, mask: Tensor, memory: Sequence[KeysAndValues], cache: Sequence[KeysAndValues]
    ) -> tuple[Tensor, list[KeysAndValues]]:
        """One token of the decoder: int64 [batch, 1] → logits [batch, 1, vocab_size] and the next cache. mask: of the
        source, int64 [batch, seq]."""
        hidden, grown = self.decoder.step(self.encoder.embeddings.word(token), memory, keys_to_keep(mask), cache)
        return self.logits(hidden), grown

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden) + self.final_logits_bias
        return logits


def keys_to_keep(mask: Tensor) -> Tensor:
    """A mask of tokens, 1 = keep, for all heads and queries: boolean [batch, 1, 1, seq]."""
    return (mask != 0)[:, None, None, :]


def led_from_spec(spec: LEDSpec) -> nn.Module:
    return LEDEncoder(spec) if spec.task == ENCODER else LED(spec)


def weight_names(spec: LEDSpec) -> dict[str, tuple[str, ...]]:
    """Name in our state_dict → names that it may have in a checkpoint; the first one present is the one to take."""
    encoder = encoder_names(spec, EMBEDDING_NAMES, "encoder.layers", BLOCK_NAMES)
    if spec.task == ENCODER:
        return encoder
    theirs = {"position.weight": "embed_positions.weight", **both("norm", "layernorm_embedding")}
    for layer in range(spec.decoder_layers):
        for our_name, their_name in DECODER_BLOCK_NAMES.items():
            theirs |= both(f"blocks.{layer}.{our_name}", f"layers.{layer}.{their_name}")
    names = {f"encoder.{name}": accepted for name, accepted in encoder.items()}
    names |= {f"decoder.{ours}": (f"led.decoder.{name}", f"decoder.{name}") for ours, name in theirs.items()}
    # transformers overwrites a tied head with the table of words, whatever the file says
    words = names["encoder.embeddings.word.weight"] if spec.tie_word_embeddings else ()
    return names | {"lm_head.weight": (*words, "lm_head.weight"), "final_logits_bias": ("final_logits_bias",)}
