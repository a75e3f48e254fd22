"""The CPU kernels under AddressSanitizer and UBSan, with every instruction set of this machine.

A child process runs tests again: in ONNX Runtime, with the kernel library of the same CMakeLists.txt and other flags,
and every array in memory of its own.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from campaign import operators
from cuda_kernels import SANITIZERS, build

from effexport.base.machine import CPU_INFO, processor_from_file

ROOT = Path(__file__).parents[2]
FLAGS = processor_from_file(CPU_INFO, platform.machine()).flags
# What a set needs, as the kernel of Linux names it.
INSTRUCTIONS = {
    "avx512_bf16": {"avx512f", "avx512bw", "avx512_bf16"},
    "avx512_vnni": {"avx512f", "avx512bw", "avx512_vnni"},
    "avx_vnni": {"avx2", "fma", "avx_vnni"},
    "avx512": {"avx512f", "avx512bw"},
    "avx2": {"avx2", "fma"},
    "baseline": set(),
}
# Memory that was not written has NaN in every type of floats.
POISONED = {"ASAN_OPTIONS": "max_malloc_fill_size=1000000000:malloc_fill_byte=255"}
AVAILABLE = [name for name, needed in INSTRUCTIONS.items() if needed <= FLAGS]

pytestmark = [pytest.mark.slow, pytest.mark.requires("native", "onnx", "ort", "torch"), pytest.mark.xdist_group("asan")]


def run_again(instructions: str, folder: Path, *selected: str) -> str:
    """The output of pytest for the selected tests."""
    environment = os.environ | operators.sanitized_environment(operators.sanitized_library(), folder)
    environment |= {"EFFEXPORT_TEST_INSTRUCTIONS": instructions, "EFFEXPORT_REQUIRE": "", "PYTHONMALLOC": "malloc"}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *selected], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    reports = "".join(path.read_text(errors="replace") for path in folder.glob("report*"))
    assert (done.returncode, reports) == (0, ""), done.stdout[-10_000:] + done.stderr[-3000:] + reports[:5000]
    return done.stdout


# the cases of the fast part with the widest vectors; with the others, and every case, in the soak run
@pytest.mark.parametrize(
    ("instructions", "marks"),
    [
        (AVAILABLE[0], "not slow and not soak"),
        *(pytest.param(instructions, "", marks=pytest.mark.soak) for instructions in AVAILABLE),
    ],
)
def test_the_kernels_are_right_and_clean_with_every_instruction_set(
    instructions: str, marks: str, tmp_path: Path
) -> None:
    files = [f"tests/plugins/test_{name}.py" for name in ("contract", "aft_simple_attention")]
    selected = "kernel and (computes_the_formula or any_element or nearest_even or two_units)"
    output = run_again(instructions, tmp_path, *files, "-k", selected, "-m", marks)
    assert " passed" in output
    assert "skipped" not in output


# Their pages promise the bits of AVX2 on a machine with AVX-512, too; of PackedLinear, without AVX512-BF16.
SAME_BITS = {
    ("avx512", "avx2"): ("AFTSimpleAttention", "AFTWindowAttention", "IterativePinv", "PackedLinear"),
    ("avx512_vnni", "avx_vnni", "avx512", "avx2"): ("QuantizedLinear",),
}
DIGESTS = """
import hashlib, sys
from implementations import implementation
from effexport.plugins.contract import load_contract
from effexport.plugins.ops import OPS
for name in sys.argv[1:]:
    contract = load_contract(OPS[name])
    for case in (*contract.cases, *contract.small):
        answers = implementation(name, "kernel").answers(case, contract.inputs(case, "cpu"))
        print(name, case.name, *(hashlib.sha256(x.tobytes()).hexdigest() for x in answers))
"""


@pytest.mark.parametrize("sets", SAME_BITS, ids=" ".join)
def test_vectors_of_every_width_give_the_same_bits(sets: tuple[str, ...]) -> None:
    """On a machine without AVX-512 this only says that a limit leaves AVX2 as it is."""
    printed = {}
    for instructions in sets:
        environment = os.environ | {
            "EFFEXPORT_TEST_INSTRUCTIONS": instructions,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-c", DIGESTS, *SAME_BITS[sets]]
        printed[instructions] = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout
    assert len(set(printed.values())) == 1
    assert all(name in printed["avx2"] for name in SAME_BITS[sets])


@pytest.mark.parametrize("best", ["amx", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx512", "avx2", "baseline"])
@pytest.mark.parametrize("program", ["linear_layers", "bfloat16_attention"])
def test_products_of_coarse_numbers_are_right_with_every_instruction_set(program: str, best: str) -> None:
    """AMX is emulated, so that it says the same on any processor; on one with tiles, other tests run them."""
    program = build(program, *SANITIZERS, "-DEFFEXPORT_EMULATED_AMX", "-Wno-psabi")
    subprocess.run([program, best], env=os.environ | POISONED, check=True)


def test_every_number_of_a_half_type_is_rounded_to_nearest_even() -> None:
    subprocess.run([build("element_types", *SANITIZERS)], check=True)
