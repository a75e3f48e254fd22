"""An adapter: the layers of one package that have a counterpart of ours, and a model in which they are ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from effexport.models.validation import SpecError

# Makes our module from a layer of the package. It gets the layer, in evaluation mode and not to be changed, and the
# length in tokens that the model is exported for. The result has the `forward` of the layer: the same arguments under
# the same names, and the same result.
Replacement = Callable[[Any, int], nn.Module]


@dataclass(frozen=True)
class Adapter:
    """One package: which of its layers become which of ours.

    package: its name as pip knows it. tested: the versions that the tests compare with, as prefixes ("4.57").
    replacements: by qualified class name, so that the package is never imported. projections: parts of the layers, by
    path, that these call as linear layers; a replacement finds an `nn.Linear` there, whatever computes the same. reads:
    the names of linear layers whose weights a layer reads in evaluation mode, without a call.
    """

    package: str
    tested: tuple[str, ...]
    replacements: Mapping[str, Replacement]
    projections: tuple[str, ...] = ()
    reads: Callable[[Any], Sequence[str]] = lambda layer: ()


class NotReplaceableError(Exception):
    """A replacement raises this for a layer that no spec of ours can express: an option, as half a sentence.

    The layer is then exported as it stands, and the report says why.
    """


class NotExportableError(SpecError):
    """A replacement raises this for a layer whose behaviour no file can have, such as numbers drawn in `forward`
    for which nobody knows what to store; the message is half a sentence, and the build ends with it."""


@runtime_checkable
class DrawsNumbers(Protocol):
    """A replacement of a layer that draws random numbers in `forward`; ours holds numbers that were drawn once."""

    def frozen(self, original: nn.Module, buckets: dict[str, Tensor]) -> AbstractContextManager[None]:
        """Have `original` use our numbers for the length of a `with` block.

        buckets: gets what the hashes of `original` choose in each run, in the layout of `LSHHash`, by the path of our
        hash below the replacement. Works also for a copy of `original` in float64.
        """


def qualified_name(layer: object) -> str:
    """The module and name of a layer's class, such as "torch.nn.modules.activation.MultiheadAttention"."""
    kind = type(layer)
    if kind.__module__ == "torch.nn.utils.parametrize":  # the class of a layer whose own weights have parametrizations
        kind = kind.__bases__[0]
    return f"{kind.__module__}.{kind.__qualname__}"


def is_below(path: str, other: str) -> bool:
    """True if a path is the layer at `other`, or leads into it; "" is the model itself."""
    return path == other or path.startswith(f"{other}." if other else "")


def named(original: nn.Module, path: str) -> str:
    """A layer with its place, such as "blocks.0.attn (nystrom_attention.NystromAttention)"."""
    name = qualified_name(original.get_submodule(path))
    return f"{path} ({name})" if path else name


@dataclass(frozen=True)
class Adapted:
    """A copy of a model with our layers in the place of others.

    replaced: our modules by the path of the layer they stand for, "" for the model itself. kept: why a known layer was
    kept as it stands, by path, as half a sentence. folded: the modules whose weights are computed in every call in the
    original, and stored in the copy; those inside replaced layers became plain linear layers. by_answers: the replaced
    layers that were known by their answers, not by their class.
    """

    module: nn.Module
    replaced: Mapping[str, nn.Module]
    kept: Mapping[str, str]
    folded: Sequence[str] = ()
    by_answers: Sequence[str] = ()


@contextmanager
def frozen(original: nn.Module, adapted: Adapted) -> Iterator[dict[str, Tensor]]:
    """Have the layers of an original use the numbers of their replacements for the length of a `with` block.

    original: the model that `adapted` was made from, or a copy of it. Yields the buckets that its hashes choose in each
    run, by the path of our hash in `adapted.module`.
    """
    buckets: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for path, ours in adapted.replaced.items():
            if isinstance(ours, DrawsNumbers):
                own = PrefixedBuckets(buckets, f"{path}." if path else "")
                stack.enter_context(ours.frozen(original.get_submodule(path), own))
        yield buckets


class PrefixedBuckets(dict[str, Tensor]):
    """Passes what is written into it on, under names that begin with a prefix."""

    def __init__(self, target: dict[str, Tensor], prefix: str) -> None:
        super().__init__()
        self._target, self._prefix = target, prefix

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._target[self._prefix + name] = value


def linear_weights(owner: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The state of our linear layers; one without a bias gets a bias of zeros.

    names: of our layers, by the names that the linear layers have in `owner`.
    """
    found = {}
    for theirs, ours in names.items():
        linear: Any = getattr(owner, theirs)
        found[f"{ours}.weight"] = linear.weight
        found[f"{ours}.bias"] = linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
    return {name: torch.clone(value.detach()) for name, value in found.items()}


def weight_alone(owner: nn.Module, name: str) -> Tensor:
    """The weight of a linear layer. Raises NotReplaceableError for one with a bias, which ours has no place for."""
    linear: Any = getattr(owner, name)
    if linear.bias is not None and bool(linear.bias.any()):
        raise NotReplaceableError(f"its {name} has a bias, which those of its package do not have")
    weight: Tensor = linear.weight.detach()
    return weight


def refuse(**given: object) -> None:
    """Raise SpecError for an argument of a call that our layers do not have."""
    for name, value in given.items():
        used = len(value) > 0 if name == "past_buckets_states" and hasattr(value, "__len__") else value
        if used is not None and used is not False:
            raise SpecError(f"the layer got {name}, which its counterpart in effexport does not take; leave it out")


def shallow_copy(layer: nn.Module) -> Any:
    """A module with the same parts, whose attributes and parts can be set without a change of the other."""
    made = copy.copy(layer)
    made._modules = dict(layer._modules)
    return made


class GivenDraws(TorchFunctionMode):
    """While it is active, torch.randn returns what `draw` says."""

    def draw(self, shape: Sequence[int]) -> Tensor:
        """The numbers for a call of torch.randn that asks for this shape."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return self.draw(args[0]).to(**kwargs) if func is torch.randn else func(*args, **kwargs)
