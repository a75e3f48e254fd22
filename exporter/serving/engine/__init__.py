"""The engine of both servers: queue, batches, generation, texts, signature."""
