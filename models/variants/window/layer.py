"""Window attention with global tokens (Beltagy et al., 2020, arXiv 2004.05150, section 3.1). All tokens have the same
projections."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.models.layers import MultiHeadAttention, State, masked_softmax, merge_heads
from effexport.models.validation import require
from effexport.models.variants.contract import VariantContract
from effexport.models.variants.window import WindowSpec
from effexport.plugins.banded_attention.op import Band, attend_in_band


class WindowAttention(MultiHeadAttention):
    """out_i = Σ_j softmax_j(q_i·k_j / √d) v_j over the kept tokens j near i and the first ones, which see all.

    O(seq · window · dim) time and memory. A token that sees none is 0.
    """

    spec: WindowSpec

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        q, k, v = projected
        spec = self.spec
        if self.fused:
            count = spec.global_tokens
            is_global = (torch.arange(q.shape[2], device=q.device) < count).expand_as(keep) if count else None
            scale = 1 / math.sqrt(q.shape[-1])
            band = Band(scale, spec.left, spec.right, causal=spec.causal, most_globals=count)
            return attend_in_band((q, k, v), keep, band, fused=True, is_global=is_global)
        context = banded(q, k, v, keep, spec)
        if not spec.global_tokens:
            return context
        # the first tokens of a sequence that may be shorter
        first = F.pad(q, (0, 0, 0, spec.global_tokens)).narrow(2, 0, spec.global_tokens)
        position = torch.arange(q.shape[2], device=q.device)
        visible = keep[:, None, None, :]
        if spec.causal:
            visible = visible & (position <= torch.arange(spec.global_tokens, device=q.device)[:, None])
        seen = attend(first, k, v, visible)
        seen = F.pad(seen, (0, 0, 0, q.shape[2])).narrow(2, 0, q.shape[2])
        return torch.where((position < spec.global_tokens)[:, None], seen, context)

    def initial_state(self, batch: int) -> State:
        """The state before the first token: the last `window` keys and values, [batch, heads, window, head_dim], and
        which of them exist, [batch, window].

        Raises SpecError with global tokens: the state would also hold the first ones.
        """
        spec, device = self.spec, self.out.weight.device
        require(not spec.global_tokens, f"global_tokens {spec.global_tokens} has no decode step; use global_tokens 0")
        rows = (batch, spec.heads, spec.window, spec.head_size)
        return {
            "k": torch.zeros(rows, device=device),
            "v": torch.zeros(rows, device=device),
            "kept": torch.zeros(batch, spec.window, device=device),
        }

    def step(self, hidden_states: Tensor, state: State) -> tuple[Tensor, State]:
        """One token of the causal form: hidden_states [batch, 1, dim] → [batch, 1, dim] and the next state."""
        q, k, v = (x.float() for x in self.project(hidden_states))
        following = {
            "k": torch.cat([state["k"][:, :, 1:], k], dim=2),
            "v": torch.cat([state["v"][:, :, 1:], v], dim=2),
            "kept": torch.cat([state["kept"][:, 1:], torch.ones_like(state["kept"][:, :1])], dim=1),
        }
        context = attend(q, following["k"], following["v"], (following["kept"] > 0)[:, None, None])
        return self.out(merge_heads(context).to(hidden_states.dtype)), following

    def prefill(self, hidden_states: Tensor, keep: Tensor, state: State) -> tuple[Tensor, State]:
        """As `AttentionLayer.prefill`; distances of tokens in one call are those of their columns."""
        spec, seq_len = self.spec, hidden_states.shape[1]
        q, k, v = (x.float() for x in self.project(hidden_states))
        hidden = ~keep[:, None, :, None]
        k = torch.cat([state["k"], k.masked_fill(hidden, 0)], dim=2)
        v = torch.cat([state["v"], v.masked_fill(hidden, 0)], dim=2)
        kept = torch.cat([state["kept"], keep.float()], dim=1)
        context = banded(F.pad(q, (0, 0, spec.window, 0)), k, v, kept > 0, spec).narrow(2, spec.window, seq_len)
        # the last tokens before the end of each sample, which is one past its last kept token
        column = torch.arange(1, seq_len + 1, device=keep.device)
        end = torch.where(keep, column, 0).amax(dim=1, keepdim=True)
        last = end + torch.arange(spec.window, device=keep.device)
        last_rows = last[:, None, :, None].expand(-1, *state["k"].shape[1:])
        following = {"k": k.gather(2, last_rows), "v": v.gather(2, last_rows), "kept": kept.gather(1, last)}
        return self.out(merge_heads(context).to(hidden_states.dtype)), following


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention over the visible keys: zeros for a query that sees none.

    q […, n, d], k […, m, d], v […, m, e]; visible: boolean, broadcastable to [..., n, m]. Returns […, n, e].
    Queries and keys are both scaled by d^(-1/4), so that half-precision logits do not overflow first.
    """
    divisor = math.sqrt(math.sqrt(q.shape[-1]))
    weights = masked_softmax((q / divisor) @ (k / divisor).transpose(-1, -2), visible)
    return torch.where(visible, weights, 0.0).to(v.dtype) @ v


