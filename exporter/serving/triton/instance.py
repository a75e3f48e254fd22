"""Instances of packaged models, of tensors and texts or of generated text, with the settings that Triton gives.

Triton's Python models include this module; it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.artifact import Artifact, open_artifact
from effexport.errors import EffexportError, UserError
from effexport.generation.sampling import ALIASES, Sampling
from effexport.generation.text_generator import INPUT, generator_from_artifact
from effexport.models.validation import did_you_mean
from effexport.plugins.building.library import LIBRARY_NAME, LIBRARY_VARIABLE
from effexport.plugins.ops import OPS
from effexport.runners.feeds import limits_from_spec, limits_of_runner
from effexport.runners.ort.runner import OrtRunner, decoder_in_ort
from effexport.runners.ort.settings import OrtSettings
from effexport.runners.runner import Closeable
from effexport.serving.triton.generating import GenerationLoop, OverloadedError, Reply
from effexport.serving.triton.merging import Answer
from effexport.serving.triton.signature import OPTIONS, REQUEST_ID, STREAM, TEXT, TEXT_INPUT, decoded
from effexport.serving.triton.texts import Request, run_requests, tasks_of_artifact
from effexport.version import __version__

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.runners.decode import DecodeRunner


def triton_code(error: EffexportError) -> str:
    """The name of the code in Triton's Python backend; `infer` over HTTP has the status 400, 503 or 500 for it,
    `generate` always 400."""
    if isinstance(error, OverloadedError):
        return "UNAVAILABLE"
    return "INVALID_ARG" if error.exit_code == 2 else "INTERNAL"


ARTIFACT = "artifact"


def settings_of_instance(folder: Path, arguments: Mapping[str, str], config: Mapping[str, Any]) -> OrtSettings:
    """The settings of ONNX Runtime, which is to use the packaged kernels. config: of the model."""
    on_gpu = arguments["model_instance_kind"] == "GPU"
    library = folder / LIBRARY_NAME
    if library.is_file():
        os.environ[LIBRARY_VARIABLE] = str(library)
    # packaged kernels must run, apart from those that are slower than bodies on a GPU
    faster = [name for name, op in OPS.items() if not on_gpu or op.cuda_up_to is None]
    return OrtSettings(
        provider="cuda" if on_gpu else "cpu",
        implementation=",".join(f"{name}=kernel" for name in faster) if library.is_file() else "body",
        threads=parameter(config, "threads") or None,
        device_id=int(arguments["model_instance_device_id"]) if on_gpu else 0,
    )


def parameter(config: Mapping[str, Any], name: str) -> int:
    """A parameter of config.pbtxt."""
    return int(config["parameters"][name]["string_value"])


class ModelInstance(Closeable):
    """Answers the requests of one `execute` of Triton.

    folder: of the model's version. arguments: as Triton gives them to `initialize`.
    """

    def __init__(self, folder: Path, arguments: Mapping[str, str]) -> None:
        config = json.loads(arguments["model_config"])
        artifact = open_artifact(folder / ARTIFACT)
        settings = settings_of_instance(folder, arguments, config)
        self.runner = OrtRunner(artifact.model_path, settings, limits=limits_of_runner(artifact.spec))
        reads_text = any(tensor["name"] == TEXT for tensor in config["input"])
        self.task_of = tasks_of_artifact(artifact) if reads_text else None
        # 0 if results may depend on the rest of the batch; requests then run one by one
        self.max_batch = config["max_batch_size"]

    def run(self, requests: Sequence[tuple[Mapping[str, Array], str, Sequence[str]]]) -> list[Answer]:
        """requests: the tensors of each by input, its parameters as JSON, and the outputs that it asks for."""
        given = [Request(tensors, json.loads(parameters or "{}"), outputs) for tensors, parameters, outputs in requests]
        return run_requests(self.runner, self.task_of, given, self.max_batch)

    def __str__(self) -> str:
        ran = ", ".join(f"{op} as {what}" for op, what in self.runner.implementation.items())
        return f"effexport {__version__}, {ran or 'standard operators'}"

    def close(self) -> None:
        self.runner.close()


OPTION_NAMES = tuple(tensor.name for tensor in OPTIONS)


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and how to continue it. in_pieces: whether the text is sent as it arrives."""

    prompt: str
    sampling: Sampling
    in_pieces: bool


def generation_request(inputs: Mapping[str, Array], parameters: Mapping[str, Any]) -> GenerationRequest:
    """inputs: of the model, [1] each. parameters: of the request; they may have the options, too.

    Raises UserError for a missing prompt, and for an option that is unknown or cannot work.
    """
    if TEXT_INPUT not in inputs:
        raise UserError(f"input {TEXT_INPUT!r} is missing; expected the text to continue")
    options = {ALIASES.get(name, name): value for name, value in parameters.items() if name != REQUEST_ID}
    options |= {name: number(array) for name, array in inputs.items() if name != TEXT_INPUT}
    for name in options:
        if name not in OPTION_NAMES:
            known = ", ".join(OPTION_NAMES)
            raise UserError(f"unknown parameter {name!r}{did_you_mean(name, OPTION_NAMES)} Expected: {known}")
    in_pieces = options.pop(STREAM, False)
    if not isinstance(in_pieces, bool):
        raise UserError(f"{STREAM} is {in_pieces!r}; expected true or false")
    return GenerationRequest(decoded(inputs[TEXT_INPUT][0], TEXT_INPUT), Sampling(**options), in_pieces)


def number(array: Array) -> Any:
    """The element of an input: 0.7 for a float32 that the client wrote as 0.7, although float32 is less precise."""
    return float(str(array[0])) if array.dtype.kind == "f" else array.item()


class GenerationInstance(Closeable):
    """Answers requests as their texts grow. folder, arguments: as for ModelInstance."""

    def __init__(self, folder: Path, arguments: Mapping[str, str]) -> None:
        config = json.loads(arguments["model_config"])
        artifact = open_artifact(folder / ARTIFACT)
        settings = settings_of_instance(folder, arguments, config)
        generator = generator_from_artifact(artifact, partial(opened_decoder, settings=settings))
        self.loop = GenerationLoop(generator, parameter(config, "sessions"), parameter(config, "max_queue"))

    def begin(self, inputs: Mapping[str, Array], parameters: str, reply: Reply) -> None:
        """Begin to answer a request; an error is its answer. parameters: of the request, as JSON."""
        values: dict[str, Any] = json.loads(parameters or "{}")
        try:
            request = generation_request(inputs, values)
            self.loop.add(request.prompt, request.sampling, reply, in_pieces=request.in_pieces)
        except EffexportError as error:
            reply.fail(error)

    def __str__(self) -> str:
        return f"effexport {__version__}"

    def close(self) -> None:
        self.loop.close()


def opened_decoder(artifact: Artifact, settings: OrtSettings) -> DecodeRunner:
    """A decoder that has read a prompt and decoded a token, so that the first request does not wait for its opening."""
    limits, token = limits_from_spec(artifact.spec), {INPUT: np.zeros((1, 1), np.int64)}
    decoder = decoder_in_ort(artifact.decode_step_path, artifact.prefill_path, limits, settings)
    if decoder.has_prefill:
        decoder.prefill(token)
        decoder.reset()
    decoder.step(token)
    decoder.reset()
    return decoder
