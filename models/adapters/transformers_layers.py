"""transformers: the self-attention of ModernBERT, Nyströmformer and Reformer inside other models.

Those of Nyströmformer and Reformer end before the output projection, which is a layer of its own
(`NystromformerSelfOutput`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import (
    Adapter,
    GivenDraws,
    NotReplaceableError,
    linear_weights,
    refuse,
    weight_alone,
)
from effexport.models.checkpoints.modernbert import ModernBertAttention
from effexport.models.checkpoints.modernbert_spec import ModernBertAttentionSpec
from effexport.models.layers import AttentionLayer, keep_from_mask, merge_heads, split_heads, take_rows
from effexport.models.validation import SpecError
from effexport.models.variants.local import LocalSpec
from effexport.models.variants.local.layer import LocalAttention
from effexport.models.variants.lsh import LSHSpec, automatic_num_buckets
from effexport.models.variants.lsh.layer import LSHAttention
from effexport.models.variants.nystrom import NystromSpec
from effexport.models.variants.nystrom.layer import NystromAttention
from effexport.plugins.masked_attention.op import HIDES


class LSHSelfAttentionOutput(NamedTuple):
    """As in transformers. buckets: transformers keeps them for its cache and for training; None here."""

    hidden_states: Tensor
    attention_probs: tuple[()] = ()
    buckets: None = None


class LocalSelfAttentionOutput(NamedTuple):
    """As in transformers."""

    hidden_states: Tensor
    attention_probs: tuple[()] = ()


class NystromformerSelfAttention(nn.Module):
    """Landmark attention of one length, where padding counts in the means, as in the original."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        self.attention = NystromAttention(nystrom_spec(layer, seq_len))
        take_projections(self.attention, layer, ("query", "key", "value"))
        if self.attention.conv is not None:
            self.attention.conv.weight = nn.Parameter(layer.conv.weight.detach().clone())

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor]:
        """hidden_states [batch, seq, dim]; attention_mask [batch, 1, 1, seq]: 0 for a kept token, else the lowest
        number. Returns the context [batch, seq, inner], as a tuple of one."""
        refuse(output_attentions=output_attentions)
        keep = keep_from_mask(hidden_states, None)
        if attention_mask is not None:
            if attention_mask.dim() != 4 or attention_mask.shape[1] != 1 or attention_mask.shape[2] != 1:
                raise SpecError(
                    f"attention_mask of NystromformerSelfAttention is {list(attention_mask.shape)}; expected "
                    "[batch, 1, 1, seq], as get_extended_attention_mask makes it"
                )
            keep = keep & (attention_mask[:, 0, 0] > HIDES)
        return (self.attention.attend(hidden_states, keep),)


class ModernBertSelfAttention(nn.Module):
    """Attention with rotary positions, over all tokens or in a window. Rows of padding hold no meaning."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        rotary = getattr(layer, "rotary_emb", None)
        frequencies, scaling = getattr(rotary, "inv_freq", None), getattr(rotary, "attention_scaling", 1.0)
        if frequencies is None or scaling != 1 or getattr(rotary, "rope_type", "") in ("dynamic", "longrope"):
            raise NotReplaceableError("its positions are not rotations by fixed frequencies")
        before, after = layer.local_attention
        if before != after:
            raise NotReplaceableError(f"its window is {before} tokens before and {after} after")
        spec = ModernBertAttentionSpec(
            dim=layer.Wqkv.in_features,
            heads=layer.num_heads,
            head_dim=layer.head_dim,
            seq_len=seq_len,
            window=None if before < 0 else before,
        )
        self.attention = ModernBertAttention(spec)
        self.attention.frequencies = frequencies.tolist()
        self.attention.load_state_dict(linear_weights(layer, {"Wqkv": "qkv", "Wo": "out"}))

    def forward(
        self, hidden_states: Tensor, output_attentions: bool = False, **kwargs: Tensor | int | None
    ) -> tuple[Tensor]:
        """hidden_states [batch, seq, dim]; attention_mask [batch, 1, seq, seq], the same for each query: 0 for a kept
        token, else the lowest number; position_ids [1 or batch, seq]. The window is that of the layer."""
        refuse(output_attentions=output_attentions, cu_seqlens=kwargs.get("cu_seqlens"))
        mask, positions = kwargs["attention_mask"], kwargs["position_ids"]
        assert isinstance(mask, Tensor)
        assert isinstance(positions, Tensor)
        if mask.dim() != 4 or mask.shape[1] != 1 or not (torch.compiler.is_exporting() or same_rows(mask)):
            raise SpecError(
                f"attention_mask of ModernBertAttention is {list(mask.shape)}; expected [batch, 1, seq, seq] with "
                "equal rows, as _update_attention_mask makes it"
            )
        projected = self.attention.project_at(hidden_states, positions.unsqueeze(1))
        return (self.attention.out(merge_heads(self.attention.mix(projected, mask[:, 0, 0] > HIDES))),)


def same_rows(mask: Tensor) -> bool:
    return bool((mask == mask[:, :, :1]).all())


class LocalSelfAttention(nn.Module):
    """Attention of chunks to themselves and their neighbours, at any length."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        spec = LocalSpec(
            **sizes(layer, seq_len),
            causal=bool(layer.is_decoder),
            chunk_length=chunk_length(layer, seq_len),
            num_chunks_before=layer.num_chunks_before,
            num_chunks_after=layer.num_chunks_after,
            circular=True,
            bias=False,
        )
        self.attention = LocalAttention(spec)
        take_projections(self.attention, layer, ("query", "key", "value"))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        past_buckets_states: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: object,
    ) -> LocalSelfAttentionOutput:
        """hidden_states [batch, seq, dim]; attention_mask [batch, seq], 1 = keep."""
        refuse(head_mask=head_mask, past_buckets_states=past_buckets_states, output_attentions=output_attentions)
        keep = keep_from_mask(hidden_states, attention_mask)
        return LocalSelfAttentionOutput(self.attention.attend(hidden_states, keep))


