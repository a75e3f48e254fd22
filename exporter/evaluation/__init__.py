"""How good a model is on data with known answers, and how two models or runtimes compare on the same data."""
