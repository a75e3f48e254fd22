"""The contract of Nyström attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from effexport.models.variants.contract import VariantContract
from effexport.models.variants.nystrom import NystromSpec
from effexport.models.variants.nystrom.layer import NystromAttention


def naive_segments(keep: list[bool], num_landmarks: int) -> list[list[int]]:
    """Kept tokens of every landmark: segments of ceil(n / m) tokens, n one past the last kept token."""
    length = max((t + 1 for t, kept in enumerate(keep) if kept), default=0)
    size = math.ceil(length / num_landmarks)
    return [[t for t in range(i * size, (i + 1) * size) if t < len(keep) and keep[t]] for i in range(num_landmarks)]


@torch.no_grad()
def exact(layer: NystromAttention, x: Tensor, keep: Tensor) -> Tensor:
    """Formula of the class docstring in float64, a sample and a head at a time, over kept tokens only."""
    spec, size = layer.spec, layer.spec.head_size
    q, k, v = (p(x).double() for p in (layer.query, layer.key, layer.value))
    out = torch.zeros(*x.shape[:2], spec.inner_dim, dtype=torch.float64)
    for b in range(x.shape[0]):
        segments = [s for s in naive_segments(keep[b].tolist(), spec.num_landmarks) if s]
        kept = keep[b].nonzero().flatten()
        for h in range(spec.heads):
            lanes = slice(h * size, (h + 1) * size)
            qh, kh, vh = q[b, :, lanes] / size**0.25, k[b, :, lanes] / size**0.25, v[b, :, lanes]
            q_mean = torch.stack([qh[s].mean(dim=0) for s in segments])
            k_mean = torch.stack([kh[s].mean(dim=0) for s in segments])
            f = torch.softmax(qh @ k_mean.T, dim=-1)
            a = torch.softmax(q_mean @ k_mean.T, dim=-1)
            g = torch.softmax(q_mean @ kh[kept].T, dim=-1)
            out[b, :, lanes] = f @ (slow_pinv(a, spec.pinv_iterations) @ (g @ vh[kept]))
            if layer.conv is not None:
                taps = layer.conv.weight[h, 0, :, 0].double()
                around = pad(vh.masked_fill(~keep[b, :, None], 0), (0, 0, len(taps) // 2, len(taps) // 2))
                for tap, weight in enumerate(taps):
                    out[b, :, lanes] += weight * around[tap : tap + x.shape[1]]
    return out


def slow_pinv(a: Tensor, iterations: int) -> Tensor:
    identity = torch.eye(len(a), dtype=a.dtype)
    z = a.T / a.sum(dim=0).max()
    for _ in range(iterations):
        p = a @ z
        z = z @ (13 * identity - p @ (15 * identity - p @ (7 * identity - p))) / 4
    return z


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-4,
    reason="unit roundoff 6e-8 times the largest gain of six steps of the pseudo-inverse, (13/4)^6 = 1178",
    changed=NystromSpec(
        seq_len=512,
        num_landmarks=32,
        pinv_iterations=8,
        pinv_init="global",
        mask_landmarks=False,
        segment_means_seq_len=512,
        conv_kernel_size=None,
    ),
    small={"num_landmarks": 8, "conv_kernel_size": 5},
    forms={"no convolution": {"conv_kernel_size": None}, "wide heads": {"head_dim": 16}},
)
