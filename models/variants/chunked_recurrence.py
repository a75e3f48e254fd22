"""The recurrence of `plugins/linear_recurrence` in PyTorch: by chunks of tokens, without a loop over them.

Within a chunk, products of matrices; a chunk maps the state before it to the one after it, S → M S + B, and these maps
are composed in groups, groups of groups, and so on. The tokens of a chunk write u = (I + A)⁻¹ (β v − β e^{D_i} k S),
where D_ij is the sum of the decays after token j up to i and A_ij = β_i e^{D_ij} k_i·k_j below the diagonal (arXiv
2412.06464, section 3.3). Exact for any lengths and decays, and with gradients. Graphs have the operator in its place,
whose function body does the same for a free length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.layers import causal_mask

# Chunks in a group, groups in a group of groups.
RADIX = 8
# (M, S) → M S: of matrices, or of columns of a diagonal.
Apply = Callable[[Tensor, Tensor], Tensor]


def chunked_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float,
    delta: bool,
    chunk_length: int,
) -> tuple[Tensor, Tensor]:
    """The results of `linear_recurrence` for as many heads of queries as of keys, all of one float dtype.

    query, key [batch, seq, heads, key_dim]; value [batch, seq, heads, value_dim]; past [batch, heads, key_dim,
    value_dim]; decay [batch, seq, heads, 1 or key_dim]; beta [batch, seq, heads, 1].
    """
    seq_len = query.shape[1]
    q, k, v, g, b = (in_chunks(x, chunk_length) for x in (query, key, value, decay, beta))
    seen = causal_mask(chunk_length, q.device).to(q.dtype)
    before = seen.tril(-1)
    kept = torch.exp(seen @ g)  # of the state before the chunk, up to each token
    # sums for each pair of tokens: differences of sums from the start would lose small decays beside large ones
    spans = (seen @ (g.unsqueeze(-2) * before.unsqueeze(-1)).flatten(-2)).unflatten(-1, (chunk_length, -1))
    shares = torch.exp(spans)  # [..., i, j, 1 or key_dim]
    weights, of_keys = shared_products(q, k, shares) * seen, shared_products(k, k, shares) * before
    own_shares = (k * shares[..., -1, :, :]).transpose(-1, -2)
    written, reach, moved = b * v, q * kept, kept[..., -1:, :].transpose(-1, -2)
    apply: Apply = torch.mul
    if delta:
        apply, inverse = torch.matmul, inverse_of_unit_triangle(b * of_keys)
        written, erased = inverse @ written, inverse @ (b * k * kept)
        reach = reach - weights @ erased
        moved = moved * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - own_shares @ erased
    added = own_shares @ written
    states = states_before(moved, added, past.to(q.dtype), apply)
    out = scale * (weights @ written + reach @ states)
    present = apply(moved[:, :, -1], states[:, :, -1]) + added[:, :, -1]
    return out.permute(0, 2, 3, 1, 4).flatten(1, 2).narrow(1, 0, seq_len), present.to(past.dtype)


def in_chunks(x: Tensor, size: int) -> Tensor:
    """[batch, seq, heads, channels] → [batch, heads, chunks, size, channels], with zeros after the end: tokens that
    change no state."""
    chunks = -(-x.shape[1] // size)
    padded = F.pad(x, (0, 0, 0, 0, 0, chunks * size - x.shape[1]))
    return torch.unflatten(padded, 1, (chunks, size)).permute(0, 3, 1, 2, 4)


def shared_products(left: Tensor, right: Tensor, shares: Tensor) -> Tensor:
    """Σ_c left_ic shares_ijc right_jc, [..., i, j]. shares [..., i, j, 1 or channels]."""
    if shares.shape[-1] == 1 and right.shape[-1] != 1:
        return (left @ right.transpose(-1, -2)) * shares.squeeze(-1)
    return (left.unsqueeze(-2) @ (right.unsqueeze(-3) * shares).transpose(-1, -2)).squeeze(-2)


def inverse_of_unit_triangle(below: Tensor) -> Tensor:
    """(I + A)⁻¹ of A [..., size, size], which is zero on and above the diagonal.

    It grows from blocks on the diagonal: where T has the inverses of blocks of some size, those of twice the size are
    T − T X T, where X has the elements of A that only the larger blocks have. Powers of A would overflow where keys
    repeat.
    """
    size = below.shape[-1]
    place = torch.arange(size, device=below.device)
    inverse = torch.eye(size, dtype=below.dtype, device=below.device)
    width = 1
    while width < size:
        block = place // width
        is_new = (block[:, None] % 2 == 1) & (block[:, None] == block[None, :] + 1)
        inverse = inverse - inverse @ (below * is_new.to(below.dtype)) @ inverse
        width *= 2
    return inverse


def states_before(moved: Tensor, added: Tensor, first: Tensor, apply: Apply) -> Tensor:
    """The state before each of the maps S → moved S + added, of which the first one reads `first`.

    moved [batch, heads, maps, key_dim, key_dim or 1]; added [batch, heads, maps, key_dim, value_dim]; first [batch,
    heads, key_dim, value_dim].
    """
    count = moved.shape[2]
    groups = -(-count // RADIX)
    # the maps of zeros at the end only lead to states after the last one
    padding = (0, 0, 0, 0, 0, groups * RADIX - count)
    maps = [F.pad(x, padding).unflatten(2, (groups, RADIX)).unbind(3) for x in (moved, added)]
    pairs = list(zip(*maps, strict=True))
    if groups == 1:
        state = first.unsqueeze(2)
    else:
        whole, total = pairs[0]
        for matrix, own in pairs[1:]:
            whole, total = apply(matrix, whole), apply(matrix, total) + own
        state = states_before(whole, total, first, apply)
    states = [state]
    for matrix, own in pairs[:-1]:
        states.append(apply(matrix, states[-1]) + own)
    return torch.stack(states, dim=3).flatten(2, 3).narrow(2, 0, count)
