"""The processor's instructions decide how int8 runs, and the advice to users."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from effexport.base import runtimes
from effexport.base.machine import CPU_INFO, Processor, processor_from_file
from effexport.cli.installation import examine_bfloat16, int8_products
from effexport.pipeline.build import quantization_notes

ROOT = Path(__file__).parents[2]
# What `doctor` says of int8, and whether there are tiles of bfloat16.
EXPECTED: dict[str, tuple[str | None, bool]] = {
    "AVX2": (None, False),
    "AVX-512": (None, False),
    "VNNI": ("avx512_vnni", False),
    "AMX": ("amx_int8, avx512_vnni", True),
}
QUESTIONS = re.compile(
    r"cpu_?info\b|lscpu|cpu_capability|cpu\.get_capabilities|cpu\._is_|platform\.processor|py-cpuinfo"
)


def test_the_instructions_of_the_processor_are_read_in_one_place() -> None:
    folders = ("exporter", "models", "plugins", "scripts", "tests", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ".j2")]
    found = {path.relative_to(ROOT).as_posix() for path in files if QUESTIONS.search(path.read_text(encoding="utf-8"))}
    assert found == {"exporter/base/machine.py", Path(__file__).relative_to(ROOT).as_posix()}


def test_tests_stand_on_a_processor_of_their_own() -> None:
    assert Processor.here().flags == {"sse4_2", "avx", "fma", "avx2"}
    assert Processor.here().machine == "x86_64"


def described(folder: Path, text: str, machine: str = "x86_64") -> Processor:
    (folder / "cpuinfo").write_text(text)
    return processor_from_file(folder / "cpuinfo", machine)


def test_name_and_flags_are_those_of_the_first_processor(tmp_path: Path) -> None:
    text = (
        "processor\t: 0\nmodel name\t: A Processor: 2.0GHz\nflags\t\t: fpu avx2\nvmx flags\t: ept\npower management:\n"
        "\nprocessor\t: 1\nmodel name\t: Another\nflags\t\t: fpu avx512_vnni\n"
    )
    assert described(tmp_path, text) == Processor("A Processor: 2.0GHz", "x86_64", frozenset({"fpu", "avx2"}))
    arm = described(tmp_path, "processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd0c\n\n", "aarch64")
    assert (arm.flags, arm.name != "") == ({"fp", "asimd"}, True)


def test_a_machine_without_a_description_has_a_name_and_no_known_instructions(tmp_path: Path) -> None:
    unknown = processor_from_file(tmp_path / "absent", "AMD64")
    assert (unknown.machine, unknown.flags) == ("amd64", frozenset())
    assert unknown.name
    assert not unknown.has_int8_products
    # instructions without overflow, or none that overflow
    assert processor_from_file(tmp_path / "absent", "arm64").has_int8_products
    assert described(tmp_path, "no colon at all\n").flags == frozenset()


def test_every_machine_has_a_processor_with_a_name() -> None:
    assert processor_from_file(CPU_INFO, "x86_64").name


@pytest.mark.parametrize(
    ("flags", "fast"), [("", False), ("avx512f", False), ("avx_vnni", True), ("avx512_vnni", True), ("amx_int8", True)]
)
def test_int8_products_are_found(flags: str, fast: bool) -> None:
    assert Processor("A processor", "x86_64", frozenset(flags.split())).has_int8_products == fast
    assert Processor("A processor", "aarch64", frozenset(flags.split())).has_int8_products


def test_a_training_is_in_bfloat16_where_its_products_are_fast(each_processor: str) -> None:
    assert Processor.here().has_bfloat16_products == (each_processor == "AMX")


@pytest.mark.requires("ort")
def test_exact_products_are_asked_for_where_fast_ones_overflow(each_processor: str) -> None:
    import onnxruntime

    from effexport.runners.options import RunOptions
    from effexport.runners.ort.session import EXACT_INT8_KEY, session_options

    options = session_options(onnxruntime, RunOptions(), None)
    if each_processor in ("AVX2", "AVX-512"):
        assert options.get_session_config_entry(EXACT_INT8_KEY) == "1"
    else:
        with pytest.raises(RuntimeError):
            options.get_session_config_entry(EXACT_INT8_KEY)


@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize("own", [True, False], ids=["what this machine needs", "what every machine can"])
def test_large_products_of_int8_do_not_overflow(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    from effexport.runners.options import RunOptions
    from effexport.runners.ort.session import session_options

    if own:
        here = processor_from_file(CPU_INFO, platform.machine())
        monkeypatch.setattr(Processor, "here", lambda: here)
    codes, weights = np.full((5, 64), 255, np.uint8), np.full((64, 32), 127, np.int8)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "product",
        [value("x", TensorProto.UINT8, [5, 64])],
        [value("y", TensorProto.INT32, [5, 32])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), session_options(onnxruntime, RunOptions(), None), ["CPUExecutionProvider"]
    )
    assert (session.run(None, {"x": codes})[0] == 64 * 255 * 127).all()


def test_doctor_names_the_instructions_for_int8_and_bfloat16(
    each_processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    int8, tiles = EXPECTED[each_processor]
    assert int8_products() == int8
    installed = SimpleNamespace(name="openvino", package=SimpleNamespace(version="2026.4"))
    monkeypatch.setattr(runtimes, "BFLOAT16_RUNTIME", installed)
    found = "amx_bf16; use it with --runtime openvino --precision-hint bf16"
    assert examine_bfloat16() == (found if tiles else None, "")
    installed.package = SimpleNamespace(version=None, remedy="pip install openvino")
    found = "amx_bf16; to use it: pip install openvino, and --runtime openvino"
    assert examine_bfloat16() == (found if tiles else None, "")


def test_an_int8_build_says_where_it_is_slow(each_processor: str) -> None:
    for precision in ("int8", "fp8"):
        record: Any = SimpleNamespace(precision=precision, samples=SimpleNamespace(source="x.npz"))
        slow = [note for note in quantization_notes(record) if "no int8 dot products" in note]
        assert len(slow) == (precision == "int8" and EXPECTED[each_processor][0] is None)
    assert quantization_notes(None) == []
