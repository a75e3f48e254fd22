"""Plots as SVG, for reports, benchmarks and sweeps."""
