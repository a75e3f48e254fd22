"""The layer that the recurrent variants share: linear attention with decay, with and without the delta rule.

Its recurrence works by chunks of tokens, without a loop over them. Within a chunk, products of matrices; a chunk maps
the state before it to the one after it, S → M S + B, and these maps are composed in groups, groups of groups, and so
on. The tokens of a chunk write u = (I + A)⁻¹ (β v − β e^{D_i} k S), where D_ij is the sum of the decays after token j
up to i and A_ij = β_i e^{D_ij} k_i·k_j below the diagonal (arXiv 2412.06464, section 3.3). Exact for any lengths and
decays, and with gradients. Graphs have the operator in its place, whose function body does the same for a free length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.layers import AttentionLayer, State, at_least_float32, causal_mask
from effexport.models.variants.recurrence_spec import LONGEST, RecurrentSpec
from effexport.plugins.causal_conv.op import causal_conv, exportable_reference
from effexport.plugins.linear_recurrence.op import linear_recurrence

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


class Tokens(NamedTuple):
    """The inputs of the recurrence at each token, [batch, seq, heads, channels], at least float32.

    query, key: head_dim channels; value: value_dim. decay: the logarithm of the share of the state that stays, at most
    0; one channel, or one for each channel of a key. beta: how strongly the token is written, one channel.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor


class RecurrentAttention(AttentionLayer):
    """out_t = scale · S_tᵀ q_t, S_t = α_t S_{t−1} + β_t k_t (v_t − delta · (α_t S_{t−1})ᵀ k_t)ᵀ with α = exp(decay).

    O(seq · dim · head_dim) time; the state, float32 whatever the model's dtype, has a constant size. A variant
    implements `tokens`, and overrides `projections` for what else it projects its input to, `convolve`, `results` and
    `finish`.

    Hidden tokens are as if they were not there, for the convolution too: they leave the state as it is.
    """

    IN_FLOAT: ClassVar[Mapping[str, str]] = {"": "its state is read and written by every token"}

    spec: RecurrentSpec

    def __init__(self, spec: RecurrentSpec) -> None:
        super().__init__(spec, spec.heads * spec.value_size)
        self.query = nn.Linear(spec.dim, spec.key_width, bias=spec.bias)
        self.key = nn.Linear(spec.dim, spec.key_width, bias=spec.bias)
        self.value = nn.Linear(spec.dim, spec.heads * spec.value_size, bias=spec.bias)
        self.norm = RMSNorm(spec.value_size, spec.norm_eps)
        if spec.has_gate:
            self.gate = nn.Linear(spec.dim, spec.heads * spec.value_size, bias=spec.bias)
        if spec.conv_size:
            self.taps = nn.Parameter(torch.empty(spec.convolved, spec.conv_size))
            nn.init.kaiming_uniform_(self.taps, a=5**0.5)

    def projections(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, which are convolved, and what else `tokens` takes: each [batch, seq, heads,
        channels]."""
        linears = (self.query, self.key, self.value)
        return tuple(linear(hidden_states).unflatten(-1, (self.spec.heads, -1)) for linear in linears)

    def tokens(self, query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tokens:
        """The inputs of the recurrence, from `projections`, at least float32; the first three are convolved."""
        raise NotImplementedError

    def conv_bias(self) -> Tensor:
        """The bias of the convolution, [channels]."""
        return self.taps.new_zeros(self.spec.convolved)

    def convolve(self, x: Tensor, keep: Tensor | None, past: Tensor) -> tuple[Tensor, Tensor]:
        """SiLU of the convolution of x [batch, seq, channels], at least float32; and the last kept tokens after it.

        past: those before it, [batch, conv_size − 1, channels]. keep: boolean [batch, seq], or None for a single token.
        """
        taps, bias = at_least_float32(self.taps), at_least_float32(self.conv_bias())
        if keep is None:
            rows = torch.cat([past, x], dim=1)
            return F.silu((rows * taps.T).sum(dim=1, keepdim=True) + bias), rows[:, 1:]
        convolution = causal_conv if self.becomes_operators else exportable_reference
        convolved: tuple[Tensor, Tensor] = convolution(x, taps, bias, past, keep, True)
        return convolved

    def results(self, context: Tensor, tokens: Tokens) -> Tensor:
        """The sums that queries read, and all that a token adds to them by itself: [batch, seq, heads, value_dim]."""
        return context

    def finish(self, context: Tensor, hidden_states: Tensor) -> Tensor:
        """The results of the recurrence [batch, seq, heads, value_dim], at least float32, normalised in each head and
        gated: the input of the output projection, [batch, seq, heads · value_dim] in any dtype."""
        normed: Tensor = self.norm(context).flatten(2)
        return normed * self.swish(hidden_states) if self.spec.has_gate else normed

    def swish(self, hidden_states: Tensor) -> Tensor:
        """The factors of results, [batch, seq, dim] → [batch, seq, heads · value_dim], at least float32."""
        return F.silu(at_least_float32(self.gate(hidden_states)))

    def attend(self, hidden_states: Tensor, keep: Tensor | None) -> Tensor:
        context, _ = self.recur(self.projections(hidden_states), keep, self.initial_state(hidden_states.shape[0]))
        return self.finish(context, hidden_states).to(hidden_states.dtype)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.transpose(1, 2) for x in self.projections(hidden_states))

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        by_token = tuple(x.transpose(1, 2) for x in projected)
        context, _ = self.recur(by_token, keep, self.initial_state(keep.shape[0]))
        return context.transpose(1, 2).to(projected[0].dtype)

    def initial_state(self, batch: int) -> State:
        """The state before the first token: S [batch, heads, head_dim, value_dim], and the inputs of the convolution
        at the last conv_size − 1 tokens, [batch, conv_size − 1, channels]."""
        spec, weight = self.spec, self.out.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        shapes: dict[str, tuple[int, ...]] = {"s": (batch, spec.heads, spec.head_size, spec.value_size)}
        if spec.conv_size:
            shapes["conv"] = (batch, spec.conv_size - 1, spec.convolved)
        return {name: torch.zeros(shape, dtype=dtype, device=weight.device) for name, shape in shapes.items()}

    def step(self, hidden_states: Tensor, state: State) -> tuple[Tensor, State]:
        """One token: hidden_states [batch, 1, dim] → [batch, 1, dim] and the next state."""
        return self.advance(hidden_states, None, state)

    def prefill(self, hidden_states: Tensor, keep: Tensor, state: State) -> tuple[Tensor, State]:
        return self.advance(hidden_states, keep, state)

    def advance(self, hidden_states: Tensor, keep: Tensor | None, state: State) -> tuple[Tensor, State]:
        """`prefill`, or without `keep` a step."""
        context, following = self.recur(self.projections(hidden_states), keep, state)
        return self.out(self.finish(context, hidden_states).to(hidden_states.dtype)), following

    def recur(self, projected: tuple[Tensor, ...], keep: Tensor | None, state: State) -> tuple[Tensor, State]:
        """The convolution and the recurrence of all tokens, after those that `state` holds.

        projected: as from `projections`. keep: boolean [batch, seq], or None for a single token. Returns the results
        [batch, seq, heads, value_dim], at least float32, and the state after the last kept token.
        """
        spec = self.spec
        exact = [at_least_float32(x) for x in projected]
        mixed, others = exact[:3], exact[3:]
        following: State = {}
        if spec.conv_size:
            inputs = torch.cat([x.flatten(2) for x in mixed], dim=2)
            convolved, following["conv"] = self.convolve(inputs, keep, state["conv"])
            parts = convolved.split([x.shape[2] * x.shape[3] for x in mixed], dim=2)
            mixed = [part.unflatten(2, x.shape[2:]) for part, x in zip(parts, mixed, strict=True)]
        else:
            mixed = [kept_or_zero(x, keep) for x in mixed]
        tokens = self.tokens(*mixed, *others)
        tokens = tokens._replace(decay=kept_or_zero(tokens.decay, keep), beta=kept_or_zero(tokens.beta, keep))
        sizes = (spec.chunk_length, spec.longest)
        context, s = recurrence(tokens, state["s"], spec.scale, spec.delta, *sizes, as_operator=self.becomes_operators)
        return self.results(context, tokens), {"s": s, **following}


class RMSNorm(nn.Module):
    """x / √(mean x² + eps) · weight over the last axis, computed in float32 whatever the model's dtype.

    groups: parts of the axis, of equal size, which are normalised by themselves.
    """

    def __init__(self, width: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight, self.eps, self.groups = nn.Parameter(torch.ones(width)), eps, groups

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] → the same shape, at least float32."""
        x = at_least_float32(x)
        if self.groups > 1:
            x = x.unflatten(-1, (self.groups, -1))
        normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) if self.groups > 1 else normed) * at_least_float32(self.weight)


