"""Linear attention as a function, without weights: that of LoFTR and fast-transformers, which its answers to random
numbers tell apart, and that with decay over a state, for several packages.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from effexport.models.adapters.adapter import NotReplaceableError
from effexport.models.adapters.fast_transformers import AllOnes, Keeping, check_mask
from effexport.models.adapters.folding import ROUNDING, detached_copy
from effexport.models.layers import CallsOperators, at_least_float32
from effexport.models.variants.linear import LinearSpec
from effexport.models.variants.linear.layer import ELEMENTWISE, causal_sums, total_sums
from effexport.models.variants.recurrence import Tokens, recurrence
from effexport.plugins.linear_attention.op import linear_attention


class RecurrentFunction(CallsOperators):
    """Outputs q_t S_t of states S_t = α_t S_{t−1} + β_t k_t (v_t − delta · α_t k_t S_{t−1})ᵀ, as one operator, or as
    products of matrices where there is a single token.

    variant: its name in reports.
    """

    def __init__(self, variant: str, delta: bool) -> None:
        super().__init__()
        self.variant, self.delta = variant, delta

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, past: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """query, key [batch, seq, heads, key_dim], value [batch, seq, heads, value_dim], decay (the logarithm of α) and
        beta [batch, seq, heads] → the outputs [batch, seq, heads, value_dim], and the state after the last token
        [batch, heads, key_dim, value_dim]. past: the state before the first; None for zeros. In float32 at least."""
        tokens = Tokens(*map(at_least_float32, (query, key, value, decay.unsqueeze(-1), beta.unsqueeze(-1))))
        if past is None:
            past = tokens.key.new_zeros(*key.shape[:1], *key.shape[2:], value.shape[3])
        before = at_least_float32(past)
        out, present = recurrence(tokens, before, scale, self.delta, as_operator=self.becomes_operators)
        return out.to(value.dtype), present


# The axes of queries, keys and values, and where the heads are in them.
HEADS = {"batch seq heads channels": 2, "batch heads seq channels": 1}
FEATURES: dict[str, Callable[[Tensor], Tensor]] = {**ELEMENTWISE, "squared relu": lambda x: torch.relu(x).square()}
# x with φ(x) = SMALL: of one such key, a sum of weights is small enough to show what is added to it.
SMALL = 3e-4
INVERSE = {"elu": torch.log, "relu": lambda x: x, "exp": torch.log, "squared relu": torch.sqrt}
# Tokens of a long sequence, and the standard deviation of large numbers.
LONG, LARGE = 1100, 30.0
BATCH, NUM_HEADS, HEAD_DIM, VALUE_DIM = 2, 3, 4, 6
# Numbers of queries and of keys.
LENGTHS = ((5, 7), (LONG, LONG - 10))
# What an argument after the three may be. keys, queries: boolean [batch, keys] or [batch, queries], True = keep.
# The rest are the masks of fast-transformers, which have to be given.
ROLES = ("keys", "queries")
OBJECTS = ("attn_mask", "query_lengths", "key_lengths")


@dataclass(frozen=True)
class Formula:
    """out_i = φ(q_i)ᵀ S / (φ(q_i)·z + eps) of keys that are kept, times whether the query is.

    heads: the axis of heads. roles: what arguments after queries, keys and values are, by name.
    """

    features: str
    heads: int
    causal: bool
    eps: float
    arguments: tuple[str, ...]
    roles: Mapping[str, str]


class LinearFunction(CallsOperators):
    """Linear attention between any queries and keys: one operator, of which elu + 1 and ReLU are a part.

    O(seq · head_dim²) time for each head. Without the operator, the formula is written as products of matrices: ONNX
    Runtime computes them up to twice as fast as the Einsums of the originals.
    """

    variant = "linear"

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Queries, keys and values, and masks; see `Formula`. The result has the axes of the queries."""
        formula = self.formula
        given = {**dict(zip(formula.arguments, args, strict=False)), **kwargs}
        q, k, v = (given.pop(name).transpose(1, formula.heads) for name in formula.arguments[:3])
        masks = self.masks(given)
        keep = masks.get("keys")
        if keep is None:
            keep = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool)
        context = self.mix(q, k, v, keep)
        if "queries" in masks:
            context = context * masks["queries"][:, None, :, None].to(context.dtype)
        return context.transpose(1, formula.heads).contiguous()

    def masks(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        """Boolean masks by role. Raises NotReplaceableError for others."""
        masks: dict[str, Tensor] = {}
        for name, value in given.items():
            role = self.formula.roles.get(name)
            if role == "attn_mask":
                check_mask(value, self.formula.causal)
            elif role == "key_lengths":
                masks["keys"] = value.bool_matrix
            elif role in ROLES and isinstance(value, Tensor) and value.dtype == torch.bool:
                masks[role] = value
            elif role != "query_lengths" and value is not None:
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise NotReplaceableError(
                    f"it was called with {name} of {kind}; only boolean masks of tokens are known"
                )
        return masks

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        """[batch, heads, queries, head_dim], [batch, heads, keys, head_dim], [batch, heads, keys, value_dim], boolean
        [batch, keys] → [batch, heads, queries, value_dim]."""
        formula = self.formula
        if self.fused:
            return fused(q, k, v, keep, formula)
        features = FEATURES[formula.features]
        q, k, values = (at_least_float32(x) for x in (q, k, v))
        q, k = features(q), features(k) * keep[:, None, :, None].to(k.dtype)
        if formula.causal:
            sums = causal_sums(q, k, values, LinearSpec.chunk_length)
            numerator, denominator = sums[..., :-1], sums[..., -1:]
        else:
            numerator, denominator = total_sums(q, k, values)
        return (numerator / (denominator + formula.eps)).to(v.dtype)


def fused(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, formula: Formula) -> Tensor:
    """`LinearFunction.mix` by the operator, which takes as many queries as keys: the fewer get neighbours of zeros."""
    queries, keys, dtype = q.shape[2], k.shape[2], v.dtype
    if formula.features not in ("elu", "relu"):
        q, k, v = (at_least_float32(x) for x in (q, k, v))
        q, k = (FEATURES[formula.features](x) for x in (q, k))
    if not statically_known_true(queries == keys):
        longest = torch.sym_max(queries, keys)
        q = F.pad(q, (0, 0, 0, longest - queries))
        k, v = (F.pad(x, (0, 0, 0, longest - keys)) for x in (k, v))
        keep = F.pad(keep, (0, longest - keys))
    relu = formula.features != "elu"
    attended: Tensor = linear_attention(q, k, v, keep, formula.eps, formula.causal, relu=relu)
    return attended.narrow(2, 0, queries).to(dtype)


def kept_tokens(seq_len: int, generator: torch.Generator) -> Tensor:
    """Boolean [batch, seq]: a sample with padding at its end, and one with holes, whose first token is hidden."""
    keep = torch.rand(BATCH, seq_len, generator=generator) < 0.6
    keep[0] = torch.arange(seq_len) < seq_len - seq_len // 3
    keep[1, 0], keep[1, 1:2] = False, True
    return keep


def linear_function(layer: nn.Module) -> LinearFunction | None:
    """Ours for a module without weights, if its answers are those of one of the formulas."""
    arguments = arguments_of(layer)
    if arguments is None:
        return None
    original = Asked(detached_copy(layer), arguments)  # a layer may remember what it was given
    for features, heads in itertools.product(FEATURES, HEADS.values()):
        for causal in (False, True):
            formula = Formula(features, heads, causal, 0.0, (*arguments,), object_roles(arguments))
            # whatever the user's code raises
            with contextlib.suppress(Exception):
                formula = replace(formula, eps=original.eps(formula))
                if original.agrees(formula):
                    return LinearFunction(replace(formula, roles=original.roles(formula)))
    return None


def arguments_of(layer: nn.Module) -> dict[str, inspect.Parameter] | None:
    """The arguments of a module without weights whose first three are required, and whose others are optional or masks
    of fast-transformers; None for other modules."""
    if (
        any(True for _ in itertools.chain(layer.parameters(), layer.buffers()))
        or type(layer).forward is nn.Module.forward
    ):
        return None
    found = dict(inspect.signature(layer.forward).parameters)
    required = [name for name, one in found.items() if one.default is one.empty]
    plain = all(one.kind is one.POSITIONAL_OR_KEYWORD for one in found.values())
    return found if plain and list(found)[:3] == required[:3] and set(required[3:]) <= set(OBJECTS) else None


def object_roles(arguments: Mapping[str, object]) -> dict[str, str]:
    return {name: name for name in OBJECTS if name in arguments}


@dataclass(frozen=True)
class Asked:
    """A module that is asked for answers, in float64."""

    layer: nn.Module
    arguments: Mapping[str, inspect.Parameter]

    @torch.inference_mode()
    def both(self, formula: Formula, qkv: tuple[Tensor, ...], masks: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The answers of the module and of a formula. qkv: [batch, heads, …]; masks: by argument."""
        queries, keys = qkv[0].shape[2], qkv[1].shape[2]
        pairs = torch.ones(queries, keys, dtype=torch.bool)
        objects: dict[str, Any] = {
            "attn_mask": Keeping(pairs.tril()) if formula.causal else AllOnes(pairs),
            "query_lengths": AllOnes(torch.ones(BATCH, queries, dtype=torch.bool)),
            "key_lengths": AllOnes(torch.ones(BATCH, keys, dtype=torch.bool)),
        }
        given = {name: value for name, value in objects.items() if name in self.arguments}
        given |= {name: Keeping(keep) if name in OBJECTS else keep for name, keep in masks.items()}
        q, k, v = (x.transpose(1, formula.heads) for x in qkv)
        theirs = self.layer(q.clone(), k.clone(), v.clone(), **given)
        return theirs, LinearFunction(formula)(q, k, v, **given)

    def eps(self, formula: Formula) -> float:
        """The number added to a sum of weights d, from the answer d / (d + eps) to values of 1."""
        x = INVERSE[formula.features](torch.tensor(SMALL, dtype=torch.float64)).expand(BATCH, 1, 1, 1)
        answer = float(self.both(formula, (x, x, torch.ones_like(x)), {})[0].flatten()[0])
        eps = SMALL**2 * (1 - answer) / answer
        # less is the rounding of elu(x) + 1
        return float(f"{eps:.3g}") if eps > SMALL**2 * 1e-11 else 0.0

    def agrees(self, formula: Formula, masked: str = "") -> bool:
        """True if the module has the answers of a formula to random numbers. masked: an argument that gets a mask."""
        generator = torch.Generator().manual_seed(0)
        for lengths in LENGTHS:
            queries, keys = lengths if not formula.causal else (lengths[1], lengths[1])
            keep = kept_tokens(queries if formula.roles.get(masked) == "queries" else keys, generator)
            for qkv in numbers(queries, keys, generator):
                theirs, ours = self.both(formula, qkv, {masked: keep} if masked else {})
                if theirs.shape != ours.shape:
                    return False
                # such as those of a query without keys
                known = ~(theirs.isnan() & ours.isnan())
                if not (theirs - ours)[known].abs().max() <= ROUNDING[torch.float64] * ours[known].abs().max():
                    return False
        return True

    def roles(self, formula: Formula) -> dict[str, str]:
        """Roles of the other arguments, by name; arguments with none of ROLES are left out."""
        roles = dict(formula.roles)
        for name in list(self.arguments)[3:]:
            for role in ("key_lengths",) if name == "key_lengths" else ROLES if name not in OBJECTS else ():
                # whatever the user's code raises, such as for a mask of another length
                with contextlib.suppress(Exception):
                    if self.agrees(replace(formula, roles={**roles, name: role}), name):
                        roles[name] = role
        return roles


def numbers(queries: int, keys: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values [batch, heads, …] of three magnitudes, of which the last makes small weights; and large
    ones."""

    def drawn(tokens: int, channels: int) -> Tensor:
        return torch.randn(BATCH, NUM_HEADS, tokens, channels, generator=generator, dtype=torch.float64)

    for scale, shift in ((1e-2, 1e-3), (1.0, 0.0), (3.0, -6.0)):
        q, k = drawn(queries, HEAD_DIM), drawn(keys, HEAD_DIM)
        yield q * scale + shift, k * scale + shift, drawn(keys, VALUE_DIM)
    # positive, because elu(x) + 1 is all rounding far below 0
    q, k = drawn(queries, HEAD_DIM).abs(), drawn(keys, HEAD_DIM).abs()
    yield LARGE * q, LARGE * k, LARGE * drawn(keys, VALUE_DIM)
