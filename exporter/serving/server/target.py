"""The artifact to serve, and how to run it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.serving.settings import ServingSettings

if TYPE_CHECKING:
    from effexport.serving.server.served_model import ServedModel


@dataclass(frozen=True)
class ServingTarget:
    """An artifact to serve. name: None for the name of its folder. runtime, implementation: as in `effexport run`.

    threads: of ONNX Runtime; None: its default.
    """

    artifact: Path
    name: str | None
    runtime: str
    implementation: str
    settings: ServingSettings
    threads: int | None = None

    def load(self) -> ServedModel:
        """Open the artifact and warm it up in this process. Raises UserError if it cannot be served."""
        from effexport.artifact import open_artifact
        from effexport.runners.artifact_runner import check_runtime, runner_from_artifact
        from effexport.serving.server.served_model import platform_of, served_model

        check_runtime(self.runtime, self.implementation)
        artifact = open_artifact(self.artifact)
        runner = partial(runner_from_artifact, artifact, self.runtime, self.implementation, self.threads)
        return served_model(artifact, self.settings, self.name, runner, platform_of(self.runtime))
