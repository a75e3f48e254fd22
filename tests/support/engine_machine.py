"""A model in an artifact folder with an engine of the fake TensorRT; fake_tensorrt.py says what its fakes prove."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fake_tensorrt import FakeCuda, FakeModel, FakeTensorRT, written_engine
from gpu.engines import model

from effexport.base.spec import BuildSpec, build_spec_from_options
from effexport.export.module_source import module_from_seed
from effexport.proof.module_runs import run_module
from effexport.runners.options import RunOptions
from effexport.tensorrt.runner import TrtRunner

SEQ_LEN = 64
Spoil = Callable[[np.ndarray], None]


class Machine:
    """A model in an artifact folder with an engine of the fake TensorRT, which computes what PyTorch computes.

    spoil: changes what the engine answers.
    """

    def __init__(self, folder: Path) -> None:
        fields = {"variant": "softmax", "dim": 4, "heads": 1, "layers": 1, "seq_len": SEQ_LEN}
        self.spec: BuildSpec = build_spec_from_options(fields, None)
        self.module = module_from_seed(self.spec)
        self.model = model.Model("trt", self.spec, folder)
        self.spoil: Spoil = lambda output: None
        self.cudas: list[FakeCuda] = []
        self.capture_fails = False
        self.write_engine(self.model.engine)

    def write_engine(self, engine: Path, **changed: Any) -> None:
        """An engine and its sidecar. changed: fields of the sidecar."""
        written_engine(engine, **{**self.fields, **changed})

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the sidecar."""
        shapes = ((1, 1), (1, SEQ_LEN), (4, SEQ_LEN))
        return {
            "inputs": self.spec.inputs,
            "outputs": self.spec.outputs,
            "profiles": ({"input_ids": shapes, "attention_mask": shapes},),
            "implementation": {"LSHSort": "plugin"},
        }

    def compute(self, feeds: dict[str, np.ndarray], spoil: Spoil | None = None) -> dict[str, np.ndarray]:
        (output,) = run_module(self.module, self.spec, feeds).values()
        output = output.copy()
        (spoil or self.spoil)(output)
        return {"last_hidden_state": output}

    def open(self, engine: Path, settings: RunOptions | None = None, spoil: Spoil | None = None) -> TrtRunner:
        """A runner of any engine file. spoil: for this runner only."""

        def output_shapes(shapes: Any) -> dict[str, tuple[int, ...]]:
            return {"last_hidden_state": (*shapes["input_ids"], 4)}

        inputs, outputs, profiles, _ = self.fields.values()
        fake = FakeModel(inputs, outputs, profiles, lambda feeds: self.compute(feeds, spoil), output_shapes)
        self.cudas.append(FakeCuda())
        api = FakeTensorRT(fake, self.cudas[-1])
        api.capture_fails = self.capture_fails
        return TrtRunner(engine, settings, cuda=self.cudas[-1], api=api)  # type: ignore[arg-type]


def series(used: Callable[[int], float], runs: int = 2000) -> list[tuple[int, int]]:
    return [(run, int(used(run))) for run in range(0, runs + 1, 100)]
