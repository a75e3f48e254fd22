"""transformers: attention in bands inside other models. Longformer, LED's encoder, BigBird and LongT5.

Their models pad to whole windows and decide by the values of a mask, which a graph cannot. So the parts that do this
have replacements too.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapter, NotExportableError, NotReplaceableError, refuse, shallow_copy
from effexport.models.adapters.local_attention import BandedFunction
from effexport.models.adapters.transformers_layers import sizes, take_projections
from effexport.models.checkpoints.big_bird import BigBirdAttention
from effexport.models.checkpoints.big_bird_spec import BigBirdAttentionSpec
from effexport.models.checkpoints.longformer import BandedAttentionLayer
from effexport.models.checkpoints.longformer_spec import GLOBAL_PROJECTIONS, BandedSpec
from effexport.models.layers import keep_from_mask, merge_heads, split_heads
from effexport.models.validation import SpecError
from effexport.plugins.banded_attention.op import Band
from effexport.plugins.masked_attention.op import HIDES

# BigBird's name for attention of all tokens to all.
FULL = "original_full"


class BandedSelfAttention(nn.Module):
    """Attention of Longformer and of LED's encoder, before the output projection, at any length."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        reach = layer.one_sided_attn_window_size
        spec = BandedSpec(dim=layer.embed_dim, heads=layer.num_heads, seq_len=seq_len, reach=reach)
        self.attention = BandedAttentionLayer(spec)
        take_projections(self.attention, layer, ("query", "key", "value", *GLOBAL_PROJECTIONS))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        layer_head_mask: Tensor | None = None,
        is_index_masked: Tensor | None = None,
        is_index_global_attn: Tensor | None = None,
        is_global_attn: bool | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor]:
        """hidden_states [batch, seq, dim]; attention_mask [batch, seq]: below 0 for padding, above 0 for global tokens.
        Returns the context [batch, seq, dim], as a tuple of one."""
        end_at(layer_head_mask=layer_head_mask, output_attentions=output_attentions)
        return (self.attention(hidden_states, attention_mask >= 0, attention_mask > 0),)


def end_at(**given: object) -> None:
    """Raise NotExportableError for an argument that ours does not have; the original asks a mask for its values."""
    try:
        refuse(**given)
    except SpecError as error:
        raise NotExportableError(f"{error}, as the original cannot be exported either") from error


class StackOutput(NamedTuple):
    """As in transformers, without attention weights."""

    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: None = None
    global_attentions: None = None


def stacked(
    layers: nn.ModuleList,
    hidden_states: Tensor,
    attention_mask: Tensor,
    with_hidden_states: bool | None,
    return_dict: bool | None,
    stop: int | None = None,
) -> StackOutput | tuple[Any, ...]:
    """Layers of Longformer or LED one after the other. attention_mask: as of `BandedSelfAttention`. stop: where padding
    begins."""
    states = [hidden_states]
    for layer in layers:
        # which LED needs in transformers 4, and no layer knows in 5
        no_mask = {name: None for name in inspect.signature(layer.forward).parameters if name == "layer_head_mask"}
        states.append(layer(states[-1], attention_mask=attention_mask, **no_mask)[0])
    if stop is not None:
        states = [state[:, :stop] for state in states]
    output = StackOutput(states[-1], tuple(states) if with_hidden_states else None)
    return output if return_dict else tuple(part for part in output if part is not None)


