"""Text in, answers out: tokenizers that travel with an artifact, and the tasks of transformers' pipelines."""
