"""docs/gpu_budget.md: what is read in machine code, what is predicted from it, and whether the page has all kernels."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cuda_kernels import ENTRIES
from gpu import budget
from gpu.compiled import MULTIPROCESSOR, Launch, Usage, find_nvdisasm, parse_usage
from gpu.device import SetupError
from gpu.prediction import Recorder, busy_us, executed
from gpu.sass import FUSED, INSTRUCTIONS, STORED, TENSOR, Code, Cost, Preferred, cost_of, parse_graphs

from effexport.plugins.gpu_check import LOADED, PRODUCTS, Work, load_gpu_check
from effexport.plugins.ops import OPS

PAGE = Path(__file__).parents[2] / "docs" / "gpu_budget.md"


def block(*instructions: str) -> str:
    """A block of the graph that nvdisasm prints."""
    lines = "".join(f"  {text} ;".replace(" ", "\\ ") + "\\l" for text in instructions)
    return f"{{<entry>.L_x_0:\\l{lines}|<exit0>\\ \\ @P0\\ BRA\\ `(.L_x_1)\\ ;\\l}}"


def graph(blocks: dict[str, tuple[str, ...]], edges: str) -> Code:
    """A kernel of these blocks, whose first one is named after it; edges: "a>b b>c"."""
    lines = ["digraph f {", 'subgraph "cluster_kernel" {']
    for name, instructions in blocks.items():
        lines += [f'"{name}"', f'[label="{block(*instructions)}"]']
    lines += ['"{}":exit0:e -> "{}":entry:n [style=solid];'.format(*edge.split(">")) for edge in edges.split()]
    return parse_graphs("\n".join([*lines, "}", "}"]))["kernel"]


HMMA = "HMMA.16816.F32 R4, R8, R12, R4"
LOAD_128, LOAD_16 = "@!P1 LDG.E.128 R4, desc[UR4][R2.64]", "@P2 LDG.E.U16 R4, desc[UR4][R2.64]"


def test_instructions_are_read_with_and_without_predicates() -> None:
    cost = cost_of(
        block(
            HMMA,
            "HMMA.1688.F32 R4, R8, R12, R4",
            "@!P0 FFMA R0, R1.reuse, |R2|, R3",
            LOAD_16,
            LOAD_128,
            "LDGSTS.E.BYPASS.128.ZFILL [R1], [R2.64], P0",
            "@P1 STG.E.64 desc[UR4][R2.64], R4",
            "UIADD3 UR4, UP0, UR5, -0x1, URZ",
            "ISETP.NE.U32.AND P0, PT, RZ, UR7, PT",
        )
    )
    assert cost == {
        INSTRUCTIONS: 10,
        TENSOR: 2048 + 1024,
        FUSED: 32,
        LOADED: 32 * (2 + 16 + 16),
        STORED: 32 * 8,
        "HMMA": 2,
        "FFMA": 1,
        "LDG": 2,
        "LDGSTS": 1,
        "STG": 1,
        "UIADD3": 1,
        "ISETP": 1,
        "BRA": 1,
    }


def once(depth: int, cost: Cost) -> float:
    return 1.0


def test_the_way_with_the_products_and_the_wide_loads_is_taken() -> None:
    code = graph(
        {"kernel": (), "wide": (LOAD_128,), "narrow": (LOAD_16,) * 8, "join": (), "work": (HMMA,), "out": ()},
        "kernel>wide kernel>narrow wide>join narrow>join join>work join>out work>out",
    )
    cost = code.executed(once, Preferred(products=True), [])
    assert (cost[LOADED], cost["LDG"], cost["HMMA"]) == (512, 1, 1)
    # each block ends with a branch
    assert cost[INSTRUCTIONS] == 1 + 2 + 1 + 2 + 1


def test_loads_that_depend_on_conditions_are_taken_or_left_out() -> None:
    code = graph({"kernel": (), "load": (LOAD_128,), "out": (HMMA,)}, "kernel>load kernel>out load>out")
    loaded = [code.executed(once, Preferred(True, loads), [])[LOADED] for loads in (True, False)]
    assert loaded == [512, 0]


NESTED = graph(
    {"kernel": (), "item": (), "tile": (LOAD_128,), "inner": (HMMA, HMMA), "latch": (), "next": (), "out": ()},
    "kernel>item item>tile tile>inner inner>inner inner>latch latch>tile latch>next next>item next>out",
)


def test_loops_are_found_in_each_other() -> None:
    cost = NESTED.executed(lambda depth, _: (1, 10, 4)[depth], Preferred(True), [])
    assert cost["HMMA"] == 10 * 4 * 2
    assert cost["LDG"] == 10
    assert NESTED.main_loop(products=True)[INSTRUCTIONS] == 3
    assert NESTED.main_loop(products=False)["LDG"] == 1


def test_inner_loops_are_repeated_until_the_work_is_done() -> None:
    launch = Launch("kernel", blocks=6, threads=128, shared_bytes=0)
    work = Work({PRODUCTS: 6 * 4 * 10 * 4 * 2 * 2048}, trips=(1, 10))
    assert executed(NESTED, launch, work)["HMMA"] == pytest.approx(6 * 4 * 10 * 4 * 2, rel=0.01)
    # without trips, all three loops are repeated equally often
    work = Work({PRODUCTS: 6 * 4 * 2 * 5**3 * 2048})
    assert executed(NESTED, launch, work)["HMMA"] == pytest.approx(6 * 4 * 2 * 5**3, rel=0.01)


def test_loads_of_some_repetitions_count_by_their_share() -> None:
    code = graph(
        {"kernel": (), "tile": (HMMA,), "load": (LOAD_128,), "latch": (), "out": ()},
        "kernel>tile tile>load tile>latch load>latch latch>tile latch>out",
    )
    launch = Launch("kernel", blocks=1, threads=32, shared_bytes=0)
    cost = executed(code, launch, Work({PRODUCTS: 8 * 2048}, loaded=2 * 512))
    assert (cost["HMMA"], cost["LDG"]) == (8, 2)


def test_the_multiprocessor_with_most_blocks_decides() -> None:
    cost = Cost({INSTRUCTIONS: 133 * 4 * 1980.0})
    one_each, two_somewhere = (Launch("kernel", blocks, 128, 0) for blocks in (132, 133))
    assert busy_us(one_each, cost * (132 / 133))[0] == pytest.approx(1)
    assert busy_us(two_somewhere, cost)[0] == pytest.approx(2)


@pytest.mark.parametrize(
    ("architecture", "registers", "threads", "shared_bytes", "blocks"),
    [
        # limits: shared memory, registers, warps, blocks
        (90, 64, 256, 48 << 10, 4),
        (75, 64, 256, 48 << 10, 1),
        (90, 128, 256, 0, 2),
        (80, 168, 128, 0, 3),
        (120, 32, 256, 0, 6),
        (80, 16, 32, 0, 32),
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


def test_a_missing_nvdisasm_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "nvidia" else object())
    with pytest.raises(SetupError, match="pip install nvidia-cuda-nvdisasm"):
        find_nvdisasm()
    monkeypatch.setattr("sys.argv", ["budget.py"])
    assert budget.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_times_of_a_gpu_are_taken_from_its_results(tmp_path: Path) -> None:
    timing = {"op": "lsh_sort", "case": "a case", "readings": {"kernel": {"us": 12.5}}}
    late = {"op": "lsh_sort", "case": "another", "problem": "no time was left"}
    stage = {"hardware": "NVIDIA H200", "details": {"timings": [timing, late]}}
    (tmp_path / "timing.json").write_text(json.dumps(stage), encoding="utf-8")
    assert budget.measurements(tmp_path) == ("NVIDIA H200", {("lsh_sort", "a case"): 12.5})
    with pytest.raises(SetupError, match="cannot be read"):
        budget.measurements(tmp_path / "nowhere")


def test_the_page_has_a_row_for_every_kernel_and_every_timed_case() -> None:
    text = PAGE.read_text(encoding="utf-8")
    kernels = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert kernels == {entry.removeprefix("effexport_") for entry in ENTRIES}
    cases = [(op.torch_name, timed.case.name) for op in OPS.values() for timed in load_gpu_check(op).timed]
    assert re.findall(r"^\| `(\w+)` (\w+ \d[^|]*) \|", text, re.MULTILINE) == cases


@pytest.mark.slow
def test_every_launch_of_a_timed_case_says_what_it_does(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for op in OPS.values():
        check = load_gpu_check(op)
        for timed in check.timed:
            launched = {launch.name for launch in recorder.launches(op, timed.case)}
            assert launched == check.work(timed.case).keys(), (op.torch_name, timed.case.name)
