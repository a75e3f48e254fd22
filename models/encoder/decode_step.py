"""The constant-memory form of causal linear attention and causal AFT-simple: a function of tokens and a state."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from effexport.models.encoder.module import Encoder
from effexport.models.layers import AttentionLayer, State, keep_from_mask


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
