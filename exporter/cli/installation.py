"""Commands about this installation: doctor, plugins."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.base.environment import MISSING
from effexport.base.formatting import say
from effexport.base.option_fields import A_FOLDER, Options, option
from effexport.base.runtimes import Runtime
from effexport.cli._console import result_console, stage_progress, stderr_console
from effexport.cli._verbs import verb
from effexport.cli.main import SuggestingGroup

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.plugins.building.library import BuiltOperator, Library
    from effexport.plugins.ops import Op


# The lines fit into a terminal of the usual width.
WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """The options of `effexport doctor`."""

    load: bool = option(False, "Also load every part, and run each kernel once.")


@verb("doctor", DoctorOptions)
def doctor_command(options: DoctorOptions, as_json: bool) -> None:
    """Show which parts, tools and GPUs are here, and how to add what is missing.

    Exit status 1 if a required part is missing, or if an installed part does not load or a kernel fails (with --load).
    """
    from effexport.base import environment
    from effexport.cli.main import print_json

    load = options.load
    findings = [environment.examine(part, load=load) for part in environment.PARTS]
    tools = examine_tools()
    has_runtime = any(finding["works"] for finding in findings if finding["name"] == "onnxruntime")
    library = examine_library(load=load and has_runtime)
    tensorrt = examine_tensorrt()
    ok = all(finding["works"] or is_left_out(finding) for finding in findings) and library["problem"] is None
    if as_json:
        described = {"environment": environment.versions(), "parts": findings, "tools": tools, "library": library}
        described["tensorrt"] = tensorrt
        print_json({"ok": ok, "loaded": load, **described})
    else:
        print_findings(findings, tools)
        print_tensorrt(tensorrt)
        say(result_console(), library_line(library))
        done = "everything needed is installed" + (
            " and loads" if load else "; to load it, too: effexport doctor --load"
        )
        say(result_console(), done if ok else "something is missing or broken, see above")
    if not ok:
        raise click.exceptions.Exit(1)


def examine_tools() -> list[dict[str, str | None]]:
    """Programs and GPUs: what each is needed for, what was found (None: nothing), and what adds it."""
    from effexport.plugins.building.toolchain import examine_compiler, examine_nvcc, gpus_here, require_cmake
    from effexport.plugins.errors import LibraryError

    def found(find: Callable[[], object]) -> str | None:
        try:
            return str(find() or "") or None
        except LibraryError:
            return None

    gpus = ", ".join(f"{gpu.architecture} ({gpu.identifier})" for gpu in gpus_here())
    nvcc = found(lambda: (nvcc := examine_nvcc()) and nvcc.version)
    rows = (
        ("C++ compiler", "build the kernel library", found(lambda: examine_compiler().version), "install g++"),
        ("cmake", "build the kernel library", found(require_cmake), "pip install 'effexport[kernels]'"),
        ("nvcc", "build CUDA kernels", nvcc, "install the CUDA toolkit"),
        ("int8 products", "run --precision int8 fast", int8_products(), "int8 runs, and is slow here"),
        (
            "bf16 products",
            "run --precision bf16 fast",
            bf16_products(),
            "bf16 runs, and is hardly faster than fp32 here",
        ),
        ("bf16 tiles", "run --precision-hint bf16 fast", *examine_bfloat16()),
        ("opset 27", "run --carrier standard", *examine_new_opsets()),
        ("GPU", "run on a GPU", gpus or None, ""),
        ("driver", "run TensorRT plugins", *examine_driver()),
    )
    keys = ("name", "purpose", "found", "remedy")
    return [dict(zip(keys, (*row[:3], None if row[2] else row[3] or None), strict=True)) for row in rows]


def bf16_products() -> str | None:
    """The instructions with which our kernels multiply bfloat16 fast; None without any."""
    from effexport.base.machine import BFLOAT16_TILES, Processor

    return next((name for name in (BFLOAT16_TILES, "avx512_bf16") if name in Processor.here().flags), None)


def int8_products() -> str | None:
    """The instructions with which the processor multiplies int8 fast; None without any."""
    from effexport.base.machine import Processor

    here = Processor.here()
    return ", ".join(here.int8_products) or ("yes" if here.has_int8_products else None)


def examine_new_opsets() -> tuple[str | None, str]:
    """Runs of newer opsets than ONNX Runtime's own: their kind, None if it refuses them; and the remedy."""
    from effexport.runners.ort.session import ANY_OPSET

    return ("as function bodies" if os.environ.get(ANY_OPSET) == "0" else None), f"set {ANY_OPSET}=0"


def examine_bfloat16() -> tuple[str | None, str]:
    """The processor's tiles for bfloat16 (AMX), and the runtime that uses them: OpenVINO, up to three times as fast as
    in float32."""
    from effexport.base.machine import BFLOAT16_TILES, Processor
    from effexport.base.runtimes import BFLOAT16_RUNTIME

    if not Processor.here().has_bfloat16_tiles:
        return None, ""
    package, name = BFLOAT16_RUNTIME.package, BFLOAT16_RUNTIME.name
    if package.version is None:
        return f"{BFLOAT16_TILES}; to use it: {package.remedy}, and --runtime {name}", ""
    return f"{BFLOAT16_TILES}; use it with --runtime {name} --precision-hint bf16", ""


