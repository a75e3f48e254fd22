"""reformer-pytorch: LSH attention with shared queries and keys, and the models around it."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from effexport.models.adapters.adapter import Adapter, NotExportableError, NotReplaceableError, qualified_name
from effexport.models.layers import keep_from_mask, merge_heads
from effexport.models.look_around import window_attention
from effexport.models.lsh import LSHAttention, scaled_unit_keys
from effexport.models.spec import LSHSpec
from effexport.models.validation import SpecError

# The logit of a token's own key, a constant of the package.
SELF_LOGIT = -5e4


class SelfAttention(nn.Module):
    """LSHSelfAttention: our LSH layer, and attention of all pairs for at most `full_attn_thres` tokens.

    The original draws rotations in every call; these are drawn once, from a seed that depends on the weights, so that
    the layers of a model get different ones. A length that is not a multiple of 2 · bucket_size, which the original
    refuses, is treated as its Autopadder does.
    """

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        self.full_attn_thres: int = layer.full_attn_thres
        self.attention = LSHAttention(spec_from_layer(layer, seq_len))
        self.attention.query_key.weight = parameter(layer.toqk.weight)
        # heads that share one value projection become heads with equal ones
        self.attention.value.weight = parameter(layer.tov.weight.repeat(layer.v_head_repeats, 1))
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
        given = {"keys": keys, "input_attn_mask": input_attn_mask, "context_mask": context_mask}
        for name, value in given.items():
            if value is not None:
                raise SpecError(f"LSHSelfAttention got {name}, which has no counterpart; call it without {name}")
        attention, keep = self.attention, keep_from_mask(x, input_mask)
        projected = attention.project(x)
        sines_cosines = None if pos_emb is None else pos_emb[0].chunk(2, dim=-1)
        context = attention.mix(projected, keep, sines_cosines)
        if self.full_attn_thres > 0:
            if unpadded_len is None:
                unpadded_len = length_of(x)
            context = torch.where(unpadded_len <= self.full_attn_thres, self.attend_to_all(projected, keep), context)
        return attention.out(merge_heads(context))

    def attend_to_all(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        """What the original computes for short sequences, without positions; meaningless for longer ones."""
        limit, seq_len = self.full_attn_thres, keep.shape[1]
        qk, v = (F.pad(x, (0, 0, 0, limit)).narrow(2, 0, limit) for x in projected)
        keep = F.pad(keep, (0, limit)).narrow(1, 0, limit)
        visible = keep[:, None, None, :]
        if self.attention.spec.causal:
            visible = visible & torch.ones(limit, limit, dtype=torch.bool, device=keep.device).tril()
        is_self = torch.eye(limit, dtype=torch.bool, device=keep.device)
        context, _ = window_attention(qk, scaled_unit_keys(qk), v, visible, is_self, self_logit=SELF_LOGIT)
        return torch.cat([context, torch.zeros_like(projected[1])], dim=2).narrow(2, 0, seq_len)

    @contextmanager
    def frozen(self, original: Any, buckets: dict[str, Tensor]) -> Iterator[None]:
        """See DrawsNumbers. The original does not hash short sequences; then the buckets are those of our hash."""
        attention = self.attention
        draws = OurRotations(attention)
        hashed: list[Tensor] = []  # the original may take the heads of a batch in several parts
        unhashed: list[Tensor] = []

        def begin(module: nn.Module, args: object) -> None:
            hashed.clear()
            unhashed.clear()
            draws.rows = 0

        def enter(module: nn.Module, args: object) -> None:
            draws.__enter__()

        def leave(module: nn.Module, args: tuple[Tensor, ...], result: Any) -> None:
            draws.__exit__(None, None, None)
            if result is not None:  # None: an error passes through
                hashed.append(layout_of_ours(result[2], attention.spec, seq_len=args[0].shape[1]))

        def attend_to_all(module: nn.Module, args: tuple[Tensor, ...], result: object) -> None:
            unhashed.append(args[0])

        def end(module: nn.Module, args: object, result: object) -> None:
            if unhashed:
                qk = torch.cat(unhashed).unflatten(0, (-1, attention.spec.heads))
                hashed.append(attention.hash(qk, torch.ones(qk.shape[0], qk.shape[2], dtype=torch.bool)))
            buckets["attention.hash"] = torch.cat(hashed)

        with ExitStack() as stack:
            for handle in (
                original.register_forward_pre_hook(begin),
                original.lsh_attn.register_forward_pre_hook(enter),
                original.lsh_attn.register_forward_hook(leave, always_call=True),
                original.full_attn.register_forward_hook(attend_to_all),
                original.register_forward_hook(end),
            ):
                stack.callback(handle.remove)
            yield


class OurRotations(TorchFunctionMode):
    """While it is active, torch.randn returns the rotations of a layer of ours, as many as asked for."""

    def __init__(self, attention: LSHAttention) -> None:
        super().__init__()
        self.attention = attention
        self.rows = 0  # of the heads of a batch, in a row: how many have got theirs

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.randn:
            return func(*args, **(kwargs or {}))
        count, _, _, half = args[0]
        rotations = self.attention.hash.rotations
        if half > rotations.shape[3]:
            limit = self.attention.spec.max_seq_len
            raise SpecError(f"the sequence has more than {limit} tokens, for which rotations were drawn; shorten it")
        heads = (torch.arange(count, device=rotations.device) + self.rows) % rotations.shape[0]
        self.rows += count
        return rotations[heads, :, :, :half].to(**(kwargs or {}))


def layout_of_ours(buckets: Tensor, spec: LSHSpec, seq_len: int) -> Tensor:
    """[heads of a batch, rounds · seq], numbered on from round to round → int32 [heads of a batch · rounds, seq]."""
    by_round = buckets.unflatten(1, (spec.num_hashes, seq_len))
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
        self.irrev_blocks = copy.deepcopy(layer.irrev_blocks)
        for module in self.irrev_blocks.modules():
            if qualified_name(module) == "reformer_pytorch.reformer_pytorch.Chunk":
                module.chunks = 1  # type: ignore[assignment]

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


def spec_from_layer(layer: Any, seq_len: int) -> LSHSpec:
    """The spec of an LSHSelfAttention. Raises NotExportableError for options that no spec has: the layer draws random
    numbers, so it cannot stay as it is."""
    inner = layer.lsh_attn
    options = {
        "n_local_attn_heads": (layer.n_local_attn_heads, 0, "heads that attend to neighbours in the sequence"),
        "num_mem_kv": (layer.num_mem_kv, 0, "learned keys behind the sequence"),
        "rehash_each_round": (inner._rehash_each_round, True, "rounds that share one rotation"),
    }
    for name, (value, expected, meaning) in options.items():
        if value != expected:
            raise NotExportableError(f"{name} is {value}, and {meaning} have no counterpart; expected {expected}")
    if layer.use_full_attn:
        raise NotReplaceableError("use_full_attn is set, which is attention of all pairs, without hashing")
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
    replacements={
        "reformer_pytorch.reformer_pytorch.LSHSelfAttention": SelfAttention,
        "reformer_pytorch.autopadder.Autopadder": lambda layer, seq_len: Autopadder(layer),
        "reformer_pytorch.reversible.ReversibleSequence": lambda layer, seq_len: ReversibleSequence(layer),
    },
)
