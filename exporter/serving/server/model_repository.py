"""The models of one server, by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from effexport.errors import UserError
from effexport.serving.protocol.errors import NOT_FOUND, RequestError
from effexport.serving.protocol.signature import shown
from effexport.serving.server.served_model import ServedModel
from effexport.serving.settings import ServingSettings
from effexport.units import listed


class ModelRepository:
    """The served models of one server. Each has its own queue, limits and runner thread.

    settings: of the server; limits on connections and memory hold for all models together.
    """

    def __init__(self, models: Sequence[ServedModel], settings: ServingSettings) -> None:
        check_names([model.name for model in models])
        self.settings = settings
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    def get(self, name: str, version: str | None = None) -> ServedModel:
        """The model of this name. Raises RequestError if there is none, or not in this version."""
        model = self._models.get(name)
        if model is None:
            names = listed([repr(known) for known in self._models]) or "no models"
            raise RequestError(f"no model {shown(name, 128)}; this server has {names}", NOT_FOUND)
        if version not in (None, model.version):
            raise RequestError(f"no version {version[:32]!r} of {name}; expected {model.version!r}", NOT_FOUND)
        return model

    @property
    def is_ready(self) -> bool:
        return all(model.is_ready for model in self)

    def index(self) -> list[dict[str, Any]]:
        """The V2 repository index: name, version, state and reason of each model."""
        return [
            {
                "name": model.name,
                "version": model.version,
                "state": "READY" if model.is_ready else "UNAVAILABLE",
                "reason": "" if model.is_ready else "its runner has stopped; see the server's log",
            }
            for model in self
        ]

    def close(self) -> None:
        """Answer what was accepted, then close all models."""
        for model in self:
            model.close()


def check_names(names: Sequence[str]) -> None:
    """Raises UserError for models that have the same name."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(
            f"several models have the name {listed(twice)}; expected different names: give each artifact its own with "
            "--name, in the order of the artifacts"
        )
