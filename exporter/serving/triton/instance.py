"""Instances of packaged models, of tensors and texts or of generated text, with the settings that Triton gives.

Triton's Python models include this module; it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from effexport.artifact import open_artifact
from effexport.base.dtypes import Array
from effexport.base.errors import EffexportError
from effexport.base.runtimes import CPU, CUDA, RUNTIME_OF_PROVIDER
from effexport.base.version import __version__
from effexport.models.encoder.spec import EMBEDDING
from effexport.plugins.building.library import LIBRARY_NAME, LIBRARY_VARIABLE
from effexport.plugins.ops import OPS
from effexport.runners.artifact_runner import decoder_from_artifact
from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import Closeable, checked_feeds, limits_of_runner
from effexport.serving.engine.errors import ClientGoneError, refusal_of
from effexport.serving.engine.queue import Job, Outcome, Outputs, TextMemory, Waiting, first_batch, run_together, settle
from effexport.serving.engine.settings import TEXT_CHARACTERS_IN_MEMORY
from effexport.serving.engine.signature import (
    ANSWER,
    CONTEXT,
    FINISH_REASON,
    GENERATED,
    REQUEST_ID,
    TEXT,
    TEXT_INPUT,
    generation_request,
    objects,
    texts_of_inputs,
)
from effexport.serving.engine.texts import Generations, Texts
from effexport.tasks.sampling import Sampling
from effexport.tasks.task import Task, TextOptions, options_from_parameters
from effexport.tasks.tasks import tasks_from_artifact
from effexport.tasks.text_generator import Session, TextGenerator, generator_from_artifact

ARTIFACT = "artifact"
# Texts of a request whose outputs are in memory until they are answered.
TEXTS_AT_ONCE = 256
# Asking the server whether a client is still there takes a tenth of a millisecond, as long as a step of a small model.
CANCEL_CHECK_SECONDS = 0.05


def instance_from_arguments(
    folder: Path, arguments: Mapping[str, str], backend: Any
) -> ModelInstance | GenerationInstance:
    """The instance of a model. folder: of the model's version. arguments: as Triton gives them to `initialize`.

    backend: the module triton_python_backend_utils.
    """
    config = json.loads(arguments["model_config"])
    artifact = open_artifact(folder / ARTIFACT)
    settings = settings_of_instance(folder, arguments, config)
    if all(tensor["name"] != TEXT_INPUT for tensor in config["input"]):
        reads_text = any(tensor["name"] == TEXT for tensor in config["input"])
        tasks = tasks_from_artifact(artifact) if reads_text else None
        runner = OrtRunner(artifact.model_path, settings, limits=limits_of_runner(artifact.spec))
        return ModelInstance(runner, tasks, config["max_batch_size"], backend)
    generator = generator_from_artifact(artifact, lambda it: decoder_from_artifact(it, settings))
    return GenerationInstance(generator, parameter(config, "sessions"), parameter(config, "max_queue") or None, backend)


def settings_of_instance(folder: Path, arguments: Mapping[str, str], config: Mapping[str, Any]) -> RunOptions:
    """The settings of ONNX Runtime, which is to use the packaged kernels. config: of the model."""
    on_gpu = arguments["model_instance_kind"] == "GPU"
    library = folder / LIBRARY_NAME
    if library.is_file():
        os.environ[LIBRARY_VARIABLE] = str(library)
    # packaged kernels must run, apart from those that are slower than bodies on a GPU
    faster = [name for name, op in OPS.items() if not on_gpu or op.cuda_up_to is None]
    return RunOptions(
        runtime=RUNTIME_OF_PROVIDER[CUDA if on_gpu else CPU].name,
        implementation=",".join(f"{name}=kernel" for name in faster) if library.is_file() else "body",
        threads=parameter(config, "threads") or None,
        device=int(arguments["model_instance_device_id"]) if on_gpu else 0,
    )


def parameter(config: Mapping[str, Any], name: str) -> int:
    """A parameter of config.pbtxt."""
    return int(config["parameters"][name]["string_value"])


def error_response(backend: Any, error: Exception) -> Any:
    """The response with an error. `infer` over HTTP has the status of its code, `generate` always 400."""
    code = getattr(backend.TritonError, triton_code(error))
    return backend.InferenceResponse(error=backend.TritonError(str(error), code))


def triton_code(error: Exception) -> str:
    """The name of an error's code in Triton's Python backend."""
    if isinstance(error, ClientGoneError):
        return "CANCELLED"
    return {500: "INTERNAL", 503: "UNAVAILABLE"}.get(refusal_of(error).status, "INVALID_ARG")


class ModelInstance(Closeable):
    """A model of tensors and texts. `execute` answers the requests of one batch of Triton; a bad one spoils no other.

    runner: closed with this. tasks: what answers texts; None for a model of tensors only. max_batch: rows that run
    together, unless one request has more; 0 runs each request on its own, for models whose results depend on the rest
    of the batch.
    """

    def __init__(
        self, runner: OrtRunner, tasks: Callable[[TextOptions], Task] | None, max_batch: int, backend: Any = None
    ) -> None:
        self.runner = runner
        self._max_batch = max_batch
        self._backend = backend
        self._texts = None if tasks is None else Texts(tasks, self._run, max(max_batch, 1), TEXTS_AT_ONCE)
        self._vectors = next((tensor.dtype for tensor in runner.outputs if tensor.name == EMBEDDING), "float32")
        self._loop = asyncio.new_event_loop()
        self._memory = TextMemory(TEXT_CHARACTERS_IN_MEMORY)
        self._waiting: list[Job] = []

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        async def answers() -> list[Any]:
            return await asyncio.gather(*map(self._outputs, requests), return_exceptions=True)

        return list(map(self._response, self._loop.run_until_complete(answers())))

    def _response(self, answer: Outcome) -> Any:
        if isinstance(answer, EffexportError):
            return error_response(self._backend, answer)
        if isinstance(answer, BaseException):
            raise answer
        tensors = [self._backend.Tensor(name, value) for name, value in answer.items()]
        return self._backend.InferenceResponse(tensors)

    async def _outputs(self, request: Any) -> Mapping[str, Array]:
        """The outputs of a request.

        It has the tensors of the model, or `text`, bytes objects in UTF-8 of any shape, and an optional `context` of
        the same shape. The output `answer` has the answer to each text as JSON; a model with the output `embedding`
        also returns that, [texts, dim]; in float16 only if `answer` is not asked for, because Triton refuses float16
        beside it in an answer as JSON.
        """
        tensors = tensors_of_request(request)
        waiting = Waiting(math.inf, self._memory)
        if self._texts is None or (tensors and tensors.keys().isdisjoint((TEXT, CONTEXT))):
            return await self._run(tensors, waiting)
        options, texts = options_from_parameters(parameters_of_request(request)), texts_of_inputs(tensors)
        wanted = set(request.requested_output_names())
        if ANSWER in wanted and self._vectors == "float16":
            wanted -= {EMBEDDING}
        found = await self._texts.outputs_of(texts, wanted, options, waiting)
        if ANSWER in found:
            found[ANSWER] = found[ANSWER].reshape(tensors[TEXT].shape)
        if EMBEDDING in found:
            found[EMBEDDING] = found[EMBEDDING].astype(self._vectors)
        return found

    async def _run(self, feeds: Mapping[str, Array], waiting: Waiting) -> Outputs:
        """The outputs of one run, which is shared with what the other requests and texts have ready."""
        job = Job(checked_feeds(feeds, self.runner.inputs, self.runner.limits))
        if not self._waiting:
            self._loop.call_soon(self._run_waiting)
        self._waiting.append(job)
        return await job.answer

    def _run_waiting(self) -> None:
        while self._waiting:
            batch = first_batch(self._waiting, lambda batch: sum(one.rows for one in batch) <= self._max_batch)
            self._waiting = [one for one in self._waiting if one not in batch]
            settle(batch, run_together(self.runner.run, batch))

    def __str__(self) -> str:
        ran = ", ".join(f"{op} as {what}" for op, what in self.runner.implementation.items())
        return f"effexport {__version__}, {ran or 'standard operators'}"

    def close(self) -> None:
        self._loop.close()
        self.runner.close()


def tensors_of_request(request: Any) -> dict[str, Array]:
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def parameters_of_request(request: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.parameters() or "{}")
    found.pop(REQUEST_ID, None)
    return found


def read_request(inputs: Mapping[str, Array], parameters: Mapping[str, Any]) -> tuple[str, Sampling, bool | None]:
    """As `generation_request`. The options of a text are inputs, [1] each, or parameters of the request."""
    options = [(name, number(array)) for name, array in inputs.items() if name != TEXT_INPUT]
    text = inputs[TEXT_INPUT][0] if TEXT_INPUT in inputs else None
    return generation_request(text, [*options, *parameters.items()])


def number(array: Array) -> Any:
    """The element of an input: 0.7 for a float32 that the client wrote as 0.7, although float32 is less precise."""
    return float(str(array[0])) if array.dtype.kind == "f" else array.item()


class Reply:
    """The way back to the client of one request. backend, sender: of Triton."""

    def __init__(self, backend: Any, sender: Any) -> None:
        self._backend = backend
        self._sender = sender
        self._next_check = 0.0

    def send(self, answer: Mapping[str, Any]) -> None:
        """Send an answer with more text, or the last, which has a reason."""
        tensors = [
            self._backend.Tensor(name, objects([value.encode()]) if isinstance(value, str) else np.array([value]))
            for name, value in answer.items()
            if name in GENERATED
        ]
        self._send(self._backend.InferenceResponse(tensors), last=FINISH_REASON in answer)

    def fail(self, error: Exception) -> None:
        """Send an error in place of more text."""
        self._send(error_response(self._backend, error), last=True)

    def check_client(self, session: Session) -> None:
        """Raises ClientGoneError if the server says that the client has gone. It is not asked each time."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + CANCEL_CHECK_SECONDS
        if self._sender.is_cancelled():
            message = f"the client has gone after {session.count} of {session.sampling.max_new_tokens} tokens"
            self._backend.Logger.log_info(message)
            raise ClientGoneError(message)

    def _send(self, response: Any, *, last: bool) -> None:
        self._sender.send(response, flags=self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)


