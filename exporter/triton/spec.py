"""How an artifact is to be served by Triton."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from effexport.models.validation import SpecError, did_you_mean, require
from effexport.runners.ort.session import IMPLEMENTATIONS

# Triton's backends that can run an artifact, in the order in which one is chosen where several could serve it.
BACKENDS = ("onnxruntime", "python", "tensorrt")
# A folder of a repository, a part of a URL, and a word of the command line that starts Triton's Python processes.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
DEFAULT_MAX_BATCH = 8
DEFAULT_IMAGE_TAG = "26.07-py3"
LARGEST_VERSION = 2**63 - 1
# Of the 32-bit fields of a configuration.
LARGEST_NUMBER = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class PackageSpec:
    """How an artifact is to be served.

    name: of the model; with several backends, `name-backend` each.
    backends: empty for all that the artifact has files for.
    version: number of the model's version; None takes the next free one.
    max_batch: rows of the largest batch. preferred_batch: sizes that are run at once when they are reached.
    None leaves both to the artifact: a model whose samples depend on their batch mates is given neither.
    queue_delay_us: how long a request may wait for others to join it.
    max_queue: requests that may wait; 0 is no limit.
    instances: copies of the model that run at the same time, per GPU on a GPU.
    kind: None is a GPU for engines and the CPU for everything else.
    threads: of ONNX Runtime, per instance; None lets it take all cores.
    implementation: of custom operators: "kernel", "body", or "auto": kernels where the library is built.
    live_versions: how many of the newest versions are served.
    server_path: where the server sees the repository.
    image_tag: of the official image; None keeps the one that the repository has.
    """

    name: str
    backends: tuple[str, ...] = ()
    version: int | None = None
    max_batch: int | None = None
    preferred_batch: tuple[int, ...] = ()
    queue_delay_us: int = 500
    max_queue: int = 0
    instances: int = 1
    kind: Literal["cpu", "gpu"] | None = None
    threads: int | None = None
    implementation: str = "auto"
    warm_up: bool = True
    live_versions: int = 1
    server_path: str = "/models"
    image_tag: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        for backend in self.backends:
            check_word("backend", backend, BACKENDS)
        require(len(set(self.backends)) == len(self.backends), f"a backend was given twice: {', '.join(self.backends)}")
        check_word("implementation", self.implementation, IMPLEMENTATIONS)
        require(self.kind in (None, "cpu", "gpu"), f"kind is {self.kind!r}; expected cpu or gpu")
        for name in ("version", "max_batch", "instances", "threads", "live_versions"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} is {value}; expected at least 1")
        for name in ("queue_delay_us", "max_queue"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; expected at least 0")
        for name in ("max_batch", "instances", "threads", "live_versions", "queue_delay_us", "max_queue"):
            value = getattr(self, name) or 0
            require(value <= LARGEST_NUMBER, f"{name} is {value}; Triton takes at most {LARGEST_NUMBER}")
        require((self.version or 1) <= LARGEST_VERSION, f"version is {self.version}; Triton counts to 2^63 - 1")
        require(
            PurePosixPath(self.server_path).is_absolute() and self.server_path.isprintable(),
            f"the path on the server is {self.server_path!r}; expected an absolute path, such as /models",
        )
        require(
            self.image_tag is None or re.fullmatch(r"\w[\w.-]{0,127}", self.image_tag) is not None,
            f"image tag {self.image_tag!r}; expected a tag of the official image, such as {DEFAULT_IMAGE_TAG}",
        )
        self._check_batch()

    def _check_batch(self) -> None:
        sizes, largest = self.preferred_batch, self.max_batch or DEFAULT_MAX_BATCH
        require(list(sizes) == sorted(set(sizes)), f"preferred batches are {list(sizes)}; expected them in order, once")
        for size in sizes:
            require(
                1 <= size <= largest,
                f"preferred batch {size} is outside of 1 to {largest}, the largest batch; set that with --max-batch",
            )

    def model_name(self, backend: str, backends: tuple[str, ...]) -> str:
        """Name of the model that one of several backends serves."""
        return self.name if len(backends) == 1 and self.backends else f"{self.name}-{backend}"


def check_name(name: str) -> None:
    """Raises SpecError for a name that Triton, or a URL, cannot have."""
    if not NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} cannot be the name of a model; expected letters, digits, '-', '_' and '.', at most 128, and a "
            "letter or digit first: choose one with --name"
        )


def check_word(option: str, value: str, known: tuple[str, ...]) -> None:
    require(value in known, f"unknown {option} {value!r}{did_you_mean(value, known)} Expected: {', '.join(known)}")
