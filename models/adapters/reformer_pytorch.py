"""reformer-pytorch: LSH attention with shared queries and keys, and the models around it."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapter, GivenDraws, NotExportableError, qualified_name, weight_alone
from effexport.models.layers import causal_mask, keep_from_mask, merge_heads, split_heads
from effexport.models.validation import SpecError
from effexport.models.variants.local.layer import window_attention
from effexport.models.variants.lsh import LSHSpec
from effexport.models.variants.lsh.layer import LSHAttention, scaled_unit_keys

# The logit of a token's own key, a constant of the package.
SELF_LOGIT = -5e4
ATTENTION = "reformer_pytorch.reformer_pytorch.LSHSelfAttention"
CHUNK = "reformer_pytorch.reformer_pytorch.Chunk"
# An attribute of copies of a layer that a model calls several times: which of the calls this one is for, and how many.
TURN = "effexport_turn"


def self_attention(layer: Any, seq_len: int) -> nn.Module:
    """Ours for an LSHSelfAttention."""
    return FullSelfAttention(layer) if layer.use_full_attn else SelfAttention(layer, seq_len)


class SelfAttention(nn.Module):
    """LSHSelfAttention: our LSH layer, and attention of all pairs for at most `full_attn_thres` tokens.

    The original draws rotations in every call; these are drawn once, from a seed that depends on the weights, so that
    the layers of a model get different ones. A length that is not a multiple of 2 · bucket_size, which the original
    refuses, is treated as its Autopadder does.
    """

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        self.full_attn_thres: int = layer.full_attn_thres
        self.turn: tuple[int, int] = getattr(layer, TURN, (0, 1))
        self.attention = LSHAttention(spec_from_layer(layer, seq_len).of_layer(self.turn[0]))
        self.attention.query_key.weight = parameter(weight_alone(layer, "toqk"))
        # heads that share one value projection become heads with equal ones
        self.attention.value.weight = parameter(weight_alone(layer, "tov").repeat(layer.v_head_repeats, 1))
        self.attention.out = copy.deepcopy(layer.to_out)

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        input_mask: Tensor | None = None,
        input_attn_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        pos_emb: Tensor | None = None,
        unpadded_len: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """x [batch, seq, dim]; input_mask boolean [batch, seq], true = keep; pos_emb [1, seq, head_dim]: sines and
        cosines of rotary positions. unpadded_len: [1], of ours: how many tokens there were before padding."""
        refuse(keys=keys, input_attn_mask=input_attn_mask, context_mask=context_mask)
        attention, keep = self.attention, keep_from_mask(x, input_mask)
        qk, v = attention.project(x)
        angles = None
        if pos_emb is not None:
            sines, cosines = pos_emb[0].chunk(2, dim=-1)
            angles = sines, cosines
        if self.full_attn_thres == 0:
            context = attention.mix((qk, v), keep, angles)
        else:
            is_short = (length_of(x) if unpadded_len is None else unpadded_len) <= self.full_attn_thres
            # what is not hashed has one bucket, in all runtimes
            context = attention.mix((torch.where(is_short, 0.0, qk), v), keep, angles)
            context = torch.where(is_short, self.of_short_sequences(qk, v, keep), context)
        projected: Tensor = attention.out(merge_heads(context))
        return projected

    def of_short_sequences(self, qk: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        """Attention of all pairs for at most `full_attn_thres` tokens; meaningless for longer sequences."""
        limit, seq_len = self.full_attn_thres, keep.shape[1]
        first_qk, first_v = (F.pad(x, (0, 0, 0, limit)).narrow(2, 0, limit) for x in (qk, v))
        first_keep = F.pad(keep, (0, limit)).narrow(1, 0, limit)
        context = attend_to_all(first_qk, first_v, first_keep, self.attention.spec.causal)
        return torch.cat([context, torch.zeros_like(v)], dim=2).narrow(2, 0, seq_len)

    @contextmanager
    def frozen(self, original: Any, buckets: dict[str, Tensor]) -> Iterator[None]:
        """See DrawsNumbers. The original does not hash short sequences: their tokens all get bucket 0."""
        spec = self.attention.spec
        draws = OurRotations(self.attention)
        found: list[Tensor] = []  # the original may take the heads of a batch in several parts
        turn, turns = self.turn
        calls = 0

        def is_ours() -> bool:
            return (calls - 1) % turns == turn

        def begin(module: nn.Module, args: object) -> None:
            nonlocal calls
            calls += 1
            found.clear()
            draws.rows = 0

        def enter(module: nn.Module, args: object) -> None:
            if is_ours():
                draws.__enter__()  # type: ignore[no-untyped-call]

        def leave(module: nn.Module, args: tuple[Tensor, ...], result: Any) -> None:
            if is_ours():
                draws.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                if result is not None:  # None: an error passes through
                    found.append(layout_of_ours(result[2], spec, seq_len=args[0].shape[1]))

        def attend_in_full(module: nn.Module, args: tuple[Tensor, ...], result: object) -> None:
            heads, seq_len, _ = args[0].shape
            padded_len = self.attention.hash.chunk_count(seq_len) * spec.chunk_length
            found.append(torch.zeros(heads * spec.num_hashes, padded_len, dtype=torch.int32))

        def end(module: nn.Module, args: object, result: object) -> None:
            if is_ours():
                buckets["attention.hash"] = torch.cat(found)

        with ExitStack() as stack:
            for handle in (
                original.register_forward_pre_hook(begin),
                original.lsh_attn.register_forward_pre_hook(enter),
                original.lsh_attn.register_forward_hook(leave, always_call=True),
                original.full_attn.register_forward_hook(attend_in_full),
                original.register_forward_hook(end),
            ):
                stack.callback(handle.remove)
            yield


class FullSelfAttention(nn.Module):
    """LSHSelfAttention with `use_full_attn`: attention of all pairs with shared queries and keys, without hashing and
    without positions. It has no operator of ours, but the original's own code does not export."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        check_options(layer)
        self.heads, self.causal, self.repeats = layer.heads, layer.full_attn.causal, layer.v_head_repeats
        self.toqk, self.tov, self.to_out = (copy.deepcopy(part) for part in (layer.toqk, layer.tov, layer.to_out))

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        input_mask: Tensor | None = None,
        input_attn_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """As `SelfAttention.forward`."""
        refuse(keys=keys, input_attn_mask=input_attn_mask, context_mask=context_mask)
        qk = split_heads(self.toqk(x), self.heads)
        v = split_heads(self.tov(x).repeat(1, 1, self.repeats), self.heads)
        projected: Tensor = self.to_out(merge_heads(attend_to_all(qk, v, keep_from_mask(x, input_mask), self.causal)))
        return projected


