"""Opens a serialised model in a runtime of this environment: a function from inputs by name to outputs by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Run = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]


def onnxruntime_cpu(model: bytes, library: str = "") -> Run:
    """library: the path of our kernel library, if kernels are to run and not the bodies of functions."""
    return onnxruntime_session(model, ["CPUExecutionProvider"], library)


def onnxruntime_openvino(model: bytes) -> Run:
    """OpenVINO as provider of ONNX Runtime, asked for float32. Raises if the provider does not start."""
    options = {"device_type": "CPU", "load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'}
    return onnxruntime_session(model, [("OpenVINOExecutionProvider", options), "CPUExecutionProvider"])


def onnxruntime_session(model: bytes, providers: list[Any], library: str = "") -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # waiting threads would keep other processes from running
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if library:
        options.register_custom_ops_library(library)
    session = onnxruntime.InferenceSession(model, options, providers=providers)
    wanted = providers[0] if isinstance(providers[0], str) else providers[0][0]
    if wanted not in session.get_providers():
        raise RuntimeError(f"{wanted} did not start; {session.get_providers()} did")
    names = [output.name for output in session.get_outputs()]

    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))

    return run


def openvino_by_effexport(model: bytes) -> Run:
    """OpenVINO as `--runtime openvino` opens it: the file inlined, and float32 asked for."""
    from effexport.runners.artifact_runner import model_opener
    from effexport.runners.options import RunOptions
    from effexport.runners.runner import FeedLimits

    return model_opener(RunOptions(runtime="openvino"))(model, FeedLimits(), None).run


def reference_evaluator(model: bytes) -> Run:
    import onnx
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx.ModelProto.FromString(model))

    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(evaluator.output_names, evaluator.run(None, dict(feeds)), strict=True))

    return run


RUNTIMES: dict[str, Callable[..., Run]] = {
    "onnxruntime": onnxruntime_cpu,
    "onnxruntime-openvino": onnxruntime_openvino,
    "openvino": openvino_by_effexport,
    "reference": reference_evaluator,
}