class GenerationInstance(Closeable):
    """A model that generates text. `execute` begins texts, which are sent as they grow; an error is an answer, too.

    Another thread sends, so that slow clients do not hold up the steps. When the instance closes, requests that are not
    answered yet get no more answer.
    """

    def __init__(
        self, generator: TextGenerator, max_sessions: int, max_waiting: int | None = None, backend: Any = None
    ) -> None:
        self._backend = backend
        self._generations = Generations(generator, max_sessions, max_waiting=max_waiting, finishes=False)
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._sending = threading.Thread(target=self._loop.run_forever, name="effexport-sending", daemon=True)
        self._sending.start()

    def __str__(self) -> str:
        return f"effexport {__version__}"

    def execute(self, requests: Sequence[Any]) -> None:
        for one in requests:
            reply = Reply(self._backend, one.get_response_sender())
            try:
                prompt, sampling, in_pieces = read_request(tensors_of_request(one), parameters_of_request(one))
                self.begin(prompt, sampling, bool(in_pieces), reply)
            except EffexportError as error:
                reply.fail(error)

    def begin(self, prompt: str, sampling: Sampling, in_pieces: bool, reply: Reply) -> None:
        """Begin to answer a request, from any thread. in_pieces: send text as it arrives, instead of all at the end."""
        asyncio.run_coroutine_threadsafe(self._answer(prompt, sampling, in_pieces, reply), self._loop)

    async def _answer(self, prompt: str, sampling: Sampling, in_pieces: bool, reply: Reply) -> None:
        try:
            stream = await self._generations.submit(prompt, sampling)
            with contextlib.closing(stream):
                check = partial(reply.check_client, stream.session)
                async for answer in stream.answers(in_pieces=in_pieces, check_client=check):
                    reply.send(answer)
        except Exception as error:
            # also what `send` raises for a connection that has gone, which the server does not say: nobody gets that
            with contextlib.suppress(Exception):
                reply.fail(error)

    def close(self) -> None:
        self._generations.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._sending.join()
        self._runner.close()