def attend_to_all(qk: Tensor, v: Tensor, keep: Tensor, causal: bool) -> Tensor:
    """The original's FullQKAttention over tokens that are not padding: [batch, heads, seq, head_dim], as v."""
    visible = keep[:, None, None, :]
    if causal:
        visible = visible & causal_mask(qk.shape[2], keep.device)
    position = torch.arange(qk.shape[2], device=keep.device)
    is_self = position[:, None] == position
    context, _ = window_attention(qk, scaled_unit_keys(qk), v, visible, is_self, self_logit=SELF_LOGIT)
    return context


def refuse(**arguments: object) -> None:
    """Raise SpecError for arguments of LSHSelfAttention that ours does not take."""
    for name, value in arguments.items():
        if value is not None:
            raise SpecError(f"LSHSelfAttention got {name}, which has no counterpart; call it without {name}")


class OurRotations(GivenDraws):
    """While it is active, torch.randn returns the rotations of a layer of ours, as many as asked for."""

    def __init__(self, attention: LSHAttention) -> None:
        super().__init__()
        self.attention = attention
        self.rows = 0  # of the heads of a batch, in a row: how many have got theirs

    def draw(self, shape: Sequence[int]) -> Tensor:
        count, _, _, half = shape
        rotations = self.attention.hash.rotations
        if half > rotations.shape[3]:
            limit = self.attention.spec.max_seq_len
            raise SpecError(f"the sequence has more than {limit} tokens, for which rotations were drawn; shorten it")
        heads = (torch.arange(count, device=rotations.device) + self.rows) % rotations.shape[0]
        self.rows += count
        return rotations[heads, :, :, :half]


def layout_of_ours(buckets: Tensor, spec: LSHSpec, seq_len: int) -> Tensor:
    """[heads of a batch, rounds · seq], numbered on from round to round → int32 [heads of a batch · rounds, seq]."""
    by_round: Tensor = buckets.unflatten(1, (spec.num_hashes, seq_len))
    first = seq_len // spec.chunk_length * torch.arange(spec.num_hashes, device=buckets.device)
    return (by_round - first[:, None]).flatten(0, 1).to(torch.int32)


