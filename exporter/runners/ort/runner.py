"""The runners of ONNX Runtime: one call at a time, bound to inputs on the device, and decoding with a state."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from effexport.base.dtypes import DTYPES, TensorInfo
from effexport.base.errors import EffexportError, RefusedNumbersError, RuntimeFailedError, UserError
from effexport.base.spec import NEXT_PREFIX
from effexport.runners.decode import DecodeRunner, Graph, states_of, zero_state
from effexport.runners.options import RunOptions
from effexport.runners.ort import import_onnxruntime
from effexport.runners.ort.session import session_from_model
from effexport.runners.runner import (
    CheckedRunner,
    Closeable,
    FeedLimits,
    check_bound_feeds,
    checked_state,
    signature_of,
)

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.base.dtypes import Array


_DTYPE_OF_ORT_TYPE = {dtype.ort: name for name, dtype in DTYPES.items()}


class OrtRunner(CheckedRunner):
    """Runs an ONNX model. Thread-safe; use it as a context manager or call `close`. With `cuda_graph`, one thread runs
    at a time.

    model: path of the file, or the serialised model together with the folder of its external data.
    optimized: whether ONNX Runtime changes the graph; without it, every value is computed as it is written.
    implementation: per custom operator of the model, what runs it here: "kernel" or "body".
    Raises MissingExtraError without onnxruntime, UserError for a provider or kernels that are not available, and
    RuntimeUnsupportedError if ONNX Runtime refuses the model.
    """

    def __init__(
        self,
        model: Path | bytes,
        settings: RunOptions | None = None,
        *,
        limits: FeedLimits | None = None,
        external_folder: Path | None = None,
        optimized: bool = True,
    ) -> None:
        self.settings = settings or RunOptions()
        session = session_from_model(model, self.settings, external_folder, optimized=optimized)
        self._session: Any = session.inference
        # the addresses of these feeds change, and a CUDA graph would reuse the old ones
        self._options = run_options(NO_GRAPH) if self.settings.cuda_graph else None
        # with CUDA graphs, ONNX Runtime forbids several threads in one session, in whatever they run
        self._lock: Lock | nullcontext[None] = Lock() if self.settings.cuda_graph else nullcontext()
        self.implementation: dict[str, str] = dict(session.implementation)
        self.limits = limits or FeedLimits()
        self.inputs = tuple(tensor_info(value) for value in self._session.get_inputs())
        self.outputs = tuple(tensor_info(value) for value in self._session.get_outputs())

    def _run(self, opened: Any, feeds: dict[str, Array]) -> dict[str, Array]:
        names = [tensor.name for tensor in self.outputs]
        try:
            with self._lock:
                if "bfloat16" in {tensor.dtype for tensor in (*self.inputs, *self.outputs)}:
                    return self._run_values(opened, feeds, names)
                return dict(zip(names, opened.run(names, feeds, self._options), strict=True))
        except Exception as error:  # onnxruntime has no common base class for its errors
            raise run_failure(feeds, error) from error

    def bind(self, feeds: Mapping[str, Array]) -> BoundModel:
        """Copy the inputs to the device and allocate the outputs there, for many runs of one shape without copies.

        Raises as `run` does.
        """
        session, complete = self.opened(), self.complete(feeds)
        try:
            lock = self._lock if self.settings.cuda_graph else Lock()
            return BoundModel(session, complete, self.outputs, self.settings, lock)
        except EffexportError:
            raise
        except Exception as error:  # onnxruntime has no common base class for its errors
            raise run_failure(complete, error) from error

    def opened(self) -> Any:
        """The session, which stays open as long as a run holds it. Raises EffexportError after `close`."""
        session = self._session
        if session is None:
            raise EffexportError("this runner is closed; load the artifact again")
        return session

    def _run_values(self, session: Any, feeds: Mapping[str, Array], names: list[str]) -> dict[str, Array]:
        """Like `run`, for models with element types that numpy does not have."""
        ort = import_onnxruntime()
        values = {name: value_from_array(ort, array) for name, array in feeds.items()}
        results = session.run_with_ort_values(names, values, self._options)
        dtypes = [tensor.dtype for tensor in self.outputs]
        return {n: array_from_value(value, dtype) for n, dtype, value in zip(names, dtypes, results, strict=True)}

    def close(self) -> None:
        """Free the session, after the runs that other threads have begun. `run` fails afterwards."""
        self._session = None


def open_model(
    settings: RunOptions, model: Path | bytes, limits: FeedLimits, external_folder: Path | None = None
) -> OrtRunner:
    """See `effexport.runners.artifact_runner`."""
    return OrtRunner(model, settings, limits=limits, external_folder=external_folder)


def run_failure(feeds: Mapping[str, Array], error: Exception) -> RuntimeFailedError:
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in feeds.items())
    takes_floats = any(value.dtype.kind not in "iub" for value in feeds.values())
    # by its name, because importing it would import onnxruntime
    is_refused = takes_floats and type(error).__name__ == "InvalidArgument"
    return (RefusedNumbersError if is_refused else RuntimeFailedError)(f"ONNX Runtime failed on {shapes}: {error}")


def tensor_info(value: Any) -> TensorInfo:
    """TensorInfo of a session's input or output."""
    dims = tuple(dim if dim is not None else "?" for dim in value.shape)
    return TensorInfo(value.name, _DTYPE_OF_ORT_TYPE.get(value.type, value.type), dims)


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
        settings: RunOptions,
        lock: AbstractContextManager[Any],
    ) -> None:
        """feeds: complete and checked. lock: held while the session runs, and while inputs or outputs are copied."""
        ort = import_onnxruntime()
        device = (settings.row.tensors, settings.device)
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


