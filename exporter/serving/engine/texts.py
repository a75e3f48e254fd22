"""Texts that are answered by the task of an artifact, with the options of each request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from effexport.base.errors import UserError
from effexport.models.checkpoints.spec import CONFIG
from effexport.models.encoder.spec import EMBEDDING
from effexport.models.validation import did_you_mean, shown
from effexport.serving.engine.errors import RequestError
from effexport.serving.engine.queue import Batcher, Waiting, aside
from effexport.serving.engine.settings import MAX_TEXTS
from effexport.serving.engine.signature import ANSWER, CONTEXT, TEXT, ServedSignature
from effexport.text.fast_tokenizer import json_of, tokenizer_from_artifact
from effexport.text.task import TOKENS, PreparedText, Task, TextOptions, joined_outputs
from effexport.text.tasks import Embedding, task_from_spec
from effexport.text.tokenizer import Encoding

if TYPE_CHECKING:
    from effexport.artifact import Artifact

# Shorter texts are tokenised in less than a millisecond.
THREAD_CHARACTERS = 2048
# Tasks with different options that a model keeps.
KEPT_TASKS = 16
OPTIONS = tuple(field.name for field in fields(TextOptions))


class Tasks:
    """The task of an artifact, with any options. default: the one without options."""

    def __init__(self, artifact: Artifact) -> None:
        """Raises UserError for an artifact that does not read text, or whose outputs answer no task."""
        spec, tokenizer, config = artifact.spec, tokenizer_from_artifact(artifact), json_of(artifact.path / CONFIG)
        self._of_options = lru_cache(KEPT_TASKS)(partial(task_from_spec, spec, tokenizer, config))
        self.default: Task = self._of_options(TextOptions())

    def of_parameters(self, parameters: Mapping[str, Any]) -> Task:
        """Raises UserError as `options_from_parameters`, and for options that the artifact does not have."""
        return self._of_options(options_from_parameters(parameters))


def options_from_parameters(parameters: Mapping[str, Any]) -> TextOptions:
    """Raises UserError for a parameter that is unknown or cannot work."""
    for name, value in parameters.items():
        if name not in OPTIONS:
            raise UserError(f"unknown parameter {name!r}{did_you_mean(name, OPTIONS)} Expected: {', '.join(OPTIONS)}")
        if type(value) is not int:
            raise UserError(f"{name} is {shown(value)}; expected an integer")
    return TextOptions(**parameters)


@dataclass(frozen=True)
class Unprepared:
    """A text that is not tokenised yet. prepare: raises UserError for a text that the task cannot take."""

    characters: int
    prepare: Callable[[], PreparedText]


class Texts:
    """The texts of a served model: each is a request to its queue, or several if its windows are more rows than a run
    has."""

    def __init__(self, tasks: Tasks, batcher: Batcher, signature: ServedSignature) -> None:
        self._tasks = tasks
        self._batcher = batcher
        self._signature = signature
        self.name = tasks.default.name
        self.is_embedding = isinstance(tasks.default, Embedding)
        # names and datatypes of the outputs
        self.outputs = {ANSWER: "BYTES", **({EMBEDDING: "FP32"} if self.is_embedding else {})}

    def metadata(self) -> dict[str, Any]:
        """The texts that a client may send instead of tensors, and its answers: `parameters` of the V2 metadata."""
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

    async def answers_of(
        self, texts: Sequence[tuple[str, str | None]], parameters: Mapping[str, Any], waiting: Waiting
    ) -> list[Any]:
        """The answers to texts, or to pairs of texts. parameters: of the request; some are options of the task.

        Raises ClientGoneError, or RequestError with the index of a text that cannot be answered.
        """
        given = {name: parameters[name] for name in OPTIONS if parameters.get(name) is not None}
        try:
            task = self._tasks.of_parameters(given)
        except UserError as error:
            raise RequestError(str(error)) from error
        return await self._answers(task, [unprepared(task, *pair) for pair in texts], waiting)

    async def embeddings_of(self, inputs: Sequence[str | tuple[int, ...]], waiting: Waiting) -> list[Any]:
        """{embedding, tokens} of each text, or of tokens that the client has made. Raises as `answers_of`."""
        task = self._tasks.default
        assert isinstance(task, Embedding)
        texts = [
            unprepared(task, value, None)
            if isinstance(value, str)
            else Unprepared(len(value), partial(prepared_tokens, task, value))
            for value in inputs
        ]
        return await self._answers(task, texts, waiting)

    async def _answers(self, task: Task, texts: Sequence[Unprepared], waiting: Waiting) -> list[Any]:
        # so many that the next batch waits while one runs, and other requests find room
        settings = self._batcher.settings
        places = asyncio.Semaphore(max(1, min(2 * settings.max_batch, settings.queue_size // 2)))

        async def one(index: int) -> Any:
            try:
                async with places, waiting.memory.holding(texts[index].characters, waiting.timeout_s):
                    return await self._answer(task, texts[index], waiting)
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

    async def _answer(self, task: Task, text: Unprepared, waiting: Waiting) -> Any:
        is_long = text.characters > THREAD_CHARACTERS
        prepared = await asyncio.to_thread(text.prepare) if is_long else text.prepare()
        windows = len(prepared.windows)
        if windows > MAX_TEXTS:
            raise UserError(f"the text is {windows} windows; expected at most {MAX_TEXTS}: send it in parts")
        parts = []
        for rows in prepared.rows(self._batcher.settings.max_batch):
            self._signature.check_size("seq", rows[TOKENS].shape[1])
            feeds = self._signature.complete(rows)
            parts.append(await self._batcher.outputs(feeds, waiting.timeout_s, waiting.gone))
        size = sum(array.nbytes for part in parts for array in part.values())
        return await aside(size, lambda: task.answer(prepared, joined_outputs(parts)))


def unprepared(task: Task, text: str, pair: str | None) -> Unprepared:
    return Unprepared(len(text) + len(pair or ""), partial(task.prepare, text, pair))


def prepared_tokens(task: Embedding, ids: Sequence[int]) -> PreparedText:
    """Tokens as one row, with those that the tokenizer would add if the client has added them."""
    count, reader = len(ids), task.reader
    if reader.limit is not None and count > reader.limit:
        raise UserError(f"the input has {count} tokens; this model takes {reader.limit}: shorten or split it")
    encoding = Encoding(tuple(ids), (0,) * count, (False,) * count, ((0, 0),) * count, (0,) * count, (None,) * count)
    return reader.prepared("", None, encoding, [tuple(range(count))])
