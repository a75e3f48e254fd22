"""ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from effexport.errors import EffexportError, MissingExtraError
from effexport.runners import FeedLimits, checked_feeds
from effexport.spec import TensorInfo

if TYPE_CHECKING:
    from effexport.runners import Array

_DTYPE_OF_ORT_TYPE = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(bool)": "bool",
}
EXTERNAL_FOLDER_KEY = "session.model_external_initializers_file_folder_path"


class RuntimeUnsupportedError(EffexportError):
    """The runtime cannot run this model, typically because it has no kernel for the element type."""


class RuntimeFailedError(EffexportError):
    """The runtime accepted the model and failed while running it, for example because the graph fixes a length."""


class OrtRunner:
    """Runs an ONNX model on the CPU. Thread-safe; use it as a context manager or call `close`.

    model: path of the file, or the serialised model together with the folder of its external data.
    threads: size of the thread pool inside operators (None: ONNX Runtime decides).
    Raises MissingExtraError without onnxruntime, RuntimeUnsupportedError when it refuses the model.
    """

    def __init__(
        self,
        model: Path | bytes,
        *,
        limits: FeedLimits | None = None,
        threads: int | None = None,
        external_folder: Path | None = None,
    ) -> None:
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        if external_folder is not None:
            options.add_session_config_entry(EXTERNAL_FOLDER_KEY, str(external_folder))
        source = model if isinstance(model, bytes) else str(model)
        try:
            self._session: Any = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has no common base class for its errors
            raise RuntimeUnsupportedError(f"ONNX Runtime {ort.__version__} refuses the model: {error}") from error
        self.limits = limits or FeedLimits()
        self.inputs = tuple(tensor_info(value) for value in self._session.get_inputs())
        self.outputs = tuple(tensor_info(value) for value in self._session.get_outputs())

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays by input name → arrays by output name. An absent attention mask means no padding.

        Raises UserError for a wrong name, dtype, rank, size or value, and RuntimeFailedError when the graph fails.
        """
        if self._session is None:
            raise EffexportError("this runner is closed; load the artifact again")
        complete = checked_feeds(feeds, self.inputs, self.limits)
        names = [tensor.name for tensor in self.outputs]
        try:
            if "bfloat16" in {tensor.dtype for tensor in (*self.inputs, *self.outputs)}:
                return self._run_bfloat16(complete, names)
            return dict(zip(names, self._session.run(names, complete), strict=True))
        except Exception as error:  # onnxruntime has no common base class for its errors
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in complete.items())
            raise RuntimeFailedError(f"ONNX Runtime failed on {shapes}: {error}") from error

    def _run_bfloat16(self, feeds: Mapping[str, Array], names: list[str]) -> dict[str, Array]:
        """numpy knows bfloat16 only through ml_dtypes, which onnxruntime does not accept: pass the bits."""
        import ml_dtypes
        import numpy as np
        import onnx

        ort = import_onnxruntime()
        values = {
            name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
                np.ascontiguousarray(array).view(np.uint16), onnx.TensorProto.BFLOAT16
            )
            if array.dtype == ml_dtypes.bfloat16
            else ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
            for name, array in feeds.items()
        }
        results = self._session.run_with_ort_values(names, values)
        dtypes = [tensor.dtype for tensor in self.outputs]
        return {
            name: value.numpy().view(ml_dtypes.bfloat16) if dtype == "bfloat16" else value.numpy()
            for name, dtype, value in zip(names, dtypes, results, strict=True)
        }

    def close(self) -> None:
        """Free the session; `run` fails from then on."""
        self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "cpu") from error
    return onnxruntime


def tensor_info(value: Any) -> TensorInfo:
    """TensorInfo of a session's input or output."""
    dims = tuple(dim if dim is not None else "?" for dim in value.shape)
    return TensorInfo(value.name, _DTYPE_OF_ORT_TYPE.get(value.type, value.type), dims)