def decoder_in_ort(
    step: Path, prefill: Path | None = None, limits: FeedLimits | None = None, settings: RunOptions | None = None
) -> DecodeRunner:
    """A decoder of two ONNX files. Raises as OrtRunner does."""
    return DecodeRunner(OrtGraphs(step, prefill, settings), limits)


def open_decoder(settings: RunOptions, artifact: Artifact, limits: FeedLimits) -> DecodeRunner:
    """See `effexport.runners.artifact_runner`."""
    return decoder_in_ort(artifact.decode_step_path, artifact.prefill_path, limits, settings)


class OrtGraphs(Closeable):
    """The graphs with state as two sessions; the state is on the host. See GraphsWithState."""

    def __init__(self, step: Path, prefill: Path | None, settings: RunOptions | None) -> None:
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
            self._step.opened()
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
        results = self._runner(graph).run_complete({**feeds, **state})
        self.state = {t.name: results.pop(NEXT_PREFIX + t.name) for t in self._states}
        return results

    def close(self) -> None:
        self._step.close()
        if self._prefill is not None:
            self._prefill.close()


def value_from_array(ort: Any, array: Array, device: str = "cpu", device_id: int = 0) -> Any:
    """A value on "cpu", which may share the array's memory, or a copy on "cuda", on the GPU of this index.

    numpy has bfloat16 only through ml_dtypes, which onnxruntime does not accept: its bits are passed instead, which
    works on the CPU only. Raises UserError for bfloat16 on another device.
    """
    array = np.ascontiguousarray(array)
    if array.dtype != ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy(array, device, device_id)
    if device != "cpu":
        raise UserError("onnxruntime makes bfloat16 values on the CPU only; use `run`, which copies them to the device")
    import onnx

    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)


def update_value(value: Any, array: Array) -> None:
    """Copy an array into a value of the same type and shape, which `value_from_array` has made."""
    if array.dtype != ml_dtypes.bfloat16:
        value.update_inplace(array)
    else:  # onnxruntime refuses it; such a value lies on the CPU
        ctypes.memmove(value.data_ptr(), np.ascontiguousarray(array).ctypes.data, array.nbytes)


def array_from_value(value: Any, dtype: str) -> Array:
    """A copy on the host. dtype: as in TensorInfo.

    Raises UserError for bfloat16 on another device, because onnxruntime does not copy it to the host.
    """
    if dtype != "bfloat16":
        return np.array(value.numpy())
    if value.device_name() != "cpu":
        raise UserError("onnxruntime does not copy bfloat16 outputs to the CPU; use `run`, which returns them there")
    if not (nbytes := value.tensor_size_in_bytes()):
        return np.empty(value.shape(), ml_dtypes.bfloat16)
    copied = ctypes.string_at(value.data_ptr(), nbytes)
    return np.frombuffer(copied, ml_dtypes.bfloat16).reshape(value.shape()).copy()
