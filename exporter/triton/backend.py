"""How one of Triton's backends serves an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from effexport.triton.content import Content
from effexport.triton.spec import BackendName, PackageName

if TYPE_CHECKING:
    from effexport.tensorrt.sidecar import EngineInfo


@dataclass(frozen=True)
class Backend:
    """A backend of Triton that can serve an artifact.

    files: contents of the folder of a version. library: whether they include the kernel library.
    engine: description of the engine, for the backend tensorrt. example: texts of a request, by input; {} for a model
    of tensors only. generates: whether the model continues texts, instead of answering tensors and texts.
    packages: what it imports in the server, besides NumPy.
    """

    name: BackendName
    kind: Literal["cpu", "gpu"]
    files: Content
    library: bool = False
    engine: EngineInfo | None = None
    example: Mapping[str, str] = field(default_factory=dict)
    generates: bool = False
    packages: tuple[PackageName, ...] = ()
