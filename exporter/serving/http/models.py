"""The models of a server: how each is loaded, its queue and signature, and all of them by name."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from effexport.artifact import DECODE_STEP, MANIFEST, MODEL, PREFILL, Artifact, open_artifact
from effexport.base.dtypes import Array, numpy_dtype
from effexport.base.environment import usable_cores
from effexport.base.errors import EffexportError, RuntimeFailedError, UserError
from effexport.base.formatting import listed, memory
from effexport.base.machine import give_back_freed, status_bytes
from effexport.base.runtimes import CPU, RUNTIMES, Runtime, engine_name
from effexport.base.spec import MASK_NAME, is_optional
from effexport.models.validation import shown
from effexport.proof.check import Kind
from effexport.runners.artifact_runner import decoder_from_artifact, runner_from_artifact
from effexport.runners.options import RunOptions
from effexport.runners.runner import Runner
from effexport.serving.engine.errors import FAILED, FORBIDDEN, INVALID, NOT_FOUND, RequestError
from effexport.serving.engine.metrics import Metrics
from effexport.serving.engine.queue import Batcher, Outputs, Padding, Waiting, logger, why_not_joined
from effexport.serving.engine.settings import DEFAULT_MAX_SEQ_LEN, NAME, ServingSettings, checked_name
from effexport.serving.engine.signature import ServedSignature, example_shape, signature_from_spec
from effexport.serving.engine.texts import Generations, Texts
from effexport.signature import check_identity
from effexport.tasks.task import TOKENS, Task, TextOptions
from effexport.tasks.tasks import tasks_from_artifact
from effexport.tasks.text_generator import generator_from_artifact, why_not_generated

# The only version: an artifact is one version of a model.
VERSION = "1"
# Tokens that keep a core busy: beyond it, a token in a larger run was measured to cost no less.
RUN_TOKENS_PER_CORE = 256


class ServedModel:
    """A model that answers requests: runner, signature and queue. `close` answers accepted requests, then closes it.

    why_not_joined: why requests never share a run; "" if they may. why_not_padded: the same for requests of different
    lengths. settings: resolved for the runtime.
    tasks: what answers texts; for a model that does not read any, why not. loaded_at: in seconds since 1970.
    """

    version = VERSION

    def __init__(
        self,
        runner: Runner,
        artifact: Artifact,
        name: str,
        settings: ServingSettings,
        runtime: Runtime,
        tasks: Callable[[TextOptions], Task] | str = "",
    ) -> None:
        spec = artifact.spec
        self.name = name
        self.loaded_at = int(time.time())
        self.why_not_joined = why_not_joined(spec)
        self.why_not_padded = why_not_padded(artifact, runtime)
        self.settings = replace(settings, max_padding=0.0) if self.why_not_padded else settings
        self.platform = runtime.platform
        self.signature: ServedSignature = signature_from_spec(spec, settings)
        self.metrics = Metrics(name)
        self._runner = runner
        self._model = spec.model
        joins, padding = not self.why_not_joined, Padding.from_spec(spec)
        self.batcher = Batcher(runner.run, self.settings, self.metrics, joins=joins, padding=padding)
        # so many that the next batch waits while one runs, and other requests find room
        at_once = max(1, min(2 * settings.max_batch, settings.queue_size // 2))
        self._texts = tasks if isinstance(tasks, str) else Texts(tasks, self._run, settings.max_batch, at_once)
        self.implementation = runner.implementation
        # or why there are none
        self.generations_or_why: Generations | str = ""
        self._closed = False
        self._users = 0
        # set while no request uses the model
        self.unused = asyncio.Event()
        self.unused.set()

    async def _run(self, rows: Mapping[str, Array], waiting: Waiting) -> Outputs:
        """The outputs of rows of a text. Raises as `Batcher.outputs`, and RequestError for rows that are too long."""
        self.signature.check_size("seq", rows[TOKENS].shape[1])
        return await self.batcher.outputs(self.signature.complete(rows), waiting.timeout_s)

    @property
    def is_ready(self) -> bool:
        runs = isinstance(self.generations_or_why, str) or self.generations_or_why.is_alive
        return not self._closed and self.batcher.is_alive and runs

    @property
    def generations(self) -> Generations:
        """Raises RequestError for a model that does not generate text."""
        if isinstance(self.generations_or_why, str):
            raise RequestError(f"model {self.name!r} does not generate: {self.generations_or_why}")
        return self.generations_or_why

    @property
    def texts(self) -> Texts:
        """Raises RequestError for a model that does not read text."""
        if isinstance(self._texts, str):
            raise RequestError(f"model {self.name!r} does not read text: {self._texts or 'send tensors'}")
        return self._texts

    def metadata(self) -> dict[str, Any]:
        """The V2 model metadata. What a client may send instead of tensors is in `parameters`."""
        texts = {} if isinstance(self._texts, str) else {"parameters": self._texts.metadata()}
        tensors = self.signature.metadata()
        return {"name": self.name, "versions": [VERSION], "platform": self.platform, **tensors, **texts}

    def warm_up(self) -> None:
        """Run once at the length of the build, so that the first request does not pay for one-time work.

        Raises what the runner raises, so that a model that cannot run is noticed before the server is ready.
        """
        # the length of the build is only an example, however long it is
        longest = min(self._model.seq_len, self.signature.max_sizes["seq"], DEFAULT_MAX_SEQ_LEN)
        length = self._model.fixed_seq_len or longest
        try:
            self._runner.run(self.example_feeds(1, length))
        except MemoryError as error:
            raise RuntimeFailedError(
                f"{self.name} cannot run with {length} tokens here: there is not enough memory"
            ) from error

    def example_feeds(self, rows: int, seq_len: int) -> dict[str, Array]:
        """Zeros for the inputs that are not optional; every model accepts them."""
        sizes = {**self._model.axis_sizes, "batch": rows, "seq": seq_len}
        needed = [tensor for tensor in self.signature.inputs if not is_optional(tensor)]
        return {one.name: np.zeros(example_shape(one, sizes), numpy_dtype(one.dtype)) for one in needed}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the model loaded during the block. Only the event loop uses it."""
        self._users += 1
        self.unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self.unused.set()

    def close(self) -> None:
        self._closed = True
        self.batcher.close()
        if not isinstance(self.generations_or_why, str):
            self.generations_or_why.close()
        self._runner.close()


