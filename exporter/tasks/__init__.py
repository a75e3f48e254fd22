"""Tasks of models of text: tokenizers, the tasks of transformers' pipelines, generation, and quality on data."""
