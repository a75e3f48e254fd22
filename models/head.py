"""Models with a head: a vector for each sample, or the likeliest tokens at some places."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor, nn

from effexport.models.contract import ModelContract
from effexport.models.head_spec import Head, Pooling
from effexport.models.layers import at_least_float32
from effexport.models.same_weights import SameWeights

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
