"""The trial of the kernel library that `effexport doctor --load` makes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kept import kept_program
from kernel_sessions import session

import effexport.plugins
from effexport.plugins.building.build import find_headers
from effexport.plugins.building.library import Library, find_library
from effexport.plugins.building.toolchain import find_compiler
from effexport.plugins.ops import DOMAIN, OPS
from effexport.runners.ort.kernels import TOLERANCE, model_of_call, problem_of_library

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "native")
NATIVE = Path(__file__).parents[2] / "plugins" / "native"
CALLS = {name: op.load_calls().TRIAL for name, op in OPS.items()}


def faulty_library(*options: str) -> Path:
    plugins = Path(effexport.plugins.__file__).parent
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{plugins}", *options]
    headers = ["-DEFFEXPORT_CPU_ONLY", "-isystem", find_headers().folder]
    name = f"native/faulty_library{len(options)}"
    return kept_program(name, find_compiler(), *flags, *headers, NATIVE / "faulty_library.cc")


def problem_of(path: Path) -> str:
    found = problem_of_library(Library(path, outdated=False, info=None))
    assert found is not None
    return found


def test_every_operator_is_tried_in_every_type_by_the_library() -> None:
    for op, call in CALLS.items():
        model = model_of_call(op, call)
        assert [node.op_type for node in model.graph.node if node.domain == DOMAIN] == [op] * len(OPS[op].element_types)
        del model.functions[:]  # so that only kernels can run
        kernels = session(model)
        for found, right in zip(
            kernels.run(None, dict(call.inputs)), [*call.outputs.values()] * len(OPS[op].element_types), strict=True
        ):
            np.testing.assert_allclose(found, right, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("op", list(OPS))
def test_the_answers_are_those_of_the_torch_operators(op: str) -> None:
    OPS[op].load()
    call = CALLS[op]
    operator = getattr(torch.ops.effexport, OPS[op].torch_name)
    inputs = [torch.from_numpy(np.ascontiguousarray(array)) for array in call.inputs.values()]
    weights = [x.dtype == "bfloat16" for x in OPS[op].load().SIGNATURE.inputs]
    arguments = [x.bfloat16() if half else x for x, half in zip(inputs, weights, strict=True)]
    found = operator(*arguments, **call.attributes)
    for result, right in zip(found if isinstance(found, tuple) else (found,), call.outputs.values(), strict=True):
        np.testing.assert_allclose(result.numpy(), right, rtol=0, atol=1e-6)  # a few roundings of float32


def test_an_operator_without_kernels_is_not_a_fault_because_models_bring_a_body() -> None:
    for op, call in CALLS.items():
        for found in session(model_of_call(op, call), library=False).run(None, dict(call.inputs)):
            assert np.isfinite(found).all()


def test_the_library_of_these_sources_has_no_problem() -> None:
    library = find_library()
    assert library is not None
    assert problem_of_library(library) is None


def test_each_fault_is_found_and_the_operators_after_a_crash_are_tried_too() -> None:
    import onnxruntime

    start, *problems = problem_of(faulty_library()).split("; ")
    assert start == f"in onnxruntime {onnxruntime.__version__}, LSHSort ends the process (SIGSEGV)"
    assert len(problems) == 2
    assert problems[0].startswith("MaskedAttention fails: ")
    assert problems[0].endswith("MaskedAttention: refused on two lines")
    assert problems[1] == "LSHHash fails: buckets of float32 is wrong"


def test_a_library_that_crashes_at_once_is_one_problem() -> None:
    assert problem_of(faulty_library("-DCRASHES_AT_ONCE")).endswith(", its trial ended with SIGSEGV")


def test_a_file_that_is_not_a_library_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "library.so").write_text("text")
    found = problem_of(tmp_path / "library.so")
    assert "it does not load: " in found
    assert "\n" not in found


def test_doctor_reports_faulty_kernels_in_one_line_if_asked(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFEXPORT_LIBRARY", str(faulty_library()))
    assert cli("doctor").code == 0
    result = cli("doctor", "--load")
    assert result.code == 1
    (line,) = [line for line in result.out.splitlines() if line.startswith("kernel library:")]
    assert "LSHSort ends the process (SIGSEGV); MaskedAttention fails" in line
    assert line.endswith("; update onnxruntime, or run the function bodies: --implementation body")
    library = cli("doctor", "--load", "--json").json["library"]
    assert line == f"kernel library: {library['problem']}; {library['remedy']}"
    assert library["path"] == str(faulty_library())


def test_doctor_tries_no_kernels_without_a_runtime(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setenv("EFFEXPORT_LIBRARY", str(faulty_library()))
    result = cli("doctor", "--load", "--json")
    assert result.code == 1
    assert result.json["library"]["problem"] is None


def test_doctor_finds_a_library_that_is_not_as_it_was_built(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = find_library()
    assert built is not None
    monkeypatch.setattr("effexport.plugins.building.library._sha256_of_state", lambda *state: "0" * 64)
    assert cli("doctor").code == 0
    result = cli("doctor", "--load")
    assert result.code == 1
    assert "is not the library that was built" in result.out
