"""Prometheus metrics of one server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Seconds: from a short sequence on a GPU to a long one on a busy CPU.
LATENCY_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
# Every size up to 16, so that the histogram tells how long a loop over the same sizes would have taken.
SIZE_BUCKETS = (*range(1, 17), 24, 32, 48, 64, 128, 256)


class Metrics:
    """The metrics of one server, in a registry of their own, so that servers in one process do not mix."""

    def __init__(self, model: str) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        options: dict[str, Any] = {"labelnames": ("model",), "registry": self.registry}
        labels = {"model": model}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(name, text, buckets=buckets, **options).labels(**labels)

        statuses = {**options, "labelnames": ("model", "status")}
        self._requests = Counter("effexport_requests_total", "Infer requests, by status of the answer.", **statuses)
        reasons = {**options, "labelnames": ("model", "reason")}
        self._rejected = Counter("effexport_rejected_total", "Infer requests refused, by reason.", **reasons)
        self._model = model
        self._queue_depth = Gauge("effexport_queue_depth", "Requests that wait for the runner.", **options).labels(
            **labels
        )
        self._batch_size = histogram("effexport_batch_size", "Rows of a run.", SIZE_BUCKETS)
        self._queue_s = histogram("effexport_queue_seconds", "Wait of a request for the runner.", LATENCY_BUCKETS)
        self._compute_s = histogram("effexport_compute_seconds", "Duration of a run.", LATENCY_BUCKETS)
        self._total_s = histogram(
            "effexport_request_seconds", "From request to answer, in the server.", LATENCY_BUCKETS
        )

    def observe_queue(self, depth: Callable[[], int]) -> None:
        self._queue_depth.set_function(depth)

    def waited(self, seconds: float) -> None:
        self._queue_s.observe(seconds)

    def ran(self, rows: int, seconds: float) -> None:
        self._batch_size.observe(rows)
        self._compute_s.observe(seconds)

    def answered(self, status: int, seconds: float) -> None:
        self._requests.labels(self._model, str(status)).inc()
        self._total_s.observe(seconds)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(self._model, reason).inc()

    def exposition(self) -> tuple[bytes, str]:
        """The text that Prometheus reads, and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST
