"""The runner of TensorRT and TensorRT-RTX, and that of a decode step with its prefill, whose state stays on the GPU."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.artifact import DECODE_STEP, PREFILL, Artifact
from effexport.base.dtypes import TensorInfo
from effexport.base.runtimes import engine_name
from effexport.base.spec import NEXT_PREFIX
from effexport.export.onnx_graph import model_digest
from effexport.runners.cuda import Cuda
from effexport.runners.decode import DecodeRunner, Graph, states_of, zero_state
from effexport.runners.options import RunOptions
from effexport.runners.runner import CheckedRunner, Closeable, FeedLimits, check_bound_feeds, signature_of
from effexport.tensorrt.execution import Execution, Source, checked_sources, shapes_of
from effexport.tensorrt.sidecar import EngineInfo, Shape
from effexport.tensorrt.spec import Profiles

if TYPE_CHECKING:
    from tensorrt import Api

    from effexport.base.dtypes import Array


class TrtRunner(CheckedRunner):
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
        settings: RunOptions | None = None,
        *,
        limits: FeedLimits | None = None,
        onnx_sha256: str | None = None,
        cuda: Cuda | None = None,
        api: Api | None = None,
    ) -> None:
        self.limits = limits or FeedLimits()
        (source,) = checked_sources({engine: onnx_sha256}, api, cuda)
        self.info = source.info
        self.settings = settings_of(source.info, settings)
        self.inputs, self.outputs = source.info.inputs, source.info.outputs
        self.implementation: dict[str, str] = dict(source.info.implementation)
        self._profiles = Profiles(source.info)
        self._execution = Execution(source, self.settings)
        # also frees the memory of a runner that is dropped without being closed
        self._finalizer = weakref.finalize(self, self._execution.close)

    def _run(self, opened: Execution, feeds: dict[str, Array]) -> dict[str, Array]:
        profile = self._profiles.covering(dict(shapes_of(feeds)))
        with opened.turn(feeds):
            work = opened.shared
            work.prepare(profile, shapes_of(feeds))
            work.write(feeds)
            work.launch()
            return work.fetch()

    def bind(self, feeds: Mapping[str, Array]) -> BoundEngine:
        """Copy the inputs to the device and allocate the outputs there, for many runs of one shape without copies.

        Raises as `run` does.
        """
        execution, complete = self.opened(), self.complete(feeds)
        return BoundEngine(self, execution, self._profiles.covering(dict(shapes_of(complete))), complete)

    def opened(self) -> Execution:
        """Unlike those of other runtimes, it ends with `close`, which frees the memory of the GPU, between two runs."""
        self._execution.require_open()
        return self._execution

    def close(self) -> None:
        """Free the engine and all its memory, including what `bind` returned. `run` fails afterwards."""
        self._execution.close()


def settings_of(info: EngineInfo, settings: RunOptions | None) -> RunOptions:
    """Options for the runtime of an engine, whichever they were made for. Raises UserError as RunOptions does."""
    return replace(settings or RunOptions(), runtime=info.target)


def open_engine(settings: RunOptions, engine: Path, limits: FeedLimits, onnx_sha256: str) -> TrtRunner:
    """See `effexport.runners.artifact_runner`."""
    return TrtRunner(engine, settings, limits=limits, onnx_sha256=onnx_sha256)


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


def decoder_in_trt(
    folder: Path,
    target: str,
    limits: FeedLimits | None = None,
    settings: RunOptions | None = None,
    *,
    cuda: Cuda | None = None,
    api: Api | None = None,
) -> DecodeRunner:
    """A decoder of the engines of a target in an artifact folder. cuda, api, errors: as for TrtRunner."""
    engines = {folder / engine_name(target, model): model_digest(folder / model) for model in (DECODE_STEP, PREFILL)}
    step, prefill = checked_sources(engines, api, cuda)
    return DecodeRunner(TrtGraphs(step, prefill, settings_of(step.info, settings)), limits)


def open_decoder(settings: RunOptions, artifact: Artifact, limits: FeedLimits) -> DecodeRunner:
    """See `effexport.runners.artifact_runner`. Raises UserError for an engine that the artifact does not have, too."""
    for model in (DECODE_STEP, PREFILL):
        artifact.engine_path(settings.runtime, model)
    return decoder_in_trt(artifact.path, settings.runtime, limits, settings)


class TrtGraphs(Closeable):
    """The graphs with state as two engines on one stream; see GraphsWithState.

    Every tensor of the state has two places on the GPU: a run reads one and writes the other, and then they change
    roles. Both engines use the same places. Nothing of the state is copied to the host unless `state` is read.
    """

    def __init__(self, step: Source, prefill: Source, settings: RunOptions) -> None:
        """Raises as Execution does."""
        self.settings = settings
        self._sources = {Graph.STEP: step, Graph.PREFILL: prefill}
        self._profiles = {graph: Profiles(source.info) for graph, source in self._sources.items()}
        self._states = states_of(step.info.inputs, step.info.outputs)
        self._batch: int | None = None
        self._step = Execution(step, settings)
        self._executions = {Graph.STEP: self._step}
        # also frees the memory of a decoder that is dropped without being closed
        self._finalizer = weakref.finalize(self, close_in_reverse, self._executions)

    has_prefill = True

    def inputs(self, graph: Graph) -> tuple[TensorInfo, ...]:
        return self._sources[graph].info.inputs

    def outputs(self, graph: Graph) -> tuple[TensorInfo, ...]:
        return self._sources[graph].info.outputs

    def accepts(self, graph: Graph, sizes: Mapping[str, int]) -> bool:
        return self._profiles[graph].index(sizes) is not None

    def batch_of_state(self) -> int | None:
        return self._batch

    @property
    def state(self) -> dict[str, Array]:
        """A copy on the host."""
        if self._batch is None:
            return {}
        shapes = self._shapes_of_state(self._batch)
        with self._step.turn({}):
            return self._step.shared.read(shapes)

    @state.setter
    def state(self, state: dict[str, Array]) -> None:
        if state:
            with self._step.turn(state):
                self._step.shared.buffers.reserve(dict(shapes_of(state)))
                self._step.shared.write(state)
                self._step.cuda.synchronize()
        self._batch = len(next(iter(state.values()))) if state else None

    def _shapes_of_state(self, batch: int) -> dict[str, Shape]:
        return {tensor.name: (batch, *map(int, tensor.dims[1:])) for tensor in self._states}

    def run(self, graph: Graph, feeds: dict[str, Array]) -> dict[str, Array]:
        batch = len(next(iter(feeds.values())))
        shapes = (*shapes_of(feeds), *self._shapes_of_state(batch).items())
        profile = self._profiles[graph].covering(dict(shapes))
        execution = self._execution(graph)
        nexts = [NEXT_PREFIX + tensor.name for tensor in self._states]
        with execution.turn(feeds):
            work = execution.shared
            work.prepare(profile, shapes)
            work.write(feeds if self._batch is not None else {**feeds, **zero_state(self._states, batch)})
            work.launch()
            results = work.fetch(but=nexts)
            for tensor, following in zip(self._states, nexts, strict=True):
                work.buffers.swap(tensor.name, following)
            self._batch = batch
        return results

    def _execution(self, graph: Graph) -> Execution:
        """The engine of a graph; that of the prefill is loaded when it is first needed, because it has weights of its
        own."""
        self._step.require_open()
        if graph not in self._executions:
            self._executions[graph] = Execution(self._sources[graph], self.settings, host=self._step)
        return self._executions[graph]

    def close(self) -> None:
        """Free both engines and all their memory."""
        self._finalizer()


def close_in_reverse(executions: Mapping[Graph, Execution]) -> None:
    for execution in reversed(list(executions.values())):
        execution.close()