def why_not_padded(artifact: Artifact, runtime: Runtime) -> str:
    """The reason requests of different lengths must not share a run; "" if the report of the artifact has shown that
    padding a sample to the length of another one does not change its result."""
    spec = artifact.spec
    if reason := why_not_joined(spec):
        return reason
    if MASK_NAME not in {tensor.name for tensor in spec.inputs}:
        return f"the model has no {MASK_NAME}"
    if spec.model.fixed_seq_len is not None:
        return f"the model takes {spec.model.fixed_seq_len} tokens only"
    name = f"{runtime.name}: {Kind.PADDING_LENGTH}" if runtime.engine else str(Kind.PADDING_LENGTH)
    check = artifact.manifest.parity.summary.get(name)
    if check is None or not check.passed or check.failed:
        return f"its report has no passed check named {name!r}; build it again"
    return ""


READY, LOADING, UNLOADING, UNAVAILABLE = "READY", "LOADING", "UNLOADING", "UNAVAILABLE"


class ModelRepository:
    """The served models of one server. Each has its own queue, limits and runner thread.

    models: with different names. settings: limits on connections and memory hold for all models together.
    loadable: what may be loaded and unloaded while the server runs; None: nothing.
    """

    def __init__(
        self, models: Sequence[ServedModel], settings: ServingSettings, loadable: LoadableModels | None = None
    ) -> None:
        self.settings = settings
        self._loadable = loadable
        self._models = {model.name: model for model in models}
        # state and reason of models that are not served, or for which a load is under way or has failed
        self._changes: dict[str, tuple[str, str]] = {}
        # one change at a time, so that two loads do not both count on the same memory
        self._changing = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    def get(self, name: str, version: str | None = None) -> ServedModel:
        """The model of this name. Raises RequestError if there is none, or not in this version."""
        model = self._models.get(name)
        if model is None:
            if name in self._changes:
                state, reason = self._changes[name]
                raise RequestError(f"model {name!r} is not served: {reason or state.lower()}", NOT_FOUND)
            names = listed([repr(known) for known in self._models]) or "no models"
            raise RequestError(f"no model {shown(name, 128)}; this server has {names}", NOT_FOUND)
        if version not in (None, model.version):
            raise RequestError(f"no version {version[:32]!r} of {name}; expected {model.version!r}", NOT_FOUND)
        return model

    @property
    def is_ready(self) -> bool:
        return all(model.is_ready for model in self)

    async def index(self) -> list[dict[str, Any]]:
        """The V2 repository index: name, version, state and reason of each model that is served or can be loaded."""
        found = await asyncio.to_thread(self._loadable.names) if self._loadable else []
        entries = []
        for name in dict.fromkeys([*self._models, *self._changes, *found]):
            model = self._models.get(name)
            state, reason = self._changes.get(name, (UNAVAILABLE, "not loaded") if model is None else (READY, ""))
            if model is not None:
                # whatever is said of a load that is under way or has failed
                gone = UNAVAILABLE, "its runner has stopped; see the server's log"
                state, reason = (READY, reason) if model.is_ready else gone
            entries.append({"name": name, "version": VERSION, "state": state, "reason": reason})
        return entries

    async def load(self, name: str) -> None:
        """Load a model, or load it again. If that fails, everything stays as it was, and the index has the reason.

        Raises UserError if the model may not or cannot be loaded.
        """
        loadable = self._checked_loadable()
        async with self._changing:
            target = await asyncio.to_thread(loadable.target, name)
            self._changes[name] = LOADING, "being loaded"
            try:
                model = await asyncio.to_thread(target.load)
            except Exception as error:
                # of a model that was loaded and closed again
                await asyncio.to_thread(give_back_freed)
                raise self._failed(name, error) from error
            del self._changes[name]
            before = self._models.get(name)
            self._models[name] = model
        if before is not None:
            # its requests are still answered; nobody has to wait for that
            task = asyncio.create_task(retire(before))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    def _failed(self, name: str, error: Exception) -> RequestError:
        kind, reason = INVALID, str(error)
        if not isinstance(error, EffexportError):
            logger.error("loading %s failed unexpectedly", name, exc_info=error)
            kind, reason = FAILED, "an unexpected failure; the server's log says why"
        self._changes[name] = UNAVAILABLE, f"the last load failed: {reason}"
        return RequestError(f"{name} was not loaded: {reason}", kind)

    async def unload(self, name: str) -> None:
        """Answer the requests that the model has accepted, then free its memory. Raises RequestError."""
        self._checked_loadable()
        async with self._changing:
            model = self.get(name)
            del self._models[name]
            self._changes[name] = UNLOADING, "being unloaded"
        # its requests take as long as their clients do, for which no other model should wait
        await retire(model)
        if self._changes.get(name, ("",))[0] == UNLOADING:
            self._changes[name] = UNAVAILABLE, "unloaded"

    def _checked_loadable(self) -> LoadableModels:
        if self._loadable is None:
            raise RequestError(
                "this server does not load or unload models; start it with --allow-load FOLDER, the folder of the "
                "artifacts that may be loaded",
                FORBIDDEN,
            )
        return self._loadable

    async def close(self) -> None:
        """Answer what was accepted, then close all models."""
        await asyncio.gather(*self._retiring)
        for model in self:
            await asyncio.to_thread(model.close)


