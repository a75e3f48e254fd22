"""The CUDA kernels of a kernel library and the driver of the machine, in whose place native/fake_cuda.c stands."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda_kernels import NATIVE, PLUGINS, ROOT, kernel_entries
from emulated_plugins import NUMBERS, Call, emulated_op
from kept import kept, native_sources
from slow_cases import slow

from effexport.plugins.building.build import find_headers
from effexport.plugins.building.library import CUDA_NAME, CudaKernels, Library, find_library, sha256_of
from effexport.plugins.building.toolchain import examine_compiler
from effexport.plugins.contract import load_contract
from effexport.plugins.ops import CUDA_OPS, OPS

pytestmark = pytest.mark.requires("native")
EXAMPLE = ROOT / "examples" / "my_operator"
OLD = (
    "its CUDA kernels were compiled by CUDA 13.0, and the NVIDIA driver here is for CUDA 12.4; update the driver to "
    "one for CUDA 13 (580 or later), or set EFFEXPORT_NVCC to the nvcc of CUDA 12 and run: effexport plugins build "
    "--cuda"
)
# One with several launches and types, one of integers, one that asks how large the GPU is.
LAUNCHED = ("MaskedAttention", "LSHSort", "EluLinearAttention")
MUCH_SHARED_MEMORY = "IterativePinv"
NO_DRIVER = "there is no NVIDIA driver (libcuda.so.1); install one for CUDA 13 (580 or later)"
CPU_ONLY = "effexport: the kernel library has kernels for the CPU only here, because {}\n"
CHOOSE = """
import sys, warnings
from effexport.base.errors import UserError
from effexport.runners.ort.kernels import kernels_for
from effexport.runners.options import RunOptions
warnings.simplefilter("default")
runtime, implementation = sys.argv[1:]
for _ in range(3):
    try:
        options = RunOptions(runtime=runtime, implementation=implementation)
        print(kernels_for(["MaskedAttention", "LSHSort"], (), options).ops)
    except UserError as error:
        print("refused:", error)
