"""The environments of the tools, made from the pinned requirements in `requirements/`, in the user's cache.

A change of its requirements gives an environment another folder, so an environment is never changed once it is made.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from effexport.base.version import __version__
from effexport.plugins.building.build import unpack_from_debian
from effexport.plugins.building.library import cache_folder
from effexport.plugins.errors import LibraryError

REQUIREMENTS = Path(__file__).parent / "requirements"
WORKERS = Path(__file__).parent / "workers"
# Chromium, and Chrome, which shares its protocol. tests/conftest.py looks for them too.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
READY = "ready"


class MissingError(Exception):
    """An environment that this machine does not have, and why."""


class Environment(Protocol):
    """The environment of a tool."""

    name: str

    def prepare(self) -> None:
        """Make it unless it exists. Raises MissingError with the reason."""

    def version(self, distribution: str) -> str:
        """The pinned version of a tool in it."""

    def command(self, url: str, home: str) -> list[str]:
        """The command of the worker that takes its commands from a URL. home: an empty folder for its own files.

        Raises MissingError unless the environment is prepared.
        """


@dataclass(frozen=True)
class ThisPython:
    """The Python that runs this script, with the packages of constraints.txt."""

    name: str = "main"

    def prepare(self) -> None:
        pass

    def version(self, distribution: str) -> str:
        if distribution == "effexport":
            return __version__
        return pinned(Path(__file__).parents[2] / "constraints.txt", distribution)

    def command(self, url: str, home: str) -> list[str]:
        return [sys.executable, str(WORKERS / "python_worker.py"), url]


@dataclass(frozen=True)
class PythonVenv:
    """A virtual environment with the packages of `requirements/<name>.txt` and no others."""

    name: str

    @property
    def requirements(self) -> Path:
        return REQUIREMENTS / f"{self.name}.txt"

    @property
    def folder(self) -> Path:
        return folder_of(self.name, f"{base_python()}\n{self.requirements.read_text(encoding='utf-8')}")

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def prepare(self) -> None:
        with unless_ready(self.folder) as wanted:
            if wanted:
                run([base_python(), "-m", "venv", self.folder])
                pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
                run([*pip, "-r", self.requirements])

    def version(self, distribution: str) -> str:
        return pinned(self.requirements, distribution)

    def command(self, url: str, home: str) -> list[str]:
        check_ready(self.folder)
        return [str(self.python), str(WORKERS / "python_worker.py"), url]


@dataclass(frozen=True)
class SharedVenv(PythonVenv):
    """A virtual environment with the packages of a file of requirements, before those of this one.

    file: of requirements. between: another environment, whose packages come after its own.
    """

    file: Path
    between: Path | None = None

    @property
    def requirements(self) -> Path:
        return self.file

    @property
    def folder(self) -> Path:
        return folder_of(self.name, f"{sys.prefix}\n{self.between}\n{self.requirements.read_text(encoding='utf-8')}")

    def prepare(self) -> None:
        with unless_ready(self.folder) as wanted:
            if wanted:
                run([sys.executable, "-P", "-m", "venv", "--without-pip", self.folder])
                pip = [sys.executable, "-P", "-m", "pip", "--python", self.python, "install", "--quiet", "--no-deps"]
                run([*pip, "-r", self.requirements])
                lines = [] if self.between is None else [str(packages_of(self.between))]
                lines.append(f"import site; site.addsitedir({str(packages_of(Path(sys.prefix)))!r})")
                (packages_of(self.folder) / "effexport.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def packages_of(environment: Path) -> Path:
    """The folder of the packages of a virtual environment."""
    found = next(environment.glob("lib/python*/site-packages"), None)
    if found is None:
        raise MissingError(f"{environment} is not there; scripts/test.sh --all makes it")
    return found


@dataclass(frozen=True)
class NodeModules:
    """The packages of `requirements/package.json`, for Node and for pages."""

    name: str = "web"

    @property
    def requirements(self) -> Path:
        return REQUIREMENTS / "package.json"

    @property
    def folder(self) -> Path:
        return folder_of(self.name, self.requirements.read_text(encoding="utf-8"))

    @property
    def dist(self) -> Path:
        return self.folder / "node_modules" / "onnxruntime-web" / "dist"

    def prepare(self) -> None:
        program("node", "Node 20 or later")
        npm = program("npm", "npm")
        with unless_ready(self.folder) as wanted:
            if wanted:
                self.folder.mkdir(parents=True)
                shutil.copy(self.requirements, self.folder)
                options = ["--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
                run([npm, "install", *options, "--prefix", self.folder])

    def version(self, distribution: str) -> str:
        found = re.search(rf'"{distribution}": "([^"]+)"', self.requirements.read_text(encoding="utf-8"))
        assert found, distribution
        return found[1]

    def command(self, url: str, home: str) -> list[str]:
        node = program("node", "Node 20 or later")
        check_ready(self.folder)
        return [node, str(WORKERS / "node_worker.mjs"), url, str(self.folder)]


@dataclass(frozen=True)
class Chromium(NodeModules):
    """The same packages in a page of a headless Chromium or Chrome, which has to be there already."""

    name: str = "chromium"

    @property
    def folder(self) -> Path:
        return NodeModules().folder

    def command(self, url: str, home: str) -> list[str]:
        check_ready(self.folder)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--disable-background-networking", f"--user-data-dir={home}"]
        return [browser(), *options, f"{url}/page.html"]


@dataclass(frozen=True)
class Aarch64:
    """Python and ONNX Runtime for Linux on aarch64, in QEMU's emulation of one process."""

    name: str = "aarch64"
    # Debian's names, of the release that build.py fetches from
    emulator: str = "qemu-user"
    python: str = "3.13"
    libraries: tuple[str, ...] = ("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8", "libssl3t64")
    wheels: tuple[str, ...] = ("numpy", "onnxruntime")

    @property
    def requirements(self) -> list[str]:
        return [f"{name}=={MAIN.version(name)}" for name in self.wheels]

    @property
    def folder(self) -> Path:
        return folder_of(self.name, f"{self}\n{self.requirements}")

    def prepare(self) -> None:
        with unless_ready(self.folder) as wanted:
            if not wanted:
                return
            self.folder.mkdir(parents=True)
            version = f"python{self.python}"
            names = (f"{version}-minimal", f"lib{version}-minimal", f"lib{version}-stdlib", *self.libraries)
            try:
                unpack_from_debian((self.emulator,), self.folder / "emulator")
                unpack_from_debian([f"{name}:arm64" for name in names], self.folder / "root", "amd64", "arm64")
            except (OSError, LibraryError) as error:
                raise MissingError(str(error)) from error
            if not (self.folder / "root" / "lib").exists():  # a link that another package brings
                (self.folder / "root" / "lib").symlink_to("usr/lib")
            tags = [f"--platform=manylinux_{tag}_aarch64" for tag in ("2_17", "2_27", "2_28")]
            pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            options = [
                "--only-binary=:all:",
                *tags,
                f"--python-version={self.python}",
                "--target",
                self.folder / "site",
            ]
            run([*pip, *options, *self.requirements])

    def version(self, distribution: str) -> str:
        return MAIN.version(distribution)

    def command(self, url: str, home: str) -> list[str]:
        check_ready(self.folder)
        root = self.folder / "root"
        variables = (f"PYTHONHOME={root / 'usr'}", f"PYTHONPATH={self.folder / 'site'}", "OMP_NUM_THREADS=1")
        emulator = [str(self.folder / "emulator/usr/bin/qemu-aarch64"), "-L", str(root)]
        emulator += [word for variable in variables for word in ("-E", variable)]
        return [*emulator, str(root / f"usr/bin/python{self.python}"), str(WORKERS / "python_worker.py"), url]


