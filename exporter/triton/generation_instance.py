"""An instance of a packaged model that generates text.

Triton's Python models include this module; it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.artifact import open_artifact
from effexport.errors import EffexportError
from effexport.generation.stepper import INPUT
from effexport.generation.text_generator import TextGenerator, max_tokens_of
from effexport.runners.feeds import limits_from_spec
from effexport.runners.ort.decode import decoder_in_ort
from effexport.runners.runner import Closeable
from effexport.text.tokenizer import tokenizer_from_artifact
from effexport.triton.generating import GenerationLoop, Reply
from effexport.triton.generation_request import generation_request
from effexport.triton.instance_settings import ARTIFACT, parameter, settings_of_instance
from effexport.version import __version__

if TYPE_CHECKING:
    from effexport.dtypes import Array


class GenerationInstance(Closeable):
    """Answers requests as their texts grow. folder, arguments: as for ModelInstance."""

    def __init__(self, folder: Path, arguments: Mapping[str, str]) -> None:
        config = json.loads(arguments["model_config"])
        artifact = open_artifact(folder / ARTIFACT)
        settings = settings_of_instance(folder, arguments, config)
        decoder = decoder_in_ort(
            artifact.decode_step_path, artifact.prefill_path, limits_from_spec(artifact.spec), settings
        )
        # so that the first request does not wait until the prefill is open
        first = {INPUT: np.zeros((1, 1), np.int64)}
        if decoder.has_prefill:
            decoder.prefill(first)
        decoder.step(first)
        decoder.reset()
        generator = TextGenerator(decoder, tokenizer_from_artifact(artifact), max_tokens_of(artifact))
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
