"""The decode step and the prefill of a model in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.dtypes import TensorInfo
from effexport.runners.decode import DecodeRunner, Graph, checked_state, states_of, zero_state
from effexport.runners.feeds import FeedLimits
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.ort.settings import OrtSettings
from effexport.runners.runner import Closeable
from effexport.spec import NEXT_PREFIX

if TYPE_CHECKING:
    from effexport.dtypes import Array


def decoder_in_ort(
    step: Path, prefill: Path | None = None, limits: FeedLimits | None = None, settings: OrtSettings | None = None
) -> DecodeRunner:
    """A decoder of two ONNX files. Raises as OrtRunner does."""
    return DecodeRunner(OrtGraphs(step, prefill, settings), limits)


class OrtGraphs(Closeable):
    """The graphs with state as two sessions; the state is on the host. See GraphsWithState."""

    def __init__(self, step: Path, prefill: Path | None, settings: OrtSettings | None) -> None:
        self._step = OrtRunner(step, settings)
        self._prefill: OrtRunner | None = None
        self._prefill_path = prefill
        self._states = states_of(self._step.inputs, self._step.outputs)
        self.settings = self._step.settings
        self.state: dict[str, Array] = {}

    @property
    def has_prefill(self) -> bool:
        return self._prefill_path is not None

    def _runner(self, graph: Graph) -> OrtRunner:
        """The runner of a graph; that of the prefill is opened when it is first needed, because it has weights of its
        own."""
        if graph is Graph.STEP:
            return self._step
        if self._prefill is None:
            assert self._prefill_path is not None, "has_prefill comes first"
            self._step.check_open()
            self._prefill = OrtRunner(self._prefill_path, self.settings)
        return self._prefill

    def inputs(self, graph: Graph) -> tuple[TensorInfo, ...]:
        return self._runner(graph).inputs

    def outputs(self, graph: Graph) -> tuple[TensorInfo, ...]:
        return self._runner(graph).outputs

    def accepts(self, graph: Graph, sizes: Mapping[str, int]) -> bool:
        return True

    def batch_of_state(self) -> int | None:
        # the dictionary and the arrays may have been written to since they were set
        self.state = checked_state(self.state, self._states)
        return next((len(array) for array in self.state.values()), None)

    def run(self, graph: Graph, feeds: dict[str, Array]) -> dict[str, Array]:
        state = self.state or zero_state(self._states, len(next(iter(feeds.values()))))
        results = self._runner(graph).run_checked({**feeds, **state})
        self.state = {t.name: results.pop(NEXT_PREFIX + t.name) for t in self._states}
        return results

    def close(self) -> None:
        self._step.close()
        if self._prefill is not None:
            self._prefill.close()
