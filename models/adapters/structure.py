"""Layers that compute what ours do under another name: vendored, renamed and derived copies of known layers.

A layer is a candidate if it has the attributes of a known one. Its answers to random numbers decide, masks included,
with its own weights and with others.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import Adapter, DrawsNumbers, NotReplaceableError, Replacement
from effexport.models.adapters.fast_transformers import AllOnes, Keeping
from effexport.models.adapters.folding import ROUNDING, detached_copy, has_hooks, widths_of, with_plain_projections
from effexport.models.adapters.linear_function import BATCH, LARGE, LONG, kept_tokens, linear_function
from effexport.models.layers import AttentionLayer, SameWeights
from effexport.models.user.modes import FloatTypes

# Parts of ours whose size tells how long a sequence must be to have several of them.
BLOCKS = ("num_landmarks", "chunk_length", "window")
# Random arguments by the name that ours has for them: of so many tokens and channels, and a generator.
Calls = Callable[[int, int, torch.Generator], Iterator[Mapping[str, Any]]]
# The name under which a call says which tokens are compared, boolean [batch, seq]: all if it does not.
COMPARED = "compared"


def added(keep: Tensor) -> Tensor:
    """A mask [batch, 1, 1, seq] that is added to logits, as transformers makes it."""
    return (~keep)[:, None, None].double() * torch.finfo(torch.float32).min


def of_tokens(*inputs: str, mask: str = "", made: Callable[[Tensor], Any] = lambda keep: keep) -> Calls:
    """Calls with vectors [batch, seq, width], without and with a mask, made of a boolean one whose True keeps."""

    def calls(seq_len: int, width: int, generator: torch.Generator) -> Iterator[Mapping[str, Any]]:
        def vectors() -> dict[str, Any]:
            return {name: torch.randn(BATCH, seq_len, width, generator=generator) for name in inputs}

        yield vectors()
        if mask:
            keep = kept_tokens(seq_len, generator)
            yield vectors() | {mask: made(keep), COMPARED: keep}

    return calls


def of_torch(*inputs: str, padding: str, pairs: str, **options: Any) -> Calls:
    """Calls with vectors [batch, seq, width] or [seq, batch, width], and masks whose True hides padding, or pairs.

    options: what some calls are given beside.
    """

    def calls(seq_len: int, width: int, generator: torch.Generator) -> Iterator[Mapping[str, Any]]:
        hidden, later = ~kept_tokens(seq_len, generator), torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
        for transposed in (False, True):
            x = torch.randn(BATCH, seq_len, width, generator=generator)
            vectors = dict.fromkeys(inputs, x.transpose(0, 1) if transposed else x)
            for masks in ({}, {padding: hidden}, {pairs: later}, {pairs: later, padding: hidden}):
                yield vectors | masks
                if options:
                    yield vectors | masks | options

    return calls


def of_fast_transformers(seq_len: int, width: int, generator: torch.Generator) -> Iterator[Mapping[str, Any]]:
    """The arguments of its attention layer, whose masks are objects."""
    for causal in (False, True):
        for keep in (torch.ones(BATCH, seq_len, dtype=torch.bool), kept_tokens(seq_len, generator)):
            x = torch.randn(BATCH, seq_len, width, generator=generator)
            whole = torch.ones(seq_len, seq_len, dtype=torch.bool)
            yield {
                **dict.fromkeys(("queries", "keys", "values"), x),
                "attn_mask": Keeping(whole.tril()) if causal else AllOnes(whole),
                **dict.fromkeys(("query_lengths", "key_lengths"), Keeping(keep)),
            }


def of_pairs(seq_len: int, width: int, generator: torch.Generator) -> Iterator[Mapping[str, Any]]:
    """The arguments of labml's AFT-local, [seq, batch, width], and a mask of pairs [queries, keys, 1]."""
    visible = kept_tokens(seq_len, generator)[1:].T[None] & torch.ones(seq_len, 1, 1, dtype=torch.bool)
    names = ("query", "key", "value")
    yield {name: torch.randn(seq_len, BATCH, width, generator=generator) for name in names} | {"mask": visible}