def kept_or_zero(x: Tensor, keep: Tensor | None) -> Tensor:
    """x [batch, seq, heads, channels], with zeros where keep, boolean [batch, seq], is False: it may hold anything."""
    return x if keep is None else torch.where(keep[:, :, None, None], x, 0.0)


def decay_of_heads(ones: Tensor) -> Tensor:
    """The logarithm of retention's decay, 1 − 2^(−5−h) of head h, for tokens as in `ones` [batch, seq, heads, 1]."""
    logarithms = [math.log1p(-(2.0 ** (-5 - head))) for head in range(ones.shape[2])]
    return torch.tensor(logarithms, dtype=ones.dtype, device=ones.device)[:, None] * ones


def recurrence(
    tokens: Tokens,
    past: Tensor,
    scale: float,
    delta: bool,
    chunk_length: int = RecurrentSpec.chunk_length,
    longest: int = LONGEST,
    *,
    as_operator: bool,
) -> tuple[Tensor, Tensor]:
    """The results [batch, seq, heads, value_dim] of the rule of `RecurrentAttention`, and the state after all tokens.

    past: the state before the first, [batch, heads, key_dim, value_dim]. A single token is products of matrices; of
    more, as_operator decides between the operator, and its formula with gradients.
    """
    query, key, value, decay, beta = tokens
    inputs = (query, key, value, past, decay, beta, scale, delta)
    if isinstance(key.shape[1], int) and key.shape[1] == 1:
        return one_token(*inputs)
    if as_operator:
        found: tuple[Tensor, Tensor] = linear_recurrence(*inputs, decay.shape[3] > 1, chunk_length, longest)
        return found
    return chunked_recurrence(*inputs, chunk_length)


def one_token(
    query: Tensor, key: Tensor, value: Tensor, past: Tensor, decay: Tensor, beta: Tensor, scale: float, delta: bool
) -> tuple[Tensor, Tensor]:
    """The results of `linear_recurrence` for one token, [batch, 1, heads, channels]."""
    q, k, v, g, b = (x.transpose(1, 2) for x in (query, key, value, decay, beta))
    kept = torch.exp(g).transpose(-1, -2) * past
    written = b * (v - k @ kept if delta else v)
    state = kept + k.transpose(-1, -2) @ written
    return scale * (q @ state).transpose(1, 2), state
