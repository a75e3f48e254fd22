"""The artifacts to serve, and how to run them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.environment import usable_cores
from effexport.errors import EffexportError, UserError
from effexport.process_memory import status_bytes
from effexport.runners.options import RunOptions
from effexport.runtimes import RUNTIMES, engine_name
from effexport.serving.settings import ServingSettings
from effexport.units import memory

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.generation.text_generator import TextGenerator
    from effexport.serving.server.model_repository import ModelRepository
    from effexport.serving.server.served_model import ServedModel
    from effexport.serving.server.text_inference import Texts

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class ServingTarget:
    """An artifact to serve. name: None for the name of its folder. runtime, implementation, device: as in
    `effexport run`.

    threads: of the runtime; None: its default, or what concurrent runs leave of the cores.
    """

    artifact: Path
    name: str | None
    runtime: str
    implementation: str
    settings: ServingSettings
    threads: int | None = None
    device: int = 0

    @property
    def options(self) -> RunOptions:
        """Raises UserError as `options_from_flags` does."""
        from effexport.runners.artifact_runner import options_from_flags

        runs = self.resolved.concurrent_runs or 1
        # a run also computes in the thread that started it, so all runs together use every core
        threads = self.threads if runs == 1 else max(1, self.cores - runs + 1)
        return options_from_flags(self.runtime, implementation=self.implementation, device=self.device, threads=threads)

    @property
    def cores(self) -> int:
        return self.threads or usable_cores()

    @property
    def resolved(self) -> ServingSettings:
        """The settings for this runtime on this machine."""
        return self.settings.resolved(RUNTIMES[self.runtime], self.cores)

    def load(self) -> ServedModel:
        """Open the artifact and warm it up in this process.

        Raises UserError if it cannot be served, or takes more memory than the server may.
        """
        from effexport.runners.artifact_runner import runner_from_artifact
        from effexport.serving.server.served_model import ServedModel

        artifact, name = self.checked()
        check_memory(name, self.settings.max_memory_bytes, model_bytes(artifact, self.runtime))
        texts = texts_of(artifact, name)
        runner = runner_from_artifact(artifact, self.options)
        model = ServedModel(runner, artifact, name, self.resolved, RUNTIMES[self.runtime], texts)
        try:
            model.warm_up()
            model.serve_generation(self.generator(artifact, name))
            check_memory(name, self.settings.max_memory_bytes)
        except BaseException:
            model.close()
            raise
        return model

    def generator(self, artifact: Artifact, name: str) -> TextGenerator | str:
        """What generates texts with an artifact called `name`, or why it cannot."""
        from effexport.generation.text_generator import generator_from_artifact
        from effexport.runners.artifact_runner import decoder_from_artifact

        try:
            return generator_from_artifact(artifact, lambda it: decoder_from_artifact(it, self.options))
        except UserError as error:
            return str(error).replace(str(artifact.path), name)

    def checked(self) -> tuple[Artifact, str]:
        """The artifact and the model's name. Raises UserError for what cannot be served; does not load the model."""
        from effexport.artifact import open_artifact
        from effexport.runners.artifact_runner import options_from_flags
        from effexport.serving.protocol.signature import signature_from_spec

        options_from_flags(self.runtime, implementation=self.implementation, device=self.device)
        artifact = open_artifact(self.artifact)
        name = checked_name(self.name if self.name is not None else artifact.path.resolve().name)
        signature_from_spec(artifact.spec, self.settings)
        return artifact, name


@dataclass(frozen=True)
class LoadableModels:
    """The artifacts that a running server may load: the folders in `folder`, and those that it was started with.

    started: what the server was started with, by name. Artifacts of the folder are opened with the same options.
    """

    folder: Path
    started: Mapping[str, ServingTarget]

    def names(self) -> list[str]:
        """The models that can be loaded."""
        from effexport.artifact import MANIFEST

        found = sorted(path.parent.name for path in self.folder.glob(f"*/{MANIFEST}"))
        return list(dict.fromkeys([*self.started, *(name for name in found if NAME_PATTERN.fullmatch(name))]))

    def target(self, name: str) -> ServingTarget:
        """Raises UserError for a name that does not stay in the folder, or is not there."""
        from effexport.artifact import MANIFEST

        if name in self.started:
            return self.started[name]
        path = self.folder / checked_name(name)
        # `realpath` leaves a loop of links as it is
        if Path(os.path.realpath(path)).parent != self.folder.resolve():
            raise UserError(f"{name!r} leads out of the folder {self.folder}; expected the name of an artifact in it")
        if not (path / MANIFEST).is_file():
            raise UserError(f"no artifact {name!r} in {self.folder}; the repository index lists what can be loaded")
        return replace(next(iter(self.started.values())), artifact=path, name=name)


def repository_from_targets(
    targets: Sequence[ServingTarget], allow_load: Path | None, on_stage: Callable[[str], None]
) -> ModelRepository:
    """Load all models of a server, or none: mistakes are found before the first is loaded. Raises UserError.

    allow_load: the folder of artifacts that may be loaded later; None: none may. on_stage: called with a text before
    each model.
    """
    from effexport.serving.server.model_repository import ModelRepository, check_names

    names = [target.checked()[1] for target in targets]
    check_names(names)
    models: list[ServedModel] = []
    try:
        for target in targets:
            on_stage(f"loading {target.artifact} for {target.runtime}")
            models.append(target.load())
    except BaseException:
        for model in models:
            model.close()
        raise
    loadable = LoadableModels(allow_load, dict(zip(names, targets, strict=True))) if allow_load else None
    return ModelRepository(models, targets[0].settings, loadable)


def texts_of(artifact: Artifact, name: str) -> Texts | str:
    """What answers texts, or why the artifact cannot."""
    from effexport.serving.server.text_inference import Texts

    try:
        return Texts(artifact)
    except EffexportError as error:
        return str(error).replace(str(artifact.path), name)


def checked_name(name: str) -> str:
    """Raises UserError for a name that does not fit into a URL."""
    if not NAME_PATTERN.fullmatch(name):
        raise UserError(
            f"the model's name is {name[:160]!r}; expected at most 128 letters, digits, '.', '_' and '-', the first a "
            "letter or digit: choose one with --name"
        )
    return name


def model_bytes(artifact: Artifact, runtime: str) -> int:
    """Size of the files that a runtime loads: engines, or models with their weights."""
    from effexport.artifact import DECODE_STEP, MODEL, PREFILL
    from effexport.generation.text_generator import why_not_generated

    models = (MODEL,) if why_not_generated(artifact.spec) else (MODEL, DECODE_STEP, PREFILL)
    firsts = tuple(engine_name(runtime, model) if RUNTIMES[runtime].engine else model for model in models)
    return sum(entry.bytes for name, entry in artifact.manifest.files.items() if name.startswith(firsts))


def check_memory(name: str, limit_bytes: int | None, more_bytes: int = 0) -> None:
    """Raises UserError if the process has, or would have with `more_bytes`, more resident memory than the limit."""
    if limit_bytes is None:
        return
    used = status_bytes("VmRSS")
    if used + more_bytes > limit_bytes:
        state = f"with the {memory(more_bytes)} of {name}" if more_bytes else f"with {name} loaded"
        raise UserError(
            f"{state}, the server would use {memory(used + more_bytes)} of memory; --max-memory allows "
            f"{memory(limit_bytes)} for all models together: unload or leave out another model, or allow more"
        )
