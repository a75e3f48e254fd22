"""The HTTP server: queue, batches, metrics."""
