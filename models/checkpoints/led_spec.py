"""Published LED checkpoints: their config.json as a frozen spec, and what users have to know about them.

No torch here. Names and semantics are those of transformers 4.57.1 (`LEDConfig`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from effexport.models.checkpoints.longformer_spec import BandedModelSpec, window_of
from effexport.models.contract import GLOBAL_MASK, PAST, DecoderSignature
from effexport.models.shapes import Dims, Shapes, linear, norm, within
from effexport.models.validation import require, shown

OUTPUT = "encoder_last_hidden_state"
ENCODER, SEQ2SEQ = "encoder", "seq2seq-lm"
TOKEN, TARGET = "decoder_input_ids", "target"
# Tokens of the decoder in the cases of the proof, of which some have twice as many.
TARGET_LEN = 24


@dataclass(frozen=True, kw_only=True)
class LEDSpec(BandedModelSpec):
    """LED: an encoder that is a Longformer without segments, whose positions count all tokens, and a decoder of softmax
    attention; defaults are those of transformers' configuration. The task encoder leaves the decoder out."""

    family: ClassVar[str] = "led"
    TASKS: ClassVar[Mapping[str, str]] = {ENCODER: "LEDModel", SEQ2SEQ: "LEDForConditionalGeneration"}
    OPTIONS: ClassVar[tuple[str, ...]] = ("task", "seq_len", "global_tokens")
    RENAMED: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "heads": "encoder_attention_heads",
        "intermediate_size": "encoder_ffn_dim",
        "hidden_act": "activation_function",
        "max_position_embeddings": "max_encoder_position_embeddings",
        "decoder_heads": "decoder_attention_heads",
        "decoder_intermediate_size": "decoder_ffn_dim",
        "max_target_len": "max_decoder_position_embeddings",
    }
    NOT_READ: ClassVar[tuple[str, ...]] = (
        *("attention_window", "sep_token_id", "type_vocab_size", "layer_norm_eps"),
        "global_tokens",
    )
    POSITIVE: ClassVar[tuple[str, ...]] = BandedModelSpec.POSITIVE[:-1]  # without segments

    task: str = ENCODER
    vocab_size: int = 50265
    pad_token_id: int = 1
    hidden_size: int = 1024
    heads: int = 16
    intermediate_size: int = 4096
    max_position_embeddings: int = 16384
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-5
    decoder_layers: int = 12
    decoder_heads: int = 16
    decoder_intermediate_size: int = 4096
    max_target_len: int = 1024
    tie_word_embeddings: bool = True

    def check(self) -> None:
        super().check()
        if self.task != SEQ2SEQ:
            return
        # with a single position, a decoder predicts one token from nothing
        for name, least in {"decoder_layers": 1, "decoder_intermediate_size": 1, "max_target_len": 2}.items():
            value = getattr(self, name)
            require(value >= least, f"{self.given_name(name)} is {value}; expected at least {least}")
        require(
            self.decoder_heads >= 1 and self.hidden_size % self.decoder_heads == 0,
            f"d_model {self.hidden_size} cannot be split into {self.decoder_heads} heads of equal size, so "
            "transformers cannot run this checkpoint either; correct d_model or decoder_attention_heads in config.json",
        )

    @property
    def position_rows(self) -> int:
        return self.max_position_embeddings

    @property
    def max_seq_len(self) -> int:
        return self.max_position_embeddings

    @property
    def inputs(self) -> dict[str, Dims]:
        source: dict[str, Dims] = dict.fromkeys(("input_ids", "attention_mask", GLOBAL_MASK), ("batch", "seq"))
        return source if self.task == ENCODER else {**source, TOKEN: ("batch", TARGET)}

    @property
    def outputs(self) -> dict[str, Dims]:
        if self.task == ENCODER:
            return {OUTPUT: ("batch", "seq", self.hidden_size)}
        return {"logits": ("batch", TARGET, self.vocab_size)}

    @property
    def decoder(self) -> DecoderSignature | None:
        if self.task == ENCODER:
            return None
        names = [f"layer{layer}_{part}" for layer in range(self.decoder_layers) for part in ("keys", "values")]
        ends: Dims = (self.hidden_size // self.decoder_heads,)
        cache: Dims = ("batch", self.decoder_heads, PAST, *ends)
        memory: Dims = ("batch", self.decoder_heads, "seq", *ends)
        return DecoderSignature(TOKEN, {f"memory_{name}": memory for name in names}, dict.fromkeys(names, cache))

    @property
    def axis_sizes(self) -> Mapping[str, int]:  # type: ignore[override]
        return {} if self.task == ENCODER else {TARGET: min(TARGET_LEN, self.max_target_len // 2)}

    @property
    def highest(self) -> Mapping[str, int]:  # type: ignore[override]
        return {} if self.task == ENCODER else {TARGET: self.max_target_len}

    @property
    def trace_sizes(self) -> Mapping[str, int]:
        return {**super().trace_sizes, TARGET: 5, PAST: 7}

    @property
    def input_limits(self) -> dict[str, int]:
        return super().input_limits | ({} if self.task == ENCODER else {TOKEN: self.vocab_size})

    @property
    def padded_with(self) -> dict[str, int]:
        return {name: value for name, value in super().padded_with.items() if name != TOKEN}

    @property
    def drawn_shares(self) -> dict[str, dict[int, float]]:
        return {GLOBAL_MASK: {0: self.share_of_local}}

    def weights(self) -> Shapes:
        if self.task == ENCODER:
            return super().weights()
        width, inner = self.hidden_size, self.decoder_intermediate_size
        projections = [linear(name, width, width) for name in ("query", "key", "value", "out")]
        attention = {name: shape for shapes in projections for name, shape in shapes.items()}
        block = {
            **within("attention", attention),
            **norm("attention_norm", width),
            **within("cross_attention", attention),
            **norm("cross_attention_norm", width),
            **linear("up", width, inner),
            **linear("down", inner, width),
            **norm("feed_forward_norm", width),
        }
        decoder = {"position.weight": (self.max_target_len, width), **norm("norm", width)}
        for layer in range(self.decoder_layers):
            decoder |= within(f"blocks.{layer}", block)
        head: Shapes = {"final_logits_bias": (1, self.vocab_size)}
        if not self.tie_word_embeddings:
            head |= linear("lm_head", width, self.vocab_size, bias=False)
        return within("encoder", super().weights()) | within("decoder", decoder) | head

    @classmethod
    def task_from_config(cls, config: Mapping[str, Any]) -> str:
        """The decoder of other classes, or of none, has no head that is known here."""
        given = config.get("architectures")
        require(
            isinstance(given, list) and given[:1] == [cls.TASKS[SEQ2SEQ]],
            f"config.json: architectures is {shown(given)}; encoder and decoder are exported of {cls.TASKS[SEQ2SEQ]} "
            f"only: correct it, or choose a task: {ENCODER}, the encoder alone, or {SEQ2SEQ}",
        )
        return SEQ2SEQ

    @classmethod
    def special_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"attention_window": window_of(config)}

    def notes_on(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
        alone = (
            f"This is the encoder of LED alone: {OUTPUT} of transformers' LEDModel, whose decoder takes it as "
            "encoder_outputs."
        )
        whole = (
            "model.onnx scores a given target; to generate one, encoder.onnx reads the source once, and "
            f"decode_step.onnx takes one token after the other, up to {self.max_target_len}."
        )
        return [
            alone if self.task == ENCODER else whole,
            f"Tokens are global where {GLOBAL_MASK} is 1; without this input, none are.",
            *self.window_notes(options),
        ]
