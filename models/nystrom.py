"""Nyströmformer attention (Xiong et al., 2021, arXiv 2102.03902, eq. 13 to 16)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from effexport.models.layers import (
    DepthwiseConv,
    MultiHeadAttention,
    masked_softmax,
    merge_heads,
    split_heads,
    take_rows,
)
from effexport.models.softmax import softmax_attention
from effexport.models.spec import NystromSpec, SpecError
from effexport.plugins.iterative_pinv.op import iterative_pinv


class NystromAttention(MultiHeadAttention):
    """out = F Z(A) (G V) + conv(V), with F = softmax(Q K̃ᵀ), A = softmax(Q̃ K̃ᵀ), G = softmax(Q̃ Kᵀ).

    Q̃ and K̃ are m landmarks: means over segments of Q / d^(1/4) and K / d^(1/4). Z is six steps of an iteration
    towards the pseudo-inverse (`effexport::iterative_pinv`). O(seq · m · dim) time and memory.

    By default a segment is ceil(n / m) tokens, where n is one past the last kept token of the sample, and padding
    takes no part in anything: the result of a sample depends neither on its batch mates nor on its padding.
    The published behaviour is `pinv_init="global"`, `mask_landmarks=False` and `segment_means_seq_len`.
    """

    spec: NystromSpec

    def __init__(self, spec: NystromSpec) -> None:
        super().__init__(spec)
        size = spec.conv_kernel_size
        self.conv = None if size is None else DepthwiseConv(spec.heads, size)

    def attend(self, hidden_states: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.project(hidden_states)
        divisor = math.sqrt(math.sqrt(q.shape[-1]))
        if self.spec.is_plain_softmax:
            context = softmax_attention(q, k, v, keep[:, None, None, :])
        else:
            context = self.landmark_attention(q / divisor, k / divisor, v, keep)
        if self.conv is not None:
            # published checkpoints let padding reach its neighbours through the filter
            masked = torch.where(keep[:, None, :, None], v, 0.0) if self.spec.mask_landmarks else v
            context = context + self.conv(masked)
        return merge_heads(context)

    def landmark_attention(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        """The approximation itself, on scaled q and k. All [batch, heads, seq, head_dim]."""
        if self.spec.mask_landmarks:
            rows, weights = landmark_rows(keep, self.spec.num_landmarks)
            q_landmarks, k_landmarks = landmark_means(q, rows, weights), landmark_means(k, rows, weights)
            present = weights.sum(dim=-1) > 0
        else:
            q_landmarks, k_landmarks = self.fixed_segment_means(q), self.fixed_segment_means(k)
            present = torch.ones_like(keep[:, : self.spec.num_landmarks])
        present_keys = present[:, None, None, :]
        landmark_keys = k_landmarks.transpose(-1, -2)
        kernel_f = masked_softmax(q @ landmark_keys.to(q.dtype), present_keys)
        # rows of absent landmarks are zeroed: the pseudo-inverse then acts on the present ones alone
        kernel_a = masked_softmax(q_landmarks @ landmark_keys, present_keys) * present[:, None, :, None]
        kernel_g = masked_softmax(q_landmarks.to(k.dtype) @ k.transpose(-1, -2), keep[:, None, None, :])
        inverse = self.pseudo_inverse(kernel_a)
        return (kernel_f @ inverse).to(v.dtype) @ (kernel_g.to(v.dtype) @ v)

    def pseudo_inverse(self, kernel_a: Tensor) -> Tensor:
        """Z(A) of every matrix. kernel_a: float32 [batch, heads, m, m]."""
        batch, heads, landmarks, _ = kernel_a.shape
        over = (0, 1, 2) if self.spec.pinv_init == "global" else (2,)
        scale = kernel_a.sum(dim=-2).amax(dim=over, keepdim=True).expand(batch, heads, 1)
        # a sample without any kept token has A = 0: keep 0 / 0 out of it
        scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
        matrices = kernel_a.reshape(batch * heads, landmarks, landmarks)
        inverse = iterative_pinv(matrices, scale.reshape(batch * heads, 1, 1), self.spec.pinv_iterations)
        return torch.reshape(inverse, (batch, heads, landmarks, landmarks))

    def fixed_segment_means(self, x: Tensor) -> Tensor:
        """Means over the segments that a published checkpoint was trained with, padding included, in float32."""
        expected = self.spec.segment_means_seq_len
        if expected is None or x.shape[2] != expected:
            raise SpecError(
                f"the sequence has {x.shape[2]} tokens; landmarks are tied to segment_means_seq_len {expected}; "
                f"pad to {expected} tokens with an attention mask"
            )
        landmarks = self.spec.num_landmarks
        return torch.unflatten(x.float(), 2, (landmarks, expected // landmarks)).mean(dim=3)


def landmark_rows(keep: Tensor, num_landmarks: int) -> tuple[Tensor, Tensor]:
    """Which tokens each landmark averages over.

    keep: boolean [batch, seq]. Returns (rows, weights), both [batch, landmarks, segment]: the token's row in the
    flattened [batch · seq] axis, and float32 weights that add up to one, or to zero for a landmark without tokens.
    """
    batch, seq_len = keep.shape
    device = keep.device
    position = torch.arange(seq_len, device=device)
    length = (keep * (position + 1)).amax(dim=1)
    segment = (length + num_landmarks - 1) // num_landmarks
    longest_segment = (seq_len + num_landmarks - 1) // num_landmarks
    offset = torch.arange(longest_segment, device=device)
    token = torch.arange(num_landmarks, device=device)[None, :, None] * segment[:, None, None] + offset
    rows = token.clamp(max=seq_len - 1) + seq_len * torch.arange(batch, device=device)[:, None, None]
    used = (offset < segment[:, None, None]) & (token < seq_len) & keep.flatten()[rows]
    weights = used.float()
    return rows, weights / weights.sum(dim=-1, keepdim=True).clamp(min=1.0)


def landmark_means(x: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """[batch, heads, seq, head_dim] → float32 [batch, heads, landmarks, head_dim]."""
    tokens = take_rows(merge_heads(x).flatten(0, 1), rows).float()
    # (batch, landmarks, 1, segment) @ (batch, landmarks, segment, dim)
    means = (weights.unsqueeze(2) @ tokens).squeeze(2)
    return split_heads(means, x.shape[1])
