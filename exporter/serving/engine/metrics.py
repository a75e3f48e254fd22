"""Prometheus metrics: each model has its own, and one exposition shows all of them with the model's name as a label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

# Seconds: from a short sequence on a GPU to a long one on a busy CPU.
LATENCY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
# Every size up to 16, so that the histogram tells how long a loop over the same sizes would have taken.
SIZE_BUCKETS = (*range(1, 17), 24, 32, 48, 64, 128, 256)


class Metrics:
    """The metrics of one model, as Prometheus' objects in a registry of their own: its requests, and if they are added,
    its queue with its runs, and what it generates. model: "" for requests that reach no model.
    """

    def __init__(self, model: str) -> None:
        from prometheus_client import CollectorRegistry

        self.registry = CollectorRegistry()
        self.model = model
        self._requests = self._new("Counter", "requests_total", "Infer requests, by status of the answer.", "status")
        self._rejected = self._new("Counter", "rejected_total", "Infer requests refused, by reason.", "reason")
        self._total_s = self._seconds("request_seconds", "From request to answer, in the server.")

    def answered(self, status: int, seconds: float) -> None:
        self._requests.labels(self.model, str(status)).inc()
        self._total_s.observe(seconds)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(self.model, reason).inc()

    def add_queue(self) -> None:
        """Add the metrics of a model that runs requests."""
        self.queue_depth = self._new("Gauge", "queue_depth", "Requests that wait for the runner.")
        self.batch_size = self._new("Histogram", "batch_size", "Rows of a run.", buckets=SIZE_BUCKETS)
        self.queue_s = self._seconds("queue_seconds", "Wait of a request for the runner.")
        self.compute_s = self._seconds("compute_seconds", "Duration of a run.")

    def add_generation(self) -> None:
        """Add the metrics of a model that generates text."""
        self.sessions = self._new("Gauge", "generation_sessions", "Texts that are being generated.")
        self.tokens = self._new("Counter", "generated_tokens_total", "New tokens.")
        text = "Duration of a step, which gives each text a token and reads new prompts."
        self.step_s = self._seconds("generation_step_seconds", text)

    def _new(self, kind: str, name: str, text: str, *labels: str, **options: Any) -> Any:
        """A metric of this model. labels: further ones, which are given with each observation."""
        import prometheus_client

        made = getattr(prometheus_client, kind)(
            f"effexport_{name}", text, labelnames=("model", *labels), registry=self.registry, **options
        )
        return made if labels else made.labels(self.model)

    def _seconds(self, name: str, text: str) -> Any:
        return self._new("Histogram", name, text, buckets=LATENCY_BUCKETS)


def exposition(parts: Sequence[Metrics]) -> tuple[bytes, str]:
    """The text that Prometheus reads, and its content type: the metrics of the process and of all models."""
    from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, generate_latest
    from prometheus_client.registry import Collector

    class Joined(Collector):
        """All samples, as Prometheus wants them: those of one name together."""

        def collect(self) -> Iterator[Any]:
            yield from ProcessCollector(registry=None).collect()
            families: dict[str, Any] = {}
            for part in parts:
                for family in part.registry.collect():
                    families.setdefault(family.name, []).append(family)
            for first, *others in families.values():
                first.samples += [sample for family in others for sample in family.samples]
                yield first

    return generate_latest(Joined()), CONTENT_TYPE_LATEST
