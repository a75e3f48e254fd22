"""docs/gpu_budget.md: what is read of compiled kernels, and whether the page is what its sources give."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cuda_kernels import plugin_entries
from gpu import budget, runs
from gpu.compiled import MULTIPROCESSOR, Usage, counts_of, find_nvdisasm, loops_of, machine_code, parse_usage
from gpu.device import SetupError
from kernel_ptx import kept_usages

from effexport.plugins.contract import load_contract
from effexport.plugins.ops import CUDA_OPS

PAGE = Path(__file__).parents[2] / "docs" / "gpu_budget.md"


@pytest.mark.parametrize(
    ("architecture", "registers", "threads", "shared_bytes", "blocks"),
    [
        # limits: shared memory, registers, warps, blocks
        (90, 64, 256, 48 << 10, 4),
        (75, 64, 256, 48 << 10, 1),
        (90, 128, 256, 0, 2),
        (90, 168, 128, 0, 3),
        (120, 32, 256, 0, 6),
        (90, 16, 32, 0, 32),
    ],
)
def test_as_many_blocks_fit_as_the_programming_guide_says(
    architecture: int, registers: int, threads: int, shared_bytes: int, blocks: int
) -> None:
    usage = Usage(registers, 0, 0)
    assert MULTIPROCESSOR[architecture].resident_blocks(usage, threads, shared_bytes) == blocks


def test_what_ptxas_says_is_read() -> None:
    text = """ptxas info    : Compiling entry function 'effexport_x' for 'sm_90'
ptxas info    : Function properties for effexport_x
    16 bytes stack frame, 24 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size
"""
    assert parse_usage(text) == {("effexport_x", 90): Usage(registers=40, shared_bytes=0, spilled_bytes=24)}


MACHINE_CODE = """\t.section\t.text.effexport_x,"ax",@progbits
        /*0000*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
.L_x_0:
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   LDSM.16.MT88.4 R4, [R8] ;
        /*0030*/              @!P0 HMMA.1688.F32 R4, R8, R12, R4 ;
        /*0040*/                   FFMA R0, R1.reuse, R2, R3 ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   LDS.64 R4, [R8] ;
        /*0070*/                   MUFU.EX2 R1, R2 ;
        /*0080*/               @P2 BRA `(.L_x_0) ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   BRA `(.L_x_3);
\t.section\t.text.effexport_y,"ax",@progbits
        /*0000*/                   IADD3 R0, PT, PT, R1, R2, RZ ;
        /*0010*/                   EXIT ;
"""


def test_instructions_of_loops_are_counted_by_pipe() -> None:
    code = machine_code(MACHINE_CODE)
    loops = {(loop.depth, loop.instructions) for loop in loops_of(code["effexport_x"])}
    assert loops == {(0, frozenset({1, 6, 7, 8})), (1, frozenset({2, 3, 4, 5})), (0, frozenset({10}))}
    found = {kernel: Usage(0, 0, 0, **counts_of(own)) for kernel, own in code.items()}
    main = {"issued": 4, "floats": 1, "accesses": 4, "loop_products": 1}
    assert found["effexport_x"] == Usage(0, 0, 0, tensor_products=2, **main)
    assert found["effexport_y"] == Usage(0, 0, 0, issued=2, integers=1)
    assert [usage.busiest for usage in found.values()] == ["accesses", "issued"]


def test_the_busiest_takes_most_clocks() -> None:
    counts = {"issued": 100, "floats": 60, "integers": 20}
    assert Usage(0, 0, 0, **counts).busiest == "issued"
    for more in ({"integers": 51}, {"special": 13}, {"accesses": 26}, {"loop_products": 19}):
        assert Usage(0, 0, 0, **(counts | more)).busiest in more


def test_a_missing_nvdisasm_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "nvidia" else object())
    with pytest.raises(SetupError, match="pip install nvidia-cuda-nvdisasm"):
        find_nvdisasm()
    monkeypatch.setattr("sys.argv", ["budget.py"])
    assert budget.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_times_are_those_of_the_last_run_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    assert budget.measurements() == ("", {})
    late = {"op": "lsh_sort", "case": "another", "problem": "no time was left"}
    for date, us in (("2026-01-02", 12.5), ("2025-12-31", 99.0)):
        timing = {"op": "lsh_sort", "case": "a case", "readings": {"kernel": {"us": us}}}
        stage = {"hardware": "NVIDIA H200", "date": date, "details": {"timings": [timing, late]}}
        (tmp_path / f"{date}-h200").mkdir()
        (tmp_path / f"{date}-h200" / "timing.json").write_text(json.dumps(stage), encoding="utf-8")
    assert budget.measurements() == ("NVIDIA H200 on 2026-01-02", {("lsh_sort", "a case"): 12.5})


def test_the_page_has_a_row_for_every_kernel_and_every_timed_case() -> None:
    text = PAGE.read_text(encoding="utf-8")
    kernels = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert kernels >= {entry.removeprefix("effexport_") for op in CUDA_OPS.values() for entry in plugin_entries(op)}
    cases = [(op.torch_name, timed.case.name) for op in CUDA_OPS.values() for timed in load_contract(op).timed]
    assert re.findall(r"^\| `(\w+)` (\w+ \d[^|]*) \|", text, re.MULTILINE) == cases


@pytest.mark.slow
@pytest.mark.requires("nvcc")
def test_the_page_is_what_its_sources_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "compile_kernels", kept_usages)
    assert PAGE.read_text(encoding="utf-8") == budget.page(), "stale; run python3 scripts/gpu/budget.py"
