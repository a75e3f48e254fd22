"""The parts of scripts/portability.py: what other people's tools and runtimes make of our files."""
