"""An instance of a packaged model of tensors and texts: effexport's runner with the settings that Triton gives.

Triton's Python models include this module; it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.artifact import open_artifact
from effexport.runners.feeds import limits_of_runner
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import Closeable
from effexport.triton.instance_settings import ARTIFACT, settings_of_instance
from effexport.triton.merging import Answer
from effexport.triton.signature import TEXT
from effexport.triton.tasks import tasks_of_artifact
from effexport.triton.texts import Request, run_requests
from effexport.version import __version__

if TYPE_CHECKING:
    from effexport.dtypes import Array


class ModelInstance(Closeable):
    """Answers the requests of one `execute` of Triton.

    folder: of the model's version. arguments: as Triton gives them to `initialize`.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, str]) -> None:
        config = json.loads(arguments["model_config"])
        artifact = open_artifact(folder / ARTIFACT)
        settings = settings_of_instance(folder, arguments, config)
        self.runner = OrtRunner(artifact.model_path, settings, limits=limits_of_runner(artifact.spec))
        reads_text = any(tensor["name"] == TEXT for tensor in config["input"])
        self.task_of = tasks_of_artifact(artifact) if reads_text else None
        # 0 if results may depend on the rest of the batch; requests then run one by one
        self.max_batch = config["max_batch_size"]

    def run(self, requests: Sequence[tuple[Mapping[str, Array], str, Sequence[str]]]) -> list[Answer]:
        """requests: the tensors of each by input, its parameters as JSON, and the outputs that it asks for."""
        given = [Request(tensors, json.loads(parameters or "{}"), outputs) for tensors, parameters, outputs in requests]
        return run_requests(self.runner, self.task_of, given, self.max_batch)

    def __str__(self) -> str:
        ran = ", ".join(f"{op} as {what}" for op, what in self.runner.implementation.items())
        return f"effexport {__version__}, {ran or 'standard operators'}"

    def close(self) -> None:
        self.runner.close()
