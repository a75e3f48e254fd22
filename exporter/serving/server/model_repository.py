"""The models of one server, by name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from effexport.errors import EffexportError, UserError
from effexport.models.validation import shown
from effexport.process_memory import give_back_freed
from effexport.serving.protocol.errors import FAILED, FORBIDDEN, INVALID, NOT_FOUND, RequestError
from effexport.serving.server.served_model import VERSION, ServedModel
from effexport.serving.settings import ServingSettings
from effexport.units import listed

logger = logging.getLogger("effexport.serving")
READY, LOADING, UNLOADING, UNAVAILABLE = "READY", "LOADING", "UNLOADING", "UNAVAILABLE"


class Target(Protocol):
    def load(self) -> ServedModel: ...


class Loadable(Protocol):
    """Models that a running server may load. Both methods read the disk."""

    def names(self) -> list[str]: ...

    def target(self, name: str) -> Target:
        """Raises UserError for a name that it does not have."""


class ModelRepository:
    """The served models of one server. Each has its own queue, limits and runner thread.

    settings: of the server; limits on connections and memory hold for all models together.
    loadable: what may be loaded and unloaded while the server runs; None: nothing.
    """

    def __init__(
        self, models: Sequence[ServedModel], settings: ServingSettings, loadable: Loadable | None = None
    ) -> None:
        check_names([model.name for model in models])
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
            state, reason = self._state(name)
            entries.append({"name": name, "version": VERSION, "state": state, "reason": reason})
        return entries

    def _state(self, name: str) -> tuple[str, str]:
        model = self._models.get(name)
        state, reason = self._changes.get(name, (UNAVAILABLE, "not loaded"))
        if model is None:
            return state, reason
        if not model.is_ready:
            return UNAVAILABLE, "its runner has stopped; see the server's log"
        return READY, reason if name in self._changes else ""

    async def load(self, name: str) -> None:
        """Load a model, or load it again. If that fails, everything stays as it was, and the index has the reason.

        Raises RequestError if the model may not or cannot be loaded.
        """
        loadable = self._checked_loadable()
        async with self._changing:
            try:
                target = await asyncio.to_thread(loadable.target, name)
            except UserError as error:
                raise RequestError(str(error)) from error
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

    def _checked_loadable(self) -> Loadable:
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
    await model.unused()

    def close() -> None:
        model.close()
        give_back_freed()

    await asyncio.to_thread(close)


def check_names(names: Sequence[str]) -> None:
    """Raises UserError for models that have the same name."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(
            f"several models have the name {listed(twice)}; expected different names: give each artifact its own with "
            "--name, in the order of the artifacts"
        )
