"""The interface of every runtime: a runner, which maps named arrays to named arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from effexport.base.dtypes import Array, TensorInfo


def tensors_text(tensors: Iterable[TensorInfo]) -> str:
    """Names, element types and axes of inputs or outputs, for people."""
    return ", ".join(map(str, tensors))


class Closeable(Protocol):
    """A resource that a `with` block closes at its end."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Runner(Closeable, Protocol):
    """An open model. Thread-safe. `run` maps input names to arrays, and returns output names with arrays.

    implementation: per custom operator of the model, what runs it: "body", "kernel", "plugin" or "Attention".
    """

    @property
    def inputs(self) -> tuple[TensorInfo, ...]: ...

    @property
    def outputs(self) -> tuple[TensorInfo, ...]: ...

    @property
    def implementation(self) -> Mapping[str, str]: ...

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]: ...

    def run_complete(self, feeds: dict[str, Array]) -> dict[str, Array]:
        """As `run`, for feeds with all inputs that their owner has checked."""
