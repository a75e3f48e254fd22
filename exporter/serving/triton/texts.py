"""Requests with texts: their tokens run like any other request, and the outputs become answers.

Triton's Python models include this module; it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.errors import EffexportError, UserError
from effexport.models.checkpoints.spec import CONFIG
from effexport.models.encoder.spec import EMBEDDING
from effexport.models.validation import did_you_mean
from effexport.serving.triton.merging import Answer, run_merged
from effexport.serving.triton.signature import ANSWER, CONTEXT, REQUEST_ID, TEXT, decoded
from effexport.text.fast_tokenizer import json_of
from effexport.text.task import Prepared, Task, TextOptions, groups, joined_outputs
from effexport.text.tasks import Embedding, task_from_spec
from effexport.text.tokenizer import tokenizer_from_artifact

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.dtypes import Array
    from effexport.runners.ort.runner import OrtRunner


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


# Windows of the texts of one request: the outputs of all of them are in memory until they are answered.
MOST_WINDOWS = 256


@dataclass(frozen=True)
class Request:
    """A request as Triton hands it over. tensors: by input; texts are bytes objects. outputs: those it asks for."""

    tensors: Mapping[str, Array]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] = (ANSWER, EMBEDDING)


@dataclass(frozen=True)
class Job:
    """A request: what to run for it, and what makes its answer from the outputs of these runs."""

    runs: Sequence[Mapping[str, Array]]
    answer: Callable[[Sequence[Answer]], Answer]


def run_requests(
    runner: OrtRunner, task_of: TaskOf | None, requests: Sequence[Request], max_batch: int
) -> list[Answer]:
    """The outputs of each request, or its error. A bad request does not affect the others.

    A request has the tensors of the model, or `text`, bytes objects in UTF-8 of any shape, and an optional `context`
    of the same shape. The output `answer` has the answer to each text as JSON; a model with the output `embedding` also
    returns that, [texts, dim]; in float16 only if `answer` is not asked for, because Triton refuses float16 beside it
    in an answer as JSON. task_of: None for a model of tensors only. max_batch: see run_merged.
    """
    jobs = [job_from_request(task_of, request, max_batch) for request in requests]
    outputs = iter(run_merged(runner, [run for job in jobs for run in job.runs], max_batch))
    return [job.answer([next(outputs) for _ in job.runs]) for job in jobs]


def job_from_request(task_of: TaskOf | None, request: Request, max_batch: int) -> Job:
    tensors = request.tensors
    if task_of is None or (tensors and tensors.keys().isdisjoint((TEXT, CONTEXT))):
        return Job([tensors], lambda outputs: outputs[0])
    try:
        check_inputs(tensors)
        task = task_of(request.parameters)
        prepared = prepared_texts(task, tensors)
    except EffexportError as error:
        failure = error
        return Job([], lambda _: failure)
    # of each text, at most as many windows as the model takes together
    runs = [[rows for feeds in one.runs for rows in groups(feeds, max(max_batch, 1))] for one in prepared]

    def answer(outputs: Sequence[Answer]) -> Answer:
        found = iter(outputs)
        try:
            joined = [joined_outputs([outputs_or_error(next(found)) for _ in of_text]) for of_text in runs]
            return answers_of_texts(task, prepared, joined, request)
        except EffexportError as error:
            return error

    return Job([run for of_text in runs for run in of_text], answer)


def check_inputs(tensors: Mapping[str, Array]) -> None:
    """Raises UserError unless a request has texts, and a context for each of them or none."""
    if TEXT not in tensors or tensors.keys() - {TEXT, CONTEXT}:
        given = ", ".join(sorted(tensors)) or "no inputs"
        raise UserError(f"the request has {given}; expected {TEXT}, with or without {CONTEXT}, or the model's tensors")
    texts, contexts = tensors[TEXT], tensors.get(CONTEXT)
    if contexts is not None and contexts.shape != texts.shape:
        raise UserError(
            f"{TEXT} has the shape {list(texts.shape)} and {CONTEXT} {list(contexts.shape)}; expected a {CONTEXT} for "
            f"each {TEXT}"
        )
    if not texts.size:
        raise UserError(f"{TEXT} has the shape {list(texts.shape)}, which is empty; expected at least one text")


def prepared_texts(task: Task, tensors: Mapping[str, Array]) -> list[Prepared]:
    """Raises UserError for a request whose texts cannot be answered."""
    texts, contexts = tensors[TEXT], tensors.get(CONTEXT)
    prepared = []
    for i in range(texts.size):
        try:
            pair = None if contexts is None else decoded(contexts.flat[i], CONTEXT)
            prepared.append(task.prepare(decoded(texts.flat[i], TEXT), pair))
        except UserError as error:
            raise error if texts.size == 1 else UserError(f"{TEXT} {i}: {error}") from error
    windows = sum(len(one.windows) for one in prepared)
    if windows > MOST_WINDOWS:
        raise UserError(
            f"the request has {windows} windows of tokens; expected at most {MOST_WINDOWS}: send less text in a request"
        )
    return prepared


def outputs_or_error(answer: Answer) -> Mapping[str, Array]:
    """The outputs of a run. Raises its error."""
    if isinstance(answer, EffexportError):
        raise answer
    return answer


def answers_of_texts(
    task: Task, prepared: Sequence[Prepared], outputs: Sequence[Mapping[str, Array]], request: Request
) -> dict[str, Array]:
    """outputs: of the runs of each text."""
    found: dict[str, Array] = {}
    if ANSWER in request.outputs:
        found[ANSWER] = np.empty(request.tensors[TEXT].shape, dtype=object)
        for i, (one, of_text) in enumerate(zip(prepared, outputs, strict=True)):
            found[ANSWER].flat[i] = json.dumps(task.answer(one, of_text), ensure_ascii=False).encode()
    if EMBEDDING in request.outputs and isinstance(task, Embedding) and task.output == EMBEDDING:
        dtype = outputs[0][EMBEDDING].dtype
        if dtype != np.float16 or not found:
            vectors = [task.vector(one, of_text) for one, of_text in zip(prepared, outputs, strict=True)]
            found[EMBEDDING] = np.stack(vectors).astype(dtype)
    return found