"""


def cuda_kernels(*fatbins: Iterable[str], sources: str = "tests", release: str = "13.0") -> bytes:
    """A file of CUDA kernels, as plugins/native/cuda_driver.cc reads it and native/fake_cuda.c runs it."""
    content = f"effexport CUDA kernels {release} {sources}".ljust(127).encode() + b"\n"
    for lines in fatbins:
        text = "".join(f"{line}\n" for line in lines).encode()
        content += struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(text)) + text
    return content


@dataclass(frozen=True)
class Built:
    """A small library with CUDA kernels, the program that counts what a library registers, and a driver."""

    folder: Path

    @property
    def library(self) -> Path:
        return self.folder / "library.so"

    def environment(self, driver: int, **more: str) -> dict[str, str]:
        """With a driver for a release of CUDA, such as 12040; 0 for one that finds no GPU, as without any."""
        return os.environ | {"LD_LIBRARY_PATH": str(self.folder / "driver"), "FAKE_CUDA_VERSION": str(driver)} | more

    def registered(
        self, library: Path, driver: int, *arguments: Path, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = [self.folder / "registrations", library, *arguments]
        environment = self.environment(driver, **environment)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)

    def chosen(self, driver: int, *settings: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", CHOOSE, *settings]
        environment = self.environment(driver, EFFEXPORT_LIBRARY=str(self.library))
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)


@pytest.fixture(scope="module")
def built() -> Built:
    compiler, headers = examine_compiler(), find_headers()
    sources = [*native_sources(), NATIVE / "fake_cuda.c", Path(__file__)]
    decided_by = [*compiler.command, compiler.version, headers.sha256, *sources]
    return Built(kept("native/cuda_driver", decided_by, lambda folder: build(folder, compiler.command, headers.folder)))


def build(folder: Path, compiler: Sequence[str], headers: Path) -> None:
    (folder / "driver").mkdir()
    (folder / CUDA_NAME).write_bytes(cuda_kernels(["effexport_gated_rms_norm_float32 pppiifp"]))
    (folder / "ort_ops.inc").write_text("EFFEXPORT_OP(gated_rms_norm)\n")
    launches = [folder / f"{CUDA_OPS[name].torch_name}_launches.cc" for name in (*LAUNCHED, MUCH_SHARED_MEMORY)]
    for path in launches:
        op = path.stem.removesuffix("_launches")
        path.write_text("".join(f'#include "{op}/{x}"\n' for x in ("kernel_cuda.cu", "gpu_check.cc")))
    launches.append(folder / "use_file.cc")
    launches[-1].write_text('extern "C" void use_file(const char* path) { effexport::cuda_driver::use_file(path); }\n')
    includes = [f"-I{path}" for path in (folder, PLUGINS, EXAMPLE, headers)]
    command = [*compiler, "-std=c++17", "-fPIC", '-DEFFEXPORT_SOURCES="tests"', *includes]
    launching = [
        *command,
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-include",
        "native/cuda_host.h",
    ]
    driver = PLUGINS / "native" / "cuda_driver.cc"
    kernel, sources = EXAMPLE / "gated_rms_norm", [PLUGINS / "native" / "ort_library.cc", driver]
    sources += [kernel / "ort.cc", kernel / "kernel_cpu.cc", folder / "launches.o"]
    for one in (
        [*launching, "-x", "c++", "-c", kernel / "kernel_cuda.cu", "-o", folder / "launches.o"],
        [*command, "-shared", "-fvisibility=hidden", *sources, "-o", folder / "library.so", "-ldl"],
        [*launching, "-shared", *launches, driver, "-o", folder / "launches.so", "-ldl"],
        [*command, NATIVE / "registrations.cc", "-o", folder / "registrations", "-ldl"],
        ["cc", "-shared", "-fPIC", NATIVE / "fake_cuda.c", "-o", folder / "driver" / "libcuda.so.1"],
    ):
        subprocess.run(one, check=True)


@pytest.mark.parametrize("driver", [slow(13000), slow(13020), 14000])
def test_with_a_driver_of_the_same_major_version_or_later_sessions_load_the_kernels(built: Built, driver: int) -> None:
    done = built.registered(built.library, driver)
    assert (done.stdout, done.stderr) == ("3 3 \nload 41\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(("driver", "problem"), [(12040, OLD), (0, NO_DRIVER)])
def test_with_an_older_driver_or_none_only_cpu_kernels_are_registered_which_is_said_once(
    built: Built, driver: int, problem: str
) -> None:
    done = built.registered(built.library, driver)
    assert done.stdout == f"3 0 {problem}\n"
    assert done.stderr == CPU_ONLY.format(problem)


REMEDY = "run: effexport plugins build --cuda"
FILES = {
    "none": (None, f"there is no {{}}; on a machine with nvcc, {REMEDY}"),
    "rubbish": (b"\x7fELF" * 99, f"{{}} is not a file of CUDA kernels; {REMEDY}"),
    "of other sources": (
        cuda_kernels([], sources="others"),
        f"{{}} was compiled from other sources than the library; install effexport-kernels-cuda of its version, or "
        f"{REMEDY}",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_without_the_kernels_of_its_sources_a_library_is_for_the_cpu(built: Built, case: str, tmp_path: Path) -> None:
    content, problem = FILES[case]
    path = tmp_path / CUDA_NAME
    if content is not None:
        path.write_bytes(content)
    done = built.registered(built.library, 13000, path)
    assert done.stdout == f"3 0 {problem.format(path)}\n"
    # a library for the CPU alone is nothing to speak of
    assert done.stderr == ("" if content is None else CPU_ONLY.format(problem.format(path)))


def test_a_wheel_of_cuda_kernels_of_other_sources_is_a_problem_without_a_driver_too(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / CUDA_NAME
    info = SimpleNamespace(has_cuda=False, source_hash="tests", sha256=sha256_of(built.library))
    library = Library(built.library, outdated=False, info=info)  # type: ignore[arg-type]
    monkeypatch.setattr("effexport.plugins.building.library.driver_cuda", lambda: None)
    for sources, problem in (("others", FILES["of other sources"][1].format(path)), ("tests", None)):
        path.write_bytes(cuda_kernels([], sources=sources))
        wheel = CudaKernels(path, sources, sha256_of(path), "nvcc", (90,), distribution="effexport-kernels-cuda 1.2.3")
        monkeypatch.setattr("effexport.plugins.building.library.find_cuda_in_wheel", lambda wheel=wheel: wheel)
        assert library.cuda_problem() == problem


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (cuda_kernels(["a p"])[:-1], "{} ends early"),
        (cuda_kernels(["a p"]) + b"\0" * 16, "{} is damaged"),
    ],
)
def test_damaged_kernels_are_an_error_of_the_session(
    built: Built, content: bytes, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / CUDA_NAME
    path.write_bytes(content)
    reason = f"GatedRMSNorm: the CUDA kernels were not loaded: {problem.format(path)}"
    assert built.registered(built.library, 13000, path).stdout.splitlines()[-1] == reason


def test_an_error_of_the_driver_has_its_name_and_text(built: Built) -> None:
    """Drivers before CUDA 12.3 load nothing while a stream is captured."""
    done = built.registered(built.library, 13000, FAKE_CUDA_CAPTURES="1")
    assert done.stdout.splitlines()[-1] == (
        "GatedRMSNorm: the CUDA kernels were not loaded: cuLibraryLoadData: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "
        "operation not permitted when stream is capturing"
    )


@pytest.mark.requires("ort")
@pytest.mark.parametrize("implementation", ["auto", "MaskedAttention=auto"])
def test_with_an_older_driver_auto_falls_back_to_bodies_with_one_warning(built: Built, implementation: str) -> None:
    done = built.chosen(12040, "ort-cuda", implementation)
    assert done.stdout == "()\n" * 3
    assert done.stderr.count("KernelWarning") == 1
    assert f"library.so has kernels for the CPU only here, because {OLD}\n" in done.stderr
    assert "custom operators run as function bodies" in done.stderr


@pytest.mark.requires("ort")
@pytest.mark.parametrize("implementation", ["kernel", "LSHSort=kernel"])
def test_with_an_older_driver_requested_kernels_are_one_error(built: Built, implementation: str) -> None:
    done = built.chosen(12040, "ort-cuda", implementation)
    message = f"kernels were requested, but {built.library} has kernels for the CPU only here, because {OLD}"
    assert done.stdout == f"refused: {message}\n" * 3
    assert done.stderr == ""


@pytest.mark.requires("ort")
@pytest.mark.parametrize(("driver", "provider"), [(12040, "ort"), (0, "ort"), (0, "ort-cuda"), (13000, "ort-cuda")])
def test_otherwise_kernels_run_and_nothing_is_said(built: Built, driver: int, provider: str) -> None:
    done = built.chosen(driver, provider, "auto")
    assert (done.stdout, done.stderr) == ("('MaskedAttention', 'LSHSort')\n" * 3, "")


# Runs calls, from its standard input, twice: on a stream of one context, then on one of another while it is captured.
CALL = """
import ctypes, json, sys
driver, library = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(sys.argv[1])
library.use_file(sys.argv[2].encode())
nowhere = (ctypes.c_void_p * 16)(*[4096] * 16)
calls = json.load(sys.stdin)
for captured, stream in enumerate((101, 202)):
    driver.fake_capture(captured)
    for op, dtype, sizes, numbers in calls:
        sizes, numbers = (ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_double * max(len(numbers), 1))(*numbers)
        check = getattr(library, f"effexport_check_{op}")
        check.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 5]
        assert check(dtype, nowhere, sizes, numbers, nowhere[0], stream) == 0
