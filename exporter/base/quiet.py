"""PyTorch while it traces a model: its graphs and remarks on itself stay off the screen, and it looks things up once.

Its errors are exceptions, and what they say becomes one message.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TextIO

_DEBUG: ContextVar[bool] = ContextVar("debug", default=False)
# Packages whose loggers have handlers of their own, or may get some from a program that calls us.
LOGGERS = ("torch", "transformers", "onnxscript", "onnx_ir", "onnx")
_EXPORTING = threading.RLock()


class MutedStream:
    """A stream that drops what one thread prints for a while, and passes on what other threads print."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._thread = threading.get_ident()
        # two threads may restore sys.stdout in another order than they replaced it: a muted stream may stay
        self.is_muted = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self.is_muted and threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)


@contextlib.contextmanager
def debugging(wanted: bool) -> Iterator[None]:
    """With --debug, show everything during the block."""
    token = _DEBUG.set(wanted)
    try:
        yield
    finally:
        _DEBUG.reset(token)


@contextlib.contextmanager
def quiet(*, streams: bool = False) -> Iterator[None]:
    """Drop Python warnings and what the loggers of PyTorch and others report, unless the command line has --debug.

    streams: also drop what this thread prints: a trace runs the user's code with symbols, and prints whole graphs.
    """
    if _DEBUG.get():
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(without_loggers())
        if streams:
            stack.enter_context(muted())
        yield


@contextlib.contextmanager
def without_loggers() -> Iterator[None]:
    known = logging.root.manager.loggerDict
    names = [*LOGGERS, *(name for name in list(known) if name.partition(".")[0] in LOGGERS)]
    loggers = dict.fromkeys(logging.getLogger(name) for name in names)
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    nothing = logging.NullHandler()
    for logger in loggers:
        logger.handlers, logger.propagate = [nothing], False
    try:
        yield
    finally:
        for logger, handlers, propagate in before:
            # a package that was imported meanwhile has added its own
            logger.handlers = [*handlers, *(handler for handler in logger.handlers if handler is not nothing)]
            logger.propagate = propagate


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Drop what this thread prints to stdout and stderr."""
    streams = [None if stream is None else MutedStream(stream) for stream in (sys.stdout, sys.stderr)]
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            yield
    finally:
        for stream in streams:
            if stream is not None:
                stream.is_muted = False


@contextlib.contextmanager
def few_lookups() -> Iterator[None]:
    """Let an export look up once what PyTorch would look up for every graph or call, with the same results.

    torch.onnx parses the sources of all its 560 translations for each graph, in 0.6 s: here, once a process.
    torch.export asks for all operators for each of 30 namespaces: once an export. It keeps the shapes of every call:
    with lengths that stay free, that costs up to a third of the time and hardly ever hits. Functions of PyTorch are
    replaced for that, so threads export one after the other.
    """
    import torch._dynamo.config
    from torch._export import utils
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with _EXPORTING, torch._dynamo.config.patch(fake_tensor_cache_enabled=False), contextlib.ExitStack() as stack:
        # PyTorch 2.9 to 2.13; there is nothing to keep where it is gone
        look_up = getattr(utils, "_materialize_cpp_cia_ops", None)
        kept: list[tuple[Any, str, Any]] = [(ONNXRegistry, "from_torchlib", _kept_registry(ONNXRegistry.from_torchlib))]
        kept += [(utils, "_materialize_cpp_cia_ops", functools.cache(look_up))] if look_up else []
        for owner, name, value in kept:
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)
        yield


@functools.cache
def _kept_registry(collect: Callable[..., Any]) -> staticmethod[..., Any]:
    """A method that collects each result of `collect` once, and returns copies: an export adds our operators."""
    collected = functools.cache(collect)

    def registry(*arguments: Any, **keywords: Any) -> Any:
        kept = copy.copy(collected(*arguments, **keywords))
        kept.functions = {name: list(translations) for name, translations in kept.functions.items()}
        return kept

    return staticmethod(registry)
