"""An instance of a packaged model that generates text.

Triton's Python models include this module; it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.artifact import Artifact, open_artifact
from effexport.errors import EffexportError
from effexport.generation.stepper import INPUT
from effexport.generation.text_generator import generator_from_artifact
from effexport.runners.feeds import limits_from_spec
from effexport.runners.ort.runner import decoder_in_ort
from effexport.runners.runner import Closeable
from effexport.triton.generating import GenerationLoop, Reply
from effexport.triton.generation_request import generation_request
from effexport.triton.instance_settings import ARTIFACT, parameter, settings_of_instance
from effexport.version import __version__

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.runners.decode import DecodeRunner
    from effexport.runners.options import RunOptions


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


def opened_decoder(artifact: Artifact, settings: RunOptions) -> DecodeRunner:
    """A decoder that has read a prompt and decoded a token, so that the first request does not wait for its opening."""
    limits, token = limits_from_spec(artifact.spec), {INPUT: np.zeros((1, 1), np.int64)}
    decoder = decoder_in_ort(artifact.decode_step_path, artifact.prefill_path, limits, settings)
    if decoder.has_prefill:
        decoder.prefill(token)
        decoder.reset()
    decoder.step(token)
    decoder.reset()
    return decoder
