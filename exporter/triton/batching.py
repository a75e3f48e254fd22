"""Whether Triton may batch requests, and in which sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from effexport.errors import UserError
from effexport.spec import BuildSpec
from effexport.triton.spec import DEFAULT_MAX_BATCH, PackageSpec

if TYPE_CHECKING:
    from effexport.tensorrt.sidecar import EngineInfo


@dataclass(frozen=True)
class Batching:
    """How Triton batches requests. max_batch: 0 if every request runs on its own, whatever its first dimension.

    preferred: batch sizes that run without further waiting. reason: why requests are not batched.
    """

    max_batch: int
    preferred: tuple[int, ...] = ()
    reason: str = ""

    @property
    def is_dynamic(self) -> bool:
        return self.max_batch > 1


def batching_of(build: BuildSpec, spec: PackageSpec, engine: EngineInfo | None = None) -> Batching:
    """Raises UserError for options that the model or its engine does not allow."""
    asked = spec.max_batch is not None or bool(spec.preferred_batch)
    reason = build.model.why_samples_mix
    if reason:
        if asked:
            raise UserError(
                f"the results of this model depend on the rest of the batch ({reason}), so batching requests would "
                "change their answers; leave out --max-batch and --preferred-batch. A request may still contain "
                "several samples"
            )
        return Batching(0, reason=reason)
    largest = spec.max_batch or DEFAULT_MAX_BATCH
    if engine is not None:
        largest = batch_of_engine(engine, spec, largest)
        if largest == 0:
            return Batching(0, reason="the engine does not accept a batch of one, which Triton may send")
    # by default full batches, and half of one: waiting for the last request of a batch costs more than it gains
    preferred = spec.preferred_batch or sorted({size for size in (largest // 2, largest) if size > 1})
    return Batching(largest, tuple(size for size in preferred if size <= largest))


def batch_of_engine(engine: EngineInfo, spec: PackageSpec, largest: int) -> int:
    """The largest batch that a profile of the engine allows; 0 if none accepts a single sample."""
    # smallest, optimal and largest shape of the first input, by profile
    shapes = [next(iter(profile.values())) for profile in engine.profiles]
    limit = max((largest_shape[0] for smallest, _, largest_shape in shapes if smallest[0] == 1), default=0)
    if limit and (spec.max_batch or 0) > limit:
        raise UserError(
            f"--max-batch is {spec.max_batch}, and the engine was built for batches of at most {limit}; lower it, or "
            f"build the engine with --profile batch=1:{spec.max_batch}:{spec.max_batch}"
        )
    return min(largest, limit)
