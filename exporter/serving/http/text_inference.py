"""Texts through the queue of a model: tokenised, run, and answered by its task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from effexport.errors import UserError
from effexport.models.checkpoints.spec import CONFIG
from effexport.models.validation import shown
from effexport.serving.engine.errors import RequestError
from effexport.serving.engine.queue import Queued, Waiting, outputs_of
from effexport.serving.engine.settings import MAX_TEXTS
from effexport.serving.http.body import aside
from effexport.serving.http.request import ANSWER, CONTEXT, EMBEDDING, TEXT, TextRequest
from effexport.text.fast_tokenizer import json_of
from effexport.text.task import TOKENS, Prepared, Task, TextOptions, groups, joined_outputs
from effexport.text.tasks import Embedding, task_from_spec
from effexport.text.tokenizer import Encoding, tokenizer_from_artifact

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.dtypes import Array

# Shorter texts are tokenised in less than a millisecond.
THREAD_CHARACTERS = 2048
# Tasks with different options that a model keeps.
KEPT_TASKS = 16
OPTIONS = tuple(field.name for field in fields(TextOptions))


class Texts:
    """What answers the texts of an artifact: its task, with the options of each request."""

    def __init__(self, artifact: Artifact) -> None:
        """Raises UserError for an artifact that does not read text, or whose outputs answer no task."""
        self._parts = artifact.spec, tokenizer_from_artifact(artifact), json_of(artifact.path / CONFIG)
        default = task_from_spec(*self._parts)
        self.task = lru_cache(KEPT_TASKS)(self._task)
        self.name = default.name
        self.is_embedding = isinstance(default, Embedding)
        # names and datatypes of the outputs
        self.outputs = {ANSWER: "BYTES", **({EMBEDDING: "FP32"} if self.is_embedding else {})}

    def _task(self, options: TextOptions) -> Task:
        try:
            return task_from_spec(*self._parts, options)
        except UserError as error:
            raise RequestError(str(error)) from error

    def metadata(self) -> dict[str, Any]:
        """What a client may send instead of tensors, and what it gets: `parameters` of the V2 model metadata."""
        inputs = [TEXT, *([CONTEXT] if self.name == "question-answering" else [])]
        return {
            "task": self.name,
            "text_inputs": [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in inputs],
            "text_outputs": [
                {"name": name, "datatype": datatype, "shape": [-1, -1] if name == EMBEDDING else [-1]}
                for name, datatype in self.outputs.items()
            ],
            "text_parameters": list(OPTIONS),
        }

    async def outputs_of(
        self, model: Queued, request: TextRequest, waiting: Waiting
    ) -> Mapping[str, Array | Sequence[bytes]]:
        """The outputs of a request, as arrays or as strings of JSON. Raises as `answers_of`."""
        task = self.task(options_from_parameters(request.parameters))
        pairs = zip(request.texts, request.pairs, strict=True)
        answers = await answers_of(model, task, [unprepared(task, *pair) for pair in pairs], waiting)
        outputs: dict[str, Array | Sequence[bytes]] = {ANSWER: [orjson.dumps(answer) for answer in answers]}
        if self.is_embedding:
            outputs[EMBEDDING] = np.array([answer["embedding"] for answer in answers], np.float32)
        return outputs

    async def embeddings_of(
        self, model: Queued, inputs: Sequence[str | tuple[int, ...]], waiting: Waiting
    ) -> list[Any]:
        """{embedding, tokens} of each text, or of tokens that the client has made. Raises as `answers_of`."""
        task = self.task(TextOptions())
        assert isinstance(task, Embedding)
        texts = [
            unprepared(task, value, None)
            if isinstance(value, str)
            else Unprepared(len(value), partial(prepared_tokens, task, value))
            for value in inputs
        ]
        return await answers_of(model, task, texts, waiting)


@dataclass(frozen=True)
class Unprepared:
    """A text that is not tokenised yet. prepare: raises UserError for a text that the task cannot take."""

    characters: int
    prepare: Callable[[], Prepared]


def unprepared(task: Task, text: str, pair: str | None) -> Unprepared:
    return Unprepared(len(text) + len(pair or ""), partial(task.prepare, text, pair))


def prepared_tokens(task: Embedding, ids: Sequence[int]) -> Prepared:
    """Tokens as one row, with those that the tokenizer would add if the client has added them."""
    count, reader = len(ids), task.reader
    if reader.limit is not None and count > reader.limit:
        raise UserError(f"the input has {count} tokens; this model takes {reader.limit}: shorten or split it")
    encoding = Encoding(tuple(ids), (0,) * count, (False,) * count, ((0, 0),) * count, (0,) * count, (None,) * count)
    return reader.prepared("", None, encoding, [tuple(range(count))])


async def answers_of(model: Queued, task: Task, texts: Sequence[Unprepared], waiting: Waiting) -> list[Any]:
    """The answers of the task, in the order of the texts. Each text is a request to the queue, or several if its
    windows are more rows than a run has.

    Raises ClientGoneError, or RequestError with the index of a text that cannot be answered.
    """
    # so many that the next batch waits while one runs, and other requests find room
    places = asyncio.Semaphore(max(1, min(2 * model.settings.max_batch, model.settings.queue_size // 2)))

    async def one(index: int) -> Any:
        try:
            async with places, waiting.memory.holding(texts[index].characters, waiting.timeout_s):
                return await answer_of(model, task, texts[index], waiting)
        except UserError as error:
            raise RequestError(f"text {index}: {error}" if len(texts) > 1 else str(error)) from error

    # texts of similar length follow each other, so that more of them share a run
    order = sorted(range(len(texts)), key=lambda index: texts[index].characters)
    tasks = [asyncio.create_task(one(index)) for index in order]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task_of_text in tasks:
            task_of_text.cancel()
    return [answer for _, answer in sorted(zip(order, answers, strict=True), key=lambda pair: pair[0])]


async def answer_of(model: Queued, task: Task, text: Unprepared, waiting: Waiting) -> Any:
    is_long = text.characters > THREAD_CHARACTERS
    prepared = await asyncio.to_thread(text.prepare) if is_long else text.prepare()
    if len(prepared.windows) > MAX_TEXTS:
        raise UserError(f"the text is {len(prepared.windows)} windows; expected at most {MAX_TEXTS}: send it in parts")
    parts = []
    for run in prepared.runs:
        for rows in groups(run, model.settings.max_batch):
            model.signature.check_size("seq", rows[TOKENS].shape[1])
            parts.append(await outputs_of(model, model.signature.complete(rows), waiting.timeout_s, waiting.gone))
    size = sum(array.nbytes for part in parts for array in part.values())
    return await aside(size, lambda: task.answer(prepared, joined_outputs(parts)))


def options_from_parameters(parameters: Mapping[str, Any]) -> TextOptions:
    """The options of the task among the parameters of a request. Raises RequestError."""
    given = {name: parameters[name] for name in OPTIONS if parameters.get(name) is not None}
    for name, value in given.items():
        if type(value) is not int:
            raise RequestError(f"{name} is {shown(value)}; expected an integer")
    try:
        return TextOptions(**given)
    except UserError as error:
        raise RequestError(str(error)) from error
