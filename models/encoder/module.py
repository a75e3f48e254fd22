"""A byte-level encoder around any attention variant, models with a head, and causal models token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.contract import ModelContract, load
from effexport.models.encoder.spec import EncoderSpec, Head, Pooling
from effexport.models.layers import AttentionLayer, LayerNorm, SameWeights, State, at_least_float32, keep_from_mask
from effexport.models.validation import SpecError


class Encoder(nn.Module):
    """Embedding + learned positions → blocks → (final norm) → hidden states or logits.

    Vocabulary 258 by default: token 0 is padding, byte b is token b + 2.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        dim = spec.attention.dim
        self.spec = spec
        self.token_embedding = nn.Embedding(spec.vocab_size, dim)
        self.position_embedding = nn.Embedding(spec.max_seq_len, dim)
        self.blocks = nn.ModuleList(block_from_spec(spec, layer) for layer in range(spec.layers))
        normed = spec.block != "post-norm"
        self.final_norm = LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps) if normed else nn.Identity()
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size) if spec.lm_head else None

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """input_ids int64 [batch, seq]; attention_mask [batch, seq], 1 = keep.

        Returns `last_hidden_state` [batch, seq, hidden_size], or logits [batch, seq, vocab_size] with a head.
        Raises SpecError for a sequence longer than the learned positions.
        """
        return self.head(self.encode(input_ids, attention_mask))

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """As `forward`, always to `last_hidden_state`."""
        seq_len = input_ids.shape[1]
        if not torch.compiler.is_exporting() and seq_len > self.spec.max_seq_len:
            raise SpecError(f"the sequence has {seq_len} tokens; expected at most {self.spec.max_seq_len}")
        hidden = self.token_embedding(input_ids) + self.position_embedding.weight[:seq_len]
        streams = self.split(hidden)
        for block in self.blocks:
            streams = block(*streams, attention_mask)
        return self.joined(streams)

    def head(self, hidden: Tensor) -> Tensor:
        """Last hidden states [batch, seq, hidden_size] → logits, or as they are without a language-model head."""
        logits: Tensor | None = None if self.lm_head is None else self.lm_head(hidden)
        return hidden if logits is None else logits

    def step(self, input_ids: Tensor, position: Tensor, states: Sequence[State]) -> tuple[Tensor, list[State]]:
        """One token of a causal encoder whose attention keeps a state of constant size.

        input_ids int64 [batch, 1]; position int64 [batch], counted from 0; one state for each block. Returns what
        `forward` returns for this token, [batch, 1, …], and the next states.
        """
        return self.advance(input_ids, position.unsqueeze(1), states, lambda layer: layer.step)

    def prefill(
        self, input_ids: Tensor, attention_mask: Tensor, position: Tensor, states: Sequence[State]
    ) -> tuple[Tensor, list[State]]:
        """Many tokens at once, after those that the states hold: what `step` returns for each, and the next states.

        input_ids int64 [batch, seq]; attention_mask [batch, seq], where tokens with 0 leave the states as they are;
        position int64 [batch], that of the first token. A kept token has the position of its column, as in `forward`;
        padding may lie beyond the last position.
        """
        keep = attention_mask != 0
        columns = position.unsqueeze(1) + torch.arange(input_ids.shape[1], device=input_ids.device)
        columns = columns.clamp(max=self.spec.max_seq_len - 1)

        def prefill(layer: AttentionLayer) -> Advance:
            return lambda hidden, state: layer.prefill(hidden, keep, state)

        return self.advance(input_ids, columns, states, prefill)

    def advance(
        self, input_ids: Tensor, positions: Tensor, states: Sequence[State], how: Callable[[AttentionLayer], Advance]
    ) -> tuple[Tensor, list[State]]:
        """Tokens [batch, seq] at positions of the same shape through all blocks. how: the method of a layer that takes
        and returns a state."""
        hidden = self.token_embedding(input_ids) + self.position_embedding(positions)
        streams, next_states = self.split(hidden), []
        for block, state in zip(self.blocks, states, strict=True):
            attend = WithState(how(block.attention), state)  # type: ignore[arg-type]
            streams = block.mix(*streams, attend)  # type: ignore[operator]
            next_states.append(attend.next_state)
        return self.head(self.joined(streams)), next_states

    def split(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """The residual streams that enter the first block: one, or two alike if reversible."""
        return (hidden, hidden) if self.spec.block == "reversible" else (hidden,)

    def joined(self, streams: tuple[Tensor, ...]) -> Tensor:
        """Residual streams [batch, seq, dim] → last hidden states [batch, seq, hidden_size]."""
        if len(streams) == 1:
            hidden = streams[0]
        elif self.spec.reversible_output == "concat":
            hidden = torch.cat(streams, dim=-1)
        else:
            hidden = (streams[0] + streams[1]) / 2
        normed: Tensor = self.final_norm(hidden)
        return normed


class FeedForward(nn.Module):
    """W2 · act(W1 · x), optionally over slices of the sequence: less memory, the same result."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.chunk_length = spec.ff_chunk_length
        self.activation = spec.activation
        self.up = nn.Linear(spec.attention.dim, spec.ff_size)
        self.down = nn.Linear(spec.ff_size, spec.attention.dim)

    def forward(self, x: Tensor) -> Tensor:
        # slicing only bounds the memory of eager mode: a runtime plans its own buffers
        if self.chunk_length == 0 or torch.compiler.is_exporting():
            return self.transform(x)
        return torch.cat([self.transform(part) for part in x.split(self.chunk_length, dim=1)], dim=1)

    def transform(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.activation == "relu":
            x = F.relu(x)
        else:
            x = F.gelu(x, approximate="tanh" if self.activation == "gelu_new" else "none")
        down: Tensor = self.down(x)
        return down


class AttentionBlock(nn.Module):
    """The parts of a block: attention, the feed-forward layer, and a normalisation of each."""

    def __init__(self, spec: EncoderSpec, attention: AttentionLayer) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(spec.attention.dim, eps=spec.layer_norm_eps)
        self.attention = attention
        self.feed_forward_norm = LayerNorm(spec.attention.dim, eps=spec.layer_norm_eps)
        self.feed_forward = FeedForward(spec)


class ResidualBlock(AttentionBlock):
    """Pre-norm: h = x + A(LN x), y = h + F(LN h). Post-norm: h = LN(x + A x), y = LN(h + F h)."""

    def __init__(self, spec: EncoderSpec, attention: AttentionLayer) -> None:
        super().__init__(spec, attention)
        self.pre_norm = spec.block == "pre-norm"

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> tuple[Tensor]:
        return self.mix(x, lambda h: self.attention(h, attention_mask))

    def mix(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> tuple[Tensor]:
        if self.pre_norm:
            x = x + attend(self.attention_norm(x))
            return (x + self.feed_forward(self.feed_forward_norm(x)),)
        x = self.attention_norm(x + attend(x))
        return (self.feed_forward_norm(x + self.feed_forward(x)),)


class ReversibleBlock(AttentionBlock):
    """y1 = x1 + A(LN x2), y2 = x2 + F(LN y1) (Reformer, eq. 9): the inputs can be recomputed from the outputs."""

    def forward(self, x1: Tensor, x2: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.mix(x1, x2, lambda h: self.attention(h, attention_mask))

    def mix(self, x1: Tensor, x2: Tensor, attend: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        y1 = x1 + attend(self.attention_norm(x2))
        return y1, x2 + self.feed_forward(self.feed_forward_norm(y1))

    def inverse(self, y1: Tensor, y2: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The inputs of `forward` from its outputs, so that training need not store activations."""
        x2 = y2 - self.feed_forward(self.feed_forward_norm(y1))
        x1 = y1 - self.attention(self.attention_norm(x2), attention_mask)
        return x1, x2


# A layer's `step` or `prefill`: hidden states and a state → the layer's result and the next state.
Advance = Callable[[Tensor, State], tuple[Tensor, State]]


class WithState:
    """An attention that keeps a state, as a function of the hidden states alone; the next state stays in
    `next_state`."""

    def __init__(self, advance: Advance, state: State) -> None:
        self.advance = advance
        self.next_state = state

    def __call__(self, hidden: Tensor) -> Tensor:
        context, self.next_state = self.advance(hidden, self.next_state)
        return context


def block_from_spec(spec: EncoderSpec, layer: int) -> ResidualBlock | ReversibleBlock:
    """Block number `layer`; LSH layers get rotations of their own."""
    attention = load(spec.attention.layer)(spec.attention.of_layer(layer))
    return (ReversibleBlock if spec.block == "reversible" else ResidualBlock)(spec, attention)


QUIET_ROW, QUIET_ROW_STEP, QUIET_SCALE = 3, 4, 2.0**-4


def module_from_spec(spec: ModelContract, seed: int) -> AttentionLayer | Encoder:
    """The module of a spec in evaluation mode, with weights drawn from `seed`; the same on every call.

    The weights stand in for a trained model. They are drawn at a scale at which every term of the formula reaches the
    output: with the usual initialisation some terms (AFT's position biases, say) start at zero, and a graph that lost
    them would pass a parity check.
    """
    module: AttentionLayer | Encoder = load(spec.layer)(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(value * weight_scale(name, parameter) + weight_mean(name))
            if name.endswith("embedding.weight"):
                # rows that normalisations feel their epsilon at, as quiet tokens of trained models do
                parameter[QUIET_ROW::QUIET_ROW_STEP] *= QUIET_SCALE
    return module.eval()


def weight_scale(name: str, parameter: Tensor) -> float:
    """Standard deviation for a parameter of this name."""
    owner, leaf = ("." + name).rsplit(".", 2)[-2:]
    if leaf in ("position_query", "position_key"):
        return float(parameter.shape[1] ** -0.25)  # biases u·v of order one
    if leaf == "position_bias":
        return 1.0
    if "norm" in owner or leaf == "bias" or "embedding" in owner:
        return 0.2 if leaf == "bias" or "norm" in owner else 1.0
    fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
    gain = 2.0**0.5 if owner in ("query", "key", "query_key") else 1.0  # attention with logits of order two
    return float(gain * fan_in**-0.5)


def weight_mean(name: str) -> float:
    """Mean for a parameter of this name: one for the gains of normalisations; steps at which a state lasts for many
    tokens."""
    if name.endswith("dt_bias"):
        return -4.0
    return 1.0 if name.endswith("norm.weight") else 0.0


# The length below which a vector is not scaled to 1: a vector of zeros stays one.
SHORTEST = 1e-12


def with_head(module: nn.Module, head: Head, model: ModelContract) -> nn.Module:
    """A module that returns the outputs of a head, with the weights of a module of this model; without a head, the
    module itself."""
    if head.top_k is not None:
        return TopTokensModel(module, head.top_k)
    return PooledModel(module, head, model) if head.pool is not None else module


class PooledModel(SameWeights):
    """A model whose hidden states become one vector for each sample."""

    def __init__(self, model: nn.Module, head: Head, spec: ModelContract) -> None:
        super().__init__(model)
        self._mask = list(spec.inputs).index(spec.mask) if spec.mask else None
        self._mask_ignores = spec.mask_ignores
        self._head = head

    def forward(self, *inputs: Tensor) -> Tensor:
        """The inputs of the model → [batch, channels], in the precision of the hidden states."""
        result = self._model.forward(*inputs)
        hidden = result[0] if isinstance(result, tuple) else result
        keep = None if self._mask is None else (inputs[self._mask] != 0) != self._mask_ignores
        return embedding(hidden, keep, self._head)


class TopTokensModel(SameWeights):
    """A language model that predicts some tokens only, and returns the likeliest for each.

    The model has `encode`, from its inputs to hidden states, and `head`, from hidden states to logits.
    """

    def __init__(self, model: nn.Module, top_k: int) -> None:
        super().__init__(model)
        self._top_k = top_k

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the model, and positions int64 [batch, masks] → scores and tokens [batch, masks, top_k]."""
        return top_tokens(self.logits(*inputs), self._top_k)

    def logits(self, *inputs: Tensor) -> Tensor:
        """The arguments of `forward` → [batch, masks, vocabulary]."""
        *tokens, positions = inputs
        hidden: Tensor = self._model.encode(*tokens)
        # not rows of all samples in one table: a runtime refuses a place beyond the sequence, which would be of another
        # sample there
        rows = hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        logits: Tensor = self._model.head(rows)
        return logits


def top_tokens(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Logits [batch, masks, vocabulary] → the largest probabilities in falling order, in the precision of the logits,
    and their tokens, int64; both [batch, masks, top_k]."""
    scores, tokens = probabilities(logits).topk(top_k, dim=-1)
    return scores.to(logits.dtype), tokens


def probabilities(logits: Tensor) -> Tensor:
    """The softmax of logits, in float32, or in float64 if the logits are."""
    return torch.softmax(at_least_float32(logits), dim=-1)


def embedding(hidden: Tensor, keep: Tensor | None, head: Head) -> Tensor:
    """Hidden states [batch, seq, channels] → one vector for each sample, [batch, channels].

    keep: boolean [batch, seq], the tokens that count; None for all. A sample without any gets zeros as mean or maximum.
    Sums and lengths are computed in float32, or in float64 if the hidden states are.
    """
    assert head.pool is not None
    pooled = pool(at_least_float32(hidden), keep, head.pool)[:, : head.truncate_dim]
    if head.normalize:
        length = pooled.square().sum(dim=-1, keepdim=True).sqrt()
        pooled = pooled / length.clamp(min=SHORTEST)
    return pooled.to(hidden.dtype)


def pool(hidden: Tensor, keep: Tensor | None, kind: Pooling) -> Tensor:
    """Hidden states [batch, seq, channels] → [batch, channels]."""
    if kind == "cls":
        return hidden[:, 0]
    if keep is None:
        return hidden.mean(dim=1) if kind == "mean" else hidden.amax(dim=1)
    kept = keep.unsqueeze(-1)
    count = kept.to(hidden.dtype).sum(dim=1)
    if kind == "mean":
        return torch.where(kept, hidden, 0.0).sum(dim=1) / count.clamp(min=1)
    if kind == "max":
        lowest = torch.finfo(hidden.dtype).min
        return torch.where(count > 0, torch.where(kept, hidden, lowest).amax(dim=1), 0.0)
    assert_never(kind)


class ModelWithState(nn.Module):
    """A causal model as a function of tokens and an explicit state, for export and for streaming.

    The state is a flat sequence of tensors in the order of `state_names`; start from `initial_state`.
    """

    def __init__(self, model: AttentionLayer | Encoder) -> None:
        super().__init__()
        self.model = model
        layers = [block.attention for block in model.blocks] if isinstance(model, Encoder) else [model]
        self.layers: list[AttentionLayer] = layers  # type: ignore[assignment]

    @property
    def state_names(self) -> list[str]:
        """Names like `layer0_s`, one for each tensor of the state."""
        return [f"layer{i}_{name}" for i, layer in enumerate(self.layers) for name in layer.initial_state(1)]

    def initial_state(self, batch: int) -> list[Tensor]:
        """The state before the first token. Raises SpecError for a model without a state of constant size."""
        return [tensor for layer in self.layers for tensor in layer.initial_state(batch).values()]

    def nested(self, state: Sequence[Tensor]) -> list[State]:
        """The flat state as one dictionary for each layer."""
        remaining = iter(state)
        return [{name: next(remaining) for name in layer.initial_state(1)} for layer in self.layers]


class DecodeStep(ModelWithState):
    """One token at a time."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """An encoder takes input_ids int64 [batch, 1], position int64 [batch] from 0, and the state; a bare layer takes
        hidden_states [batch, 1, dim] and the state. Returns the output for this token, then the next state."""
        token, *rest = inputs
        if isinstance(self.model, Encoder):
            position, *state = rest
            output, states = self.model.step(token, position, self.nested(state))
        else:
            output, next_state = self.model.step(token, self.nested(rest)[0])
            states = [next_state]
        return (output, *flat(states))


class Prefill(ModelWithState):
    """A whole prompt at a time, of any length, after the tokens that the state holds."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """As `DecodeStep.forward`, for tokens [batch, seq, …]; attention_mask int64 [batch, seq], 1 = keep, follows
        them. Returns the output for these tokens, then the state after the last one that is kept."""
        tokens, mask, *rest = inputs
        if isinstance(self.model, Encoder):
            position, *state = rest
            output, states = self.model.prefill(tokens, mask, position, self.nested(state))
        else:
            output, next_state = self.model.prefill(tokens, keep_from_mask(tokens, mask), self.nested(rest)[0])
            states = [next_state]
        return (output, *flat(states))


def flat(states: Sequence[State]) -> list[Tensor]:
    """The inverse of `ModelWithState.nested`."""
    return [tensor for state in states for tensor in state.values()]