class LongformerStack(nn.Module):
    """LongformerEncoder, without its question if any token of the batch is global."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        self.layer = layer.layer

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        head_mask: Tensor | None = None,
        padding_len: int = 0,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> StackOutput | tuple[Any, ...]:
        """hidden_states [batch, seq, dim]; attention_mask: as of `BandedSelfAttention`."""
        end_at(head_mask=head_mask, output_attentions=output_attentions)
        stop = hidden_states.shape[1] - padding_len if padding_len else None  # of a derived model, which still pads
        return stacked(self.layer, hidden_states, attention_mask, output_hidden_states, return_dict, stop)


class LEDStack(nn.Module):
    """LEDEncoder, without padding to whole windows, and without its question if any token of the batch is global."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        self.config = layer.config
        self.embed_tokens, self.embed_positions = layer.embed_tokens, layer.embed_positions
        self.layernorm_embedding, self.layers = layer.layernorm_embedding, layer.layers

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> StackOutput | tuple[Any, ...]:
        """input_ids [batch, seq], or inputs_embeds [batch, seq, dim]; masks [batch, seq]: 1 = keep, 1 = global."""
        given = {
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
            "return_dict": return_dict,
        }
        options = {
            name: getattr(self.config, "use_return_dict" if name == "return_dict" else name) if value is None else value
            for name, value in given.items()
        }
        end_at(head_mask=head_mask, output_attentions=options["output_attentions"])
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected input_ids or inputs_embeds")
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        shape = embedded.shape[:-1]
        seen = torch.ones(shape, device=embedded.device) if attention_mask is None else attention_mask
        if global_attention_mask is not None:
            seen = seen * (global_attention_mask + 1)
        hidden_states = self.layernorm_embedding(embedded + self.embed_positions(shape))
        return stacked(self.layers, hidden_states, seen - 1, options["output_hidden_states"], options["return_dict"])


class BlockAttention(nn.Module):
    """BigBirdAttention of any length. Short sequences are full attention, as BigBirdModel has it."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        inner = layer.self
        spec = BigBirdAttentionSpec(
            **sizes(inner, seq_len),
            bias=any(one.bias is not None for one in (inner.query, inner.key, inner.value)),
            block_size=inner.block_size,
            repeats=1 + inner.num_random_blocks,
            full_len=(5 + 2 * inner.num_random_blocks) * inner.block_size,
        )
        self.attention = BigBirdAttention(spec)
        take_projections(self.attention, inner, ("query", "key", "value"))
        self.output = layer.output

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        to_mask: Tensor | None = None,
        **other_masks: Tensor | None,
    ) -> tuple[Tensor, None]:
        """hidden_states [batch, seq, dim]; attention_mask [batch, 1, 1 or seq, seq], the same for each query: True or 0
        for a kept token, else False or the lowest number; or to_mask [batch, 1, 1, seq], 1 for a kept token."""
        refuse(
            head_mask=head_mask,
            encoder_hidden_states=encoder_hidden_states,
            past_key_values=past_key_values,
            output_attentions=output_attentions,
        )
        if attention_mask is not None:
            row = attention_mask[:, 0, 0]
            keep = row if row.dtype == torch.bool else row > HIDES
        else:
            keep = keep_from_mask(hidden_states, None if to_mask is None else to_mask[:, 0, 0])
        return self.output(self.attention(hidden_states, keep), hidden_states), None


def big_bird_attention(layer: Any, seq_len: int) -> Any:
    """Ours for a layer that attends to blocks; one of full attention stays."""
    return layer if layer.attention_type == FULL else BlockAttention(layer, seq_len)


def big_bird(layer: Any, seq_len: int) -> Any:
    """BigBirdModel, without padding to whole blocks, and without a choice by the length, which its layers make."""
    if layer.attention_type == FULL:
        return layer
    if layer.config.is_decoder:
        raise NotReplaceableError("it is a decoder")
    made = shallow_copy(layer)
    made.attention_type = FULL
    return made


class DistanceBiasedAttention(nn.Module):
    """LongT5LocalAttention at any length: tokens near each other, with biases by their distance, which the first layer
    has and passes on."""

    def __init__(self, layer: Any, seq_len: int) -> None:
        super().__init__()
        if layer.is_decoder:
            raise NotReplaceableError("it is a decoder")
        self.q, self.k, self.v, self.o = layer.q, layer.k, layer.v, layer.o
        self.heads: int = layer.n_heads
        self.block_len: int = layer.block_len
        self.band = Band(1.0, layer.local_radius, layer.local_radius)
        self.attention = BandedFunction()
        self.bias: nn.Parameter | None = None
        if layer.has_relative_attention_bias:
            reach = layer.local_radius
            buckets = layer._relative_position_bucket(
                torch.arange(-reach, reach + 1),
                num_buckets=layer.relative_attention_num_buckets,
                max_distance=layer.relative_attention_max_distance,
            )
            weight = layer.relative_attention_bias.weight.detach()
            self.bias = nn.Parameter(weight[buckets].T.contiguous().clone())

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        layer_head_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [batch, seq, dim]; mask boolean [batch, 1, blocks, block_len, 3 · block_len]: pairs of tokens,
        as LongT5Stack makes it; position_bias [heads, offsets]: what another such layer returned, or as the original
        returns it.

        Returns the projected context [batch, seq, dim] and the biases.
        """
        refuse(layer_head_mask=layer_head_mask, output_attentions=output_attentions)
        if mask is None or mask.dim() != 5:
            raise NotReplaceableError("it is called without the mask that LongT5Stack makes")
        bias: Tensor | None = self.bias
        if position_bias is not None:
            bias = position_bias if position_bias.dim() == 2 else self.by_distance(position_bias)
        # a token that is kept sees itself, in the middle one of three blocks
        own = mask[:, 0, :, :, self.block_len : 2 * self.block_len].any(dim=-2).flatten(1)
        keep = own.index_select(1, torch.arange(hidden_states.shape[1], device=own.device))
        q, k, v = (split_heads(linear(hidden_states), self.heads) for linear in (self.q, self.k, self.v))
        context = self.attention(q, k, v, keep, self.band, bias)
        return self.o(merge_heads(context)), bias

    def by_distance(self, position_bias: Tensor) -> Tensor:
        """[batch, blocks, heads, block_len, 3 · block_len] with a mask added → [heads, offsets]: of each distance, the
        bias of pairs that are not masked."""
        query = torch.arange(self.block_len, device=position_bias.device)[:, None]
        offset = torch.arange(2 * self.block_len - 1, device=position_bias.device)
        return position_bias[..., query, query + 1 + offset].amax(dim=(0, 1, 3))