@dataclass(frozen=True)
class Form:
    """One row: known layers by qualified name, whatever the class of a copy is called.

    attributes: what a layer must have to be a candidate. calls: what it is asked. arguments: those of forward that it
    must have too, where whole models have these attributes.
    """

    known: str
    attributes: tuple[str, ...]
    calls: Calls
    arguments: tuple[str, ...] = ()

    def fits(self, layer: nn.Module) -> bool:
        return all(hasattr(layer, name) for name in self.attributes) and set(self.arguments) <= set(
            parameters_of(layer)
        )


TORCH = "torch.nn.modules"
PROJECTIONS = ("to_q", "to_k", "to_v")
ENCODER_LAYER = ("linear1", "linear2", "norm1", "norm2", "activation")
FORMS: tuple[Form, ...] = (
    Form(
        "nystrom_attention.nystrom_attention.NystromAttention",
        ("to_qkv", "to_out", "num_landmarks", "pinv_iterations"),
        of_tokens("x", mask="mask"),
    ),
    Form(
        "transformers.models.nystromformer.modeling_nystromformer.NystromformerSelfAttention",
        ("query", "key", "value", "num_landmarks", "conv_kernel_size"),
        of_tokens("hidden_states", mask="attention_mask", made=added),
    ),
    Form(
        "transformers.models.reformer.modeling_reformer.LocalSelfAttention",
        ("query", "key", "value", "num_chunks_before", "num_chunks_after"),
        of_tokens("hidden_states", mask="attention_mask"),
    ),
    Form(
        "transformers.models.reformer.modeling_reformer.LSHSelfAttention",
        ("query_key", "value", "num_hashes", "num_buckets"),
        of_tokens("hidden_states", mask="attention_mask"),
    ),
    Form(
        "reformer_pytorch.reformer_pytorch.LSHSelfAttention",
        ("toqk", "tov", "to_out", "lsh_attn", "full_attn"),
        of_tokens("x", mask="input_mask"),
    ),
    Form(
        "linear_attention_transformer.linear_attention_transformer.SelfAttention",
        (*PROJECTIONS, "to_out", "global_attn_fn", "local_attn_heads"),
        of_tokens("x", mask="input_mask"),
    ),
    Form("aft_pytorch.aft_pytorch.AFTLocal", (*PROJECTIONS, "project", "wbias", "s"), of_tokens("x")),
    Form("aft_pytorch.aft_pytorch.AFTFull", (*PROJECTIONS, "project", "wbias"), of_tokens("x")),
    Form("aft_pytorch.aft_pytorch.AFTSimple", (*PROJECTIONS, "project", "hidden_dim"), of_tokens("x")),
    Form("labml_nn.transformers.aft.AFTLocal", ("query", "key", "value", "pos_bias", "local_mask"), of_pairs),
    Form(
        "fast_transformers.attention.attention_layer.AttentionLayer",
        ("inner_attention", "query_projection", "out_projection", "n_heads"),
        of_fast_transformers,
    ),
    Form(
        "fast_transformers.transformers.TransformerEncoderLayer",
        ("attention", *ENCODER_LAYER),
        of_tokens("x", mask="length_mask", made=Keeping),
        ("attn_mask", "length_mask"),
    ),
    Form(
        "fast_transformers.transformers.TransformerEncoder",
        ("layers", "norm"),
        of_tokens("x", mask="length_mask", made=Keeping),
        ("attn_mask", "length_mask"),
    ),
    Form(
        f"{TORCH}.activation.MultiheadAttention",
        ("in_proj_weight", "out_proj", "num_heads", "batch_first"),
        of_torch("query", "key", "value", padding="key_padding_mask", pairs="attn_mask", need_weights=False),
    ),
    Form(
        f"{TORCH}.transformer.TransformerEncoderLayer",
        ("self_attn", "norm_first", *ENCODER_LAYER),
        of_torch("src", padding="src_key_padding_mask", pairs="src_mask"),
        ("src_key_padding_mask",),
    ),
    Form(
        f"{TORCH}.transformer.TransformerEncoder",
        ("layers", "norm", "num_layers"),
        of_torch("src", padding="src_key_padding_mask", pairs="mask"),
        ("src_key_padding_mask",),
    ),
    Form(
        f"{TORCH}.transformer.TransformerDecoder",
        ("layers", "norm", "num_layers"),
        of_torch("tgt", "memory", padding="memory_key_padding_mask", pairs="tgt_mask"),
        ("memory_key_padding_mask",),
    ),
)


