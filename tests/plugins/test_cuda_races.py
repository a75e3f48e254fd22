"""Races in the CUDA kernels: the emulation under ThreadSanitizer, where only barriers order what threads do.

The kernels must have none. Then every barrier, wait for copies and atomic operation of the sources is left out, one at
a time, and each time there must be one. native/races.cc has small kernels whose races are known.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cuda_kernels import NATIVE, PLUGINS, ROOT, build, depends_on_architecture
from cuda_programs import compile_to, sanitized_programs
from gpu import building
from gpu.calls import write_calls
from gpu.device import FEW_BLOCKS

from effexport.plugins.contract import Case, load_contract
from effexport.plugins.ops import CUDA_OPS

OPTIONS = ("-O1", "-g1", "-fsanitize=thread")
NEWEST, OLDEST = 800, 750  # the paths with and without asynchronous copies and bfloat16 on tensor cores
RACE = 66
TSAN_OPTIONS = f"halt_on_error=1 exitcode={RACE} history_size=0"


@dataclass(frozen=True)
class Place:
    """A line of the kernels' sources that orders what threads do."""

    source: str  # in the folder of the plugins
    line: int
    code: str

    @property
    def name(self) -> str:
        return f"{self.source}:{self.line}"

    @property
    def is_for_the_compiler(self) -> bool:
        """True if it only keeps the compiler from moving loads across it, and need not order anything."""
        return "or the compiler loads" in self.code


ORDERING = re.compile(r"\b(?:__sync\w+|atomic\w+|ptx::wait_for_copies<\w+>)\(")


def places() -> Iterator[Place]:
    defined = [PLUGINS / "native" / name for name in ("ptx.h", "cuda_host.h")]
    for path in sorted(PLUGINS.glob("*/*")):
        if path.suffix not in (".cu", ".h") or path in defined:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if found := ORDERING.findall(line.partition("//")[0]):
                assert len(found) == 1, f"{path}:{number}: expected one in a line, or they cannot be told apart"
                yield Place(path.relative_to(PLUGINS).as_posix(), number, line.strip())


PLACES = tuple(places())


def included(source: Path) -> set[Path]:
    """A source and the headers that it includes, and those that these include."""
    found, left = set(), [source]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        names = re.findall(r'^#include "([\w/]+\.h)"', path.read_text(encoding="utf-8"), re.MULTILINE)
        left += [PLUGINS / name for name in names]
    return found


BY_NAME = {op.torch_name: op for op in CUDA_OPS.values()}
CONTRACTS = {name: load_contract(op) for name, op in BY_NAME.items()}
SOURCES = {name: included(PLUGINS / name / "kernel_cuda.cu") for name in CONTRACTS}
# One of a launch, one of atomic counts, and one with the attention core: to compile one takes up to a minute.
RACED_IN_EVERY_RUN = ("segment_means", "lsh_sort", "masked_attention")
# Those of the shortest sources take least time: in them, races of shared headers are looked for first.
RACED = {
    name: CONTRACTS[name].raced
    for name in sorted(
        CONTRACTS,
        key=lambda name: (name not in RACED_IN_EVERY_RUN, sum(path.stat().st_size for path in SOURCES[name])),
    )
}


def users_of(place: Place) -> list[str]:
    return [op for op in RACED if PLUGINS / place.source in SOURCES[op]]


def programs(op: str, architecture: int) -> Path:
    return sanitized_programs(f"races/sm_{architecture // 10}/{op}", options_of(architecture), (op,))


def options_of(architecture: int) -> tuple[str, ...]:
    return (*OPTIONS, f"-DEFFEXPORT_EMULATED={architecture}")


