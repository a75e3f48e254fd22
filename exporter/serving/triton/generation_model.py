"""The model for Triton's Python backend that generates text with the artifact beside this file.

The folder, and what the server's Python needs, are as in model.py of the models of tensors. The transaction policy is
decoupled: `execute` returns at once, and the text is sent as it grows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "effexport.zip"))


class TritonPythonModel:
    """An instance of the model; Triton starts a process for each."""

    def initialize(self, args: dict[str, str]) -> None:
        from effexport.serving.triton.instance import GenerationInstance

        self.instance = GenerationInstance(HERE, args)
        pb_utils.Logger.log_info(f"{args['model_name']}: {self.instance}")

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            self.instance.begin(inputs, request.parameters(), TritonReply(request.get_response_sender()))

    def finalize(self) -> None:
        self.instance.close()


class TritonReply:
    """See effexport.serving.triton.generating.Reply."""

    def __init__(self, sender: Any) -> None:
        self.sender = sender

    def send(self, text: str, session: Any, finish_reason: str | None) -> None:
        outputs = [string_tensor("text_output", text)]
        if finish_reason is not None:
            outputs.append(string_tensor("finish_reason", finish_reason))
            for name, number in (("prompt_tokens", len(session.prompt)), ("seed", session.seed)):
                outputs.append(pb_utils.Tensor(name, np.array([number], np.int64)))
        self._send(pb_utils.InferenceResponse(outputs), last=finish_reason is not None)

    def fail(self, error: Any) -> None:
        from effexport.serving.triton.instance import triton_code

        code = getattr(pb_utils.TritonError, triton_code(error))
        self._send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code)), last=True)

    def cancel(self, session: Any) -> None:
        message = f"the client has gone after {session.count} of {session.sampling.max_new_tokens} tokens"
        pb_utils.Logger.log_info(message)
        cancelled = pb_utils.TritonError(message, pb_utils.TritonError.CANCELLED)
        self._send(pb_utils.InferenceResponse(error=cancelled), last=True)

    def is_cancelled(self) -> bool:
        return bool(self.sender.is_cancelled())

    def _send(self, response: Any, *, last: bool) -> None:
        self.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)


def string_tensor(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=object))
