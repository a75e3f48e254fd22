"""What Triton tells an instance of a Python model, as settings of ONNX Runtime.

Triton's Python models include this module; it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from effexport.plugins.building.library import LIBRARY_NAME, LIBRARY_VARIABLE
from effexport.plugins.ops import OPS
from effexport.runners.options import RunOptions
from effexport.runtimes import CPU, CUDA, RUNTIME_OF_PROVIDER

ARTIFACT = "artifact"


def settings_of_instance(folder: Path, arguments: Mapping[str, str], config: Mapping[str, Any]) -> RunOptions:
    """The settings of ONNX Runtime, which is to use the packaged kernels. config: of the model."""
    on_gpu = arguments["model_instance_kind"] == "GPU"
    library = folder / LIBRARY_NAME
    if library.is_file():
        os.environ[LIBRARY_VARIABLE] = str(library)
    # packaged kernels must run, apart from those that are slower than bodies on a GPU
    faster = [name for name, op in OPS.items() if not on_gpu or op.cuda_up_to is None]
    return RunOptions(
        runtime=RUNTIME_OF_PROVIDER[CUDA if on_gpu else CPU].name,
        implementation=",".join(f"{name}=kernel" for name in faster) if library.is_file() else "body",
        threads=parameter(config, "threads") or None,
        device=int(arguments["model_instance_device_id"]) if on_gpu else 0,
    )


def parameter(config: Mapping[str, Any], name: str) -> int:
    """A parameter of config.pbtxt."""
    return int(config["parameters"][name]["string_value"])
