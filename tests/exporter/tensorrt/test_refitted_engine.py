"""Engines with other weights, on the TensorRT made of Python: tests/support/fake_tensorrt.py says what that proves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_tensorrt import FakeCuda, FakeModel, FakeTensorRT, written_engine

from effexport.artifact import Artifact
from effexport.base.errors import UserError
from effexport.export.onnx_graph import load_graph, model_digest
from effexport.tensorrt import engine_from_onnx as refit
from effexport.tensorrt.preparation import prepared_model
from effexport.tensorrt.sidecar import EngineInfo, read_sidecar, write_sidecar
from effexport.tensorrt.spec import EngineSpec, profiles_from_texts

pytestmark = pytest.mark.requires("torch", "onnx", "ort")
Built = Callable[..., Artifact]


class Machine:
    """An engine of target trt for a model, and a machine with a TensorRT that can refit it."""

    def __init__(self, artifact: Artifact, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = artifact.spec
        profiles = profiles_from_texts(("batch=1:2:3",), spec)
        self.spec = EngineSpec(target="trt", profiles=profiles, refittable=True, version_compatible=True)
        self.model, self.engine, self.output = artifact.model_path, folder / "trt.engine", folder / "new" / "trt.engine"
        shapes = tuple(profile.shapes(spec.inputs) for profile in profiles)
        self.info = written_engine(
            self.engine,
            inputs=spec.inputs,
            outputs=spec.outputs,
            profiles=shapes,
            options=self.spec.options(),
            version_compatible=True,
            layers=({"name": "a layer", "type": "SHUFFLE", "outputs": []},),
        )
        fake = FakeModel(spec.inputs, spec.outputs, shapes, lambda feeds: feeds, lambda shapes: {})
        self.api = FakeTensorRT(fake, FakeCuda())
        self.builds: list[tuple[str, ...]] = []
        monkeypatch.setattr(refit, "import_api", lambda target: self.api)
        monkeypatch.setattr(refit, "engine_from_onnx", self.build)
        monkeypatch.setattr(refit, "current_compute_capability", lambda extra: 90)

    def build(self, *arguments: object, remarks: tuple[str, ...], **options: object) -> EngineInfo:
        """In the place of a build, which needs TensorRT's own builder."""
        self.builds.append(remarks)
        return self.info

    def renew(self, spec: EngineSpec | None = None) -> EngineInfo:
        options: dict[str, Any] = {"precision": "fp32", "remarks": (), "on_progress": lambda *_: None}
        return refit.engine_from_engine(self.engine, self.model, spec or self.spec, self.output, **options)


@pytest.fixture
def machine(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(built("softmax", "attention"), tmp_path, monkeypatch)


def test_a_refittable_engine_gets_the_weights_of_the_model_and_a_true_sidecar(machine: Machine) -> None:
    info = machine.renew()
    content = machine.output.read_bytes()
    assert content.startswith(b"refitted with ")
    assert machine.builds == []
    assert read_sidecar(machine.output) == info
    assert info.onnx_sha256 == model_digest(machine.model)
    assert info.engine_sha256 == hashlib.sha256(content).hexdigest()
    assert info.engine_bytes == len(content)
    assert (info.layers, info.profiles, info.options) == (
        machine.info.layers,
        machine.info.profiles,
        machine.info.options,
    )
    assert info.remarks == (refit.REFITTED,)
    assert machine.engine.read_bytes() == b"an engine"


def test_an_engine_with_attention_is_refitted_from_a_graph_with_attention(machine: Machine) -> None:
    write_sidecar(machine.engine, replace(machine.info, implementation={"MaskedAttention": "Attention"}))
    machine.renew()
    prepared = prepared_model(load_graph(machine.model), machine.spec, (90,), use_attention=True)
    assert "Attention" in {node.op_type for node in prepared.model.graph.node}
    digest = hashlib.sha256(prepared.model.SerializeToString()).digest()
    assert machine.output.read_bytes() == b"refitted with " + digest


def test_the_remark_is_not_repeated_by_a_second_refit(machine: Machine) -> None:
    write_sidecar(machine.engine, replace(machine.info, remarks=("something else", refit.REFITTED)))
    assert machine.renew().remarks == ("something else", refit.REFITTED)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"refuses_weights": True}, "the weights are of a lamp"),
        ({"missing_weights": ["val_3"]}, "the model has no weights for val_3"),
        ({"refuses_to_load": True}, "the plan is of a lamp"),
        ({"__version__": "10.16.1.11"}, "was built with TensorRT 11.4.0.106, and 10.16.1.11 is installed"),
    ],
)
def test_an_engine_that_cannot_be_refitted_is_built_again_and_says_why(
    machine: Machine, change: dict[str, Any], reason: str
) -> None:
    for name, value in change.items():
        setattr(machine.api, name, value)
    machine.renew()
    ((remark,),) = machine.builds
    assert remark.startswith("built again, because the engine could not be refitted: ")
    assert reason in remark
    assert not machine.output.exists()


def test_an_engine_that_is_not_refittable_is_built_again(machine: Machine) -> None:
    machine.renew(replace(machine.spec, refittable=False))
    assert machine.builds == [()]


def test_the_spec_of_an_engine_is_read_from_its_sidecar(machine: Machine, tmp_path: Path) -> None:
    assert refit.spec_of_engine(read_sidecar(machine.engine)) == machine.spec
    cache = tmp_path / "timing.cache"
    options = json.loads(json.dumps(replace(machine.spec, timing_cache=cache).options()))
    assert refit.spec_of_engine(replace(machine.info, options=options)).timing_cache is None
    cache.write_bytes(b"")
    assert refit.spec_of_engine(replace(machine.info, options=options)).timing_cache == cache


def test_an_option_of_a_newer_release_is_one_error(machine: Machine) -> None:
    info = replace(machine.info, effexport_version="9.1", options={**machine.info.options, "sparse": True})
    with pytest.raises(UserError, match=r"built by effexport 9\.1 with sparse=True, which effexport .* does not know"):
        refit.spec_of_engine(info)


def test_a_machine_without_a_gpu_cannot_renew_an_engine_of_tensorrt(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(extra: str) -> int:
        raise UserError("there is no GPU")

    assert refit.why_not_renewed(machine.spec) == ""
    monkeypatch.setattr(refit, "current_compute_capability", nothing)
    assert refit.why_not_renewed(machine.spec) == "there is no GPU"
    rtx = EngineSpec(target="trt-rtx", profiles=machine.spec.profiles)
    assert refit.why_not_renewed(rtx) == ""
