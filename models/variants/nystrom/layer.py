"""Nyströmformer attention (Xiong et al., 2021, arXiv 2102.03902, eq. 13 to 16)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.layers import DepthwiseConv, MultiHeadAttention, at_least_float32, masked_softmax
from effexport.models.validation import SpecError
from effexport.models.variants.contract import VariantContract
from effexport.models.variants.nystrom import NystromSpec
from effexport.models.variants.softmax.layer import softmax_attention
from effexport.plugins.iterative_pinv.op import iterative_pinv
from effexport.plugins.iterative_pinv.op import reference as plain_iterative_pinv
from effexport.plugins.masked_attention.op import masked_attention
from effexport.plugins.segment_means.op import segment_means
from effexport.plugins.sequence_conv.op import sequence_conv


class NystromAttention(MultiHeadAttention):
    """out = F Z(A) (G V) + conv(V), with F = softmax(Q K̃ᵀ), A = softmax(Q̃ K̃ᵀ), G = softmax(Q̃ Kᵀ).

    Q̃ and K̃ are m landmarks: means over segments of Q / d^(1/4) and K / d^(1/4). Z is six steps of an iteration
    towards the pseudo-inverse (`effexport::iterative_pinv`). O(seq · m · dim) time and memory.

    By default a segment is ceil(n / m) tokens, where n is one past the last kept token of the sample, and padding
    is left out everywhere: the result of a sample depends neither on the rest of its batch nor on its padding.
    The published behaviour is `pinv_init="global"`, `mask_landmarks=False` and `segment_means_seq_len`; that of other
    packages is a `convention`.
    """

    IN_FLOAT: ClassVar[Mapping[str, str]] = {"": "landmarks enter a pseudo-inverse, which amplifies rounding"}
    spec: NystromSpec

    def __init__(self, spec: NystromSpec) -> None:
        super().__init__(spec)
        size = spec.conv_kernel_size
        self.conv = None if size is None else DepthwiseConv(spec.heads, size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """As `AttentionLayer.forward`. Left padding is added here, because without a mask it is attended."""
        if not self.spec.pads_left:
            return super().forward(hidden_states, attention_mask)
        pad = -hidden_states.shape[1] % self.spec.num_landmarks
        mask = None if attention_mask is None else F.pad(attention_mask != 0, (pad, 0))
        return super().forward(F.pad(hidden_states, (0, 0, pad, 0)), mask)[:, pad:]

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        q, k, v = projected
        if self.spec.has_balanced_segments:
            q, k = (torch.where(keep[:, None, :, None], x, 0.0) for x in (q, k))
        if self.fused:
            return self.fused_mix(q, k, v, keep)
        divisor = math.sqrt(math.sqrt(q.shape[-1]))
        if self.spec.is_plain_softmax:
            context = softmax_attention(q, k, v, keep[:, None, None, :])
        else:
            context = self.landmark_attention(q / divisor, k / divisor, v, keep)
        if self.conv is not None:
            # published checkpoints let padding reach its neighbours through the filter
            masked = torch.where(keep[:, None, :, None], v, 0.0) if self.spec.masks_convolution else v
            context = context + self.conv(masked)
        return context

    def fused_mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        """The same in fused operators, which scale logits by 1/√d. F (Z(A) (G V)) in this order is two attentions: of
        the landmarks over the tokens, and of the tokens over the landmarks."""
        scale = 1 / math.sqrt(q.shape[-1])
        if self.spec.is_plain_softmax:
            context: Tensor = masked_attention(q, k, v, keep, scale)
        else:
            q_landmarks, k_landmarks, present = self.landmarks(q, k, keep)
            inverse = self.pseudo_inverse(self.landmark_kernel(scale * q_landmarks, k_landmarks, present))
            values = masked_attention(q_landmarks.to(k.dtype), k, v, keep, scale)
            if self.spec.pads_left:
                values = means_of_absent_landmarks(values, keep, present)
            landmark_values = (inverse @ at_least_float32(values)).to(v.dtype)
            context = masked_attention(q, k_landmarks.to(q.dtype), landmark_values, present, scale)
            if self.spec.pads_left:
                # padding attends to all landmarks alike
                context = torch.where(keep[:, None, :, None], context, landmark_values.mean(dim=2, keepdim=True))
            if self.spec.has_balanced_segments:
                context = exact_if_short(context, values)
        if self.conv is None:
            return context
        kept = keep if self.spec.masks_convolution else torch.ones_like(keep)
        summed: Tensor = sequence_conv(v, self.conv.weight, kept, context)
        return summed

    def landmark_attention(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        """The approximation itself, on scaled q and k. All [batch, heads, seq, head_dim]."""
        q_landmarks, k_landmarks, present = self.landmarks(q, k, keep)
        kernel_f = masked_softmax(q @ k_landmarks.transpose(-1, -2).to(q.dtype), present[:, None, None, :])
        kernel_g = masked_softmax(q_landmarks.to(k.dtype) @ k.transpose(-1, -2), keep[:, None, None, :])
        inverse = self.pseudo_inverse(self.landmark_kernel(q_landmarks, k_landmarks, present))
        if self.spec.pads_left:
            kernel_f = torch.where(keep[:, None, :, None], kernel_f, 1 / self.spec.num_landmarks)
        weights = (kernel_f @ inverse).to(v.dtype)
        values = kernel_g.to(v.dtype) @ v
        if self.spec.pads_left:
            values = means_of_absent_landmarks(values, keep, present)
        context = weights @ values
        return exact_if_short(context, values) if self.spec.has_balanced_segments else context

    def landmarks(self, q: Tensor, k: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Landmarks of the queries and of the keys, float32 [batch, heads, landmarks, head_dim], and which of them
        stand for any token, boolean [batch, landmarks]."""
        count = self.spec.num_landmarks
        if self.spec.has_balanced_segments:
            q, k = at_least_float32(q), at_least_float32(k)
            weights = balanced_weights(keep, count, q.dtype)
            return weights @ q, weights @ k, torch.ones_like(keep[:, :1]).expand(-1, count)
        if self.spec.pads_left:
            return self.padded_landmarks(q, k, keep)
        if self.spec.mask_landmarks:
            if self.fused:
                means = (segment_means(at_least_float32(x), keep, count) for x in (q, k))
                return *means, present_landmarks(keep, count)
            # means as one product: tokens that are gathered first would be copied first
            q, k = at_least_float32(q), at_least_float32(k)
            weights = landmark_weights(keep, count, q.dtype)
            q_landmarks, k_landmarks = (weights.unsqueeze(1) @ x for x in (q, k))
            return q_landmarks, k_landmarks, weights.sum(dim=-1) > 0
        present = torch.ones_like(keep[:, :count])
        return self.fixed_segment_means(q), self.fixed_segment_means(k), present

    def padded_landmarks(self, q: Tensor, k: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for segments that divide the length with its padding: the means of zeroed padding and kept tokens,
        divided by the share of the kept ones."""
        q, k = at_least_float32(q), at_least_float32(k)
        count, whole = self.spec.num_landmarks, torch.ones_like(keep)
        weights = landmark_weights(whole[:1], count, q.dtype)
        share = (weights @ keep.to(q.dtype).unsqueeze(-1)).unsqueeze(1)
        present = share > 0
        zeroed = (torch.where(keep[:, None, :, None], x, 0.0) for x in (q, k))
        means = (segment_means(x, whole, count) if self.fused else weights @ x for x in zeroed)
        q_landmarks, k_landmarks = (mean / torch.where(present, share, 1.0) for mean in means)
        return q_landmarks, k_landmarks, present[:, 0, :, 0]

    def pseudo_inverse(self, kernel_a: Tensor) -> Tensor:
        """Z(A) of every matrix. kernel_a: float32 [batch, heads, m, m]."""
        batch, heads, landmarks, _ = kernel_a.shape
        over = (0, 1, 2) if self.spec.pinv_init == "global" else (2,)
        scale = kernel_a.sum(dim=-2).amax(dim=over, keepdim=True).expand(batch, heads, 1)
        # a sample without any kept token has A = 0: keep 0 / 0 out of it
        scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
        matrices = kernel_a.reshape(batch * heads, landmarks, landmarks)
        inverted = iterative_pinv if self.calls_operators else plain_iterative_pinv
        inverse = inverted(matrices, scale.reshape(batch * heads, 1, 1), self.spec.pinv_iterations)
        return torch.reshape(inverse, (batch, heads, landmarks, landmarks))

    def landmark_kernel(self, q_landmarks: Tensor, k_landmarks: Tensor, present: Tensor) -> Tensor:
        """A of scaled landmarks, float32 [batch, heads, m, m]."""
        weights = masked_softmax(q_landmarks @ k_landmarks.transpose(-1, -2), present[:, None, None, :])
        if self.spec.pads_left:
            return torch.where(present[:, None, :, None], weights, 1 / self.spec.num_landmarks)
        # rows of absent landmarks are zeroed: the pseudo-inverse then acts on the present ones alone
        return weights * present[:, None, :, None]

    def fixed_segment_means(self, x: Tensor) -> Tensor:
        """Means over the segments that a published checkpoint was trained with, padding included, in float32."""
        expected = self.spec.segment_means_seq_len
        if expected is None or x.shape[2] != expected:
            raise SpecError(
                f"the sequence has {x.shape[2]} tokens; landmarks are tied to segment_means_seq_len {expected}; "
                f"pad to {expected} tokens with an attention mask"
            )
        landmarks = self.spec.num_landmarks
        return torch.unflatten(at_least_float32(x), 2, (landmarks, expected // landmarks)).mean(dim=3)


def landmark_weights(keep: Tensor, num_landmarks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights with which each landmark averages tokens, [batch, landmarks, seq].

    keep: boolean [batch, seq]. The weights of a landmark add up to one, or to zero if it has no kept token.
    """
    position = torch.arange(keep.shape[1], device=keep.device)
    length = (keep * (position + 1)).amax(dim=1, keepdim=True)
    segment = (length + num_landmarks - 1) // num_landmarks
    # a sample without any kept token has segments of no length
    segment = segment.clamp(min=1)
    # the first token of the segment of every token: a remainder, because tools differ in rounding quotients
    start = position - position % segment
    segment_start = segment[:, None] * torch.arange(num_landmarks, device=keep.device)[:, None]
    used = ((start[:, None, :] == segment_start) & keep[:, None, :]).to(dtype)
    return used / used.sum(dim=-1, keepdim=True).clamp(min=1.0)


def present_landmarks(keep: Tensor, num_landmarks: int) -> Tensor:
    """A mask of landmarks that stand for any kept token, boolean [batch, landmarks].

    Looks at each token once: no matrix of weights. And no scatter, for which TensorRT-RTX wants fewer tokens than
    landmarks.
    """
    batch, seq_len = keep.shape
    position = torch.arange(seq_len, device=keep.device)
    length = (keep * (position + 1)).amax(dim=1)[:, None, None]
    segment = (length + num_landmarks - 1) // num_landmarks
    offset = torch.arange((seq_len + num_landmarks - 1) // num_landmarks, device=keep.device)
    token = torch.arange(num_landmarks, device=keep.device)[:, None] * segment + offset
    # the length as a tensor: ONNX Runtime computes a number on the CPU, and would copy it to a GPU in every run
    tokens = position[-1] + 1
    inside = (offset < segment) & (token < tokens)
    row = token.clamp(max=seq_len - 1) + tokens * torch.arange(batch, device=keep.device)[:, None, None]
    return (keep.flatten()[row] & inside).float().amax(dim=-1) > 0


def means_of_absent_landmarks(values: Tensor, keep: Tensor, present: Tensor) -> Tensor:
    """G V, in which a landmark of padding alone has the mean over all tokens, and padding has zeros in V.

    values [batch, heads, landmarks, head_dim]: G V, in which it has the mean over the kept tokens.
    """
    share = at_least_float32(keep.to(values.dtype)).mean(dim=1).to(values.dtype)[:, None, None, None]
    return torch.where(present[:, None, :, None], values, share * values)


def balanced_weights(keep: Tensor, num_landmarks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Means over segments of floor(seq / landmarks) tokens, the last ones one longer, as [landmarks, seq].

    keep: boolean [batch, seq], of which only the length counts. With fewer tokens than landmarks, the last landmarks
    are one token each, and the weights of the others are zero.
    """
    position = torch.arange(keep.shape[1], device=keep.device)
    tokens = position[-1] + 1
    size = tokens // num_landmarks
    shorter = num_landmarks - tokens % num_landmarks
    number = torch.arange(num_landmarks, device=keep.device)
    start = (number * size + (number - shorter).clamp(min=0))[:, None]
    count = torch.where(number < shorter, size, size + 1)[:, None]
    inside = (position >= start) & (position < start + count)
    return inside.to(dtype) / count.clamp(min=1).to(dtype)


def exact_if_short(context: Tensor, values: Tensor) -> Tensor:
    """Softmax attention for at most as many tokens as landmarks, else `context` [batch, heads, seq, head_dim].

    values: G V [batch, heads, landmarks, head_dim]. Each of the last landmarks then is one token, so this is it.
    """
    landmarks = values.shape[2]
    position = torch.arange(context.shape[2], device=context.device)
    tokens = position[-1] + 1
    exact = values[:, :, (landmarks - tokens + position).clamp(min=0)]
    return torch.where(tokens <= landmarks, exact, context)


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
                around = F.pad(vh.masked_fill(~keep[b, :, None], 0), (0, 0, len(taps) // 2, len(taps) // 2))
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
    hides_nan=False,
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
