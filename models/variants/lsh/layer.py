"""Reformer's LSH attention (Kitaev et al., 2020, arXiv 2001.04451, section 2)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.layers import (
    AttentionLayer,
    at_least_float32,
    rotary_angles,
    rotate_pairs,
    split_heads,
    take_rows,
)
from effexport.models.variants.contract import VariantContract
from effexport.models.variants.local.layer import chunk_count, look_around, window_attention
from effexport.models.variants.lsh import LSHSpec
from effexport.plugins.lsh_attention.op import lsh_attention
from effexport.plugins.lsh_hash.op import lsh_hash
from effexport.plugins.lsh_sort.op import lsh_sort, sorted_rows


class LSHAttention(AttentionLayer):
    """Each token attends to the tokens that share its hash bucket, or nearly so.

    Per round: bucket_t = argmax([R x_t, −R x_t]); sort tokens by bucket; cut into chunks; attend to the own chunk and
    its neighbours, q·k̂ with k̂ = q/‖q‖ and no other 1/√d; undo the sort. Rounds are combined by their log-sum-exp.
    O(num_hashes · seq · chunk_length · dim) time, O(num_hashes · seq · (dim + heads · chunk_length)) memory.

    Padding gets a bucket of its own behind all others. The causal form hides later positions, but is not strictly
    causal: a later token still takes a place in the sort and so moves the borders of chunks.
    """

    IN_FLOAT: ClassVar[Mapping[str, str]] = {
        "query_key": "it is hashed: a rounded projection moves tokens to other buckets",
        "": "both factors of its products are activations, or it is the hash",
    }
    spec: LSHSpec

    def __init__(self, spec: LSHSpec) -> None:
        super().__init__(spec, spec.inner_dim)
        self.query_key = nn.Linear(spec.dim, spec.inner_dim, bias=spec.bias)
        self.value = nn.Linear(spec.dim, spec.inner_dim, bias=spec.bias)
        self.hash = LSHHash(spec)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Shared query and key, and value, each [batch, heads, seq, head_dim]."""
        heads = self.spec.heads
        return split_heads(self.query_key(hidden_states), heads), split_heads(self.value(hidden_states), heads)

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """angles: as of `rotary_angles`; rotate queries and keys after hashing. By default, if the spec says so."""
        spec = self.spec
        qk, v = projected
        batch, seq_len = keep.shape
        chunks = self.hash.chunk_count(seq_len)
        padded_len = chunks * spec.chunk_length
        pad = padded_len - seq_len
        rounded = spec.mask_constants == "hf"
        fused_form = self.fused and spec.has_fused_form
        sort = lsh_sort if self.calls_operators else sorted_rows
        buckets = self.hash(qk, keep, fused_form)
        order, rank = sort(buckets, spec.total_buckets + 1)
        if spec.rotary and angles is None:
            angles = rotary_angles(seq_len, spec.head_size, qk.device)
        if angles is not None:
            qk = rotate_pairs(qk, *angles)
        if fused_form:
            around = (spec.num_chunks_before, spec.num_chunks_after)
            fused: Tensor = lsh_attention(
                qk, v, order, rank, keep, spec.chunk_length, *around, spec.causal, spec.circular, rounded
            )
            return fused

        keep = F.pad(keep, (0, pad))
        qk, v = (F.pad(x, (0, 0, 0, pad)) for x in (qk, v))
        groups = batch * spec.heads
        chunked = (groups, spec.num_hashes, chunks, spec.chunk_length)
        rows = flat_rows(order, groups, padded_len)
        q = take_rows(qk.flatten(0, 2), rows).reshape(*chunked, spec.head_size)
        v_window = look_around(take_rows(v.flatten(0, 2), rows).reshape(*chunked, spec.head_size), spec)
        k_window = look_around(scaled_unit_keys(q) if spec.scaled_keys else unit_keys(q), spec)
        visible, is_self = self.window_masks(order.reshape(chunked), keep)
        if not spec.attend_across_buckets:
            near = self.same_bucket(buckets, order, chunked)
            visible, is_self = visible & near, is_self & near
        penalty = None
        if not spec.allow_duplicates:
            count = self.meetings(buckets, rank, rows, chunked)
            # log(count + 1e-9), without an addend that is lost beside 1
            penalty = torch.where(count > 0, torch.log(count.clamp(min=1)), math.log(1e-9))
        context, lse = window_attention(
            q, k_window, v_window, visible, is_self, self_logit=spec.self_logit, penalty=penalty, rounded=rounded
        )

        # undo the sort: `rank` says where each token went
        places = rank.long() + padded_len * torch.arange(groups * spec.num_hashes, device=rank.device)[:, None]
        rounds = (groups, spec.num_hashes, padded_len)
        context = take_rows(context.flatten(0, 3), places).reshape(*rounds, spec.head_size)[:, :, :seq_len]
        lse = take_rows(lse.reshape(-1, 1), places).reshape(rounds)[:, :, :seq_len]
        weights = self.round_weights(lse).unsqueeze(-1)
        combined = (weights * at_least_float32(context)).sum(dim=1).to(v.dtype)
        return combined.reshape(batch, spec.heads, seq_len, spec.head_size)

    def window_masks(self, positions: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Two masks over the keys of each token's window: visible keys, and the token itself.

        positions: int32 [groups, rounds, chunks, chunk_length], the position of every sorted token.
        keep: boolean [batch, padded seq].
        Returns two booleans, broadcastable to [groups, rounds, chunks, chunk_length, window].
        """
        spec = self.spec
        visible_keys = self.kept_pairs if spec.pad_bucket == "hashed" else self.kept_places
        visible = visible_keys(positions, keep)
        own = positions.unsqueeze(4)
        other = look_around(positions, spec, fill=-1).unsqueeze(3)
        if spec.causal:
            visible = visible & (own >= other)
        return visible, own == other

    def kept_places(self, positions: Tensor, keep: Tensor) -> Tensor:
        """A mask of keys that are not padding, which is sorted last: places before the number of kept tokens."""
        spec = self.spec
        groups, _, chunks, chunk_length = positions.shape
        place = torch.arange(chunks * chunk_length, device=keep.device).reshape(1, 1, chunks, chunk_length)
        nowhere = chunks * chunk_length
        place = look_around(place.expand(1, spec.num_hashes, chunks, chunk_length), spec, fill=nowhere)
        kept = keep.sum(dim=1).repeat_interleave(spec.heads).reshape(groups, 1, 1, 1)
        return (place < kept).unsqueeze(3)

    def kept_pairs(self, positions: Tensor, keep: Tensor) -> Tensor:
        """A mask of pairs in which neither the key nor the query is padding, which may stand anywhere."""
        groups, padded_len = positions.shape[0], keep.shape[1]
        rows = flat_rows(positions, groups, padded_len)
        table = keep.repeat_interleave(self.spec.heads, dim=0).reshape(-1, 1).float()
        kept = (take_rows(table, rows) > 0).reshape(positions.shape)
        return look_around(kept, self.spec, fill=False).unsqueeze(3) & kept.unsqueeze(4)

    def same_bucket(self, buckets: Tensor, order: Tensor, chunked: tuple[int, ...]) -> Tensor:
        """A mask of window keys that share the bucket of a token, boolean [… chunk_length, window].

        buckets, order: int32 [groups · rounds, padded seq]. chunked: groups, rounds, chunks, chunk_length.
        """
        rounds, device = chunked[1], buckets.device
        rows = order.long() + order.shape[1] * torch.arange(order.shape[0], device=device)[:, None]
        own = take_rows(buckets.reshape(-1, 1), rows).reshape(chunked).long()
        # the neighbour of a round's first chunk may belong to another round, whose buckets are others
        own = own + self.spec.total_buckets * torch.arange(rounds, device=device)[:, None, None]
        return own.unsqueeze(4) == look_around(own, self.spec, fill=-1).unsqueeze(3)

    def meetings(self, buckets: Tensor, rank: Tensor, rows: Tensor, chunked: tuple[int, ...]) -> Tensor:
        """In how many rounds a token sees each key of its window, float32 [… chunk_length, window].

        rows: of the tokens in sorted order, as `flat_rows` returns them. The others as in `same_bucket`.
        """
        spec = self.spec
        groups, rounds, chunks, chunk_length = chunked

        def of_window(x: Tensor) -> list[tuple[Tensor, Tensor]]:
            """Values of tokens and of keys in each round. x: [groups · rounds, padded seq]."""
            table = x.reshape(groups, rounds, -1).transpose(1, 2).flatten(0, 1)
            own = take_rows(table, rows).reshape(*chunked, rounds)
            other = look_around(own, spec, fill=-1)
            return [(own[..., r].unsqueeze(4), other[..., r].unsqueeze(3)) for r in range(rounds)]

        first_chunk = (chunks * torch.arange(rounds, device=rank.device)).repeat(groups)[:, None]
        # a tensor: torch.onnx does not export a remainder by a size
        ring = torch.arange(rounds * chunks, device=rank.device)[-1:] + 1
        chunk = of_window(rank.long() // chunk_length + first_chunk)
        bucket = of_window(buckets) if not spec.attend_across_buckets else None
        count: Tensor | None = None
        for r, (own, other) in enumerate(chunk):
            for by in range(-spec.num_chunks_before, spec.num_chunks_after + 1):
                beside = other - by
                if spec.circular:
                    beside = beside % ring
                met = own == beside
                if bucket is not None:
                    met = met & (bucket[r][0] == bucket[r][1])
                count = met.float() if count is None else count + met.float()
        assert count is not None
        return count

    def round_weights(self, lse: Tensor) -> Tensor:
        """Weight of every round, float32 [groups, rounds, seq]; adds up to one over the rounds."""
        if self.spec.mask_constants == "safe":
            return torch.softmax(lse, dim=1)
        highest = lse.amax(dim=1, keepdim=True)
        return torch.exp(lse - (highest + torch.log(torch.exp(lse - highest).sum(dim=1, keepdim=True))))


class LSHHash(nn.Module):
    """Buckets of every token, by random rotations drawn once from a seed.

    The rotations are a buffer, saved with the weights and exported as an initializer. They stay float32 under
    `.half()` and `.bfloat16()`: hashing in lower precision moves one token in a thousand to another bucket.
    """

    rotations: Tensor

    def __init__(self, spec: LSHSpec) -> None:
        super().__init__()
        self.spec = spec
        generator = torch.Generator().manual_seed(spec.hash_seed)
        width = sum(spec.bucket_factors) // 2
        shape = (spec.heads if spec.rotations_per_head else 1, spec.head_size, spec.num_hashes, width)
        self.register_buffer("rotations", torch.randn(shape, generator=generator))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LSHHash:
        exact = self.rotations
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.rotations.dtype in (torch.float16, torch.bfloat16):
            self.rotations = exact.to(self.rotations.device)
        return self

    def forward(self, qk: Tensor, keep: Tensor, fused: bool = False) -> Tensor:
        """qk [batch, heads, seq, head_dim]; keep boolean [batch, seq]. fused: by the fused operator.

        Returns int32 [batch · heads · rounds, padded seq]: buckets in [0, total_buckets), or total_buckets for padding,
        which fills the last chunk. Hashed padding has the buckets of its tokens, and beyond them that of zero vectors.
        """
        if fused:
            factors, chunk_length = self.spec.bucket_factors, self.spec.chunk_length
            shared = not self.spec.rotations_per_head
            rotations = self.rotations.expand(self.spec.heads, -1, -1, -1) if shared else self.rotations
            buckets: Tensor = lsh_hash(qk, rotations, keep, factors, chunk_length)
            return buckets
        bucket = torch.zeros((), dtype=torch.int64, device=qk.device)
        stride = 1
        for factor, projection in zip(self.spec.bucket_factors, self.project(qk), strict=True):
            digit = torch.cat([projection, -projection], dim=3).argmax(dim=3)
            bucket = bucket + stride * digit
            stride *= factor
        # padded as real numbers, exact in float32: ONNX Runtime pads integers on the CPU, also if the rest is on a GPU
        if self.spec.pad_bucket == "last":
            pad_bucket = float(self.spec.total_buckets)
            exact = torch.where(keep[:, None, None, :], bucket.to(projection.dtype), pad_bucket)
        else:
            pad_bucket, exact = 0.0, bucket.to(projection.dtype)
        return F.pad(exact.flatten(0, 2), (0, self.missing(qk)), value=pad_bucket).to(torch.int32)

    def chunk_count(self, seq_len: int) -> int:
        """Chunks of the padded sequence."""
        multiple = self.spec.pad_multiple
        return chunk_count(seq_len, multiple) * (multiple // self.spec.chunk_length)

    def missing(self, qk: Tensor) -> int:
        """The number of tokens that the last chunks lack."""
        seq_len = qk.shape[2]
        return self.chunk_count(seq_len) * self.spec.chunk_length - seq_len

    def project(self, qk: Tensor) -> list[Tensor]:
        """Rotated vectors in float32, one tensor [batch, heads, rounds, factor / 2, seq] for each bucket factor."""
        rotations = self.rotations
        if self.spec.buckets_by_length:
            half = chunk_count(qk.shape[2], self.spec.pad_multiple)
            # by index: a sequence that is too long has no columns, which runtimes report; a slice would end early
            rotations = rotations.index_select(3, torch.arange(half, device=qk.device))
        # the constant is the left factor: ONNX Runtime's quantisers take a right one for a matrix of weights
        left = rotations.flatten(2).transpose(1, 2)
        projected = (left @ qk.to(rotations.dtype).transpose(2, 3)).unflatten(2, tuple(rotations.shape[2:]))
        ends = list(itertools.accumulate((factor // 2 for factor in self.spec.bucket_factors), initial=0))
        if self.spec.buckets_by_length:
            return [projected]
        return [projected[:, :, :, start:end] for start, end in itertools.pairwise(ends)]

    def margins(self, qk: Tensor) -> Tensor:
        """The distance of every token from another bucket: (top1 − top2) / scale, the least over the factors.

        The scale is ‖projection‖∞, or ‖qk‖, the average size of a projection, where that is larger: of a single
        projection, whose sign is the bucket, the maximum is as small as the margin.
        Returns float32 [batch · heads · rounds, padded seq], 0 for padding. Used to tell rounding from bugs when two
        runtimes disagree.
        """
        margins = []
        average = torch.linalg.vector_norm(qk.float(), dim=-1)[:, :, None]
        for projection in self.project(qk):
            both = torch.cat([projection, -projection], dim=3)
            top = both.topk(2, dim=3).values
            scale = torch.maximum(projection.abs().amax(dim=3), average).clamp(min=torch.finfo(torch.float32).tiny)
            margins.append((top[:, :, :, 0] - top[:, :, :, 1]) / scale)
        return F.pad(torch.stack(margins).amin(dim=0).flatten(0, 2), (0, self.missing(qk)))


def flat_rows(order: Tensor, groups: int, seq_len: int) -> Tensor:
    """Rows of the flattened [groups · seq] axis in sorted order, int64 [groups, rounds · seq].

    order: int32 [groups · rounds, seq].
    """
    offset = seq_len * torch.arange(groups, device=order.device)[:, None]
    return order.long().reshape(groups, -1) + offset


def unit_keys(qk: Tensor) -> Tensor:
    """Keys of shared-QK attention: qk / ‖qk‖, with the 1e-6 of transformers under the root."""
    exact = at_least_float32(qk)
    scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + 1e-6) / math.sqrt(qk.shape[-1])
    return (exact * scale).to(qk.dtype)


def scaled_unit_keys(qk: Tensor) -> Tensor:
    """qk / (‖qk‖ √head_dim), and 0 for a zero vector: keys whose products are scaled as in softmax attention."""
    exact = at_least_float32(qk)
    length: Tensor = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).clamp(min=1e-12)
    keys: Tensor = exact / (length * math.sqrt(qk.shape[-1]))
    return keys.to(qk.dtype)


@torch.no_grad()
def exact(layer: LSHAttention, x: Tensor, keep: Tensor) -> Tensor:
    """float64, one query at a time. `keep` and x may have any length."""
    spec, size = layer.spec, layer.spec.head_size
    batch, seq_len, _ = x.shape
    out = torch.zeros(batch, seq_len, spec.inner_dim, dtype=torch.float64)
    qk = x.double() @ layer.query_key.weight.double().T
    v = x.double() @ layer.value.weight.double().T
    for b in range(batch):
        for h in range(spec.heads):
            lanes = slice(h * size, (h + 1) * size)
            visible = set(keep[b].nonzero().flatten().tolist())
            out[b, :, lanes] = slow_head(layer, h, qk[b, :, lanes], v[b, :, lanes], visible)
    return out


def slow_head(layer: LSHAttention, head: int, qk: Tensor, v: Tensor, kept: set[int]) -> Tensor:
    spec = layer.spec
    keys = qk / (qk.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(spec.head_size)
    outs, lses = [], []
    for r in range(spec.num_hashes):
        buckets = slow_buckets(spec, layer.hash.rotations[head, :, r].double(), qk)
        # padding comes last, in a bucket of its own
        in_order = sorted(range(len(qk)), key=lambda t: (t not in kept, buckets[t] if t in kept else 0, t))
        out, lse = torch.zeros_like(v), torch.full((len(qk),), -1e5, dtype=torch.float64)
        for place, t in enumerate(in_order):
            first = (place // spec.chunk_length - spec.num_chunks_before) * spec.chunk_length
            last = (place // spec.chunk_length + 1 + spec.num_chunks_after) * spec.chunk_length
            window = [s for s in in_order[max(0, first) : last] if s in kept or s == t]
            others = [s for s in window if s != t and not (spec.causal and s > t)]
            if not others:
                out[t] = v[t]
                continue
            logits = keys[others] @ qk[t]
            lse[t] = torch.logsumexp(logits, dim=0)
            out[t] = torch.softmax(logits, dim=0) @ v[others]
        outs.append(out)
        lses.append(lse)
    weights = torch.softmax(torch.stack(lses), dim=0)
    return (weights.unsqueeze(-1) * torch.stack(outs)).sum(dim=0)


def slow_buckets(spec: LSHSpec, rotations: Tensor, qk: Tensor) -> list[int]:
    """rotations [head_dim, Σ factor / 2]; first factor least significant."""
    buckets = []
    for vector in qk:
        bucket, stride, start = 0, 1, 0
        for factor in spec.bucket_factors:
            projection = vector @ rotations[:, start : start + factor // 2]
            values = [*projection.tolist(), *(-projection).tolist()]
            bucket += stride * values.index(max(values))
            stride, start = stride * factor, start + factor // 2
        buckets.append(bucket)
    return buckets


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    empty_is_zero=False,
    hides_nan=False,
    reason="logits of order ten, rounded by 6e-8 each, are relative errors of the weights",
    changed=LSHSpec(
        bias=True,
        chunk_length=16,
        num_chunks_before=2,
        num_chunks_after=1,
        circular=True,
        num_hashes=4,
        num_buckets=(4, 8),
        hash_seed=7,
        mask_constants="hf",
    ),
    small={"chunk_length": 8},
    forms={
        "own chunk": {"num_chunks_before": 0},
        "both sides": {"num_chunks_after": 1, "num_buckets": (2, 4)},
        "two before": {"num_chunks_before": 2, "num_hashes": 3},
    },
)
