"""The version of effexport. Imports nothing, so that every module can record it."""

__version__ = "0.1.0"
