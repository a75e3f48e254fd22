"""The model for Triton's Python backend: serves the artifact beside this file with effexport's runner.

artifact/               from `effexport build`; its files are checked against the manifest when they are loaded
effexport.zip           the effexport that packaged the artifact: pure Python, used without PyTorch
libeffexport_ort.so     kernels of the custom operators; without this file they run as function bodies
effexport_cuda.fatbin   their CUDA kernels, which the library finds here

The server's Python needs numpy, msgspec, onnx and onnxruntime (onnxruntime-gpu on a GPU), and tokenizers if the
artifact has a tokenizer.json. A model that generates text is decoupled: `execute` returns at once, and the text is sent
as it grows.
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
        from effexport.serving.triton.instance import instance_from_arguments

        self.instance = instance_from_arguments(HERE, args, pb_utils)
        pb_utils.Logger.log_info(f"{args['model_name']}: {self.instance}")

    def execute(self, requests: list[Any]) -> list[Any] | None:
        return self.instance.execute(requests)

    def finalize(self) -> None:
        self.instance.close()
