"""The task of an artifact, with the options of each request.

Triton's Python models include this module; it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from effexport.errors import UserError
from effexport.models.checkpoints.spec import CONFIG
from effexport.models.validation import did_you_mean
from effexport.text.fast_tokenizer import json_of
from effexport.text.task import Task, TextOptions
from effexport.text.tasks import task_from_spec
from effexport.text.tokenizer import tokenizer_from_artifact
from effexport.triton.signature import REQUEST_ID

if TYPE_CHECKING:
    from effexport.artifact import Artifact

# Tasks with other options that an instance keeps.
KEPT_TASKS = 16
OPTIONS = tuple(field.name for field in fields(TextOptions))
# The task of a request with these parameters. Raises UserError for parameters that it does not have.
TaskOf = Callable[[Mapping[str, Any]], Task]


def tasks_of_artifact(artifact: Artifact) -> TaskOf:
    """The task of an artifact, with the options that a request chooses.

    Raises UserError for an artifact that does not read text, or whose outputs answer no task.
    """
    spec = artifact.spec
    tokenizer, config = tokenizer_from_artifact(artifact), json_of(artifact.path / CONFIG)

    @lru_cache(KEPT_TASKS)
    def task(options: TextOptions) -> Task:
        return task_from_spec(spec, tokenizer, config, options)

    task(TextOptions())
    return lambda parameters: task(options_from_parameters(parameters))


def options_from_parameters(parameters: Mapping[str, Any]) -> TextOptions:
    """Raises UserError for a parameter that is unknown or cannot work."""
    parameters = {name: value for name, value in parameters.items() if name != REQUEST_ID}
    for name, value in parameters.items():
        if name not in OPTIONS:
            raise UserError(f"unknown parameter {name!r}{did_you_mean(name, OPTIONS)} Expected: {', '.join(OPTIONS)}")
        if type(value) is not int:
            raise UserError(f"{name} is {value!r}; expected an integer")
    return TextOptions(**parameters)
