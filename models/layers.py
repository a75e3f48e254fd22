"""Pieces shared by the attention variants and the encoder, and wrappers that keep the names of weights.

Axes are (batch, heads, seq, head_dim) unless noted.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effexport.models.attention_spec import AttentionSpec, QueryKeySpec
from effexport.models.validation import SpecError

# What a layer remembers between the steps of a decoder: float32 tensors by name.
State = dict[str, Tensor]
# Logit of a masked key. Finite, so that a row without any visible key stays finite instead of NaN.
MASKED_LOGIT = torch.finfo(torch.float32).min


def keep_from_mask(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Boolean [batch, seq] from an attention mask (1 = keep) or None (keep everything)."""
    if attention_mask is None:
        return torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
    return attention_mask != 0


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, seq, heads·head_dim] → [batch, heads, seq, head_dim]. Of a single head, nothing is moved."""
    if heads == 1:
        return x.unsqueeze(1)
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[batch, heads, seq, head_dim] → [batch, seq, heads·head_dim]."""
    if isinstance(x.shape[1], int) and x.shape[1] == 1:
        return x.squeeze(1)
    return x.transpose(1, 2).flatten(-2)


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Rows of a [count, width] table: indices of any shape → […, width]. Exports as one Gather."""
    return F.embedding(rows, table)


def at_least_float32(x: Tensor) -> Tensor:
    """float16 and bfloat16 as float32; float32 and float64 as they are.

    Formulas that must not run in half precision cast with this, so that a module in float64 computes in float64
    throughout and can say how far float32 is from it.
    """
    return x if x.dtype == torch.float64 else x.float()


def masked_softmax(logits: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax over the last axis, with invisible entries left out, in float32, or in float64 if the logits are.

    logits: any float dtype; visible: boolean, broadcastable to logits, or None.
    """
    logits = at_least_float32(logits)
    if visible is not None:
        logits = torch.where(visible, logits, MASKED_LOGIT)
    return torch.softmax(logits, dim=-1)


def causal_mask(seq_len: int, device: torch.device) -> Tensor:
    """Boolean [seq, seq]: query t sees keys t' ≤ t."""
    position = torch.arange(seq_len, device=device)
    return position[:, None] >= position[None, :]


