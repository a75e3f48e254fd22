"""Weights that a layer computes in every call, from others, as the tensors that they are in evaluation mode: weight and
spectral norms, masks of pruning, other parametrizations, and projections with adapters of low rank."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm, SpectralNormLoadStateDictPreHook, SpectralNormStateDictHook
from torch.nn.utils.weight_norm import WeightNorm

from effexport.models.adapters.adapter import NotReplaceableError, qualified_name

# Hooks of PyTorch that set a weight of their module before it runs, and do nothing else.
HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)
# What they keep beside the weight, after its name.
SOURCES = ("_g", "_v", "_orig", "_u", "_mask")
STATE_HOOKS = (SpectralNormStateDictHook, SpectralNormLoadStateDictPreHook)
# Largest difference of a part from the linear layer in its place, as a fraction of the largest value: that of rounding,
# the second for parts that compute in float32 whatever they get.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5}


def detached_copy(model: nn.Module) -> nn.Module:
    """A copy, also of a model with results of a run in its attributes, as the hooks of PyTorch leave their weights."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


@torch.no_grad()
def fold_computed_weights(model: nn.Module, keep: Container[str] = ()) -> list[str]:
    """Store the weights that PyTorch's hooks and parametrizations compute, in a copy of a model in evaluation mode.

    keep: paths of modules to leave alone. Returns the paths of the others with such weights. One whose weights fail, or
    change from call to call, stays.
    """
    # of these, PyTorch reads the weights without a call, in which hooks would run
    never_called = {id(one.out_proj) for one in model.modules() if isinstance(one, nn.MultiheadAttention)}
    found: list[tuple[str, nn.Module, dict[str, Tensor]]] = []
    for path, module in model.named_modules():
        if path in keep:
            continue
        try:
            values, again = (weights_of(module, is_called=id(module) not in never_called) for _ in range(2))
        except Exception:  # whatever a parametrization of the user's raises
            continue
        if values and all(torch.equal(value, again[name]) for name, value in values.items()):
            found.append((path, module, values))
    # only now, because a weight may be computed from one that another module shares
    for _, module, values in found:
        store(module, values)
    return [path for path, _, _ in found]


def weights_of(module: nn.Module, is_called: bool) -> dict[str, Tensor]:
    """The computed weights of a module by name: as its next call would find them, or as they are without calls."""
    for hook in own_hooks(module) * is_called:
        hook(module, ())
    return {name: getattr(module, name).clone() for name in computed(module)}


def own_hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, HOOKS)]


def computed(module: nn.Module) -> Iterator[str]:
    """The names of the weights of a module that PyTorch's hooks and parametrizations compute."""
    for hook in own_hooks(module):
        yield hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name
    if parametrize.is_parametrized(module):
        assert isinstance(module.parametrizations, nn.ModuleDict)
        yield from module.parametrizations


