"""The runner of TensorRT and TensorRT-RTX."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.engines.api import Api
from effexport.runners.cuda.device import Cuda
from effexport.runners.feeds import FeedLimits, check_answer, check_bound_feeds, checked_feeds, signature_of
from effexport.runners.runner import Closeable, runner_text
from effexport.runners.trt.context import shapes_of
from effexport.runners.trt.execution import Execution
from effexport.runners.trt.execution import TrtSettings as TrtSettings
from effexport.runners.trt.loading import checked_sources
from effexport.runners.trt.profiles import Profiles

if TYPE_CHECKING:
    from effexport.dtypes import Array


class TrtRunner(Closeable):
    """Runs an engine. Thread-safe: runs of several threads take turns. Use it as a context manager or call `close`.

    engine: path of the file, whose sidecar lies beside it. onnx_sha256: digest of the model.onnx that it should have
    been built from; None skips that check. cuda, api: other implementations; the runner closes `cuda`.
    implementation: per custom operator of the model, what runs it: "plugin", "body" or "Attention".
    Raises UserError for an engine that is missing, damaged, of another model, or not for this release or GPU, and
    without a GPU; MissingExtraError without TensorRT or cuda-python; EffexportError if TensorRT does not load it.
    """

    def __init__(
        self,
        engine: Path,
        settings: TrtSettings | None = None,
        *,
        limits: FeedLimits | None = None,
        onnx_sha256: str | None = None,
        cuda: Cuda | None = None,
        api: Api | None = None,
    ) -> None:
        self.settings = settings or TrtSettings()
        self.limits = limits or FeedLimits()
        (source,) = checked_sources({engine: onnx_sha256}, api, cuda)
        self.info = source.info
        self.inputs, self.outputs = source.info.inputs, source.info.outputs
        self.implementation: dict[str, str] = dict(source.info.implementation)
        self._profiles = Profiles(source.info)
        self._execution = Execution(source, self.settings)
        # also frees the memory of a runner that is dropped without being closed
        self._finalizer = weakref.finalize(self, self._execution.close)

    def __repr__(self) -> str:
        return runner_text(self)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays by input name → arrays by output name. An absent attention mask means no padding.

        Raises UserError for a wrong name, dtype, rank, size or value, for a shape outside the profiles, and for inputs
        whose outputs would have no elements, and RuntimeFailedError if TensorRT fails.
        """
        profile, complete = self._checked(feeds)
        execution = self._execution
        with execution.turn(complete):
            work = execution.shared
            work.prepare(profile, shapes_of(complete))
            work.write(complete)
            work.launch()
            answer = work.fetch()
        check_answer(answer, complete, self.inputs, self.limits)
        return answer

    def bind(self, feeds: Mapping[str, Array]) -> BoundEngine:
        """Copy the inputs to the device and allocate the outputs there, for many runs of one shape without copies.

        Raises as `run` does.
        """
        profile, complete = self._checked(feeds)
        return BoundEngine(self, self._execution, profile, complete)

    def _checked(self, feeds: Mapping[str, Array]) -> tuple[int, dict[str, Array]]:
        self._execution.require_open()
        complete = checked_feeds(feeds, self.inputs, self.limits)
        return self._profiles.covering(shapes_of(complete)), complete

    def close(self) -> None:
        """Free the engine and all its memory, including what `bind` returned. `run` fails afterwards."""
        self._execution.close()


def open_engine(engine: Path, limits: FeedLimits, onnx_sha256: str) -> TrtRunner:
    """See `effexport.runners.artifact_runner`."""
    return TrtRunner(engine, limits=limits, onnx_sha256=onnx_sha256)


class BoundEngine:
    """An engine bound to inputs and outputs of one shape, made by `TrtRunner.bind`, with the methods of `BoundModel`.

    Each method holds the lock of the runner; a caller with several threads must keep update, run and outputs together.
    The runner frees the memory once this object is gone, or when the runner is closed.
    """

    def __init__(self, runner: TrtRunner, execution: Execution, profile: int, feeds: Mapping[str, Array]) -> None:
        """feeds: complete and checked."""
        self._runner = runner  # a runner without references would be closed
        self._execution = execution
        self._signature = signature_of(feeds)
        with execution.turn(feeds):
            work = self._work = execution.new_work(max_graphs=1)
            try:
                work.prepare(profile, shapes_of(feeds))
                work.write(feeds)
                # if graphs are wanted, the second run captures one
                for _ in range(2 if execution.captures else 1):
                    work.launch()
                execution.cuda.synchronize()
            except BaseException:
                execution.abandoned.append(work)
                raise
        finalizer = weakref.finalize(self, execution.abandoned.append, work)
        finalizer.atexit = False  # at exit, closing the runner frees it

    def update(self, feeds: Mapping[str, Array]) -> None:
        """Copy new values, unchecked, into bound inputs. Raises UserError for another name, dtype or shape."""
        check_bound_feeds(feeds, self._signature)
        with self._execution.turn(feeds):
            self._work.write(feeds)
            self._execution.cuda.synchronize()

    def run(self) -> None:
        """Compute the outputs from the inputs, on the device. Raises RuntimeFailedError when TensorRT fails."""
        with self._execution.turn(None):
            self._work.launch()
            self._execution.cuda.synchronize()

    def outputs(self) -> dict[str, Array]:
        """Copies of the outputs of the last run, on the host."""
        with self._execution.turn(None):
            return self._work.fetch()
