"""What the processor has decides how int8 runs, and what users are told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from effexport import environment
from effexport.bench.rendering import advise
from effexport.commands.doctor import examine_bfloat16, instructions


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An x86 processor with these flags."""

    def with_flags(flags: str) -> None:
        file = tmp_path / "cpuinfo"
        file.write_text(f"processor : 0\nflags\t\t: fpu avx2 {flags}\n")
        monkeypatch.setattr(environment, "CPU_INFO", file)
        monkeypatch.setattr("platform.machine", lambda: "x86_64")

    return with_flags


@pytest.mark.parametrize(
    ("flags", "fast"), [("", False), ("avx512f", False), ("avx_vnni", True), ("avx512_vnni", True)]
)
def test_int8_products_are_found(processor: Any, flags: str, fast: bool) -> None:
    processor(flags)
    assert environment.has_int8_products() == fast
    assert (instructions(environment.INT8_PRODUCTS) is not None) == fast


@pytest.mark.requires("ort")
@pytest.mark.parametrize(("flags", "exact"), [("", True), ("avx512_vnni", False)])
def test_exact_products_are_asked_for_where_fast_ones_overflow(processor: Any, flags: str, exact: bool) -> None:
    import onnxruntime

    from effexport.runners.ort.session import EXACT_INT8_KEY, session_options
    from effexport.runners.ort.settings import OrtSettings

    processor(flags)
    options = session_options(onnxruntime, OrtSettings(), None)
    if exact:
        assert options.get_session_config_entry(EXACT_INT8_KEY) == "1"
    else:
        with pytest.raises(RuntimeError):
            options.get_session_config_entry(EXACT_INT8_KEY)


def test_bfloat16_is_named_where_the_processor_has_tiles_for_it(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries: Any = [SimpleNamespace(label=label) for label in ("lsh, 4 rounds", "aft-simple", "softmax", "softmax")]
    openvino = SimpleNamespace(package=SimpleNamespace(version="2026.4", remedy="pip install openvino"))
    monkeypatch.setitem(advise.RUNTIMES, "openvino", openvino)
    processor("")
    assert list(advise.bfloat16_here(entries)) == []
    assert examine_bfloat16()[0] is None
    processor("amx_bf16")
    (sentence,) = advise.bfloat16_here(entries)
    assert "aft-simple, softmax with --runtime openvino --precision-hint bf16" in sentence
    assert "use it with --runtime openvino" in str(examine_bfloat16()[0])
    openvino.package.version = None
    assert list(advise.bfloat16_here(entries)) == []
