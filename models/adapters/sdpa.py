"""Calls of `F.scaled_dot_product_attention` in any module → the operator `effexport::masked_attention`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from effexport.models.user.modes import storage, writes, written_out
from effexport.models.user.size_arithmetic import ATTENTION
from effexport.plugins.masked_attention.op import hides_when_added, masked_attention

TO_BOOL = {Tensor.to, Tensor.bool}
ELEMENTWISE = TO_BOOL | {
    *(Tensor.float, Tensor.half, Tensor.type_as, Tensor.contiguous, Tensor.clone, Tensor.sub, torch.sub),
    *(
        Tensor.__rsub__,
        torch.rsub,
        Tensor.mul,
        torch.mul,
        Tensor.eq,
        torch.eq,
        Tensor.ne,
        torch.ne,
        Tensor.gt,
        torch.gt,
    ),
    *(Tensor.logical_not, torch.logical_not, Tensor.__invert__, Tensor.bitwise_not, torch.bitwise_not),
    *(Tensor.logical_and, torch.logical_and, Tensor.__and__, Tensor.bitwise_and, torch.bitwise_and),
    *(Tensor.masked_fill, torch.masked_fill),
}


@dataclass
class AttentionCalls:
    """Counts of calls that became the operator, and of calls that stayed as they were."""

    turned: int = 0
    kept: int = 0


@contextmanager
def attention_calls_as_operators(turns: bool = True) -> Iterator[AttentionCalls]:
    """Turn calls of `F.scaled_dot_product_attention` that the operator can express, for the length of a `with` block.

    These are calls that are not causal, without a mask or with one that hides the same keys from all queries and heads
    of a sample: a boolean mask [batch, 1, 1, keys], or one that PyTorch operations made of it, as the BERT family of
    transformers 4 and 5 does. Other calls with a mask are written out; the rest stay PyTorch's. Works while
    torch.export traces (strict=False). turns: False to turn none.
    """
    calls = AttentionCalls()
    with _MaskFollower(calls, turns):
        yield calls


@dataclass
class _Rows:
    """A mask whose rows are alike. mask: [batch, 1 or heads, queries, keys]; row: the same as [batch, 1, 1, keys].

    nonzero_of: the mask of which this one says where it is not 0. hidden: boolean, like row: the mask is `low`, a large
    negative number, where it is True, and 0 elsewhere.
    """

    mask: Tensor
    row: Tensor
    nonzero_of: Tensor | None = None
    hidden: Tensor | None = None
    low: float = -math.inf


class _MaskFollower(TorchFunctionMode):
    """Turns calls, and follows masks from the moment when they are expanded to all queries."""

    def __init__(self, calls: AttentionCalls, turns: bool) -> None:
        super().__init__()
        self.calls, self.turns = calls, turns
        # a mask is kept with its entry, so that its id stays its own
        self.known: dict[int, _Rows] = {}
        self.positions: dict[int, Tensor] = {}  # tensors without negative numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is ATTENTION:
            return self.attention(*args, **kwargs)
        result = func(*args, **kwargs)
        if writes(func, kwargs):
            self.forget(kwargs.get("out", args[0] if args else None))
        elif isinstance(result, Tensor):
            if is_position(func, args, kwargs, self.positions):
                self.positions[id(result)] = result
            elif result.dim() == 4:
                self.follow(func, result, args, kwargs)
        return result

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The arguments of F.scaled_dot_product_attention."""
        groups = [x.shape[:2] for x in (query, key, value) if x.dim() == 4]
        alike = len(groups) == 3 and groups[0] == groups[1] == groups[2]
        plain = self.turns and dropout_p == 0 and not is_causal and alike
        keep = self.visible_keys(key, attn_mask) if plain else None
        if keep is None:
            self.calls.kept += 1
            if dropout_p == 0 and (attn_mask is not None or len(groups) < 3):
                return written_out(query, key, value, attn_mask, is_causal, scale, enable_gqa)
            rest: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **rest)
        self.calls.turned += 1
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        turned: Tensor = masked_attention(query, key, value, keep, factor)
        known = self.known.get(id(attn_mask))
        if attn_mask is None or (known is not None and known.low > -math.inf):
            return turned  # like PyTorch, the average of all values if there is no visible key
        return zero_without_keys(turned, keep)

    def visible_keys(self, key: Tensor, mask: Tensor | None) -> Tensor | None:
        """Boolean [batch, keys], or None if the operator cannot express the mask."""
        if mask is None:
            return torch.ones_like(key[:, 0, :, 0], dtype=torch.bool)
        if mask.dim() != 4:
            return None
        known = self.known.get(id(mask)) or _Rows(mask, mask)
        if known.hidden is not None:
            keep = ~known.hidden[:, 0, 0]
        elif is_one_row(known.row) and mask.dtype == torch.bool:
            keep = known.row[:, 0, 0]
        else:
            return None
        # one mask may stand for the whole batch, or one value for all keys
        return keep.expand(key.shape[0], key.shape[2])

    def follow(self, func: Any, result: Tensor, args: Any, kwargs: Any) -> None:
        """Note what is known of the result of a PyTorch function."""
        if func is Tensor.expand and (id(args[0]) in self.known or is_one_row(args[0])):
            entry = self.known.get(id(args[0])) or _Rows(args[0], args[0])
            self.known[id(result)] = _Rows(result, entry.row, hidden=entry.hidden, low=entry.low)
            return
        if func is Tensor.ge and id(args[0]) in self.positions and type(args[1]) is int and args[1] == 0:
            # how transformers 5 begins a mask that is not causal
            true = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=result.device)
            self.known[id(result)] = _Rows(result, true)
            return
        masks = [x for x in args if isinstance(x, Tensor) and x.dim() > 0]
        entries = [self.known.get(id(x)) for x in masks]
        if func not in ELEMENTWISE or not any(entries) or any(isinstance(x, Tensor) for x in kwargs.values()):
            return
        rows = [x if entry is None else entry.row for x, entry in zip(masks, entries, strict=True)]
        if not all(is_one_row(row) for row in rows):
            return
        small = {id(x): row for x, row in zip(masks, rows, strict=True)}
        made = _Rows(result, func(*(small.get(id(x), x) for x in args), **kwargs))
        if func in TO_BOOL and result.dtype == torch.bool:
            made.nonzero_of = args[0]
        hides = entries[1] if func in (Tensor.masked_fill, torch.masked_fill) and len(entries) == 2 else None
        low = args[2] if hides is not None and hides.nonzero_of is args[0] and result.is_floating_point() else None
        if hides is not None and isinstance(low, float) and hides_when_added(low, result.dtype):
            made.hidden, made.low = hides.row, low
        self.known[id(result)] = made

    def forget(self, written: Any) -> None:
        """Drop what is known of masks and positions in memory that has been written to."""
        if not isinstance(written, Tensor):
            return
        memory = storage(written)
        self.known = {
            key: rows for key, rows in self.known.items() if memory not in map(storage, (rows.mask, rows.row))
        }
        self.positions = {key: x for key, x in self.positions.items() if storage(x) != memory}


def zero_without_keys(context: Tensor, keep: Tensor) -> Tensor:
    """Zeros for the samples without any visible key, as PyTorch has them; our operator has the average of all values.

    context [batch, heads, queries, head_dim]; keep boolean [batch, keys].
    """
    return context * keep.to(context.dtype).amax(dim=1)[:, None, None, None]


def is_position(func: Any, args: Any, kwargs: Any, positions: Mapping[int, Tensor]) -> bool:
    """True if a PyTorch function returns numbers from 0 on: positions of tokens. positions: known ones, by id."""
    if func is torch.arange:
        return len(args) == 1 and not kwargs.keys() & {"start", "step"}
    if func in (Tensor.add, torch.add):
        return id(args[0]) in positions and type(args[1]) is int and args[1] >= 0 and not kwargs
    return func is Tensor.__getitem__ and id(args[0]) in positions


def is_one_row(mask: Tensor) -> bool:
    """True if a mask has the shape [batch, 1, 1, keys], and no 1 is the present size of a free axis."""
    return mask.dim() == 4 and all(isinstance(size, int) and size == 1 for size in mask.shape[1:3])
