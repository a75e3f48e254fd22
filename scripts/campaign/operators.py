"""Single operators in ONNX Runtime, with the kernel library compiled under AddressSanitizer and UBSan.

A valid call must give what its contract's formula gives. Any other must be refused with the operator's name, or
run: nothing may read or write beyond its memory, overflow, crash, or take longer than HANGS_AFTER_S.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

from kernel_sessions import run_values, session

from campaign.commands import Case, Tally, in_workers
from campaign.operator_calls import Array, Call, drawn

HANGS_AFTER_S = 20
FLAGS = "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
# A request beyond this fails as it would on a machine that has no such memory. The runtime's own memory is not checked
# for leaks: Python never frees all of it.
ASAN_OPTIONS = {
    "allocator_may_return_null": 1,
    "max_allocation_size_mb": 4000,
    "quarantine_size_mb": 64,
    "max_malloc_fill_size": 1 << 30,  # what a kernel leaves unwritten is nothing that could be right
    "detect_leaks": 0,
    "alloc_dealloc_mismatch": 0,  # native/throwing_new.cc has operator delete free what malloc gave
    "verify_asan_link_order": 0,
    "handle_segv": 1,
    "abort_on_error": 1,
}


def run(cases: int, seed: int, folder: Path) -> Tally:
    """Call operators with the sanitised library, which is compiled if it is not kept from an earlier run."""
    with mock.patch.dict(os.environ, sanitized_environment(sanitized_library(), folder)):
        tally = in_workers(cases, caller, folder, seed)
    add_reports(tally, folder)
    return tally


def sanitized_library() -> Path:
    """The kernel library by the same CMakeLists.txt, with other flags."""
    from kept import kept, native_sources

    from effexport.plugins.building import sources
    from effexport.plugins.building.build import find_headers
    from effexport.plugins.building.library import LIBRARY_NAME
    from effexport.plugins.building.toolchain import examine_compiler, require_cmake

    headers, compiler = find_headers(), examine_compiler()

    def compile_to(folder: Path) -> None:
        configure = [
            *(str(require_cmake()), "-S", str(sources.FOLDER), "-B", str(folder), "-DCMAKE_BUILD_TYPE=None"),
            *(f"-DCMAKE_CXX_COMPILER={';'.join(compiler.command)}", f"-DCMAKE_CXX_FLAGS={FLAGS}"),
            f"-DEFFEXPORT_ORT_INCLUDE_DIR={headers.folder}",
        ]
        for command in (configure, [configure[0], "--build", str(folder), "--parallel", "2"]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr

    decided_by = [compiler.version, headers.sha256, FLAGS, sources.FOLDER / "CMakeLists.txt"]
    return kept("native/sanitized_library", [*decided_by, *native_sources()], compile_to) / LIBRARY_NAME


def sanitized_environment(library: Path, folder: Path) -> dict[str, str]:
    """Environment variables of a Python process that loads the library, and writes reports to a folder."""
    from kept import NATIVE, kept_program

    options = ("-std=c++17", "-O1", "-shared", "-fPIC", NATIVE[1] / "throwing_new.cc")
    throwing_new = kept_program("native/throwing_new", ("c++",), *options)
    runtimes = [
        subprocess.run(["c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")
    ]
    asan = ":".join(f"{name}={value}" for name, value in ASAN_OPTIONS.items())
    return {
        "EFFEXPORT_LIBRARY": str(library),
        "LD_PRELOAD": ":".join([str(throwing_new), *runtimes]),
        "ASAN_OPTIONS": f"{asan}:log_path={folder}/report",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={folder}/report",
        # its thread (1.31) reads texts that the process frees as it ends
        "ORT_DISABLE_TELEMETRY": "1",
    }


def add_reports(tally: Tally, folder: Path) -> None:
    """Add the beginning of each report of a sanitizer, with the case in which it was written."""
    for report in sorted(folder.glob("report.*")):
        lines = [line.strip() for line in report.read_text(errors="replace").splitlines()]
        what = next((line for line in lines if "ERROR" in line or "runtime error" in line), None)
        if what is None:  # warnings about memory that there is not
            continue
        frames = [line for line in lines if line.startswith("#") and "effexport" in line][:3]
        case = folder / f"case.{report.suffix[1:]}"
        tally.problems.append(f"case {case.read_text().strip() if case.exists() else '?'}: {what} {' '.join(frames)}")


def caller(folder: Path, seed: int, number: int) -> Case:
    """The function of a case, in one worker."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it computes
    note = os.open(folder / f"case.{os.getpid()}", os.O_CREAT | os.O_RDWR)

    def case(index: int) -> str:
        os.pwrite(note, f"{index:<12}".encode(), 0)
        call = drawn(seed, index)
        dice = random.Random(f"model-{seed}-{index}")
        signal.alarm(HANGS_AFTER_S)
        try:
            results = kernel_results(call, dice)
        finally:
            signal.alarm(0)
        if isinstance(results, str):
            assert call.harm, f"{describe(call)}: a valid call was refused: {results}"
            assert call.op in results, f"{describe(call)}: refused without the operator's name: {results}"
            return "refused"
        if call.case is None:
            return "ran (undefined input)"
        compare(call, results)
        return "equal to the formula"

    return case