def store(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Make tensors parameters of a module, in the place of the hooks and parametrizations that compute them.

    PyTorch's own functions for this also change what other modules have of it: the class of a parametrized module is
    that of its copies, too, and a tensor may be tied.
    """
    for name in [f"{name}{suffix}" for name in values for suffix in SOURCES]:
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
    for hooks, kinds in (
        (module._forward_pre_hooks, HOOKS),
        (module._state_dict_hooks, STATE_HOOKS),
        (module._load_state_dict_pre_hooks, STATE_HOOKS),
    ):
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), kinds)]:
            del hooks[key]
    if parametrize.is_parametrized(module):
        module.__class__ = parametrize.type_before_parametrizations(module)
        del module.parametrizations
    for name, value in values.items():
        vars(module).pop(name, None)
        setattr(module, name, nn.Parameter(value, requires_grad=False))


def with_plain_projections(layer: nn.Module, names: Sequence[str]) -> tuple[nn.Module, list[str]]:
    """A layer whose parts of these names are linear layers, and which of them were not; `layer` stays as it is.

    Raises NotReplaceableError for a part that computes something else.
    """
    plain, folded = layer, []
    for name in names:
        part = dict(layer.named_modules()).get(name)
        if part is None or (type(part) is nn.Linear and not has_hooks(part)):
            continue
        linear = linear_from(part)
        if linear is None:
            raise NotReplaceableError(f"its {name}, a {qualified_name(part)}, is not a linear layer in effect")
        plain = with_part(plain, name, linear)
        folded.append(name)
    return plain, folded


@torch.no_grad()
def with_read_weights(layer: nn.Module, names: Sequence[str]) -> tuple[nn.Module, list[str]]:
    """A layer with linear layers in the place of parts of these names whose weight and bias it reads, and does not
    call; and which of them were something else."""
    plain, read = layer, []
    for name in names:
        part: Any = layer.get_submodule(name)
        if not type(part).__module__.startswith("torch."):
            linear = nn.Linear(part.weight.shape[1], part.weight.shape[0], bias=part.bias is not None)
            linear.load_state_dict({key: getattr(part, key).detach() for key in linear.state_dict()})
            plain = with_part(plain, name, linear.requires_grad_(False).eval())
            read.append(name)
    return plain, read


def unwrapped_layer(layer: Any) -> nn.Module | None:
    """The layer inside one that changes its weights in every call, as peft does around nn.MultiheadAttention, with the
    weights of such a call; None for other layers, and if peft leaves its adapters out or cannot do without them.
    """
    if not hasattr(layer, "unload_and_optionally_merge_module") or layer.disable_adapters:
        return None
    own: Any = detached_copy(layer)
    try:
        inner: nn.Module = own.unload_and_optionally_merge_module(not own.merged, safe_merge=False, adapter_names=None)
    except Exception:  # whatever adapters of another kind raise
        return None
    return inner


def has_hooks(layer: nn.Module) -> bool:
    """True if a layer, or one inside it, has forward hooks, which may change its result."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules())


def with_part(layer: nn.Module, name: str, part: nn.Module) -> nn.Module:
    """A shallow copy of a layer with another part at a path."""
    first, _, rest = name.partition(".")
    changed = copy.copy(layer)
    changed._modules = dict(layer._modules)
    changed._modules[first] = with_part(layer.get_submodule(first), rest, part) if rest else part
    return changed


@torch.no_grad()
def linear_from(part: nn.Module) -> nn.Linear | None:
    """The linear layer that computes what a part does in evaluation mode, found by running it; None if there is none.

    The part gets zeros and unit vectors, and then numbers of three magnitudes, at which it may only differ by rounding.
    """
    generator = torch.Generator().manual_seed(0)
    for dtype, rounding in ROUNDING.items():
        for width in widths_of(part):
            try:
                run = detached_copy(part).to(dtype).eval()
                bias = run(torch.zeros(1, 1, width, dtype=dtype))[0, 0]
                weight = run(torch.eye(width, dtype=dtype)[None])[0] - bias
                numbers = [torch.randn(2, 5, width, generator=generator, dtype=dtype) * size for size in (1e-3, 1, 1e3)]
                pairs = [(run(x), x @ weight + bias) for x in numbers]
            except Exception:  # whatever the user's code raises, at a width that is not its own, or in another type
                continue
            if all(is_close(actual, expected, rounding) for actual, expected in pairs):
                stored = next(part.parameters(), bias).dtype
                linear = nn.Linear(weight.shape[0], weight.shape[1], bias=bool(bias.any()), dtype=stored)
                linear.weight.copy_(weight.T)
                if linear.bias is not None:
                    linear.bias.copy_(bias)
                return linear.requires_grad_(False).eval()
    return None


def is_close(actual: Tensor, expected: Tensor, rounding: float) -> bool:
    """True if two tensors of one shape are finite and differ by at most a fraction of the largest value."""
    return actual.shape == expected.shape and bool(
        torch.isfinite(expected).all() and (actual - expected).abs().max() <= rounding * expected.abs().max()
    )


def widths_of(part: nn.Module) -> list[int]:
    """Candidates for the number of channels that a part takes, the most likely first."""
    given = [getattr(one, "in_features", None) for one in part.modules()]
    sizes = [size for tensor in (*part.parameters(), *part.buffers()) if tensor.dim() == 2 for size in tensor.shape]
    return list(dict.fromkeys(width for width in (*given, *sizes) if isinstance(width, int) and width > 0))
