"""The packages of the distribution: every folder below these three; pyproject.toml has the rest."""

from setuptools import find_packages, setup

FOLDERS = {"effexport": "exporter", "effexport.models": "models", "effexport.plugins": "plugins"}

below = [f"{top}.{name}" for top, folder in FOLDERS.items() for name in find_packages(folder)]
setup(packages=[*FOLDERS, *below])
