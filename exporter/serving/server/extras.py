"""Checks that the optional packages are installed."""

from __future__ import annotations

import importlib

from effexport.errors import MissingExtraError


def require_serving() -> None:
    """Raises MissingExtraError."""
    for module in ("starlette", "uvicorn", "httptools", "orjson", "prometheus_client"):
        _require(module, module.replace("_", "-"), "serve")


def require_ray() -> None:
    """Raises MissingExtraError."""
    require_serving()
    _require("ray.serve", "ray[serve]", "serve-ray")


def _require(module: str, package: str, extra: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(package, extra) from error
