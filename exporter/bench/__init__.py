"""Benchmarks: attention variants, lengths and runtimes against each other, within one run on one machine."""
