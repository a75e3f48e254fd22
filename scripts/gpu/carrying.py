"""Files for the second call on a machine without a network: artifacts, the kernel library and wheels, in parts.

The parts are numbered folders below CARRIED, none larger than PART_BYTES. They lie in a folder that git ignores and are
carried one by one; wheels that were split are joined when they are installed.
"""

from __future__ import annotations

import importlib
import itertools
import os
import platform
import shutil
import string
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gpu import ROOT
from gpu.device import SetupError

CARRIED = ROOT / "build" / "gpu" / "carried"
ARTIFACTS = CARRIED / "1" / "artifacts"
# What one copy to that machine may have: the tree and one part. RESERVED_BYTES are for names and for later changes.
COPY_BYTES = 64 << 20
RESERVED_BYTES = 2 << 20
SMALLEST_PART_BYTES = 8 << 20
MEGABYTE = 10**6
# real head sizes and several chunks and landmarks, but small enough for one part with all variants
SIZE = {"dim": 128, "heads": 2, "layers": 2, "seq_len": 512}
PRECISIONS = ("fp32", "fp16")
# What effexport needs there beside PyTorch and NumPy, which are not replaced. All of it, because pip must not look for
# anything else.
WHEELS = (
    *("click", "flatbuffers", "jinja2", "markdown-it-py", "markupsafe", "mdurl", "ml_dtypes", "msgspec", "onnx"),
    *("onnx-ir", "onnxscript", "packaging", "protobuf", "pygments", "rich", "safetensors", "typing_extensions"),
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def carry(python: str) -> None:
    """Fill CARRIED, and print what is in each part. python: the version on the machine, such as "3.12".

    Raises SetupError if something cannot be built or downloaded, or if there is no room for it beside the tree.
    """
    part_bytes()  # before minutes of work
    with tempfile.TemporaryDirectory() as folder:
        download_wheels(Path(folder), python)
        # before the artifacts, because their own checks then run with these kernels
        kernels = build_kernels()
        shutil.rmtree(CARRIED, ignore_errors=True)
        build_artifacts(ARTIFACTS, variants(), PRECISIONS, SIZE)
        pack([*kernels, *sorted(Path(folder).glob("*.whl"))], CARRIED)
    print_parts()


def variants() -> tuple[str, ...]:
    from effexport.models.variants import ATTENTION_SPECS

    return tuple(ATTENTION_SPECS)


def build_artifacts(
    folder: Path, variants: Sequence[str], precisions: Sequence[str], size: Mapping[str, int]
) -> list[Path]:
    """One artifact for each variant and precision, FOLDER/VARIANT-PRECISION."""
    import effexport

    made = []
    for variant, precision in itertools.product(variants, precisions):
        output = folder / f"{variant}-{precision}"
        effexport.build(variant=variant, precision=precision, output=output, force=True, **size)
        made.append(output)
    return made


def build_kernels() -> list[Path]:
    """The kernel library and its CUDA kernels, built here because ONNX Runtime's headers are not on the machine."""
    from effexport.plugins.building.build import build_library
    from effexport.plugins.building.library import LibraryError

    try:
        library = build_library(cuda=True)
    except LibraryError as error:
        raise SetupError(f"the kernel library cannot be built: {error}") from error
    return [library.path, *([library.cuda.path] if library.cuda else [])]


def join_kernels(carried: Path, folder: Path) -> None:
    """Copy them from the carried parts into one folder: the library finds its CUDA kernels beside itself."""
    folder.mkdir(exist_ok=True)
    for path in (path for suffix in ("so", "fatbin") for path in carried.glob(f"*/*.{suffix}")):
        shutil.copy(path, folder)


def download_wheels(folder: Path, python: str) -> None:
    """All of WHEELS and onnxruntime-gpu, in the versions of constraints.txt. Raises SetupError with pip's message."""
    constraints = ROOT / "constraints.txt"
    (version,) = (
        line.partition("==")[2] for line in constraints.read_text().splitlines() if line.startswith("onnxruntime==")
    )
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", python, *platforms]
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "-c", str(constraints), "-d", str(folder)]
    done = subprocess.run(
        [*command, *WHEELS, f"onnxruntime-gpu=={version}"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SetupError(f"pip cannot download the wheels: {done.stderr.strip()}")


def install_wheels(folder: Path, work: Path) -> None:
    """Install the wheels in and below a folder for this process and its children; join wheels that were split.

    Raises SetupError for a folder without wheels, an incomplete wheel, or one that pip refuses.
    """
    wheels = [*sorted(folder.rglob("*.whl")), *join_parts(folder, work)]
    if not wheels:
        raise SetupError(f"there is no *.whl or *.whl.part* in {folder}; expected wheels. See --help")
    for wheel in wheels:
        if not zipfile.is_zipfile(wheel):
            raise SetupError(f"{wheel.name} is incomplete; expected all of its parts in {folder}. Copy it again")
    site = work / "site"
    pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command = [*pip, "--target", str(site), *map(str, wheels)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        raise SetupError(
            f"pip could not install the wheels of {folder}: {completed.stderr.strip()}. "
            f"Expected wheels for Python {platform.python_version()} on {platform.machine()}"
        )
    sys.path.insert(0, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    importlib.invalidate_caches()


def join_parts(folder: Path, work: Path) -> list[Path]:
    """Join NAME.whl.partaa, NAME.whl.partab, …, as `split` names them, to NAME.whl in `work`."""
    parts: dict[str, list[Path]] = {}
    for part in sorted(folder.rglob("*.whl.part*"), key=lambda part: part.name):
        parts.setdefault(part.name.rpartition(".part")[0], []).append(part)
    for name, files in parts.items():
        with (work / name).open("wb") as whole:
            for file in files:
                with file.open("rb") as stream:
                    shutil.copyfileobj(stream, whole)
    return [work / name for name in parts]


def tree_bytes() -> int | None:
    """The size of the tree without what git ignores, but with shared/: what every copy has. None if git cannot tell."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):  # no git, or a copy of the tree without its repository
        return None
    files = {ROOT / name for name in names if name} | set((ROOT / "shared").rglob("*"))
    return sum(path.lstat().st_size for path in files if path.is_symlink() or path.is_file())


def part_bytes() -> int:
    """The largest size of a part beside the tree. Raises SetupError if the tree is too large, or if git cannot tell."""
    tree = tree_bytes()
    if tree is None:
        raise SetupError(f"git cannot list the files of {ROOT}; expected a git repository. Run this in one")
    room = COPY_BYTES - tree - RESERVED_BYTES
    if room < SMALLEST_PART_BYTES:
        most = COPY_BYTES - RESERVED_BYTES - SMALLEST_PART_BYTES
        raise SetupError(
            f"the tree has {tree / MEGABYTE:.1f} MB without what git ignores; expected at most {most / MEGABYTE:.1f}, "
            f"so that something can be carried beside it. Remove large files, or have git ignore them"
        )
    return room


def pack(files: Sequence[Path], folder: Path) -> None:
    """Put files into FOLDER/1, FOLDER/2, …, none larger than part_bytes(); larger files are split as `split` does it.

    Raises SetupError if what lies in FOLDER/1 already leaves no room.
    """
    room, number, used = part_bytes(), 1, size_of(folder / "1")
    if used > room:
        raise SetupError(f"{folder / '1'} has {used / MEGABYTE:.0f} MB; expected at most {room / MEGABYTE:.0f}")
    for path in sorted(files, key=lambda path: path.stat().st_size):
        for name, contents in pieces(path, room):
            if used + len(contents) > room:
                number, used = number + 1, 0
            used += len(contents)
            (folder / str(number)).mkdir(parents=True, exist_ok=True)
            (folder / str(number) / name).write_bytes(contents)


def pieces(path: Path, room: int) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the pieces of a file: itself, or NAME.partaa, NAME.partab, …, if it is larger than room."""
    if path.stat().st_size <= room:
        yield path.name, path.read_bytes()
        return
    suffixes = map("".join, itertools.product(string.ascii_lowercase, repeat=2))
    with path.open("rb") as stream:
        while contents := stream.read(room):
            yield f"{path.name}.part{next(suffixes)}", contents


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def print_parts() -> None:
    """Print the parts that lie in CARRIED."""
    if not CARRIED.is_dir():
        print(f"{CARRIED.relative_to(ROOT)} is empty; fill it with scripts/gpu --carry PYTHON")
        return
    parts, tree = sorted(CARRIED.iterdir(), key=lambda part: int(part.name)), tree_bytes()
    for part in parts:
        names, size = ", ".join(sorted(path.name for path in part.iterdir())[:4]), size_of(part)
        print(f"{part.relative_to(ROOT)}  {size / MEGABYTE:5.1f} MB{with_tree(size, tree)}  {names}, …")
    print(f"{len(parts)} parts, {sum(map(size_of, parts)) / MEGABYTE:.0f} MB in all, to copy one by one")


def with_tree(size: int, tree: int | None) -> str:
    """The size of a part together with the tree, if that is known."""
    if tree is None:
        return ""
    excess = "" if size + tree <= COPY_BYTES else ", which is too much: run --carry again"
    return f" + tree {tree / MEGABYTE:.1f} = {(size + tree) / MEGABYTE:.1f} of {COPY_BYTES / MEGABYTE:.1f} MB{excess}"