def describe(call: Call) -> str:
    shapes = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in call.feeds.items())
    return f"{call.op}({shapes}) {dict(call.attributes)}{f' [{call.harm}]' if call.harm else ''}"[:600]


def kernel_results(call: Call, dice: random.Random) -> list[Array] | str:
    """Results of the kernel, or the message with which the call was refused."""
    from onnxruntime.capi import onnxruntime_pybind11_state as ort

    refusals = (ort.Fail, ort.InvalidArgument, ort.InvalidGraph, ort.NotImplemented, ort.RuntimeException)
    try:
        opened = opened_session(model(call, dice.choice(("unknown", "symbols", "sizes"))))
        return results_of(opened, call)
    except (*refusals, ort.InvalidProtobuf, ort.EPFail) as error:
        return str(error)


def results_of(opened: Any, call: Call) -> list[Array]:
    return run_values(opened, {name: array for name, array in call.feeds.items() if array.dtype != object})


def compare(call: Call, results: list[Array]) -> None:
    """Raise AssertionError unless the results of a valid call are those of its contract."""
    from implementations import within_limit

    from effexport.plugins.contract import load_contract
    from effexport.plugins.ops import OPS

    assert call.case is not None
    contract = load_contract(OPS[call.op])
    expected = contract.exact(call.case, contract.inputs(call.case, "cpu")).values()
    for name, result, wanted in zip(call.outputs, results, expected, strict=False):
        assert within_limit(contract, call.case, result, wanted), f"{describe(call)}: {name} differs from the formula"


def model(call: Call, dims: str) -> bytes:
    """A model of one node. dims: whether the shapes of its inputs are unknown, symbols, or those of this call."""
    from onnx import AttributeProto, TensorProto, helper

    from effexport.plugins.ops import DOMAIN, OPS, OPSET_VERSION

    names = ["" if array.dtype == object else name for name, array in call.feeds.items()]
    node = helper.make_node(call.op, names, list(call.outputs), domain=DOMAIN)
    for name, value in call.attributes.items():
        kind = AttributeProto.INTS if value == [] else None  # which does not follow from an empty list
        node.attribute.append(helper.make_attribute(name, value, attr_type=kind))
    inputs = []
    for name, array in call.feeds.items():
        if array.dtype == object:
            continue
        shape = {"unknown": None, "symbols": [f"{name}{i}" for i in range(array.ndim)], "sizes": array.shape}[dims]
        inputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape))
    element = inputs[0].type.tensor_type.elem_type if inputs else TensorProto.FLOAT
    types = {"T": element, "int32": TensorProto.INT32, "float32": TensorProto.FLOAT}
    outputs = [
        helper.make_tensor_value_info(name, types[OPS[call.op].type_of_output(index)], None)
        for index, name in enumerate(call.outputs)
        if name
    ]
    graph = helper.make_graph([node], "one", inputs, outputs)
    made = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, OPSET_VERSION)],
        ir_version=10,
    )
    return bytes(made.SerializeToString())


@functools.lru_cache(maxsize=100)
def opened_session(content: bytes) -> Any:
    """A session that takes each block of memory from the system by itself, so that its ends are known."""
    return session(content, threads=1 if len(content) % 3 else 2, level=4)
