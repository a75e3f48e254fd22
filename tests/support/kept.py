"""A cache of tests across runs: exports and compiled programs, each kept under a hash of everything that decides it.
They lie in pytest's cache, so `pytest --cache-clear` removes them."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".pytest_cache" / "d" / "effexport"
NATIVE = (ROOT / "plugins", ROOT / "tests" / "plugins" / "native", ROOT / "examples" / "my_operator")


def kept(name: str, decided_by: Iterable[str | Path], make: Callable[[Path], object], base: Path = FOLDER) -> Path:
    """The folder that `make(folder)` fills. An earlier run's is returned if nothing that decides it has changed since.

    decided_by: texts, and files whose contents count. Processes that ask for the same folder wait for each other.
    """
    digest = digest_of(decided_by)
    shelf = base / name
    shelf.mkdir(parents=True, exist_ok=True)
    with (shelf / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        if not (shelf / digest).exists():
            for outdated in shelf.iterdir():
                if outdated.is_dir():
                    shutil.rmtree(outdated)
            # a rename, so that whatever exists is complete
            unfinished = Path(tempfile.mkdtemp(dir=shelf))
            make(unfinished)
            unfinished.rename(shelf / digest)
    return shelf / digest


def kept_program(name: str, compiler: Sequence[str], *options: str | Path) -> Path:
    """The program or shared library that a compiler makes with these options, to which `-o` is added.

    Decided by the compiler, the options and all native sources of the package and of its tests. If it does not
    compile, the AssertionError shows the compiler's messages.
    """

    def compile_to(folder: Path) -> None:
        command = [*compiler, *map(str, options), "-o", str(folder / "output")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"

    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    decided_by = [version, *compiler, *map(str, options), *native_sources()]
    return kept(name, decided_by, compile_to) / "output"


def code_of(*folders: str, without: Iterable[str] = ()) -> list[Path]:
    """The Python files of folders of the repository, but for some files or folders in these."""
    files = [(path, ROOT / folder) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path, folder in files if path.relative_to(folder).parts[0] not in without]


def native_sources() -> list[Path]:
    suffixes = (".h", ".cc", ".cu")
    return [path for folder in NATIVE for path in sorted(folder.rglob("*")) if path.suffix in suffixes]


def digest_of(parts: Iterable[str | Path]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else part.encode()
        digest.update(f"{part} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]
