"""effexport: efficient-attention models from PyTorch to ONNX and TensorRT, with proof that they compute the same.

build, verify, prove, sign, evaluate, refit, inspect and report do what the commands of these names do; export builds
from an nn.Module; load, load_decoder, load_encoder_decoder and load_generator run an artifact, load_text gives it
texts, and hf puts one in the place of a model of transformers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from effexport.base.version import __version__

if TYPE_CHECKING:
    from effexport import hf
    from effexport.api import (
        BuildResult,
        Description,
        build,
        evaluate,
        export,
        inspect,
        load,
        load_decoder,
        load_encoder_decoder,
        load_generator,
        load_text,
        prove,
        refit,
        report,
        sign,
        verify,
    )
    from effexport.base.errors import EffexportError, StageError, UserError
    from effexport.runners.options import RunOptions
    from effexport.tasks.sampling import Sampling
    from effexport.tasks.task import TextOptions

__all__ = [
    "BuildResult",
    "Description",
    "EffexportError",
    "RunOptions",
    "Sampling",
    "StageError",
    "TextOptions",
    "UserError",
    "__version__",
    "build",
    "evaluate",
    "export",
    "hf",
    "inspect",
    "load",
    "load_decoder",
    "load_encoder_decoder",
    "load_generator",
    "load_text",
    "prove",
    "refit",
    "report",
    "sign",
    "verify",
]

# Where public names are defined, other than in effexport.api. They are imported on first use, so that
# `import effexport` stays quick.
_HOMES = {
    "RunOptions": "effexport.runners.options",
    "Sampling": "effexport.tasks.sampling",
    "TextOptions": "effexport.tasks.task",
    **dict.fromkeys(("EffexportError", "StageError", "UserError"), "effexport.base.errors"),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "hf":
        return importlib.import_module("effexport.hf")
    return getattr(importlib.import_module(_HOMES.get(name, "effexport.api")), name)


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """This package. Some of its modules, such as effexport.build, have the names of functions; Python sets
    a module as an attribute of its package when it imports it, and the functions keep their names here."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
