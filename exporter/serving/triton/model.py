"""The model for Triton's Python backend: serves the artifact beside this file with effexport's runner.

artifact/             from `effexport build`; its files are checked against the manifest when they are loaded
effexport.zip         the effexport that packaged the artifact: pure Python, used without PyTorch
libeffexport_ort.so   kernels of the custom operators; without this file they run as function bodies

The server's Python needs numpy, msgspec, onnx and onnxruntime (onnxruntime-gpu on a GPU), and tokenizers if the
artifact has a tokenizer.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "effexport.zip"))


class TritonPythonModel:
    """An instance of the model; Triton starts a process for each."""

    def initialize(self, args: dict[str, str]) -> None:
        from effexport.serving.triton.instance import ModelInstance

        self.instance = ModelInstance(HERE, args)
        pb_utils.Logger.log_info(f"{args['model_name']}: {self.instance}")

    def execute(self, requests: list[Any]) -> list[Any]:
        given = [
            (
                {tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
                request.parameters(),
                request.requested_output_names(),
            )
            for request in requests
        ]
        return [response_from_answer(answer) for answer in self.instance.run(given)]

    def finalize(self) -> None:
        self.instance.close()


def response_from_answer(answer: Any) -> Any:
    """Outputs, or an error."""
    from effexport.errors import EffexportError
    from effexport.serving.triton.instance import triton_code

    if isinstance(answer, EffexportError):
        code = getattr(pb_utils.TritonError, triton_code(answer))
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(answer), code))
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in answer.items()])
