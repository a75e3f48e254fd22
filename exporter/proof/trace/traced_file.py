"""A model file in ONNX Runtime that gives away its intermediate values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.errors import RuntimeUnsupportedError
from effexport.export.onnx_graph import load_graph
from effexport.proof.given_values import with_given_values
from effexport.runners.feeds import FeedLimits, checked_feeds
from effexport.runners.options import RunOptions
from effexport.runners.ort import import_onnxruntime
from effexport.runners.ort.providers import check_provider, providers_from_settings
from effexport.runners.ort.runner import array_from_value, run_failure, tensor_info, value_from_array
from effexport.runners.ort.session import kernels_of_model, session_options, without_weights

if TYPE_CHECKING:
    from effexport.dtypes import Array


class TracedFile:
    """A model whose graph runs as it is written: without optimisations, so that every value has its own.

    What one run needs is given back after it. Raises what `OrtRunner` raises.
    """

    def __init__(self, path: Path, settings: RunOptions, limits: FeedLimits) -> None:
        self.path = path
        self._settings = dataclasses.replace(settings, memory_arena=False)
        self._limits = limits

    def run(
        self, names: Sequence[str], inputs: Mapping[str, Array], hashes: Sequence[str], buckets: Mapping[str, Array]
    ) -> dict[str, Array]:
        """The named values, bfloat16 as float32.

        hashes: values that hold buckets, whose readers get those of `buckets` instead, as in `with_given_values`.
        """
        ort = import_onnxruntime()
        session = self._session(ort, self._model(names, hashes))
        feeds = checked_feeds({**inputs, **buckets}, tuple(map(tensor_info, session.get_inputs())), self._limits)
        outputs = [tensor_info(value) for value in session.get_outputs()]
        try:
            values = {name: value_from_array(ort, array) for name, array in feeds.items()}
            results = list(session.run_with_ort_values([tensor.name for tensor in outputs], values))
        except Exception as error:  # onnxruntime has no common base class for its errors
            raise run_failure(feeds, error) from error
        arrays = {}
        for tensor in reversed(outputs):
            # each result goes as soon as it is copied
            array = array_from_value(results.pop(), tensor.dtype)
            arrays[tensor.name] = array.astype(np.float32) if tensor.dtype == "bfloat16" else array
        return arrays

    def _model(self, names: Sequence[str], hashes: Sequence[str]) -> bytes:
        """The serialised model with these values as its only outputs: what they do not need is not run."""
        import onnx

        model = load_graph(self.path)
        if hashes:
            model = onnx.ModelProto.FromString(with_given_values(self.path, hashes))
        del model.graph.output[:]
        # ONNX Runtime finds the types out
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        serialised: bytes = model.SerializeToString()
        return serialised

    def _session(self, ort: Any, model: bytes) -> Any:
        options = session_options(ort, self._settings, self.path.parent.resolve())
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        graph = without_weights(model) if self._settings.row.tensors == "cuda" else None
        kernels_of_model(model, graph, self._settings).register(options, self._settings)
        providers = providers_from_settings(ort, self._settings)
        try:
            session = ort.InferenceSession(model, options, providers=providers, enable_fallback=0)
        except Exception as error:  # onnxruntime has no common base class for its errors
            raise RuntimeUnsupportedError(f"ONNX Runtime {ort.__version__} refuses the model: {error}") from error
        check_provider(session, self._settings)
        return session