def transient_global(layer: Any, seq_len: int) -> nn.Module:
    raise NotReplaceableError(
        f"its tokens also see sums of {layer.global_block_size} neighbouring tokens, with biases by their distance, "
        "which no operator has"
    )


def unpadded_longformer(layer: Any, seq_len: int) -> Any:
    """LongformerModel, without padding to whole windows."""
    made = shallow_copy(layer)
    made._pad_to_window_size = as_given
    return made


def as_given(*, pad_token_id: int | None, **given: Tensor | None) -> tuple[Any, ...]:
    """In the place of a function that pads: no padding, and all tensors as they are."""
    return 0, *given.values()


BIG_BIRD = "transformers.models.big_bird.modeling_big_bird"
LONGFORMER = "transformers.models.longformer.modeling_longformer"
LED = "transformers.models.led.modeling_led"
LONG_T5 = "transformers.models.longt5.modeling_longt5"
ADAPTER = Adapter(
    package="transformers",
    tested=("4.57", "5.23"),
    projections=(
        *("query", "key", "value", *GLOBAL_PROJECTIONS),
        *("self.query", "self.key", "self.value"),
        *("q", "k", "v", "o"),
    ),
    replacements={
        f"{BIG_BIRD}.BigBirdAttention": big_bird_attention,
        f"{BIG_BIRD}.BigBirdModel": big_bird,
        f"{LONGFORMER}.LongformerSelfAttention": BandedSelfAttention,
        f"{LONGFORMER}.LongformerEncoder": LongformerStack,
        f"{LONGFORMER}.LongformerModel": unpadded_longformer,
        f"{LED}.LEDEncoderSelfAttention": BandedSelfAttention,
        f"{LED}.LEDEncoder": LEDStack,
        f"{LONG_T5}.LongT5LocalAttention": DistanceBiasedAttention,
        f"{LONG_T5}.LongT5TransientGlobalAttention": transient_global,
    },
)