MAIN = ThisPython()
AARCH64 = Aarch64()
TOOLS, ORT_OPENVINO = PythonVenv("tools"), PythonVenv("onnxruntime-openvino")
OLD_ORT = tuple(PythonVenv(f"onnxruntime-{version}") for version in ("1.19", "1.21", "1.26"))
NODE, CHROMIUM = NodeModules(), Chromium()
ENVIRONMENTS: tuple[Environment, ...] = (MAIN, TOOLS, ORT_OPENVINO, *OLD_ORT, NODE, CHROMIUM)


def prepare() -> list[str]:
    """Make all environments. Returns a line for each that could not be made."""
    missing = []
    for environment in ENVIRONMENTS:
        try:
            environment.prepare()
        except MissingError as error:
            missing.append(f"{environment.name}: {error}")
    return missing


def all_made() -> bool:
    """True if every environment is there, but for the browser."""
    folders = [environment.folder for environment in ENVIRONMENTS if isinstance(environment, PythonVenv | NodeModules)]
    return all((folder / READY).exists() for folder in folders) and shutil.which("node") is not None


def folder_of(name: str, made_from: str) -> Path:
    digest = hashlib.sha256(made_from.encode()).hexdigest()[:12]
    return cache_folder() / "portability" / f"{name}-{digest}"


@contextmanager
def unless_ready(folder: Path) -> Iterator[bool]:
    """Yield True if the folder has to be made in the block, and mark it as ready afterwards; one process at a time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / READY).exists():
            yield False
            return
        shutil.rmtree(folder, ignore_errors=True)
        print(f"creating {folder.name} in {folder.parent}", file=sys.stderr, flush=True)
        yield True
        (folder / READY).touch()


def check_ready(folder: Path) -> None:
    if not (folder / READY).exists():
        raise MissingError(f"{folder.name} was not made; run: scripts/portability.py --prepare")


def base_python() -> str:
    """Python 3.11, for which the oldest packages exist, or else the Python of this environment."""
    return shutil.which("python3.11", path=outside_path()) or str(Path(sys.base_prefix) / "bin" / "python3")


def outside_path() -> str:
    """PATH without the folders of virtual environments, whose Python would lead back to them."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return os.pathsep.join(path for path in folders if not (Path(path).parent / "pyvenv.cfg").exists())


def browser() -> str:
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        raise MissingError(f"no browser: expected one of {', '.join(BROWSERS)} on PATH")
    return found


def program(name: str, wanted: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise MissingError(f"no {name} on PATH; expected {wanted}")
    return found


def run(command: list[str | Path]) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise MissingError(f"{Path(command[0]).name} failed: {last[0]}")


def pinned(requirements: Path, distribution: str) -> str:
    text = requirements.read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(distribution)}==(\S+)", text, re.MULTILINE | re.IGNORECASE)
    assert found, f"{distribution} is not pinned in {requirements.name}"
    return found[1]
