"""Finds the first value inside a graph that differs from PyTorch."""
