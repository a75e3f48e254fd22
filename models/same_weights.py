"""Wrappers around a model that keep the names of its weights, and the submodule inside that an error is about."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


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
