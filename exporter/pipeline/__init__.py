"""From a spec to an artifact: the pipeline, what is asked of it, and its part for quantised models."""
