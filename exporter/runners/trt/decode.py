"""The decode step and the prefill of a model as engines, with the state on the GPU."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.artifact import DECODE_STEP, PREFILL
from effexport.dtypes import TensorInfo
from effexport.engines.api import Api
from effexport.engines.sidecar import Shape
from effexport.export.onnx_graph import model_digest
from effexport.runners.cuda.device import Cuda
from effexport.runners.decode import DecodeRunner, Graph, states_of, zero_state
from effexport.runners.feeds import FeedLimits
from effexport.runners.runner import Closeable
from effexport.runners.trt.context import shapes_of
from effexport.runners.trt.execution import Execution, TrtSettings
from effexport.runners.trt.loading import Source, checked_sources
from effexport.runners.trt.profiles import Profiles
from effexport.runtimes import engine_name
from effexport.spec import NEXT_PREFIX

if TYPE_CHECKING:
    from effexport.dtypes import Array


def decoder_in_trt(
    folder: Path,
    target: str,
    limits: FeedLimits | None = None,
    settings: TrtSettings | None = None,
    *,
    cuda: Cuda | None = None,
    api: Api | None = None,
) -> DecodeRunner:
    """A decoder of the engines of a target in an artifact folder. cuda, api, errors: as for TrtRunner."""
    engines = {folder / engine_name(target, model): model_digest(folder / model) for model in (DECODE_STEP, PREFILL)}
    step, prefill = checked_sources(engines, api, cuda)
    return DecodeRunner(TrtGraphs(step, prefill, settings or TrtSettings()), limits)


class TrtGraphs(Closeable):
    """The graphs with state as two engines on one stream; see GraphsWithState.

    Every tensor of the state has two places on the GPU: a run reads one and writes the other, and then they change
    roles. Both engines use the same places. Nothing of the state is copied to the host unless `state` is read.
    """

    def __init__(self, step: Source, prefill: Source, settings: TrtSettings) -> None:
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
                self._step.shared.reserve(dict(shapes_of(state)))
                self._step.shared.write(state)
                self._step.cuda.synchronize()
        self._batch = len(next(iter(state.values()))) if state else None

    def _shapes_of_state(self, batch: int) -> dict[str, Shape]:
        return {tensor.name: (batch, *map(int, tensor.dims[1:])) for tensor in self._states}

    def run(self, graph: Graph, feeds: dict[str, Array]) -> dict[str, Array]:
        batch = len(next(iter(feeds.values())))
        shapes = (*shapes_of(feeds), *self._shapes_of_state(batch).items())
        profile = self._profiles[graph].covering(shapes)
        execution = self._execution(graph)
        nexts = [NEXT_PREFIX + tensor.name for tensor in self._states]
        with execution.turn(feeds):
            work = execution.shared
            work.prepare(profile, shapes)
            work.write(feeds if self._batch is not None else {**feeds, **zero_state(self._states, batch)})
            work.launch()
            results = work.fetch([t.name for t in self.outputs(graph) if t.name not in nexts])
            for tensor, following in zip(self._states, nexts, strict=True):
                work.swap(tensor.name, following)
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