"""


@pytest.mark.requires("torch")
def test_the_driver_gets_the_launches_of_the_emulation_on_every_stream(built: Built, tmp_path: Path) -> None:
    """The functions that launch kernels, compiled without nvcc: names, grids, shared memory and numbers. The kernels
    are loaded once, for all contexts, and not while a stream is captured."""
    calls, expected, fatbins = [], [], []
    for name in LAUNCHED:
        op, emulated = CUDA_OPS[name], emulated_op(CUDA_OPS[name])
        fatbins.append([f"{entry} {emulated.kinds(entry)}" for entry in kernel_entries(op)])
        for case in load_contract(op).small:
            calls.append((op.torch_name, NUMBERS.get(case.dtype, 0), case.sizes, case.numbers))
            expected += emulated.calls_of_launch_cuda(case.dtype, case.sizes, case.numbers)
    path = tmp_path / "kernels.fatbin"
    path.write_bytes(cuda_kernels(*fatbins))
    done = subprocess.run(
        [sys.executable, "-P", "-c", CALL, built.folder / "launches.so", path],
        input=json.dumps(calls),
        env=built.environment(13000),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    loaded, launches = lines[: len(LAUNCHED)], lines[len(LAUNCHED) :]
    assert [word for word, _ in loaded] == ["load"] * len(LAUNCHED)
    found = [Call(line[1], (int(line[2]), int(line[3]), int(line[4])), tuple(map(int, line[6:]))) for line in launches]
    assert found == expected * 2
    assert [line[5] for line in launches] == ["101"] * len(expected) + ["202"] * len(expected)


@pytest.mark.parametrize(
    ("release", "compiled_for", "word"), [(12030, "90", "overlap"), (12020, "90", "launch"), (12030, "89", "launch")]
)
def test_a_launch_after_another_overlaps_it_where_gpu_and_driver_can(
    built: Built, release: int, compiled_for: str, word: str, tmp_path: Path
) -> None:
    path, name = tmp_path / "kernels.fatbin", "effexport_masked_attention_{}float32"
    kinds = {name.format(""): "ppppiiiiiiifip", name.format("merge_"): "piiiip"}
    path.write_bytes(cuda_kernels([f"{x} {kinds[x]}" for x in kinds], release="12.0"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", CALL, built.folder / "launches.so", path],
        # few queries and many keys, in slices
        input=json.dumps([("masked_attention", 0, (1, 1, 1, 4096, 8, 8), (1.0,))]),
        env=built.environment(release) | {"FAKE_CUDA_PTX": compiled_for},
        capture_output=True,
        text=True,
        check=True,
    )
    launches = [" ".join(line.split()[:2]) for line in done.stdout.splitlines()[1:]]
    assert launches == [f"launch {name.format('')}", f"{word} {name.format('merge_')}"] * 2


@pytest.mark.requires("torch")
def test_more_shared_memory_is_asked_for_once_on_every_gpu_before_a_stream_is_captured(
    built: Built, tmp_path: Path
) -> None:
    """The second GPU, whose stream is captured, has 99 KiB: too little for m = 100, which takes scratch memory."""
    path, name = tmp_path / "kernels.fatbin", "effexport_iterative_pinv_{}_float32"
    path.write_bytes(cuda_kernels([f"{name.format('wide')} ppiiip", f"{name.format('scratch')} ppiiipp"]))
    wide, scratch = (f"launch {name.format(kind)} 3" for kind in ("wide", "scratch"))
    for compiled_for, launches in {
        "80": ["98560 101 3 96", "131328 101 3 100", "98560 202 3 96", "0 202 3 100"],
        # where the wide kernel is empty
        "75": ["0 101 3 96", "0 101 3 100", "0 202 3 96", "0 202 3 100"],
    }.items():
        done = subprocess.run(
            [sys.executable, "-P", "-c", CALL, built.folder / "launches.so", path],
            input=json.dumps([("iterative_pinv", 0, (3, m, 6), ()) for m in (96, 100)]),
            env=built.environment(13000) | {"FAKE_CUDA_PTX": compiled_for},
            capture_output=True,
            text=True,
            check=True,
        )
        expected = [f"{scratch} 256 {x} 6" if x.startswith("0") else f"{wide} 512 {x} 6" for x in launches]
        assert done.stdout.splitlines()[1:] == expected


@pytest.mark.requires("ort", "nvcc")
def test_the_library_of_this_installation_looks_at_the_driver(built: Built) -> None:
    library = find_library()
    assert library is not None
    assert library.info is not None
    assert library.info.has_cuda, "build it with: effexport plugins build --cuda"
    compiled_by = library.info.nvcc.partition("release ")[2].partition(",")[0]  # type: ignore[union-attr]
    older = 1000 * (int(compiled_by.partition(".")[0]) - 1)
    cpu, cuda, problem = built.registered(library.path, older).stdout.split(" ", 2)
    assert int(cpu) > 20
    assert int(cuda) == 0
    assert problem.startswith(f"its CUDA kernels were compiled by CUDA {compiled_by}, and the NVIDIA driver here is ")
    first, *loaded = built.registered(library.path, older + 1000).stdout.splitlines()
    on_cpu_alone = sum(len(op.element_types) for op in OPS.values() if not op.cuda)
    assert first == f"{cpu} {int(cpu) - on_cpu_alone} "
    assert len(loaded) == len(CUDA_OPS)
    code = "import sys, onnxruntime as ort; ort.SessionOptions().register_custom_ops_library(sys.argv[1])"
    command = [sys.executable, "-P", "-c", code, library.path]
    done = subprocess.run(command, env=built.environment(older), capture_output=True, text=True, check=True)
    assert done.stderr.count("has kernels for the CPU only here, because its CUDA kernels") == 1