def banded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, spec: WindowSpec) -> Tensor:
    """Attention of all tokens to those near them and to the first ones, chunk by chunk of `window` queries.

    q, k, v [batch, heads, seq, head_dim]; keep boolean [batch, seq]. Returns the shape of v.
    """
    seq_len, chunk, count = q.shape[2], spec.window, spec.global_tokens
    chunks = (seq_len + chunk - 1) // chunk
    missing = chunks * chunk - seq_len
    column = torch.arange(chunk + spec.left + spec.right, device=q.device)
    place = torch.arange(chunks, device=q.device)[:, None] * chunk + column
    own = torch.arange(chunks * chunk, device=q.device).unflatten(0, (chunks, chunk)).unsqueeze(-1)
    key = (place - spec.left).unsqueeze(1)
    near = (key >= own - spec.left) & (key <= own + spec.right) & (key >= count)
    around = (spec.left, spec.right + missing)
    visible = F.pad(keep, around)[:, place].unsqueeze(2) & near
    k_near, v_near = (F.pad(x, (0, 0, *around))[:, :, place] for x in (k, v))
    if count:
        k_far, v_far = (F.pad(x, (0, 0, 0, count)).narrow(2, 0, count).unsqueeze(2) for x in (k, v))
        k_near, v_near = (
            torch.cat([x, far.expand(*x.shape[:3], count, -1)], dim=3) for x, far in ((k_near, k_far), (v_near, v_far))
        )
        far = torch.arange(count, device=q.device)
        kept = F.pad(keep, (0, count)).narrow(1, 0, count)[:, None, None]
        seen = far <= own if spec.causal else torch.ones_like(far <= own)
        visible = torch.cat([visible, kept & seen], dim=-1)
    queries = torch.unflatten(F.pad(q, (0, 0, 0, missing)), 2, (chunks, chunk))
    context = attend(queries, k_near, v_near, visible.unsqueeze(1))
    return context.flatten(2, 3).narrow(2, 0, seq_len)


@torch.no_grad()
def exact(layer: WindowAttention, x: Tensor, keep: Tensor) -> Tensor:
    """softmax(Q Kᵀ / √d) V in float64, one query at a time over the keys that it sees; 0 where it sees none."""
    spec = layer.spec
    q, k, v = (
        (x.double() @ p.weight.double().T + p.bias.double()).unflatten(-1, (spec.heads, -1)).transpose(1, 2)
        for p in (layer.query, layer.key, layer.value)
    )
    out = torch.zeros_like(q)
    for b, kept in enumerate(keep.tolist()):
        for t in range(x.shape[1]):
            seen = [s for s in range(x.shape[1]) if kept[s] and sees(spec, t, s)]
            logits = (k[b, :, seen] @ q[b, :, t].unsqueeze(-1)).squeeze(-1) / spec.head_size**0.5
            out[b, :, t] = (torch.softmax(logits, dim=-1).unsqueeze(1) @ v[b, :, seen]).squeeze(1)
    return out.transpose(1, 2).flatten(-2)


def sees(spec: WindowSpec, t: int, s: int) -> bool:
    """True if token t sees token s."""
    if spec.causal and s > t:
        return False
    near = t - s < spec.window if spec.causal else abs(t - s) <= spec.window / 2
    return near or min(t, s) < spec.global_tokens


CONTRACT = VariantContract(
    exact=exact,
    limit=1e-5,
    empty_is_zero=False,
    hides_nan=False,
    reason="logits err by 4e-7 of the sums of absolute products that they are, and values have ten times their RMS",
    changed=WindowSpec(dim=96, heads=3, head_dim=16, seq_len=100, bias=False, window=24, global_tokens=2),
    small={"window": 8, "global_tokens": 1},
    forms={
        "no global token": {"global_tokens": 0},
        "several global tokens": {"global_tokens": 5},
        "window of two": {"window": 2},
        "wide window": {"window": 200},
        "odd causal window": {"window": 7, "causal": True, "global_tokens": 0},
        "causal with global tokens": {"causal": True, "global_tokens": 3},
    },
)
