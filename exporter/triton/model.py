"""The model for Triton's Python backend: serves the artifact beside this file with effexport's runner.

artifact/             from `effexport build`; its files are checked against the manifest when they are loaded
effexport.zip         the effexport that packaged the artifact: pure Python, used without PyTorch
libeffexport_ort.so   kernels of the custom operators; without this file they run as function bodies

The server's Python needs numpy, msgspec, onnx and onnxruntime (onnxruntime-gpu on a GPU).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "libeffexport_ort.so"
sys.path.insert(0, str(HERE / "effexport.zip"))


class TritonPythonModel:
    """An instance of the model; Triton starts a process for each."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {name: entry["string_value"] for name, entry in config["parameters"].items()}
        on_gpu = args["model_instance_kind"] == "GPU"
        if LIBRARY.is_file():
            os.environ["EFFEXPORT_LIBRARY"] = str(LIBRARY)
        import effexport
        from effexport.plugins.ops import OPS

        # packaged kernels must run, apart from those that are slower than bodies on a GPU
        faster = [name for name, op in OPS.items() if not on_gpu or op.cuda_up_to is None]
        settings = effexport.OrtSettings(
            provider="cuda" if on_gpu else "cpu",
            implementation=",".join(f"{name}=kernel" for name in faster) if LIBRARY.is_file() else "body",
            threads=int(parameters["threads"]) or None,
            device_id=int(args["model_instance_device_id"]) if on_gpu else 0,
        )
        self.runner = effexport.load(HERE / "artifact", settings)
        # if Triton does not batch, results may depend on the rest of the batch, so requests run one by one
        self.merge = config["max_batch_size"] > 0
        ran = ", ".join(f"{op} as {what}" for op, what in self.runner.implementation.items())
        pb_utils.Logger.log_info(
            f"{args['model_name']}: effexport {effexport.__version__}, {ran or 'standard operators'}"
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        from effexport.triton.merging import run_merged

        feeds = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        return [response_from_answer(answer) for answer in run_merged(self.runner, feeds, merge=self.merge)]

    def finalize(self) -> None:
        self.runner.close()


def response_from_answer(answer: Any) -> Any:
    """Outputs, or an error: exit_code 2 is a bad request (HTTP 400), anything else a failure (HTTP 500)."""
    if isinstance(answer, Exception):
        bad_input = getattr(answer, "exit_code", 1) == 2
        code = pb_utils.TritonError.INVALID_ARG if bad_input else pb_utils.TritonError.INTERNAL
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(answer), code))
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in answer.items()])
