"""The quality of a model on data with known answers, and two models or runtimes compared on the same data."""