def rotary_angles(seq_len: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sines and cosines of rotary positions (Su et al., 2021, arXiv 2104.09864, eq. 15), each [seq, size / 2]."""
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, device=device).float() / size)
    angles = torch.arange(seq_len, device=device).float()[:, None] * frequencies
    return angles.sin(), angles.cos()


def rotate_pairs(x: Tensor, sines: Tensor, cosines: Tensor) -> Tensor:
    """Rotate every pair of neighbouring channels of x [batch, heads, seq, size]; angles as of `rotary_angles`."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(dim=-1)
    sines, cosines = sines.to(x.dtype), cosines.to(x.dtype)
    return torch.stack((first * cosines - second * sines, second * cosines + first * sines), dim=-1).flatten(-2)


class LayerNorm(nn.LayerNorm):
    """Layer normalisation computed in float32 whatever the model's dtype, so that eps does not underflow."""

    def forward(self, input: Tensor) -> Tensor:
        weight = at_least_float32(self.weight)
        bias = None if self.bias is None else at_least_float32(self.bias)
        return F.layer_norm(at_least_float32(input), self.normalized_shape, weight, bias, self.eps).to(input.dtype)


class DepthwiseConv(nn.Module):
    """Convolution along seq with one filter per head, shared by its channels (Nyströmformer, section 3.5)."""

    IN_FLOAT: ClassVar[Mapping[str, str]] = {"": "a few multiplications for each number: nothing to gain"}

    def __init__(self, heads: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, 1, kernel_size, 1))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, v: Tensor) -> Tensor:
        """[batch, heads, seq, head_dim] → the same shape; zeros beyond both ends."""
        heads, _, kernel_size, _ = self.weight.shape
        # ONNX has no bfloat16 Conv before opset 22
        exact = torch.float32 if v.dtype == torch.bfloat16 else v.dtype
        padding = (kernel_size // 2, 0)
        return F.conv2d(v.to(exact), self.weight.to(exact), padding=padding, groups=heads).to(v.dtype)


class CallsOperators(nn.Module):
    """A module that calls fused operators while it is exported; see `AttentionLayer`."""

    IN_FLOAT: ClassVar[Mapping[str, str]] = {"": "both factors of its products are activations"}
    fused: bool = False

    @property
    def becomes_operators(self) -> bool:
        """True where operators that unfused graphs have, too, are called, though they have no gradients."""
        return self.fused or torch.compiler.is_exporting()


class AttentionLayer(CallsOperators):
    """An attention variant with its output projection.

    A subclass builds its input projections and implements `project` and `mix`.

    IN_FLOAT: what stays float where the model is quantised, each with its reason: a child by name, and "" for products
    of the layer's own.
    fused: whether `mix` calls the fused operator of its variant, where `effexport.plugins` has one. Set while exporting
    (`fused_operators`); otherwise PyTorch runs the formulas as they are written, which have gradients.
    """

    def __init__(self, spec: AttentionSpec, inner_dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.out = nn.Linear(inner_dim, spec.dim, bias=spec.bias)

    @property
    def calls_operators(self) -> bool:
        """True if `mix` also calls those operators of `effexport.plugins` that are a part of the unfused formulas.

        They become nodes of a graph, have kernels, or gradients of their own. Where none of this matters, the same
        code is called directly: the first operator that a process calls has PyTorch load its compiler, for a second.
        """
        return self.fused or torch.compiler.is_compiling() or torch.is_grad_enabled()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """hidden_states [batch, seq, dim]; attention_mask [batch, seq], 1 = keep. Returns [batch, seq, dim]."""
        projected: Tensor = self.out(self.attend(hidden_states, self.keep(hidden_states, attention_mask)))
        return projected

    @property
    def does_without_mask(self) -> bool:
        """True if `mix` takes None for a mask that hides nothing, and computes less then."""
        return False

    def keep(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """The mask as `mix` takes it."""
        if attention_mask is None and self.does_without_mask:
            return None
        return keep_from_mask(hidden_states, attention_mask)

    def attend(self, hidden_states: Tensor, keep: Tensor | None) -> Tensor:
        """Everything before the output projection: [batch, seq, dim], boolean [batch, seq] → [batch, seq, inner]."""
        return merge_heads(self.mix(self.project(hidden_states), keep))  # type: ignore[arg-type]

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """The inputs of `mix`: [batch, seq, dim] → some tensors [batch, heads, seq, channels]."""
        raise NotImplementedError

    def mix(self, projected: tuple[Tensor, ...], keep: Tensor) -> Tensor:
        """The attention itself, without projections. keep: boolean [batch, seq].

        Returns [batch, heads, seq, head_dim] in the dtype of `projected`.
        """
        raise NotImplementedError

    def initial_state(self, batch: int) -> State:
        """The state before the first token. Only causal layers whose state has a constant size have one."""
        raise SpecError(f"{self.spec.variant} attention keeps no state of constant size")

    def step(self, hidden_states: Tensor, state: State) -> tuple[Tensor, State]:
        """One token of the causal form: [batch, 1, dim] → [batch, 1, dim] and the next state."""
        raise SpecError(f"{self.spec.variant} attention keeps no state of constant size")

    def prefill(self, hidden_states: Tensor, keep: Tensor, state: State) -> tuple[Tensor, State]:
        """Many tokens of the causal form at once, after those that `state` holds: what `step` returns for each token,
        [batch, seq, dim], and the state after the last. Tokens where `keep`, boolean [batch, seq], is False leave the
        state as it is."""
        raise SpecError(f"{self.spec.variant} attention keeps no state of constant size")


class AttentionCore(nn.Module):
    """`AttentionLayer.mix` as a module of its own, without padding: what benchmarks of attention itself time."""

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *projected: Tensor) -> Tensor:
        """Attention over `project`'s outputs, each [batch, heads, seq, channels] → [batch, heads, seq, head_dim]."""
        batch, _, seq_len, _ = projected[0].shape
        keep = torch.ones(batch, seq_len, dtype=torch.bool, device=projected[0].device)
        return self.layer.mix(projected, keep)


@contextlib.contextmanager
def fused_operators(module: nn.Module, enabled: bool) -> Iterator[None]:
    """Have the attention layers of a module call fused operators, or not, for the length of a `with` block."""
    layers = [layer for layer in module.modules() if isinstance(layer, CallsOperators)]
    before = [layer.fused for layer in layers]
    try:
        for layer in layers:
            layer.fused = enabled
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.fused = value


class MultiHeadAttention(AttentionLayer):
    """An attention variant on separate query, key and value projections, split into heads."""

    spec: QueryKeySpec

    def __init__(self, spec: QueryKeySpec) -> None:
        super().__init__(spec, spec.inner_dim)
        self.query = nn.Linear(spec.dim, spec.inner_dim, bias=spec.bias)
        self.key = nn.Linear(spec.dim, spec.inner_dim, bias=spec.bias)
        self.value = nn.Linear(spec.dim, spec.inner_dim, bias=spec.bias)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each [batch, heads, seq, head_dim]."""
        spec = self.spec
        q, k, v = (split_heads(linear(hidden_states), spec.heads) for linear in (self.query, self.key, self.value))
        if spec.rotary:
            angles = rotary_angles(hidden_states.shape[1], spec.head_size, hidden_states.device)
            q, k = rotate_pairs(q, *angles), rotate_pairs(k, *angles)
        return q, k, v


class SameWeights(nn.Module):
    """A module around a model, with the model's weights and submodules under the same paths: it shares the model's own
    dictionaries."""

    _model: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        shared = {name: vars(model)[name] for name in ("_parameters", "_buffers", "_modules")}
        # not as an attribute, which would make the model a submodule with paths of its own
        vars(self).update(shared, _model=model)
        self.training = model.training

    def get_submodule(self, target: str) -> nn.Module:
        found: nn.Module = self._model.get_submodule(target)
        return found

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """Those of the model, with the model itself as the first: it may be a layer of ours."""
        yield from self._model.named_modules(*args, **options)


def failing_module(error: BaseException, model: nn.Module) -> str:
    """The path and class of the innermost submodule in whose code, or in whose part of a traced graph, an error was
    raised; "" if there is none."""
    paths = {id(child): path for path, child in model.named_modules() if path}
    found = ""
    cause: BaseException | None = error
    while cause is not None:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            owner, node = frame.f_locals.get("self"), frame.f_locals.get("node")
            if id(owner) in paths:
                found = f"{paths[id(owner)]} ({type(owner).__module__}.{type(owner).__qualname__})"
            elif isinstance(node, torch.fx.Node) and (stack := node.meta.get("nn_module_stack")):
                path, kind = list(stack.values())[-1]
                if isinstance(model, SameWeights):
                    path = path.removeprefix("_model").removeprefix(".")
                name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
                found = f"{path} ({name})" if path else ""
        cause = cause.__cause__ or cause.__context__
    return found
