"""The user's own module: what it is called with, its spec, and how it is run."""
