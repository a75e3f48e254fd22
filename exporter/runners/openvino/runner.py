"""The runner of OpenVINO."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from effexport.errors import EffexportError, RuntimeFailedError
from effexport.export.onnx_graph import custom_ops_of_model, graph_tensors
from effexport.runners.feeds import FeedLimits, check_answer, check_bound_feeds, checked_feeds, signature_of
from effexport.runners.openvino.loading import compiled_model, import_openvino, onnx_from_source, reason_of
from effexport.runners.options import RunOptions
from effexport.runners.runner import Closeable, runner_text
from effexport.runtimes import BFLOAT16_RUNTIME

if TYPE_CHECKING:
    from effexport.dtypes import Array, TensorInfo


class OpenVinoRunner(Closeable):
    """Runs an ONNX model in OpenVINO, on the CPU. Thread-safe; use it as a context manager or call `close`.

    model: path of the file, or the serialised model together with the folder of its external data.
    implementation: "body" for every custom operator of the model.
    Raises MissingExtraError without openvino, UserError for a precision that this CPU does not support, and
    RuntimeUnsupportedError if OpenVINO refuses the model.
    """

    def __init__(
        self,
        model: Path | bytes,
        options: RunOptions | None = None,
        *,
        limits: FeedLimits | None = None,
        external_folder: Path | None = None,
    ) -> None:
        self.limits = limits or FeedLimits()
        proto = onnx_from_source(model)
        constants = {tensor.name for tensor in proto.graph.initializer}
        # OpenVINO forgets the names of dimensions
        self.inputs = graph_tensors([value for value in proto.graph.input if value.name not in constants])
        self.outputs = graph_tensors(proto.graph.output)
        self.implementation: dict[str, str] = dict.fromkeys(custom_ops_of_model(model), "body")
        folder = external_folder if isinstance(model, bytes) else model.parent
        self._compiled: Any = compiled_model(proto, folder, options or RunOptions(runtime=BFLOAT16_RUNTIME.name))
        self._idle: list[Any] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return runner_text(self)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays by input name → arrays by output name. An absent attention mask means no padding.

        Raises UserError for a wrong name, dtype, rank, size or value, and RuntimeFailedError if the graph fails.
        """
        complete, request = self._checked(feeds), self._request()
        try:
            set_inputs(request, complete)
            request.infer()
            answer = outputs_of(request, self.outputs)
        except RuntimeError as error:
            raise run_failure(complete, error) from error
        finally:
            with self._lock:
                self._idle.append(request)
        check_answer(answer, complete, self.inputs, self.limits)
        return answer

    def bind(self, feeds: Mapping[str, Array]) -> BoundRequest:
        """Copy the inputs once, for many runs of one shape without copies. Raises as `run` does."""
        complete = self._checked(feeds)
        try:
            return BoundRequest(self._request(), complete, self.outputs)
        except RuntimeError as error:
            raise run_failure(complete, error) from error

    def close(self) -> None:
        """Free the model. `run` fails afterwards."""
        self._compiled = None
        self._idle = []

    def _checked(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        if self._compiled is None:
            raise EffexportError("this runner is closed; load the artifact again")
        # OpenVINO reads contiguous and writable arrays where they are; all others are copied
        return {n: np.require(x, None, ("C", "W")) for n, x in checked_feeds(feeds, self.inputs, self.limits).items()}

    def _request(self) -> Any:
        """A request that no other thread uses."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._compiled.create_infer_request()


class BoundRequest:
    """A model bound to inputs of one shape, made by `OpenVinoRunner.bind`; see `effexport.runners.ort.runner`."""

    def __init__(self, request: Any, feeds: Mapping[str, Array], outputs: tuple[TensorInfo, ...]) -> None:
        """feeds: complete and checked."""
        self._request, self._outputs = request, outputs
        self._feeds = {name: array.copy() for name, array in feeds.items()}
        self._lock = threading.Lock()
        set_inputs(request, self._feeds)

    def update(self, feeds: Mapping[str, Array]) -> None:
        """Copy new values, unchecked, into bound inputs. Raises UserError for another name, dtype or shape."""
        check_bound_feeds(feeds, signature_of(self._feeds))
        with self._lock:
            for name, array in feeds.items():
                self._feeds[name][...] = array

    def run(self) -> None:
        """Compute the outputs from the inputs. Raises RuntimeFailedError when the graph fails."""
        with self._lock:
            try:
                self._request.infer()
            except RuntimeError as error:
                raise run_failure(self._feeds, error) from error

    def outputs(self) -> dict[str, Array]:
        """Copies of the outputs of the last run."""
        with self._lock:
            return outputs_of(self._request, self._outputs)


def set_inputs(request: Any, feeds: Mapping[str, Array]) -> None:
    """Let a request read the arrays, which are contiguous and must live until it has run."""
    ov = import_openvino()
    for name, array in feeds.items():
        if array.dtype.name == "bfloat16":  # which OpenVINO knows, but not from numpy
            request.set_tensor(name, ov.Tensor(array.view(np.uint16), list(array.shape), ov.Type.bf16))
        else:
            request.set_tensor(name, ov.Tensor(array, shared_memory=True))


def outputs_of(request: Any, outputs: tuple[TensorInfo, ...]) -> dict[str, Array]:
    """Copies of the outputs of a request, by name."""
    found: dict[str, Array] = {}
    for tensor in outputs:
        array: Array = np.array(request.get_tensor(tensor.name).data)
        found[tensor.name] = array.view(ml_dtypes.bfloat16) if tensor.dtype == "bfloat16" else array
    return found


def run_failure(feeds: Mapping[str, Array], error: RuntimeError) -> RuntimeFailedError:
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in feeds.items())
    return RuntimeFailedError(f"OpenVINO failed on {shapes}: {reason_of(error)}")


def open_model(
    options: RunOptions,
    model: Path | bytes,
    limits: FeedLimits,
    external_folder: Path | None = None,
) -> OpenVinoRunner:
    """See `effexport.runners.artifact_runner`."""
    return OpenVinoRunner(model, options, limits=limits, external_folder=external_folder)
