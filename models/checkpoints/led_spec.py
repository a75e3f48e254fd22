"""Published LED checkpoints, of which the encoder is exported: their config.json as a frozen spec.

No torch here. Names and semantics are those of transformers 4.57.1 (`LEDConfig`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from effexport.models.checkpoints.longformer_spec import SHARE_OF_LOCAL, BandedModelSpec, window_of
from effexport.models.contract import GLOBAL_MASK
from effexport.models.shapes import Dims
from effexport.models.validation import SpecError

OUTPUT = "encoder_last_hidden_state"


@dataclass(frozen=True, kw_only=True)
class LEDSpec(BandedModelSpec):
    """The encoder of LED, a Longformer without segments whose positions count all tokens; defaults are those of
    transformers' configuration."""

    family: ClassVar[str] = "led"
    TASKS: ClassVar[Mapping[str, str]] = {"encoder": "LEDModel"}
    OPTIONS: ClassVar[tuple[str, ...]] = ("task", "seq_len")
    RENAMED: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "heads": "encoder_attention_heads",
        "intermediate_size": "encoder_ffn_dim",
        "hidden_act": "activation_function",
        "max_position_embeddings": "max_encoder_position_embeddings",
    }
    NOT_READ: ClassVar[tuple[str, ...]] = ("attention_window", "sep_token_id", "type_vocab_size", "layer_norm_eps")
    POSITIVE: ClassVar[tuple[str, ...]] = BandedModelSpec.POSITIVE[:-1]  # without segments

    task: str = "encoder"
    vocab_size: int = 50265
    pad_token_id: int = 1
    hidden_size: int = 1024
    heads: int = 16
    intermediate_size: int = 4096
    max_position_embeddings: int = 16384
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-5

    @property
    def position_rows(self) -> int:
        return self.max_position_embeddings

    @property
    def max_seq_len(self) -> int:
        return self.max_position_embeddings

    @property
    def inputs(self) -> dict[str, Dims]:
        return dict.fromkeys(("input_ids", "attention_mask", GLOBAL_MASK), ("batch", "seq"))

    @property
    def outputs(self) -> dict[str, Dims]:
        return {OUTPUT: ("batch", "seq", self.hidden_size)}

    @property
    def drawn_shares(self) -> dict[str, dict[int, float]]:
        return {GLOBAL_MASK: {0: SHARE_OF_LOCAL}}

    @classmethod
    def task_from_config(cls, config: Mapping[str, Any]) -> str:
        raise SpecError(
            "config.json: model_type is led, an encoder and a decoder, and the decoder cannot be exported; export the "
            "encoder alone with --task encoder"
        )

    @classmethod
    def special_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"attention_window": window_of(config)}

    def notes_on(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
        return [
            f"This is the encoder of LED alone: {OUTPUT} of transformers' LEDModel, whose decoder takes it as "
            "encoder_outputs.",
            f"Tokens are global where {GLOBAL_MASK} is 1; without this input, none are.",
            *self.window_notes(options),
        ]
