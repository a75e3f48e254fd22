"""What torch.onnx says when it cannot export a module, in one line, and where in the user's code."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.export.specialised_length import is_of_package
from effexport.plugins.known_ops import known_ops

if TYPE_CHECKING:
    from torch import nn

# How torch.onnx ends a message whose reason is in the error that caused it.
REFERS = "See the stack trace"


def place_of(error: BaseException, module: nn.Module) -> str:
    """The submodule and the line of the user's code that an error is about, as the end of a sentence; or ""."""
    from effexport.models.user_model import failing_module

    owner, line = failing_module(error, module), line_of_user(error)
    return f"{f': in {owner}' * bool(owner)}{f' ({line})' * bool(line)}"


def line_of_user(error: BaseException) -> str:
    """The innermost line of code that is neither PyTorch's nor ours and led to an error; "" if there is none."""
    found = ""
    cause: BaseException | None = error
    while cause is not None:
        for frame in traceback.extract_tb(cause.__traceback__):
            if frame.name == "forward" and not is_of_package(frame.filename):
                found = f"{Path(frame.filename).name}, line {frame.lineno}"
        cause = cause.__cause__ or cause.__context__
    return found


def reason_of(error: BaseException) -> str:
    """What torch.onnx says about a failure, in one line: of chained errors, the first that does not refer to others."""
    cause = error.__cause__ or error
    while cause.__cause__ is not None and REFERS in str(cause):
        cause = cause.__cause__
    return first_paragraph(str(cause)) or type(cause).__name__


def first_paragraph(text: str) -> str:
    """The lines of a message up to the first empty one, as one line."""
    lines = text.strip().partition("\n\n")[0].splitlines()
    return " ".join(line.strip() for line in lines).strip(" :")


def unknown_op(cause: str) -> str:
    """What to do if torch.onnx does not know an operator of a user's, because nothing declares it; "" otherwise."""
    called = re.search(r"\beffexport(?:::|\.)(\w+)", cause)
    if called is None or any(op.torch_name == called[1] for op in known_ops().values()):
        return ""
    return (
        f". No installed package declares effexport::{called[1]}; install the one that does, or compile the operator's "
        "folder with: effexport plugins build --with FOLDER"
    )
