"""The runner of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from effexport.dtypes import DTYPES, TensorInfo
from effexport.errors import EffexportError, RefusedNumbersError, RuntimeFailedError
from effexport.runners.feeds import FeedLimits, check_answer, checked_feeds
from effexport.runners.ort.binding import NO_GRAPH, BoundModel, run_options
from effexport.runners.ort.session import session_from_model
from effexport.runners.ort.settings import OrtSettings, import_onnxruntime
from effexport.runners.ort.values import array_from_value, value_from_array
from effexport.runners.runner import Closeable, runner_text

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.runners.runner import ModelOptions
    from effexport.runtimes import Runtime

_DTYPE_OF_ORT_TYPE = {dtype.ort: name for name, dtype in DTYPES.items()}


class OrtRunner(Closeable):
    """Runs an ONNX model. Thread-safe; use it as a context manager or call `close`. With `cuda_graph`, one thread runs
    at a time.

    model: path of the file, or the serialised model together with the folder of its external data.
    implementation: per custom operator of the model, what runs it here: "kernel" or "body".
    Raises MissingExtraError without onnxruntime, UserError for a provider or kernels that are not available, and
    RuntimeUnsupportedError if ONNX Runtime refuses the model.
    """

    def __init__(
        self,
        model: Path | bytes,
        settings: OrtSettings | None = None,
        *,
        limits: FeedLimits | None = None,
        external_folder: Path | None = None,
    ) -> None:
        self.settings = settings or OrtSettings()
        session = session_from_model(model, self.settings, external_folder)
        self._session: Any = session.inference
        # the addresses of these feeds change, and a CUDA graph would reuse the old ones
        self._options = run_options(NO_GRAPH) if self.settings.cuda_graph else None
        # with CUDA graphs, ONNX Runtime forbids several threads in one session, in whatever they run
        self._lock: Lock | nullcontext[None] = Lock() if self.settings.cuda_graph else nullcontext()
        self.implementation: dict[str, str] = dict(session.implementation)
        self.limits = limits or FeedLimits()
        self.inputs = tuple(tensor_info(value) for value in self._session.get_inputs())
        self.outputs = tuple(tensor_info(value) for value in self._session.get_outputs())

    def __repr__(self) -> str:
        return runner_text(self)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays by input name → arrays by output name. An absent attention mask means no padding.

        Raises UserError for a wrong name, dtype, rank, size or value, and RuntimeFailedError if the graph fails.
        """
        session = self._opened()
        return self._run(session, checked_feeds(feeds, self.inputs, self.limits))

    def run_checked(self, complete: dict[str, Array]) -> dict[str, Array]:
        """As `run`, for feeds that `checked_feeds` has returned."""
        return self._run(self._opened(), complete)

    def _run(self, session: Any, complete: dict[str, Array]) -> dict[str, Array]:
        names = [tensor.name for tensor in self.outputs]
        try:
            with self._lock:
                if "bfloat16" in {tensor.dtype for tensor in (*self.inputs, *self.outputs)}:
                    answer = self._run_values(session, complete, names)
                else:
                    answer = dict(zip(names, session.run(names, complete, self._options), strict=True))
        except Exception as error:  # onnxruntime has no common base class for its errors
            raise run_failure(complete, error) from error
        check_answer(answer, complete, self.inputs, self.limits)
        return answer

    def bind(self, feeds: Mapping[str, Array]) -> BoundModel:
        """Copy the inputs to the device and allocate the outputs there, for many runs of one shape without copies.

        Raises as `run` does.
        """
        session = self._opened()
        complete = checked_feeds(feeds, self.inputs, self.limits)
        try:
            lock = self._lock if self.settings.cuda_graph else Lock()
            return BoundModel(session, complete, self.outputs, self.settings, lock)
        except EffexportError:
            raise
        except Exception as error:  # onnxruntime has no common base class for its errors
            raise run_failure(complete, error) from error

    def check_open(self) -> None:
        """Raises EffexportError after `close`."""
        self._opened()

    def _opened(self) -> Any:
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
    runtime: Runtime,
    options: ModelOptions,
    model: Path | bytes,
    limits: FeedLimits,
    external_folder: Path | None = None,
) -> OrtRunner:
    """See `effexport.runners.artifact_runner`."""
    return OrtRunner(model, settings_from_options(runtime, options), limits=limits, external_folder=external_folder)


def settings_from_options(runtime: Runtime, options: ModelOptions) -> OrtSettings:
    """The settings for a runtime that is one of ONNX Runtime's providers."""
    return OrtSettings(
        provider=runtime.provider,
        implementation=options.implementation,
        threads=options.threads,
        memory_arena=options.memory_arena,
        device_id=options.device,
    )


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