def counterpart(
    layer: nn.Module, seq_len: int, known: Mapping[str, tuple[Adapter, Replacement]]
) -> tuple[nn.Module, list[str]] | None:
    """Ours for a layer of an unknown class, and the parts of it that became linear layers; None if there is none.

    known: see `replacements`.
    """
    if has_hooks(layer) or "forward" in vars(layer) or type(layer).__module__.startswith("effexport."):
        return None
    # whatever the user's code raises, and parts that no layer of ours has
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
        if (function := linear_function(layer)) is not None:
            return function, []
    for form in FORMS:
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
            if form.known in known and form.fits(layer):
                return Candidate(form, *known[form.known], seq_len).proven(layer)
    return None


@dataclass(frozen=True)
class Candidate:
    """A row with what it makes of layers. seq_len: see `Replacement`."""

    form: Form
    adapter: Adapter
    replacement: Replacement
    seq_len: int

    def made(self, layer: nn.Module) -> tuple[nn.Module, list[str]]:
        plain, parts = with_plain_projections(layer, self.adapter.projections)
        return self.replacement(plain, self.seq_len).eval(), parts

    def proven(self, layer: nn.Module) -> tuple[nn.Module, list[str]]:
        """Ours for a layer, and its parts that became linear. Raises NotReplaceableError if the answers differ."""
        ours, parts = self.made(layer)
        names = self.same_answers(layer, ours)
        other = with_other_weights(layer)
        if self.same_answers(other, self.made(other)[0]) != names:
            raise NotReplaceableError("its answers depend on its weights in another way")
        if not isinstance(ours, DrawsNumbers):  # which are known by their methods, and refuse what they do not have
            return Renamed(ours, layer, names), parts
        if any(name != theirs for name, theirs in names.items()):
            raise NotReplaceableError("its arguments have other names")
        return ours, parts

    def same_answers(self, layer: nn.Module, ours: nn.Module) -> dict[str, str]:
        """The layer's names for those of our arguments with which both give the same answers, at several lengths.

        Raises NotReplaceableError if they differ, or if the layer has no answer.
        """
        generator = torch.Generator().manual_seed(0)
        for dtype, width in itertools.product(ROUNDING, widths_of(layer)):  # float64, or float32 if it takes only that
            both = detached_copy(layer).eval().to(dtype), detached_copy(ours).eval().to(dtype)
            names: dict[str, str] = {}
            lengths = lengths_of(ours)
            for seq_len in lengths:
                for call in self.form.calls(seq_len, width, generator):
                    names |= same_answer(*both, scaled(call, dtype))
            if not names:
                continue
            # what a layer does with long sequences only, and with large numbers, which float32 would round too much
            long = next(iter(self.form.calls(longest_of(ours, lengths[-1]), width, generator)))
            same_answer(*both, scaled(long, dtype))
            if dtype is torch.float64:
                large = next(iter(self.form.calls(lengths[-1], width, generator)))
                same_answer(*both, scaled(large, dtype, LARGE))
            return names
        raise NotReplaceableError("it has no answer to random numbers")


@torch.inference_mode()
def same_answer(layer: nn.Module, ours: nn.Module, call: Mapping[str, Any]) -> dict[str, str]:
    """The layer's names for our arguments of a call, if both answer it in the same way; none if the layer cannot.

    Where the layer has no number, any will do. Raises NotReplaceableError for another answer.
    """
    theirs = names_of(layer, ours)
    compared = call.get(COMPARED)
    call = {name: value for name, value in call.items() if name != COMPARED}
    if not call.keys() <= theirs.keys():
        return {}
    drawn = ours.frozen(layer, {}) if isinstance(ours, DrawsNumbers) else contextlib.nullcontext()
    with FloatTypes() as types:
        try:
            with drawn:
                expected = tensors_in(layer(**{theirs[name]: value for name, value in call.items()}))
        except Exception:  # such as for a length that is not a multiple of something
            return {}
        actual = tensors_in(ours(**call))
    rounding = ROUNDING[torch.float32 if torch.float32 in types.found else torch.float64]
    if len(actual) != len(expected):
        raise NotReplaceableError("it has another number of results")
    for found, wanted in zip(actual, expected, strict=True):
        if found.shape != wanted.shape:
            raise NotReplaceableError("its results have another shape")
        found, wanted = (x if compared is None else x[compared] for x in (found, wanted))
        known = wanted.isfinite()
        # raises where nothing is known
        if not (found - wanted)[known].abs().max() <= rounding * wanted[known].abs().max():
            raise NotReplaceableError("it has other answers")
    return {name: theirs[name] for name in call}


