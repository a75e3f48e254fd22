"""The options of `effexport package`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from effexport.base.formatting import numbers
from effexport.base.option_fields import A_NUMBER, Option, Options, option
from effexport.models.validation import require
from effexport.runners.options import IMPLEMENTATIONS
from effexport.serving.engine.settings import checked_name

# Triton's backends that can run an artifact, in order of preference.
BackendName = Literal["onnxruntime", "python", "tensorrt"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
# What a Python model imports in the server, besides NumPy.
PackageName = Literal["msgspec", "onnx", "onnxruntime", "tokenizers"]
# Means the same in YAML, in a volume of Docker, in a shell and in a configuration of Triton.
SERVER_PATH = re.compile(r"/[A-Za-z0-9_.+@/-]*")
IMAGE_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
DEFAULT_MAX_BATCH = 8
# Texts that one model generates at the same time.
DEFAULT_SESSIONS = 64
DEFAULT_IMAGE_TAG = "26.07-py3"
LARGEST_VERSION = 2**63 - 1
# Of 32-bit fields in a configuration.
LARGEST_NUMBER = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class PackageSpec(Options):
    """Settings for serving an artifact with Triton; None leaves a field to the artifact.

    A model whose results depend on the rest of the batch gets no larger one, and no preferred sizes.
    """

    name: str = field(metadata={"option": Option("Model name; default: the folder's.", metavar="NAME")})
    backends: Sequence[BackendName] = option(
        (), "onnxruntime, python or tensorrt; default: all.", flag="--backend", metavar="NAME"
    )
    version: int | None = option(None, "Version number; default: the next free one.", metavar=A_NUMBER)
    max_batch: int | None = option(None, "Rows (default: 8), or texts generated (64).", metavar=A_NUMBER)
    preferred_batch: Sequence[int] = option((), "Sizes that run at once, such as 4,8.", metavar="N,…", read=numbers)
    queue_delay_us: int = option(500, "Microseconds that a request waits.", metavar=A_NUMBER)
    max_queue: int = option(0, "Requests that may wait; 0 (default): no limit.", metavar=A_NUMBER)
    instances: int = option(1, "Copies that run at a time.", metavar=A_NUMBER)
    kind: Literal["cpu", "gpu"] | None = option(None, "cpu (default), or gpu (default of tensorrt).", metavar="KIND")
    threads: int | None = option(None, "Threads of an instance; default: all cores.", metavar=A_NUMBER)
    implementation: str = option(
        "auto", "Custom operators: auto (default), kernel, body.", metavar="HOW", choices=IMPLEMENTATIONS
    )
    warm_up: bool = True
    live_versions: int = option(1, "How many of the newest are served.", metavar=A_NUMBER)
    server_path: str = option("/models", "Path on the server.", metavar="PATH")
    image_tag: str | None = option(None, "Tag of the tritonserver image.", metavar="TAG")

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_name(self.name)
        require(len(set(self.backends)) == len(self.backends), f"a backend was given twice: {', '.join(self.backends)}")
        for name in ("version", "max_batch", "instances", "threads", "live_versions", "queue_delay_us", "max_queue"):
            value, least = getattr(self, name), 0 if name in ("queue_delay_us", "max_queue") else 1
            most = LARGEST_VERSION if name == "version" else LARGEST_NUMBER
            require(value is None or value >= least, f"{name} is {value}; expected at least {least}")
            require((value or 0) <= most, f"{name} is {value}; Triton takes at most {most}")
        require(
            SERVER_PATH.fullmatch(self.server_path) is not None,
            f"the path on the server is {self.server_path!r}; expected an absolute path of letters, digits, and '_', "
            "'.', '+', '@' and '-', such as /models",
        )
        require(
            self.image_tag is None or IMAGE_TAG.fullmatch(self.image_tag) is not None,
            f"image tag {self.image_tag!r}; expected a tag of the official image, such as {DEFAULT_IMAGE_TAG}",
        )
        sizes, largest = self.preferred_batch, self.max_batch or DEFAULT_MAX_BATCH
        require(
            list(sizes) == sorted(set(sizes)),
            f"preferred batches are {list(sizes)}; expected different sizes in ascending order",
        )
        for size in sizes:
            require(
                1 <= size <= largest,
                f"preferred batch {size} is not between 1 and {largest}, the largest batch, which --max-batch sets",
            )