class LSHSelfAttention(nn.Module):
    """LSH attention, at any length, with rotations that are drawn once.

    The original draws them in every call, from `hash_seed` if it has one. At most one chunk of tokens is plain
    attention there, in which a token that sees none but itself gets exactly its own value.
    The original takes other lengths than whole chunks if all rounds together are whole chunks. A chunk then holds
    tokens of two rounds, which is not reproduced.
    """

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        self.attention = LSHAttention(lsh_spec(layer, seq_len))
        take_projections(self.attention, layer, ("query_key", "value"))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        num_hashes: int | None = None,
        buckets: Tensor | None = None,
        past_buckets_states: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: object,
    ) -> LSHSelfAttentionOutput:
        """hidden_states [batch, seq, dim]; attention_mask [batch, seq], 1 = keep."""
        refuse(
            head_mask=head_mask,
            num_hashes=num_hashes,
            buckets=buckets,
            past_buckets_states=past_buckets_states,
            output_attentions=output_attentions,
        )
        keep = keep_from_mask(hidden_states, attention_mask)
        context = self.attention.attend(hidden_states, keep)
        alone = self.only_itself(keep)
        # one token of each sample, so it costs little to compute its value again
        row = alone.to(torch.int32).argmax(dim=1)
        row = row + hidden_states.shape[1] * torch.arange(hidden_states.shape[0], device=row.device)
        value = self.attention.value(take_rows(hidden_states.flatten(0, 1), row)).unsqueeze(1)
        return LSHSelfAttentionOutput(torch.where(alone.unsqueeze(-1), value, context))

    def only_itself(self, keep: Tensor) -> Tensor:
        """Boolean [batch, seq]: the token that sees none but itself, in sequences of one chunk."""
        spec = self.attention.spec
        position = torch.arange(keep.shape[1], device=keep.device)
        first = torch.where(keep, position, keep.shape[1]).amin(dim=1, keepdim=True)
        alone = keep & (position == first) & (position[-1:] < spec.chunk_length)
        return alone if spec.causal else alone & (keep.sum(dim=1, keepdim=True) == 1)

    @contextmanager
    def frozen(self, original: Any, buckets: dict[str, Tensor]) -> Iterator[None]:
        """See DrawsNumbers. The original does not hash a single chunk; then the buckets are those of our hash."""
        attention, spec = self.attention, self.attention.spec
        running = ExitStack()

        def enter(layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            seq_len = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).shape[1]
            if seq_len > spec.chunk_length and seq_len % spec.chunk_length:
                raise SpecError(f"{seq_len} tokens are not whole chunks of {spec.chunk_length}, so its rounds overlap")
            running.enter_context(GivenRotations(attention.hash.rotations))

        def leave(layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
            running.close()
            if result is None:  # an error passes through
                return
            given = dict(zip(("hidden_states", "attention_mask"), args, strict=False)) | dict(kwargs)
            keep = keep_from_mask(given["hidden_states"], given.get("attention_mask"))
            if result.buckets is None:
                chosen = attention.hash(split_heads(layer.query_key(given["hidden_states"]), spec.heads), keep)
            else:
                # transformers numbers the buckets on from round to round, and has one for padding only if there is any
                count = spec.total_buckets + int(not keep.all())
                first = count * torch.arange(spec.num_hashes, device=keep.device)
                chosen = (result.buckets - first[:, None]).flatten(0, 2).to(torch.int32)
            buckets["attention.hash"] = chosen

        before = original.hash_seed, original.num_buckets
        factors = spec.bucket_factors
        # without a seed it leaves the generator of the process alone
        original.hash_seed, original.num_buckets = None, factors[0] if len(factors) == 1 else list(factors)
        handles = (
            original.register_forward_pre_hook(enter, with_kwargs=True),
            original.register_forward_hook(leave, with_kwargs=True, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            original.hash_seed, original.num_buckets = before


class GivenRotations(GivenDraws):
    """While it is active, torch.randn returns these rotations."""

    def __init__(self, rotations: Tensor) -> None:
        super().__init__()
        self.rotations = rotations

    def draw(self, shape: Sequence[int]) -> Tensor:
        assert tuple(shape) == tuple(self.rotations.shape)
        return self.rotations


def nystrom_spec(layer: Any, seq_len: int) -> NystromSpec:
    """seq_len: only plain softmax attention, which transformers runs for as many landmarks as tokens, is free in it."""
    segment_means = layer.seq_len
    try:
        return NystromSpec(
            **sizes(layer, seq_len if layer.num_landmarks == segment_means else segment_means),
            num_landmarks=layer.num_landmarks,
            pinv_init="global" if layer.init_option == "original" else "per_head",
            mask_landmarks=False,
            segment_means_seq_len=segment_means,
            conv_kernel_size=layer.conv_kernel_size,
            bias=any(one.bias is not None for one in (layer.query, layer.key, layer.value)),
        )
    except SpecError as error:
        raise NotReplaceableError(str(error)) from error


def lsh_spec(layer: Any, seq_len: int) -> LSHSpec:
    length = chunk_length(layer, seq_len)
    buckets = layer.num_buckets
    if buckets is None:  # the original decides by the first sequence that it sees
        whole = -(-seq_len // length) * length
        buckets = automatic_num_buckets(whole, length, layer.max_position_embeddings)
    return LSHSpec(
        **sizes(layer, seq_len),
        causal=bool(layer.is_decoder),
        chunk_length=length,
        num_chunks_before=layer.num_chunks_before,
        num_chunks_after=layer.num_chunks_after,
        circular=True,
        num_hashes=layer.num_hashes,
        num_buckets=buckets if isinstance(buckets, int) else tuple(buckets),
        # each layer of a model draws its own
        hash_seed=layer.hash_seed if layer.hash_seed is not None else layer.layer_idx or 0,
        mask_constants="hf",
    )


def sizes(layer: Any, seq_len: int) -> dict[str, Any]:
    """The fields that all specs share."""
    projection = getattr(layer, "query", None) or layer.query_key
    heads, head_dim = layer.num_attention_heads, layer.attention_head_size
    return {"dim": projection.in_features, "heads": heads, "head_dim": head_dim, "seq_len": seq_len}


def chunk_length(layer: Any, seq_len: int) -> int:
    """Raises NotReplaceableError for a layer without chunks, which can have neighbours only in theory."""
    if layer.chunk_length is None:
        raise NotReplaceableError("its chunk length is None: all tokens are one chunk, of no fixed length")
    length: int = layer.chunk_length
    return length


def take_projections(ours: AttentionLayer, layer: Any, names: tuple[str, ...]) -> None:
    """Copy the projections of these names, and leave out the one of the output."""
    ours.out = nn.Identity()  # type: ignore[assignment]
    weights = linear_weights(layer, {name: name for name in names})
    known = ours.state_dict()
    for name in weights.keys() - known.keys():
        weight_alone(layer, name.partition(".")[0])
    ours.load_state_dict({name: value for name, value in weights.items() if name in known}, strict=False)


MODERNBERT = "transformers.models.modernbert.modeling_modernbert"
NYSTROMFORMER = "transformers.models.nystromformer.modeling_nystromformer"
REFORMER = "transformers.models.reformer.modeling_reformer"
ADAPTER = Adapter(
    package="transformers",
    tested=("4.57", "5.23"),
    projections=("query", "key", "value", "query_key", "Wqkv", "Wo"),
    replacements={
        f"{MODERNBERT}.ModernBertAttention": ModernBertSelfAttention,
        f"{NYSTROMFORMER}.NystromformerSelfAttention": NystromformerSelfAttention,
        f"{REFORMER}.LocalSelfAttention": LocalSelfAttention,
        f"{REFORMER}.LSHSelfAttention": LSHSelfAttention,
    },
)
