"""The HTTP server: the KServe V2 protocol, Triton's generate extension and OpenAI's embeddings."""
