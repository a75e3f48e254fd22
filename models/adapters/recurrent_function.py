"""Linear attention with decay over a state, as a function of queries, keys, values and gates, for several packages."""

from __future__ import annotations

from torch import Tensor

from effexport.models.layers import CallsOperators, at_least_float32
from effexport.models.variants.recurrence import Tokens, recurrence


class RecurrentFunction(CallsOperators):
    """Outputs q_t S_t of states S_t = α_t S_{t−1} + β_t k_t (v_t − delta · α_t k_t S_{t−1})ᵀ, as one operator, or as
    products of matrices where there is a single token.

    variant: its name in reports.
    """

    def __init__(self, variant: str, delta: bool) -> None:
        super().__init__()
        self.variant, self.delta = variant, delta

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, past: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """query, key [batch, seq, heads, key_dim], value [batch, seq, heads, value_dim], decay (the logarithm of α) and
        beta [batch, seq, heads] → the outputs [batch, seq, heads, value_dim], and the state after the last token
        [batch, heads, key_dim, value_dim]. past: the state before the first; None for zeros. In float32 at least."""
        tokens = Tokens(*map(at_least_float32, (query, key, value, decay.unsqueeze(-1), beta.unsqueeze(-1))))
        if past is None:
            past = tokens.key.new_zeros(*key.shape[:1], *key.shape[2:], value.shape[3])
        before = at_least_float32(past)
        out, present = recurrence(tokens, before, scale, self.delta, as_operator=self.becomes_operators)
        return out.to(value.dtype), present
