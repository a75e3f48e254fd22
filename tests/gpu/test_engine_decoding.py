"""Decoding with engines beside the CPU. TensorRT-RTX builds them; ONNX Runtime computes in their place, behind the fake
TensorRT."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.engines import model as engine
from gpu.engines.model import Model
from onnx_in_fake_tensorrt import fake_tensorrt
from small_builds import built_artifact
from small_specs import spec_of

from effexport.artifact import DECODE_STEP, PREFILL, open_artifact
from effexport.base.runtimes import engine_name
from effexport.runners.options import RunOptions
from effexport.runners.runner import limits_from_spec
from effexport.tensorrt.engine_from_onnx import engine_from_onnx
from effexport.tensorrt.runner import decoder_in_trt
from effexport.tensorrt.spec import EngineSpec, profiles_from_texts

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "rtx")


@pytest.fixture
def model(tmp_path: Path) -> Model:
    # the same name and spec as in the tests of the decoder, so that a full run builds it once
    artifact = open_artifact(built_artifact(spec_of("linear", causal=True)))
    made = Model("trt-rtx", artifact.spec, tmp_path)
    shutil.copytree(artifact.path, made.artifact)
    spec = EngineSpec(target="trt-rtx", profiles=profiles_from_texts((), artifact.spec))
    for name in (DECODE_STEP, PREFILL):
        path = made.artifact / engine_name("trt-rtx", name)
        engine_from_onnx(made.artifact / name, spec, path, precision="fp32")
    return made


def test_engines_that_decode_are_compared_with_the_reference_and_the_cpu(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[bool] = []

    def open_decoder(model: Model, settings: RunOptions) -> Any:
        wanted.append(settings.cuda_graph)
        api = fake_tensorrt(model.artifact)
        limits = limits_from_spec(model.spec)
        return decoder_in_trt(model.artifact, model.target, limits, settings, cuda=api.cuda, api=api)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "open_decoder", open_decoder)
    monkeypatch.setattr(engine, "PROMPT", 21)
    monkeypatch.setattr(engine, "STEPS", 4)
    outcome = engine.check_decoding(model)
    assert outcome.problem == ""
    assert set(outcome.data["decoder_on_cpu"]) == {"plain", "graphs"}
    assert set(wanted) == {False, True}

    # one wrong value of the state is found
    def decoded(decoder: Any, model: Model) -> Any:
        found = answers(decoder, model)
        if type(decoder._graphs).__name__ == "TrtGraphs":
            found["steps 1"][-1, -1] = np.nan
        return found

    answers = engine.decoded
    monkeypatch.setattr(engine, "decoded", decoded)
    assert "plain: differs from the decoder on the CPU by nan" in engine.check_decoding(model).problem
