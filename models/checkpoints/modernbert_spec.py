"""ModernBERT checkpoints: config.json of transformers 4.57 → spec. No torch here.

Sources: Warner et al., 2024, arXiv 2412.13663, and the configuration of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from effexport.models.attention_spec import AttentionSpec
from effexport.models.checkpoints.bert_spec import HIDDEN_ACTS
from effexport.models.checkpoints.spec import PublishedSpec
from effexport.models.shapes import Dims, Product, Shapes, linear, norm, within
from effexport.models.validation import check_layers, did_you_mean, require, shown


@dataclass(frozen=True, kw_only=True, repr=False)
class ModernBertAttentionSpec(AttentionSpec):
    """Softmax attention with rotary positions, over all tokens or those near a query.

    window: tokens on each side that a query sees beside itself (None: all). rope_theta: the base of the frequencies.
    """

    variant: ClassVar[str] = "modernbert"
    layer: ClassVar[str] = "checkpoints.modernbert.ModernBertAttention"

    window: int | None = None
    rope_theta: float = 10000.0

    def operators(self, fused: bool) -> tuple[str, ...]:
        if not fused:
            return ()
        return ("MaskedAttention",) if self.window is None else ("BandedAttention",)

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        n, d, groups = seq_len, self.head_size, batch * self.heads
        seen = n if self.window is None else min(n, 2 * self.window + 1)
        yield Product(groups, n, d, seen)  # Q Kᵀ
        yield Product(groups, n, seen, d)  # P V

    def weights(self) -> Shapes:
        shapes = linear("qkv", self.dim, 3 * self.inner_dim, bias=self.bias)
        return shapes | linear("out", self.inner_dim, self.dim, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class ModernBertSpec(PublishedSpec):
    """A ModernBERT with the head of one task. Defaults are those of transformers' ModernBertConfig.

    global_attn_every_n_layers: the first layer and every n-th after it see all tokens, the others those at a distance
    of up to local_attention // 2. local_rope_theta: None for that of the global layers.
    classifier_pooling: the vector that heads for whole sequences read.
    """

    family: ClassVar[str] = "modernbert"
    TASKS: ClassVar[Mapping[str, str]] = {
        "base": "ModernBertModel",
        "masked-lm": "ModernBertForMaskedLM",
        "sequence-classification": "ModernBertForSequenceClassification",
        "token-classification": "ModernBertForTokenClassification",
        "question-answering": "ModernBertForQuestionAnswering",
        "multiple-choice": "ModernBertForMultipleChoice",
    }
    OPTIONS: ClassVar[tuple[str, ...]] = ("task", "seq_len", "num_labels")
    RENAMED: ClassVar[Mapping[str, str]] = {"heads": "num_attention_heads", "layer_norm_eps": "norm_eps"}
    NOT_READ: ClassVar[tuple[str, ...]] = ("local_rope_theta", "pad_token_id")
    POSITIVE: ClassVar[tuple[str, ...]] = (
        "hidden_size",
        "num_hidden_layers",
        "heads",
        "intermediate_size",
        "max_position_embeddings",
        "global_attn_every_n_layers",
    )
    # global layers have logits of every pair of tokens
    DEFAULT_SEQ_LEN_LIMIT: ClassVar[int] = 1024

    vocab_size: int = 50368
    pad_token_id: int = 50283
    hidden_size: int = 768
    num_hidden_layers: int = 22
    heads: int = 12
    intermediate_size: int = 1152
    hidden_activation: str = "gelu"
    max_position_embeddings: int = 8192
    layer_norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    global_attn_every_n_layers: int = 3
    global_rope_theta: float = 160000.0
    local_attention: int = 128
    local_rope_theta: float | None = 10000.0
    decoder_bias: bool = True
    tie_word_embeddings: bool = True
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_bias: bool = False
    classifier_activation: str = "gelu"

    def check(self) -> None:
        check_layers("num_hidden_layers", self.num_hidden_layers)
        for name in ("hidden_activation", "classifier_activation"):
            given = getattr(self, name)
            require(
                given in HIDDEN_ACTS,
                f"{name} is {shown(given)}{did_you_mean(given, HIDDEN_ACTS)} Supported: {', '.join(HIDDEN_ACTS)}",
            )
        require(
            self.hidden_size % (2 * self.heads) == 0,
            f"hidden_size {self.hidden_size} cannot be split into {self.heads} heads of an even size, whose halves "
            "rotary positions rotate, so transformers cannot run this checkpoint either; correct hidden_size or "
            "num_attention_heads in config.json",
        )
        require(self.local_attention >= 0, f"local_attention is {self.local_attention}; expected 0 or more")
        for name in ("global_rope_theta", "local_rope_theta"):
            theta = getattr(self, name)
            require(theta is None or theta > 0, f"{name} is {theta}; expected a number > 0")
        require(
            self.task != "question-answering" or self.num_labels == 2,
            f"num_labels is {self.num_labels}; the task question-answering has 2: the start and the end",
        )

    @property
    def layer_specs(self) -> list[ModernBertAttentionSpec]:  # type: ignore[override]
        everywhere, near = self.attention_spec(is_global=True), self.attention_spec(is_global=False)
        every = self.global_attn_every_n_layers
        return [near if layer % every else everywhere for layer in range(self.num_hidden_layers)]

    def attention_spec(self, *, is_global: bool) -> ModernBertAttentionSpec:
        local_theta = self.global_rope_theta if self.local_rope_theta is None else self.local_rope_theta
        return ModernBertAttentionSpec(
            dim=self.hidden_size,
            heads=self.heads,
            seq_len=self.seq_len,
            bias=self.attention_bias,
            window=None if is_global else self.local_attention // 2,
            rope_theta=self.global_rope_theta if is_global else local_theta,
        )

    @property
    def output_width(self) -> int:
        return self.hidden_size

    @property
    def max_seq_len(self) -> int:
        return self.max_position_embeddings

    @property
    def inputs(self) -> dict[str, Dims]:
        dims = ("batch", "choices", "seq") if self.task == "multiple-choice" else ("batch", "seq")
        return {"input_ids": dims, "attention_mask": dims}

    @property
    def why_not_invariant(self) -> str:
        """Hidden tokens are seen by none, and positions count from the first token, so each sample stands alone."""
        return ""

    def weights(self) -> Shapes:
        width, inner = self.hidden_size, self.intermediate_size
        shapes: Shapes = {"token_embedding.weight": (self.vocab_size, width)}
        shapes |= norm("embedding_norm", width, bias=self.norm_bias)
        for layer, attention in enumerate(self.layer_specs):
            block = {
                **(norm("attention_norm", width, bias=self.norm_bias) if layer else {}),
                **within("attention", attention.weights()),
                **norm("feed_forward_norm", width, bias=self.norm_bias),
                **linear("feed_forward.up", width, 2 * inner, bias=self.mlp_bias),
                **linear("feed_forward.down", inner, width, bias=self.mlp_bias),
            }
            shapes |= within(f"blocks.{layer}", block)
        return shapes | norm("final_norm", width, bias=self.norm_bias) | self.head_weights()

    def head_weights(self) -> Shapes:
        """Those of the head; of a tied decoder, without its table."""
        if self.task == "base":
            return {}
        width = self.hidden_size
        shapes = linear("head.dense", width, width, bias=self.classifier_bias)
        shapes |= norm("head.norm", width, bias=self.norm_bias)
        if self.task != "masked-lm":
            return shapes | linear("head.out", width, self.head_outputs)
        shapes |= linear("head.out", width, self.vocab_size, bias=self.decoder_bias)
        if self.tie_word_embeddings:
            del shapes["head.out.weight"]
        return shapes

    @property
    def head_outputs(self) -> int:
        """Channels of the last layer of the head."""
        outputs = {"masked-lm": self.vocab_size, "question-answering": 2, "multiple-choice": 1}
        return outputs.get(self.task, self.num_labels)

    @classmethod
    def special_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Any padding token will do where there is none; without a base of their own, local layers have the other."""
        scaling = config.get("rope_scaling")
        require(
            not scaling,
            f"config.json: rope_scaling is {shown(scaling)}; expected none, as in every published ModernBERT: other "
            "frequencies are not supported",
        )
        token = config.get("pad_token_id", cls.pad_token_id)
        return {
            "local_rope_theta": config.get("local_rope_theta", cls.local_rope_theta),
            "pad_token_id": 0 if token is None else token,
        }

    def notes_on(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
        notes = [
            "Padding, its amount and the other samples of a batch do not change the result of a token that is kept."
        ]
        if "seq_len" not in options and self.seq_len < self.max_seq_len:
            notes.append(
                f"seq_len is {self.seq_len}, the default limit; sequences of up to {self.max_seq_len} tokens work: "
                "choose seq_len near the length in use."
            )
        return notes
