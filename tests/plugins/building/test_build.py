"""The build of the kernel library: when it compiles, what it leaves behind, and what it says when it cannot."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from effexport.plugins.building import sources
from effexport.plugins.building.build import BuildFailedError, build_library, make_plan, relevant_lines
from effexport.plugins.building.library import LibraryError, find_library, kernels_folder
from effexport.plugins.building.toolchain import require_cmake
from effexport.plugins.ops import OPS

if TYPE_CHECKING:
    from fake_machine import Machine

pytest_plugins = ["fake_machine"]
pytestmark = pytest.mark.requires("native")
ROOT = Path(__file__).parents[3]
ERROR = "kernel_cpu.cc:7:1: error: 'half' was not declared\n    7 | half x;"
BUILD = "library = build_library()\nprint(library.path, library.built_now)"


def test_the_sources_are_all_native_files_on_disk() -> None:
    plugins = ROOT / "plugins"
    native = (path for path in plugins.rglob("*") if path.suffix in {".cc", ".cu", ".h", ".txt"})
    # what scripts/gpu compiles is not part of the library
    on_disk = {path.relative_to(plugins).as_posix() for path in native if path.stem != "gpu_check"}
    assert sources.all_sources() == sorted(on_disk)


def test_every_operator_has_the_same_files() -> None:
    for op in OPS.values():
        folder = ROOT / "plugins" / op.torch_name
        assert (folder / "trt.py").is_file() == (folder / "kernel_cuda.cu").is_file() == op.cuda
        assert (folder / "README.md").is_file()
        assert (folder / "op.py").is_file()
    assert sources.missing_sources() == []


def test_cmake_compiles_the_operators_of_the_table(tmp_path: Path) -> None:
    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "onnxruntime_cxx_api.h").touch()
    command = [
        require_cmake(),
        "-S",
        ROOT / "plugins",
        "-B",
        tmp_path / "build",
        f"-DEFFEXPORT_ORT_INCLUDE_DIR={headers}",
    ]
    subprocess.run([*command, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"], check=True, capture_output=True)
    units = [Path(unit["file"]) for unit in json.loads((tmp_path / "build" / "compile_commands.json").read_text())]
    joined = {Path(name) for unit in units for name in re.findall(r'#include "(.*\.c[cu])"', unit.read_text())}
    in_sources = {path for path in joined.union(units) if path.is_relative_to(ROOT / "plugins")}
    compiled = {path.relative_to(ROOT / "plugins").as_posix() for path in in_sources}
    assert compiled == {name for name in sources.required_sources() if name.endswith((".cc", ".cu"))}
    registered = (tmp_path / "build" / "ort_ops.inc").read_text().split()
    assert sorted(registered) == sorted(f"EFFEXPORT_OP({op.torch_name})" for op in OPS.values())


def test_a_build_is_found_afterwards_and_says_what_it_was_made_from(machine: Machine) -> None:
    assert find_library() is None
    stages: list[str] = []
    library = build_library(on_stage=stages.append)
    assert library.built_now
    assert library.info is not None
    assert (library.info.header_version, library.info.nvcc) == (21, None)
    assert library.info.compiler.endswith("/c++: c++ 14.1")
    found = find_library()
    assert found is not None
    assert (found.path, found.outdated, found.info) == (library.path, False, library.info)
    assert machine.builds() == [library.info.key]
    assert stages[0].startswith("building for the CPU only: no nvcc was found; install the CUDA toolkit")
    assert "compiling for the CPU only" in stages


def test_cmake_is_told_what_to_build(machine: Machine, nvcc: Path) -> None:
    library = build_library(cuda=True)
    configure, compile_ = machine.cmake_calls()
    assert f"-DEFFEXPORT_ORT_INCLUDE_DIR={machine.folder / 'include'}" in configure
    assert f"-DCMAKE_CXX_COMPILER={machine.bin / 'c++'}" in configure
    assert f"-DEFFEXPORT_NVCC={nvcc}" in configure
    assert f"-DEFFEXPORT_SOURCES={sources.source_hash()}" in configure
    code = ["compute_75,code=sm_75", "compute_80,code=sm_80", "compute_90,code=sm_90", "compute_90,code=compute_90"]
    assert f"-DEFFEXPORT_CUDA_CODE={';'.join(f'--generate-code=arch={each}' for each in code)}" in configure
    assert "--parallel" in compile_
    assert library.info is not None
    assert library.info.cuda_architectures == (75, 80, 90)
    assert library.cuda is not None
    assert library.cuda.path.read_text() == "CUDA kernels"
    library.check_contents()
    library.cuda.path.write_text("other kernels")
    with pytest.raises(LibraryError, match=r"effexport_cuda\.fatbin is not the file that was built"):
        library.check_contents()
    assert build_library(cuda=True).built_now
    library.check_contents()


def test_cuda_code_is_compiled_for_the_gpus_of_the_variable_only(
    machine: Machine, nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFEXPORT_CUDA_ARCHITECTURES", "90, 75")
    machine.has_gpus("8.0")
    for cuda in (None, True):
        library = build_library(cuda=cuda)
        assert library.info is not None
        assert library.info.cuda_architectures == (75, 90)
    monkeypatch.setenv("EFFEXPORT_CUDA_ARCHITECTURES", "sm_90")
    with pytest.raises(LibraryError, match="is 'sm_90'; expected some of 75,80"):
        build_library()


@pytest.mark.parametrize(
    ("gpus", "architectures"),
    [
        (("9.0",), (90,)),
        (("8.0", "8.0", "9.0"), (80, 90)),
        (("8.6",), (80,)),  # the nvcc does not know it, and machine code of 8.0 runs on it
        (("12.0",), (90,)),  # which runs its PTX
        (("7.0", "7.5"), (75,)),
    ],
)
def test_cuda_code_is_compiled_for_the_gpus_of_the_machine(
    machine: Machine, nvcc: Path, gpus: tuple[str, ...], architectures: tuple[int, ...]
) -> None:
    machine.has_gpus(*gpus)
    library = build_library()
    assert library.info is not None
    assert library.info.cuda_architectures == architectures
    every = build_library(cuda=True).info
    assert every is not None
    assert every.cuda_architectures == (75, 80, 90)


@pytest.mark.parametrize("gpus", [(), ("7.0",), ("hidden",)])
def test_without_a_gpu_an_nvcc_does_nothing_unless_it_is_asked_for(
    machine: Machine, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = machine.program("nvcc", "raise SystemExit('it ran')")
    machine.has_gpus(*("9.0" if gpu == "hidden" else gpu for gpu in gpus))
    if "hidden" in gpus:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    stages: list[str] = []
    library = build_library(on_stage=stages.append)
    assert library.info is not None
    assert not library.info.has_cuda
    found = f"nvcc is installed ({nvcc}), but there is no GPU; --cuda compiles for one"
    assert stages[0] == f"building for the CPU only: {found}"
    with pytest.raises(LibraryError, match="it ran"):
        build_library(cuda=True)


def test_a_compiler_behind_another_program_is_passed_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.program("ccache", "print('c++ behind ccache')")
    monkeypatch.setenv("CXX", "ccache c++")
    build_library()
    assert f"-DCMAKE_CXX_COMPILER={machine.bin / 'ccache'};c++" in machine.cmake_calls()[0]


def test_a_second_build_takes_no_compiler_and_force_does(machine: Machine) -> None:
    first = build_library()
    again = build_library()
    assert not again.built_now
    assert again.path == first.path
    assert len(machine.cmake_calls()) == 2
    assert build_library(force=True).built_now
    assert len(machine.cmake_calls()) == 4
    assert len(machine.builds()) == 1


def test_a_damaged_library_is_built_again(machine: Machine) -> None:
    library = build_library()
    content = bytearray(library.path.read_bytes())
    content[-1] ^= 1
    library.path.write_bytes(content)
    assert build_library().built_now
    assert library.path.read_bytes() != content
    (library.path.parent / "build.json").write_text("{")
    assert find_library() is None
    assert build_library().built_now
    assert find_library() is not None


CHANGES: dict[str, Callable[[Machine, pytest.MonkeyPatch], object]] = {
    "a source": lambda machine, patch: (machine.sources / "lsh_sort/kernel.h").write_text("//"),
    "the header version": lambda machine, patch: machine.write_headers(machine.folder / "include", 22),
    "a header": lambda machine, patch: (machine.folder / "include/onnxruntime_cxx_api.h").write_text("//"),
    "the compiler's version": lambda machine, patch: (machine.bin / "c++.version").write_text("c++ 14.2"),
    "the compiler": lambda machine, patch: (machine.bin / "c++").rename(machine.bin / "g++"),
    "a flag": lambda machine, patch: patch.setenv("CXXFLAGS", "-O0"),
    "the machine": lambda machine, patch: patch.setattr("platform.machine", lambda: "riscv64"),
    "an nvcc and a GPU": lambda machine, patch: (machine.program("nvcc", "print('sm_90')"), machine.has_gpus("9.0")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_key_changes_with(machine: Machine, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def key() -> str:
        return make_plan(None, lambda stage: None).key

    before = key()
    assert key() == before
    CHANGES[what](machine, monkeypatch)
    assert key() != before


def finish(*processes: object) -> list[str]:
    outputs = []
    for process in processes:
        out, err = process.communicate(timeout=60)  # type: ignore[attr-defined]
        assert process.returncode == 0, err  # type: ignore[attr-defined]
        outputs.append(out)
    return outputs


def test_two_processes_at_once_do_the_work_once(machine: Machine) -> None:
    (machine.bin / "cmake.seconds").write_text("0.5")
    outputs = finish(*(machine.python(BUILD) for _ in range(3)))
    assert sorted(output.split()[1] for output in outputs) == ["False", "False", "True"]
    assert len({output.split()[0] for output in outputs}) == 1
    assert len(machine.cmake_calls()) == 2
    assert len(machine.builds()) == 1


def test_two_processes_at_once_succeed_without_locks(machine: Machine) -> None:
    (machine.bin / "cmake.seconds").write_text("0.5")
    no_locks = "import fcntl\ndef refuse(*_): raise OSError(37, 'No locks available')\nfcntl.flock = refuse\n"
    outputs = finish(*(machine.python(no_locks + BUILD) for _ in range(2)))
    assert len({output.split()[0] for output in outputs}) == 1
    assert len(machine.builds()) == 1
    library = find_library()
    assert library is not None
    assert not library.outdated


def test_what_a_killed_build_left_is_cleared(machine: Machine) -> None:
    (machine.bin / "cmake.seconds").write_text("600")
    process = machine.python(BUILD, start_new_session=True)
    deadline = time.monotonic() + 30
    while len(machine.cmake_calls()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (leftover,) = machine.builds()
    assert leftover.startswith(".build-")
    (machine.bin / "cmake.seconds").write_text("0")
    running = machine.cache / "kernels" / leftover.replace(f"-{process.pid}-", f"-{os.getpid()}-")
    foreign = machine.cache / "kernels" / ".build-another-machine-1-x"
    for folder in (running, foreign):
        folder.mkdir()
    library = build_library()
    assert machine.builds() == sorted([library.path.parent.name, running.name, foreign.name])


def test_a_failed_build_keeps_the_old_library_and_says_so(machine: Machine) -> None:
    old = build_library()
    (machine.sources / "native" / "ort_op.h").write_text("// changed")
    (machine.bin / "cmake.error").write_text(ERROR)
    with pytest.raises(BuildFailedError, match="'half' was not declared") as failure:
        build_library()
    message = str(failure.value)
    assert f"The library built before is kept and stays in use: {old.path}" in message
    assert "[1/2] Building" not in message
    assert "--no-cuda" not in message
    log = Path(re.search(r"The whole log: (.*)", message)[1])  # type: ignore[index]
    assert "[1/2] Building" in log.read_text()
    assert machine.builds() == [old.path.parent.name]
    found = find_library()
    assert found is not None
    assert found.outdated
    (machine.bin / "cmake.error").unlink()
    assert build_library().built_now
    now = find_library()
    assert now is not None
    assert not now.outdated


def test_a_forced_build_that_fails_keeps_the_library_of_the_same_sources(machine: Machine) -> None:
    old = build_library()
    (machine.bin / "cmake.error").write_text(ERROR)
    with pytest.raises(BuildFailedError, match="is kept"):
        build_library(force=True)
    found = find_library()
    assert found is not None
    assert (found.path, found.outdated) == (old.path, False)


def test_a_failing_cuda_build_does_not_fall_back_and_names_the_way_out(machine: Machine, nvcc: Path) -> None:
    (machine.bin / "cmake.error").write_text("host_config.h: error: unsupported GNU version!")
    with pytest.raises(BuildFailedError, match="effexport plugins build --no-cuda") as failure:
        build_library(cuda=True)
    assert "unsupported GNU version" in str(failure.value)
    assert machine.builds() == []


def test_a_full_disk_is_one_line_whichever_program_has_filled_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.bin / "cmake.error").write_text(
        "/usr/bin/ld: final link failed: No space left on device\ncollect2: error: ld returned 1 exit status\n"
    )
    with pytest.raises(BuildFailedError) as failure:
        build_library()
    message = str(failure.value)
    assert message.startswith(f"cannot compile in {kernels_folder()}: the disk is full")
    assert message.endswith("set EFFEXPORT_CACHE_DIR or TMPDIR to a folder with more room")
    assert "\n" not in message
    assert machine.builds() == []
    (machine.bin / "cmake.error").unlink()

    def refuse(*arguments: object, **options: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(BuildFailedError, match=r"cannot compile in .*: the disk is full"):
        build_library()


def test_a_library_that_does_not_load_is_not_kept(machine: Machine) -> None:
    (machine.bin / "tiny.so").write_text("no library")
    with pytest.raises(BuildFailedError, match=r"compiled but does not load: OSError: .*too short"):
        build_library()
    assert machine.builds() == []


def test_sources_that_change_meanwhile_are_noticed(machine: Machine) -> None:
    def change(stage: str) -> None:
        if stage == "trying the library":
            (machine.sources / "native" / "ort_op.h").write_text("// changed")

    with pytest.raises(BuildFailedError, match="the sources changed while they were compiled"):
        build_library(on_stage=change)
    assert machine.builds() == []


def test_the_last_selected_build_of_the_same_sources_is_used(machine: Machine, nvcc: Path) -> None:
    with_cuda, without = build_library(cuda=True), build_library(cuda=False)
    assert with_cuda.path != without.path
    for library, cuda in ((without, True), (with_cuda, False), (without, True)):
        assert find_library().path == library.path  # type: ignore[union-attr]
        assert not build_library(cuda=cuda).built_now


def test_each_missing_tool_is_one_error_with_its_remedy(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(**options: bool) -> str:
        with pytest.raises(LibraryError) as failure:
            build_library(**options)
        assert failure.value.exit_code == 2
        return str(failure.value)

    assert "--cuda was given, but no nvcc was found" in error(cuda=True)
    (machine.bin / "cmake.version").write_text("3.18.4")
    assert "no cmake 3.24 or later found" in error()
    assert "cmake is 3.18); add it with: pip install 'effexport[kernels]'" in error()
    (machine.bin / "cmake").unlink()
    assert "no cmake 3.24 or later found; add it with" in error()
    machine.program("cmake", CMAKE_NEW)
    (machine.bin / "ninja").unlink()
    assert "neither ninja nor make" in error()
    (machine.bin / "c++").unlink()
    assert "no C++ compiler found" in error()
    for given in ("icc", "'icc", " "):
        monkeypatch.setenv("CXX", given)
        assert f"CXX is {given!r}, which is not a program on this machine" in error()
    monkeypatch.setenv("EFFEXPORT_NVCC", "/opt/cuda/nvcc")
    assert "EFFEXPORT_NVCC is '/opt/cuda/nvcc', which is not a program on this machine" in error()
    (machine.sources / "native" / "ort_op.h").unlink()
    assert "this installation lacks native/ort_op.h" in error()
    assert not (machine.bin / "cmake.calls").exists()


CMAKE_NEW = "print('cmake version 4.1.0')"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('no licence')", "does not run: exit status 1, no licence"),
        ("print('sm_35')", "does not compile for any of sm_75"),
    ],
)
def test_an_nvcc_that_cannot_serve_is_an_error_that_names_the_way_out(
    machine: Machine, code: str, message: str
) -> None:
    machine.program("nvcc", code)
    machine.has_gpus("9.0")
    with pytest.raises(LibraryError, match=re.escape(message)) as failure:
        build_library()
    assert "effexport plugins build --no-cuda" in str(failure.value)
    assert build_library(cuda=False).built_now


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_variable(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.folder / "file").write_text("")
    monkeypatch.setenv("EFFEXPORT_CACHE_DIR", str(machine.folder / "file"))
    with pytest.raises(LibraryError, match=r"the cache cannot be used: .*Set EFFEXPORT_CACHE_DIR to one"):
        build_library()
    assert find_library() is None


def test_the_lines_that_matter_begin_at_the_first_error() -> None:
    noise = "-- Configuring done\n[1/9] Building\nFAILED: x\n/usr/bin/c++ -O3 -o x.o -c x.cc\nx.cc: warning: odd\n"
    log = noise + "x.cc:1: error: first\n" + "note\n" * 100
    lines = relevant_lines(log)
    assert lines[0].strip() == "x.cc:1: error: first"
    assert len(lines) == 30
    assert relevant_lines("a\n\nb\n") == ["  a", "  b"]
    assert relevant_lines("") == ["  (no output)"]
