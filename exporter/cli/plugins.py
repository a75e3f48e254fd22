"""`effexport plugins`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.base.formatting import say
from effexport.base.option_fields import A_FOLDER, Options, option
from effexport.cli._console import result_console, stage_progress, stderr_console
from effexport.cli._verbs import verb
from effexport.cli.main import SuggestingGroup

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.plugins.building.library import BuiltOperator, Library
    from effexport.plugins.ops import Op

BUILD_COMMAND = "effexport plugins build"


@click.group("plugins", cls=SuggestingGroup)
def command() -> None:
    """Build and locate the kernel library, which makes custom operators faster in ONNX Runtime.

    Without it, custom operators run as their ONNX function bodies.
    """


@dataclass(frozen=True, kw_only=True)
class LibraryOptions(Options):
    """The options of `effexport plugins build`."""

    cuda: bool | None = option(None, "CUDA kernels; default: if it has nvcc and a GPU.")
    force: bool = option(False, "Compile even if the library is in the cache.")
    folders: Sequence[Path] = option((), "Also an operator of your own. Repeatable.", flag="--with", metavar=A_FOLDER)


@verb("build", LibraryOptions)
def build_command(options: LibraryOptions, as_json: bool) -> None:
    """Compile the library, unless it is in the cache. It is used from now on.

    It has our operators, those of installed packages (entry points effexport.operators), and those of --with. It has
    CUDA kernels for the GPUs of this machine, if it has nvcc too; with --cuda, for all GPUs.
    Needs cmake, a C++17 compiler and ONNX Runtime's headers (from EFFEXPORT_ORT_INCLUDE_DIR, the system, or the Debian
    archive); CUDA kernels also need nvcc. Without a GPU, they are compiled only if --cuda is given. Exit status 1 if
    compiling fails, 2 if a tool is missing.
    """
    from effexport.cli.main import print_json
    from effexport.plugins.building.build import build_library

    with stage_progress(stderr_console()) as on_stage:
        library = build_library(
            cuda=options.cuda, force=options.force, folders=tuple(options.folders), on_stage=on_stage
        )
    warnings = library_warnings(library)
    if as_json:
        print_json({**describe(library), "built_now": library.built_now, "warnings": warnings})
    assert library.info is not None
    how = f"compiled in {library.info.seconds:g} s" if library.built_now else "was in the cache"
    console = result_console(as_json=as_json)
    say(console, f"kernel library: {library.path}")
    say(console, f"  {how}; {devices(library)}")
    if library.info.operators:
        say(console, f"  operators of yours: {', '.join(built.onnx_name for built in library.info.operators)}")
    print_warnings(warnings)


@verb("path")
def path_command(_: Options, as_json: bool) -> None:
    """Print the path of the library. Other programs can load it. Exit status 1 if it is not built."""
    from effexport.base.errors import EffexportError
    from effexport.cli.main import print_json
    from effexport.plugins.building.library import find_library

    library = find_library()
    if library is None:
        raise EffexportError(f"the kernel library is not built; build it with: {BUILD_COMMAND}")
    if as_json:
        print_json({"path": str(library.path), "outdated": library.outdated})
    else:
        click.echo(library.path)
    print_warnings(library_warnings(library))


@verb("info")
def info_command(_: Options, as_json: bool) -> None:
    """Show which library is used and what it contains.

    Also how it was built, whether it is intact, and what else is in the cache. Exit status 1 if it is damaged.
    """
    from effexport.cli.main import print_json
    from effexport.plugins.building.library import cache_folder, find_library, list_builds

    library = find_library()
    described = describe(library) if library else {"library": None}
    sha256_ok = is_intact(library) if library else None
    builds, damaged = list_builds()
    used = library.info.key if library and library.info else None
    value = {
        **described,
        "sha256_ok": sha256_ok,
        "operators": operators(library),
        "cache_folder": str(cache_folder()),
        "other_builds": [build.key for build in builds if build.key != used],
        "damaged_builds": {str(folder): problem for folder, problem in damaged.items()},
        "warnings": library_warnings(library) if library else [],
    }
    if as_json:
        print_json(value)
    print_info(result_console(as_json=as_json), value, library)
    print_warnings(value["warnings"])
    if sha256_ok is False:
        raise click.exceptions.Exit(1)


def describe(library: Library) -> dict[str, Any]:
    """The library and how it was built, for --json."""
    info, cuda = library.info, library.cuda
    names = ("header_version", "compiler", "flags", "created", "seconds")
    return {
        "library": str(library.path),
        "outdated": library.outdated,
        "explicit": info is None,
        "origin": library.origin,
        "cuda": None if info is None else cuda is not None,
        "cuda_architectures": cuda.architectures if cuda else info and (),
        "nvcc": cuda.nvcc if cuda else None,
        **{name: getattr(info, name, None) for name in (*names, "key", "sha256", "bytes")},
        "with": list(library.folders),
    }


def operators(library: Library | None) -> list[dict[str, Any]]:
    """Operators with the element types and the providers that have kernels; providers: None if unknown."""
    from effexport.plugins.ops import OPS

    if library is None:
        return []

    def described(op: Op | BuiltOperator, has_cuda: bool) -> dict[str, Any]:
        providers = None if library.info is None else ["CPU", "CUDA"] if has_cuda else ["CPU"]
        return {"name": op.onnx_name, "element_types": list(op.element_types), "providers": providers}

    info = library.info
    ours = [described(op, library.cuda is not None) for op in OPS.values()]
    return ours + [described(built, built.cuda) for built in (info.operators if info else ())]


def devices(library: Library) -> str:
    """The devices that the library has kernels for, and how to add CUDA kernels."""
    from effexport.plugins.building.build import NO_NVCC
    from effexport.plugins.building.toolchain import find_nvcc, kernel_gpus

    assert library.info is not None
    if cuda := library.cuda:
        origin = f", {cuda.distribution}" if cuda.distribution else ""
        return f"CPU and CUDA (sm_{', sm_'.join(map(str, cuda.architectures))}, PTX for later GPUs{origin})"
    gpus = kernel_gpus()
    command = library.rebuild_command + ("" if gpus else " --cuda")
    if nvcc := find_nvcc():
        why = "" if gpus else ", because there is no GPU"
        return f"CPU only, although nvcc is installed ({nvcc}){why}; add the CUDA kernels with: {command}"
    return f"CPU only: {NO_NVCC}, then add the CUDA kernels with: {command}"


def is_intact(library: Library) -> bool | None:
    """True if its files are as they were built; None if their checksums are not known."""
    from effexport.plugins.errors import LibraryError

    try:
        library.check_contents()
    except LibraryError:
        return False
    return None if library.info is None else True


def library_warnings(library: Library) -> list[str]:
    """Warnings about a library that can still be used."""
    from effexport.plugins.building.build import runtime_warning
    from effexport.plugins.building.library import LIBRARY_VARIABLE

    warnings = []
    if library.outdated:
        warnings.append(f"the library was built from different sources; rebuild it with: {library.rebuild_command}")
    # a damaged library is not loaded; `info` reports it
    if library.cuda and is_intact(library) and (problem := library.cuda_problem()):
        warnings.append(f"on this machine, the library has kernels for the CPU only, because {problem}")
    if library.info and (about_runtime := runtime_warning(library.info.header_version)):
        warnings.append(about_runtime)
    if library.info and (explicit := os.environ.get(LIBRARY_VARIABLE)):
        warnings.append(f"{LIBRARY_VARIABLE} is {explicit!r}: that file is used instead of this library")
    return warnings


def print_warnings(warnings: list[str]) -> None:
    for warning in warnings:
        say(stderr_console(), f"WARNING: {warning}", style="bold yellow")


def print_info(console: Console, value: dict[str, Any], library: Library | None) -> None:
    """Print the object of --json as text, but for the warnings."""

    def line(name: str, text: object) -> None:
        say(console, f"{name:<16}{text}")

    if library is None:
        line("library", f"none: custom operators run as their ONNX function bodies; build it with: {BUILD_COMMAND}")
    else:
        state = "" if library.info is None else ", OUTDATED" if library.outdated else ", up to date"
        line("library", f"{library.path} ({library.origin}{state})")
    if library is not None and library.info is not None:
        info = library.info
        line("kernels for", devices(library))
        line("headers", f"ONNX Runtime 1.{info.header_version}; the library works with this version and later ones")
        line("compiler", info.compiler)
        line("nvcc", value["nvcc"] or "none")
        how_long = "" if library.in_wheel else f", in {info.seconds:g} s"
        line("built", f"{info.created}{how_long}, {info.bytes:,} bytes")
        as_built = f"{info.sha256}, as built"
        line("sha256", as_built if value["sha256_ok"] else f"DAMAGED; rebuild it with: {library.rebuild_command}")
    for op in value["operators"]:
        providers = ", ".join(op["providers"] or ["unknown"])
        line("operator", f"{op['name']}: {', '.join(op['element_types'])}; providers: {providers}")
    line("cache", f"{value['cache_folder']}; other builds: {len(value['other_builds'])}")
    for folder in value.get("with", ()):
        line("with", folder)
    for folder, problem in value["damaged_builds"].items():
        line("damaged", f"{folder}: {problem}")


for one in (build_command, path_command, info_command):
    command.add_command(one)