def run_sanitized(*command: str | Path, without: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program that has ThreadSanitizer in it. without: the place that it leaves out."""
    environment = {**os.environ, "TSAN_OPTIONS": TSAN_OPTIONS, "EFFEXPORT_WITHOUT": without}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if "unexpected memory mapping" in done.stderr:  # addresses more random than it supports
        plain = ["setarch", "-R", *command]
        done = subprocess.run(plain, capture_output=True, text=True, check=False, env=environment)
    return done


def race(folder: Path, calls: Path, op: str, cases: Sequence[Case], without: str = "") -> str:
    """The first report of ThreadSanitizer, which is a crash at worst if a place is left out, or an empty text after all
    calls have run. `calls` is overwritten."""
    named = [(op, CONTRACTS[op], case) for case in cases]
    write_calls(calls, named)
    done = run_sanitized(folder / "driver", folder / "kernels.so", calls, str(FEW_BLOCKS), without=without)
    # without a barrier, an address may be read before it is written
    reports = ["WARNING: ThreadSanitizer: data race"] + ["ThreadSanitizer:DEADLYSIGNAL"] * bool(without)
    if done.returncode == RACE and any(report in done.stderr for report in reports):
        return done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{len(named)} calls"
    return ""


@pytest.mark.slow
@pytest.mark.requires("native", "torch")
@pytest.mark.parametrize(
    ("op", "architecture"),
    [
        pytest.param(
            op,
            architecture,
            id=f"{op}-sm_{architecture // 10}",
            marks=[pytest.mark.soak] * (i > 0 or op not in RACED_IN_EVERY_RUN),
        )
        for op in RACED
        for i, architecture in enumerate((NEWEST, *[OLDEST] * depends_on_architecture(BY_NAME[op])))
    ],
)
def test_a_kernel_has_no_races(op: str, architecture: int, tmp_path: Path) -> None:
    assert race(programs(op, architecture), tmp_path / "calls", op, RACED[op]) == ""


def test_barriers_of_all_kinds_are_found() -> None:
    kinds = {ORDERING.search(place.code)[0] for place in PLACES}
    assert kinds == {"__syncthreads(", "__syncwarp(", "atomicAdd(", "ptx::wait_for_copies<kLeft>("}
    assert "native" in {place.source.split("/")[0] for place in PLACES} <= {*RACED, "native"}


@pytest.mark.slow
@pytest.mark.requires("native", "torch")
@pytest.mark.parametrize(
    "place",
    # of each file of those, one; the soak run leaves out every one
    [
        pytest.param(
            place,
            id=place.name,
            marks=[pytest.mark.soak]
            * (place.source in (p.source for p in PLACES[:i]) or users_of(place)[0] not in RACED_IN_EVERY_RUN),
        )
        for i, place in enumerate(PLACES)
    ],
)
def test_what_orders_threads_is_missed_if_it_is_left_out(place: Place, tmp_path: Path) -> None:
    most = 1 if place.is_for_the_compiler else None  # that one is in float32
    reports = (
        race(programs(op, NEWEST), tmp_path / "calls", op, RACED[op][:most], place.name) for op in users_of(place)
    )
    if place.is_for_the_compiler:
        assert "".join(reports) == ""
        return
    assert any(reports), f"{place.name} can be left out: {place.code}"


@pytest.mark.slow
@pytest.mark.requires("native", "torch")
def test_a_barrier_that_is_not_in_the_source_is_missed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op = "segment_means"
    copies = {}
    for name, folder in {"PLUGINS": PLUGINS, "EMULATION": NATIVE, "NATIVE": building.NATIVE}.items():
        copies[name] = tmp_path / folder.relative_to(ROOT)
        shutil.copytree(folder, copies[name])
        monkeypatch.setattr(building, name, copies[name])
    monkeypatch.setattr(building, "ROOT", tmp_path)
    source = copies["PLUGINS"] / op / "kernel_cuda.cu"
    text = source.read_text(encoding="utf-8")
    planted = text.replace("__syncthreads();  // the next segment", "// the next segment")
    assert planted != text
    source.write_text(planted, encoding="utf-8")
    made = tmp_path / "made"
    made.mkdir()
    compile_to(made, options_of(NEWEST), (op,))
    assert race(made, tmp_path / "calls", op, RACED[op])


KNOWN = {
    "global/two_blocks": True,
    "global/two_launches": False,
    "shared/two_blocks": False,
    "shared/no_barrier": True,
    "shared/warp": False,
    "shared/two_warps": True,
    "shared/shuffle": True,
    "shared/between_barriers": True,
    "shared/between_warp_barriers": True,
    "shared/write_after_reading": False,
    "atomic/count": False,
    "atomic/read": True,
    "copy/own": False,
    "copy/too_early": True,
    "copy/exchange": False,
    "copy/no_barrier": True,
    "copy/no_wait": True,
    "copy/wait_after_barrier": True,
    "copy/first_group": False,
    "copy/second_group": True,
    "copy/over": True,
    "matrices/rows": True,
    "matrices/barrier": False,
    "matrices/own_elements": True,
}


@pytest.mark.slow
@pytest.mark.requires("native")
@pytest.mark.parametrize("kernel", KNOWN)
def test_the_races_of_small_kernels_are_reported_under_every_schedule(kernel: str) -> None:
    program = build("races", *OPTIONS)
    for seed in range(4):
        done = run_sanitized(program, kernel, str(seed))
        assert (done.returncode, done.stdout) == ((RACE, "") if KNOWN[kernel] else (0, "done\n")), done.stderr
