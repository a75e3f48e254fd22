"""ONNX Runtime's IOBinding: inputs and outputs that stay on the device between runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from effexport.dtypes import TensorInfo
from effexport.errors import EffexportError, RuntimeFailedError, UserError
from effexport.runners.feeds import check_bound_feeds, signature_of
from effexport.runners.ort.settings import OrtSettings, import_onnxruntime
from effexport.runners.ort.values import array_from_value, update_value, value_from_array

if TYPE_CHECKING:
    from effexport.dtypes import Array

GRAPH_ID_KEY = "gpu_graph_id"
# Runs with this id neither capture nor replay a graph.
NO_GRAPH = "-1"


class BoundModel:
    """A model bound to inputs and outputs of one shape, made by `OrtRunner.bind`.

        bound = runner.bind(feeds)          # copies the inputs to the device and allocates the outputs
        bound.run()                         # copies nothing
        outputs = bound.outputs()           # copies the outputs to the host
        bound.update({"input_ids": ids})    # other values, same shapes

    With `cuda_graph`, the first runs capture the work of the GPU, and later runs replay it in one launch. Each thread
    that runs it captures a graph of its own. Each method holds a lock; a caller with several threads must keep update,
    run and outputs together.
    """

    _graph_ids = itertools.count(1)

    def __init__(
        self,
        session: Any,
        feeds: Mapping[str, Array],
        outputs: tuple[TensorInfo, ...],
        settings: OrtSettings,
        lock: AbstractContextManager[Any],
    ) -> None:
        """feeds: complete and checked. lock: held while the session runs, and while inputs or outputs are copied."""
        ort = import_onnxruntime()
        device = (settings.device, settings.device_id)
        self._session = session
        self._outputs = outputs
        self._lock = lock
        self._has_run = False
        # whether some inputs may have new values and others old ones
        self._mixed = False
        self._inputs = {name: value_from_array(ort, array.copy(), *device) for name, array in feeds.items()}
        self._signature = signature_of(feeds)
        self._binding = session.io_binding()
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        # the shapes of outputs are known after a run
        for tensor in outputs:
            self._binding.bind_output(tensor.name, *device)
        with self._lock:
            session.run_with_iobinding(self._binding, run_options(NO_GRAPH))
        found = [(value.shape(), value.element_type()) for value in self._binding.get_outputs()]
        self._binding.clear_binding_outputs()
        # not in the session's arena: the graph of another bound model would replay its work over them, because its
        # memory went back to that arena when it was captured
        self._results = [ort.OrtValue.ortvalue_from_shape_and_type(*tensor, *device) for tensor in found]
        for tensor, value in zip(outputs, self._results, strict=True):
            self._binding.bind_ortvalue_output(tensor.name, value)
        self._options = run_options(str(next(self._graph_ids)) if settings.cuda_graph else NO_GRAPH)

    def update(self, feeds: Mapping[str, Array]) -> None:
        """Copy new values, unchecked, into bound inputs.

        Raises UserError for another name, dtype or shape; all inputs then stay as they were. Raises RuntimeFailedError
        if a copy fails; `run` then refuses to mix new and old values until an update of all inputs succeeds.
        """
        check_bound_feeds(feeds, self._signature)
        with self._lock, failures("cannot copy values into bound inputs"):
            still_mixed = self._mixed and len(feeds) < len(self._inputs)
            self._mixed = True
            for name, array in feeds.items():
                update_value(self._inputs[name], array)
            self._mixed = still_mixed

    def run(self) -> None:
        """Compute the outputs from the inputs, on the device.

        Raises RuntimeFailedError when the graph fails, and after an update that failed.
        """
        with self._lock, failures("failed on bound inputs"):
            if self._mixed:
                raise RuntimeFailedError("an update failed, so some inputs may have old values; update all of them")
            self._session.run_with_iobinding(self._binding, self._options)
            self._has_run = True

    def outputs(self) -> dict[str, Array]:
        """Copies of the outputs of the last run, on the host.

        Raises UserError before the first run, and RuntimeFailedError if a copy fails.
        """
        if not self._has_run:
            raise UserError("this bound model has no outputs yet; call run() first")
        with self._lock, failures("cannot copy outputs to the host"):
            return {
                tensor.name: array_from_value(value, tensor.dtype)
                for tensor, value in zip(self._outputs, self._results, strict=True)
            }


@contextmanager
def failures(what: str) -> Iterator[None]:
    """Raise errors of onnxruntime as RuntimeFailedError, and those of effexport as they are."""
    try:
        yield
    except EffexportError:
        raise
    except Exception as error:  # onnxruntime has no common base class for its errors
        raise RuntimeFailedError(f"ONNX Runtime {what}: {error}") from error


def run_options(graph_id: str) -> Any:
    """Options of one run; graph_id names the CUDA graph to capture or replay."""
    options = import_onnxruntime().RunOptions()
    options.add_run_config_entry(GRAPH_ID_KEY, graph_id)
    return options
