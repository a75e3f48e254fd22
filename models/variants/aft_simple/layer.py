"""AFT-simple: an attention-free transformer without position biases (Zhai et al., 2021, arXiv 2105.14103,
eq. 5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from effexport.models.layers import State, merge_heads
from effexport.models.variants.aft.layer import AFTLayer, gated_sums
from effexport.models.variants.aft_simple import AFTSimpleSpec
from effexport.models.variants.contract import VariantContract
from effexport.models.variants.sums import ABSENT, ExpSums, average, merge, prefix_sums, sums_of_tokens, total
from effexport.plugins.aft_simple_attention.op import aft_simple_attention


class AFTSimpleAttention(AFTLayer):
    """out_t = σ(q_t) ⊙ Σ_t' softmax_t'(k) ⊙ v_t': one context for all t, or causal, summed over t' ≤ t.

    O(seq · dim) time and memory. The fused operator does all but the causal form in two passes. The causal form also
    runs token by token, with a state of constant size.
    """

    spec: AFTSimpleSpec

    def __init__(self, spec: AFTSimpleSpec) -> None:
        super().__init__(spec, spec.inner_dim, heads=1, key_dim=spec.inner_dim)

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        if self.fused and not self.spec.causal:
            query, key, value = projected
            fused: Tensor = aft_simple_attention(query, key, value, keep)
            return fused
        return super().mix(projected, keep)

    def sums(self, keys: ExpSums) -> ExpSums:
        return simple_sums(keys, self.spec.causal)

    def initial_state(self, batch: int) -> State:
        """The state before the first token, zeros: the triple m, n, d of its sums, each float32 [batch, dim]."""
        zeros = torch.zeros(batch, self.spec.inner_dim, device=self.out.weight.device)
        return {name: zeros.clone() for name in ExpSums._fields}

    def step(self, hidden_states: Tensor, state: State) -> tuple[Tensor, State]:
        """One token of the causal form: [batch, 1, dim] → [batch, 1, dim] and the next state."""
        token = hidden_states.squeeze(1)
        key, value = self.key(token).float(), self.value(token).float()
        sums = merge(sums_of_state(state), ExpSums(key, value, torch.ones_like(key)))
        context = torch.sigmoid(self.query(token)) * average(sums).to(token.dtype)
        return self.out(context).unsqueeze(1), sums._asdict()

    def prefill(self, hidden_states: Tensor, keep: Tensor, state: State) -> tuple[Tensor, State]:
        query, key, value = self.project(hidden_states)
        earlier = sums_of_state(state).each(lambda x: x[:, None, None])
        sums = merge(prefix_sums(sums_of_tokens(key, value, keep)), earlier)
        context = torch.sigmoid(query) * average(sums).to(query.dtype)
        # the one head, and the row of the last token: absent keys have added nothing to it
        return self.out(merge_heads(context)), sums.each(lambda x: x[:, 0, -1])._asdict()


def sums_of_state(state: State) -> ExpSums:
    """The sums over all tokens so far, [batch, dim]. Before the first token d is 0, and m must not stand above any
    key."""
    return ExpSums(torch.where(state["d"] > 0, state["m"], ABSENT), state["n"], state["d"])


def simple_sums(keys: ExpSums, causal: bool) -> ExpSums:
    """Σ e^key over all tokens (seq becomes 1) or, if causal, over the tokens up to each one."""
    return prefix_sums(keys) if causal else total(keys).each(lambda x: x.unsqueeze(-2))


def bias_simple(layer: AFTSimpleAttention, seq_len: int) -> Tensor:
    """No position bias: [1, seq, seq] zeros."""
    return torch.zeros(1, seq_len, seq_len, dtype=torch.float64)


def exact(layer: AFTSimpleAttention, x: Tensor, keep: Tensor) -> Tensor:
    return gated_sums(layer, x, keep, bias_simple(layer, x.shape[1]))


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    reason="float32 rounding of sums of at most 100 terms with outputs near 1",
    changed=AFTSimpleSpec(dim=30, heads=4, causal=True),
    small={},
    forms={"wide heads": {"head_dim": 16}},
)