def names_of(layer: nn.Module, ours: nn.Module) -> dict[str, str]:
    """The layer's names for our arguments: the same, or those in their places."""
    kinds = parameters_of(layer)
    placed = dict(zip(positional(ours), positional(layer), strict=False))
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    return {
        name: name if name in kinds or name not in placed else placed[name]
        for name in parameters_of(ours)
        if name in kinds or name in placed or takes_any
    }


def parameters_of(layer: nn.Module) -> dict[str, Any]:
    """The arguments of forward, with their kinds."""
    return {name: one.kind for name, one in inspect.signature(layer.forward).parameters.items()}


def positional(layer: nn.Module) -> list[str]:
    """The arguments of forward that have a place."""
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, kind in parameters_of(layer).items() if kind in places]


def tensors_in(result: Any) -> list[Tensor]:
    """The floating-point results of a layer, in order."""
    leaves = torch.utils._pytree.tree_leaves(result)
    return [one.double() for one in leaves if isinstance(one, Tensor) and one.is_floating_point()]


@torch.no_grad()
def with_other_weights(layer: nn.Module) -> nn.Module:
    """A copy with other weights, because those of a layer may hide what it computes, such as a factor of zero."""
    generator = torch.Generator().manual_seed(1)
    other = detached_copy(layer)
    for weight in other.parameters():
        if weight.is_floating_point() and weight.numel():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64) / weight.shape[-1] ** 0.5
            weight.data = (weight.double() + noise.to(weight.device)).to(weight.dtype)
    return other


def lengths_of(ours: nn.Module) -> Sequence[int]:
    """Lengths at which a layer shows what it computes: short, and of several blocks, whole and not."""
    specs = [layer.spec for layer in ours.modules() if isinstance(layer, AttentionLayer)]
    block = max((getattr(spec, name, 0) for spec in specs for name in BLOCKS), default=0) or 16
    limit = min((spec.max_seq_len for spec in specs if spec.max_seq_len is not None), default=4 * block)
    fixed = [spec.fixed_seq_len for spec in specs if spec.fixed_seq_len is not None]
    return fixed[:1] or sorted({min(length, limit) for length in (7, 2 * block + 5, 4 * block)})


def longest_of(ours: nn.Module, usual: int) -> int:
    """A length beyond those at which layers commonly change what they do, if ours takes others than `usual` at all."""
    specs = [layer.spec for layer in ours.modules() if isinstance(layer, AttentionLayer)]
    if any(spec.fixed_seq_len is not None for spec in specs):
        return usual
    return min([LONG, *(spec.max_seq_len for spec in specs if spec.max_seq_len is not None)])


def scaled(call: Mapping[str, Any], dtype: torch.dtype, factor: float = 1.0) -> dict[str, Any]:
    """A call whose tensors of floats have another type and are multiplied with a factor."""

    def converted(value: Any) -> Any:
        return (value * factor).to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: converted(value) for name, value in call.items()}


class Renamed(SameWeights):
    """Ours behind the arguments of a layer. names: the layer's for ours; others must have their default."""

    def __init__(self, ours: nn.Module, layer: nn.Module, names: Mapping[str, str]) -> None:
        super().__init__(ours)
        self.arguments = positional(layer)
        if inspect.Parameter.VAR_POSITIONAL in parameters_of(layer).values():  # passed on, as ours has them
            self.arguments += positional(ours)[len(self.arguments) :]
        self.ours = {theirs: name for name, theirs in names.items()}
        self.defaults = {name: one.default for name, one in inspect.signature(layer.forward).parameters.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the layer; the same results. Raises NotReplaceableError for arguments that were not proven."""
        if len(args) > len(self.arguments):
            raise NotReplaceableError(f"it was called with {len(args)} arguments; expected {len(self.arguments)}")
        given = dict(itertools.chain(zip(self.arguments, args, strict=False), kwargs.items()))
        for name, value in given.items():
            default = self.defaults.get(name)
            if name not in self.ours and not (value is default or (type(value) is bool and value == default)):
                raise NotReplaceableError(f"it was called with {name}, which effexport's layer does not have")
        return self._model(**{self.ours[name]: value for name, value in given.items() if name in self.ours})
