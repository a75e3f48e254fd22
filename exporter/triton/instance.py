"""An instance of a packaged model of tensors and texts: effexport's runner with the settings that Triton gives.

Triton's Python models include this module; it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.artifact import open_artifact
from effexport.plugins.building.library import LIBRARY_NAME, LIBRARY_VARIABLE
from effexport.plugins.ops import OPS
from effexport.runners.feeds import limits_from_spec
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.ort.settings import OrtSettings
from effexport.runners.runner import Closeable
from effexport.text.tasks import task_from_artifact
from effexport.triton.merging import Answer
from effexport.triton.signature import TEXT
from effexport.triton.texts import run_requests
from effexport.version import __version__

if TYPE_CHECKING:
    from effexport.dtypes import Array

ARTIFACT = "artifact"


class ModelInstance(Closeable):
    """Answers the requests of one `execute` of Triton.

    folder: of the model's version. arguments: as Triton gives them to `initialize`.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, str]) -> None:
        config = json.loads(arguments["model_config"])
        artifact = open_artifact(folder / ARTIFACT)
        settings = settings_of_instance(folder, arguments, config)
        self.runner = OrtRunner(artifact.model_path, settings, limits=limits_from_spec(artifact.spec))
        reads_text = any(tensor["name"] == TEXT for tensor in config["input"])
        self.task = task_from_artifact(artifact) if reads_text else None
        # 0 if results may depend on the rest of the batch; requests then run one by one
        self.max_batch = config["max_batch_size"]

    def run(self, requests: Sequence[Mapping[str, Array]]) -> list[Answer]:
        return run_requests(self.runner, self.task, requests, self.max_batch)

    def __str__(self) -> str:
        return description(self.runner.implementation)

    def close(self) -> None:
        self.runner.close()


def settings_of_instance(folder: Path, arguments: Mapping[str, str], config: Mapping[str, Any]) -> OrtSettings:
    """The settings of ONNX Runtime, which is to use the packaged kernels. config: of the model."""
    on_gpu = arguments["model_instance_kind"] == "GPU"
    library = folder / LIBRARY_NAME
    if library.is_file():
        os.environ[LIBRARY_VARIABLE] = str(library)
    # packaged kernels must run, apart from those that are slower than bodies on a GPU
    faster = [name for name, op in OPS.items() if not on_gpu or op.cuda_up_to is None]
    return OrtSettings(
        provider="cuda" if on_gpu else "cpu",
        implementation=",".join(f"{name}=kernel" for name in faster) if library.is_file() else "body",
        threads=parameter(config, "threads") or None,
        device_id=int(arguments["model_instance_device_id"]) if on_gpu else 0,
    )


def parameter(config: Mapping[str, Any], name: str) -> int:
    """A parameter of config.pbtxt."""
    return int(config["parameters"][name]["string_value"])


def description(implementation: Mapping[str, str]) -> str:
    """What an instance says in the server's log."""
    ran = ", ".join(f"{op} as {what}" for op, what in implementation.items())
    return f"effexport {__version__}, {ran or 'standard operators'}"
