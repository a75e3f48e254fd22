"""Runners of models: one folder per runtime, and the parts that all of them share."""
