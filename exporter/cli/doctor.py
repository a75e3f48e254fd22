"""`effexport doctor`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from effexport.base.environment import MISSING
from effexport.base.formatting import say
from effexport.base.option_fields import Options, option
from effexport.base.runtimes import Runtime
from effexport.cli._console import result_console
from effexport.cli._verbs import verb

# The lines fit into a terminal of the usual width.
WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """The options of `effexport doctor`."""

    load: bool = option(False, "Also load every part, and run each kernel once.")


@verb("doctor", DoctorOptions)
def command(options: DoctorOptions, as_json: bool) -> None:
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
