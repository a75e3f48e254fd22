"""The profiles of a loaded engine: which of them covers a run."""

from __future__ import annotations

from collections.abc import Mapping

from effexport.engines.sidecar import EngineInfo
from effexport.errors import UserError
from effexport.runners.trt.context import Shapes
from effexport.runners.trt.memory import dim_name, dim_ranges


class Profiles:
    """The sizes that an engine accepts, by the names of its dynamic dimensions."""

    def __init__(self, info: EngineInfo) -> None:
        self._inputs = info.inputs
        self._ranges = [dim_ranges(info.inputs, profile) for profile in info.profiles]

    def index(self, sizes: Mapping[str, int]) -> int | None:
        """The first profile that covers these sizes; None if none does."""
        for index, ranges in enumerate(self._ranges):
            if all(low <= sizes[dim] <= high for dim, (low, high) in ranges.items()):
                return index
        return None

    def covering(self, shapes: Shapes) -> int:
        """The first profile that covers the shapes of all inputs. Raises UserError if none does."""
        shape_of = dict(shapes)
        given = {
            dim_name(tensor, axis): shape_of[tensor.name][axis]
            for tensor in self._inputs
            for axis, dim in enumerate(tensor.dims)
            if isinstance(dim, str)
        }
        found = self.index(given)
        if found is not None:
            return found
        sizes = ", ".join(f"{dim} {size}" for dim, size in given.items())
        profiles = "; or ".join(
            ", ".join(f"{dim} {low} to {high}" for dim, (low, high) in ranges.items()) for ranges in self._ranges
        )
        flag = ",".join(f"{dim}=1:{size}:{size}" for dim, size in given.items())
        raise UserError(
            f"the inputs have {sizes}; this engine was built for {profiles}: build it again with a profile that covers "
            f"them, such as --profile {flag}"
        )
