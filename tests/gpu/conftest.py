"""A model whose engine runs on the fake TensorRT."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_machine import Machine
from gpu.engines import fresh_process, latency


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path / "model")
    for module in (fresh_process, latency):
        monkeypatch.setattr(module, "open_runner", made.open)
    return made