def examine_driver() -> tuple[str | None, str]:
    """The CUDA version of the driver (None: no driver), and the remedy if our TensorRT plugins need a later one."""
    from effexport.plugins.building.ptx import MAX_ISA, cuda_of_isa, text_of
    from effexport.plugins.building.toolchain import driver_cuda

    here, needed = driver_cuda(), cuda_of_isa(MAX_ISA)
    wanted = f"a driver of CUDA {text_of(needed)} or later"
    if here is None:
        return None, f"install {wanted}"
    return f"CUDA {text_of(here)}" + ("" if here >= needed else f": too old, install {wanted}"), ""


def examine_tensorrt() -> list[dict[str, str | None]]:
    """The ways to TensorRT: what makes the engines, and the release that it links (None: it is not installed).

    Packages are looked up, not imported.
    """
    from effexport.base.runtimes import RUNTIMES, TENSORRT_RTX
    from effexport.runners.ort.providers import linked_release
    from effexport.tensorrt.ort_providers import linked_libraries_here

    majors = [name.rpartition(".")[2] for name in linked_libraries_here()]

    def release(row: Runtime) -> str | None:
        if row.engine:
            return row.package.version
        return linked_release() if row.provider == TENSORRT_RTX else next(iter(majors), None)

    return [
        {
            "runtime": row.name,
            "way": f"--{'target' if row.engine else 'runtime'} {row.name}",
            "maker": row.engine_maker,
            "release": f"{row.tensorrt} {found}" if (found := release(row)) else None,
            "extra": row.package.extra,
        }
        for row in sorted(RUNTIMES.values(), key=lambda row: not row.engine)
        if row.tensorrt
    ]


def print_tensorrt(ways: list[dict[str, str | None]]) -> None:
    from rich.table import Table
    from rich.text import Text

    columns = ("way to TensorRT", "engines are made by", "release that it links")
    table = Table(*columns, box=None, pad_edge=False, width=WIDTH)
    for way in ways:
        release = way["release"] or Text(f"none; add the extra {way['extra']}", style="dim")
        table.add_row(way["way"], way["maker"], release)
    result_console().print(table)
    say(result_console(), "")


def print_findings(findings: list[dict[str, Any]], tools: list[dict[str, str | None]]) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    console = result_console()
    parts = Table(
        Column("part", overflow="fold"), "version", "extra", "needed to", box=None, pad_edge=False, width=WIDTH
    )
    for finding in findings:
        style = "green" if finding["works"] else "dim" if is_left_out(finding) else "bold red"
        version = finding["version"] or "–" if finding["works"] else finding["problem"]
        parts.add_row(finding["distribution"], Text(version, style=style), finding["extra"] or "–", finding["purpose"])
    console.print(parts)
    say(console, "To add an extra: pip install 'effexport[EXTRA]'", style="dim")
    say(console, "")
    for finding in findings:
        if not finding["works"] and not is_left_out(finding):
            say(console, f"{finding['distribution']}: {finding['problem']}; {finding['remedy']}", style="bold red")
    rows = Table("tool", "needed to", "found", box=None, pad_edge=False, width=WIDTH)
    for tool in tools:
        rows.add_row(
            tool["name"],
            tool["purpose"],
            tool["found"] or Text("; ".join(filter(None, ("none", tool["remedy"]))), style="dim"),
        )
    console.print(rows)
    say(console, "")


def is_left_out(finding: dict[str, Any]) -> bool:
    """True for an optional part that is not installed; one that is installed and does not load is a fault."""
    return bool(finding["optional"] and finding["problem"] == MISSING)


def examine_library(*, load: bool) -> dict[str, Any]:
    """The kernel library. A missing library is not a problem: the function bodies run instead. load: whether its
    kernels run in the installed ONNX Runtime, too."""
    from effexport.plugins.building.library import find_library
    from effexport.plugins.errors import LibraryError
    from effexport.runners.ort.kernels import problem_of_library

    library, cuda, problem, remedy = None, None, None, None
    try:
        library = find_library()
        cuda = library.cuda is not None if library and library.info else None
        if library is None or library.outdated:
            remedy = library.rebuild_command if library else "effexport plugins build"
        if library and load:
            library.check_contents()
            if problem := problem_of_library(library):
                remedy = remedy or "update onnxruntime, or run the function bodies: --implementation body"
            elif cuda and (problem := library.cuda_problem()):
                problem = f"on this machine, it has kernels for the CPU only, because {problem}"
    except LibraryError as error:
        problem, remedy = str(error), None  # which it names itself
    return {
        "path": str(library.path) if library else None,
        "origin": library.origin if library else None,
        "outdated": library.outdated if library else None,
        "cuda": cuda,
        "problem": problem,
        "remedy": remedy,
    }


def library_line(library: dict[str, Any]) -> str:
    """The kernel library in one line."""
    if library["problem"]:
        return f"kernel library: {'; '.join(filter(None, (library['problem'], library['remedy'])))}"
    if library["path"] is None:
        return f"kernel library: none, so function bodies run; build it: {library['remedy']}"
    if library["outdated"]:
        return f"kernel library: OUTDATED, built from other sources ({library['origin']}); run: {library['remedy']}"
    devices = {True: "CPU and CUDA, ", False: "CPU only, ", None: ""}[library["cuda"]]
    return f"kernel library: {devices}{library['origin']}"


BUILD_COMMAND = "effexport plugins build"


@click.group("plugins", cls=SuggestingGroup)
def plugins_command() -> None:
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
    plugins_command.add_command(one)
