"""Serving an artifact over HTTP: the KServe V2 protocol, batching, limits, metrics."""
