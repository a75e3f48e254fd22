"""The README's Python examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from effexport.artifact_from_spec import artifact_from_spec
from effexport.spec import build_spec_from_options

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "native")
README = Path(__file__).parents[1] / "README.md"


def test_the_python_examples_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"dim": 32, "heads": 2, "layers": 1, "seq_len": 64}
    for options in ({"variant": "lsh"}, {"variant": "linear", "causal": True}):
        artifact_from_spec(build_spec_from_options(small | options, None), Path("artifacts") / options["variant"])
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 5
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)
    assert names["out"].shape == (2, 1000, 256)
    assert names["hidden"].shape == (1, 9, 32)
    assert [value.name for value in names["session"].get_inputs()] == ["input_ids", "attention_mask"]
