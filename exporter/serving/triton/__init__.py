"""Artifacts as models of Triton Inference Server: a model repository, and what is needed to run a server on it."""
