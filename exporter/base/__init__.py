"""Errors, files, units, the tables of runtimes and element types, specs: what every other part needs."""
