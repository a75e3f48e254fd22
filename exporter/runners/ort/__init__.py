"""ONNX Runtime."""

from __future__ import annotations

from typing import Any

from effexport.base.errors import MissingExtraError
from effexport.base.runtimes import DEFAULT_RUNTIME, RUNTIMES


def import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        package = RUNTIMES[DEFAULT_RUNTIME].package
        if package.version is not None:
            raise  # it is damaged, which the command line explains
        raise MissingExtraError("onnxruntime", package.extra) from error
    return onnxruntime
