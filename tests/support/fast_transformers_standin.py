"""Stand-ins for the layers of pytorch-fast-transformers 0.4, which has to be compiled: from its formulas, as slow and
obvious as possible, under the qualified names and with the attributes of the originals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def named(module: str) -> Callable[[type], type]:
    """Give a class, and its forward, the module of the original."""

    def rename(kind: type) -> type:
        kind.__module__ = f"fast_transformers.{module}"
        if "forward" in vars(kind):
            kind.forward.__module__ = kind.__module__  # type: ignore[attr-defined]
        return kind

    return rename


class FullMask:
    """A mask that is given, or that hides nothing of so many rows and columns."""

    def __init__(self, mask: Tensor | int, columns: int | None = None) -> None:
        if isinstance(mask, int):
            mask = torch.ones(mask, columns or mask, dtype=torch.bool)
            self._all_ones = True
        self.bool_matrix = mask

    @property
    def all_ones(self) -> bool:
        return bool(self.bool_matrix.all())

    @property
    def lower_triangular(self) -> bool:
        square = self.bool_matrix.shape[0] == self.bool_matrix.shape[1]
        return square and torch.equal(self.bool_matrix, torch.ones_like(self.bool_matrix).tril())


class LengthMask(FullMask):
    """Row i shows its first lengths[i] columns."""

    def __init__(self, lengths: Tensor, max_len: int) -> None:
        super().__init__(torch.arange(max_len).view(1, -1) < lengths.view(-1, 1))


class TriangularCausalMask(FullMask):
    """Row i shows its first i columns."""

    lower_triangular = True

    def __init__(self, size: int) -> None:
        super().__init__(torch.arange(size).view(1, -1) <= torch.arange(size).view(-1, 1))


@named("feature_maps.base")
class ActivationFunctionFeatureMap(nn.Module):
    def __init__(self, query_dims: int, activation_function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.query_dims, self.activation_function = query_dims, activation_function

    @classmethod
    def factory(cls, activation_function: Callable[[Tensor], Tensor]) -> Callable[[int], nn.Module]:
        return lambda query_dims: cls(query_dims, activation_function)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation_function(x)


@named("feature_maps.fourier_features")
class RandomFourierFeatures(nn.Module):
    """Cosines and sines of random projections; drawn anew in each call unless `deterministic_eval`."""

    omega: Tensor

    def __init__(self, query_dimensions: int, deterministic_eval: bool = False) -> None:
        super().__init__()
        self.query_dims, self.deterministic_eval = query_dimensions, deterministic_eval
        self.register_buffer("omega", torch.randn(query_dimensions, query_dimensions // 2))

    @classmethod
    def factory(cls, **options: Any) -> Callable[[int], nn.Module]:
        return lambda query_dims: cls(query_dims, **options)

    def forward(self, x: Tensor) -> Tensor:
        if not self.deterministic_eval:
            self.omega = torch.randn_like(self.omega)
        angles = x / self.query_dims**0.25 @ self.omega
        return torch.cat([angles.cos(), angles.sin()], dim=-1) / math.sqrt(self.omega.shape[1])


@named("attention.linear_attention")
class LinearAttention(nn.Module):
    """Rows of φ(q_i)·φ(k_j), divided by their sum plus eps."""

    def __init__(self, query_dimensions: int, feature_map: Any = None, eps: float = 1e-6) -> None:
        super().__init__()
        feature_map = feature_map or ActivationFunctionFeatureMap.factory(lambda x: F.elu(x) + 1)
        self.feature_map, self.eps = feature_map(query_dimensions), eps

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Any, query_lengths: Any, key_lengths: Any
    ) -> Tensor:
        if not attn_mask.all_ones:
            raise RuntimeError("no other masks")
        return weighted(self, queries, keys, values, key_lengths.bool_matrix[:, None, None, :])


@named("attention.causal_linear_attention")
class CausalLinearAttention(LinearAttention):
    """The same over j ≤ i."""

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Any, query_lengths: Any, key_lengths: Any
    ) -> Tensor:
        if not attn_mask.lower_triangular:
            raise RuntimeError("no other masks")
        visible = key_lengths.bool_matrix[:, None, None, :] & attn_mask.bool_matrix
        return weighted(self, queries, keys, values, visible)


def weighted(layer: LinearAttention, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    q, k = layer.feature_map(queries), layer.feature_map(keys)
    weights = torch.einsum("nlhd,nshd->nhls", q, k) * visible
    weights = weights / (weights.sum(dim=-1, keepdim=True) + layer.eps)
    return torch.einsum("nhls,nshm->nlhm", weights, values)


@named("attention.full_attention")
class FullAttention(nn.Module):
    """softmax(q kᵀ · softmax_temp) v."""

    def __init__(self, softmax_temp: float | None = None) -> None:
        super().__init__()
        self.softmax_temp = softmax_temp

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Any, query_lengths: Any, key_lengths: Any
    ) -> Tensor:
        temperature = self.softmax_temp or 1 / math.sqrt(queries.shape[-1])
        logits = torch.einsum("nlhd,nshd->nhls", queries, keys) * temperature
        visible = key_lengths.bool_matrix[:, None, None, :] & attn_mask.bool_matrix
        weights = logits.masked_fill(~visible, -math.inf).softmax(dim=-1)
        return torch.einsum("nhls,nshm->nlhm", weights, values)


@named("attention.attention_layer")
class AttentionLayer(nn.Module):
    def __init__(
        self,
        attention: nn.Module,
        d_model: int,
        n_heads: int,
        d_keys: int | None = None,
        d_values: int | None = None,
    ) -> None:
        super().__init__()
        keys, values = d_keys or d_model // n_heads, d_values or d_model // n_heads
        self.inner_attention, self.n_heads = attention, n_heads
        self.query_projection = nn.Linear(d_model, keys * n_heads)
        self.key_projection = nn.Linear(d_model, keys * n_heads)
        self.value_projection = nn.Linear(d_model, values * n_heads)
        self.out_projection = nn.Linear(values * n_heads, d_model)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Any, query_lengths: Any, key_lengths: Any
    ) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (self.n_heads, -1))
            for projection, x in (
                (self.query_projection, queries),
                (self.key_projection, keys),
                (self.value_projection, values),
            )
        )
        mixed = self.inner_attention(q, k, v, attn_mask, query_lengths, key_lengths)
        out: Tensor = self.out_projection(mixed.flatten(-2))
        return out


@named("transformers")
class TransformerEncoderLayer(nn.Module):
    def __init__(self, attention: nn.Module, d_model: int, d_ff: int, activation: str = "relu") -> None:
        super().__init__()
        self.attention = attention
        self.linear1, self.linear2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.activation = getattr(F, activation)

    def forward(self, x: Tensor, attn_mask: Any = None, length_mask: Any = None) -> Tensor:
        batch, seq_len, _ = x.shape
        mask, lengths = attn_mask or FullMask(seq_len), length_mask or FullMask(batch, seq_len)
        y = self.norm1(x + self.attention(x, x, x, attn_mask=mask, query_lengths=lengths, key_lengths=lengths))
        out: Tensor = self.norm2(y + self.linear2(self.activation(self.linear1(y))))
        return out


@named("transformers")
class TransformerEncoder(nn.Module):
    def __init__(self, layers: list[nn.Module], norm_layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), norm_layer

    def forward(self, x: Tensor, attn_mask: Any = None, length_mask: Any = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, attn_mask=attn_mask, length_mask=length_mask)
        return x if self.norm is None else self.norm(x)
