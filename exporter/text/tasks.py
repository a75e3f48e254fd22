"""Which task an artifact answers, and a model that answers it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from effexport.artifact import Artifact
from effexport.errors import UserError
from effexport.models.checkpoints.spec import CONFIG
from effexport.models.encoder.spec import EMBEDDING, POSITIONS, SCORES, Head
from effexport.runners.runner import Closeable
from effexport.text.classification import TextClassification, TokenClassification, labels_from_config
from effexport.text.embedding import Embedding
from effexport.text.fill_mask import DEFAULT_TOP, FillMask
from effexport.text.question_answering import DEFAULT_WINDOW, QuestionAnswering
from effexport.text.task import DEFAULT_OPTIONS, Prepared, Reader, Task, TextOptions, outputs_of, reader_from_spec
from effexport.text.tokenizer import Tokenizer, tokenizer_from_artifact
from effexport.text.tokenizer_files import json_of

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.runners.runner import Runner
    from effexport.spec import BuildSpec

# Overlapping windows share at most this many tokens, and at most half of a window, as in transformers' pipeline.
DEFAULT_STRIDE = 128


def task_from_artifact(artifact: Artifact, options: TextOptions = DEFAULT_OPTIONS) -> Task:
    """The task that the outputs of an artifact answer.

    Raises UserError for an artifact without a tokenizer, or whose outputs answer no task.
    """
    return task_from_spec(artifact.spec, tokenizer_from_artifact(artifact), json_of(artifact.path / CONFIG), options)


def task_from_spec(
    spec: BuildSpec, tokenizer: Tokenizer, config: Mapping[str, Any], options: TextOptions = DEFAULT_OPTIONS
) -> Task:
    """As `task_from_artifact`. config: config.json of the checkpoint, which names the labels; {} without one."""
    model = spec.model
    reader = reader_from_spec(spec, tokenizer, given_by_task=(POSITIONS,))
    inputs = {tensor.name: tensor.dims for tensor in spec.inputs}
    outputs = {tensor.name: tensor.dims for tensor in spec.outputs}
    kind = model.task
    if POSITIONS in inputs:
        return fill_mask(reader, options, outputs[SCORES][-1])
    if {"start_logits", "end_logits"} <= set(outputs):
        return question_answering(reader, options)
    if EMBEDDING in outputs:
        return pooled(reader, options, spec.head)
    name, dims = next(iter(outputs.items()))
    if kind == "lm-head" or (name == "logits" and model.is_causal):
        raise UserError(f"{model.title} continues texts: use --generate, or the endpoint generate of a server")
    if kind == "masked-lm" or (name == "logits" and dims[-1] == model.input_limits.get("input_ids")):
        return fill_mask(reader, options, None)
    if name == "logits" and kind != "multiple-choice" and isinstance(dims[-1], int):
        labels = labels_from_config(config, dims[-1])
        if len(dims) == 2:
            return TextClassification(reader, labels, options.top)
        return TokenClassification(reader, labels, overlap(options, window_of(reader, options)), options.max_window)
    if len(dims) == 3:
        return Embedding(reader, name, stride=options.stride or 0, max_window=options.max_window)
    found = ", ".join(str(tensor) for tensor in spec.outputs)
    raise UserError(f"the outputs of {model.title} answer no task for texts: {found}; use --text or --input")


def fill_mask(reader: Reader, options: TextOptions, in_graph: int | str | None) -> FillMask:
    count = in_graph if isinstance(in_graph, int) else None
    top = min(DEFAULT_TOP, count or DEFAULT_TOP) if options.top is None else options.top
    return FillMask(reader, top, count)


def question_answering(reader: Reader, options: TextOptions) -> QuestionAnswering:
    limits = (options.max_window or DEFAULT_WINDOW, reader.limit, reader.tokenizer.max_length)
    window = min(limit for limit in limits if limit is not None)
    return QuestionAnswering(reader, options.top or 1, window, overlap(options, window), options.max_answer_tokens)


def pooled(reader: Reader, options: TextOptions, head: Head) -> Embedding:
    """head: how the graph makes its vector; that of a module of the user's own is not known to be a mean."""
    splits = head.pool in ("mean", "max") and not head.normalize
    return Embedding(reader, EMBEDDING, head.pool or "cls", splits, options.stride or 0, options.max_window)


def window_of(reader: Reader, options: TextOptions) -> int | None:
    return min((limit for limit in (reader.limit, options.max_window) if limit is not None), default=None)


def overlap(options: TextOptions, window: int | None) -> int:
    if options.stride is not None:
        return options.stride
    return DEFAULT_STRIDE if window is None else min(window // 2, DEFAULT_STRIDE)


class TextModel(Closeable):
    """An open artifact that answers texts: a runner and a task. Thread-safe. Use it as a context manager, or `close`.

    batch: the most windows of a long text that run together.
    """

    def __init__(self, runner: Runner, task: Task, batch: int = 1) -> None:
        self.runner, self.task, self.batch = runner, task, batch

    def __repr__(self) -> str:
        return f"<TextModel: {self.task.name}, {self.runner!r}>"

    def __call__(self, text: str, pair: str | None = None) -> Any:
        """The answer to a text, in the form of transformers' pipeline for the task.

        pair: for question-answering, the context, with the question as the text; for others, a second text.
        Raises UserError for a text that the task or the model cannot take.
        """
        prepared = self.task.prepare(text, pair)
        return self.task.answer(prepared, self.outputs(prepared))

    def outputs(self, prepared: Prepared) -> Mapping[str, Array]:
        """The outputs of all rows of a prepared text."""
        return outputs_of(self.runner.run, prepared, self.batch)

    def close(self) -> None:
        self.runner.close()
