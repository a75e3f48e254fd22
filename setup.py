"""The packages of the distribution: every folder below these three; pyproject.toml has the rest."""

import sys
from pathlib import Path

from setuptools import Command, find_packages, setup
from setuptools.command.build import build

FOLDERS = {"effexport": "exporter", "effexport.models": "models", "effexport.plugins": "plugins"}


class BuildTypes(Command):
    """Types for an editable install: a .pth file in site-packages, which names a folder of links.

    Type checkers do not run the finder that maps the folders to packages, but they follow the path. Python imports
    nothing from a folder whose name ends in -stubs. A new module at the top of exporter/ needs another install.
    """

    editable_mode = False  # set by setuptools

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        if not self.editable_mode or sys.platform == "win32":  # where links need a privilege
            return
        root = Path(__file__).resolve().parent
        stubs = root / "build" / "types" / "effexport-stubs"
        stubs.mkdir(parents=True, exist_ok=True)
        for old in stubs.iterdir():
            old.unlink()
        for source in (*(root / "exporter").iterdir(), root / "models", root / "plugins"):
            (stubs / ("__init__.pyi" if source.name == "__init__.py" else source.name)).symlink_to(source)
        site_packages = Path(self.get_finalized_command("install").install_lib)
        (site_packages / "effexport_types.pth").write_text(f"{stubs.parent}\n", encoding="utf-8")


build.sub_commands.append(("build_types", None))
below = [f"{top}.{name}" for top, folder in FOLDERS.items() for name in find_packages(folder)]
setup(packages=[*FOLDERS, *below], cmdclass={"build_types": BuildTypes})
