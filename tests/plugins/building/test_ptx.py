"""PTX for the TensorRT plugins: what it declares, where it is kept, and the errors if it cannot be made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from effexport.plugins.building import ptx
from effexport.plugins.building.library import LibraryError
from effexport.plugins.building.toolchain import find_nvcc
from effexport.plugins.ops import OPS

OP = OPS["LSHSort"]
SOME_PTX = ".version 8.0\n.target sm_75\n.address_size 64\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EFFEXPORT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ptx"


class Compiler:
    """Counts how often it is asked, and answers the same every time."""

    def __init__(self, answer: str = SOME_PTX, ptxas: Path | None = None) -> None:
        self.answer, self.ptxas, self.calls, self.version = answer, ptxas, 0, "1"

    def compile(self, source: Path, architecture: int) -> str:
        assert source.is_file()
        self.calls += 1
        return self.answer

    def __call__(self) -> ptx.PtxCompiler:
        return ptx.PtxCompiler("a compiler", ("some", self.version), self.compile, self.ptxas)


@pytest.fixture
def compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(ptx, "find_ptx_compiler", made)
    return made


def test_ptx_is_compiled_once(compiler: Compiler, cache: Path) -> None:
    assert ptx.ptx_from_source(OP, 75) == ptx.ptx_from_source(OP, 75) == SOME_PTX
    assert compiler.calls == 1
    assert [path.suffix for path in cache.iterdir()] == [".ptx"]


def test_another_compiler_operator_or_architecture_compiles_again(compiler: Compiler, cache: Path) -> None:
    ptx.ptx_from_source(OP, 75)
    ptx.ptx_from_source(OP, 80)
    compiler.version = "2"
    ptx.ptx_from_source(OP, 75)
    ptx.ptx_from_source(OPS["IterativePinv"], 75)
    assert compiler.calls == 4
    assert len(list(cache.iterdir())) == 4


def test_a_changed_header_compiles_again(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in ptx.kernel_sources(OP).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(ptx.sources, "FOLDER", tmp_path)
    ptx.ptx_from_source(OP, 75)
    with (tmp_path / "lsh_sort" / "kernel.h").open("a") as stream:
        stream.write("// changed\n")
    ptx.ptx_from_source(OP, 75)
    assert compiler.calls == 2


def test_the_sources_of_an_operator_are_its_kernel_and_our_headers() -> None:
    assert list(ptx.kernel_sources(OPS["IterativePinv"])) == [
        "iterative_pinv/kernel.h",
        "iterative_pinv/kernel_cuda.cu",
        "iterative_pinv/scratch.h",
        "iterative_pinv/tensor_cores.h",
        "native/cuda.h",
        "native/element_types.h",
        "native/ptx.h",
        "native/split_halves.h",
        "native/tile.h",
    ]
    assert list(ptx.kernel_sources(OP))[:2] == ["lsh_sort/kernel.h", "lsh_sort/kernel_cuda.cu"]


@pytest.mark.parametrize("damage", [b"", b"half", SOME_PTX.encode(), b"\xff\xfe"])
def test_a_damaged_cache_entry_is_made_again(compiler: Compiler, cache: Path, damage: bytes) -> None:
    ptx.ptx_from_source(OP, 75)
    (entry,) = cache.iterdir()
    intact = entry.read_bytes()
    entry.write_bytes(damage)
    assert ptx.ptx_from_source(OP, 75) == SOME_PTX
    assert compiler.calls == 2
    assert entry.read_bytes() == intact


def test_a_changed_cache_entry_is_made_again(compiler: Compiler, cache: Path) -> None:
    ptx.ptx_from_source(OP, 75)
    (entry,) = cache.iterdir()
    entry.write_bytes(entry.read_bytes().replace(b"sm_75", b"sm_90"))
    assert ptx.ptx_from_source(OP, 75) == SOME_PTX
    assert compiler.calls == 2


def test_a_cache_that_cannot_be_written_is_named(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EFFEXPORT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(LibraryError, match=r"the cache cannot be used.*Set EFFEXPORT_CACHE_DIR"):
        ptx.ptx_from_source(OP, 75)


@pytest.mark.parametrize("version", ["6.3", "8.0", "9.0"])
def test_ptx_that_is_old_enough_stays_as_it_is(version: str) -> None:
    text = SOME_PTX.replace("8.0", version)
    assert ptx.with_isa_at_most((9, 0), text, Compiler()(), 75) == text


def test_ptx_that_is_too_new_is_refused_where_nothing_can_check_an_older_version() -> None:
    newer = SOME_PTX.replace("8.0", "9.3")
    with pytest.raises(LibraryError, match=r"a compiler makes PTX 9\.3; expected 9\.0 or older.*no ptxas.*13\.0"):
        ptx.with_isa_at_most((9, 0), newer, Compiler()(), 75)


def test_ptx_without_a_version_is_refused() -> None:
    with pytest.raises(LibraryError, match=r"PTX without a \.version"):
        ptx.with_isa_at_most((9, 0), ".target sm_75\n", Compiler()(), 75)


def test_without_nvcc_and_nvrtc_both_are_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx, "choose_nvcc", lambda: None)
    # an import of a name that is None fails, as for a package that is not installed
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(LibraryError) as raised:
        ptx.ptx_from_source(OP, 75)
    message = str(raised.value)
    assert message.startswith("the kernels of TensorRT's plugins cannot be compiled: no nvcc was found, and NVRTC ")
    assert "EFFEXPORT_NVCC" in message
    assert "pip install cuda-bindings" in message
    assert not cache.exists()


def test_an_nvcc_that_is_named_and_not_there_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFEXPORT_NVCC", str(tmp_path / "absent"))
    with pytest.raises(LibraryError, match=r"EFFEXPORT_NVCC is '.*absent', which is not a program on this machine"):
        ptx.find_ptx_compiler()


@pytest.mark.parametrize(
    ("compute_capabilities", "architecture"),
    [([75], 75), ([80], 80), ([86, 89], 80), ([90], 80), ([120], 80), ([121, 75], 75), ([120, 80], 80)],
)
def test_the_oldest_gpu_decides_what_ptx_may_use(compute_capabilities: list[int], architecture: int) -> None:
    assert ptx.ptx_architecture(compute_capabilities) == architecture


def test_a_gpu_that_is_older_than_all_ptx_is_named() -> None:
    with pytest.raises(LibraryError, match="the GPU is SM 70; the kernels expect SM 75 or later"):
        ptx.ptx_architecture([90, 70])


@pytest.mark.parametrize(
    ("isa", "driver"),
    # of the release notes in the PTX ISA
    [((7, 8), "11.8"), ((8, 0), "12.0"), ((8, 5), "12.5"), ((8, 6), "12.7"), ((8, 8), "12.9"), ((9, 0), "13.0")],
)
def test_ptx_needs_a_driver_of_the_release_that_brought_its_instruction_set(isa: tuple[int, int], driver: str) -> None:
    target = ptx.ptx_target(80, isa)
    assert target == ptx.PtxTarget(80, f"{isa[0]}.{isa[1]}", driver)
    assert str(target) == f"SM 80 or later, and a driver of CUDA {driver} or later (PTX {isa[0]}.{isa[1]})"


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)
    return path


def test_an_nvcc_that_fails_is_quoted(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'case "$*" in *--version*) echo release 13.0 ;; *) echo "gcc 99 is not supported"; exit 1 ;; esac\n'
    monkeypatch.setenv("EFFEXPORT_NVCC", str(program(tmp_path / "nvcc", script)))
    with pytest.raises(LibraryError, match=r"(?s)does not compile kernel_cuda.cu to PTX:.*gcc 99 is not supported"):
        ptx.ptx_from_source(OP, 75)
    assert list(cache.iterdir()) == []


def test_an_nvcc_that_does_not_run_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFEXPORT_NVCC", str(program(tmp_path / "nvcc", "echo broken; exit 3\n")))
    with pytest.raises(LibraryError, match=r"(?s)does not run:.*broken.*EFFEXPORT_NVCC"):
        ptx.find_ptx_compiler()


@pytest.mark.requires("nvcc")
@pytest.mark.xdist_group("nvcc")
def test_the_isa_of_a_newer_nvcc_is_lowered_where_ptxas_agrees(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = find_nvcc().resolve()
    # a compiler as of next year: it writes its own version, whatever the code needs
    newer = 'for last; do :; done\n[ ! -f "$last" ] || sed -i "s/^.version.*/.version 9.7/" "$last"\n'
    script = f'"{real}" "$@" || exit 1\n{newer}'
    monkeypatch.setenv("EFFEXPORT_NVCC", str(program(tmp_path / "nvcc", script)))
    (tmp_path / "ptxas").symlink_to(real.parent / "ptxas")
    compiler = ptx.find_ptx_compiler()
    assert ptx.isa_of(compiler.compile(ptx.sources.FOLDER / OP.cuda_source, 75)) == (9, 7)
    assert ptx.isa_of(ptx.ptx_from_source(OP, 75)) == (9, 0)


@pytest.mark.requires("nvcc")
@pytest.mark.xdist_group("nvcc")
def test_the_isa_is_not_lowered_where_the_code_needs_a_newer_one(cache: Path) -> None:
    compiler = ptx.find_ptx_compiler()
    text = compiler.compile(ptx.sources.FOLDER / OP.cuda_source, 75)
    # sm_75 came with 6.3
    with pytest.raises(LibraryError, match=r"(?s)expected 6\.2 or older.*it cannot be declared so:.*sm_75"):
        ptx.with_isa_at_most((6, 2), text, compiler, 75)