async def retire(model: ServedModel) -> None:
    """Close a model that is no longer found by its name, when its last request is answered."""
    await model.unused.wait()
    await asyncio.to_thread(model.close)
    await asyncio.to_thread(give_back_freed)


Made = TypeVar("Made")


@dataclass(frozen=True)
class ServingTarget:
    """An artifact to serve. name: None for the name of its folder. options: of its runtime; without threads, each run
    has those that concurrent runs leave of the cores."""

    artifact: Path
    name: str | None
    options: RunOptions
    settings: ServingSettings

    def resolved(self) -> ServingTarget:
        """With what depends on this machine: the limits of runs, and their threads.

        More rows than keep all cores busy cost memory and latency for nothing, so there is a limit of tokens on a CPU.
        Two runs at once keep short requests from waiting for a long one, and waste less of a busy machine than one with
        more threads; this was measured in ONNX Runtime only.
        """
        cores, runtime = self.options.threads or usable_cores(), RUNTIMES[self.options.runtime]
        tokens = self.settings.max_run_tokens or (RUN_TOKENS_PER_CORE * cores if runtime.device == "cpu" else None)
        runs = self.settings.concurrent_runs or (min(2, cores) if runtime.provider == CPU else 1)
        # a run also computes in the thread that started it, so all runs together use every core
        options = self.options if runs == 1 else replace(self.options, threads=max(1, cores - runs + 1))
        return replace(
            self, options=options, settings=replace(self.settings, max_run_tokens=tokens, concurrent_runs=runs)
        )

    def load(self) -> ServedModel:
        """Open the artifact and warm it up in this process.

        Raises UserError if it cannot be served, or takes more memory than the server may.
        """
        artifact, name = self.checked()
        resolved = self.resolved()
        options, settings = resolved.options, resolved.settings
        check_memory(name, self.settings.max_memory_bytes, model_bytes(artifact, options.runtime))
        tasks = made_or_why(tasks_from_artifact, artifact, name, EffexportError)
        runner = runner_from_artifact(artifact, options)
        model = ServedModel(runner, artifact, name, settings, RUNTIMES[options.runtime], tasks)

        def generations(artifact: Artifact) -> Generations:
            generator = generator_from_artifact(artifact, lambda it: decoder_from_artifact(it, options))
            return Generations(generator, settings.max_sessions, timeout_s=settings.timeout_s, metrics=model.metrics)

        try:
            model.warm_up()
            model.generations_or_why = made_or_why(generations, artifact, name)
            check_memory(name, self.settings.max_memory_bytes)
        except BaseException:
            model.close()
            raise
        return model

    def checked(self) -> tuple[Artifact, str]:
        """The artifact and the model's name. Raises UserError for what cannot be served; does not load the model."""
        check_identity(self.artifact, self.settings)
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
        found = sorted(path.parent.name for path in self.folder.glob(f"*/{MANIFEST}"))
        return list(dict.fromkeys([*self.started, *(name for name in found if NAME.fullmatch(name))]))

    def target(self, name: str) -> ServingTarget:
        """Raises UserError for a name that does not stay in the folder, or is not there."""
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
    names = [target.checked()[1] for target in targets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"several models have the name {listed(twice)}; expected different names: give each artifact its own with "
            "--name, in the order of the artifacts"
        )
    models: list[ServedModel] = []
    try:
        for target in targets:
            on_stage(f"loading {target.artifact} for {target.options.runtime}")
            models.append(target.load())
    except BaseException:
        for model in models:
            model.close()
        raise
    loadable = LoadableModels(allow_load, dict(zip(names, targets, strict=True))) if allow_load else None
    return ModelRepository(models, targets[0].settings, loadable)


def made_or_why(
    make: Callable[[Artifact], Made], artifact: Artifact, name: str, error: type[EffexportError] = UserError
) -> Made | str:
    """The result of `make` for an artifact that is called `name`, or the error that says why there is none."""
    try:
        return make(artifact)
    except error as reason:
        return str(reason).replace(str(artifact.path), name)


def model_bytes(artifact: Artifact, runtime: str) -> int:
    """Size of the files that a runtime loads: engines, or models with their weights."""
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
