"""labml-nn: its AFT-local, with a full position bias, axes [seq, batch, dim] and a mask of any pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapter, NotReplaceableError, linear_weights
from effexport.models.layers import merge_heads, split_heads
from effexport.models.variants.aft_full import AFTFullSpec
from effexport.models.variants.aft_full.layer import AFTFullAttention
from effexport.models.variants.sums import ABSENT, average, sums_of_tokens, weighted_sums

NAMES = {"query": "query", "key": "key", "value": "value", "output": "out"}


class AFTLocal(nn.Module):
    """labml's AFTLocal, on our AFT-full with biases of 0 outside the window.

    Its mask may hide any pair of tokens, and its content is only known when a model runs, so the sums are those of the
    formula, O(seq² · dim), as in the original. They are exact while, for a query, the largest visible k + w is within
    80 of max k + max w over all keys that some query sees; the original loses them, too.
    """

    def __init__(self, attention: AFTFullAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """query, key, value [seq, batch, dim]; boolean mask [queries or 1, keys, batch or 1], True = may attend.

        A query that sees no key gets a context of 0, for which the original has NaN; without a mask, which the
        original fails on, every query sees every key. Returns [seq, batch, dim].
        """
        layer = self.attention
        seq_len = query.shape[0]
        layer.check_length(seq_len)
        projections = (layer.query, layer.key, layer.value)
        q, k, v = (
            split_heads(linear(x.transpose(0, 1)), 1)
            for linear, x in zip(projections, (query, key, value), strict=True)
        )
        if mask is None:
            mask = torch.ones(1, seq_len, 1, dtype=torch.bool, device=query.device)
        visible = mask.permute(2, 0, 1)  # [batch or 1, queries or 1, keys]
        bias = torch.where(visible, layer.biases(seq_len), ABSENT).unsqueeze(1)
        context = average(weighted_sums(sums_of_tokens(k, v, visible.any(dim=1)), bias))
        out: Tensor = layer.out(merge_heads(torch.sigmoid(q) * context.to(q.dtype)))
        return out.transpose(0, 1)


def aft_local(layer: Any, seq_len: int) -> AFTLocal:
    if type(layer.activation) is not nn.Sigmoid:
        raise NotReplaceableError(f"its activation is {type(layer.activation).__name__}, not Sigmoid")
    positions = len(layer.pos_bias)
    if positions == 1:
        # the one bias would be taken for those of all positions, where the original fails
        raise NotReplaceableError("it has learned a bias for a single position")
    weights = linear_weights(layer, NAMES)
    weights["position_bias"] = (layer.pos_bias * layer.local_mask).detach()
    spec = AFTFullSpec(dim=layer.query.in_features, heads=1, seq_len=positions, position_bias="full")
    attention = AFTFullAttention(spec)
    # assigned, so that they keep their element type and device
    attention.load_state_dict(weights, assign=True)
    return AFTLocal(attention)


ADAPTER = Adapter(
    package="labml-nn",
    tested=("0.5.1",),
    replacements={"labml_nn.transformers.aft.AFTLocal": aft_local},
    projections=tuple(NAMES),
)
