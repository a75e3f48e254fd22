"""The options of `effexport package`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from effexport.models.validation import SpecError, did_you_mean, require
from effexport.runners.options import IMPLEMENTATIONS

# Triton's backends that can run an artifact, in order of preference.
BackendName = Literal["onnxruntime", "python", "tensorrt"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
# What a Python model imports in the server, besides NumPy.
PackageName = Literal["msgspec", "onnx", "onnxruntime", "tokenizers"]
# Valid as a folder name, in a URL, and in the command line that starts Triton's Python processes.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
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
class PackageSpec:
    """Settings for serving an artifact with Triton.

    name: of the model; with several backends, `name-backend` each.
    backends: empty for all that the artifact has files for.
    version: number of the model's version; None takes the next free one.
    max_batch: rows of the largest batch, and texts that are generated at the same time.
    preferred_batch: sizes that run without further waiting.
    None leaves both to the artifact; a model whose results depend on the rest of the batch gets neither.
    queue_delay_us: how long a request may wait for others to join it.
    max_queue: requests that may wait; 0: no limit.
    instances: copies of the model that run at the same time, per GPU on a GPU.
    kind: None: a GPU for engines, else the CPU.
    threads: of ONNX Runtime, per instance; None: all cores.
    implementation: of custom operators: "kernel", "body", or "auto" (kernel if built).
    live_versions: how many of the newest versions are served.
    server_path: path of the repository on the server.
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
        if not NAME.fullmatch(self.name):
            raise SpecError(
                f"{self.name!r} cannot be the name of a model; expected letters, digits, '-', '_' and '.', at most "
                "128, and a letter or digit first: choose one with --name"
            )
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
            SERVER_PATH.fullmatch(self.server_path) is not None,
            f"the path on the server is {self.server_path!r}; expected an absolute path of letters, digits, and '_', "
            "'.', '+', '@' and '-', such as /models",
        )
        require(
            self.image_tag is None or IMAGE_TAG.fullmatch(self.image_tag) is not None,
            f"image tag {self.image_tag!r}; expected a tag of the official image, such as {DEFAULT_IMAGE_TAG}",
        )
        self._check_batch()

    def _check_batch(self) -> None:
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

    def model_name(self, backend: str, backends: tuple[str, ...]) -> str:
        """The model's name in one of the chosen backends."""
        return self.name if len(backends) == 1 and self.backends else f"{self.name}-{backend}"


def check_word(option: str, value: str, known: tuple[str, ...]) -> None:
    require(value in known, f"unknown {option} {value!r}{did_you_mean(value, known)} Expected: {', '.join(known)}")