class Autopadder(nn.Module):
    """The original's Autopadder, without its decision by the length: it pads always, to a multiple of 2 · bucket_size
    with zeros, and hides what it has added."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.net = layer.net
        self.multiple = 2 * layer.bucket_size
        self.full_attn_thres: int = layer.full_attn_thres
        self.takes_tokens: bool = layer.pad_dim == -1

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """x: tokens [batch, seq] or vectors [batch, seq, dim]. kwargs: of the layer inside."""
        batch, seq_len = x.shape[:2]
        pad = (seq_len + self.multiple - 1) // self.multiple * self.multiple - seq_len
        keep = kwargs.pop("input_mask", None)
        if keep is None:
            keep = torch.ones(batch, seq_len, dtype=torch.bool, device=x.device)
        if self.full_attn_thres > 0:
            kwargs["unpadded_len"] = length_of(x)
        padded = F.pad(x, (0, pad) if self.takes_tokens else (0, 0, 0, pad))
        out: Tensor = self.net(padded, input_mask=F.pad(keep, (0, pad)), **kwargs)
        # by index: a slice of symbolic length is traced as the lesser of two lengths
        return out.index_select(1, torch.arange(seq_len, device=x.device))


class ReversibleSequence(nn.Module):
    """The original's blocks, without its autograd function and with the feed-forward layers in one piece."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.irrev_blocks = nn.ModuleList()
        uses: dict[int, list[nn.Module]] = {}
        for block in layer.irrev_blocks:
            # one by one, so that a layer of several blocks becomes several: each of its calls has rotations of its own
            own = copy.deepcopy(block)
            for theirs, ours in zip(block.modules(), own.modules(), strict=True):
                if qualified_name(ours) == CHUNK:
                    ours.chunks = 1
                elif qualified_name(ours) == ATTENTION:
                    uses.setdefault(id(theirs), []).append(ours)
            self.irrev_blocks.append(own)
        for copies in uses.values():
            for turn, ours in enumerate(copies):
                setattr(ours, TURN, (turn, len(copies)))

    def forward(self, x: Tensor, arg_route: tuple[bool, bool] = (True, False), **kwargs: Any) -> Tensor:
        """x [batch, seq, 2 · dim]: both streams. arg_route: whether attention, and feed-forward layers, get kwargs."""
        to_attention, to_feed_forward = (kwargs if routed else {} for routed in arg_route)
        for block in self.irrev_blocks:
            x = block(x, to_attention, to_feed_forward)
        return x


def length_of(x: Tensor) -> Tensor:
    """[1]: the length of x [batch, seq, …] as a tensor, so that a graph decides by it."""
    return torch.arange(x.shape[1], device=x.device)[-1:] + 1


def parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().clone())


def check_options(layer: Any) -> None:
    """Raise NotExportableError for options of an LSHSelfAttention that ours has not. The layer cannot stay as it is:
    it draws random numbers."""
    options = {
        "n_local_attn_heads": (layer.n_local_attn_heads, 0, "heads that attend to their neighbours"),
        "num_mem_kv": (layer.num_mem_kv, 0, "learned keys beside those of the tokens"),
        "rehash_each_round": (layer.lsh_attn._rehash_each_round, True, "rounds that share one rotation"),
    }
    for name, (value, expected, meaning) in options.items():
        if value != expected:
            raise NotExportableError(f"{name} is {value}, and {meaning} have no counterpart; expected {expected}")


def spec_from_layer(layer: Any, seq_len: int) -> LSHSpec:
    """The spec of an LSHSelfAttention. Raises NotExportableError for options that no spec has."""
    check_options(layer)
    inner = layer.lsh_attn
    weights = layer.toqk.weight.detach()
    return LSHSpec(
        dim=layer.dim,
        heads=layer.heads,
        head_dim=layer.dim_head,
        seq_len=seq_len,
        causal=inner.causal,
        chunk_length=inner.bucket_size,
        circular=True,
        num_hashes=inner.n_hashes,
        hash_seed=zlib.crc32(weights.cpu().double().numpy().tobytes()),
        mask_constants="hf",
        buckets_by_length=True,
        rotations_per_head=inner._random_rotations_per_head,
        pad_bucket="hashed",
        scaled_keys=True,
        self_logit=SELF_LOGIT,
        attend_across_buckets=inner._attend_across_buckets,
        allow_duplicates=inner._allow_duplicate_attention,
    )


ADAPTER = Adapter(
    package="reformer-pytorch",
    tested=("1.4.4",),
    projections=("toqk", "tov", "to_out"),
    replacements={
        ATTENTION: self_attention,
        "reformer_pytorch.autopadder.Autopadder": lambda layer, seq_len: Autopadder(layer),
        "reformer_pytorch.reversible.ReversibleSequence": lambda layer, seq_len: ReversibleSequence(layer),
    },
)
