"""Tables, plots and pages of benchmark results."""
