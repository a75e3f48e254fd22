"""The artifact to serve, and how to run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.runners.runner import ModelOptions
from effexport.runtimes import RUNTIMES
from effexport.serving.settings import ServingSettings

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.serving.server.served_model import ServedModel


@dataclass(frozen=True)
class ServingTarget:
    """An artifact to serve. name: None for the name of its folder. runtime, implementation, device: as in
    `effexport run`.

    threads: of the runtime; None: its default.
    """

    artifact: Path
    name: str | None
    runtime: str
    implementation: str
    settings: ServingSettings
    threads: int | None = None
    device: int = 0

    @property
    def options(self) -> ModelOptions:
        return ModelOptions(self.implementation, self.threads, device=self.device)

    def load(self) -> ServedModel:
        """Open the artifact and warm it up in this process. Raises UserError if it cannot be served."""
        from effexport.runners.artifact_runner import runner_from_artifact
        from effexport.serving.server.served_model import ServedModel

        artifact, name = self.checked()
        runner = runner_from_artifact(artifact, self.runtime, self.options)
        model = ServedModel(runner, artifact.spec, name, self.settings, RUNTIMES[self.runtime].platform)
        try:
            model.warm_up()
        except BaseException:
            model.close()
            raise
        return model

    def checked(self) -> tuple[Artifact, str]:
        """The artifact and the model's name. Raises UserError for what cannot be served; does not load the model."""
        from effexport.artifact import open_artifact
        from effexport.runners.artifact_runner import check_runtime
        from effexport.serving.protocol.signature import signature_from_spec
        from effexport.serving.server.served_model import checked_name

        check_runtime(self.runtime, self.options)
        artifact = open_artifact(self.artifact)
        name = checked_name(self.name if self.name is not None else artifact.path.resolve().name)
        signature_from_spec(artifact.spec, self.settings)
        return artifact, name
